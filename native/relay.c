/*
 * The relay as Python sees it: starting and stopping, listeners, commands in, events out. The work is done by the
 * workers (relay_worker.c), on pairs (relay_pair.c, relay_dial.c, relay_pipe.c).
 *
 * A pair keeps its place under the limits until its RELAY_CLOSED was taken, so the events that wait are bounded by the
 * limits too, however fast a guest opens and closes connections.
 */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "relay.h"

#define STACK_BYTES (256u << 10)

/* ---- listeners ---- */

void listener_release(struct listener *listener)
{
    if (atomic_fetch_sub(&listener->references, 1) != 1)
        return;
    for (unsigned number = 0; number < RELAY_THREADS_MAX; number++)
        free(listener->farewells[number]);
    free(listener);
}

void listener_unwatch(struct listener *listener)
{
    if (atomic_fetch_sub(&listener->watches, 1) == 1)
        close(listener->fd);
    listener_release(listener);
}

static bool is_any(const union address *address)
{
    if (address->any.sa_family == AF_INET)
        return address->v4.sin_addr.s_addr == htonl(INADDR_ANY);
    return true;
}

/* Accepted sockets inherit these. */
static int listener_options(int fd)
{
    int on = 1, idle_s = 60, interval_s = 30, count = 4;
    int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0 ||
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) < 0 ||
        setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on) < 0 ||
        setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s) < 0 ||
        setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof interval_s) < 0 ||
        setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count) < 0)
        return -errno;
    return 0;
}

static int listener_open(struct relay *relay, uint64_t sandbox, int fd, const struct relay_limits *limits,
                         struct listener **opened, int *step)
{
    *step = RELAY_MEMORY;
    struct listener *listener = calloc(1, sizeof *listener);
    if (!listener)
        return -ENOMEM;
    atomic_store(&listener->references, 1);
    listener->sandbox = sandbox;
    listener->limits = *limits;
    int rc = 0;
    for (unsigned number = 0; number < relay->threads && rc == 0; number++) {
        listener->farewells[number] = calloc(1, sizeof(struct command));
        rc = listener->farewells[number] ? 0 : -ENOMEM;
    }
    if (rc == 0) {
        *step = RELAY_LISTENER;
        listener->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
        rc = listener->fd < 0 ? -errno : listener_options(listener->fd);
        socklen_t length = sizeof listener->own;
        if (rc == 0 && getsockname(listener->fd, &listener->own.any, &length) < 0)
            rc = -errno;
        if (rc < 0 && listener->fd >= 0)
            close(listener->fd);
        listener->own_fixed = !is_any(&listener->own);
    }
    if (rc < 0) {
        listener_release(listener);
        return rc;
    }
    *opened = listener;
    return 0;
}

static struct listener *listener_find(struct relay *relay, uint64_t sandbox)
{
    struct listener *listener;
    LIST_FOREACH(listener, &relay->listeners, others) {
        if (listener->sandbox == sandbox)
            return listener;
    }
    return NULL;
}

/* ---- commands ---- */

static void post(struct worker *worker, struct command *command)
{
    command->next = NULL;
    pthread_mutex_lock(&worker->lock);
    *worker->commands_last = command;
    worker->commands_last = &command->next;
    pthread_mutex_unlock(&worker->lock);
    if (atomic_exchange(&worker->sleeping, false)) {
        uint64_t one = 1;
        while (write(worker->wake_fd, &one, sizeof one) < 0 && errno == EINTR)
            continue;
    }
}

static int post_to_pair(struct relay *relay, uint64_t pair, unsigned direction, enum command_kind kind, uint64_t number,
                        int *step)
{
    *step = RELAY_ARGUMENT;
    if (direction > RELAY_DOWN)
        return -EINVAL;
    unsigned worker = (unsigned)(pair >> SLOT_BITS) & (RELAY_THREADS_MAX - 1);
    if (worker >= relay->threads)
        return 0;
    *step = RELAY_MEMORY;
    struct command *command = calloc(1, sizeof *command);
    if (!command)
        return -ENOMEM;
    command->kind = kind;
    command->direction = direction;
    command->pair = pair;
    command->number = number;
    post(relay->workers[worker], command);
    return 0;
}

