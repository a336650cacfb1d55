/*
 * One pair: two sockets and the two streams between them.
 *
 * Order within a stream: what is in the pipe, then the queue, then what is still in the source's socket. Nothing is
 * taken from the source before the other two are empty, so each holds at most one piece.
 *
 * A guest that resets ends the pair at once. An upstream that resets ends it once what it sent before has been taken
 * by the guest: a server that answers early and closes with unread bytes sends both, and the answer matters.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "relay.h"

enum flush { FLUSH_EMPTY, FLUSH_BLOCKED, FLUSH_BROKEN };

static struct end *source_of(struct pair *pair, unsigned direction)
{
    return direction == RELAY_UP ? &pair->guest : &pair->upstream;
}

static struct end *target_of(struct pair *pair, unsigned direction)
{
    return direction == RELAY_UP ? &pair->upstream : &pair->guest;
}

void socket_close(int fd, bool reset)
{
    if (fd < 0)
        return;
    if (reset) {
        struct linger linger = {.l_onoff = 1, .l_linger = 0};
        setsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, sizeof linger);
    }
    close(fd);
}

/* ---- what waits in a stream ---- */

static void stream_append(struct stream *stream, struct chunk *chunk)
{
    chunk->next = NULL;
    *stream->last = chunk;
    stream->last = &chunk->next;
}

static void stream_shift(struct pair *pair, struct stream *stream)
{
    struct chunk *chunk = stream->first;
    stream->first = chunk->next;
    if (!stream->first)
        stream->last = &stream->first;
    if (chunk->held)
        atomic_fetch_sub(&pair->watch->listener->held, chunk->length);
    free(chunk);
}

static void stream_drop(struct worker *worker, struct pair *pair, struct stream *stream)
{
    if (stream->pipe)
        pipe_return(worker, stream->pipe, stream->in_pipe == 0);
    stream->pipe = NULL;
    stream->in_pipe = 0;
    while (stream->first)
        stream_shift(pair, stream);
}

/* False when the sandbox holds more than it may; the chunk is the caller's either way. */
static bool hold(struct pair *pair, struct chunk *chunk)
{
    struct listener *listener = pair->watch->listener;
    uint64_t before = atomic_fetch_add(&listener->held, chunk->length);
    if (before > listener->limits.held_bytes || chunk->length > listener->limits.held_bytes - before) {
        atomic_fetch_sub(&listener->held, chunk->length);
        return false;
    }
    chunk->held = true;
    return true;
}

/* ---- moving bytes ---- */

/* Whether a call on an end that failed with errno is to be tried again when epoll says so. */
static bool would_block(struct end *end, bool *ready)
{
    if (errno == EAGAIN)
        *ready = false;
    else
        end->failed = true;
    return errno == EAGAIN;
}

static void wrote(struct worker *worker, struct pair *pair, struct stream *stream, size_t count)
{
    stream->bytes += count;
    pair->moved_at = worker->now;
}

static enum flush stream_flush(struct worker *worker, struct pair *pair, unsigned direction)
{
    struct stream *stream = &pair->streams[direction];
    struct end *target = target_of(pair, direction);
    if (!stream->in_pipe && !stream->first)
        return FLUSH_EMPTY;
    if (target->fd < 0 || !target->writable)
        return FLUSH_BLOCKED;
    while (stream->in_pipe) {
        ssize_t count =
            splice(stream->pipe->out, NULL, target->fd, NULL, stream->in_pipe, SPLICE_F_MOVE | SPLICE_F_NONBLOCK);
        if (count <= 0)
            return count < 0 && would_block(target, &target->writable) ? FLUSH_BLOCKED : FLUSH_BROKEN;
        stream->in_pipe -= (size_t)count;
        wrote(worker, pair, stream, (size_t)count);
    }
    if (stream->pipe) {
        pipe_return(worker, stream->pipe, true);
        stream->pipe = NULL;
    }
    while (stream->first) {
        struct chunk *chunk = stream->first;
        ssize_t count = send(target->fd, chunk->bytes + chunk->done, chunk->length - chunk->done,
                             MSG_DONTWAIT | MSG_NOSIGNAL);
        if (count < 0)
            return would_block(target, &target->writable) ? FLUSH_BLOCKED : FLUSH_BROKEN;
        chunk->done += (size_t)count;
        wrote(worker, pair, stream, (size_t)count);
        if (chunk->done == chunk->length)
            stream_shift(pair, stream);
    }
    return FLUSH_EMPTY;
}

