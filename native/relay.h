/*
 * The relay from inside. One worker per thread; a pair belongs to the worker that accepted it for all its life, so
 * nothing of a pair is locked. Between threads there are two queues (commands in, one per worker; events out, one for
 * all) and the counters of a listener.
 *
 * A turn of a worker: wait, mark the ends that became ready, carry out commands, fire timers, then run each marked
 * pair once with a bounded number of bytes, then publish the turn's events in one piece.
 *
 * System calls after the start: epoll_wait, epoll_ctl, accept4, socket, connect, setsockopt, getsockopt, getsockname,
 * getpeername, recvfrom, sendto, splice, pipe2, fcntl, ioctl (SIOCOUTQ, FIONREAD), shutdown, close, dup, read and
 * write (eventfd), clock_gettime, futex, and what malloc and thread creation need.
 */
#ifndef RELAY_H
#define RELAY_H

#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>
#include <sys/socket.h>

#include "native.h"

#define FREE_PASS  UINT64_MAX
#define NEVER      UINT64_MAX
#define SLOT_BITS  20 /* a pair's number: serial, worker, slot */
#define WORKER_BITS 4

#define TURN_EVENTS   256
#define TURN_ACCEPTS  64          /* of one listener in one turn */
#define TURN_BYTES    (1u << 20)  /* of one direction in one turn */
#define SCRATCH_BYTES 65536u      /* most bytes in one RELAY_DATA */
#define COPY_BYTES    16384u      /* most bytes that a copied piece can leave behind in memory */
#define PIPE_BYTES    65536u
#define GROWN_BYTES   (1u << 20)
#define PIPES_MAX     256u  /* of the process, grown ones with them; without one bytes are copied */
#define GROWN_MAX     32u   /* an unprivileged user's pipes may hold 64 MiB by default (pipe-user-pages-soft) */
#define PIPES_OF_ONE  64u   /* of a sandbox, so that guests that stop reading leave pipes to others */
#define GROWN_OF_ONE  16u
#define PIPES_RETRY_MS  1000u
#define ACCEPT_RETRY_MS 100u
#define REFUSED_EVERY_MS 1000u
#define STAGGER_MS    250u  /* RFC 8305 section 5, Connection Attempt Delay */
#define LINGER_MS     5000u
#define ACKED_POLL_MS 20u

union address {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
};

struct listener {
    uint64_t sandbox;
    int fd;
    atomic_bool leaving; /* nobody is accepted any more */
    bool own_fixed; /* `own` is the address of every connection: it is not bound to all addresses */
    union address own;
    struct relay_limits limits;
    atomic_uint references; /* the table, each watch, each RELAY_CLOSED not yet taken */
    atomic_uint watches;    /* the descriptor is closed with the last */
    atomic_uint pairs;
    atomic_uint_least64_t held;
    atomic_uint pipes;
    atomic_uint grown;
    atomic_uint_least64_t refused;
    atomic_uint_least64_t refused_at; /* when the next RELAY_REFUSED may be told */
    LIST_ENTRY(listener) others;      /* relay->lock */
    struct command *farewells[RELAY_THREADS_MAX]; /* COMMAND_UNLISTEN for each worker */
};

struct event {
    struct event *next;
    struct listener *listener; /* of RELAY_CLOSED: where a place becomes free */
    struct relay_event face;
    uint8_t bytes[];
};

struct event_list {
    struct event *first;
    struct event **last;
};

enum command_kind {
    COMMAND_LISTEN, COMMAND_UNLISTEN, COMMAND_OPEN, COMMAND_SEND, COMMAND_READ, COMMAND_PASS, COMMAND_FINISH,
    COMMAND_DEADLINE, COMMAND_CLOSE
};

/* Bytes to be written, in the order of the list. */
struct chunk {
    struct chunk *next;
    size_t length;
    size_t done;
    bool held; /* counts as held_bytes */
    uint8_t bytes[];
};

struct watch {
    struct listener *listener;
    LIST_HEAD(, pair) pairs;
    LIST_ENTRY(watch) others;
    bool paused;
};

struct command {
    struct command *next;
    enum command_kind kind;
    unsigned direction;
    uint64_t pair;
    uint64_t number; /* read: most; pass: count; deadline: ms; close: reset; open: up */
    uint64_t down;
    struct watch *watch;       /* listen */
    struct listener *listener; /* unlisten */
    struct chunk *chunk;       /* send, open; NULL when there are no bytes */
    unsigned count;
    union address addresses[]; /* open */
};

struct pipe {
    struct pipe *next;
    struct listener *listener; /* it is lent to */
    int in, out;
    bool grown;
};

/* One socket of a pair. Flags are what epoll, edge-triggered, told last and no call has contradicted since. */
struct end {
    int fd; /* -1: none, or not yet connected */
    bool readable;
    bool writable;
    bool hung;   /* its end of stream is in the socket, perhaps behind bytes */
    bool failed; /* reset, timed out */
};

struct stream {
    uint64_t pass;
    uint64_t read;
    uint64_t bytes; /* written to the destination */
    struct pipe *pipe;
    size_t in_pipe; /* older than what is queued */
    struct chunk *first, **last;
    unsigned full_runs; /* pieces in a row as large as could be: then spliced, then through a grown pipe */
    bool still;  /* RELAY_DATA was told and not yet answered */
    bool eof;
    bool ended;  /* RELAY_ENDED was told */
    bool finish; /* the end of stream is to be sent once nothing is left */
    bool shut;   /* it was */
};

