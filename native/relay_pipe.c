/*
 * Pipes for splice, lent to a direction only while bytes are in flight. A user's pipes share one budget of pages, so
 * their number is bounded; who gets none copies.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include "relay.h"

static void pipe_close(struct worker *worker, struct pipe *pipe)
{
    close(pipe->in);
    close(pipe->out);
    if (pipe->grown)
        atomic_fetch_sub(&worker->relay->grown, 1);
    atomic_fetch_sub(&worker->relay->pipes, 1);
    free(pipe);
}

static struct pipe *pipe_new(struct worker *worker)
{
    struct relay *relay = worker->relay;
    if (worker->now < worker->pipes_at || !counted(&relay->pipes, PIPES_MAX))
        return NULL;
    struct pipe *pipe = calloc(1, sizeof *pipe);
    int fds[2];
    if (pipe && pipe2(fds, O_NONBLOCK | O_CLOEXEC) == 0) {
        pipe->out = fds[0];
        pipe->in = fds[1];
        /* Past the user's budget the kernel makes pipes of one or two pages: copying is better than those. */
        if (fcntl(pipe->in, F_GETPIPE_SZ) >= (int)PIPE_BYTES)
            return pipe;
        pipe_close(worker, pipe);
    } else {
        free(pipe);
        atomic_fetch_sub(&relay->pipes, 1);
    }
    worker->pipes_at = worker->now + PIPES_RETRY_MS;
    return NULL;
}

static struct pipe *take(struct pipe **list)
{
    struct pipe *pipe = *list;
    if (pipe)
        *list = pipe->next;
    return pipe;
}

static struct pipe *small(struct worker *worker)
{
    struct pipe *pipe = take(&worker->pipes);
    if (!pipe)
        return pipe_new(worker);
    worker->pipes_kept--;
    return pipe;
}

static void grow(struct worker *worker, struct pipe *pipe)
{
    struct relay *relay = worker->relay;
    if (worker->now < worker->grow_at || !counted(&relay->grown, GROWN_MAX))
        return;
    if (fcntl(pipe->in, F_SETPIPE_SZ, (int)GROWN_BYTES) >= (int)GROWN_BYTES) {
        pipe->grown = true;
        return;
    }
    atomic_fetch_sub(&relay->grown, 1);
    worker->grow_at = worker->now + PIPES_RETRY_MS;
}

struct pipe *pipe_lend(struct worker *worker, struct listener *listener, bool grown)
{
    if (!counted(&listener->pipes, PIPES_OF_ONE))
        return NULL;
    bool may_grow = grown && counted(&listener->grown, GROWN_OF_ONE);
    struct pipe *pipe = may_grow ? take(&worker->grown_pipes) : NULL;
    if (!pipe) {
        pipe = small(worker);
        if (pipe && may_grow)
            grow(worker, pipe);
    }
    if (may_grow && !(pipe && pipe->grown))
        atomic_fetch_sub(&listener->grown, 1);
    if (!pipe) {
        atomic_fetch_sub(&listener->pipes, 1);
        return NULL;
    }
    pipe->listener = listener;
    return pipe;
}

void pipe_return(struct worker *worker, struct pipe *pipe, bool empty)
{
    atomic_fetch_sub(&pipe->listener->pipes, 1);
    if (pipe->grown)
        atomic_fetch_sub(&pipe->listener->grown, 1);
    pipe->listener = NULL;
    if (!empty || (!pipe->grown && worker->pipes_kept >= PIPES_OF_ONE / 2)) {
        pipe_close(worker, pipe);
        return;
    }
    struct pipe **list = pipe->grown ? &worker->grown_pipes : &worker->pipes;
    if (!pipe->grown)
        worker->pipes_kept++;
    pipe->next = *list;
    *list = pipe;
}

void pipes_close(struct worker *worker)
{
    struct pipe *pipe;
    while ((pipe = take(&worker->pipes)) || (pipe = take(&worker->grown_pipes)))
        pipe_close(worker, pipe);
}