/* A count of bytes, 0 at the end of the stream, -1 when there is nothing (now, or because the end failed). */
static ssize_t receive(struct worker *worker, struct end *source, size_t most)
{
    ssize_t count = recv(source->fd, worker->scratch, most, MSG_DONTWAIT);
    if (count < 0)
        would_block(source, &source->readable);
    else if (count > 0 && (size_t)count < most && !source->hung)
        source->readable = false; /* the next byte brings an edge; only an end already there would not */
    return count;
}

static void uncredit(uint64_t *credit, size_t count)
{
    if (*credit != FREE_PASS)
        *credit -= count;
}

static size_t at_most(uint64_t credit, size_t most)
{
    return credit < most ? (size_t)credit : most;
}

static struct chunk *chunk_copy(const uint8_t *bytes, size_t length)
{
    struct chunk *chunk = malloc(sizeof *chunk + length);
    if (chunk) {
        *chunk = (struct chunk){.length = length};
        memcpy(chunk->bytes, bytes, length);
    }
    return chunk;
}

/* Small pieces: cheaper than a pipe, and needs none. */
static ssize_t move_copy(struct worker *worker, struct pair *pair, unsigned direction)
{
    struct stream *stream = &pair->streams[direction];
    struct end *target = target_of(pair, direction);
    ssize_t count = receive(worker, source_of(pair, direction), at_most(stream->pass, COPY_BYTES));
    if (count <= 0)
        return count;
    uncredit(&stream->pass, (size_t)count);
    stream->full_runs = (size_t)count == COPY_BYTES ? stream->full_runs + 1 : 0;
    ssize_t sent = send(target->fd, worker->scratch, (size_t)count, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0) {
        if (!would_block(target, &target->writable))
            return -1;
        sent = 0;
    }
    wrote(worker, pair, stream, (size_t)sent);
    if (sent < count) {
        struct chunk *rest = chunk_copy(worker->scratch + sent, (size_t)(count - sent));
        if (!rest) {
            pair->starved = true;
            return -1;
        }
        stream_append(stream, rest);
    }
    return count;
}

/* Large pieces, into a pipe; stream_flush takes them on. */
static ssize_t move_splice(struct worker *worker, struct pair *pair, unsigned direction)
{
    struct stream *stream = &pair->streams[direction];
    struct end *source = source_of(pair, direction);
    bool grown = stream->full_runs > GROWN_BYTES / PIPE_BYTES;
    stream->pipe = pipe_lend(worker, pair->watch->listener, grown);
    if (!stream->pipe)
        return move_copy(worker, pair, direction);
    size_t room = stream->pipe->grown ? GROWN_BYTES : PIPE_BYTES;
    ssize_t count = splice(source->fd, NULL, stream->pipe->in, NULL, at_most(stream->pass, room),
                           SPLICE_F_MOVE | SPLICE_F_NONBLOCK);
    if (count > 0) {
        stream->in_pipe = (size_t)count;
        uncredit(&stream->pass, (size_t)count);
        stream->full_runs = (size_t)count >= PIPE_BYTES / 2 ? stream->full_runs + 1
                            : (size_t)count < PIPE_BYTES / 16 ? 0
                                                              : stream->full_runs;
        return count;
    }
    if (count < 0)
        would_block(source, &source->readable);
    pipe_return(worker, stream->pipe, true);
    stream->pipe = NULL;
    return count;
}

static ssize_t hand_over(struct worker *worker, struct pair *pair, unsigned direction)
{
    struct stream *stream = &pair->streams[direction];
    ssize_t count = receive(worker, source_of(pair, direction), at_most(stream->read, SCRATCH_BYTES));
    if (count <= 0)
        return count;
    struct event *accepted = pair->said ? NULL : worker_event(worker, RELAY_ACCEPTED, pair, 0);
    struct event *data = worker_event(worker, RELAY_DATA, pair, (size_t)count);
    if (!data || (!accepted && !pair->said)) {
        free(accepted);
        free(data);
        return -1;
    }
    if (accepted)
        worker_tell(worker, accepted);
    pair->said = true;
    memcpy(data->bytes, worker->scratch, (size_t)count);
    data->face.direction = direction;
    worker_tell(worker, data);
    stream->read -= (size_t)count;
    stream->still = true;
    pair->moved_at = worker->now;
    return count;
}

