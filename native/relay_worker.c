/*
 * A worker's loop: what became ready, who is accepted, timers, and the turn's events.
 *
 * While the events of one wait are sorted no pair ends and none gets a new upstream; that is for commands, timers and
 * runs, which come after. So a tag never speaks of something that has gone since it was told.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

#include "relay.h"

#define NO_SLOT UINT32_MAX
#define SO_ORIGINAL_DST 80 /* linux/netfilter_ipv4.h, which cannot stand beside netinet/in.h */
#define SERIAL_SHIFT (SLOT_BITS + WORKER_BITS)

static uint64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

/* ---- events ---- */

void worker_tell(struct worker *worker, struct event *event)
{
    event->next = NULL;
    *worker->out.last = event;
    worker->out.last = &event->next;
}

struct event *worker_event(struct worker *worker, enum relay_event_kind kind, struct pair *pair, size_t room)
{
    struct event *event = malloc(sizeof *event + room);
    if (!event) {
        pair->starved = true;
        worker_mark(worker, pair);
        return NULL;
    }
    event->listener = NULL;
    event->face = (struct relay_event){
        .kind = kind, .pair = pair->id, .sandbox = pair->watch->listener->sandbox, .length = room};
    if (kind == RELAY_ACCEPTED) {
        address_text(&pair->target, event->face.address, &event->face.port);
        event->face.flag = pair->redirected;
    }
    return event;
}

static void publish(struct worker *worker)
{
    if (!worker->out.first)
        return;
    struct relay *relay = worker->relay;
    pthread_mutex_lock(&relay->events_lock);
    *relay->events.last = worker->out.first;
    relay->events.last = worker->out.last;
    bool signal = !relay->signalled;
    relay->signalled = true;
    if (signal) {
        uint64_t one = 1;
        if (write(relay->event_fd, &one, sizeof one) < 0)
            relay->signalled = false; /* not known to happen: the count is far from its end */
    }
    pthread_mutex_unlock(&relay->events_lock);
    worker->out = (struct event_list){.first = NULL};
    worker->out.last = &worker->out.first;
}

/* ---- pairs that are to run, and when those that wait are to be looked at: a heap by wake_at, from index 1 ---- */

void worker_mark(struct worker *worker, struct pair *pair)
{
    if (pair->running)
        return;
    pair->running = true;
    TAILQ_INSERT_TAIL(&worker->runs, pair, runs);
    worker->run_count++;
}

static void heap_place(struct worker *worker, struct pair *pair, unsigned index)
{
    worker->heap[index] = pair;
    pair->heap_index = index;
}

static void heap_sift(struct worker *worker, struct pair *pair, unsigned index)
{
    struct pair **heap = worker->heap;
    for (; index > 1 && heap[index / 2]->wake_at > pair->wake_at; index /= 2)
        heap_place(worker, heap[index / 2], index);
    for (unsigned child; (child = 2 * index) <= worker->heap_count; index = child) {
        if (child < worker->heap_count && heap[child + 1]->wake_at < heap[child]->wake_at)
            child++;
        if (heap[child]->wake_at >= pair->wake_at)
            break;
        heap_place(worker, heap[child], index);
    }
    heap_place(worker, pair, index);
}

static void heap_remove(struct worker *worker, struct pair *pair)
{
    unsigned index = pair->heap_index;
    if (!index)
        return;
    pair->heap_index = 0;
    pair->wake_at = NEVER;
    struct pair *last = worker->heap[worker->heap_count--];
    if (last != pair)
        heap_sift(worker, last, index);
}

/* A later time is not noted: most timers move on with every byte, and are looked at again when they fire. */
void worker_schedule(struct worker *worker, struct pair *pair, uint64_t at)
{
    if (at >= pair->wake_at)
        return;
    pair->wake_at = at;
    heap_sift(worker, pair, pair->heap_index ? pair->heap_index : ++worker->heap_count);
}

static void fire_timers(struct worker *worker)
{
    while (worker->heap_count && worker->heap[1]->wake_at <= worker->now) {
        struct pair *pair = worker->heap[1];
        heap_remove(worker, pair);
        pair_tick(worker, pair);
    }
}

/* ---- a pair's number ---- */

static uint32_t slot_of(uint64_t id)
{
    return (uint32_t)id & ((1u << SLOT_BITS) - 1);
}

