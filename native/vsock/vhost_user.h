/* The vhost-user conversation with the VMM (the front-end): set-up of memory and queues, nothing of vsock itself.
 *
 * Primer. The VMM sends messages on a stream socket: a header {request u32, flags u32, size u32}, `size` bytes of payload,
 * descriptors beside the first byte. Little-endian. Flags: bits 0-1 version 1, bit 2 reply, bit 3 "answer with a u64, 0 for
 * done". Some requests have a reply of their own. Order as QEMU sends it: GET_FEATURES, GET/SET_PROTOCOL_FEATURES,
 * SET_OWNER, SET_VRING_CALL, GET_CONFIG; when the guest's driver starts SET_FEATURES, SET_MEM_TABLE, then per queue
 * SET_VRING_NUM, BASE, ADDR, KICK, CALL, ENABLE; when it stops GET_VRING_BASE per queue. A device unplugged and plugged
 * again starts over on the same connection.
 *
 * The VMM is not trusted: it may have been taken over by its guest. Length, number of descriptors and every value are
 * checked; the first message that fails ends the conversation, and so this process. Nothing is requested of the VMM.
 */
#ifndef SANDBOX_VSOCK_VHOST_USER_H
#define SANDBOX_VSOCK_VHOST_USER_H

#include <stdbool.h>
#include <stdint.h>

#include "memory.h"
#include "vring.h"

enum { QUEUE_RX, QUEUE_TX, QUEUE_EVENT, QUEUE_COUNT }; /* virtio 1.2 §5.10.2 */

#define MESSAGE_PAYLOAD_MAX 512u /* the longest known is SET_MEM_TABLE: 8 + 8 * 32 */

struct frontend {
	int fd;
	uint64_t guest_cid;
	uint64_t features;
	bool reply_ack;
	struct memory memory;
	struct queue queues[QUEUE_COUNT];

	/* The message being received. */
	uint32_t header[3];
	uint8_t payload[MESSAGE_PAYLOAD_MAX];
	uint32_t received_bytes;
	int fds[MEMORY_REGIONS_MAX];
	unsigned fd_count;
};

enum frontend_event {
	FRONTEND_IDLE,	  /* no whole message yet */
	FRONTEND_MESSAGE, /* one was obeyed: queues may have started or stopped */
	FRONTEND_CLOSED,  /* between two messages: the VMM is gone */
	FRONTEND_FAULT,	  /* the VMM broke the protocol; *why says how */
};

/* Kick descriptors are put into `epoll_fd` with `tag` + queue number. */
void frontend_init(struct frontend *frontend, int fd, uint64_t guest_cid, int epoll_fd, uint64_t tag);
/* Receives and obeys at most one message; never blocks. */
enum frontend_event frontend_receive(struct frontend *frontend, const char **why);
void frontend_clear(struct frontend *frontend);

#endif