/* True when bytes are left for the next turn. */
static bool stream_move(struct worker *worker, struct pair *pair, unsigned direction)
{
    struct stream *stream = &pair->streams[direction];
    struct end *source = source_of(pair, direction);
    struct end *target = target_of(pair, direction);
    size_t budget = TURN_BYTES;
    for (;;) {
        if (stream_flush(worker, pair, direction) != FLUSH_EMPTY)
            return false;
        if (stream->eof || stream->shut || source->fd < 0 || !source->readable)
            break;
        if (budget == 0)
            return true;
        ssize_t count;
        if (stream->pass) {
            if (target->fd < 0 || !target->writable)
                break;
            count = stream->full_runs ? move_splice(worker, pair, direction) : move_copy(worker, pair, direction);
        } else if (stream->read && !stream->still) {
            count = hand_over(worker, pair, direction);
        } else {
            break;
        }
        if (count == 0)
            stream->eof = true;
        else if (count < 0)
            break;
        else
            budget -= at_most((uint64_t)count, budget);
    }
    return false;
}

/* What an empty stream has to do at its end. */
static void stream_settle(struct worker *worker, struct pair *pair, unsigned direction)
{
    struct stream *stream = &pair->streams[direction];
    struct end *target = target_of(pair, direction);
    if (stream->eof && stream->pass == FREE_PASS)
        stream->finish = true;
    if (stream->eof && !stream->finish && !stream->ended && pair->said) {
        struct event *event = worker_event(worker, RELAY_ENDED, pair, 0);
        if (!event)
            return;
        event->face.direction = direction;
        worker_tell(worker, event);
        stream->ended = true;
    }
    if (stream->finish && !stream->shut && target->fd >= 0 && !stream->in_pipe && !stream->first) {
        shutdown(target->fd, SHUT_WR);
        stream->shut = true;
    }
}

/* ---- the pair's life ---- */

struct pair *pair_new(struct worker *worker, struct watch *watch, int fd, struct event *closed)
{
    struct pair *pair = calloc(1, sizeof *pair);
    if (!pair)
        return NULL;
    pair->watch = watch;
    pair->closed = closed;
    pair->guest = (struct end){.fd = fd, .writable = true};
    pair->upstream.fd = -1;
    for (unsigned direction = 0; direction < 2; direction++)
        pair->streams[direction].last = &pair->streams[direction].first;
    pair->moved_at = worker->now;
    pair->wake_at = NEVER;
    uint32_t first_ms = watch->listener->limits.first_ms;
    pair->deadline_at = first_ms ? worker->now + first_ms : NEVER;
    pair->deadline_first = true;
    pair->closing_at = pair->poll_at = NEVER;
    return pair;
}

void pair_end(struct worker *worker, struct pair *pair, enum relay_reason reason, bool reset)
{
    dial_stop(pair);
    for (unsigned direction = 0; direction < 2; direction++)
        stream_drop(worker, pair, &pair->streams[direction]);
    socket_close(pair->guest.fd, reset);
    socket_close(pair->upstream.fd, reset);
    worker_forget(worker, pair);
    LIST_REMOVE(pair, others);
    struct event *closed = pair->closed;
    closed->listener = pair->watch->listener;
    atomic_fetch_add(&closed->listener->references, 1);
    closed->face = (struct relay_event){
        .kind = RELAY_CLOSED,
        .pair = pair->id,
        .sandbox = closed->listener->sandbox,
        .reason = reason,
        .flag = pair->said,
        .up_bytes = pair->streams[RELAY_UP].bytes,
        .down_bytes = pair->streams[RELAY_DOWN].bytes,
    };
    worker_tell(worker, closed);
    free(pair);
}

