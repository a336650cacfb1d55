/*
 * PID 1 of the initramfs that the packaging tests boot: modules, the read-only root with a tmpfs above it, systemd.
 *
 * In: /modules/order and the modules beside it; /dev/vda, an EROFS root file system. Out: systemd as PID 1.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static void fail(const char *what) {
    fprintf(stderr, "vm-init: %s: %s\n", what, strerror(errno));
    sync();
    reboot(RB_POWER_OFF);
    _exit(1);
}

static void must(int result, const char *what) {
    if (result < 0)
        fail(what);
}

static void load_modules(void) {
    FILE *order = fopen("/modules/order", "re");
    if (order == NULL)
        fail("opening the modules' order");
    char name[128], path[160];
    while (fgets(name, sizeof name, order) != NULL) {
        name[strcspn(name, "\n")] = '\0';
        // Behind a name: the device that alone needs the module. This machine has none of those.
        if (strchr(name, ' ') != NULL)
            continue;
        snprintf(path, sizeof path, "/modules/%s", name);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        must(fd, path);
        if (syscall(SYS_finit_module, fd, "", 0) < 0 && errno != EEXIST)
            fail(path);
        close(fd);
    }
    fclose(order);
}

int main(void) {
    mkdir("/dev", 0755);
    must(mount("devtmpfs", "/dev", "devtmpfs", 0, NULL), "mounting /dev");
    load_modules();
    mkdir("/lower", 0755);
    mkdir("/upper", 0755);
    mkdir("/root", 0755);
    int left = 1000;
    while (mount("/dev/vda", "/lower", "erofs", MS_RDONLY, NULL) < 0) {
        if (errno != ENOENT && errno != ENXIO)
            fail("mounting the root file system");
        if (--left == 0)
            fail("waiting for the drive");
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    }
    must(mount("tmpfs", "/upper", "tmpfs", 0, "mode=755,size=75%"), "mounting a tmpfs");
    must(mkdir("/upper/data", 0755), "making a directory");
    must(mkdir("/upper/work", 0755), "making a directory");
    must(mount("overlay", "/root", "overlay", 0, "lowerdir=/lower,upperdir=/upper/data,workdir=/upper/work"),
         "mounting the overlay");
    must(mount("/dev", "/root/dev", NULL, MS_MOVE, NULL), "moving /dev");
    must(chdir("/root"), "entering the root");
    must(mount(".", "/", NULL, MS_MOVE, NULL), "moving the root");
    must(chroot("."), "entering the root");
    char *const argv[] = {"/lib/systemd/systemd", NULL};
    char *const envp[] = {"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "TERM=linux", NULL};
    execve(argv[0], argv, envp);
    fail("starting systemd");
    return 1;
}
