/*
 * The relay under sanitizers: thousands of short lives between a client and an origin that echoes, with every verdict
 * Python could give drawn at random (tiny credits, passes, resets, late commands); then the same with memory that
 * fails, and with descriptors that run out. RELAY_SEED and RELAY_LIVES in the environment repeat and lengthen it.
 */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static atomic_uint memory_fails_one_in;
static atomic_uint memory_draws;

static bool memory_fails(void)
{
    unsigned one_in = atomic_load(&memory_fails_one_in);
    return one_in && (atomic_fetch_add(&memory_draws, 1) * 2654435761u >> 7) % one_in == 0;
}

static void *test_malloc(size_t size)
{
    return memory_fails() ? NULL : malloc(size);
}

static void *test_calloc(size_t count, size_t size)
{
    return memory_fails() ? NULL : calloc(count, size);
}

#define malloc test_malloc
#define calloc test_calloc
#include "relay.c"
#include "relay_dial.c"
#include "relay_pair.c"
#include "relay_pipe.c"
#include "relay_worker.c"
#undef malloc
#undef calloc

#include "check.h"

enum { PAIRS = 4096, ECHO_BYTES = 65536, CONCURRENT = 96, LIVES = 1000, EVENTS = 64 };

static _Thread_local uint64_t draw_state; /* each thread its own, begun from the seed */

static uint32_t draw(void)
{
    draw_state ^= draw_state << 13;
    draw_state ^= draw_state >> 7;
    draw_state ^= draw_state << 17;
    return (uint32_t)(draw_state >> 16);
}

static uint32_t below(uint32_t limit)
{
    return draw() % limit;
}

static int listening(struct sockaddr_in *address)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    *address = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof *address;
    if (bind(fd, (struct sockaddr *)address, sizeof *address) < 0 || listen(fd, 1024) < 0 ||
        getsockname(fd, (struct sockaddr *)address, &length) < 0) {
        perror("listening");
        exit(1);
    }
    return fd;
}

static unsigned descriptors(void)
{
    unsigned count = 0;
    DIR *directory = opendir("/proc/self/fd");
    while (directory && readdir(directory))
        count++;
    closedir(directory);
    return count;
}

static void set_linger(int fd)
{
    struct linger linger = {.l_onoff = 1};
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, sizeof linger);
}

/* ---- the origin: a thread that echoes; a first byte of 'r' makes it reset after a while ---- */

struct echo {
    size_t start, end, seen;
    bool eof;
    bool resets;
    uint8_t bytes[ECHO_BYTES];
};

static int origin_fd;
static atomic_bool origin_stops;

