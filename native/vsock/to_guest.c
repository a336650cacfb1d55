/* Packets to the guest: RSTs first, then control packets, then bytes of the clients in turn. */
#define _GNU_SOURCE
#include <errno.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "packet.h"
#include "vsock.h"

#define TURN_BYTES   (64u * 1024u)
#define TURN_PACKETS 32u /* buffers filled with one read */

/* Fills a buffer's header, and gives the buffer to the guest with `size` bytes of payload already in place. */
static void give_packet(struct device *device, struct connection *connection, const struct chain *chain,
			enum virtio_vsock_op op, uint32_t flags, uint32_t size)
{
	const struct virtio_vsock_hdr packet = {
		.src_cid = VMADDR_CID_HOST,
		.dst_cid = device->frontend.guest_cid,
		.src_port = connection->host_port,
		.dst_port = connection->guest_port,
		.len = size,
		.type = VIRTIO_VSOCK_TYPE_STREAM,
		.op = (uint16_t)op,
		.flags = flags,
		.buf_alloc = WINDOW_BYTES,
		.fwd_cnt = connection->forwarded_bytes,
	};

	iov_write(chain->iov, chain->iov_count, &packet, HEADER_BYTES);
	queue_push(&device->frontend.queues[QUEUE_RX], chain->head, HEADER_BYTES + size);
	connection->announced_bytes = connection->forwarded_bytes;
	connection->pending &= ~(unsigned)PENDING_CREDIT_UPDATE;
}

static void give_reset(struct device *device, const struct chain *chain)
{
	const struct reset *reset = &device->resets[device->reset_first];
	const struct virtio_vsock_hdr packet = {
		.src_cid = reset->src_cid,
		.dst_cid = device->frontend.guest_cid,
		.src_port = reset->src_port,
		.dst_port = reset->dst_port,
		.type = reset->type,
		.op = VIRTIO_VSOCK_OP_RST,
	};

	iov_write(chain->iov, chain->iov_count, &packet, HEADER_BYTES);
	queue_push(&device->frontend.queues[QUEUE_RX], chain->head, HEADER_BYTES);
	device->reset_first = (device->reset_first + 1) % RESETS_MAX;
	device->reset_count--;
}

static void give_shutdown(struct device *device, struct connection *connection, const struct chain *chain)
{
	give_packet(device, connection, chain, VIRTIO_VSOCK_OP_SHUTDOWN, connection->shutdown_want, 0);
	connection->shutdown_sent = connection->shutdown_want;
	if (connection->shutdown_sent != SHUTDOWN_BOTH)
		return;
	close(connection->fd);
	connection->fd = -1;
	connection_leave_control(device, connection);
	connection_leave_data(device, connection);
	connection->state = CLOSING;
	connection->deadline_ms = device->now_ms + CLOSING_MS;
	connection->in_deadline = true;
	TAILQ_INSERT_TAIL(&device->closing, connection, deadline);
}

/* Sends one of the connection's control packets. */
static void give_control(struct device *device, struct connection *connection, const struct chain *chain)
{
	if (connection->pending & PENDING_REQUEST) {
		connection->pending &= ~(unsigned)PENDING_REQUEST;
		connection->state = REQUESTED;
		give_packet(device, connection, chain, VIRTIO_VSOCK_OP_REQUEST, 0, 0);
	} else if (connection->pending & PENDING_CREDIT_UPDATE) {
		give_packet(device, connection, chain, VIRTIO_VSOCK_OP_CREDIT_UPDATE, 0, 0);
	} else if (connection->pending & PENDING_CREDIT_REQUEST) {
		connection->pending &= ~(unsigned)PENDING_CREDIT_REQUEST;
		give_packet(device, connection, chain, VIRTIO_VSOCK_OP_CREDIT_REQUEST, 0, 0);
	} else {
		connection->pending &= ~(unsigned)PENDING_SHUTDOWN;
		give_shutdown(device, connection, chain);
	}
	if (connection->pending == 0)
		connection_leave_control(device, connection);
}

