/* Guest memory as the VMM describes it: a few shared-memory regions, each with a guest-physical and a VMM address.
 *
 * In: the payload of SET_MEM_TABLE and its descriptors. Out: pointers and iovecs that lie wholly inside a mapped region.
 * Nobody else turns a number from the guest or the VMM into a pointer.
 *
 * The bytes behind those pointers change at any time. A region is taken only if its file is sealed against shrinking, so a
 * touch cannot raise SIGBUS for lack of a file behind it. Each mapping has an inaccessible page on either side.
 */
#ifndef SANDBOX_VSOCK_MEMORY_H
#define SANDBOX_VSOCK_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#define MEMORY_REGIONS_MAX 8 /* VHOST_USER_MAX_RAM_SLOTS without CONFIGURE_MEM_SLOTS */

/* One entry of SET_MEM_TABLE, as on the wire. */
struct memory_region_wire {
	uint64_t guest_address;
	uint64_t size_bytes;
	uint64_t vmm_address;
	uint64_t file_offset;
};

struct memory_region {
	uint64_t guest_address;
	uint64_t size_bytes;
	uint64_t vmm_address;
	uint8_t *bytes;
};

struct memory {
	unsigned count;
	struct memory_region regions[MEMORY_REGIONS_MAX];
};

/* Maps `count` regions, one descriptor each (the caller keeps and closes them), in place of what `memory` holds.
 * 0, or -1 with *why set and `memory` unchanged. */
int memory_replace(struct memory *memory, const struct memory_region_wire *wire, const int *fds, unsigned count,
		   const char **why);
void memory_clear(struct memory *memory);

/* The `size` bytes at a VMM address, or NULL if they are not all in one region. */
void *memory_at_vmm_address(const struct memory *memory, uint64_t address, uint64_t size);

/* Appends the guest-physical range to iov[0..capacity). Number of entries used, -1 if any byte is outside guest memory,
 * -2 if `capacity` is too small. */
int memory_iov(const struct memory *memory, uint64_t address, uint32_t size, struct iovec *iov, unsigned capacity);

#endif
