#define _GNU_SOURCE
#include "memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define PAGE_BYTES 4096u

static bool overlaps(uint64_t a, uint64_t a_size, uint64_t b, uint64_t b_size)
{
	return a < b + b_size && b < a + a_size;
}

static const char *region_fault(const struct memory_region_wire *region, const struct memory_region_wire *earlier,
				unsigned earlier_count, int fd)
{
	uint64_t end;
	struct stat st;
	int seals;

	if (region->size_bytes == 0)
		return "memory region of size zero";
	if ((region->guest_address | region->size_bytes | region->vmm_address | region->file_offset) % PAGE_BYTES)
		return "memory region not page-aligned";
	if (__builtin_add_overflow(region->guest_address, region->size_bytes, &end) ||
	    __builtin_add_overflow(region->vmm_address, region->size_bytes, &end) ||
	    __builtin_add_overflow(region->file_offset, region->size_bytes, &end) || end > INT64_MAX)
		return "memory region overflows";
	if (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode) || (uint64_t)st.st_size < end)
		return "memory region larger than its file";
	seals = fcntl(fd, F_GET_SEALS);
	if (seals < 0 || !(seals & F_SEAL_SHRINK))
		return "memory region's file is not sealed against shrinking";
	for (unsigned i = 0; i < earlier_count; i++) {
		if (overlaps(region->guest_address, region->size_bytes, earlier[i].guest_address, earlier[i].size_bytes) ||
		    overlaps(region->vmm_address, region->size_bytes, earlier[i].vmm_address, earlier[i].size_bytes))
			return "memory regions overlap";
	}
	return NULL;
}

static uint8_t *map_between_guards(int fd, uint64_t offset, uint64_t size)
{
	uint8_t *reserved;

	if (size > SIZE_MAX - 2 * PAGE_BYTES)
		return NULL;
	reserved = mmap(NULL, size + 2 * PAGE_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (reserved == MAP_FAILED)
		return NULL;
	if (mmap(reserved + PAGE_BYTES, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, fd,
		 (off_t)offset) == MAP_FAILED) {
		munmap(reserved, size + 2 * PAGE_BYTES);
		return NULL;
	}
	return reserved + PAGE_BYTES;
}

int memory_replace(struct memory *memory, const struct memory_region_wire *wire, const int *fds, unsigned count,
		   const char **why)
{
	struct memory next = {0};

	if (count == 0 || count > MEMORY_REGIONS_MAX) {
		*why = "memory table with no regions or too many";
		return -1;
	}
	for (unsigned i = 0; i < count; i++) {
		struct memory_region *region = &next.regions[i];

		*why = region_fault(&wire[i], wire, i, fds[i]);
		if (*why != NULL)
			break;
		region->guest_address = wire[i].guest_address;
		region->size_bytes = wire[i].size_bytes;
		region->vmm_address = wire[i].vmm_address;
		region->bytes = map_between_guards(fds[i], wire[i].file_offset, wire[i].size_bytes);
		if (region->bytes == NULL) {
			*why = "memory region cannot be mapped";
			break;
		}
		next.count++;
	}
	if (next.count != count) {
		memory_clear(&next);
		return -1;
	}
	memory_clear(memory);
	*memory = next;
	return 0;
}

void memory_clear(struct memory *memory)
{
	for (unsigned i = 0; i < memory->count; i++)
		munmap(memory->regions[i].bytes - PAGE_BYTES, memory->regions[i].size_bytes + 2 * PAGE_BYTES);
	memory->count = 0;
}

void *memory_at_vmm_address(const struct memory *memory, uint64_t address, uint64_t size)
{
	for (unsigned i = 0; i < memory->count; i++) {
		const struct memory_region *region = &memory->regions[i];
		uint64_t offset = address - region->vmm_address;

		if (address >= region->vmm_address && offset < region->size_bytes && size <= region->size_bytes - offset)
			return region->bytes + offset;
	}
	return NULL;
}

int memory_iov(const struct memory *memory, uint64_t address, uint32_t size, struct iovec *iov, unsigned capacity)
{
	unsigned used = 0;

	/* A buffer may run from one region into the next: they are adjacent for the guest, not for us. */
	while (size > 0) {
		const struct memory_region *region = NULL;
		uint64_t offset = 0;
		uint64_t part;

		for (unsigned i = 0; i < memory->count && region == NULL; i++) {
			offset = address - memory->regions[i].guest_address;
			if (address >= memory->regions[i].guest_address && offset < memory->regions[i].size_bytes)
				region = &memory->regions[i];
		}
		if (region == NULL)
			return -1;
		if (used == capacity)
			return -2;
		part = region->size_bytes - offset;
		if (part > size)
			part = size;
		iov[used].iov_base = region->bytes + offset;
		iov[used].iov_len = part;
		used++;
		address += part; /* cannot wrap: no region's end does */
		size -= (uint32_t)part;
	}
	return (int)used;
}
