#define _GNU_SOURCE
#include "backlog.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

static void append_bytes(struct backlog *backlog, const uint8_t *bytes, uint32_t size)
{
	uint32_t end = (backlog->start + backlog->size_bytes) % BACKLOG_BYTES;
	uint32_t first = BACKLOG_BYTES - end < size ? BACKLOG_BYTES - end : size;

	memcpy(backlog->bytes + end, bytes, first);
	memcpy(backlog->bytes, bytes + first, size - first);
	backlog->size_bytes += size;
}

bool backlog_append(struct backlog *backlog, const struct iovec *iov, unsigned iov_count, uint32_t skip)
{
	uint64_t total = 0;

	for (unsigned i = 0; i < iov_count; i++)
		total += iov[i].iov_len;
	if (total < skip || total - skip > BACKLOG_BYTES - backlog->size_bytes)
		return false;
	if (backlog->bytes == NULL)
		backlog->bytes = malloc(BACKLOG_BYTES);
	if (backlog->bytes == NULL)
		return false;
	for (unsigned i = 0; i < iov_count; i++) {
		uint32_t size = (uint32_t)iov[i].iov_len;
		uint32_t skipped = skip < size ? skip : size;

		append_bytes(backlog, (const uint8_t *)iov[i].iov_base + skipped, size - skipped);
		skip -= skipped;
	}
	return true;
}

ssize_t backlog_send(struct backlog *backlog, int fd)
{
	ssize_t sent = 0;

	while (backlog->size_bytes > 0) {
		uint32_t first = BACKLOG_BYTES - backlog->start;
		struct iovec parts[2] = {
			{backlog->bytes + backlog->start, first < backlog->size_bytes ? first : backlog->size_bytes},
			{backlog->bytes, first < backlog->size_bytes ? backlog->size_bytes - first : 0},
		};
		struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
		ssize_t n = sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && errno == EAGAIN)
			return sent;
		if (n <= 0)
			return -1;
		backlog->start = (backlog->start + (uint32_t)n) % BACKLOG_BYTES;
		backlog->size_bytes -= (uint32_t)n;
		sent += n;
	}
	backlog_clear(backlog);
	return sent;
}

void backlog_clear(struct backlog *backlog)
{
	free(backlog->bytes);
	*backlog = (struct backlog){0};
}
