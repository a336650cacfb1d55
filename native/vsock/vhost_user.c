#define _GNU_SOURCE
#include "vhost_user.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/virtio_config.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* Numbers from QEMU's docs/interop/vhost-user.rst. */
enum request {
	GET_FEATURES = 1,
	SET_FEATURES = 2,
	SET_OWNER = 3,
	SET_MEM_TABLE = 5,
	SET_VRING_NUM = 8,
	SET_VRING_ADDR = 9,
	SET_VRING_BASE = 10,
	GET_VRING_BASE = 11,
	SET_VRING_KICK = 12,
	SET_VRING_CALL = 13,
	SET_VRING_ERR = 14,
	GET_PROTOCOL_FEATURES = 15,
	SET_PROTOCOL_FEATURES = 16,
	SET_VRING_ENABLE = 18,
	GET_CONFIG = 24,
	REQUEST_COUNT,
};

#define FLAG_VERSION_1	1u
#define FLAG_REPLY	4u
#define FLAG_NEED_REPLY 8u

#define F_PROTOCOL_FEATURES  (UINT64_C(1) << 30) /* VHOST_USER_F_PROTOCOL_FEATURES */
#define P_REPLY_ACK	     (UINT64_C(1) << 3)	 /* VHOST_USER_PROTOCOL_F_REPLY_ACK */
#define P_CONFIG	     (UINT64_C(1) << 9)	 /* VHOST_USER_PROTOCOL_F_CONFIG */
#define RING_NO_FD	     0x100u		 /* VHOST_USER_VRING_NOFD_MASK */

#define OFFERED_FEATURES ((UINT64_C(1) << VIRTIO_F_VERSION_1) | (UINT64_C(1) << VIRTIO_RING_F_EVENT_IDX) | F_PROTOCOL_FEATURES)
#define OFFERED_PROTOCOL_FEATURES (P_REPLY_ACK | P_CONFIG)

struct vring_state {
	uint32_t index;
	uint32_t value;
};

struct vring_address {
	uint32_t index;
	uint32_t flags;
	uint64_t desc;
	uint64_t used;
	uint64_t avail;
	uint64_t log;
};

struct memory_table {
	uint32_t count;
	uint32_t padding;
	struct memory_region_wire regions[MEMORY_REGIONS_MAX];
};

struct config {
	uint32_t offset;
	uint32_t size;
	uint32_t flags;
	uint8_t bytes[256]; /* VHOST_USER_MAX_CONFIG_SPACE_SIZE */
};

_Static_assert(sizeof(struct memory_table) <= MESSAGE_PAYLOAD_MAX && sizeof(struct config) <= MESSAGE_PAYLOAD_MAX,
	       "every payload fits");

#define CONFIG_HEADER_BYTES 12u
#define TABLE_HEADER_BYTES  8u

static uint32_t request_of(const struct frontend *frontend)
{
	return frontend->header[0];
}

static uint32_t size_of(const struct frontend *frontend)
{
	return frontend->header[2];
}

static const char *reply(struct frontend *frontend, const void *payload, uint32_t size)
{
	uint8_t message[sizeof(frontend->header) + sizeof(struct config)];
	const uint32_t header[3] = {request_of(frontend), FLAG_VERSION_1 | FLAG_REPLY, size};

	memcpy(message, header, sizeof(header));
	memcpy(message + sizeof(header), payload, size);
	size += sizeof(header);
	/* A reply is far smaller than a socket's buffer; one that does not fit means its reader has stopped. */
	if (send(frontend->fd, message, size, MSG_DONTWAIT | MSG_NOSIGNAL) != (ssize_t)size)
		return "the VMM does not take our reply";
	return NULL;
}

static const char *reply_u64(struct frontend *frontend, uint64_t value)
{
	return reply(frontend, &value, sizeof(value));
}

static uint64_t payload_u64(const struct frontend *frontend)
{
	uint64_t value;

	memcpy(&value, frontend->payload, sizeof(value));
	return value;
}

static int take_fd(struct frontend *frontend)
{
	int fd = frontend->fds[0];

	frontend->fds[0] = frontend->fds[--frontend->fd_count];
	return fd;
}

static struct queue *queue_of(struct frontend *frontend, uint32_t index)
{
	return index < QUEUE_COUNT ? &frontend->queues[index] : NULL;
}

static const char *get_features(struct frontend *frontend)
{
	return reply_u64(frontend, OFFERED_FEATURES);
}

