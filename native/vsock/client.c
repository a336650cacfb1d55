/* The host's side: clients of the listening socket and their greeting.
 *
 * A client sends "CONNECT <port>\n", at most GREETING_BYTES long, and gets "OK <host port>\n" when the guest accepts; else
 * it is closed. The greeting is looked at before it is taken, so bytes glued to it stay in the socket for the guest.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "vsock.h"

#define GREETING_BYTES 32u
#define WORD	       "CONNECT "
#define WORD_BYTES     (sizeof(WORD) - 1)

/* The port in a whole greeting without its newline, or -1. */
static int64_t greeting_port(const char *text, size_t size)
{
	uint64_t port = 0;

	if (size <= WORD_BYTES || size > WORD_BYTES + 10 || memcmp(text, WORD, WORD_BYTES) != 0)
		return -1;
	for (size_t i = WORD_BYTES; i < size; i++) {
		if (text[i] < '0' || text[i] > '9')
			return -1;
		port = port * 10 + (uint64_t)(text[i] - '0');
	}
	return port < UINT32_MAX ? (int64_t)port : -1; /* the last one is VMADDR_PORT_ANY */
}

static void leave_greeting(struct device *device, struct connection *connection)
{
	TAILQ_REMOVE(&device->greeting, connection, deadline);
	connection->in_deadline = false;
	device->greeting_count--;
}

void client_expire(struct device *device, struct connection *connection)
{
	leave_greeting(device, connection);
	connection_drop(device, connection);
}

static void greet(struct device *device, struct connection *connection)
{
	char text[GREETING_BYTES];
	ssize_t size = recv(connection->fd, text, sizeof(text), MSG_PEEK | MSG_DONTWAIT);
	const char *newline;
	int64_t port;

	if (size < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	newline = size > 0 ? memchr(text, '\n', (size_t)size) : NULL;
	if (newline == NULL) {
		if (size <= 0 || (size_t)size == sizeof(text) || connection->half_closed)
			client_expire(device, connection);
		return;
	}
	port = greeting_port(text, (size_t)(newline - text));
	size = newline - text + 1;
	/* Taken even if refused: closing with bytes unread would show the client an error instead of the end. */
	if (recv(connection->fd, text, (size_t)size, MSG_DONTWAIT) != size || port < 0 || !device->ready) {
		client_expire(device, connection);
		return;
	}
	leave_greeting(device, connection);
	connection_dial(device, connection, (uint32_t)port);
}

void client_event(struct device *device, struct connection *connection, uint32_t events)
{
	if (events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR))
		connection->half_closed = true;
	if (connection->state == GREETING) {
		if (events & (EPOLLHUP | EPOLLERR))
			client_expire(device, connection);
		else
			greet(device, connection);
		return;
	}
	if (events & EPOLLOUT)
		connection_writable(device, connection);
	if (connection->state != FREE && (events & (EPOLLHUP | EPOLLERR)))
		connection_client_gone(device, connection);
	if (connection->state != FREE && (events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)))
		connection_readable(device, connection);
}

void clients_accept(struct device *device)
{
	device->clients_wait = false;
	for (;;) {
		struct connection *connection;
		int fd;

		if (device->greeting_count == GREETINGS_MAX) {
			device->clients_wait = true;
			return;
		}
		fd = accept4(device->listen_fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
		if (fd < 0 && (errno == EINTR || errno == ECONNABORTED))
			continue;
		if (fd < 0) {
			/* No descriptor or no memory: the client stays queued until the next deadline or event. */
			device->clients_wait = errno != EAGAIN;
			return;
		}
		connection = table_take(&device->table, fd);
		if (connection == NULL && device_end_oldest_closing(device))
			connection = table_take(&device->table, fd);
		if (connection == NULL) {
			close(fd);
			continue;
		}
		connection->deadline_ms = device->now_ms + GREETING_MS;
		connection->in_deadline = true;
		TAILQ_INSERT_TAIL(&device->greeting, connection, deadline);
		device->greeting_count++;
		if (!connection_watch(device, connection, EPOLL_CTL_ADD, false))
			client_expire(device, connection);
	}
}
