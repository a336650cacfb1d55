/*
 * Everything Python may call in C. cffi reads this file as it is, so it holds no preprocessor line; whoever
 * includes it includes <stdint.h> first, and only once.
 *
 * Every function returns a value >= 0, or -errno with the step that failed left in `*step` (`report->step`). None
 * prints, exits or calls back; none but the relay keeps state between calls, and none leaves memory for the caller to
 * free. All may be called from any thread, and several at a time, where nothing else is said.
 */

/* ---- hostpath.c: may this directory of the host be shown to a guest? ---- */

enum hostpath_step {
    HOSTPATH_OPEN = 1,       /* opening the path that was asked for */
    HOSTPATH_PROC_LINK = 2,  /* the same, and a link of /proc (/proc/<pid>/root, cwd, fd/<n>) is on the way: ELOOP */
    HOSTPATH_IDENTIFY = 3,   /* device, inode and mount of the open directory */
    HOSTPATH_OPEN_ROOT = 4,  /* opening / */
    HOSTPATH_OPEN_HOME = 5,  /* opening the home directory */
    HOSTPATH_PARENTS = 6,    /* walking from home to the root by ".." */
    HOSTPATH_MOUNTS = 7      /* looking for other places where home's file system is mounted */
};

enum hostpath_verdict {
    HOSTPATH_ALLOWED = 0,
    HOSTPATH_IS_ROOT = 1,
    HOSTPATH_IS_HOME = 2,
    HOSTPATH_IS_ABOVE_HOME = 3
};

struct hostpath_id {
    uint64_t device;
    uint64_t inode;
};

/*
 * Opens `path`, following symbolic links, once: the descriptor (O_PATH, close-on-exec, the caller closes it) is the
 * directory from here on, and the name is not looked up again. -ENOENT: nothing there. -ENOTDIR: it is there and is
 * not a directory. -ELOOP with HOSTPATH_PROC_LINK: refused on a kernel with openat2; an older one follows such a
 * link, and hostpath_check judges what it leads to.
 */
int hostpath_open(const char *path, struct hostpath_id *id, int *step);

/*
 * Returns the hostpath_verdict on an open directory. Compares device and inode, never names, with /, with `home`
 * and with every directory above `home`: by ".." from where `home` leads, and from each further place where the
 * same directory can be reached because its file system is mounted there too. Needs /proc.
 */
int hostpath_check(int directory_fd, const char *home, int *step);

/*
 * 1 when an open directory is `place` or below it: by ".." from where it was opened, and by where both are in their
 * file system, through whichever mount it was reached. 0 when not. Steps as above, with `place` for home.
 */
int hostpath_is_inside(int directory_fd, const char *place, int *step);

/* ---- kvm_probe.c: does KVM run code, at a processor's speed? ---- */

enum kvm_probe_step {
    KVM_PROBE_OPEN = 1,
    KVM_PROBE_API_VERSION = 2,
    KVM_PROBE_CREATE_VM = 3,
    KVM_PROBE_MEMORY = 4,     /* guest memory: mapping it, giving it to the VM */
    KVM_PROBE_CREATE_VCPU = 5,
    KVM_PROBE_CPUID = 6,
    KVM_PROBE_REGISTERS = 7,  /* long mode set up, registers read and written */
    KVM_PROBE_TIMER = 8,      /* the thread and the timer that end the run */
    KVM_PROBE_RUN = 9,        /* KVM_RUN failed, or came back with an exit that is not HLT (`exit_reason`) */
    KVM_PROBE_DEADLINE = 10,  /* ran, and had done only `turns` when time was up */
    KVM_PROBE_RESULT = 11     /* came to its end with a wrong sum */
};

enum kvm_probe_state {
    KVM_PROBE_OK = 0,
    KVM_PROBE_ABSENT = 1,
    KVM_PROBE_NO_ACCESS = 2,
    KVM_PROBE_UNUSABLE = 3
};

struct kvm_probe_report {
    int step;             /* a kvm_probe_step, 0 when the state is KVM_PROBE_OK */
    int error;            /* errno of that step, 0 where none applies */
    uint32_t exit_reason; /* KVM_EXIT_* of linux/kvm.h, for KVM_PROBE_RUN without an errno */
    uint64_t turns;       /* turns of the loop the guest did */
    uint64_t elapsed_ns;  /* time spent in KVM_RUN */
};

/*
 * Runs a counted loop of `turns` turns in 64-bit mode in a VM of its own and ends it after `deadline_ms`. Returns a
 * kvm_probe_state; -errno only for what says nothing about KVM (-ENOMEM, -EMFILE, -ENFILE, -EAGAIN, -EINTR, and
 * -EINVAL when one of the two numbers is 0).
 * Takes no signal away from the process and installs no handler.
 */
int kvm_probe(const char *device, uint64_t turns, uint32_t deadline_ms, struct kvm_probe_report *report);

/* ---- relay.c: accepted connections, their upstreams, and the bytes between them ---- */

