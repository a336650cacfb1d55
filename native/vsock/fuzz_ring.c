/* A running device: the guest's rings and packets, host clients, time, and stops, as a script in the input. */
#define _GNU_SOURCE
#include "fuzz_harness.h"

#define CLIENTS	     4u
#define TX_BUFFER_AT 0x8000u
#define RX_BUFFER_AT 0xc000u
#define BUFFER_BYTES 1024u

static int clients[CLIENTS];
static uint16_t avail[2];

static void open_client(unsigned which, bool greeted)
{
	static const char greeting[] = "CONNECT 5\n";

	if (clients[which] >= 0)
		return;
	clients[which] = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (connect(clients[which], (struct sockaddr *)&harness.address, harness.address_size) < 0 ||
	    (greeted && send(clients[which], greeting, sizeof(greeting) - 1, MSG_NOSIGNAL) < 0)) {
		close(clients[which]);
		clients[which] = -1;
	}
}

static void put(uint32_t at, const void *bytes, uint32_t size)
{
	at %= MEMORY_BYTES;
	memcpy(memory + at, bytes, size < MEMORY_BYTES - at ? size : MEMORY_BYTES - at);
}

static void put_descriptor(unsigned queue, unsigned index, uint64_t address, uint32_t size, uint16_t flags, uint16_t next)
{
	struct vring_desc descriptor = {address, size, flags, next};

	put(RING_AT(queue) + index * sizeof(descriptor), &descriptor, sizeof(descriptor));
}

static void offer(unsigned queue, uint16_t head)
{
	put(RING_AT(queue) + 2048 + 4 + 2u * (avail[queue] % RING_SIZE), &head, sizeof(head));
	avail[queue]++;
	put(RING_AT(queue) + 2048 + 2, &avail[queue], sizeof(avail[queue]));
	eventfd_write(harness.kick[queue], 1);
}

static void offer_rx(unsigned count)
{
	for (; count > 0; count--) {
		unsigned slot = avail[QUEUE_RX] % (RING_SIZE / 2);

		put_descriptor(QUEUE_RX, 2 * slot, GUEST_BASE + RX_BUFFER_AT + slot * BUFFER_BYTES, 44,
			       VRING_DESC_F_WRITE | VRING_DESC_F_NEXT, (uint16_t)(2 * slot + 1));
		put_descriptor(QUEUE_RX, 2 * slot + 1, GUEST_BASE + RX_BUFFER_AT + slot * BUFFER_BYTES + 44, BUFFER_BYTES - 44,
			       VRING_DESC_F_WRITE, 0);
		offer(QUEUE_RX, (uint16_t)(2 * slot));
	}
}

/* A packet for a connection there is, with some fields as the input says. */
static void send_packet(struct input *input)
{
	unsigned slot = avail[QUEUE_TX] % (RING_SIZE / 2);
	uint32_t at = TX_BUFFER_AT + slot * BUFFER_BYTES;
	const struct connection *connection = &harness.device.table.slots[take(input, 1) % CLIENTS];
	unsigned changes = take(input, 1);
	struct virtio_vsock_hdr packet = {
		.src_cid = 3,
		.dst_cid = 2,
		.src_port = connection->guest_port,
		.dst_port = connection->host_port,
		.type = VIRTIO_VSOCK_TYPE_STREAM,
		.op = (uint16_t)(take(input, 1) % 10),
		.buf_alloc = 65536,
		.fwd_cnt = connection->sent_bytes,
	};

	if (packet.op == VIRTIO_VSOCK_OP_RW)
		packet.len = take(input, 2) % 60000;
	if (packet.op == VIRTIO_VSOCK_OP_SHUTDOWN)
		packet.flags = take(input, 1) % 4;
	if (changes & 1)
		packet.fwd_cnt -= take(input, 1);
	if (changes & 2)
		packet.buf_alloc = take(input, 2);
	if (changes & 4)
		packet.dst_port += take(input, 1);
	if (changes & 8)
		packet.type = (uint16_t)take(input, 1);
	if (changes & 16)
		packet.src_cid = take(input, 1);
	if (changes & 32)
		packet.len = take(input, 4);
	put(at, &packet, sizeof(packet));
	/* The payload may be longer than a buffer: anything in memory will do. */
	put_descriptor(QUEUE_TX, 2 * slot, GUEST_BASE + at, 44, packet.len > 0 ? VRING_DESC_F_NEXT : 0, (uint16_t)(2 * slot + 1));
	put_descriptor(QUEUE_TX, 2 * slot + 1, GUEST_BASE, packet.len % MEMORY_BYTES, 0, 0);
	offer(QUEUE_TX, (uint16_t)(2 * slot));
}

static void with_client(struct input *input, unsigned which)
{
	static uint8_t bytes[65536];
	unsigned action = take(input, 1);

	if (clients[which] < 0)
		return;
	switch (action % 5) {
	case 0:
		if (send(clients[which], bytes, take(input, 2), MSG_DONTWAIT | MSG_NOSIGNAL) < 0)
			return;
		break;
	case 1:
		if (recv(clients[which], bytes, take(input, 2), MSG_DONTWAIT) < 0)
			return;
		break;
	case 2:
		shutdown(clients[which], SHUT_WR);
		break;
	case 3:
		shutdown(clients[which], SHUT_RD);
		break;
	default:
		close(clients[which]);
		clients[which] = -1;
		break;
	}
}

static void restart(void)
{
	send_well_formed(4);
	send_well_formed(5);
	memset(memory, 0, TX_BUFFER_AT);
	avail[0] = avail[1] = 0;
	for (unsigned step = 2; step < WELL_FORMED_COUNT; step++) {
		if (step != 4 && step != 5)
			send_well_formed(step);
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
	struct input input = {bytes, size};

	harness_open();
	harness_start();
	avail[0] = avail[1] = 0;
	for (unsigned i = 0; i < CLIENTS; i++)
		clients[i] = -1;
	REQUIRE(harness.device.ready);
	while (input.size > 0 && !harness.ended) {
		unsigned what = take(&input, 1);
		uint8_t scribble[16];
		uint32_t at;

		switch (what % 12) {
		case 0:
			open_client(what / 12 % CLIENTS, what < 200);
			break;
		case 1:
		case 2:
			offer_rx(what / 12 % 9);
			break;
		case 3:
		case 4:
		case 5:
			send_packet(&input);
			break;
		case 6:
		case 7:
			with_client(&input, what / 12 % CLIENTS);
			break;
		case 8:
			at = take(&input, 2);
			for (unsigned i = 0; i < sizeof(scribble); i++)
				scribble[i] = (uint8_t)take(&input, 1);
			put(at, scribble, what / 12 % sizeof(scribble));
			eventfd_write(harness.kick[at & 1], 1);
			break;
		case 9:
			harness.device.now_ms += take(&input, 2);
			break;
		case 10:
			if (what < 60)
				restart();
			else
				offer(what & 1, (uint16_t)take(&input, 1));
			break;
		default:
			break;
		}
		harness_turn();
	}
	for (unsigned i = 0; i < CLIENTS; i++) {
		if (clients[i] >= 0)
			close(clients[i]);
	}
	for (unsigned i = 0; i < 4; i++)
		harness_turn();
	harness_close();
	return 0;
}
