/*
 * The ends of the wire for the benchmarks of the relay: servers and clients that cost as little as can be, so that
 * what is between them is what is measured. One program, one thread, epoll; the part is its first argument.
 *
 *   load names ADDRESS NAME=ADDRESS...           a name server on UDP 53 (RFC 1035); other types: no data
 *   load origin ADDRESS PORT bulk|byte|hold      after a first flight: bytes without end, one byte and the end,
 *                                                or one byte and silence
 *   load bulk ADDRESS PORT HELLO STREAMS MS      takes bytes for MS after all streams have begun
 *   load rate ADDRESS PORT HELLO FLIGHT MS N     new connections, FLIGHT at once, over N addresses from ADDRESS on
 *   load refused ADDRESS PORT HELLO FLIGHT MS N  the same, where an end without a byte is what is expected
 *   load idle ADDRESS PORT HELLO COUNT           opens COUNT, says `ready`, keeps them until its input ends
 *
 * HELLO is a file with a ClientHello. The clients print one line of JSON.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <time.h>
#include <unistd.h>

enum { EVENTS = 256, FILE_BYTES = 16 << 20, TURN_BYTES = 1 << 20, MOST_SAMPLES = 4 << 20 };

static int poller;

static void die(const char *step) {
    perror(step);
    exit(1);
}

static int64_t now_ns(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec * INT64_C(1000000000) + at.tv_nsec;
}

static struct sockaddr_in place(const char *address, const char *port) {
    struct sockaddr_in made = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(port))};
    if (inet_pton(AF_INET, address, &made.sin_addr) != 1)
        die(address);
    return made;
}

static void watch(int fd, uint32_t events, void *what) {
    struct epoll_event event = {.events = events, .data.ptr = what};
    if (epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event) != 0)
        die("epoll_ctl");
}

/* Names */

static size_t answer(uint8_t *packet, size_t size, int entries, char **entry) {
    char name[256];
    size_t at = 12, length = 0;
    if (size < 17)
        return 0;
    while (at < size && packet[at] != 0) {
        size_t label = packet[at];
        if (label > 63 || at + 1 + label >= size || length + label + 1 >= sizeof name)
            return 0;
        memcpy(name + length, packet + at + 1, label);
        length += label;
        name[length++] = '.';
        at += label + 1;
    }
    if (length == 0 || at + 5 > size)
        return 0;
    name[length - 1] = 0;
    bool wants_a = packet[at + 1] == 0 && packet[at + 2] == 1;
    size_t end = at + 5;
    const char *found = NULL;
    for (int i = 0; i < entries; i++) {
        const char *value = strchr(entry[i], '=');
        if (value && (size_t)(value - entry[i]) == length - 1 && strncasecmp(entry[i], name, length - 1) == 0)
            found = value + 1;
    }
    packet[2] = 0x84 | (packet[2] & 1);         /* an authoritative answer */
    packet[3] = (uint8_t)(0x80 | (found ? 0 : 3));
    memset(packet + 6, 0, 6);
    if (found && wants_a) {
        static const uint8_t record[] = {0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 0, 0, 4};
        memcpy(packet + end, record, sizeof record);
        inet_pton(AF_INET, found, packet + end + sizeof record);
        packet[7] = 1;
        end += sizeof record + 4;
    }
    return end;
}

_Noreturn static void names(const char *address, int entries, char **entry) {
    struct sockaddr_in here = place(address, "53");
    int fd = socket(AF_INET, SOCK_DGRAM, 0);
    int room = 8 << 20;
    setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &room, sizeof room);
    if (bind(fd, (struct sockaddr *)&here, sizeof here) != 0)
        die("bind");
    for (;;) {
        uint8_t packet[2048];
        struct sockaddr_in peer;
        socklen_t peer_size = sizeof peer;
        ssize_t got = recvfrom(fd, packet, 1024, 0, (struct sockaddr *)&peer, &peer_size);
        size_t size = got > 0 ? answer(packet, (size_t)got, entries, entry) : 0;
        if (size)
            sendto(fd, packet, size, 0, (struct sockaddr *)&peer, peer_size);
    }
}

/* Servers */

struct end {
    int fd;
    bool begun;
};

static void drop(struct end *end) {
    close(end->fd);
    free(end);
}

