/* What both fuzzers need: a device in this process, a VMM's end of its connection, guest memory, and the loop of main.c. */
#ifndef SANDBOX_VSOCK_FUZZ_HARNESS_H
#define SANDBOX_VSOCK_FUZZ_HARNESS_H

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "packet.h"
#include "vsock.h"

#define MEMORY_BYTES 65536u
#define GUEST_BASE   UINT64_C(0x40000000)
#define VMM_BASE     UINT64_C(0x7f0000000000)
#define RING_SIZE    16u
#define SLOTS_USED   64u /* the slot given back last is taken first, and scripts have few clients */
#define RING_AT(queue) (4096u + 8192u * (queue)) /* descriptors; + 2048 available, + 4096 used */

#define REQUIRE(condition) \
	do { \
		if (!(condition)) { \
			fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
			abort(); \
		} \
	} while (0)

struct input {
	const uint8_t *bytes;
	size_t size;
};

struct harness {
	struct device device;
	int vmm, vhost, listener, epoll;
	int kick[QUEUE_COUNT], call[QUEUE_COUNT];
	struct sockaddr_un address;
	socklen_t address_size;
	bool ended;
};

static struct harness harness; /* too large for a stack under sanitizers */
static int memory_fd = -1, unsealed_fd = -1;
static uint8_t *memory;

static inline uint32_t take(struct input *input, unsigned bytes)
{
	uint32_t value = 0;

	while (bytes-- > 0 && input->size > 0) {
		value = value << 8 | *input->bytes++;
		input->size--;
	}
	return value;
}