static void schedule(struct worker *worker, struct pair *pair)
{
    uint64_t at = pair->deadline_at;
    uint32_t idle_ms = pair->watch->listener->limits.idle_ms;
    if (idle_ms && pair->moved_at + idle_ms < at)
        at = pair->moved_at + idle_ms;
    if (pair->closing_at < at)
        at = pair->closing_at;
    if (pair->poll_at < at)
        at = pair->poll_at;
    if (pair->dial && dial_next(pair->dial) < at)
        at = dial_next(pair->dial);
    worker_schedule(worker, pair, at);
}

static void upstream_close(struct worker *worker, struct pair *pair)
{
    dial_stop(pair);
    socket_close(pair->upstream.fd, false);
    pair->upstream = (struct end){.fd = -1};
    stream_drop(worker, pair, &pair->streams[RELAY_UP]);
}

static void closing_begin(struct worker *worker, struct pair *pair)
{
    pair->closing = true;
    pair->closing_at = worker->now + LINGER_MS;
    pair->deadline_at = pair->poll_at = NEVER;
    if (pair->upstream.fd < 0)
        upstream_close(worker, pair);
}

static void closing_run(struct worker *worker, struct pair *pair)
{
    struct stream *down = &pair->streams[RELAY_DOWN], *up = &pair->streams[RELAY_UP];
    if (pair->upstream.fd >= 0 &&
        (pair->upstream.failed || stream_flush(worker, pair, RELAY_UP) != FLUSH_BLOCKED))
        upstream_close(worker, pair);
    if (!down->shut && stream_flush(worker, pair, RELAY_DOWN) == FLUSH_EMPTY) {
        shutdown(pair->guest.fd, SHUT_WR);
        down->shut = true;
    }
    size_t budget = TURN_BYTES;
    while (!up->eof && pair->guest.readable && !pair->guest.failed && budget) {
        ssize_t count = receive(worker, &pair->guest, SCRATCH_BYTES);
        if (count == 0)
            up->eof = true;
        else if (count > 0)
            budget -= at_most((uint64_t)count, budget);
    }
    if (pair->guest.failed || (up->eof && down->shut && pair->upstream.fd < 0)) {
        pair_end(worker, pair, RELAY_DONE, pair->guest.failed);
        return;
    }
    if (budget == 0)
        worker_mark(worker, pair);
    schedule(worker, pair);
}

/* True when everything upstream sent before it failed is with the guest, or can no longer get there. */
static bool lost_delivered(struct worker *worker, struct pair *pair)
{
    struct stream *down = &pair->streams[RELAY_DOWN];
    int unread = 0, unsent = 0;
    if (down->still) /* Python has it, and will send it */
        return false;
    if (!down->eof && ioctl(pair->upstream.fd, FIONREAD, &unread) == 0 && unread > 0)
        return false;
    if (down->in_pipe || down->first)
        return false;
    if (ioctl(pair->guest.fd, SIOCOUTQ, &unsent) == 0 && unsent > 0) { /* a reset would throw it away */
        pair->poll_at = worker->now + ACKED_POLL_MS;
        return false;
    }
    return true;
}

void pair_run(struct worker *worker, struct pair *pair)
{
    if (pair->closing) {
        closing_run(worker, pair);
        return;
    }
    struct stream *up = &pair->streams[RELAY_UP], *down = &pair->streams[RELAY_DOWN];
    bool more = false;
    if (!pair->guest.failed) {
        if (!pair->lost && !pair->upstream.failed) {
            more = stream_move(worker, pair, RELAY_UP);
            stream_settle(worker, pair, RELAY_UP);
        }
        more |= stream_move(worker, pair, RELAY_DOWN);
    }
    if (pair->guest.failed || pair->starved) {
        pair_end(worker, pair, pair->starved ? RELAY_LIMIT : RELAY_GUEST_RESET, true);
        return;
    }
    if (pair->upstream.failed && !pair->lost) {
        pair->lost = true;
        pair->closing_at = worker->now + LINGER_MS;
        stream_drop(worker, pair, up);
    }
    if (pair->lost) {
        if (!more && lost_delivered(worker, pair)) {
            pair_end(worker, pair, RELAY_UPSTREAM_RESET, true);
            return;
        }
    } else {
        stream_settle(worker, pair, RELAY_DOWN);
    }
    if (up->eof && !pair->said) { /* not a byte came, and nobody was told of it */
        pair_end(worker, pair, RELAY_DONE, false);
        return;
    }
    if (up->shut && down->shut) {
        if (up->eof) {
            pair_end(worker, pair, RELAY_DONE, false);
            return;
        }
        closing_begin(worker, pair);
        more = true;
    }
    if (more)
        worker_mark(worker, pair);
    schedule(worker, pair);
}

