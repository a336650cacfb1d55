#define _GNU_SOURCE
#include "vring.h"

#include <endian.h>
#include <stddef.h>
#include <sys/epoll.h>
#include <unistd.h>

_Static_assert(__BYTE_ORDER == __LITTLE_ENDIAN, "virtio 1.x rings are little-endian; so is every host we build for");

/* One load each: the driver may change the field between two. */
#define READ_ONCE(field) __atomic_load_n(&(field), __ATOMIC_RELAXED)
#define WRITE_ONCE(field, value) __atomic_store_n(&(field), (value), __ATOMIC_RELAXED)

static void close_fd(int *fd)
{
	if (*fd >= 0)
		close(*fd);
	*fd = -1;
}

static void signal_fd(int fd)
{
	uint64_t one = 1;

	/* Full or gone: the driver has an interrupt pending, or nobody listens. */
	if (fd >= 0 && write(fd, &one, sizeof(one)) < 0)
		return;
}

void queue_init(struct queue *queue, int epoll_fd, uint64_t epoll_tag)
{
	*queue = (struct queue){
		.epoll_fd = epoll_fd,
		.epoll_tag = epoll_tag,
		.kick_fd = -1,
		.call_fd = -1,
		.err_fd = -1,
	};
}

bool queue_resolve(struct queue *queue, const struct memory *memory)
{
	uint64_t num = queue->num;

	if (!queue->addressed || num == 0)
		return false;
	/* virtio 1.2 §2.7: alignments 16, 2, 4; both rings end with the other side's event index. */
	if (queue->desc_address % 16 || queue->avail_address % 2 || queue->used_address % 4)
		return false;
	queue->desc = memory_at_vmm_address(memory, queue->desc_address, sizeof(struct vring_desc) * num);
	queue->avail = memory_at_vmm_address(memory, queue->avail_address, sizeof(struct vring_avail) + 2 * num + 2);
	queue->used = memory_at_vmm_address(memory, queue->used_address,
					    sizeof(struct vring_used) + sizeof(struct vring_used_elem) * num + 2);
	return queue->desc != NULL && queue->avail != NULL && queue->used != NULL;
}

static void forget_kick(struct queue *queue)
{
	/* The VMM has the same open file, so closing our descriptor alone would leave it in the epoll set. */
	if (queue->kick_fd >= 0)
		epoll_ctl(queue->epoll_fd, EPOLL_CTL_DEL, queue->kick_fd, NULL);
	close_fd(&queue->kick_fd);
}

bool queue_start(struct queue *queue, const struct memory *memory, int kick_fd)
{
	struct epoll_event event = {.events = EPOLLIN | EPOLLET, .data.u64 = queue->epoll_tag};

	forget_kick(queue);
	queue->kick_fd = kick_fd;
	if (!queue_resolve(queue, memory) || epoll_ctl(queue->epoll_fd, EPOLL_CTL_ADD, kick_fd, &event) < 0)
		return false;
	queue->next_used = READ_ONCE(queue->used->idx);
	queue->signalled_used = queue->next_used;
	queue->signalled = false;
	queue->broken = false;
	queue->started = true;
	return true;
}

void queue_stop(struct queue *queue)
{
	queue->started = false;
	queue->broken = false;
	queue->addressed = false;
	queue->desc = NULL;
	queue->avail = NULL;
	queue->used = NULL;
	forget_kick(queue);
}

void queue_clear(struct queue *queue)
{
	queue_stop(queue);
	close_fd(&queue->call_fd);
	close_fd(&queue->err_fd);
	queue_init(queue, queue->epoll_fd, queue->epoll_tag);
}

void queue_kicked(const struct queue *queue)
{
	uint64_t count;

	/* Nothing to take: the edge was for a kick already taken. */
	if (queue->kick_fd >= 0 && read(queue->kick_fd, &count, sizeof(count)) < 0)
		return;
}

void queue_break(struct queue *queue)
{
	if (queue->broken)
		return;
	queue->broken = true;
	signal_fd(queue->err_fd);
}

static enum peek broken(struct queue *queue)
{
	queue_break(queue);
	return PEEK_BROKEN;
}

