/* sandbox-vsock: a virtio socket device for one virtual machine, spoken to over vhost-user.
 *
 * In: two descriptors and a CID (see usage). --vhost-fd is a connected stream socket to the VMM; --listen-fd a listening
 * Unix socket for clients of the host. Nothing else: no file, no environment, no other descriptor.
 *
 * Ends with 0 when the VMM has closed its end, 2 on wrong arguments, 3 when the VMM broke the protocol, 4 when guest memory
 * is gone, 1 on anything else. What the guest does is no reason to end.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "vsock.h"

#define EXIT_USAGE  2
#define EXIT_VMM    3
#define EXIT_MEMORY 4
#define GO_ON	    (-1)
#define EVENTS_MAX  64
#define MESSAGES_MAX 64 /* before others get a turn */
#define FDS_WANTED  (CONNECTIONS_MAX + 64) /* clients, and what the VMM may have sent at once */

static const char usage[] = "usage: sandbox-vsock --vhost-fd N --listen-fd M --guest-cid CID";

static int complain(int status, const char *step, const char *why)
{
	fprintf(stderr, "sandbox-vsock: %s: %s\n", step, why);
	return status;
}

static bool parse_number(const char *text, uint64_t max, uint64_t *value)
{
	char *end;

	errno = 0;
	*value = strtoull(text, &end, 10);
	return errno == 0 && *text >= '0' && *text <= '9' && *end == '\0' && *value <= max;
}

static bool parse_arguments(int argc, char **argv, int *vhost_fd, int *listen_fd, uint64_t *guest_cid)
{
	static const struct option options[] = {
		{"vhost-fd", required_argument, NULL, 'v'},
		{"listen-fd", required_argument, NULL, 'l'},
		{"guest-cid", required_argument, NULL, 'c'},
		{0},
	};
	uint64_t value;
	int option;

	opterr = 0;
	*vhost_fd = *listen_fd = -1;
	*guest_cid = 0;
	while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
		if (option == '?' || !parse_number(optarg, option == 'c' ? UINT32_MAX : INT32_MAX, &value))
			return false;
		if (option == 'v')
			*vhost_fd = (int)value;
		if (option == 'l')
			*listen_fd = (int)value;
		if (option == 'c')
			*guest_cid = value;
	}
	/* CIDs 0 to 2 and the last one are taken (linux/vm_sockets.h). */
	return optind == argc && *vhost_fd > STDERR_FILENO && *listen_fd > STDERR_FILENO && *vhost_fd != *listen_fd &&
	       *guest_cid > 2 && *guest_cid < UINT32_MAX;
}

static bool is_unix_stream(int fd, int listening)
{
	int domain, type, accepting;
	socklen_t size = sizeof(int);

	return getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size) == 0 && domain == AF_UNIX &&
	       getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) == 0 && type == SOCK_STREAM &&
	       getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &accepting, &size) == 0 && accepting == listening;
}

/* Descriptors this process was not meant to have. */
static bool close_all_but(int a, int b)
{
	unsigned low = (unsigned)(a < b ? a : b);
	unsigned high = (unsigned)(a < b ? b : a);

	return (low == 3 || close_range(3, low - 1, 0) == 0) && (high == low + 1 || close_range(low + 1, high - 1, 0) == 0) &&
	       close_range(high + 1, ~0u, 0) == 0;
}

static void memory_is_gone(int signal_number)
{
	static const char text[] = "sandbox-vsock: guest memory is gone\n";

	(void)signal_number;
	if (write(STDERR_FILENO, text, sizeof(text) - 1) < 0)
		_exit(EXIT_MEMORY);
	_exit(EXIT_MEMORY);
}

static bool confine(void)
{
	const struct rlimit no_core = {0, 0};
	const struct sigaction on_bus = {.sa_handler = memory_is_gone};
	struct rlimit files;

	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 || prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) < 0 ||
	    setrlimit(RLIMIT_CORE, &no_core) < 0 || sigaction(SIGBUS, &on_bus, NULL) < 0 ||
	    signal(SIGPIPE, SIG_IGN) == SIG_ERR || getrlimit(RLIMIT_NOFILE, &files) < 0)
		return false;
	if (files.rlim_cur >= FDS_WANTED || files.rlim_cur == files.rlim_max)
		return true;
	files.rlim_cur = files.rlim_max < FDS_WANTED ? files.rlim_max : FDS_WANTED;
	return setrlimit(RLIMIT_NOFILE, &files) == 0;
}

static uint64_t clock_ms(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

/* Obeys what the VMM has said. GO_ON, or the status to end with. */
static int obey(struct device *device)
{
	for (unsigned i = 0; i < MESSAGES_MAX; i++) {
		const char *why = NULL;

		switch (frontend_receive(&device->frontend, &why)) {
		case FRONTEND_IDLE:
			return GO_ON;
		case FRONTEND_MESSAGE:
			device_queues_changed(device);
			break;
		case FRONTEND_CLOSED:
			return EXIT_SUCCESS;
		case FRONTEND_FAULT:
			return complain(EXIT_VMM, "vhost-user", why);
		}
	}
	return GO_ON;
}

static int serve(struct device *device)
{
	for (;;) {
		struct epoll_event events[EVENTS_MAX];
		int count = epoll_wait(device->epoll_fd, events, EVENTS_MAX, device_timeout(device));

		if (count < 0 && errno != EINTR)
			return complain(EXIT_FAILURE, "epoll_wait", strerror(errno));
		device->now_ms = clock_ms();
		/* The VMM first: who dials after it has set up the queues must not be refused. */
		for (int i = 0; i < count; i++) {
			int status = events[i].data.u64 >> SOURCE_SHIFT == SOURCE_FRONTEND ? obey(device) : GO_ON;

			if (status != GO_ON)
				return status;
		}
		for (int i = 0; i < count; i++)
			device_event(device, events[i].data.u64, events[i].events);
		device_expire(device);
		device_run(device);
	}
}

int main(int argc, char **argv)
{
	static struct device device; /* about 400 KiB */
	uint64_t guest_cid;
	int vhost_fd, listen_fd, epoll_fd;

	if (!parse_arguments(argc, argv, &vhost_fd, &listen_fd, &guest_cid)) {
		fprintf(stderr, "%s\n", usage);
		return EXIT_USAGE;
	}
	if (!is_unix_stream(vhost_fd, 0))
		return complain(EXIT_USAGE, "--vhost-fd", "not a connected Unix stream socket");
	if (!is_unix_stream(listen_fd, 1))
		return complain(EXIT_USAGE, "--listen-fd", "not a listening Unix stream socket");
	if (!close_all_but(vhost_fd, listen_fd))
		return complain(EXIT_FAILURE, "close_range", strerror(errno));
	if (!confine())
		return complain(EXIT_FAILURE, "giving up privileges", strerror(errno));
	epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	if (epoll_fd < 0 || !device_init(&device, epoll_fd, vhost_fd, listen_fd, guest_cid))
		return complain(EXIT_FAILURE, "epoll", strerror(errno));
	device.now_ms = clock_ms();
	return serve(&device);
}