/* False when the connection is over. */
static bool echo_turn(int fd, struct echo *echo, short events)
{
    if (events & (POLLIN | POLLHUP | POLLERR) && !echo->eof && echo->end < ECHO_BYTES) {
        ssize_t count = recv(fd, echo->bytes + echo->end, ECHO_BYTES - echo->end, MSG_DONTWAIT);
        if (count < 0 && errno != EAGAIN)
            return false;
        if (count > 0 && echo->seen == 0)
            echo->resets = echo->bytes[0] == 'r';
        if (count > 0)
            echo->seen += (size_t)count;
        if (count == 0)
            echo->eof = true;
        if (count > 0)
            echo->end += (size_t)count;
        if (echo->resets && echo->seen > 3000)
            return false;
    }
    if (echo->start < echo->end) {
        ssize_t count = send(fd, echo->bytes + echo->start, echo->end - echo->start, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (count < 0 && errno != EAGAIN)
            return false;
        if (count > 0)
            echo->start += (size_t)count;
        if (echo->start == echo->end)
            echo->start = echo->end = 0;
    }
    return !(echo->eof && echo->start == echo->end);
}

static void *origin(void *unused)
{
    static struct pollfd polled[4096];
    static struct echo *echoes[4096];
    unsigned count = 1;
    polled[0] = (struct pollfd){.fd = origin_fd, .events = POLLIN};
    while (!atomic_load(&origin_stops)) {
        if (poll(polled, count, 50) < 0)
            continue;
        for (unsigned index = count - 1; index > 0; index--) {
            struct echo *echo = echoes[index];
            if (polled[index].revents && !echo_turn(polled[index].fd, echo, polled[index].revents)) {
                if (echo->resets)
                    set_linger(polled[index].fd);
                close(polled[index].fd);
                free(echo);
                polled[index] = polled[count - 1];
                echoes[index] = echoes[count - 1];
                count--;
                continue;
            }
            bool room = !echo->eof && echo->end < ECHO_BYTES;
            polled[index].events = (short)((room ? POLLIN : 0) | (echo->start < echo->end ? POLLOUT : 0));
        }
        int fd;
        while (count < 4096 && (fd = accept4(origin_fd, NULL, NULL, SOCK_CLOEXEC)) >= 0) {
            echoes[count] = calloc(1, sizeof *echoes[count]);
            polled[count] = (struct pollfd){.fd = fd, .events = POLLIN};
            count++;
        }
    }
    for (unsigned index = 1; index < count; index++) {
        close(polled[index].fd);
        free(echoes[index]);
    }
    return unused;
}

/* ---- the clients: one thread, CONCURRENT lives at a time ---- */

/* What happens to a connection; its first byte says so to the driver and to the origin. */
enum manner {
    FREELY = 'f',      /* passed for good from `open` on */
    LATE = 'l',        /* the same, but the credit comes with Opened */
    IN_PIECES = 'p',   /* every byte by small credits of both kinds */
    THROWN = 't',      /* the client resets in the middle */
    ORIGIN_ENDS = 'r', /* the origin resets in the middle */
    CUT_OFF = 'c',     /* the driver resets in the middle */
    ANSWERED = 'a',    /* nothing is dialled; a short answer, then a polite close */
    UNREACHED = 'u',   /* an address where nobody listens */
    NEVER_READ = 'n'   /* the client sends and reads nothing, then goes */
};

static const char manners[] = "fffllppppptrcaun";

struct life {
    int fd;
    char manner;
    size_t total, sent, received;
    uint64_t seed;
    bool shut;
};

struct clients {
    struct sockaddr_in relay;
    unsigned lives;
    uint64_t seed;
    bool strict;
    unsigned whole, broken, wrong;
    atomic_bool done;
};

static uint8_t byte_at(const struct life *life, size_t index)
{
    return index == 0 ? (uint8_t)life->manner : (uint8_t)((life->seed + index * 31 + (index >> 8) * 7) & 0xff);
}

static bool exact(const struct life *life)
{
    return strchr("flp", life->manner) != NULL;
}

static void life_begin(struct clients *clients, struct life *life, struct pollfd *polled)
{
    *life = (struct life){.manner = manners[below(sizeof manners - 1)], .seed = draw()};
    life->total = below(30) == 0 ? 3000000 + below(3000000) : 1 + below(60000);
    if (life->manner == IN_PIECES && life->total > 60000)
        life->total = 200000;
    life->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (life->fd < 0 || connect(life->fd, (struct sockaddr *)&clients->relay, sizeof clients->relay) < 0) {
        if (life->fd >= 0)
            close(life->fd);
        life->fd = -1;
        clients->broken++;
    }
    *polled = (struct pollfd){.fd = life->fd, .events = POLLIN | POLLOUT};
}

/* False at the end of a life. */
static bool life_turn(struct clients *clients, struct life *life)
{
    uint8_t bytes[40000];
    if (life->sent < life->total) {
        size_t count = 1 + below(sizeof bytes);
        if (count > life->total - life->sent)
            count = life->total - life->sent;
        for (size_t index = 0; index < count; index++)
            bytes[index] = byte_at(life, life->sent + index);
        ssize_t sent = send(life->fd, bytes, count, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0 && errno != EAGAIN) {
            clients->broken++;
            return false;
        }
        if (sent > 0)
            life->sent += (size_t)sent;
    } else if (!life->shut) {
        shutdown(life->fd, SHUT_WR);
        life->shut = true;
    }
    if (life->manner == THROWN && life->sent > life->total / 2) {
        set_linger(life->fd);
        return false;
    }
    if (life->manner == NEVER_READ)
        return below(40) != 0;
    ssize_t count = recv(life->fd, bytes, 1 + below(sizeof bytes), MSG_DONTWAIT);
    if (count < 0 && errno == EAGAIN)
        return true;
    if (count < 0) {
        clients->broken++;
        clients->wrong += clients->strict && exact(life);
        return false;
    }
    if (count == 0) {
        bool whole = life->received == life->total;
        clients->whole += whole;
        clients->wrong += clients->strict && exact(life) && !whole;
        return false;
    }
    for (ssize_t index = 0; index < count && exact(life); index++) {
        size_t place = life->received + (size_t)index;
        if (bytes[index] != byte_at(life, place)) {
            clients->wrong++;
            fprintf(stderr, "'%c', byte %zu of %zu, %zu sent: %u and not %u; of %zd read here the first is %zu\n",
                    life->manner, place, life->total, life->sent, bytes[index], byte_at(life, place), count,
                    life->received);
            return false;
        }
    }
    life->received += (size_t)count;
    return true;
}

static void *clients_run(void *argument)
{
    struct clients *clients = argument;
    draw_state = clients->seed;
    static struct life lives[CONCURRENT];
    static struct pollfd polled[CONCURRENT];
    for (unsigned index = 0; index < CONCURRENT; index++)
        polled[index].fd = lives[index].fd = -1;
    unsigned begun = 0, living = 0;
    do {
        for (unsigned index = 0; index < CONCURRENT; index++) {
            if (lives[index].fd < 0 && begun < clients->lives) {
                life_begin(clients, &lives[index], &polled[index]);
                begun++;
                living += lives[index].fd >= 0;
            }
        }
        poll(polled, CONCURRENT, 20);
        for (unsigned index = 0; index < CONCURRENT; index++) {
            if (lives[index].fd < 0 || !polled[index].revents)
                continue;
            if (!life_turn(clients, &lives[index])) {
                close(lives[index].fd);
                polled[index].fd = lives[index].fd = -1;
                living--;
            } else {
                bool unsent = !lives[index].shut || lives[index].manner == NEVER_READ;
                polled[index].events = (short)(POLLIN | (unsent ? POLLOUT : 0));
            }
        }
    } while (living || begun < clients->lives);
    atomic_store(&clients->done, true);
    return NULL;
}

/* ---- the driver: what Python would do ---- */

struct known {
    uint64_t pair;
    char manner;
};

struct driver {
    struct relay *relay;
    struct relay_address origin;
    struct known *known; /* by worker and slot */
    bool strict;
    unsigned accepted, closed, unsaid, unequal, strange, refused, opened, failed;
    uint64_t reasons[7];
};

static struct known *known_of(struct driver *driver, uint64_t pair)
{
    return &driver->known[(pair >> SLOT_BITS & 3) * PAIRS + (pair & (PAIRS - 1))];
}

/* What must succeed is tried until there is memory. */
#define SURELY(call)       \
    do {                   \
    } while ((call) == -ENOMEM)

static void drive_open(struct driver *driver, struct known *known, const struct relay_event *event)
{
    struct relay *relay = driver->relay;
    uint64_t pair = event->pair;
    int step;
    struct relay_address targets[4] = {{"127.0.0.1", 1}, {"::1", 1}, driver->origin, {"127.0.0.1", 1}};
    unsigned first = below(4) == 0 ? 0 : 2;
    switch (known->manner) {
    case ANSWERED:
        SURELY(relay_send(relay, pair, RELAY_DOWN, (const uint8_t *)"no", 2, &step));
        SURELY(relay_close(relay, pair, 0, &step));
        return;
    case UNREACHED:
        SURELY(relay_open(relay, pair, targets, 2, event->data, event->length, FREE_PASS, FREE_PASS, &step));
        return;
    case LATE:
        SURELY(relay_open(relay, pair, targets + first, 4 - first, event->data, event->length, 0, 0, &step));
        return;
    case IN_PIECES:
        SURELY(relay_open(relay, pair, targets + first, 4 - first, event->data, event->length, 1 + below(500), below(500),
                          &step));
        SURELY(relay_read(relay, pair, RELAY_UP, 1 + below(900), &step));
        SURELY(relay_read(relay, pair, RELAY_DOWN, 1 + below(900), &step));
        return;
    default:
        SURELY(relay_open(relay, pair, targets + first, 4 - first, event->data, event->length, FREE_PASS, FREE_PASS,
                          &step));
    }
    if (known->manner == CUT_OFF && below(2))
        SURELY(relay_deadline(relay, pair, 1 + below(30), &step));
}

static void drive_data(struct driver *driver, struct known *known, const struct relay_event *event)
{
    struct relay *relay = driver->relay;
    int step;
    if (!known->manner) {
        known->manner = (char)event->data[0];
        drive_open(driver, known, event);
        return;
    }
    SURELY(relay_send(relay, event->pair, event->direction, event->data, event->length, &step));
    if (below(3) == 0)
        SURELY(relay_pass(relay, event->pair, event->direction, 1 + below(20000), &step));
    SURELY(relay_read(relay, event->pair, event->direction, 1 + below(below(4) ? 40000 : 10), &step));
}

static void drive(struct driver *driver, const struct relay_event *event)
{
    struct relay *relay = driver->relay;
    struct known *known = event->kind == RELAY_REFUSED ? NULL : known_of(driver, event->pair);
    int step;
    if (event->kind == RELAY_ACCEPTED)
        *known = (struct known){.pair = event->pair};
    else if (event->kind != RELAY_REFUSED && event->kind != RELAY_CLOSED && known->pair != event->pair)
        driver->strange++;
    switch (event->kind) {
    case RELAY_ACCEPTED:
        driver->accepted++;
        SURELY(relay_read(relay, event->pair, RELAY_UP, 1 + below(30000), &step));
        break;
    case RELAY_DATA:
        drive_data(driver, known, event);
        break;
    case RELAY_ENDED:
        SURELY(relay_finish(relay, event->pair, event->direction, &step));
        break;
    case RELAY_OPENED:
        driver->opened++;
        if (known->manner == LATE) {
            SURELY(relay_pass(relay, event->pair, RELAY_UP, FREE_PASS, &step));
            SURELY(relay_pass(relay, event->pair, RELAY_DOWN, FREE_PASS, &step));
        } else if (known->manner == CUT_OFF && below(2)) {
            SURELY(relay_close(relay, event->pair, 1, &step));
        }
        break;
    case RELAY_FAILED:
        driver->failed++;
        driver->strange += driver->strict && known->manner != UNREACHED;
        SURELY(relay_close(relay, event->pair, (int)below(2), &step));
        break;
    case RELAY_CLOSED:
        driver->closed++;
        driver->unsaid += !event->flag;
        driver->reasons[event->reason]++;
        if (event->flag && strchr("flp", known->manner) && event->reason == RELAY_DONE)
            driver->unequal += event->up_bytes != event->down_bytes;
        SURELY(relay_read(relay, event->pair, RELAY_UP, 1, &step)); /* too late, on purpose */
        SURELY(relay_send(relay, event->pair, RELAY_DOWN, (const uint8_t *)"late", 4, &step));
        break;
    default:
        driver->refused += (unsigned)event->count;
    }
}

static void drive_until(struct driver *driver, struct clients *clients, unsigned seconds)
{
    struct relay_event events[EVENTS];
    struct pollfd polled = {.fd = relay_fd(driver->relay), .events = POLLIN};
    time_t end = time(NULL) + seconds;
    while (time(NULL) < end) {
        int ready = poll(&polled, 1, 100);
        int count = relay_take(driver->relay, events, EVENTS);
        for (int index = 0; index < count; index++)
            drive(driver, &events[index]);
        if (ready == 0 && atomic_load(&clients->done) && driver->closed == driver->accepted + driver->unsaid &&
            atomic_load(&driver->relay->pairs) <= (unsigned)count)
            return;
    }
    CHECK(false, "not over after %u s: %u accepted, %u closed", seconds, driver->accepted, driver->closed);
}

/* One relay, `lives` connections through it, and nothing left afterwards. */
static void stress(const char *name, unsigned threads, unsigned lives, bool strict)
{
    unsigned before = descriptors();
    struct sockaddr_in gate;
    int gate_fd = listening(&gate), step = 0;
    struct driver driver = {.strict = strict};
    struct sockaddr_in there;
    socklen_t length = sizeof there;
    getsockname(origin_fd, (struct sockaddr *)&there, &length);
    snprintf(driver.origin.text, sizeof driver.origin.text, "127.0.0.1");
    driver.origin.port = ntohs(there.sin_port);
    driver.known = calloc(4 * PAIRS, sizeof *driver.known);
    struct relay_limits limits = {
        .pairs = PAIRS, .held_bytes = 64 << 20, .first_ms = 20000, .connect_ms = 20000, .idle_ms = strict ? 60000 : 3000};
    SURELY(relay_start(threads, PAIRS, &driver.relay, &step));
    CHECK(driver.relay, "start, step %d", step);
    int rc;
    while ((rc = relay_listen(driver.relay, 5, gate_fd, &limits, &step)) == -ENOMEM)
        continue;
    CHECK(rc == 0, "listen: %d, step %d", rc, step);
    if (rc == 0)
        CHECK(relay_listen(driver.relay, 5, gate_fd, &limits, &step) == -EEXIST || !strict, "listened twice");
    struct clients clients = {.relay = gate, .lives = lives, .seed = draw() | 1, .strict = strict};
    pthread_t thread;
    pthread_create(&thread, NULL, clients_run, &clients);
    drive_until(&driver, &clients, 120);
    pthread_join(thread, NULL);
    CHECK(clients.wrong == 0, "%s: %u connections got other bytes than they sent", name, clients.wrong);
    CHECK(driver.unequal == 0, "%s: %u pairs with other counts up than down", name, driver.unequal);
    CHECK(driver.strange == 0, "%s: %u events that cannot be", name, driver.strange);
    if (strict) {
        CHECK(driver.accepted == lives, "%u of %u accepted", driver.accepted, lives);
        CHECK(clients.whole > lives / 3, "only %u of %u came back whole", clients.whole, lives);
    }
    printf("%s: %u lives, %u whole, %u broken; %u opened, %u failed, %u refused; ends:", name, lives, clients.whole,
           clients.broken, driver.opened, driver.failed, driver.refused);
    for (unsigned reason = 0; reason < 7; reason++)
        printf(" %lu", (unsigned long)driver.reasons[reason]);
    printf("\n");
    SURELY(relay_unlisten(driver.relay, 5, &step));
    relay_stop(driver.relay);
    close(gate_fd);
    free(driver.known);
    atomic_store(&memory_fails_one_in, 0);
    for (unsigned wait = 0; wait < 100 && descriptors() > before; wait++) /* the origin has its ends still */
        usleep(20000);
    CHECK(descriptors() <= before, "%s: %u descriptors before, %u after", name, before, descriptors());
}

/* Stopped and unlistened in the middle: nothing hangs, nothing leaks. */
static void stop_in_the_middle(void)
{
    for (unsigned round = 0; round < 20; round++) {
        struct sockaddr_in gate;
        int gate_fd = listening(&gate), step;
        struct relay *relay = NULL;
        struct relay_limits limits = {.pairs = 20, .held_bytes = 1 << 20, .first_ms = 1000, .connect_ms = 1000};
        CHECK(relay_start(3, 30, &relay, &step) == 0, "step %d", step);
        CHECK(relay_listen(relay, round, gate_fd, &limits, &step) == 0, "step %d", step);
        int fds[40];
        for (unsigned index = 0; index < 40; index++) {
            fds[index] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
            connect(fds[index], (struct sockaddr *)&gate, sizeof gate);
            send(fds[index], "x", 1, MSG_NOSIGNAL);
        }
        struct relay_event events[EVENTS];
        int count = relay_take(relay, events, below(EVENTS));
        for (int index = 0; index < count; index++) {
            if (events[index].kind != RELAY_ACCEPTED)
                continue;
            struct relay_address nowhere = {"127.0.0.1", 1};
            relay_read(relay, events[index].pair, RELAY_UP, 10, &step);
            relay_open(relay, events[index].pair, &nowhere, 1, (const uint8_t *)"hi", 2, 0, 0, &step);
        }
        if (round % 2) {
            CHECK(relay_unlisten(relay, round, &step) == 0, "step %d", step);
            CHECK(relay_listen(relay, round, gate_fd, &limits, &step) == 0, "step %d", step);
        }
        relay_stop(relay);
        for (unsigned index = 0; index < 40; index++)
            close(fds[index]);
        close(gate_fd);
    }
}

static void heap_keeps_order(void)
{
    enum { COUNT = 500 };
    struct worker *worker = calloc(1, sizeof *worker);
    struct pair *pairs = calloc(COUNT, sizeof *pairs);
    worker->heap = calloc(COUNT + 1, sizeof *worker->heap);
    for (unsigned index = 0; index < COUNT; index++) {
        pairs[index].wake_at = NEVER;
        worker_schedule(worker, &pairs[index], 1000 + below(200));
    }
    for (unsigned index = 0; index < COUNT; index += 3)
        worker_schedule(worker, &pairs[index], below(1200));
    for (unsigned index = 0; index < COUNT; index += 7)
        heap_remove(worker, &pairs[index]);
    uint64_t last = 0;
    unsigned left = worker->heap_count;
    CHECK(left == COUNT - (COUNT + 6) / 7, "%u left", left);
    while (worker->heap_count) {
        struct pair *pair = worker->heap[1];
        CHECK(pair->wake_at >= last, "%lu after %lu", (unsigned long)pair->wake_at, (unsigned long)last);
        last = pair->wake_at;
        heap_remove(worker, pair);
    }
    free(worker->heap);
    free(pairs);
    free(worker);
}

static void arguments_are_checked(void)
{
    struct relay *relay;
    int step;
    struct relay_address address = {"127.0.0.1", 1}, name = {"localhost", 1}, endless;
    memset(endless.text, '1', sizeof endless.text);
    CHECK(relay_start(0, 1, &relay, &step) == -EINVAL, "no thread");
    CHECK(relay_start(RELAY_THREADS_MAX + 1, 1, &relay, &step) == -EINVAL, "too many threads");
    CHECK(relay_start(1, 0, &relay, &step) == -EINVAL, "no pair");
    CHECK(relay_start(1, RELAY_PAIRS_MAX + 1, &relay, &step) == -EINVAL, "too many pairs");
    CHECK(relay_start(1, 4, &relay, &step) == 0, "step %d", step);
    struct relay_limits limits = {.pairs = 1};
    CHECK(relay_listen(relay, 1, -1, &limits, &step) == -EBADF && step == RELAY_LISTENER, "step %d", step);
    CHECK(relay_unlisten(relay, 1, &step) == -ENOENT && step == RELAY_SANDBOX, "step %d", step);
    CHECK(relay_open(relay, 1, &address, 0, NULL, 0, 0, 0, &step) == -EINVAL, "no address");
    CHECK(relay_open(relay, 1, &name, 1, NULL, 0, 0, 0, &step) == -EINVAL, "a name is no address");
    CHECK(relay_open(relay, 1, &endless, 1, NULL, 0, 0, 0, &step) == -EINVAL, "text without an end");
    CHECK(relay_read(relay, 1, 2, 1, &step) == -EINVAL, "there are two directions");
    for (uint64_t pair = 1; pair; pair <<= 1)
        CHECK(relay_read(relay, pair, RELAY_UP, 1, &step) == 0, "a pair that never was");
    CHECK(relay_close(relay, UINT64_MAX, 1, &step) == 0, "a pair that never was");
    struct relay_event event;
    CHECK(relay_take(relay, &event, 1) == 0, "an event out of nothing");
    relay_stop(relay);
}

int main(void)
{
    const char *seed = getenv("RELAY_SEED"), *lives_text = getenv("RELAY_LIVES");
    draw_state = seed ? strtoull(seed, NULL, 0) : (uint64_t)time(NULL) * 1000003 + (uint64_t)getpid();
    printf("seed %lu\n", (unsigned long)draw_state);
    draw_state |= 1;
    unsigned lives = lives_text ? (unsigned)atoi(lives_text) : LIVES;
    signal(SIGPIPE, SIG_IGN);
    arguments_are_checked();
    heap_keeps_order();
    struct sockaddr_in address;
    origin_fd = listening(&address);
    pthread_t thread;
    pthread_create(&thread, NULL, origin, NULL);
    stress("one thread", 1, lives, true);
    stress("three threads", 3, lives, true);
    stop_in_the_middle();
    atomic_store(&memory_fails_one_in, 300);
    stress("memory fails", 2, lives / 3, false);
    struct rlimit limit, low;
    getrlimit(RLIMIT_NOFILE, &limit);
    low = (struct rlimit){.rlim_cur = 260, .rlim_max = limit.rlim_max};
    setrlimit(RLIMIT_NOFILE, &low);
    stress("descriptors run out", 2, lives / 3, false);
    setrlimit(RLIMIT_NOFILE, &limit);
    atomic_store(&origin_stops, true);
    pthread_join(thread, NULL);
    close(origin_fd);
    return finish("relay");
}