static const char *set_features(struct frontend *frontend)
{
	uint64_t features = payload_u64(frontend);

	if (features & ~OFFERED_FEATURES)
		return "feature that was not offered";
	for (unsigned i = 0; i < QUEUE_COUNT; i++) {
		if (frontend->queues[i].started)
			return features == frontend->features ? NULL : "features changed while a queue runs";
	}
	for (unsigned i = 0; i < QUEUE_COUNT; i++) {
		frontend->queues[i].event_idx = features & (UINT64_C(1) << VIRTIO_RING_F_EVENT_IDX);
		/* Without protocol features there is no SET_VRING_ENABLE: queues are born enabled. */
		frontend->queues[i].enabled = !(features & F_PROTOCOL_FEATURES);
	}
	frontend->features = features;
	return NULL;
}

static const char *get_protocol_features(struct frontend *frontend)
{
	return reply_u64(frontend, OFFERED_PROTOCOL_FEATURES);
}

static const char *set_protocol_features(struct frontend *frontend)
{
	uint64_t features = payload_u64(frontend);

	if (features & ~OFFERED_PROTOCOL_FEATURES)
		return "protocol feature that was not offered";
	frontend->reply_ack = features & P_REPLY_ACK;
	return NULL;
}

static const char *set_owner(struct frontend *frontend)
{
	for (unsigned i = 0; i < QUEUE_COUNT; i++)
		queue_clear(&frontend->queues[i]);
	memory_clear(&frontend->memory);
	return NULL;
}

static const char *set_mem_table(struct frontend *frontend)
{
	struct memory_table table;
	const char *why;

	memcpy(&table, frontend->payload, sizeof(table));
	if (size_of(frontend) < TABLE_HEADER_BYTES || table.count > MEMORY_REGIONS_MAX ||
	    size_of(frontend) != TABLE_HEADER_BYTES + table.count * sizeof(table.regions[0]))
		return "memory table of the wrong length";
	if (frontend->fd_count != table.count)
		return "memory table without a descriptor for each region";
	if (memory_replace(&frontend->memory, table.regions, frontend->fds, table.count, &why) < 0)
		return why;
	for (unsigned i = 0; i < QUEUE_COUNT; i++) {
		if (frontend->queues[i].started && !queue_resolve(&frontend->queues[i], &frontend->memory))
			return "memory table without a running queue's rings";
	}
	return NULL;
}

static const char *set_vring_num(struct frontend *frontend)
{
	struct vring_state state;
	struct queue *queue;

	memcpy(&state, frontend->payload, sizeof(state));
	queue = queue_of(frontend, state.index);
	if (queue == NULL)
		return "no such queue";
	if (state.value == 0 || state.value > QUEUE_SIZE_MAX || (state.value & (state.value - 1)))
		return "queue size is not a power of two within 1024";
	queue_stop(queue);
	queue->num = (uint16_t)state.value;
	return NULL;
}

static const char *set_vring_base(struct frontend *frontend)
{
	struct vring_state state;
	struct queue *queue;

	memcpy(&state, frontend->payload, sizeof(state));
	queue = queue_of(frontend, state.index);
	if (queue == NULL)
		return "no such queue";
	if (state.value > UINT16_MAX)
		return "queue position beyond 16 bits";
	queue_stop(queue);
	queue->next_avail = (uint16_t)state.value;
	return NULL;
}

static const char *get_vring_base(struct frontend *frontend)
{
	struct vring_state state;
	struct queue *queue;

	memcpy(&state, frontend->payload, sizeof(state));
	queue = queue_of(frontend, state.index);
	if (queue == NULL)
		return "no such queue";
	queue_stop(queue);
	state.value = queue->next_avail;
	return reply(frontend, &state, sizeof(state));
}

static const char *set_vring_addr(struct frontend *frontend)
{
	struct vring_address address;
	struct queue *queue;

	memcpy(&address, frontend->payload, sizeof(address));
	queue = queue_of(frontend, address.index);
	if (queue == NULL)
		return "no such queue";
	queue->desc_address = address.desc;
	queue->used_address = address.used;
	queue->avail_address = address.avail;
	queue->addressed = true;
	if (queue->started && !queue_resolve(queue, &frontend->memory))
		return "rings outside guest memory or misaligned";
	return NULL;
}

/* The queue a KICK, CALL or ERR message is about, and its descriptor or -1. */
static const char *ring_fd(struct frontend *frontend, struct queue **queue, int *fd)
{
	uint64_t value = payload_u64(frontend);
	bool absent = value & RING_NO_FD;
	int flags;

	if (value & ~(uint64_t)(RING_NO_FD | 0xff))
		return "unknown bits in a queue descriptor message";
	*queue = queue_of(frontend, value & 0xff);
	if (*queue == NULL)
		return "no such queue";
	if (frontend->fd_count != (absent ? 0 : 1))
		return "queue descriptor missing or not announced";
	*fd = -1;
	if (absent)
		return NULL;
	/* Whatever it is, reading or writing it must not hold us. */
	flags = fcntl(frontend->fds[0], F_GETFL);
	if (flags < 0 || fcntl(frontend->fds[0], F_SETFL, flags | O_NONBLOCK) < 0)
		return "queue descriptor refuses to be non-blocking";
	*fd = take_fd(frontend);
	return NULL;
}