uint64_t worker_tag(const struct pair *pair, enum source source, unsigned attempt)
{
    return (uint64_t)attempt << 54 | (uint64_t)(uint32_t)(pair->id >> SERIAL_SHIFT) << 22 |
           (uint64_t)slot_of(pair->id) << 2 | source;
}

static struct pair *pair_of_tag(struct worker *worker, uint64_t tag)
{
    struct pair *pair = worker->slots[slot_of(tag >> 2)].pair;
    return pair && (uint32_t)(pair->id >> SERIAL_SHIFT) == (uint32_t)(tag >> 22) ? pair : NULL;
}

static struct pair *pair_of_id(struct worker *worker, uint64_t id)
{
    uint32_t slot = slot_of(id);
    struct pair *pair = slot < worker->relay->max_pairs ? worker->slots[slot].pair : NULL;
    return pair && pair->id == id ? pair : NULL;
}

/* There is one: a slot is free before its pair's place under max_pairs is. */
static void pair_number(struct worker *worker, struct pair *pair)
{
    uint32_t slot = worker->slot_free;
    if (slot == NO_SLOT)
        slot = worker->slots_used++;
    else
        worker->slot_free = worker->slots[slot].next_free;
    worker->slots[slot].pair = pair;
    pair->id = ++worker->serial << SERIAL_SHIFT | (uint64_t)worker->number << SLOT_BITS | slot;
}

void worker_forget(struct worker *worker, struct pair *pair)
{
    struct slot *slot = &worker->slots[slot_of(pair->id)];
    slot->pair = NULL;
    slot->next_free = worker->slot_free;
    worker->slot_free = slot_of(pair->id);
    heap_remove(worker, pair);
    if (pair->running) {
        TAILQ_REMOVE(&worker->runs, pair, runs);
        worker->run_count--;
    }
}

/* ---- accepting ---- */

static void tell_refused(struct worker *worker, struct listener *listener)
{
    uint64_t count = atomic_exchange(&listener->refused, 0);
    struct event *event = count ? malloc(sizeof *event) : NULL;
    if (!event) {
        atomic_fetch_add(&listener->refused, count);
        return;
    }
    event->listener = NULL;
    event->face = (struct relay_event){.kind = RELAY_REFUSED, .sandbox = listener->sandbox, .count = count};
    worker_tell(worker, event);
}

/* At once when the last was long enough ago, else when the timer comes by. */
static void refusals(struct worker *worker, struct listener *listener)
{
    uint64_t at = atomic_load(&listener->refused_at);
    if (worker->now >= at && atomic_compare_exchange_strong(&listener->refused_at, &at, worker->now + REFUSED_EVERY_MS))
        tell_refused(worker, listener);
    else if (at < worker->refused_at)
        worker->refused_at = at;
}

static void refuse(struct worker *worker, struct listener *listener, int fd)
{
    socket_close(fd, true);
    atomic_fetch_add(&listener->refused, 1);
    refusals(worker, listener);
}

static bool same_address(const union address *a, const union address *b)
{
    return a->v4.sin_port == b->v4.sin_port && a->v4.sin_addr.s_addr == b->v4.sin_addr.s_addr;
}

static void find_target(const struct listener *listener, struct pair *pair)
{
    pair->target = listener->own;
    socklen_t length = sizeof pair->target;
    if (!listener->own_fixed && getsockname(pair->guest.fd, &pair->target.any, &length) < 0)
        return;
    if (pair->target.any.sa_family != AF_INET)
        return;
    union address original = {0};
    length = sizeof original.v4;
    if (getsockopt(pair->guest.fd, SOL_IP, SO_ORIGINAL_DST, &original.v4, &length) == 0 &&
        !same_address(&original, &pair->target)) {
        pair->target = original;
        pair->redirected = true;
    }
}

