/* A hostile program in a VMM's place: says, line by line, what it can do. "name: 0" means that it worked, any other
 * number is the errno. Arguments are paths to open and unix sockets to connect to.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/ptrace.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/un.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <unistd.h>

static void say(const char *name, long result) { printf("%s: %d\n", name, result < 0 ? errno : 0); }

static void walk(const char *path, int depth) {
    DIR *directory = opendir(path);
    if (directory == NULL)
        return;
    struct dirent *entry;
    while ((entry = readdir(directory)) != NULL) {
        char full[4096];
        struct stat seen;
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        snprintf(full, sizeof full, "%s/%s", strcmp(path, "/") == 0 ? "" : path, entry->d_name);
        printf("sees: %s\n", full);
        if (lstat(full, &seen) == 0 && S_ISDIR(seen.st_mode) && depth < 8)
            walk(full, depth + 1);
        if (access(full, W_OK) == 0)
            printf("writable: %s\n", full);
    }
    closedir(directory);
}

static void try_open(const char *path) {
    char name[4200];
    snprintf(name, sizeof name, "open %s", path);
    say(name, open(path, O_RDONLY | O_NONBLOCK));
    int sock = socket(AF_UNIX, SOCK_STREAM, 0);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    strncpy(address.sun_path, path, sizeof address.sun_path - 1);
    snprintf(name, sizeof name, "connect %s", path);
    say(name, connect(sock, (struct sockaddr *)&address, sizeof address));
    close(sock);
}

static void try_abstract(const char *path) {
    int sock = socket(AF_UNIX, SOCK_STREAM, 0);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    strncpy(address.sun_path + 1, path, sizeof address.sun_path - 2);
    say("connect abstract", connect(sock, (struct sockaddr *)&address,
                                    (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(path))));
    close(sock);
}

int main(int argc, char **argv) {
    struct utsname names;
    setvbuf(stdout, NULL, _IOLBF, 0);
    printf("uid: %d\ngid: %d\ngroups: %d\npid: %d\n", getuid(), getgid(), getgroups(0, NULL), getpid());
    uname(&names);
    printf("host: %s\n", names.nodename);
    for (int fd = 0; fd < 1024; fd++)
        if (fcntl(fd, F_GETFD) >= 0)
            printf("descriptor: %d\n", fd);
    extern char **environ;
    for (char **variable = environ; *variable != NULL; variable++)
        printf("environment: %s\n", *variable);
    walk("/", 0);

    for (int i = 1; i < argc; i++) {
        if (argv[i][0] == '@')
            try_abstract(argv[i] + 1);
        else if (argv[i][0] == '%')
            say("signal to the starter", kill(atoi(argv[i] + 1), 0));
        else
            try_open(argv[i]);
    }
    say("create /file", open("/file", O_CREAT | O_WRONLY, 0600));
    say("mkdir /directory", mkdir("/directory", 0700));
    say("mknod", mknod("/device", S_IFCHR | 0600, makedev(1, 3)));
    say("chroot", chroot("/"));
    say("mount", mount("none", "/lib", "tmpfs", 0, NULL));
    say("umount", umount2("/kernel", MNT_DETACH));
    say("remount", mount("none", "/", NULL, MS_REMOUNT | MS_BIND, NULL));
    say("unshare user", unshare(CLONE_NEWUSER));
    say("unshare mount", unshare(CLONE_NEWNS));
    say("unshare net", unshare(CLONE_NEWNET));
    say("clone user", syscall(SYS_clone, CLONE_NEWUSER | SIGCHLD, 0, 0, 0, 0));
    say("clone3", syscall(SYS_clone3, NULL, 0));
    say("setuid 0", setuid(0));
    say("setgid 0", setgid(0));
    say("setgroups", syscall(SYS_setgroups, 0, NULL));
    say("sethostname", sethostname("x", 1));
    say("ptrace", ptrace(PTRACE_ATTACH, 1, 0, 0));
    say("signal to all", kill(-1, 0));
    say("process_vm_readv", syscall(SYS_process_vm_readv, getppid(), NULL, 0, NULL, 0, 0));
    say("pidfd_open", syscall(SYS_pidfd_open, getpid(), 0));
    say("bpf", syscall(SYS_bpf, 0, NULL, 0));
    say("perf_event_open", syscall(SYS_perf_event_open, NULL, 0, -1, -1, 0));
    say("io_uring_setup", syscall(SYS_io_uring_setup, 8, NULL));
    say("userfaultfd", syscall(SYS_userfaultfd, 0));
    say("keyctl", syscall(SYS_keyctl, 0, -3, 0));
    say("open_by_handle_at", syscall(SYS_open_by_handle_at, -100, NULL, 0));
    say("socket unix", socket(AF_UNIX, SOCK_STREAM, 0));
    say("socket inet", socket(AF_INET, SOCK_STREAM, 0));
    say("socket inet6", socket(AF_INET6, SOCK_DGRAM, 0));
    say("socket netlink", socket(AF_NETLINK, SOCK_RAW, 0));
    say("socket packet", socket(AF_PACKET, SOCK_RAW, 0));
    say("socket vsock", socket(AF_VSOCK, SOCK_STREAM, 0));
    say("socket alg", socket(AF_ALG, SOCK_SEQPACKET, 0));
    say("shared memory of the host", shmget(0x5b0c, 0, 0));
    int memory = memfd_create("probe", 0);
    say("file within the limit", ftruncate(memory, 1 << 20));
    say("file over the limit", ftruncate(memory, (1 << 20) + 1));
    say("memory over the limit", mmap(NULL, 1UL << 40, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED ? -1 : 0);
    pid_t child = fork();
    if (child == 0)
        _exit(0);
    say("fork", child);
    waitpid(child, NULL, 0);
    puts("done");
    fflush(stdout);
    syscall(0x40000000 | SYS_getpid); /* an x32 call ends the process, so it comes last */
    puts("x32 call went through");
    return 0;
}