static int chunk_new(const uint8_t *bytes, uint64_t length, struct chunk **made, int *step)
{
    *made = NULL;
    if (length == 0)
        return 0;
    *step = RELAY_MEMORY;
    if (length > SIZE_MAX - sizeof(struct chunk))
        return -ENOMEM;
    struct chunk *chunk = malloc(sizeof *chunk + length);
    if (!chunk)
        return -ENOMEM;
    *chunk = (struct chunk){.length = length};
    memcpy(chunk->bytes, bytes, length);
    *made = chunk;
    return 0;
}

static int address_read(const struct relay_address *from, union address *to)
{
    if (!memchr(from->text, '\0', sizeof from->text))
        return -EINVAL;
    *to = (union address){0};
    if (inet_pton(AF_INET, from->text, &to->v4.sin_addr) == 1) {
        to->v4.sin_family = AF_INET;
        to->v4.sin_port = htons(from->port);
        return 0;
    }
    if (inet_pton(AF_INET6, from->text, &to->v6.sin6_addr) == 1) {
        to->v6.sin6_family = AF_INET6;
        to->v6.sin6_port = htons(from->port);
        return 0;
    }
    return -EINVAL;
}

int relay_open(struct relay *relay, uint64_t pair, const struct relay_address *addresses, unsigned count,
               const uint8_t *first, uint64_t length, uint64_t up, uint64_t down, int *step)
{
    *step = RELAY_ARGUMENT;
    if (count == 0)
        return -EINVAL;
    if (count > RELAY_ADDRESSES_MAX)
        count = RELAY_ADDRESSES_MAX;
    unsigned worker = (unsigned)(pair >> SLOT_BITS) & (RELAY_THREADS_MAX - 1);
    if (worker >= relay->threads)
        return 0;
    *step = RELAY_MEMORY;
    struct command *command = calloc(1, sizeof *command + count * sizeof command->addresses[0]);
    if (!command)
        return -ENOMEM;
    int rc = chunk_new(first, length, &command->chunk, step);
    for (unsigned index = 0; index < count && rc == 0; index++) {
        *step = RELAY_ARGUMENT;
        rc = address_read(&addresses[index], &command->addresses[index]);
    }
    if (rc < 0) {
        free(command->chunk);
        free(command);
        return rc;
    }
    command->kind = COMMAND_OPEN;
    command->pair = pair;
    command->number = up;
    command->down = down;
    command->count = count;
    post(relay->workers[worker], command);
    return 0;
}

int relay_send(struct relay *relay, uint64_t pair, unsigned direction, const uint8_t *data, uint64_t length, int *step)
{
    *step = RELAY_ARGUMENT;
    if (direction > RELAY_DOWN)
        return -EINVAL;
    unsigned worker = (unsigned)(pair >> SLOT_BITS) & (RELAY_THREADS_MAX - 1);
    if (worker >= relay->threads)
        return 0;
    *step = RELAY_MEMORY;
    struct command *command = calloc(1, sizeof *command);
    if (!command)
        return -ENOMEM;
    int rc = chunk_new(data, length, &command->chunk, step);
    if (rc < 0) {
        free(command);
        return rc;
    }
    command->kind = COMMAND_SEND;
    command->direction = direction;
    command->pair = pair;
    post(relay->workers[worker], command);
    return 0;
}

int relay_read(struct relay *relay, uint64_t pair, unsigned direction, uint64_t most, int *step)
{
    return post_to_pair(relay, pair, direction, COMMAND_READ, most, step);
}

int relay_pass(struct relay *relay, uint64_t pair, unsigned direction, uint64_t count, int *step)
{
    return post_to_pair(relay, pair, direction, COMMAND_PASS, count, step);
}

int relay_finish(struct relay *relay, uint64_t pair, unsigned direction, int *step)
{
    return post_to_pair(relay, pair, direction, COMMAND_FINISH, 0, step);
}

int relay_deadline(struct relay *relay, uint64_t pair, uint32_t ms, int *step)
{
    return post_to_pair(relay, pair, RELAY_UP, COMMAND_DEADLINE, ms, step);
}

int relay_close(struct relay *relay, uint64_t pair, int reset, int *step)
{
    return post_to_pair(relay, pair, RELAY_UP, COMMAND_CLOSE, reset != 0, step);
}

/* ---- listening ---- */

/* With relay->lock held. The farewells were made with the listener, so that this cannot fail. */
static void unlisten(struct relay *relay, struct listener *listener)
{
    LIST_REMOVE(listener, others);
    atomic_store(&listener->leaving, true);
    for (unsigned number = 0; number < relay->threads; number++) {
        struct command *farewell = listener->farewells[number];
        listener->farewells[number] = NULL;
        farewell->kind = COMMAND_UNLISTEN;
        farewell->listener = listener;
        post(relay->workers[number], farewell);
    }
    listener_release(listener);
}

