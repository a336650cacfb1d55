/* The vhost-user stream: well-formed messages with bytes changed, in any order, with any descriptors, and raw bytes. */
#define _GNU_SOURCE
#include "fuzz_harness.h"

static int descriptor(unsigned kind)
{
	switch (kind % 6) {
	case 0:
		return memory_fd;
	case 1:
		return harness.kick[0];
	case 2:
		return unsealed_fd;
	case 3:
		return harness.vmm;
	case 4:
		return harness.call[1];
	default:
		return harness.epoll;
	}
}

static void send_changed(struct input *input, unsigned step)
{
	struct well_formed message = well_formed_message(step % WELL_FORMED_COUNT);
	unsigned changes = take(input, 1);
	uint32_t flags = 1, size = message.size;
	unsigned fd_count = message.fd >= 0;
	int fds[16];

	fds[0] = message.fd;
	for (unsigned i = 0; i < (changes & 7); i++) {
		unsigned at = take(input, 1) % sizeof(message.payload);

		message.payload[at] = (uint8_t)take(input, 1);
	}
	if (changes & 8)
		size = take(input, 2);
	if (changes & 16)
		flags = take(input, 1);
	if (changes & 32)
		message.request = take(input, 1);
	if (changes & 64) {
		fd_count = take(input, 1) % 16;
		for (unsigned i = 0; i < fd_count; i++)
			fds[i] = descriptor(take(input, 1));
	}
	send_message(message.request, flags, size, message.payload, size < sizeof(message.payload) ? size : sizeof(message.payload),
		     fds, fd_count);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
	struct input input = {bytes, size};

	harness_open();
	if (take(&input, 1) & 1)
		harness_start();
	while (input.size > 0 && !harness.ended) {
		unsigned what = take(&input, 1);

		if (what < 128) {
			send_changed(&input, what);
		} else if (what < 160) {
			send_well_formed(what % WELL_FORMED_COUNT);
		} else if (what < 192) {
			memory[RING_AT(what & 1) + 2048 + 2] = (uint8_t)take(&input, 1);
			eventfd_write(harness.kick[what & 1], 1);
			harness_turn();
		} else {
			size_t part = what - 192 < input.size ? what - 192 : input.size;

			if (send(harness.vmm, input.bytes, part, MSG_DONTWAIT | MSG_NOSIGNAL) < 0)
				break;
			input.bytes += part;
			input.size -= part;
			harness_turn();
		}
	}
	harness_close();
	return 0;
}
