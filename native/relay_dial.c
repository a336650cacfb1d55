/*
 * Connecting to the first of several addresses that answers (RFC 8305): one after the other in the order given, the
 * next when one fails or after STAGGER_MS, all until one is connected or connect_ms is over.
 */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "relay.h"

void address_text(const union address *address, char text[46], uint16_t *port)
{
    bool v6 = address->any.sa_family == AF_INET6;
    const void *number = v6 ? (const void *)&address->v6.sin6_addr : (const void *)&address->v4.sin_addr;
    if (!inet_ntop(v6 ? AF_INET6 : AF_INET, number, text, 46))
        text[0] = '\0';
    *port = ntohs(v6 ? address->v6.sin6_port : address->v4.sin_port);
}

static void attempt_close(struct dial *dial, unsigned attempt)
{
    if (dial->fds[attempt] < 0)
        return;
    close(dial->fds[attempt]);
    dial->fds[attempt] = -1;
    dial->live--;
}

void dial_stop(struct pair *pair)
{
    if (!pair->dial)
        return;
    for (unsigned attempt = 0; attempt < pair->dial->next; attempt++)
        attempt_close(pair->dial, attempt);
    free(pair->dial);
    pair->dial = NULL;
}

static void failed(struct worker *worker, struct pair *pair, int error)
{
    dial_stop(pair);
    struct event *event = worker_event(worker, RELAY_FAILED, pair, 0);
    if (!event)
        return;
    event->face.error = error;
    worker_tell(worker, event);
}

static void connected(struct worker *worker, struct pair *pair, unsigned attempt)
{
    struct dial *dial = pair->dial;
    int fd = dial->fds[attempt];
    struct event *event = worker_event(worker, RELAY_OPENED, pair, 0);
    if (event) {
        address_text(&dial->addresses[attempt], event->face.address, &event->face.port);
        worker_tell(worker, event);
    }
    dial->fds[attempt] = -1;
    dial_stop(pair);
    int on = 1, idle_s = 60, interval_s = 30, count = 4;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof interval_s);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
    pair->attempt = (uint8_t)attempt;
    /* Edges before this one are not known, so the first calls find out. */
    pair->upstream = (struct end){.fd = fd, .readable = true, .writable = true};
    pair->moved_at = worker->now;
    worker_mark(worker, pair);
}

/* 0 when the attempt is under way. */
static int attempt_start(struct worker *worker, struct pair *pair, unsigned attempt)
{
    struct dial *dial = pair->dial;
    const union address *address = &dial->addresses[attempt];
    bool v6 = address->any.sa_family == AF_INET6;
    int fd = socket(v6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -errno;
    struct epoll_event watched = {
        .events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, .data.u64 = worker_tag(pair, SOURCE_UPSTREAM, attempt)};
    if ((connect(fd, &address->any, v6 ? sizeof address->v6 : sizeof address->v4) < 0 && errno != EINPROGRESS) ||
        epoll_ctl(worker->epoll_fd, EPOLL_CTL_ADD, fd, &watched) < 0) {
        int error = errno;
        close(fd);
        return -error;
    }
    dial->fds[attempt] = fd;
    dial->live++;
    return 0;
}

/* Starts what is due; says so when nothing is left. */
static void dial_go_on(struct worker *worker, struct pair *pair)
{
    struct dial *dial = pair->dial;
    while (dial->next < dial->count && (dial->live == 0 || worker->now >= dial->next_at)) {
        int rc = attempt_start(worker, pair, dial->next);
        dial->next++;
        if (rc == 0)
            dial->next_at = worker->now + STAGGER_MS;
        else
            dial->error = -rc;
    }
    if (dial->live == 0)
        failed(worker, pair, dial->error);
    else
        worker_schedule(worker, pair, dial_next(dial));
}

void dial_start(struct worker *worker, struct pair *pair, const struct command *command)
{
    struct dial *dial = calloc(1, sizeof *dial + command->count * sizeof dial->addresses[0]);
    if (!dial) {
        failed(worker, pair, ENOMEM);
        return;
    }
    uint32_t limit = pair->watch->listener->limits.connect_ms;
    dial->end_at = limit ? worker->now + limit : NEVER;
    dial->count = command->count;
    for (unsigned attempt = 0; attempt < RELAY_ADDRESSES_MAX; attempt++)
        dial->fds[attempt] = -1;
    memcpy(dial->addresses, command->addresses, command->count * sizeof dial->addresses[0]);
    pair->dial = dial;
    dial_go_on(worker, pair);
}

void dial_event(struct worker *worker, struct pair *pair, unsigned attempt)
{
    struct dial *dial = pair->dial;
    if (attempt >= dial->count || dial->fds[attempt] < 0)
        return;
    int error = 0;
    socklen_t length = sizeof error;
    if (getsockopt(dial->fds[attempt], SOL_SOCKET, SO_ERROR, &error, &length) < 0)
        error = errno;
    union address peer;
    length = sizeof peer;
    if (error == 0 && getpeername(dial->fds[attempt], &peer.any, &length) == 0) {
        connected(worker, pair, attempt);
        return;
    }
    if (error == 0) /* still under way */
        return;
    dial->error = error;
    attempt_close(dial, attempt);
    dial->next_at = worker->now;
    dial_go_on(worker, pair);
}

void dial_tick(struct worker *worker, struct pair *pair)
{
    if (worker->now >= pair->dial->end_at)
        failed(worker, pair, ETIMEDOUT);
    else if (worker->now >= dial_next(pair->dial))
        dial_go_on(worker, pair);
}

uint64_t dial_next(const struct dial *dial)
{
    return dial->next < dial->count && dial->next_at < dial->end_at ? dial->next_at : dial->end_at;
}
