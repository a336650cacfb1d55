/*
 * guest-exec: the last steps between guestd and a command, where no Python may run.
 *
 * guestd starts it with posix_spawn and these descriptors:
 *
 *   0 1 2   the command's own (a terminal's slave on all three when TTY is set)
 *   3       the block, below; a file, read from its start
 *   4       report: on failure one struct report is written; the exec closes it, so end of file means success
 *   5       a mount namespace, when NAMESPACE is set
 *
 * The block is a struct head, then `bytes` bytes of strings, each ended by NUL, in this order: the cgroup.procs file
 * to enter ("" for none), the working directory, `argc` arguments, `envc` NAME=value lines. Any byte but NUL may
 * stand in a string. Everything about the block is checked, although only guestd writes it.
 *
 * It runs as root in guestd's namespace at first: the cgroup and the OOM score come before the namespace is entered,
 * the working directory is looked up after the identity is given up, so that the user's rights decide. Where guestd
 * is no root (tests), IDENTITY and NAMESPACE are not set and the rest happens all the same.
 *
 * A command without a slash is sought on the command's own PATH, absolute entries only.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { BLOCK_FD = 3, REPORT_FD = 4, NAMESPACE_FD = 5 };
enum { TTY = 1, IDENTITY = 2, NAMESPACE = 4 };
enum { MAX_BLOCK_BYTES = 8 << 20, PATH_BYTES = 4096 };
enum { MAGIC = 0x31584547 }; /* "GEX1" */

/* guestd/process.py has the same names in the same order */
enum step { BLOCK = 1, SESSION, CGROUP, OOM_SCORE, TERMINAL, ENTER, LIMITS, IDENTIFY, DIRECTORY, COMMAND };

struct head {
    uint32_t magic, flags, uid, gid, argc, envc, bytes;
};

struct report {
    uint32_t step, error;
};

struct order {
    uint32_t flags;
    uid_t uid;
    gid_t gid;
    char *cgroup, *directory;
    char **argv, **envp;
};

static _Noreturn void fail(enum step step, int error)
{
    struct report report = { (uint32_t)step, (uint32_t)error };
    ssize_t written = write(REPORT_FD, &report, sizeof report);

    _exit(written == (ssize_t)sizeof report ? 126 : 127);
}

static int read_whole(int fd, void *into, size_t size)
{
    char *at = into;

    while (size > 0) {
        ssize_t got = read(fd, at, size);

        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return got < 0 ? -errno : -EBADMSG;
        at += got;
        size -= (size_t)got;
    }
    return 0;
}

static int write_file(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    int result = 0;

    if (fd < 0)
        return -errno;
    if (write(fd, text, strlen(text)) < 0)
        result = -errno;
    close(fd);
    return result;
}

/* The next string of the block, or NULL at its end. The block's last byte is NUL, so strlen stays inside. */
static char *take(char **at, const char *end)
{
    char *string = *at;

    if (string >= end)
        return NULL;
    *at = string + strlen(string) + 1;
    return string;
}

/* Fills `order` from the block; returns 0 or -errno. Nothing is freed: the exec does that. */
static int read_order(struct order *order)
{
    struct head head;
    size_t strings;
    char *text, *at, *end, **pointers;
    int result = read_whole(BLOCK_FD, &head, sizeof head);

    if (result < 0)
        return result;
    if (head.magic != MAGIC || head.bytes == 0 || head.bytes > MAX_BLOCK_BYTES)
        return -EBADMSG;
    /* each string takes a byte at least, which bounds both counts by `bytes` */
    if (head.argc == 0 || head.argc > head.bytes || head.envc > head.bytes)
        return -EBADMSG;
    strings = (size_t)head.argc + head.envc;
    text = malloc(head.bytes);
    pointers = calloc(strings + 2, sizeof *pointers);
    if (!text || !pointers) {
        free(text);
        free(pointers);
        return -ENOMEM;
    }
    result = read_whole(BLOCK_FD, text, head.bytes);
    at = text;
    end = text + head.bytes;
    if (result < 0 || end[-1] != '\0') {
        free(text);
        free(pointers);
        return result < 0 ? result : -EBADMSG;
    }
    order->flags = head.flags;
    order->uid = head.uid;
    order->gid = head.gid;
    order->cgroup = take(&at, end);
    order->directory = take(&at, end);
    order->argv = pointers;
    order->envp = pointers + head.argc + 1;
    for (uint32_t i = 0; i < head.argc; i++)
        order->argv[i] = take(&at, end);
    for (uint32_t i = 0; i < head.envc; i++)
        order->envp[i] = take(&at, end);
    /* take() answers NULL once the text is used up, so the last one asked for tells of all */
    if (at != end || !order->directory || !order->argv[head.argc - 1] || !order->argv[0][0] ||
        (head.envc > 0 && !order->envp[head.envc - 1])) {
        free(text);
        free(pointers);
        return -EBADMSG;
    }
    return 0;
}

