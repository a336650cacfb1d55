/* Bytes from the guest that a slow host client has not taken yet: a ring of at most BACKLOG_BYTES, allocated only while it
 * holds something. Its size is the credit granted to the guest, so a guest that keeps to its credit always fits.
 */
#ifndef SANDBOX_VSOCK_BACKLOG_H
#define SANDBOX_VSOCK_BACKLOG_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

#define BACKLOG_BYTES (256u * 1024u)

struct backlog {
	uint8_t *bytes;
	uint32_t start;
	uint32_t size_bytes;
};

/* Copies the iovecs in, from `skip` bytes on. False: no memory, or more than fits; then nothing was taken. */
bool backlog_append(struct backlog *backlog, const struct iovec *iov, unsigned iov_count, uint32_t skip);
/* Sends what the socket takes now. Bytes sent (0 when it takes none), or -1 when the peer is gone. */
ssize_t backlog_send(struct backlog *backlog, int fd);
void backlog_clear(struct backlog *backlog);

#endif