_Noreturn static void origin(const char *address, const char *port, const char *kind) {
    struct sockaddr_in here = place(address, port);
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), one = 1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listener, (struct sockaddr *)&here, sizeof here) != 0 || listen(listener, 4096) != 0)
        die("listen");
    int file = memfd_create("bytes", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, FILE_BYTES) != 0)
        die("memfd");
    char *fill = mmap(NULL, FILE_BYTES, PROT_WRITE, MAP_SHARED, file, 0);
    if (fill == MAP_FAILED)
        die("mmap");
    memset(fill, 'x', FILE_BYTES);
    bool bulk = strcmp(kind, "bulk") == 0, hold = strcmp(kind, "hold") == 0;
    watch(listener, EPOLLIN, NULL);
    for (;;) {
        struct epoll_event events[EVENTS];
        int count = epoll_wait(poller, events, EVENTS, -1);
        for (int i = 0; i < count; i++) {
            struct end *end = events[i].data.ptr;
            if (!end) {
                int fd;
                for (int n = 0; n < 64 && (fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0; n++) {
                    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
                    end = calloc(1, sizeof *end);
                    end->fd = fd;
                    watch(fd, EPOLLIN, end);
                }
                continue;
            }
            if (!end->begun) {
                char flight[32768];
                ssize_t got = recv(end->fd, flight, sizeof flight, 0);
                if (got <= 0) {
                    drop(end);
                    continue;
                }
                end->begun = true;
                if (bulk) {
                    struct epoll_event change = {.events = EPOLLOUT, .data.ptr = end};
                    epoll_ctl(poller, EPOLL_CTL_MOD, end->fd, &change);
                } else {
                    send(end->fd, "!", 1, MSG_NOSIGNAL);
                    if (!hold)
                        shutdown(end->fd, SHUT_WR);
                }
            } else if (bulk) {
                off_t from = 0;
                if (sendfile(end->fd, file, &from, TURN_BYTES) < 0 && errno != EAGAIN)
                    drop(end);
            } else {
                char rest[32768];
                ssize_t got = recv(end->fd, rest, sizeof rest, 0);
                if (got == 0 || (got < 0 && errno != EAGAIN))
                    drop(end);
            }
        }
    }
}

/* Clients */

static char hello[65536];
static size_t hello_size;

static void read_hello(const char *path) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t got = fd < 0 ? -1 : read(fd, hello, sizeof hello);
    if (got <= 0)
        die(path);
    hello_size = (size_t)got;
    close(fd);
}

static int dial(struct sockaddr_in to) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), one = 1;
    if (fd < 0)
        die("socket");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (connect(fd, (struct sockaddr *)&to, sizeof to) != 0 && errno != EINPROGRESS)
        die("connect");
    return fd;
}

static int bulk(struct sockaddr_in to, int streams, int64_t span_ns) {
    struct client { int fd; int state; } *clients = calloc((size_t)streams, sizeof *clients);
    static char buffer[1 << 20];
    for (int i = 0; i < streams; i++) {
        clients[i].fd = dial(to);
        watch(clients[i].fd, EPOLLOUT, &clients[i]);
    }
    int begun = 0, over = 0;
    int64_t start = 0, bytes = 0, give_up = now_ns() + INT64_C(20000000000);
    for (;;) {
        struct epoll_event events[EVENTS];
        int count = epoll_wait(poller, events, EVENTS, 100);
        int64_t now = now_ns();
        for (int i = 0; i < count; i++) {
            struct client *client = events[i].data.ptr;
            if (client->state == 0) {
                if (send(client->fd, hello, hello_size, MSG_NOSIGNAL) != (ssize_t)hello_size)
                    die("hello");
                client->state = 1;
                struct epoll_event change = {.events = EPOLLIN, .data.ptr = client};
                epoll_ctl(poller, EPOLL_CTL_MOD, client->fd, &change);
                continue;
            }
            /* MSG_TRUNC: the bytes are counted and dropped in the kernel, not copied (tcp(7)). */
            ssize_t got = recv(client->fd, buffer, sizeof buffer, MSG_TRUNC);
            if (got <= 0) {
                if (got < 0 && errno == EAGAIN)
                    continue;
                fprintf(stderr, "a stream ended: %s\n", got ? strerror(errno) : "end");
                over++;
                epoll_ctl(poller, EPOLL_CTL_DEL, client->fd, NULL);
                continue;
            }
            if (client->state == 1) {
                client->state = 2;
                if (++begun == streams) {
                    start = now;
                    bytes = 0;
                }
            }
            bytes += got;
        }
        if (over || (!start && now > give_up))
            return 1;
        if (start && now - start >= span_ns) {
            printf("{\"bytes\": %lld, \"seconds\": %.6f}\n", (long long)bytes, (double)(now - start) / 1e9);
            return 0;
        }
    }
}

static int by_size(const void *one, const void *other) {
    uint32_t a = *(const uint32_t *)one, b = *(const uint32_t *)other;
    return (a > b) - (a < b);
}