/* Both limits; the hard one stays as it is where raising it is not permitted. */
static int limit(int what, rlim_t soft, rlim_t hard)
{
    struct rlimit now;

    if (getrlimit(what, &now) < 0)
        return -errno;
    if (setrlimit(what, &(struct rlimit){ soft, hard }) == 0)
        return 0;
    if (errno != EPERM)
        return -errno;
    if (soft > now.rlim_max)
        soft = now.rlim_max;
    return setrlimit(what, &(struct rlimit){ soft, now.rlim_max }) < 0 ? -errno : 0;
}

static int give_up_root(const struct order *order)
{
    if (setgroups(0, NULL) < 0 || setresgid(order->gid, order->gid, order->gid) < 0 ||
        setresuid(order->uid, order->uid, order->uid) < 0)
        return -errno;
    return 0;
}

/* By the system call: the C library refuses its own two signals, which its posix_spawn leaves ignored. */
static void default_signals(void)
{
    static const unsigned long defaults[4]; /* the kernel's struct sigaction, all of it zero */
    sigset_t none;

    for (int number = 1; number < NSIG; number++)
        syscall(SYS_rt_sigaction, number, defaults, NULL, sizeof(unsigned long)); /* KILL and STOP refuse */
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
}

static const char *value_of(char *const envp[], const char *name)
{
    size_t length = strlen(name);

    for (; *envp; envp++)
        if (strncmp(*envp, name, length) == 0 && (*envp)[length] == '=')
            return *envp + length + 1;
    return NULL;
}

/* Returns only on failure, with the errno that says most. */
static int run(char *const argv[], char *const envp[])
{
    const char *name = argv[0], *path;
    size_t name_bytes = strlen(name);
    int denied = 0;

    if (strchr(name, '/')) {
        execve(name, argv, envp);
        return errno;
    }
    path = value_of(envp, "PATH");
    while (path && *path) {
        size_t length = strcspn(path, ":");
        char candidate[PATH_BYTES];

        if (path[0] == '/' && length + 1 + name_bytes < sizeof candidate) {
            memcpy(candidate, path, length);
            candidate[length] = '/';
            memcpy(candidate + length + 1, name, name_bytes + 1);
            execve(candidate, argv, envp);
            if (errno == EACCES)
                denied = 1;
            else if (errno != ENOENT && errno != ENOTDIR)
                return errno;
        }
        path += length;
        path += *path == ':';
    }
    return denied ? EACCES : ENOENT;
}

int main(void)
{
    struct order order;
    int result = fcntl(REPORT_FD, F_SETFD, FD_CLOEXEC);

    if (result < 0)
        return 127;
    if ((result = read_order(&order)) < 0)
        fail(BLOCK, -result);
    if (setsid() < 0)
        fail(SESSION, errno);
    if (order.cgroup[0] && (result = write_file(order.cgroup, "0")) < 0)
        fail(CGROUP, -result);
    if ((result = write_file("/proc/self/oom_score_adj", "0")) < 0)
        fail(OOM_SCORE, -result);
    if ((order.flags & TTY) && ioctl(0, TIOCSCTTY, 0) < 0)
        fail(TERMINAL, errno);
    if ((order.flags & NAMESPACE) && setns(NAMESPACE_FD, CLONE_NEWNS) < 0)
        fail(ENTER, errno);
    if (close(BLOCK_FD) < 0 || syscall(SYS_close_range, (unsigned)NAMESPACE_FD, ~0U, 0U) < 0)
        fail(LIMITS, errno);
    if ((result = limit(RLIMIT_CORE, 0, RLIM_INFINITY)) < 0 || (result = limit(RLIMIT_NOFILE, 1024, 524288)) < 0)
        fail(LIMITS, -result);
    if ((order.flags & IDENTITY) && (result = give_up_root(&order)) < 0)
        fail(IDENTIFY, -result);
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
        fail(IDENTIFY, errno);
    umask(022);
    if (chdir(order.directory) < 0)
        fail(DIRECTORY, errno);
    default_signals();
    fail(COMMAND, run(order.argv, order.envp));
}
