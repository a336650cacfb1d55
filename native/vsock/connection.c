#define _GNU_SOURCE
#include "connection.h"

#include <unistd.h>

#define SLOT_BITS    10u
#define SEQUENCE_MAX ((1u << (32 - SLOT_BITS)) - 2) /* so that no port is VMADDR_PORT_ANY */

_Static_assert(CONNECTIONS_MAX == 1u << SLOT_BITS, "a slot is the low bits of a port");

void table_init(struct table *table)
{
	TAILQ_INIT(&table->unused);
	for (unsigned i = 0; i < CONNECTIONS_MAX; i++) {
		table->slots[i] = (struct connection){.fd = -1};
		TAILQ_INSERT_TAIL(&table->unused, &table->slots[i], data);
	}
}

struct connection *table_take(struct table *table, int fd)
{
	struct connection *connection = TAILQ_FIRST(&table->unused);
	uint32_t sequence;

	if (connection == NULL)
		return NULL;
	TAILQ_REMOVE(&table->unused, connection, data);
	sequence = connection->sequence % SEQUENCE_MAX + 1; /* never 0: ports below 1024 are privileged */
	*connection = (struct connection){
		.state = GREETING,
		.generation = connection->generation,
		.sequence = sequence,
		.host_port = sequence << SLOT_BITS | table_slot(table, connection),
		.fd = fd,
	};
	return connection;
}

void table_release(struct table *table, struct connection *connection)
{
	if (connection->fd >= 0)
		close(connection->fd);
	connection->fd = -1;
	backlog_clear(&connection->backlog);
	connection->state = FREE;
	connection->generation++;
	TAILQ_INSERT_HEAD(&table->unused, connection, data);
}

struct connection *table_find(struct table *table, uint32_t host_port, uint32_t guest_port)
{
	struct connection *connection = &table->slots[host_port % CONNECTIONS_MAX];

	if (connection->host_port != host_port || connection->guest_port != guest_port)
		return NULL;
	switch (connection->state) {
	case REQUESTED:
	case ESTABLISHED:
	case CLOSING:
		return connection;
	default:
		return NULL;
	}
}

bool credit_take(struct connection *connection, uint32_t buf_alloc, uint32_t fwd_cnt)
{
	uint32_t advance = fwd_cnt - connection->guest_forwarded;

	connection->guest_window = buf_alloc;
	/* Two threads of the guest may queue packets in another order than they read the counter: older is no fault. */
	if (advance > INT32_MAX)
		return true;
	if (advance > connection->sent_bytes - connection->guest_forwarded)
		return false;
	connection->guest_forwarded = fwd_cnt;
	return true;
}