static const char *set_vring_kick(struct frontend *frontend)
{
	struct queue *queue;
	int fd;
	const char *why = ring_fd(frontend, &queue, &fd);

	if (why != NULL)
		return why;
	if (fd < 0)
		return "queue to be polled without a kick descriptor";
	if (!queue_start(queue, &frontend->memory, fd))
		return "queue started without size or usable rings, or with a descriptor that cannot be waited for";
	return NULL;
}

static const char *set_vring_call(struct frontend *frontend)
{
	struct queue *queue;
	int fd;
	const char *why = ring_fd(frontend, &queue, &fd);

	if (why == NULL)
		queue_set_call(queue, fd);
	return why;
}

static const char *set_vring_err(struct frontend *frontend)
{
	struct queue *queue;
	int fd;
	const char *why = ring_fd(frontend, &queue, &fd);

	if (why == NULL)
		queue_set_err(queue, fd);
	return why;
}

static const char *set_vring_enable(struct frontend *frontend)
{
	struct vring_state state;
	struct queue *queue;

	memcpy(&state, frontend->payload, sizeof(state));
	queue = queue_of(frontend, state.index);
	if (queue == NULL)
		return "no such queue";
	if (state.value > 1)
		return "queue neither enabled nor disabled";
	queue->enabled = state.value;
	return NULL;
}

static const char *get_config(struct frontend *frontend)
{
	struct config config;

	memcpy(&config, frontend->payload, sizeof(config));
	if (size_of(frontend) < CONFIG_HEADER_BYTES || config.size > sizeof(config.bytes) ||
	    size_of(frontend) != CONFIG_HEADER_BYTES + config.size)
		return "configuration request of the wrong length";
	/* The protocol's way to refuse is an empty payload. */
	if (config.offset > sizeof(frontend->guest_cid) || config.size > sizeof(frontend->guest_cid) - config.offset)
		return reply(frontend, &config, 0);
	memcpy(config.bytes, (const uint8_t *)&frontend->guest_cid + config.offset, config.size);
	return reply(frontend, &config, CONFIG_HEADER_BYTES + config.size);
}

#define ANY_SIZE UINT32_MAX

/* Everything the VMM may ask. Requests that answer by themselves never get the u64 of FLAG_NEED_REPLY as well. */
static const struct rule {
	const char *(*obey)(struct frontend *frontend);
	uint32_t size;
	unsigned fds_max;
	bool answers;
} rules[REQUEST_COUNT] = {
	[GET_FEATURES] = {get_features, 0, 0, true},
	[SET_FEATURES] = {set_features, 8, 0, false},
	[SET_OWNER] = {set_owner, 0, 0, false},
	[SET_MEM_TABLE] = {set_mem_table, ANY_SIZE, MEMORY_REGIONS_MAX, false},
	[SET_VRING_NUM] = {set_vring_num, sizeof(struct vring_state), 0, false},
	[SET_VRING_ADDR] = {set_vring_addr, sizeof(struct vring_address), 0, false},
	[SET_VRING_BASE] = {set_vring_base, sizeof(struct vring_state), 0, false},
	[GET_VRING_BASE] = {get_vring_base, sizeof(struct vring_state), 0, true},
	[SET_VRING_KICK] = {set_vring_kick, 8, 1, false},
	[SET_VRING_CALL] = {set_vring_call, 8, 1, false},
	[SET_VRING_ERR] = {set_vring_err, 8, 1, false},
	[GET_PROTOCOL_FEATURES] = {get_protocol_features, 0, 0, true},
	[SET_PROTOCOL_FEATURES] = {set_protocol_features, 8, 0, false},
	[SET_VRING_ENABLE] = {set_vring_enable, sizeof(struct vring_state), 0, false},
	[GET_CONFIG] = {get_config, ANY_SIZE, 0, true},
};

static const char *header_fault(const struct frontend *frontend)
{
	uint32_t request = request_of(frontend);
	uint32_t flags = frontend->header[1];

	if (request >= REQUEST_COUNT || rules[request].obey == NULL)
		return "unknown request";
	if ((flags & ~FLAG_NEED_REPLY) != FLAG_VERSION_1)
		return "unknown message flags";
	if (size_of(frontend) > MESSAGE_PAYLOAD_MAX ||
	    (rules[request].size != ANY_SIZE && size_of(frontend) != rules[request].size))
		return "payload of the wrong length";
	return NULL;
}

