#define _GNU_SOURCE
#include "vsock.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "packet.h"

#define ACCEPT_AGAIN_MS 100

void connection_want_control(struct device *device, struct connection *connection, enum pending packet)
{
	connection->pending |= packet;
	if (!connection->in_control)
		TAILQ_INSERT_TAIL(&device->control, connection, control);
	connection->in_control = true;
}

void connection_leave_control(struct device *device, struct connection *connection)
{
	if (connection->in_control)
		TAILQ_REMOVE(&device->control, connection, control);
	connection->in_control = false;
	connection->pending = 0;
}

void connection_want_data(struct device *device, struct connection *connection)
{
	if (connection->in_data || connection->state != ESTABLISHED || !connection->readable || connection->ended)
		return;
	TAILQ_INSERT_TAIL(&device->data, connection, data);
	connection->in_data = true;
}

void connection_leave_data(struct device *device, struct connection *connection)
{
	if (connection->in_data)
		TAILQ_REMOVE(&device->data, connection, data);
	connection->in_data = false;
}

void connection_want_shutdown(struct device *device, struct connection *connection, unsigned flags)
{
	connection->shutdown_want |= flags;
	if (connection->shutdown_want != connection->shutdown_sent)
		connection_want_control(device, connection, PENDING_SHUTDOWN);
}

void device_push_reset(struct device *device, const struct reset *reset)
{
	/* Full only if a hostile VMM starts and stops without end; those guests' sockets end by their own time-outs. */
	if (device->reset_count == RESETS_MAX)
		return;
	device->resets[(device->reset_first + device->reset_count++) % RESETS_MAX] = *reset;
}

void connection_push_reset(struct device *device, const struct connection *connection)
{
	device_push_reset(device, &(struct reset){
				   .src_cid = VMADDR_CID_HOST,
				   .src_port = connection->host_port,
				   .dst_port = connection->guest_port,
				   .type = VIRTIO_VSOCK_TYPE_STREAM,
			   });
}

void connection_drop(struct device *device, struct connection *connection)
{
	connection_leave_control(device, connection);
	connection_leave_data(device, connection);
	if (connection->in_deadline)
		TAILQ_REMOVE(&device->closing, connection, deadline);
	connection->in_deadline = false;
	table_release(&device->table, connection);
}

void connection_fail(struct device *device, struct connection *connection)
{
	connection_push_reset(device, connection);
	connection_drop(device, connection);
}

void connection_drain(struct device *device, struct connection *connection)
{
	if (connection->backlog.size_bytes == 0) {
		connection_drop(device, connection);
		return;
	}
	connection_leave_control(device, connection);
	connection_leave_data(device, connection);
	shutdown(connection->fd, SHUT_RD); /* so that the client's next write fails */
	connection->state = DRAINING;
}

bool device_end_oldest_closing(struct device *device)
{
	if (TAILQ_EMPTY(&device->closing))
		return false;
	connection_fail(device, TAILQ_FIRST(&device->closing));
	return true;
}

bool connection_watch(struct device *device, struct connection *connection, int operation, bool writable)
{
	/* Edge-triggered: a client that cannot be served now costs no wake-ups. A change of the mask reports anew. */
	struct epoll_event event = {
		.events = EPOLLIN | EPOLLRDHUP | EPOLLET | (writable ? EPOLLOUT : 0),
		.data.u64 = (uint64_t)SOURCE_CLIENT << SOURCE_SHIFT | (uint64_t)connection->generation << 16 |
			    table_slot(&device->table, connection),
	};

	connection->blocked = writable;
	return epoll_ctl(device->epoll_fd, operation, connection->fd, &event) == 0;
}

void connection_dial(struct device *device, struct connection *connection, uint32_t guest_port)
{
	connection->guest_port = guest_port;
	connection->state = QUEUED;
	connection_want_control(device, connection, PENDING_REQUEST);
}

enum look connection_look(const struct connection *connection)
{
	uint8_t byte;
	ssize_t got = recv(connection->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);

	if (got > 0)
		return LOOK_BYTES;
	return got < 0 && (errno == EAGAIN || errno == EINTR) ? LOOK_NOTHING : LOOK_END;
}

