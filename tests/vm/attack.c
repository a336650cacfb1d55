/* A VMM that was taken over, to be started in the place of QEMU or of Firecracker. It answers its API or its monitor
 * well enough to count as started. Then it carries out what its writable drive asks for: from byte 0 a script, a line an
 * attempt, the first one a number; from REPORT on it says what came of each, "LINE: 0" where it worked, else the errno.
 * A script whose number differs from the last is carried out anew.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#define SCRIPT_BYTES 65536
#define REPORT 65536
#define CONNECTIONS 32

static int image = -1, scratch = -1, listener = -1, is_qemu;
static char said[1 << 18];
static size_t said_bytes;

static void say(const char *name, const char *result) {
    said_bytes += (size_t)snprintf(said + said_bytes, sizeof said - said_bytes, "%s: %s\n", name, result);
    if (said_bytes >= sizeof said)
        said_bytes = sizeof said - 1;
}

static void say_number(const char *name, long result) {
    char text[32];
    snprintf(text, sizeof text, "%ld", result < 0 ? (long)errno : 0L);
    say(name, text);
}

/* What a child does that may not live through it: 0, an errno, or the signal that ended it. */
static void in_child(const char *name, long (*act)(long), long argument) {
    pid_t pid = fork();
    if (pid == 0)
        _exit(act(argument) < 0 ? errno : 0);
    int status = 0;
    if (pid < 0) {
        say_number(name, -1);
        return;
    }
    waitpid(pid, &status, 0);
    char text[32];
    snprintf(text, sizeof text, WIFSIGNALED(status) ? "signal %d" : "%d",
             WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
    say(name, text);
}

static long as_x32(long number) { return syscall(0x40000000 | number); }

static long as_i386(long number) {
    long result;
    __asm__ volatile("int $0x80" : "=a"(result) : "a"(number) : "memory", "r8", "r9", "r10", "r11");
    errno = result < 0 ? (int)-result : 0;
    return result < 0 ? -1 : 0;
}

static long touch_memory(long megabytes) {
    char *memory = mmap(NULL, (size_t)megabytes << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return -1;
    for (size_t at = 0; at < (size_t)megabytes << 20; at += 4096)
        memory[at] = 1;
    return 0;
}

static long many_processes(long count) {
    for (long i = 0; i < count; i++) {
        pid_t pid = fork();
        if (pid < 0)
            return -1;
        if (pid == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            for (;;)
                pause();
        }
    }
    return 0;
}

/* Out of a root that is not one's own: a directory is kept open while the root moves below it. */
static long leave_root(long unused) {
    (void)unused;
    const char *below = mkdir("below", 0700) == 0 ? "below" : "dev";
    int above = open(".", O_RDONLY | O_DIRECTORY);
    if (chroot(below) != 0)
        return -1;
    if (fchdir(above) != 0)
        return -1;
    for (int i = 0; i < 64; i++)
        if (chdir("..") != 0)
            return -1;
    return chroot(".");
}

static long get_capabilities(long unused) {
    (void)unused;
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct all[2] = {{~0U, ~0U, ~0U}, {~0U, ~0U, ~0U}};
    return syscall(SYS_capset, &header, all);
}

static long make_tap(long unused) {
    (void)unused;
    struct ifreq request = {.ifr_name = "mine", .ifr_flags = IFF_TAP | IFF_NO_PI};
    int fd = open("/dev/net/tun", O_RDWR);
    return fd < 0 ? -1 : ioctl(fd, TUNSETIFF, &request);
}

static long raise_limit(long kind) {
    struct rlimit most = {RLIM_INFINITY, RLIM_INFINITY};
    return setrlimit((__rlimit_resource_t)kind, &most);
}

static long map_image(long unused) {
    (void)unused;
    return mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, image, 0) == MAP_FAILED ? -1 : 0;
}

static long reach(const char *path, int abstract) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int sock = socket(AF_UNIX, SOCK_STREAM, 0);
    if (sock < 0)
        return -1;
    strncpy(address.sun_path + abstract, path, sizeof address.sun_path - 2);
    long result = connect(sock, (struct sockaddr *)&address,
                          (socklen_t)(offsetof(struct sockaddr_un, sun_path) + (size_t)abstract + strlen(path)));
    int error = errno;
    close(sock);
    errno = error;
    return result;
}

