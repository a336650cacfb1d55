/* One split virtqueue (virtio 1.2 §2.7), the device's side.
 *
 * The driver owns the descriptor table and the available ring and may write anything there at any time; we own the used
 * ring. Every field is read once, into a local, and checked: head and next index below `num`, chain no longer than `num`,
 * each buffer inside guest memory, total length within 32 bits, one direction for the whole chain, no more new heads than
 * `num`. A queue that fails a check is `broken`: nothing is read from or written to it until it is set up again.
 *
 * Chains are taken in two steps, so that a reader of a socket may look at more buffers than it ends up filling:
 * queue_peek() any number, fill some, then queue_push() those in the same order. queue_notify() interrupts the driver once
 * for the whole batch.
 *
 * VIRTIO_RING_F_EVENT_IDX is spoken when negotiated. Indirect descriptors are not offered, so one is a fault.
 */
#ifndef SANDBOX_VSOCK_VRING_H
#define SANDBOX_VSOCK_VRING_H

#include <linux/virtio_ring.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/uio.h>

#include "memory.h"

#define QUEUE_SIZE_MAX 1024u /* VIRTQUEUE_MAX_SIZE in QEMU */

enum direction { DRIVER_TO_DEVICE, DEVICE_TO_DRIVER };

struct queue {
	/* What the front-end said; kept so that the addresses can be looked up again in a new memory table. */
	int epoll_fd;	    /* where kick_fd is waited for, edge-triggered */
	uint64_t epoll_tag; /* what an event of it carries */
	uint16_t num;
	bool addressed;
	uint64_t desc_address, avail_address, used_address;
	int kick_fd, call_fd, err_fd;
	bool event_idx;
	bool enabled;

	/* Valid from queue_start() to queue_stop(). */
	bool started;
	bool broken;
	struct vring_desc *desc;
	struct vring_avail *avail;
	struct vring_used *used;
	uint16_t next_avail; /* the next entry of the available ring to take */
	uint16_t next_used;
	uint16_t signalled_used; /* next_used when the driver was last interrupted */
	bool signalled;          /* false: the first batch always interrupts */
};

struct chain {
	uint16_t head;
	uint32_t size_bytes;
	struct iovec *iov;
	unsigned iov_count;
};

enum peek { PEEK_NONE, PEEK_CHAIN, PEEK_NO_ROOM, PEEK_BROKEN };

void queue_init(struct queue *queue, int epoll_fd, uint64_t epoll_tag);

/* Looks the rings up in `memory` and begins at next_avail, with kick_fd (now the queue's) watched. False: some part is
 * missing, misaligned or outside memory, or the descriptor cannot be waited for. */
bool queue_start(struct queue *queue, const struct memory *memory, int kick_fd);
/* Looks the rings up again after the memory table changed; false if they are not in it. */
bool queue_resolve(struct queue *queue, const struct memory *memory);
/* Takes a kick off the descriptor. */
void queue_kicked(const struct queue *queue);
/* Forgets the rings and the kick descriptor. next_avail stays, for the front-end to ask for; so do the call and error
 * descriptors, which some front-ends send only once. */
void queue_stop(struct queue *queue);
/* As never set up. */
void queue_clear(struct queue *queue);
/* Takes the descriptor (or -1) in place of the one before. */
void queue_set_call(struct queue *queue, int fd);
void queue_set_err(struct queue *queue, int fd);

static inline bool queue_running(const struct queue *queue)
{
	return queue->started && queue->enabled && !queue->broken;
}

/* The chain `ahead` places after the next one, its buffers in iov[0..capacity). PEEK_NO_ROOM: more than `capacity`. */
enum peek queue_peek(struct queue *queue, const struct memory *memory, enum direction direction, uint16_t ahead,
		     struct iovec *iov, unsigned capacity, struct chain *chain);
/* Gives the oldest peeked chain back to the driver, `written` bytes of it filled. */
void queue_push(struct queue *queue, uint16_t head, uint32_t written);
/* Interrupts the driver if it wants to hear of what was pushed since the last time. */
void queue_notify(struct queue *queue);

/* Asks the driver to kick. True if chains have arrived meanwhile: then look again instead of waiting. */
bool queue_await_kick(struct queue *queue);
/* Asks it not to, while we are looking anyway. */
void queue_no_kick(struct queue *queue);
/* Marks the queue as broken and tells the VMM, if it gave an error descriptor. */
void queue_break(struct queue *queue);

#endif