struct try {
    int fd, state;
    int64_t began, said;
};

static void begin(struct try *try, struct sockaddr_in to, int addresses, unsigned *turn) {
    to.sin_addr.s_addr = htonl(ntohl(to.sin_addr.s_addr) + (*turn)++ % (unsigned)addresses);
    try->began = now_ns();
    try->fd = dial(to);
    try->state = 0;
    watch(try->fd, EPOLLOUT, try);
}

static int rate(struct sockaddr_in to, int flight, int64_t span_ns, int addresses, bool refused) {
    struct try *tries = calloc((size_t)flight, sizeof *tries);
    uint32_t *samples = malloc(MOST_SAMPLES * sizeof *samples), *whole = malloc(MOST_SAMPLES * sizeof *whole);
    size_t done = 0, failed = 0;
    unsigned turn = 0;
    int64_t start = now_ns(), now = start;
    for (int i = 0; i < flight; i++)
        begin(&tries[i], to, addresses, &turn);
    while (now - start < span_ns && done < MOST_SAMPLES) {
        struct epoll_event events[EVENTS];
        int count = epoll_wait(poller, events, EVENTS, 1000);
        now = now_ns();
        for (int i = 0; i < count; i++) {
            struct try *try = events[i].data.ptr;
            char bytes[64];
            if (try->state == 0) {
                try->said = now_ns();
                ssize_t sent = send(try->fd, hello, hello_size, MSG_NOSIGNAL);
                if (sent == (ssize_t)hello_size) {
                    try->state = 1;
                    struct epoll_event change = {.events = EPOLLIN, .data.ptr = try};
                    epoll_ctl(poller, EPOLL_CTL_MOD, try->fd, &change);
                    continue;
                }
                failed++;
            } else {
                ssize_t got = recv(try->fd, bytes, sizeof bytes, 0);
                if (got < 0 && errno == EAGAIN)
                    continue;
                if (try->state == 1) {
                    int64_t at = now_ns();
                    if (refused ? got > 0 : got <= 0) {
                        failed++;
                    } else {
                        whole[done] = (uint32_t)((at - try->began) / 1000);
                        samples[done++] = (uint32_t)((at - try->said) / 1000);
                    }
                    if (got > 0) {      /* the end comes from the other side, and with it the waiting port */
                        try->state = 2;
                        continue;
                    }
                }
            }
            close(try->fd);
            begin(try, to, addresses, &turn);
        }
    }
    double seconds = (double)(now - start) / 1e9;
    qsort(samples, done, sizeof *samples, by_size);
    qsort(whole, done, sizeof *whole, by_size);
    printf("{\"done\": %zu, \"failed\": %zu, \"seconds\": %.6f, \"p50_us\": %u, \"p99_us\": %u, \"whole_p50_us\": %u}\n",
           done, failed, seconds, done ? samples[done / 2] : 0, done ? samples[done * 99 / 100] : 0,
           done ? whole[done / 2] : 0);
    return 0;
}

static int idle(struct sockaddr_in to, int count) {
    for (int i = 0; i < count; i++) {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        char byte;
        if (connect(fd, (struct sockaddr *)&to, sizeof to) != 0)
            die("connect");
        if (send(fd, hello, hello_size, MSG_NOSIGNAL) != (ssize_t)hello_size || recv(fd, &byte, 1, 0) != 1)
            die("hello");
    }
    puts("ready");
    fflush(stdout);
    while (getchar() != EOF)
        ;
    return 0;
}

int main(int argc, char **argv) {
    signal(SIGPIPE, SIG_IGN);
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    poller = epoll_create1(EPOLL_CLOEXEC);
    const char *part = argc > 1 ? argv[1] : "";
    if (strcmp(part, "names") == 0 && argc >= 3)
        names(argv[2], argc - 3, argv + 3);
    if (strcmp(part, "origin") == 0 && argc == 5)
        origin(argv[2], argv[3], argv[4]);
    if (argc >= 6) {
        struct sockaddr_in to = place(argv[2], argv[3]);
        read_hello(argv[4]);
        if (strcmp(part, "bulk") == 0 && argc == 7)
            return bulk(to, atoi(argv[5]), atoll(argv[6]) * 1000000);
        if ((strcmp(part, "rate") == 0 || strcmp(part, "refused") == 0) && argc == 8)
            return rate(to, atoi(argv[5]), atoll(argv[6]) * 1000000, atoi(argv[7]), part[1] == 'e');
        if (strcmp(part, "idle") == 0 && argc == 6)
            return idle(to, atoi(argv[5]));
    }
    fputs("load: see the head of load.c\n", stderr);
    return 2;
}
