/*
 * guest-init: PID 1 of every sandbox's kernel, linked statically, started from the initramfs.
 *
 * In:  /modules/order (one module's file name a line, in loading order, and behind a blank the virtio device without
 *      which it is not loaded, as sysfs writes it) and the modules beside it; /dev/vda, the read-only runtime drive;
 *      the serial console. Nothing from the kernel's command line is read.
 * Out: kernel file systems mounted, the runtime drive as root, guestd started from it and started again when it
 *      ends, orphans reaped. The lines below on the console are what the host's boot probe and its error messages
 *      look for.
 *
 *   guest-init: start                     first line, before anything else
 *   guest-init: runtime                   the runtime drive is mounted
 *   guest-init: guestd ended: ...         guestd died and is started again
 *   guest-init: failed: <step>: <why>     the machine is then switched off
 *
 * It never mounts the image, never opens a socket and knows nothing of a sandbox's identity: that is guestd's
 * `configure`. It must not exit, since the kernel panics when PID 1 does.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define RUNTIME_DRIVE "/dev/vda"
#define RUNTIME_TYPE "erofs"
#define NEW_ROOT "/root"
#define DRIVE_WAIT_MS 10000
#define DRIVE_POLL_MS 5
#define GUESTD_DEATHS_MAX 5 /* in a row */
#define GUESTD_LIVES_S 10   /* then it had worked, and its end is the first one again */
#define GUESTD_PAUSE_MS 200
#define ORDER_MAX_BYTES 4096

static char *const guestd_argv[] = {"/usr/bin/python3", "-I", "-S", "-B", "/opt/sandbox/guestd", NULL};
static char *const guestd_envp[] = {"PATH=/usr/bin:/bin", "HOME=/run", "LANG=C.UTF-8", NULL};

struct mount_row {
    const char *source, *target, *type;
    unsigned long flags;
    const char *data;
};