static inline void harness_open(void)
{
	struct sockaddr_un any = {.sun_family = AF_UNIX};
	int pair[2];

	if (memory_fd < 0) {
		signal(SIGPIPE, SIG_IGN);
		memory_fd = memfd_create("guest", MFD_ALLOW_SEALING | MFD_CLOEXEC);
		unsealed_fd = memfd_create("unsealed", MFD_ALLOW_SEALING | MFD_CLOEXEC);
		REQUIRE(ftruncate(memory_fd, MEMORY_BYTES) == 0 && ftruncate(unsealed_fd, MEMORY_BYTES) == 0);
		REQUIRE(fcntl(memory_fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0);
		memory = mmap(NULL, MEMORY_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, memory_fd, 0);
		REQUIRE(memory != MAP_FAILED);
	}
	memset(memory, 0, MEMORY_BYTES);
	REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
	harness.vmm = pair[0];
	harness.vhost = pair[1];
	harness.listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	REQUIRE(bind(harness.listener, (struct sockaddr *)&any, sizeof(sa_family_t)) == 0 && listen(harness.listener, 8) == 0);
	harness.address_size = sizeof(harness.address);
	REQUIRE(getsockname(harness.listener, (struct sockaddr *)&harness.address, &harness.address_size) == 0);
	harness.epoll = epoll_create1(EPOLL_CLOEXEC);
	for (unsigned i = 0; i < QUEUE_COUNT; i++) {
		harness.kick[i] = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
		harness.call[i] = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	}
	REQUIRE(device_init(&harness.device, harness.epoll, harness.vhost, harness.listener, 3));
	harness.device.now_ms = 1000;
	harness.ended = false;
}

static inline void harness_close(void)
{
	device_clear(&harness.device);
	close(harness.vmm);
	close(harness.vhost);
	close(harness.listener);
	close(harness.epoll);
	for (unsigned i = 0; i < QUEUE_COUNT; i++) {
		close(harness.kick[i]);
		close(harness.call[i]);
	}
}

static inline void check_device(const struct device *device)
{
	unsigned greeting = 0;

	REQUIRE(device->reset_count <= RESETS_MAX);
	for (unsigned i = 0; i < SLOTS_USED; i++) {
		const struct connection *connection = &device->table.slots[i];

		if (connection->state == FREE) {
			REQUIRE(connection->fd < 0 && connection->backlog.bytes == NULL && !connection->in_control &&
				!connection->in_data && !connection->in_deadline);
			continue;
		}
		greeting += connection->state == GREETING;
		REQUIRE((connection->fd < 0) == (connection->state == CLOSING));
		REQUIRE(connection->backlog.size_bytes <= WINDOW_BYTES);
		REQUIRE(connection->received_bytes - connection->forwarded_bytes == connection->backlog.size_bytes);
		REQUIRE(connection->received_bytes - connection->announced_bytes <= WINDOW_BYTES);
		REQUIRE(!connection->in_data || (connection->state == ESTABLISHED && connection->readable && !connection->ended));
		REQUIRE(connection->in_control == (connection->pending != 0));
		REQUIRE(connection->state != CLOSING || connection->in_deadline);
		REQUIRE(connection->backlog.size_bytes == 0 || connection->blocked);
	}
	REQUIRE(greeting == device->greeting_count);
}

/* One turn of main.c's loop that does not wait. */
static inline void harness_turn(void)
{
	struct device *device = &harness.device;
	struct epoll_event events[64];
	int count;

	if (harness.ended)
		return;
	count = epoll_wait(harness.epoll, events, 64, 0);
	for (int i = 0; i < count; i++) {
		const char *why = NULL;
		enum frontend_event heard;

		if (events[i].data.u64 >> SOURCE_SHIFT != SOURCE_FRONTEND) {
			device_event(device, events[i].data.u64, events[i].events);
			continue;
		}
		heard = frontend_receive(&device->frontend, &why);
		if (heard == FRONTEND_CLOSED || heard == FRONTEND_FAULT) {
			REQUIRE((heard == FRONTEND_FAULT) == (why != NULL));
			harness.ended = true;
			return;
		}
		if (heard == FRONTEND_MESSAGE)
			device_queues_changed(device);
	}
	device_expire(device);
	device_run(device);
	check_device(device);
}

static inline void send_message(uint32_t request, uint32_t flags, uint32_t size, const void *payload, uint32_t payload_size,
				const int *fds, unsigned fd_count)
{
	union {
		char bytes[CMSG_SPACE(16 * sizeof(int))];
		struct cmsghdr align;
	} control = {0};
	uint32_t header[3] = {request, flags, size};
	struct iovec parts[2] = {{header, sizeof(header)}, {(void *)(uintptr_t)payload, payload_size}};
	struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
	uint8_t ignored[4096];

	if (fd_count > 0) {
		struct cmsghdr *first;

		message.msg_control = control.bytes;
		message.msg_controllen = CMSG_SPACE(fd_count * sizeof(int));
		first = CMSG_FIRSTHDR(&message);
		first->cmsg_level = SOL_SOCKET;
		first->cmsg_type = SCM_RIGHTS;
		first->cmsg_len = CMSG_LEN(fd_count * sizeof(int));
		memcpy(CMSG_DATA(first), fds, fd_count * sizeof(int));
	}
	if (sendmsg(harness.vmm, &message, MSG_DONTWAIT | MSG_NOSIGNAL) < 0)
		return;
	harness_turn();
	while (recv(harness.vmm, ignored, sizeof(ignored), MSG_DONTWAIT) > 0)
		continue;
}

struct well_formed {
	uint32_t request;
	uint8_t payload[64];
	uint32_t size;
	int fd;
};

/* The messages of a proper VMM, in the order it sends them; `step` 0 to WELL_FORMED_COUNT - 1. */
#define WELL_FORMED_COUNT 18u
static inline struct well_formed well_formed_message(unsigned step)
{
	static const uint8_t per_queue[] = {8, 10, 9, 12, 13, 18}; /* NUM BASE ADDR KICK CALL ENABLE */
	struct well_formed message = {.fd = -1};
	uint32_t queue, state[2];
	uint64_t words[5];

	switch (step) {
	case 0:
		message.request = 3; /* SET_OWNER */
		return message;
	case 1:
		message.request = 16; /* SET_PROTOCOL_FEATURES */
		memcpy(message.payload, &(uint64_t){1 << 9 | 1 << 3}, message.size = 8);
		return message;
	case 2:
		message.request = 2; /* SET_FEATURES */
		memcpy(message.payload, &(uint64_t){UINT64_C(1) << 32 | 1 << 30 | 1 << 29}, message.size = 8);
		return message;
	case 3:
		message.request = 5; /* SET_MEM_TABLE */
		words[0] = 1;
		words[1] = GUEST_BASE;
		words[2] = MEMORY_BYTES;
		words[3] = VMM_BASE;
		words[4] = 0;
		memcpy(message.payload, words, message.size = sizeof(words));
		message.fd = memory_fd;
		return message;
	case 4: /* GET_VRING_BASE of each, for whoever wants to stop */
	case 5:
		message.request = 11;
		state[0] = step - 4;
		state[1] = 0;
		memcpy(message.payload, state, message.size = sizeof(state));
		return message;
	default:
		break;
	}
	queue = (step - 6) / 6 % 2;
	message.request = per_queue[(step - 6) % 6];
	state[0] = queue;
	state[1] = message.request == 8 ? RING_SIZE : message.request == 18;
	memcpy(message.payload, state, message.size = sizeof(state));
	if (message.request == 9) {
		words[0] = queue;
		words[1] = VMM_BASE + RING_AT(queue);
		words[2] = VMM_BASE + RING_AT(queue) + 4096;
		words[3] = VMM_BASE + RING_AT(queue) + 2048;
		words[4] = 0;
		memcpy(message.payload, words, message.size = sizeof(words));
	}
	if (message.request == 12)
		message.fd = harness.kick[queue];
	if (message.request == 13)
		message.fd = harness.call[queue];
	return message;
}

static inline void send_well_formed(unsigned step)
{
	struct well_formed message = well_formed_message(step);

	send_message(message.request, 1, message.size, message.payload, message.size, &message.fd, message.fd >= 0);
}

static inline void harness_start(void)
{
	for (unsigned step = 0; step < WELL_FORMED_COUNT; step++) {
		if (step != 4 && step != 5)
			send_well_formed(step);
	}
}

#endif