struct dial {
    uint64_t end_at;
    uint64_t next_at;
    unsigned count, next, live;
    int error;
    int fds[RELAY_ADDRESSES_MAX];
    union address addresses[];
};

struct pair {
    uint64_t id;
    struct watch *watch;
    struct end guest, upstream;
    struct stream streams[2];
    struct dial *dial;
    struct event *closed; /* made with the pair, so that it can always be told */
    union address target;
    bool redirected;
    bool said;
    bool closing;        /* `close` without a reset */
    bool lost;           /* upstream failed; what it sent before still goes down */
    bool deadline_first; /* deadline_at is first_ms */
    bool starved; /* no memory to tell what has to be told */
    bool running;
    uint8_t attempt;     /* the dialled address that became the upstream */
    uint64_t deadline_at;
    uint64_t closing_at; /* with closing or lost: when patience ends */
    uint64_t poll_at;
    uint64_t moved_at;
    uint64_t wake_at; /* place in the heap; may be too early, never too late */
    unsigned heap_index;
    TAILQ_ENTRY(pair) runs;
    LIST_ENTRY(pair) others;
};

struct slot {
    struct pair *pair;
    uint32_t next_free;
};

struct worker {
    struct relay *relay;
    unsigned number;
    pthread_t thread;
    int epoll_fd;
    int wake_fd;
    int spare_fd; /* given up for a moment to refuse a connection when descriptors run out */
    uint64_t now;

    pthread_mutex_t lock; /* commands */
    struct command *commands, **commands_last;
    atomic_bool sleeping;

    LIST_HEAD(, watch) watches;
    TAILQ_HEAD(, pair) runs;
    unsigned run_count;
    struct event_list out;
    uint64_t accept_at;  /* paused listeners are watched again */
    uint64_t refused_at; /* refusals wait to be told */

    struct slot *slots;
    uint32_t slots_used;
    uint32_t slot_free; /* UINT32_MAX: none */
    uint64_t serial;
    struct pair **heap;
    unsigned heap_count;

    struct pipe *pipes, *grown_pipes; /* not lent */
    unsigned pipes_kept;
    uint64_t pipes_at, grow_at; /* no try before */
    uint8_t scratch[SCRATCH_BYTES];
};

struct relay {
    unsigned threads;
    unsigned max_pairs;
    int event_fd;
    atomic_uint pairs;
    atomic_uint pipes;
    atomic_uint grown;
    atomic_bool stopping;

    pthread_mutex_t lock; /* listeners */
    LIST_HEAD(, listener) listeners;

    pthread_mutex_t events_lock;
    struct event_list events;
    bool signalled;
    struct event *taken; /* the last batch; freed with the next */

    struct worker *workers[RELAY_THREADS_MAX];
};

/* What an epoll event is about: the low two bits of its tag. */
enum source { SOURCE_GUEST, SOURCE_UPSTREAM, SOURCE_WATCH, SOURCE_WAKE };

static inline bool counted(atomic_uint *count, unsigned most)
{
    if (atomic_fetch_add(count, 1) < most)
        return true;
    atomic_fetch_sub(count, 1);
    return false;
}

/* relay.c */
void listener_release(struct listener *listener);
void listener_unwatch(struct listener *listener);

/* relay_worker.c */
void *worker_run(void *worker);
/* NULL when there is no memory: then the pair is marked, and ends. */
struct event *worker_event(struct worker *worker, enum relay_event_kind kind, struct pair *pair, size_t room);
void worker_tell(struct worker *worker, struct event *event);
void worker_mark(struct worker *worker, struct pair *pair);
void worker_schedule(struct worker *worker, struct pair *pair, uint64_t at);
void worker_forget(struct worker *worker, struct pair *pair);
uint64_t worker_tag(const struct pair *pair, enum source source, unsigned attempt);

/* relay_pair.c */
struct pair *pair_new(struct worker *worker, struct watch *watch, int fd, struct event *closed);
void pair_command(struct worker *worker, struct pair *pair, struct command *command);
void pair_run(struct worker *worker, struct pair *pair);
void pair_tick(struct worker *worker, struct pair *pair);
/* Closes everything of the pair, tells RELAY_CLOSED and frees it. */
void pair_end(struct worker *worker, struct pair *pair, enum relay_reason reason, bool reset);
void socket_close(int fd, bool reset);

/* relay_dial.c */
void dial_start(struct worker *worker, struct pair *pair, const struct command *command);
void dial_event(struct worker *worker, struct pair *pair, unsigned attempt);
void dial_tick(struct worker *worker, struct pair *pair);
void dial_stop(struct pair *pair);
uint64_t dial_next(const struct dial *dial);
void address_text(const union address *address, char text[46], uint16_t *port);

/* relay_pipe.c */
struct pipe *pipe_lend(struct worker *worker, struct listener *listener, bool grown);
/* A pipe that is not empty is closed. */
void pipe_return(struct worker *worker, struct pipe *pipe, bool empty);
void pipes_close(struct worker *worker);

#endif