static bool admit(struct worker *worker, struct watch *watch, int fd)
{
    struct listener *listener = watch->listener;
    if (!counted(&listener->pairs, listener->limits.pairs))
        return false;
    if (!counted(&worker->relay->pairs, worker->relay->max_pairs)) {
        atomic_fetch_sub(&listener->pairs, 1);
        return false;
    }
    struct event *closed = calloc(1, sizeof *closed);
    struct pair *pair = closed ? pair_new(worker, watch, fd, closed) : NULL;
    if (!pair)
        goto fail;
    pair_number(worker, pair);
    struct epoll_event watched = {
        .events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, .data.u64 = worker_tag(pair, SOURCE_GUEST, 0)};
    if (epoll_ctl(worker->epoll_fd, EPOLL_CTL_ADD, fd, &watched) < 0) {
        worker_forget(worker, pair);
        goto fail;
    }
    LIST_INSERT_HEAD(&watch->pairs, pair, others);
    find_target(listener, pair);
    uint16_t port = ntohs(pair->target.v4.sin_port); /* at the same place in both families */
    if (port == 80 || port == 443) {
        pair->streams[RELAY_UP].read = RELAY_FIRST_BYTES;
    } else {
        struct event *event = worker_event(worker, RELAY_ACCEPTED, pair, 0);
        if (event) {
            pair->said = true;
            worker_tell(worker, event);
        }
    }
    worker_mark(worker, pair);
    return true;
fail:
    free(pair);
    free(closed);
    atomic_fetch_sub(&worker->relay->pairs, 1);
    atomic_fetch_sub(&listener->pairs, 1);
    return false;
}

static bool refuse_with_spare(struct worker *worker, struct listener *listener)
{
    if (worker->spare_fd < 0)
        return false;
    close(worker->spare_fd);
    int fd = accept4(listener->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd >= 0)
        refuse(worker, listener, fd);
    worker->spare_fd = fcntl(worker->wake_fd, F_DUPFD_CLOEXEC, 0);
    return fd >= 0;
}

static void watch_pause(struct worker *worker, struct watch *watch)
{
    epoll_ctl(worker->epoll_fd, EPOLL_CTL_DEL, watch->listener->fd, NULL);
    watch->paused = true;
    worker->accept_at = worker->now + ACCEPT_RETRY_MS;
}

static void accept_some(struct worker *worker, struct watch *watch)
{
    struct listener *listener = watch->listener;
    for (unsigned count = 0; count < TURN_ACCEPTS && !watch->paused && !atomic_load(&listener->leaving); count++) {
        int fd = accept4(listener->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd >= 0) {
            if (!admit(worker, watch, fd))
                refuse(worker, listener, fd);
        } else if (errno == EAGAIN) {
            return;
        } else if (errno == EMFILE || errno == ENFILE) {
            if (!refuse_with_spare(worker, listener))
                watch_pause(worker, watch);
        } else if (errno == ENOMEM || errno == ENOBUFS || errno == EINVAL || errno == EBADF || errno == EPERM) {
            watch_pause(worker, watch);
        } /* else: what went wrong with that one connection (accept(2)) */
    }
}

static void watch_tick(struct worker *worker)
{
    struct watch *watch;
    if (worker->now >= worker->accept_at) {
        worker->accept_at = NEVER;
        if (worker->spare_fd < 0) /* another thread was quicker */
            worker->spare_fd = fcntl(worker->wake_fd, F_DUPFD_CLOEXEC, 0);
        LIST_FOREACH(watch, &worker->watches, others) {
            if (!watch->paused || atomic_load(&watch->listener->leaving))
                continue;
            struct epoll_event watched = {.events = EPOLLIN | EPOLLEXCLUSIVE, .data.u64 = (uintptr_t)watch | SOURCE_WATCH};
            watch->paused = epoll_ctl(worker->epoll_fd, EPOLL_CTL_ADD, watch->listener->fd, &watched) < 0;
            if (watch->paused)
                worker->accept_at = worker->now + ACCEPT_RETRY_MS;
        }
    }
    if (worker->now >= worker->refused_at) {
        worker->refused_at = NEVER;
        LIST_FOREACH(watch, &worker->watches, others) {
            if (atomic_load(&watch->listener->refused))
                refusals(worker, watch->listener);
        }
    }
}

static void watch_end(struct worker *worker, struct watch *watch)
{
    struct listener *listener = watch->listener;
    epoll_ctl(worker->epoll_fd, EPOLL_CTL_DEL, listener->fd, NULL);
    while (!LIST_EMPTY(&watch->pairs))
        pair_end(worker, LIST_FIRST(&watch->pairs), RELAY_CUT, true);
    tell_refused(worker, listener);
    LIST_REMOVE(watch, others);
    free(watch);
    listener_unwatch(listener);
}

