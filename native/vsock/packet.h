/* A packet's header, and bytes in the buffers a guest offers for packets. The guest may frame a packet as it likes, so a
 * header can begin, end and be split anywhere. */
#ifndef SANDBOX_VSOCK_PACKET_H
#define SANDBOX_VSOCK_PACKET_H

#include <linux/virtio_vsock.h>
#include <sys/socket.h> /* before vm_sockets.h, which needs sa_family_t */
#include <linux/vm_sockets.h>
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>

#include "vring.h"

#define HEADER_BYTES  ((uint32_t)sizeof(struct virtio_vsock_hdr))
#define SHUTDOWN_BOTH (VIRTIO_VSOCK_SHUTDOWN_RCV | VIRTIO_VSOCK_SHUTDOWN_SEND)
#define IOV_ENTRIES   1024u /* IOV_MAX, and the longest chain of the largest queue */
#define BATCH	      128u  /* turns one queue gets before the other and new events are looked at */

_Static_assert(sizeof(struct virtio_vsock_hdr) == 44, "virtio 1.2 §5.10.6");
_Static_assert(IOV_ENTRIES >= QUEUE_SIZE_MAX, "a chain of single-region buffers always fits");

/* The first bytes of iov, as many as there are up to `size`. */
static inline uint32_t iov_read(const struct iovec *iov, unsigned count, void *target, uint32_t size)
{
	uint32_t done = 0;

	for (unsigned i = 0; i < count && done < size; i++) {
		uint32_t part = iov[i].iov_len < size - done ? (uint32_t)iov[i].iov_len : size - done;

		memcpy((uint8_t *)target + done, iov[i].iov_base, part);
		done += part;
	}
	return done;
}

/* Puts `size` bytes at the beginning of iov. */
static inline void iov_write(const struct iovec *iov, unsigned count, const void *source, uint32_t size)
{
	uint32_t done = 0;

	for (unsigned i = 0; i < count && done < size; i++) {
		uint32_t part = iov[i].iov_len < size - done ? (uint32_t)iov[i].iov_len : size - done;

		memcpy(iov[i].iov_base, (const uint8_t *)source + done, part);
		done += part;
	}
}

/* The bytes [skip, skip + size) of iov, as entries of out[0..capacity); bytes found. */
static inline uint32_t iov_slice(const struct iovec *iov, unsigned count, uint32_t skip, uint32_t size, struct iovec *out,
			  unsigned capacity, unsigned *out_count)
{
	uint32_t done = 0;

	*out_count = 0;
	for (unsigned i = 0; i < count && done < size && *out_count < capacity; i++) {
		uint32_t length = (uint32_t)iov[i].iov_len;

		if (skip >= length) {
			skip -= length;
			continue;
		}
		length -= skip;
		if (length > size - done)
			length = size - done;
		out[(*out_count)++] = (struct iovec){(uint8_t *)iov[i].iov_base + skip, length};
		done += length;
		skip = 0;
	}
	return done;
}

#endif