void pair_tick(struct worker *worker, struct pair *pair)
{
    uint64_t now = worker->now;
    uint32_t idle_ms = pair->watch->listener->limits.idle_ms;
    if (now >= pair->deadline_at) {
        pair_end(worker, pair, RELAY_DEADLINE, true);
        return;
    }
    if (now >= pair->closing_at) {
        pair_end(worker, pair, pair->closing ? RELAY_DONE : RELAY_UPSTREAM_RESET, true);
        return;
    }
    if (idle_ms && now >= pair->moved_at + idle_ms) {
        pair_end(worker, pair, RELAY_IDLE, true);
        return;
    }
    if (now >= pair->poll_at) {
        pair->poll_at = NEVER;
        worker_mark(worker, pair);
    }
    if (pair->dial)
        dial_tick(worker, pair);
    schedule(worker, pair);
}

/* ---- commands ---- */

static void command_open(struct worker *worker, struct pair *pair, struct command *command)
{
    struct stream *up = &pair->streams[RELAY_UP], *down = &pair->streams[RELAY_DOWN];
    if (pair->dial || pair->upstream.fd >= 0) {
        upstream_close(worker, pair);
        pair->lost = false;
        pair->closing_at = pair->poll_at = NEVER;
        up->finish = up->shut = false;
        down->read = 0;
        down->eof = down->ended = down->still = false;
    }
    if (pair->deadline_first) {
        pair->deadline_first = false;
        pair->deadline_at = NEVER;
    }
    up->pass = command->number;
    if (up->pass)
        up->still = false;
    down->pass = command->down;
    if (command->chunk) {
        if (!hold(pair, command->chunk)) {
            pair_end(worker, pair, RELAY_LIMIT, true);
            return;
        }
        command->chunk->next = up->first;
        up->first = command->chunk;
        if (!command->chunk->next)
            up->last = &command->chunk->next;
        command->chunk = NULL;
    }
    pair->moved_at = worker->now;
    worker_mark(worker, pair);
    dial_start(worker, pair, command);
}

static void command_close(struct worker *worker, struct pair *pair, bool reset)
{
    if (reset) {
        pair_end(worker, pair, RELAY_CUT, true);
        return;
    }
    if (!pair->closing)
        closing_begin(worker, pair);
    worker_mark(worker, pair);
}

void pair_command(struct worker *worker, struct pair *pair, struct command *command)
{
    struct stream *stream = &pair->streams[command->direction];
    if (command->kind == COMMAND_CLOSE) {
        command_close(worker, pair, command->number != 0);
        return;
    }
    if (pair->closing)
        return;
    switch (command->kind) {
    case COMMAND_OPEN:
        command_open(worker, pair, command);
        return;
    case COMMAND_SEND:
        if (!command->chunk || (command->direction == RELAY_UP && pair->lost))
            return;
        if (!hold(pair, command->chunk)) {
            pair_end(worker, pair, RELAY_LIMIT, true);
            return;
        }
        stream_append(stream, command->chunk);
        command->chunk = NULL;
        break;
    case COMMAND_READ:
        stream->read = command->number > UINT64_MAX - stream->read ? UINT64_MAX : stream->read + command->number;
        stream->still = false;
        break;
    case COMMAND_PASS:
        if (command->number == FREE_PASS)
            stream->pass = FREE_PASS;
        else if (stream->pass != FREE_PASS)
            stream->pass = command->number >= FREE_PASS - 1 - stream->pass ? FREE_PASS - 1 : stream->pass + command->number;
        stream->still = false;
        break;
    case COMMAND_FINISH:
        stream->finish = true;
        break;
    default: /* COMMAND_DEADLINE */
        pair->deadline_first = false;
        pair->deadline_at = command->number ? worker->now + command->number : NEVER;
        schedule(worker, pair);
        return;
    }
    worker_mark(worker, pair);
}