static void close_fds(struct frontend *frontend)
{
	while (frontend->fd_count > 0)
		close(frontend->fds[--frontend->fd_count]);
}

static const char *collect_fds(struct frontend *frontend, struct msghdr *message)
{
	const char *why = NULL;

	for (struct cmsghdr *control = CMSG_FIRSTHDR(message); control != NULL; control = CMSG_NXTHDR(message, control)) {
		size_t count = (control->cmsg_len - CMSG_LEN(0)) / sizeof(int);

		if (control->cmsg_level != SOL_SOCKET || control->cmsg_type != SCM_RIGHTS)
			continue;
		for (size_t i = 0; i < count; i++) {
			int fd;

			memcpy(&fd, CMSG_DATA(control) + i * sizeof(int), sizeof(fd));
			if (frontend->fd_count < MEMORY_REGIONS_MAX) {
				frontend->fds[frontend->fd_count++] = fd;
			} else {
				close(fd);
				why = "too many descriptors";
			}
		}
	}
	return message->msg_flags & MSG_CTRUNC ? "too many descriptors" : why;
}

/* Bytes of this call, 0 at end of stream, -1 when it would block, -2 with *why. */
static ssize_t receive_part(struct frontend *frontend, void *target, size_t size, const char **why)
{
	union {
		char bytes[CMSG_SPACE(MEMORY_REGIONS_MAX * sizeof(int))];
		struct cmsghdr align;
	} control;
	struct iovec part = {target, size};
	struct msghdr message = {
		.msg_iov = &part,
		.msg_iovlen = 1,
		.msg_control = control.bytes,
		.msg_controllen = sizeof(control.bytes),
	};
	ssize_t got = recvmsg(frontend->fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);

	if (got < 0) {
		if (errno == EAGAIN || errno == EINTR)
			return -1;
		/* The VMM died with a message of ours unread. */
		if (errno == ECONNRESET)
			return 0;
		*why = "receiving from the VMM";
		return -2;
	}
	*why = collect_fds(frontend, &message);
	return *why != NULL ? -2 : got;
}

static const char *obey(struct frontend *frontend)
{
	const struct rule *rule = &rules[request_of(frontend)];
	const char *why;

	if (frontend->fd_count > rule->fds_max)
		return "descriptors beside a message that takes none";
	/* Handlers read whole structures: what the sender left out is zero. */
	memset(frontend->payload + size_of(frontend), 0, sizeof(frontend->payload) - size_of(frontend));
	why = rule->obey(frontend);
	if (why == NULL && frontend->reply_ack && (frontend->header[1] & FLAG_NEED_REPLY) && !rule->answers)
		why = reply_u64(frontend, 0);
	return why;
}

enum frontend_event frontend_receive(struct frontend *frontend, const char **why)
{
	for (;;) {
		uint32_t have = frontend->received_bytes;
		bool in_header = have < sizeof(frontend->header);
		uint32_t whole = sizeof(frontend->header) + (in_header ? 0 : size_of(frontend));
		ssize_t got;

		if (!in_header && have == whole) {
			frontend->received_bytes = 0;
			*why = obey(frontend);
			close_fds(frontend);
			return *why != NULL ? FRONTEND_FAULT : FRONTEND_MESSAGE;
		}
		got = receive_part(frontend,
				   in_header ? (uint8_t *)frontend->header + have
					     : frontend->payload + (have - sizeof(frontend->header)),
				   whole - have, why);
		if (got == -1)
			return FRONTEND_IDLE;
		if (got == -2)
			return FRONTEND_FAULT;
		if (got == 0) {
			if (have == 0)
				return FRONTEND_CLOSED;
			*why = "end of stream within a message";
			return FRONTEND_FAULT;
		}
		frontend->received_bytes += (uint32_t)got;
		if (frontend->received_bytes == sizeof(frontend->header)) {
			*why = header_fault(frontend);
			if (*why != NULL)
				return FRONTEND_FAULT;
		}
	}
}

void frontend_init(struct frontend *frontend, int fd, uint64_t guest_cid, int epoll_fd, uint64_t tag)
{
	*frontend = (struct frontend){.fd = fd, .guest_cid = guest_cid};
	for (unsigned i = 0; i < QUEUE_COUNT; i++)
		queue_init(&frontend->queues[i], epoll_fd, tag + i);
}

void frontend_clear(struct frontend *frontend)
{
	close_fds(frontend);
	for (unsigned i = 0; i < QUEUE_COUNT; i++)
		queue_clear(&frontend->queues[i]);
	memory_clear(&frontend->memory);
}
