/* The virtio socket device (virtio 1.2 §5.10): packets of the guest's two queues on one side, host clients on the other.
 *
 * Primer. Every packet has a 44-byte header: addresses (CID and port of both ends), length, type, operation, flags, and the
 * sender's credit (buf_alloc: how much it holds for this connection, fwd_cnt: how much it has passed on). REQUEST is
 * answered with RESPONSE or RST; RW carries bytes; SHUTDOWN says that its sender will receive (1) or send (2) no more, and
 * of both is answered with RST; CREDIT_REQUEST is answered with CREDIT_UPDATE. Whoever sends more than the other's
 * buf_alloc without hearing of a new fwd_cnt breaks the rules.
 *
 * The host dials, the guest never: a REQUEST from the guest, and any packet that belongs to no connection, is answered with
 * RST. A packet that breaks the rules ends its connection with RST; a queue that breaks them ends all connections until the
 * driver sets it up again. Nothing the guest does ends this process.
 *
 * Flow. Bytes go straight between the client's socket and guest memory. What a client does not take at once goes to a
 * backlog no larger than the credit the guest was granted, and granting goes on only as the client reads. While the guest
 * offers no buffers, or no credit, the client's socket is not read. Towards the guest, control packets go first, then
 * clients in turn.
 */
#ifndef SANDBOX_VSOCK_VSOCK_H
#define SANDBOX_VSOCK_VSOCK_H

#include <stdbool.h>
#include <stdint.h>

#include "connection.h"
#include "vhost_user.h"

#define RESETS_MAX    4096u
#define RESETS_PAUSE  1024u /* with so many RSTs unsent no packet is taken from the guest, so RESETS_MAX is never reached */
#define GREETINGS_MAX 64u
#define GREETING_MS   2000u
#define CLOSING_MS    2000u /* how long the guest may take to answer SHUTDOWN; as in Firecracker */

/* What an epoll event is about, in the top byte of its tag. */
enum source { SOURCE_FRONTEND = 1, SOURCE_LISTENER, SOURCE_QUEUE, SOURCE_CLIENT };
#define SOURCE_SHIFT 56

/* An RST to be sent for which no connection need exist. */
struct reset {
	uint64_t src_cid;
	uint32_t src_port;
	uint32_t dst_port;
	uint16_t type;
};

struct device {
	int epoll_fd;
	int listen_fd;
	struct frontend frontend;
	struct table table;
	struct connections control;  /* have control packets to send */
	struct connections data;     /* may have bytes to send, in turn */
	struct connections greeting; /* by deadline */
	struct connections closing;  /* by deadline */
	unsigned greeting_count;

	struct reset resets[RESETS_MAX];
	unsigned reset_first, reset_count;

	bool ready;	   /* both data queues run */
	bool tx_waiting;   /* the guest may have packets for us and will not kick */
	bool rx_starved;   /* the guest has no buffers for us and will kick */
	bool clients_wait; /* the listener may have clients we could not take */
	uint64_t now_ms;   /* monotonic, set by the loop */
};

/* Takes a connected vhost-user socket and a listening socket, both watched on epoll_fd from here on. False with errno. */
bool device_init(struct device *device, int epoll_fd, int vhost_fd, int listen_fd, uint64_t guest_cid);
void device_clear(struct device *device);

/* To be called after every message of the VMM: queues may have started or stopped. A stop ends all connections. */
void device_queues_changed(struct device *device);
/* Sorts one epoll event; those of the front-end are the caller's. */
void device_event(struct device *device, uint64_t tag, uint32_t events);
/* Moves what can be moved, then returns. */
void device_run(struct device *device);
/* Ends what has waited too long. */
void device_expire(struct device *device);
/* Milliseconds until there is something to do without an event; 0 now, -1 never. */
int device_timeout(const struct device *device);

/* --- Between vsock.c, client.c, from_guest.c and to_guest.c ---
 *
 * Any of these may end the connection it is given: its state is FREE afterwards, and must be looked at again. */

/* Puts the connection in line with a control packet, or with bytes if it has any to give. */
void connection_want_control(struct device *device, struct connection *connection, enum pending packet);
void connection_want_shutdown(struct device *device, struct connection *connection, unsigned flags);
void connection_want_data(struct device *device, struct connection *connection);
void connection_leave_control(struct device *device, struct connection *connection);
void connection_leave_data(struct device *device, struct connection *connection);

/* The client has named a port: dial it. */
void connection_dial(struct device *device, struct connection *connection, uint32_t guest_port);
/* The client may have sent something; takes bytes again; takes no more bytes. */
void connection_readable(struct device *device, struct connection *connection);
void connection_writable(struct device *device, struct connection *connection);
void connection_client_gone(struct device *device, struct connection *connection);
/* What reading from the client would find, without reading. */
enum look { LOOK_NOTHING, LOOK_BYTES, LOOK_END };
enum look connection_look(const struct connection *connection);
/* The client will send no more, or may not. */
void connection_finish_reading(struct device *device, struct connection *connection);
/* All the guest sent is with the client, and no more will come. */
void connection_finish_writing(struct device *device, struct connection *connection);
/* Tells the guest that the client has read, if that is worth a packet. */
void connection_grant(struct device *device, struct connection *connection);

/* The guest knows the connection no more; what it sent still goes to the client. */
void connection_drain(struct device *device, struct connection *connection);
/* The guest broke a rule, or we cannot go on: both sides are told. */
void connection_fail(struct device *device, struct connection *connection);
/* Ends the client and forgets the connection, telling the guest nothing. */
void connection_drop(struct device *device, struct connection *connection);
/* An RST to the guest, for this connection or for none. */
void connection_push_reset(struct device *device, const struct connection *connection);
void device_push_reset(struct device *device, const struct reset *reset);
/* Makes room in the table: the connection that has waited longest for the guest's RST waits no more. False: none waits. */
bool device_end_oldest_closing(struct device *device);
/* Watches the client's socket; `writable` too if its backlog waits. False: no memory for it. */
bool connection_watch(struct device *device, struct connection *connection, int operation, bool writable);

/* A batch of the guest's packets, a batch of ours. */
void device_take_packets(struct device *device);
void device_give_packets(struct device *device);
bool device_has_packets_to_give(const struct device *device);

void clients_accept(struct device *device);
/* The time for the greeting is over. */
void client_expire(struct device *device, struct connection *connection);
void client_event(struct device *device, struct connection *connection, uint32_t events);

#endif