static const struct mount_row early_mounts[] = {
    {"devtmpfs", "/dev", "devtmpfs", MS_NOSUID, "mode=0755"},
    {"proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL},
    {"sysfs", "/sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL},
    {"cgroup2", "/sys/fs/cgroup", "cgroup2", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL},
    {"devpts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "mode=0620,gid=5,ptmxmode=0666"},
    {"tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777"},
};

static const struct mount_row runtime_mounts[] = {
    {RUNTIME_DRIVE, NEW_ROOT, RUNTIME_TYPE, MS_RDONLY | MS_NODEV | MS_NOSUID, NULL},
    {"tmpfs", NEW_ROOT "/run", "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755"},
    {"tmpfs", NEW_ROOT "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777"},
    {"/dev", NEW_ROOT "/dev", NULL, MS_MOVE, NULL},
    {"/proc", NEW_ROOT "/proc", NULL, MS_MOVE, NULL},
    {"/sys", NEW_ROOT "/sys", NULL, MS_MOVE, NULL},
};

#define COUNT(rows) (sizeof(rows) / sizeof((rows)[0]))

__attribute__((format(printf, 1, 2))) static void say(const char *format, ...) {
    char line[256];
    va_list args;
    va_start(args, format);
    int length = vsnprintf(line, sizeof line, format, args);
    va_end(args);
    if (length < 0)
        return;
    size_t size = (size_t)length < sizeof line ? (size_t)length : sizeof line - 1;
    /* One write a line, so that the kernel's own messages cannot land inside it. A console that is gone is not
     * worth failing for. */
    if (write(STDOUT_FILENO, line, size) < 0)
        return;
}

static void pause_ms(long ms) {
    struct timespec left = {.tv_sec = ms / 1000, .tv_nsec = (ms % 1000) * 1000000};
    while (nanosleep(&left, &left) != 0 && errno == EINTR)
        continue;
}

/* A reset ends every VMM; switched off, Firecracker's machine would only stand still. */
__attribute__((noreturn)) static void end(void) {
    sync();
    reboot(RB_AUTOBOOT);
    for (;;) /* returning would be a kernel panic over the message that was just printed */
        pause_ms(1000);
}

__attribute__((noreturn)) static void fail(const char *step, const char *what) {
    const char *why = strerror(errno);
    say("guest-init: failed: %s%s%s: %s\n", step, *what ? " " : "", what, why);
    end();
}

static void mount_all(const struct mount_row *rows, size_t count) {
    for (const struct mount_row *row = rows; row < rows + count; row++) {
        /* Below the initramfs and /dev the mount points do not exist yet; on the read-only drive they do. */
        if (mkdir(row->target, 0755) != 0 && errno != EEXIST && errno != EROFS)
            fail("mkdir", row->target);
        if (mount(row->source, row->target, row->type, row->flags, row->data) != 0)
            fail("mount", row->target);
    }
}

/* Standard descriptors: the kernel opens /dev/console for PID 1 only where the initramfs has that node. */
static void open_console(void) {
    int console = open("/dev/console", O_RDWR | O_NOCTTY);
    if (console < 0)
        return;
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
        if (console != fd)
            dup2(console, fd);
    if (console > STDERR_FILENO)
        close(console);
}

static void load_module(const char *name) {
    int fd = open(name, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        fail("open module", name);
    /* ENODEV is a driver for a processor feature that this one lacks; EEXIST one that is built in. */
    if (syscall(SYS_finit_module, fd, "", 0) != 0 && errno != EEXIST && errno != ENODEV)
        fail("load module", name);
    close(fd);
    unlink(name); /* the initramfs is memory */
}

/* Devices are there as soon as the module of their bus is loaded. */
static int has_device(const char *wanted) {
    DIR *devices = opendir("/sys/bus/virtio/devices");
    int found = 0;
    for (struct dirent *entry; devices != NULL && !found && (entry = readdir(devices)) != NULL;) {
        char path[sizeof "/sys/bus/virtio/devices//device" + sizeof entry->d_name], number[16] = "";
        snprintf(path, sizeof path, "/sys/bus/virtio/devices/%s/device", entry->d_name);
        int fd = *entry->d_name == '.' ? -1 : open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0)
            continue;
        if (read(fd, number, sizeof number - 1) > 0)
            found = strcmp(strtok(number, "\n"), wanted) == 0;
        close(fd);
    }
    if (devices != NULL)
        closedir(devices);
    return found;
}

static void load_modules(void) {
    char order[ORDER_MAX_BYTES];
    if (chdir("/modules") != 0)
        fail("open", "/modules");
    int fd = open("order", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        fail("open", "/modules/order");
    ssize_t size = read(fd, order, sizeof order - 1);
    if (size < 0)
        fail("read", "/modules/order");
    close(fd);
    order[size] = '\0';
    char *rest = order;
    for (char *line; (line = strsep(&rest, "\n")) != NULL;) {
        const char *name = strsep(&line, " ");
        if (*name != '\0' && (line == NULL || has_device(line)))
            load_module(name);
    }
}

static void wait_for_drive(void) {
    for (int waited_ms = 0; access(RUNTIME_DRIVE, F_OK) != 0; waited_ms += DRIVE_POLL_MS) {
        if (waited_ms >= DRIVE_WAIT_MS)
            fail("wait for", RUNTIME_DRIVE);
        pause_ms(DRIVE_POLL_MS);
    }
}

static void enter_runtime(void) {
    if (chdir(NEW_ROOT) != 0)
        fail("enter", NEW_ROOT);
    if (mount(".", "/", NULL, MS_MOVE, NULL) != 0)
        fail("move to /", NEW_ROOT);
    if (chroot(".") != 0 || chdir("/") != 0)
        fail("change root", NEW_ROOT);
}

static pid_t start_guestd(void) {
    pid_t pid = fork();
    if (pid < 0)
        fail("fork", "");
    if (pid > 0)
        return pid;
    setsid();
    int null = open("/dev/null", O_RDONLY);
    if (null < 0 || dup2(null, STDIN_FILENO) < 0)
        say("guest-init: guestd: /dev/null: %s\n", strerror(errno));
    else
        execve(guestd_argv[0], guestd_argv, guestd_envp);
    say("guest-init: guestd: %s: %s\n", guestd_argv[0], strerror(errno));
    _exit(127);
}

static time_t now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec;
}

static void supervise(void) {
    int deaths = 0;
    time_t started_s = now_s();
    pid_t guestd = start_guestd();
    for (;;) {
        int status = 0;
        pid_t pid = waitpid(-1, &status, 0);
        if (pid < 0 && errno != EINTR)
            fail("wait", "");
        if (pid != guestd)
            continue;
        if (WIFSIGNALED(status))
            say("guest-init: guestd ended: signal %d\n", WTERMSIG(status));
        else
            say("guest-init: guestd ended: exit %d\n", WEXITSTATUS(status));
        if (now_s() - started_s >= GUESTD_LIVES_S)
            deaths = 0;
        if (++deaths > GUESTD_DEATHS_MAX) {
            say("guest-init: failed: guestd ended %d times\n", deaths);
            end();
        }
        pause_ms(GUESTD_PAUSE_MS);
        started_s = now_s();
        guestd = start_guestd();
    }
}

int main(void) {
    if (getpid() != 1) {
        say("guest-init: failed: this is PID 1 of a sandbox's kernel and nothing else\n");
        return 1;
    }
    open_console();
    say("guest-init: start\n");
    umask(022);
    mount_all(early_mounts, COUNT(early_mounts));
    load_modules();
    wait_for_drive();
    mount_all(runtime_mounts, 1);
    say("guest-init: runtime\n");
    mount_all(runtime_mounts + 1, COUNT(runtime_mounts) - 1);
    enter_runtime();
    supervise();
}