static uint16_t available(const struct queue *queue)
{
	/* Pairs with the driver's barrier between filling entries and moving the index. */
	return (uint16_t)(__atomic_load_n(&queue->avail->idx, __ATOMIC_ACQUIRE) - queue->next_avail);
}

enum peek queue_peek(struct queue *queue, const struct memory *memory, enum direction direction, uint16_t ahead,
		     struct iovec *iov, unsigned capacity, struct chain *chain)
{
	uint16_t waiting = available(queue);
	uint16_t index;
	uint64_t total = 0;
	unsigned entries = 0;

	if (waiting > queue->num)
		return broken(queue);
	if (ahead >= waiting)
		return PEEK_NONE;
	index = READ_ONCE(queue->avail->ring[(uint16_t)(queue->next_avail + ahead) % queue->num]);
	chain->head = index;

	for (unsigned length = 1;; length++) {
		struct vring_desc *slot;
		uint64_t address;
		uint32_t size;
		uint16_t flags;
		int added;

		if (index >= queue->num || length > queue->num)
			return broken(queue);
		slot = &queue->desc[index];
		address = READ_ONCE(slot->addr);
		size = READ_ONCE(slot->len);
		flags = READ_ONCE(slot->flags);
		index = READ_ONCE(slot->next);

		if (flags & VRING_DESC_F_INDIRECT)
			return broken(queue);
		if (!!(flags & VRING_DESC_F_WRITE) != (direction == DEVICE_TO_DRIVER))
			return broken(queue);
		total += size;
		if (total > UINT32_MAX)
			return broken(queue);
		added = memory_iov(memory, address, size, iov + entries, capacity - entries);
		if (added == -2)
			return PEEK_NO_ROOM;
		if (added < 0)
			return broken(queue);
		entries += (unsigned)added;
		if (!(flags & VRING_DESC_F_NEXT))
			break;
	}
	chain->iov = iov;
	chain->iov_count = entries;
	chain->size_bytes = (uint32_t)total;
	return PEEK_CHAIN;
}

void queue_push(struct queue *queue, uint16_t head, uint32_t written)
{
	struct vring_used_elem *slot = &queue->used->ring[queue->next_used % queue->num];

	WRITE_ONCE(slot->id, (uint32_t)head);
	WRITE_ONCE(slot->len, written);
	queue->next_avail++;
	queue->next_used++;
	/* The entry and the buffer it names are visible before the index that announces them. */
	__atomic_store_n(&queue->used->idx, queue->next_used, __ATOMIC_RELEASE);
}

void queue_notify(struct queue *queue)
{
	uint16_t before = queue->signalled_used;
	bool wanted;

	if (before == queue->next_used)
		return;
	queue->signalled_used = queue->next_used;
	/* Our index must be out before we look whether the driver waits for it; the driver does the reverse. */
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
	if (queue->event_idx)
		wanted = vring_need_event(READ_ONCE(queue->avail->ring[queue->num]), queue->next_used, before);
	else
		wanted = !(READ_ONCE(queue->avail->flags) & VRING_AVAIL_F_NO_INTERRUPT);
	if (wanted || !queue->signalled)
		signal_fd(queue->call_fd);
	queue->signalled = true;
}

void queue_set_call(struct queue *queue, int fd)
{
	close_fd(&queue->call_fd);
	queue->call_fd = fd;
	/* What was pushed before may have been announced on the old descriptor, where nobody looked. */
	if (queue->started)
		signal_fd(fd);
}

void queue_set_err(struct queue *queue, int fd)
{
	close_fd(&queue->err_fd);
	queue->err_fd = fd;
}

static uint16_t *avail_event(const struct queue *queue)
{
	return (uint16_t *)(void *)&queue->used->ring[queue->num];
}

bool queue_await_kick(struct queue *queue)
{
	if (queue->event_idx)
		WRITE_ONCE(*avail_event(queue), queue->next_avail);
	else
		WRITE_ONCE(queue->used->flags, 0);
	/* The request must be out before the last look, or a driver that filled the ring just now stays silent. */
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
	return available(queue) != 0;
}

void queue_no_kick(struct queue *queue)
{
	/* With event indices an old avail_event says the same. */
	if (!queue->event_idx)
		WRITE_ONCE(queue->used->flags, VRING_USED_F_NO_NOTIFY);
}