/* ---- the loop ---- */

static void carry_out(struct worker *worker, struct command *command)
{
    struct watch *watch;
    struct pair *pair;
    switch (command->kind) {
    case COMMAND_LISTEN:
        LIST_INSERT_HEAD(&worker->watches, command->watch, others);
        break;
    case COMMAND_UNLISTEN:
        LIST_FOREACH(watch, &worker->watches, others) {
            if (watch->listener == command->listener)
                break;
        }
        if (watch)
            watch_end(worker, watch);
        break;
    default:
        pair = pair_of_id(worker, command->pair);
        if (pair)
            pair_command(worker, pair, command);
    }
    free(command->chunk);
    free(command);
}

static void carry_out_commands(struct worker *worker)
{
    pthread_mutex_lock(&worker->lock);
    struct command *command = worker->commands;
    worker->commands = NULL;
    worker->commands_last = &worker->commands;
    pthread_mutex_unlock(&worker->lock);
    while (command) {
        struct command *next = command->next;
        carry_out(worker, command);
        command = next;
    }
}

static void end_ready(struct end *end, uint32_t events)
{
    if (events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR))
        end->readable = true;
    if (events & (EPOLLRDHUP | EPOLLHUP))
        end->hung = true;
    if (events & EPOLLOUT)
        end->writable = true;
    if (events & EPOLLERR)
        end->failed = true;
}

static void sort(struct worker *worker, uint64_t tag, uint32_t events)
{
    enum source source = tag & 3;
    if (source == SOURCE_WAKE)
        return;
    if (source == SOURCE_WATCH) {
        accept_some(worker, (struct watch *)(uintptr_t)(tag & ~(uint64_t)3));
        return;
    }
    struct pair *pair = pair_of_tag(worker, tag);
    if (!pair)
        return;
    unsigned attempt = (unsigned)(tag >> 54);
    if (source == SOURCE_GUEST)
        end_ready(&pair->guest, events);
    else if (pair->dial)
        dial_event(worker, pair, attempt);
    else if (pair->upstream.fd >= 0 && pair->attempt == attempt)
        end_ready(&pair->upstream, events);
    worker_mark(worker, pair);
}

static int patience(struct worker *worker)
{
    if (worker->run_count)
        return 0;
    uint64_t at = worker->accept_at < worker->refused_at ? worker->accept_at : worker->refused_at;
    if (worker->heap_count && worker->heap[1]->wake_at < at)
        at = worker->heap[1]->wake_at;
    if (at == NEVER)
        return -1;
    uint64_t now = now_ms();
    return at <= now ? 0 : at - now > INT_MAX ? INT_MAX : (int)(at - now);
}

static int wait_for_events(struct worker *worker, struct epoll_event *events)
{
    int timeout = patience(worker);
    if (timeout == 0)
        return epoll_wait(worker->epoll_fd, events, TURN_EVENTS, 0);
    /* Whoever queues a command after this looks at `sleeping`; one queued before is seen here. */
    atomic_store(&worker->sleeping, true);
    pthread_mutex_lock(&worker->lock);
    if (worker->commands)
        timeout = 0;
    pthread_mutex_unlock(&worker->lock);
    int count = epoll_wait(worker->epoll_fd, events, TURN_EVENTS, timeout);
    atomic_store(&worker->sleeping, false);
    return count;
}

void *worker_run(void *argument)
{
    struct worker *worker = argument;
    struct epoll_event events[TURN_EVENTS];
    while (!atomic_load(&worker->relay->stopping)) {
        int count = wait_for_events(worker, events);
        worker->now = now_ms();
        for (int index = 0; index < count; index++)
            sort(worker, events[index].data.u64, events[index].events);
        carry_out_commands(worker);
        fire_timers(worker);
        watch_tick(worker);
        for (unsigned left = worker->run_count; left && worker->run_count; left--) {
            struct pair *pair = TAILQ_FIRST(&worker->runs);
            TAILQ_REMOVE(&worker->runs, pair, runs);
            worker->run_count--;
            pair->running = false;
            pair_run(worker, pair);
        }
        publish(worker);
    }
    carry_out_commands(worker);
    while (!LIST_EMPTY(&worker->watches))
        watch_end(worker, LIST_FIRST(&worker->watches));
    publish(worker);
    pipes_close(worker);
    return NULL;
}