static int watch_add(struct worker *worker, struct listener *listener, int *step)
{
    *step = RELAY_MEMORY;
    struct watch *watch = calloc(1, sizeof *watch);
    struct command *command = calloc(1, sizeof *command);
    if (!watch || !command) {
        free(watch);
        free(command);
        return -ENOMEM;
    }
    watch->listener = listener;
    LIST_INIT(&watch->pairs);
    atomic_fetch_add(&listener->references, 1);
    atomic_fetch_add(&listener->watches, 1);
    command->kind = COMMAND_LISTEN;
    command->watch = watch;
    post(worker, command);
    *step = RELAY_WATCH;
    struct epoll_event watched = {.events = EPOLLIN | EPOLLEXCLUSIVE, .data.u64 = (uintptr_t)watch | SOURCE_WATCH};
    return epoll_ctl(worker->epoll_fd, EPOLL_CTL_ADD, listener->fd, &watched) < 0 ? -errno : 0;
}

int relay_listen(struct relay *relay, uint64_t sandbox, int listener_fd, const struct relay_limits *limits, int *step)
{
    pthread_mutex_lock(&relay->lock);
    *step = RELAY_SANDBOX;
    struct listener *listener = NULL;
    int rc = listener_find(relay, sandbox) ? -EEXIST : 0;
    if (rc == 0)
        rc = listener_open(relay, sandbox, listener_fd, limits, &listener, step);
    if (rc == 0) {
        LIST_INSERT_HEAD(&relay->listeners, listener, others);
        /* The descriptor outlives this loop whatever the workers do: nobody but `unlisten` ends a watch. */
        for (unsigned number = 0; number < relay->threads && rc == 0; number++)
            rc = watch_add(relay->workers[number], listener, step);
        if (rc < 0) {
            if (atomic_load(&listener->watches) == 0)
                close(listener->fd);
            unlisten(relay, listener);
        }
    }
    pthread_mutex_unlock(&relay->lock);
    return rc;
}

int relay_unlisten(struct relay *relay, uint64_t sandbox, int *step)
{
    *step = RELAY_SANDBOX;
    pthread_mutex_lock(&relay->lock);
    struct listener *listener = listener_find(relay, sandbox);
    if (listener)
        unlisten(relay, listener);
    pthread_mutex_unlock(&relay->lock);
    return listener ? 0 : -ENOENT;
}

/* ---- events ---- */

int relay_fd(const struct relay *relay)
{
    return relay->event_fd;
}

static void events_free(struct relay *relay, struct event *event)
{
    while (event) {
        struct event *next = event->next;
        if (event->listener) {
            atomic_fetch_sub(&event->listener->pairs, 1);
            atomic_fetch_sub(&relay->pairs, 1);
            listener_release(event->listener);
        }
        free(event);
        event = next;
    }
}

int relay_take(struct relay *relay, struct relay_event *events, unsigned most)
{
    events_free(relay, relay->taken);
    pthread_mutex_lock(&relay->events_lock);
    struct event *event = relay->taken = relay->events.first;
    struct event **end = &relay->taken;
    unsigned count = 0;
    for (; event && count < most; event = event->next, count++) {
        events[count] = event->face;
        events[count].data = event->bytes;
        end = &event->next;
    }
    relay->events.first = event;
    if (!event)
        relay->events.last = &relay->events.first;
    *end = NULL;
    if (!event && relay->signalled) {
        uint64_t total;
        relay->signalled = read(relay->event_fd, &total, sizeof total) < 0 && errno != EAGAIN;
    }
    pthread_mutex_unlock(&relay->events_lock);
    return (int)count;
}

/* ---- starting and stopping ---- */

static void worker_free(struct worker *worker)
{
    if (!worker)
        return;
    if (worker->epoll_fd >= 0)
        close(worker->epoll_fd);
    if (worker->wake_fd >= 0)
        close(worker->wake_fd);
    if (worker->spare_fd >= 0)
        close(worker->spare_fd);
    pthread_mutex_destroy(&worker->lock);
    free(worker->slots);
    free(worker->heap);
    free(worker);
}

