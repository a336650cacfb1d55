/* Packets from the guest: which connection each belongs to, whether its state allows it, and its bytes to the client. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include "packet.h"
#include "vsock.h"

static void answer_with_reset(struct device *device, const struct virtio_vsock_hdr *packet)
{
	if (packet->op == VIRTIO_VSOCK_OP_RST)
		return;
	device_push_reset(device, &(struct reset){
				   .src_cid = packet->dst_cid,
				   .src_port = packet->dst_port,
				   .dst_port = packet->src_port,
				   .type = packet->type,
			   });
}

static void take_response(struct device *device, struct connection *connection)
{
	char text[24];
	int size = snprintf(text, sizeof(text), "OK %u\n", connection->host_port);

	/* The first bytes into an empty socket: anything but all of them means the client is gone. */
	if (send(connection->fd, text, (size_t)size, MSG_DONTWAIT | MSG_NOSIGNAL) != size) {
		connection_fail(device, connection);
		return;
	}
	connection->state = ESTABLISHED;
	/* Bytes glued to the greeting were reported with it. */
	connection_readable(device, connection);
}

static void take_bytes(struct device *device, struct connection *connection, const struct chain *chain, uint32_t size)
{
	struct iovec payload[IOV_ENTRIES];
	struct msghdr message = {.msg_iov = payload};
	unsigned count;
	ssize_t sent = 0;

	if ((connection->guest_shutdown & VIRTIO_VSOCK_SHUTDOWN_SEND) || !credit_granted(connection, size) ||
	    iov_slice(chain->iov, chain->iov_count, HEADER_BYTES, size, payload, IOV_ENTRIES, &count) != size) {
		connection_fail(device, connection);
		return;
	}
	if (size == 0)
		return;
	connection->received_bytes += size;
	if (!connection->client_gone && connection->backlog.size_bytes == 0) {
		message.msg_iovlen = count;
		sent = sendmsg(connection->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
		if (sent < 0 && errno != EAGAIN && errno != EINTR)
			connection_client_gone(device, connection);
		if (sent < 0)
			sent = 0;
	}
	if (connection->client_gone) {
		/* Nobody is left to read it; the guest learns so from SHUTDOWN_RCV. */
		connection->forwarded_bytes = connection->received_bytes;
		return;
	}
	connection->forwarded_bytes += (uint32_t)sent;
	if ((uint32_t)sent < size) {
		if (!backlog_append(&connection->backlog, payload, count, (uint32_t)sent) ||
		    (!connection->blocked && !connection_watch(device, connection, EPOLL_CTL_MOD, true))) {
			connection_fail(device, connection);
			return;
		}
	}
	connection_grant(device, connection);
}

static void take_shutdown(struct device *device, struct connection *connection, uint32_t flags)
{
	unsigned news = flags & SHUTDOWN_BOTH & ~connection->guest_shutdown;

	connection->guest_shutdown |= news;
	if (connection->guest_shutdown == SHUTDOWN_BOTH) {
		connection_push_reset(device, connection);
		connection_drain(device, connection);
		return;
	}
	if (connection->state == CLOSING)
		return;
	if ((news & VIRTIO_VSOCK_SHUTDOWN_RCV) && !connection->ended) {
		shutdown(connection->fd, SHUT_RD);
		connection_finish_reading(device, connection);
	}
	if ((news & VIRTIO_VSOCK_SHUTDOWN_SEND) && connection->backlog.size_bytes == 0)
		connection_finish_writing(device, connection);
}

static void take_known_packet(struct device *device, struct connection *connection, const struct virtio_vsock_hdr *packet,
			      const struct chain *chain)
{
	bool requested = connection->state == REQUESTED;

	if (packet->op == VIRTIO_VSOCK_OP_RST) {
		connection_drain(device, connection);
		return;
	}
	if (!credit_take(connection, packet->buf_alloc, packet->fwd_cnt) || requested != (packet->op == VIRTIO_VSOCK_OP_RESPONSE)) {
		connection_fail(device, connection);
		return;
	}
	switch (packet->op) {
	case VIRTIO_VSOCK_OP_RESPONSE:
		take_response(device, connection);
		return;
	case VIRTIO_VSOCK_OP_RW:
		/* The guest may not have heard yet that the client has closed. */
		if (connection->state == ESTABLISHED)
			take_bytes(device, connection, chain, packet->len);
		break;
	case VIRTIO_VSOCK_OP_SHUTDOWN:
		take_shutdown(device, connection, packet->flags);
		break;
	case VIRTIO_VSOCK_OP_CREDIT_UPDATE:
		break;
	case VIRTIO_VSOCK_OP_CREDIT_REQUEST:
		if (connection->state == ESTABLISHED)
			connection_want_control(device, connection, PENDING_CREDIT_UPDATE);
		break;
	default:
		connection_fail(device, connection);
		break;
	}
	/* Any packet may have brought credit. */
	connection_want_data(device, connection);
}

static void take_packet(struct device *device, const struct chain *chain)
{
	struct virtio_vsock_hdr packet;
	struct connection *connection;

	/* Without a whole header there is nobody to answer. */
	if (iov_read(chain->iov, chain->iov_count, &packet, HEADER_BYTES) != HEADER_BYTES)
		return;
	if (packet.src_cid != device->frontend.guest_cid || packet.dst_cid != VMADDR_CID_HOST ||
	    packet.type != VIRTIO_VSOCK_TYPE_STREAM) {
		answer_with_reset(device, &packet);
		return;
	}
	connection = table_find(&device->table, packet.dst_port, packet.src_port);
	if (connection == NULL)
		answer_with_reset(device, &packet);
	else
		take_known_packet(device, connection, &packet, chain);
}

void device_take_packets(struct device *device)
{
	struct queue *tx = &device->frontend.queues[QUEUE_TX];
	struct iovec iov[IOV_ENTRIES];
	struct chain chain;

	queue_no_kick(tx);
	for (unsigned i = 0; i < BATCH && device->reset_count < RESETS_PAUSE; i++) {
		enum peek found = queue_peek(tx, &device->frontend.memory, DRIVER_TO_DEVICE, 0, iov, IOV_ENTRIES, &chain);

		if (found == PEEK_NONE) {
			device->tx_waiting = queue_await_kick(tx);
			break;
		}
		if (found != PEEK_CHAIN) {
			queue_break(tx);
			return;
		}
		take_packet(device, &chain);
		queue_push(tx, chain.head, 0);
	}
	queue_notify(tx);
}