void connection_client_gone(struct device *device, struct connection *connection)
{
	if (connection->client_gone)
		return;
	switch (connection->state) {
	case REQUESTED:
		connection_fail(device, connection);
		return;
	case ESTABLISHED:
		connection->client_gone = true;
		connection->forwarded_bytes += connection->backlog.size_bytes;
		backlog_clear(&connection->backlog);
		connection->ended = connection->ended || connection_look(connection) == LOOK_END;
		if (connection->ended) {
			connection_leave_data(device, connection);
			connection_want_shutdown(device, connection, SHUTDOWN_BOTH);
			return;
		}
		/* What it sent before is still to be read; the end of it brings the other half. */
		connection_want_shutdown(device, connection, VIRTIO_VSOCK_SHUTDOWN_RCV);
		connection_readable(device, connection);
		return;
	default:
		connection_drop(device, connection);
		return;
	}
}

void connection_readable(struct device *device, struct connection *connection)
{
	connection->readable = true;
	connection_want_data(device, connection);
}

void connection_finish_writing(struct device *device, struct connection *connection)
{
	if (connection->client_gone)
		return;
	shutdown(connection->fd, SHUT_WR);
	/* Both directions are over: nothing is left that closing could tell us. */
	if (connection->ended)
		connection_client_gone(device, connection);
}

void connection_finish_reading(struct device *device, struct connection *connection)
{
	struct pollfd client = {.fd = connection->fd}; /* no events: POLLHUP and POLLERR come unasked */

	connection->ended = true;
	connection_leave_data(device, connection);
	connection_want_shutdown(device, connection, VIRTIO_VSOCK_SHUTDOWN_SEND);
	/* If it has closed, or both directions are over, the guest hears of both in one packet. */
	if (poll(&client, 1, 0) == 1)
		connection_client_gone(device, connection);
}

void connection_grant(struct device *device, struct connection *connection)
{
	/* Half a window at a time: the guest always has the other half to go on with. */
	if (connection->forwarded_bytes - connection->announced_bytes >= WINDOW_BYTES / 2 &&
	    !(connection->guest_shutdown & VIRTIO_VSOCK_SHUTDOWN_SEND))
		connection_want_control(device, connection, PENDING_CREDIT_UPDATE);
}

void connection_writable(struct device *device, struct connection *connection)
{
	ssize_t sent;

	if (!connection->blocked)
		return;
	sent = backlog_send(&connection->backlog, connection->fd);
	if (sent < 0) {
		connection_client_gone(device, connection);
		return;
	}
	connection->forwarded_bytes += (uint32_t)sent;
	if (connection->state == ESTABLISHED)
		connection_grant(device, connection);
	if (connection->backlog.size_bytes > 0)
		return;
	if (connection->state == DRAINING) {
		connection_drop(device, connection);
		return;
	}
	if (!connection_watch(device, connection, EPOLL_CTL_MOD, false)) {
		connection_fail(device, connection);
		return;
	}
	if (connection->guest_shutdown & VIRTIO_VSOCK_SHUTDOWN_SEND)
		connection_finish_writing(device, connection);
}

void device_queues_changed(struct device *device)
{
	const struct queue *rx = &device->frontend.queues[QUEUE_RX];
	const struct queue *tx = &device->frontend.queues[QUEUE_TX];
	bool ready = queue_running(rx) && queue_running(tx);

	if (device->ready && !ready) {
		for (unsigned i = 0; i < CONNECTIONS_MAX; i++) {
			struct connection *connection = &device->table.slots[i];

			switch (connection->state) {
			case REQUESTED:
			case ESTABLISHED:
			case CLOSING:
				connection_fail(device, connection);
				break;
			case QUEUED:
				connection_drop(device, connection);
				break;
			case FREE:
			case GREETING:
			case DRAINING:
				break;
			}
		}
	}
	if (!device->ready && ready) {
		/* A driver that begins anew has no sockets left to reset; one that was only paused has. */
		if (rx->next_avail == 0 && tx->next_avail == 0)
			device->reset_count = 0;
		device->tx_waiting = true;
		device->rx_starved = false;
	}
	device->ready = ready;
}

