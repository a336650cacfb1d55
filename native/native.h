/*
 * Everything Python may call in C. cffi reads this file as it is, so it holds no preprocessor line; whoever
 * includes it includes <stdint.h> first, and only once.
 *
 * Every function returns a value >= 0, or -errno with the step that failed left in `*step` (`report->step`). None
 * prints, exits, calls back, keeps state between calls, or leaves memory for the caller to free. All may be called
 * from any thread, and several at a time.
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