static long try_open(const char *path, int flags) {
    int fd = open(path, flags | O_NONBLOCK | O_CLOEXEC);
    if (fd >= 0)
        close(fd);
    return fd;
}

static void walk(const char *path, int depth) {
    DIR *directory = opendir(path);
    struct dirent *entry;
    while (directory != NULL && (entry = readdir(directory)) != NULL) {
        char full[4096];
        struct stat seen;
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        snprintf(full, sizeof full, "%s/%s", strcmp(path, "/") == 0 ? "" : path, entry->d_name);
        if (lstat(full, &seen) == 0 && S_ISDIR(seen.st_mode) && depth < 8)
            walk(full, depth + 1);
        else
            say("sees", full);
        if (access(full, W_OK) == 0)
            say("writable", full);
    }
    if (directory != NULL)
        closedir(directory);
}

static void who(void) {
    char text[64];
    snprintf(text, sizeof text, "%d %d %d", getuid(), getgid(), getgroups(0, NULL));
    say("who", text);
    for (int fd = 0; fd < 1024; fd++)
        if (fcntl(fd, F_GETFD) >= 0) {
            snprintf(text, sizeof text, "%d", fd);
            say("descriptor", text);
        }
    extern char **environ;
    for (char **variable = environ; *variable != NULL; variable++)
        say("environment", *variable);
}

/* As much on the standard output as goes, for as long as it takes. */
static void flood(void) {
    static char lines[65536];
    memset(lines, 'x', sizeof lines);
    fcntl(STDOUT_FILENO, F_SETPIPE_SZ, 1 << 20);
    for (int i = 0; i < 4; i++)
        if (fork() == 0)
            for (;;)
                if (write(STDOUT_FILENO, lines, sizeof lines) < 0 && errno != EAGAIN)
                    _exit(0);
}

static long number_of(const char *word) {
    static char zeros[4096];
    if (word == NULL)
        return 0;
    if (word[0] == '"')
        return (long)(word + 1);
    if (strcmp(word, "buffer") == 0)
        return (long)zeros;
    if (strcmp(word, "image") == 0)
        return image;
    if (strcmp(word, "scratch") == 0)
        return scratch;
    return strtol(word, NULL, 0);
}

static void carry_out(const char *line) {
    char copy[4096], *rest = copy, *words[8] = {0};
    strncpy(copy, line, sizeof copy - 1);
    copy[sizeof copy - 1] = '\0';
    for (int i = 0; i < 8 && rest != NULL; i++)
        words[i] = strsep(&rest, " ");
    const char *verb = words[0], *what = words[1] == NULL ? "" : words[1];
    errno = 0;
    if (strcmp(verb, "call") == 0)
        say_number(line, syscall(number_of(words[2]), number_of(words[3]), number_of(words[4]), number_of(words[5]),
                                 number_of(words[6]), number_of(words[7]), 0));
    else if (strcmp(verb, "open") == 0)
        say_number(line, try_open(what, O_RDONLY));
    else if (strcmp(verb, "write") == 0)
        say_number(line, try_open(what, O_WRONLY));
    else if (strcmp(verb, "connect") == 0)
        say_number(line, reach(what, 0));
    else if (strcmp(verb, "abstract") == 0)
        say_number(line, reach(what, 1));
    else if (strcmp(verb, "x32") == 0)
        in_child(line, as_x32, atol(what));
    else if (strcmp(verb, "i386") == 0)
        in_child(line, as_i386, atol(what));
    else if (strcmp(verb, "memory") == 0)
        in_child(line, touch_memory, atol(what));
    else if (strcmp(verb, "processes") == 0)
        in_child(line, many_processes, atol(what));
    else if (strcmp(verb, "leave-root") == 0)
        in_child(line, leave_root, 0);
    else if (strcmp(verb, "get-capabilities") == 0)
        say_number(line, get_capabilities(0));
    else if (strcmp(verb, "make-tap") == 0)
        say_number(line, make_tap(0));
    else if (strcmp(verb, "map-image") == 0)
        say_number(line, map_image(0));
    else if (strcmp(verb, "raise-limit") == 0)
        say_number(line, raise_limit(atol(what)));
    else if (strcmp(verb, "walk") == 0)
        walk("/", 0);
    else if (strcmp(verb, "who") == 0)
        who();
    else if (strcmp(verb, "flood") == 0)
        flood();
    else
        say(line, "unknown");
}

