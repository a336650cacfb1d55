/*
 * Linked into a guest-init of the tests' own: ends guestd with SIGKILL whenever a process named kill-guestd runs in
 * the machine, which no process of a sandbox could do by itself. It starts before main, so that guest-init is PID 1
 * and as it is shipped in everything else.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#define PROC "/killer-proc"

static size_t content(const char *pid, const char *file, char *into, size_t size) {
    char path[64];
    snprintf(path, sizeof path, PROC "/%.16s/%s", pid, file);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t length = fd < 0 ? 0 : read(fd, into, size - 1);
    if (fd >= 0)
        close(fd);
    into[length > 0 ? length : 0] = '\0';
    return length > 0 ? (size_t)length : 0;
}

static int names_guestd(const char *pid) {
    static const char argument[] = "/opt/sandbox/guestd";
    char text[128];
    size_t length = content(pid, "cmdline", text, sizeof text);
    return memmem(text, length, argument, sizeof argument) != NULL && strncmp(text, "/usr/bin/python3", 16) == 0;
}

static int names_the_word(const char *pid) {
    char text[32];
    content(pid, "comm", text, sizeof text);
    return strcmp(text, "kill-guestd\n") == 0;
}

/* The first process that has it, or 0. Kernel threads come first and have neither. */
static pid_t find(int (*has)(const char *pid)) {
    DIR *proc = opendir(PROC);
    pid_t found = 0;
    for (struct dirent *entry; proc != NULL && found == 0 && (entry = readdir(proc)) != NULL;)
        if (entry->d_name[0] >= '1' && entry->d_name[0] <= '9' && has(entry->d_name))
            found = (pid_t)atoi(entry->d_name);
    if (proc != NULL)
        closedir(proc);
    return found;
}

__attribute__((constructor)) static void begin(void) {
    if (getpid() != 1 || fork() != 0)
        return;
    mkdir(PROC, 0700);
    mount("proc", PROC, "proc", 0, NULL);
    /* Seldom: a machine is slow where it is emulated. */
    for (pid_t before = 0;; usleep(200000)) {
        pid_t word = find(names_the_word);
        pid_t guestd = word != 0 && word != before ? find(names_guestd) : 0;
        if (guestd > 1)
            kill(guestd, SIGKILL);
        before = word;
    }
}