/*
 * A relay owns threads, and they own every connection. Commands are queued for the thread of their pair and return at
 * once; what happened is told in batches by relay_take. A command for a pair that is gone is ignored. A pair's number
 * is never used again.
 *
 * Each direction of a pair has two credits. Pass credit moves bytes straight on. When it is used up, read credit hands
 * them over as RELAY_DATA; after one of these the direction stands still until the next relay_read (0 will do),
 * relay_pass, or relay_open with credit for it. With neither credit bytes stay in the socket.
 */

struct relay;

enum relay_step {
    RELAY_MEMORY = 1,
    RELAY_EVENTFD = 2,
    RELAY_EPOLL = 3,
    RELAY_THREAD = 4,
    RELAY_LISTENER = 5,  /* duplicating the listening socket, reading its address, setting its options */
    RELAY_WATCH = 6,     /* adding it to an epoll instance */
    RELAY_SANDBOX = 7,   /* EEXIST: is listening already; ENOENT: is not */
    RELAY_ARGUMENT = 8
};

enum relay_direction {
    RELAY_UP = 0,  /* guest to upstream */
    RELAY_DOWN = 1
};

enum relay_reason {
    RELAY_DONE = 0,
    RELAY_GUEST_RESET = 1,
    RELAY_UPSTREAM_RESET = 2,
    RELAY_DEADLINE = 3,
    RELAY_IDLE = 4,
    RELAY_CUT = 5,
    RELAY_LIMIT = 6
};

enum relay_event_kind {
    RELAY_ACCEPTED = 1,  /* pair, sandbox, address, port; flag: the connection was redirected here */
    RELAY_DATA = 2,      /* pair, direction, data, length */
    RELAY_ENDED = 3,     /* pair, direction */
    RELAY_OPENED = 4,    /* pair, address, port */
    RELAY_FAILED = 5,    /* pair, error */
    RELAY_CLOSED = 6,    /* pair, sandbox, reason, up_bytes, down_bytes; flag: there was a RELAY_ACCEPTED */
    RELAY_REFUSED = 7    /* sandbox, count */
};

enum {
    RELAY_FIRST_BYTES = 17408,  /* read credit UP of a pair accepted on port 80 or 443 */
    RELAY_ADDRESSES_MAX = 16,   /* of one relay_open; those after are not tried */
    RELAY_THREADS_MAX = 16,
    RELAY_PAIRS_MAX = 1048576
};

struct relay_limits {
    uint32_t pairs;       /* at a time; a pair counts until its RELAY_CLOSED was taken */
    uint64_t held_bytes;  /* given to relay_send and relay_open and not yet written, over all pairs */
    uint32_t first_ms;    /* 0 in one of these three: no limit */
    uint32_t connect_ms;
    uint32_t idle_ms;
};

struct relay_address {
    char text[46];  /* as inet_pton reads it */
    uint16_t port;
};

struct relay_event {
    uint32_t kind;       /* a relay_event_kind; only the members named there have a meaning */
    uint32_t direction;
    uint64_t pair;
    uint64_t sandbox;
    char address[46];
    uint16_t port;
    uint32_t reason;
    uint32_t flag;
    int32_t error;
    uint64_t up_bytes;
    uint64_t down_bytes;
    uint64_t count;
    const uint8_t *data;  /* valid until the next relay_take */
    uint64_t length;
};

/* `max_pairs` is for all sandboxes together. The relay is left in `*relay`, for relay_stop to free. */
int relay_start(unsigned threads, unsigned max_pairs, struct relay **relay, int *step);

/* An eventfd, readable while events wait. It belongs to the relay. */
int relay_fd(const struct relay *relay);

/* Accepts on a duplicate of `listener_fd`, a listening TCP socket; sets it non-blocking. */
int relay_listen(struct relay *relay, uint64_t sandbox, int listener_fd, const struct relay_limits *limits, int *step);
int relay_unlisten(struct relay *relay, uint64_t sandbox, int *step);

/* Fills at most `most` events and returns their number. One caller at a time. */
int relay_take(struct relay *relay, struct relay_event *events, unsigned most);

int relay_open(struct relay *relay, uint64_t pair, const struct relay_address *addresses, unsigned count,
               const uint8_t *first, uint64_t length, uint64_t up, uint64_t down, int *step);
int relay_send(struct relay *relay, uint64_t pair, unsigned direction, const uint8_t *data, uint64_t length, int *step);
int relay_read(struct relay *relay, uint64_t pair, unsigned direction, uint64_t most, int *step);
int relay_pass(struct relay *relay, uint64_t pair, unsigned direction, uint64_t count, int *step);
int relay_finish(struct relay *relay, uint64_t pair, unsigned direction, int *step);
int relay_deadline(struct relay *relay, uint64_t pair, uint32_t ms, int *step);
int relay_close(struct relay *relay, uint64_t pair, int reset, int *step);

/* Resets every pair, ends the threads, frees everything. No other call may be under way or follow. */
int relay_stop(struct relay *relay);