void device_event(struct device *device, uint64_t tag, uint32_t events)
{
	struct connection *connection;

	switch ((enum source)(tag >> SOURCE_SHIFT)) {
	case SOURCE_FRONTEND:
		break;
	case SOURCE_LISTENER:
		clients_accept(device);
		break;
	case SOURCE_QUEUE:
		queue_kicked(&device->frontend.queues[tag & 0xff]);
		if ((tag & 0xff) == QUEUE_RX)
			device->rx_starved = false;
		if ((tag & 0xff) == QUEUE_TX)
			device->tx_waiting = true;
		break;
	case SOURCE_CLIENT:
		connection = &device->table.slots[tag & 0xffff];
		/* The slot may have a new user since the event was collected. */
		if (connection->generation == (uint32_t)(tag >> 16) && connection->fd >= 0)
			client_event(device, connection, events);
		break;
	}
}

static bool may_take(const struct device *device)
{
	return device->ready && device->tx_waiting && device->reset_count < RESETS_PAUSE;
}

static bool may_give(const struct device *device)
{
	return device->ready && !device->rx_starved && device_has_packets_to_give(device);
}

void device_run(struct device *device)
{
	if (may_take(device))
		device_take_packets(device);
	if (may_give(device))
		device_give_packets(device);
	if (device->ready && (device->frontend.queues[QUEUE_RX].broken || device->frontend.queues[QUEUE_TX].broken))
		device_queues_changed(device);
	if (device->clients_wait)
		clients_accept(device);
}

void device_expire(struct device *device)
{
	struct connection *connection;

	while ((connection = TAILQ_FIRST(&device->greeting)) != NULL && connection->deadline_ms <= device->now_ms)
		client_expire(device, connection);
	while ((connection = TAILQ_FIRST(&device->closing)) != NULL && connection->deadline_ms <= device->now_ms)
		connection_fail(device, connection);
}

static int64_t earlier(int64_t wait_ms, const struct connection *connection, uint64_t now_ms)
{
	int64_t own_ms;

	if (connection == NULL)
		return wait_ms;
	own_ms = connection->deadline_ms > now_ms ? (int64_t)(connection->deadline_ms - now_ms) : 0;
	return wait_ms < 0 || own_ms < wait_ms ? own_ms : wait_ms;
}

int device_timeout(const struct device *device)
{
	int64_t wait_ms = -1;

	if (may_take(device) || may_give(device))
		return 0;
	if (device->clients_wait && device->greeting_count < GREETINGS_MAX)
		wait_ms = ACCEPT_AGAIN_MS;
	wait_ms = earlier(wait_ms, TAILQ_FIRST(&device->greeting), device->now_ms);
	wait_ms = earlier(wait_ms, TAILQ_FIRST(&device->closing), device->now_ms);
	return (int)wait_ms;
}

static bool watch(int epoll_fd, int fd, enum source source, uint32_t events)
{
	struct epoll_event event = {.events = events, .data.u64 = (uint64_t)source << SOURCE_SHIFT};
	int flags = fcntl(fd, F_GETFL);

	return flags >= 0 && fcntl(fd, F_SETFL, flags | O_NONBLOCK) == 0 &&
	       epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event) == 0;
}

bool device_init(struct device *device, int epoll_fd, int vhost_fd, int listen_fd, uint64_t guest_cid)
{
	memset(device, 0, sizeof(*device));
	device->epoll_fd = epoll_fd;
	device->listen_fd = listen_fd;
	frontend_init(&device->frontend, vhost_fd, guest_cid, epoll_fd, (uint64_t)SOURCE_QUEUE << SOURCE_SHIFT);
	table_init(&device->table);
	TAILQ_INIT(&device->control);
	TAILQ_INIT(&device->data);
	TAILQ_INIT(&device->greeting);
	TAILQ_INIT(&device->closing);
	return watch(epoll_fd, vhost_fd, SOURCE_FRONTEND, EPOLLIN) &&
	       watch(epoll_fd, listen_fd, SOURCE_LISTENER, EPOLLIN | EPOLLET);
}

void device_clear(struct device *device)
{
	for (unsigned i = 0; i < CONNECTIONS_MAX; i++) {
		if (device->table.slots[i].state != FREE)
			table_release(&device->table, &device->table.slots[i]);
	}
	frontend_clear(&device->frontend);
}
