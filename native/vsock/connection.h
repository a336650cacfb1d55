/* The table of connections: who they are, where each stands, and the credit arithmetic of virtio 1.2 §5.10.6.3.
 *
 * A connection is one host client and one guest port. States, and what may be done in each:
 *
 *   FREE         the slot is unused
 *   GREETING     the client has not yet said which port; only the client exists
 *   QUEUED       REQUEST waits for a buffer; the guest knows nothing, so no packet may name the connection
 *   REQUESTED    REQUEST sent; the guest may answer RESPONSE or RST, nothing else
 *   ESTABLISHED  bytes both ways; each direction ends on its own
 *   CLOSING      client closed, SHUTDOWN of both directions sent; only the guest's RST (or a deadline) is awaited
 *   DRAINING     the guest has ended it; only the backlog towards the client is left
 *
 * The guest knows a connection in REQUESTED, ESTABLISHED and CLOSING; only there can its packets find it. The slot is part
 * of the host port, so a look-up is one index; the rest of the port counts up, so that an old packet finds nothing.
 */
#ifndef SANDBOX_VSOCK_CONNECTION_H
#define SANDBOX_VSOCK_CONNECTION_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>

#include "backlog.h"

#define CONNECTIONS_MAX 1024u
#define WINDOW_BYTES	BACKLOG_BYTES /* our buf_alloc: what the guest may have in flight */

enum connection_state { FREE, GREETING, QUEUED, REQUESTED, ESTABLISHED, CLOSING, DRAINING };

/* Control packets waiting to be sent; at most one of each, so their number is bounded. */
enum pending {
	PENDING_REQUEST = 1,
	PENDING_SHUTDOWN = 2,
	PENDING_CREDIT_UPDATE = 4,
	PENDING_CREDIT_REQUEST = 8,
};

struct connection {
	enum connection_state state;
	uint32_t generation; /* of the slot; events of an earlier user of it are recognised by this */
	uint32_t sequence;   /* the upper part of host_port */
	uint32_t host_port;
	uint32_t guest_port;
	int fd; /* the client, or -1 */

	unsigned pending;	 /* enum pending */
	unsigned shutdown_want;	 /* VIRTIO_VSOCK_SHUTDOWN_*: what the guest should know of the client */
	unsigned shutdown_sent;	 /* what it was told */
	unsigned guest_shutdown; /* what the guest told us */
	bool readable;		 /* since the last EAGAIN the client may have sent something */
	bool half_closed;	 /* the client will send no more; what it sent may be unread */
	bool client_gone;	 /* the client takes no more bytes */
	bool ended;		 /* nothing more is read from the client */
	bool blocked;		 /* EPOLLOUT is awaited */

	/* From the client to the guest; counters wrap. */
	uint32_t sent_bytes;	  /* tx_cnt */
	uint32_t guest_forwarded; /* the guest's fwd_cnt */
	uint32_t guest_window;	  /* the guest's buf_alloc */
	bool credit_asked;
	uint32_t credit_asked_at; /* sent_bytes then */

	/* From the guest to the client. */
	uint32_t received_bytes;
	uint32_t forwarded_bytes; /* our fwd_cnt */
	uint32_t announced_bytes; /* fwd_cnt in the last packet the guest got */
	struct backlog backlog;

	bool in_control, in_data, in_deadline;
	TAILQ_ENTRY(connection) control, data, deadline;
	uint64_t deadline_ms;
};

TAILQ_HEAD(connections, connection);

struct table {
	struct connection slots[CONNECTIONS_MAX];
	struct connections unused;
};

void table_init(struct table *table);
/* A slot for a new client, in GREETING; NULL when all are taken. */
struct connection *table_take(struct table *table, int fd);
/* Gives the slot back; the caller has taken it off all lists. Closes the client. */
void table_release(struct table *table, struct connection *connection);
/* The connection a guest packet belongs to, or NULL. */
struct connection *table_find(struct table *table, uint32_t host_port, uint32_t guest_port);

static inline unsigned table_slot(const struct table *table, const struct connection *connection)
{
	return (unsigned)(connection - table->slots);
}

/* How many bytes the guest can still take. */
static inline uint32_t credit_towards_guest(const struct connection *connection)
{
	uint32_t in_flight = connection->sent_bytes - connection->guest_forwarded;

	return in_flight < connection->guest_window ? connection->guest_window - in_flight : 0;
}

/* Takes the counters of a guest packet. False: it claims to have forwarded what was never sent. */
bool credit_take(struct connection *connection, uint32_t buf_alloc, uint32_t fwd_cnt);

/* Whether the guest was granted `size` more bytes. */
static inline bool credit_granted(const struct connection *connection, uint32_t size)
{
	uint32_t in_flight = connection->received_bytes - connection->announced_bytes;

	return (uint64_t)in_flight + size <= WINDOW_BYTES;
}

#endif