static int worker_new(struct relay *relay, unsigned number, struct worker **made, int *step)
{
    *step = RELAY_MEMORY;
    struct worker *worker = calloc(1, sizeof *worker);
    if (!worker)
        return -ENOMEM;
    *made = worker;
    worker->relay = relay;
    worker->number = number;
    worker->epoll_fd = worker->wake_fd = worker->spare_fd = -1;
    worker->accept_at = worker->refused_at = NEVER;
    worker->slot_free = UINT32_MAX;
    worker->commands_last = &worker->commands;
    worker->out.last = &worker->out.first;
    LIST_INIT(&worker->watches);
    TAILQ_INIT(&worker->runs);
    pthread_mutex_init(&worker->lock, NULL);
    worker->slots = calloc(relay->max_pairs, sizeof *worker->slots);
    worker->heap = calloc((size_t)relay->max_pairs + 1, sizeof *worker->heap);
    if (!worker->slots || !worker->heap)
        return -ENOMEM;
    *step = RELAY_EVENTFD;
    worker->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (worker->wake_fd < 0)
        return -errno;
    worker->spare_fd = fcntl(worker->wake_fd, F_DUPFD_CLOEXEC, 0);
    if (worker->spare_fd < 0)
        return -errno;
    *step = RELAY_EPOLL;
    worker->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    /* Edge-triggered, so that nobody has to read the count. */
    struct epoll_event watched = {.events = EPOLLIN | EPOLLET, .data.u64 = SOURCE_WAKE};
    if (worker->epoll_fd < 0 || epoll_ctl(worker->epoll_fd, EPOLL_CTL_ADD, worker->wake_fd, &watched) < 0)
        return -errno;
    return 0;
}

/* Signals are for Python's threads; SIGPIPE, which splice raises here, stays pending for good. */
static int worker_start(struct worker *worker)
{
    sigset_t all, before;
    pthread_attr_t attributes;
    int rc = pthread_attr_init(&attributes);
    if (rc != 0)
        return -rc;
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    rc = pthread_create(&worker->thread, &attributes, worker_run, worker);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return -rc;
}

static void relay_free(struct relay *relay, unsigned started)
{
    atomic_store(&relay->stopping, true);
    for (unsigned number = 0; number < started; number++) {
        uint64_t one = 1;
        while (write(relay->workers[number]->wake_fd, &one, sizeof one) < 0 && errno == EINTR)
            continue;
    }
    for (unsigned number = 0; number < started; number++)
        pthread_join(relay->workers[number]->thread, NULL);
    events_free(relay, relay->taken);
    events_free(relay, relay->events.first);
    while (!LIST_EMPTY(&relay->listeners)) {
        struct listener *listener = LIST_FIRST(&relay->listeners);
        LIST_REMOVE(listener, others);
        listener_release(listener);
    }
    for (unsigned number = 0; number < relay->threads; number++)
        worker_free(relay->workers[number]);
    if (relay->event_fd >= 0)
        close(relay->event_fd);
    pthread_mutex_destroy(&relay->lock);
    pthread_mutex_destroy(&relay->events_lock);
    free(relay);
}

int relay_start(unsigned threads, unsigned max_pairs, struct relay **made, int *step)
{
    *made = NULL;
    *step = RELAY_ARGUMENT;
    if (threads == 0 || threads > RELAY_THREADS_MAX || max_pairs == 0 || max_pairs > RELAY_PAIRS_MAX)
        return -EINVAL;
    *step = RELAY_MEMORY;
    struct relay *relay = calloc(1, sizeof *relay);
    if (!relay)
        return -ENOMEM;
    relay->threads = threads;
    relay->max_pairs = max_pairs;
    relay->events.last = &relay->events.first;
    LIST_INIT(&relay->listeners);
    pthread_mutex_init(&relay->lock, NULL);
    pthread_mutex_init(&relay->events_lock, NULL);
    *step = RELAY_EVENTFD;
    relay->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int rc = relay->event_fd < 0 ? -errno : 0;
    for (unsigned number = 0; number < threads && rc == 0; number++)
        rc = worker_new(relay, number, &relay->workers[number], step);
    unsigned started = 0;
    while (started < threads && rc == 0) {
        *step = RELAY_THREAD;
        rc = worker_start(relay->workers[started]);
        started += rc == 0;
    }
    if (rc < 0) {
        relay_free(relay, started);
        return rc;
    }
    *made = relay;
    return 0;
}

int relay_stop(struct relay *relay)
{
    relay_free(relay, relay->threads);
    return 0;
}