static void look_for_script(void) {
    static char script[SCRIPT_BYTES + 1];
    static long last;
    if (pread(scratch, script, SCRIPT_BYTES, 0) != SCRIPT_BYTES)
        return;
    char *rest = script, *first = strsep(&rest, "\n");
    long number = strtol(first, NULL, 10);
    if (number == 0 || number == last || rest == NULL)
        return;
    last = number;
    said_bytes = 0;
    while (rest != NULL && *rest != '\0')
        carry_out(strsep(&rest, "\n"));
    say("end", first);
    said[said_bytes] = '\0';
    if (pwrite(scratch, said, said_bytes + 1, REPORT) < 0)
        exit(3);
}

static void answer(int fd) {
    static const char running[] = "HTTP/1.1 200 \r\nContent-Length: 42\r\n\r\n"
                                  "{\"state\":\"Running\",\"vmm_version\":\"1.16.1\"}";
    char text[65536];
    ssize_t got = recv(fd, text, sizeof text - 1, 0);
    if (got <= 0)
        return;
    text[got] = '\0';
    const char *id = strstr(text, "\"id\":");
    int size = is_qemu ? snprintf(text, sizeof text, "{\"return\":{},\"id\":%ld}\n", id ? atol(id + 5) : 0)
               : strncmp(text, "GET / ", 6) == 0 ? snprintf(text, sizeof text, "%s", running)
                       : snprintf(text, sizeof text, "HTTP/1.1 204 No Content\r\n\r\n");
    send(fd, text, (size_t)size, MSG_NOSIGNAL);
}

static void serve(void) {
    struct pollfd all[CONNECTIONS] = {{.fd = listener, .events = POLLIN}};
    nfds_t count = 1;
    for (;;) {
        poll(all, count, 10);
        for (nfds_t i = count - 1; i >= 1; i--)
            if (all[i].revents & POLLIN) {
                answer(all[i].fd);
                if (!is_qemu) {
                    close(all[i].fd);
                    all[i] = all[--count];
                }
            }
        if (all[0].revents & POLLIN && count < CONNECTIONS) {
            int fd = accept(listener, NULL, NULL);
            if (fd >= 0) {
                static const char greeting[] = "{\"QMP\":{}}\n";
                if (is_qemu)
                    send(fd, greeting, sizeof greeting - 1, MSG_NOSIGNAL);
                all[count++] = (struct pollfd){.fd = fd, .events = POLLIN};
            }
        }
        look_for_script();
    }
}

static void find_parts(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        int fd, set;
        if (sscanf(argv[i], "fd=%d,set=%d", &fd, &set) == 2)
            *(set == 0 ? &image : &scratch) = fd;
        if (sscanf(argv[i], "socket,id=monitor,fd=%d", &listener) == 1)
            is_qemu = 1;
    }
    if (is_qemu)
        return;
    struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = "api.sock"};
    image = open("drive0", O_RDONLY);
    scratch = open("drive1", O_RDWR);
    listener = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) != 0 || listen(listener, 8) != 0)
        exit(4);
}

int main(int argc, char **argv) {
    signal(SIGXFSZ, SIG_IGN);
    signal(SIGPIPE, SIG_IGN);
    find_parts(argc, argv);
    if (image < 0 || scratch < 0 || listener < 0)
        return 5;
    serve();
}