static void wait_for_credit(struct device *device, struct connection *connection)
{
	connection_leave_data(device, connection);
	switch (connection_look(connection)) {
	case LOOK_NOTHING:
		connection->readable = false;
		return;
	case LOOK_END: /* needs no credit */
		connection_finish_reading(device, connection);
		return;
	case LOOK_BYTES:
		break;
	}
	if (connection->credit_asked && connection->sent_bytes - connection->credit_asked_at < TURN_BYTES)
		return;
	connection->credit_asked = true;
	connection->credit_asked_at = connection->sent_bytes;
	connection_want_control(device, connection, PENDING_CREDIT_REQUEST);
}

/* Reads from the client into as many of the guest's buffers as one turn and the guest's credit allow, with one system call. */
static void give_data(struct device *device, struct connection *connection)
{
	struct queue *rx = &device->frontend.queues[QUEUE_RX];
	struct iovec iov[IOV_ENTRIES];
	struct iovec payload[IOV_ENTRIES];
	struct chain chains[TURN_PACKETS];
	uint32_t room[TURN_PACKETS];
	uint32_t allowed = credit_towards_guest(connection);
	uint32_t total = 0;
	unsigned chain_count = 0, iov_count = 0, payload_count = 0;
	ssize_t got;

	if (allowed == 0) {
		wait_for_credit(device, connection);
		return;
	}
	if (allowed > TURN_BYTES)
		allowed = TURN_BYTES;
	while (total < allowed && chain_count < TURN_PACKETS && payload_count < IOV_ENTRIES) {
		struct chain *chain = &chains[chain_count];
		unsigned added;

		if (queue_peek(rx, &device->frontend.memory, DEVICE_TO_DRIVER, (uint16_t)chain_count, iov + iov_count,
			       IOV_ENTRIES - iov_count, chain) != PEEK_CHAIN)
			break;
		room[chain_count] = iov_slice(chain->iov, chain->iov_count, HEADER_BYTES, allowed - total,
					      payload + payload_count, IOV_ENTRIES - payload_count, &added);
		/* A buffer that cannot hold one byte beside a header would never carry anything. */
		if (room[chain_count] == 0 || chain->size_bytes < HEADER_BYTES) {
			queue_break(rx);
			return;
		}
		total += room[chain_count];
		iov_count += chain->iov_count;
		payload_count += added;
		chain_count++;
	}
	if (rx->broken || chain_count == 0)
		return;

	got = readv(connection->fd, payload, (int)payload_count);
	if (got < 0 && errno == EINTR)
		return;
	if (got < 0 && errno == EAGAIN) {
		connection->readable = false;
		connection_leave_data(device, connection);
		return;
	}
	if (got <= 0) {
		connection_finish_reading(device, connection);
		return;
	}
	connection->sent_bytes += (uint32_t)got;
	for (unsigned i = 0; got > 0; i++) {
		uint32_t size = (uint32_t)got < room[i] ? (uint32_t)got : room[i];

		give_packet(device, connection, &chains[i], VIRTIO_VSOCK_OP_RW, 0, size);
		got -= size;
	}
	/* To the end of the line. */
	connection_leave_data(device, connection);
	connection_want_data(device, connection);
}

bool device_has_packets_to_give(const struct device *device)
{
	return device->reset_count > 0 || !TAILQ_EMPTY(&device->control) || !TAILQ_EMPTY(&device->data);
}

void device_give_packets(struct device *device)
{
	struct queue *rx = &device->frontend.queues[QUEUE_RX];
	struct iovec iov[IOV_ENTRIES];
	struct chain chain;

	queue_no_kick(rx);
	for (unsigned i = 0; i < BATCH && device_has_packets_to_give(device); i++) {
		enum peek found = queue_peek(rx, &device->frontend.memory, DEVICE_TO_DRIVER, 0, iov, IOV_ENTRIES, &chain);

		if (found == PEEK_NONE) {
			device->rx_starved = !queue_await_kick(rx);
			break;
		}
		if (found != PEEK_CHAIN || chain.size_bytes < HEADER_BYTES) {
			queue_break(rx);
			return;
		}
		if (device->reset_count > 0)
			give_reset(device, &chain);
		else if (!TAILQ_EMPTY(&device->control))
			give_control(device, TAILQ_FIRST(&device->control), &chain);
		else
			give_data(device, TAILQ_FIRST(&device->data));
		if (rx->broken)
			return;
	}
	queue_notify(rx);
}
