/*
 * Preloaded into a daemon: its wall clock is as many seconds off as the file named by WALL_CLOCK says, and no other
 * clock is. (libfaketime would do it, but clock_nanosleep on an absolute monotonic time, which is how CPython sleeps,
 * fails under Debian 12's.)
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = (int)syscall(SYS_clock_gettime, clock, now);
    const char *path = getenv("WALL_CLOCK");
    if (result != 0 || clock != CLOCK_REALTIME || path == NULL)
        return result;
    char text[32] = "";
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        if (read(fd, text, sizeof text - 1) > 0)
            now->tv_sec += atol(text);
        close(fd);
    }
    return 0;
}
