/*
 * firecracker, the stand-in: the executable of that name in tests on a machine that cannot run the real one.
 *
 * It takes the real command line, and does by itself only what has to happen with the rights of its jail: it binds
 * sockets, opens files and the tap, and hands the descriptors to the companion outside (companion.py), which answers
 * the API and runs the guest under emulation. The two live and die together.
 *
 * The companion is descriptor 3, or listens at /companion.sock, or, outside of any jail, at companion.sock beside the
 * executable. Over that seqpacket socket the shim first says
 * "<option>\0<value>\0…", then answers each message, "<verb> <argument>", with "ok" and a descriptor, or with
 * "error <errno>":
 *
 *   listen PATH   a listening unix socket           open-ro PATH   open-rw PATH   create PATH   append PATH
 *   tap NAME      an open tap                       stdout         exit CODE
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define DEFAULT_VERSION "1.16.1"
#define COMPANION "/companion.sock"
#define INHERITED_FD 3
#define MESSAGE_BYTES 8192
#define EXIT_ARGUMENTS 153 /* FcExitCode::ArgParsing */
#define EXIT_INVALID_ID 134 /* the real one panics over it, and a panic aborts */

struct option {
    const char *name;
    int takes_value;
    const char *requires, *forbids;
    const char *value;
};

static struct option options[] = {
    {"api-sock", 1, NULL, NULL, NULL},
    {"id", 1, NULL, NULL, NULL},
    {"seccomp-filter", 1, NULL, "no-seccomp", NULL},
    {"no-seccomp", 0, NULL, "seccomp-filter", NULL},
    {"start-time-us", 1, NULL, NULL, NULL},
    {"start-time-cpu-us", 1, NULL, NULL, NULL},
    {"parent-cpu-time-us", 1, NULL, NULL, NULL},
    {"config-file", 1, NULL, NULL, NULL},
    {"metadata", 1, NULL, NULL, NULL},
    {"no-api", 0, "config-file", NULL, NULL},
    {"log-path", 1, NULL, NULL, NULL},
    {"level", 1, NULL, NULL, NULL},
    {"module", 1, NULL, NULL, NULL},
    {"show-level", 0, NULL, NULL, NULL},
    {"show-log-origin", 0, NULL, NULL, NULL},
    {"metrics-path", 1, NULL, NULL, NULL},
    {"boot-timer", 0, NULL, NULL, NULL},
    {"http-api-max-payload-size", 1, NULL, NULL, NULL},
    {"mmds-size-limit", 1, NULL, NULL, NULL},
    {"enable-pci", 0, NULL, NULL, NULL},
};

#define COUNT(rows) (sizeof(rows) / sizeof((rows)[0]))

static struct option *find(const char *name) {
    for (size_t i = 0; i < COUNT(options); i++)
        if (strcmp(options[i].name, name) == 0)
            return &options[i];
    return NULL;
}

static const char *value_of(const char *name) { return find(name)->value; }

static void log_line(const char *text) {
    struct timespec now;
    struct tm utc;
    char stamp[32];
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &utc);
    strftime(stamp, sizeof stamp, "%Y-%m-%dT%H:%M:%S", &utc);
    const char *id = value_of("id");
    printf("%s.%09ld [%s:main] %s\n", stamp, now.tv_nsec, id ? id : "anonymous-instance", text);
    fflush(stdout);
}

__attribute__((noreturn)) static void refuse(const char *variant, const char *format, const char *argument) {
    char text[512], line[640];
    snprintf(text, sizeof text, format, argument);
    snprintf(line, sizeof line, "Arguments parsing error: %s \n\nFor more information try --help.", text);
    log_line(line);
    fprintf(stderr, "Error: ParseArguments(%s(\"%s\"))\n", variant, argument);
    snprintf(line, sizeof line, "Firecracker exiting with error. exit_code=%d", EXIT_ARGUMENTS);
    log_line(line);
    exit(EXIT_ARGUMENTS);
}

/* The path of a file beside the executable; empty in a jail, which has no /proc. */
static const char *beside(const char *name) {
    static char path[PATH_MAX + NAME_MAX];
    ssize_t length = readlink("/proc/self/exe", path, PATH_MAX);
    if (length <= 0)
        return "";
    path[length] = '\0';
    strcpy(strrchr(path, '/') + 1, name);
    return path;
}

/* A file says it, so that a test can be of any version. */
static void print_version(void) {
    char version[64] = DEFAULT_VERSION;
    FILE *file = fopen(beside("version"), "re");
    if (file != NULL) {
        if (fscanf(file, "%63s", version) != 1)
            strcpy(version, DEFAULT_VERSION);
        fclose(file);
    }
    printf("Firecracker v%s\n\n", version);
    log_line("Firecracker exiting successfully. exit_code=0");
}

static void parse(int argc, char **argv) {
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], "--version") == 0) {
            print_version();
            exit(0);
        }
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i] + 2;
        if (strncmp(argv[i], "--", 2) != 0)
            refuse("UnexpectedArgument", "Found argument '%s' which wasn't expected, or isn't valid in this context.",
                   argv[i]);
        struct option *option = find(name);
        if (option == NULL)
            refuse("UnexpectedArgument", "Found argument '%s' which wasn't expected, or isn't valid in this context.",
                   name);
        if (option->value != NULL)
            refuse("DuplicateArgument", "The argument '%s' was provided more than once.", name);
        option->value = "";
        if (option->takes_value) {
            if (i + 1 == argc || strncmp(argv[i + 1], "--", 2) == 0)
                refuse("MissingValue", "The argument '%s' requires a value, but none was supplied.", name);
            option->value = argv[++i];
        }
    }
    for (size_t i = 0; i < COUNT(options); i++) {
        const struct option *option = &options[i];
        if (option->value == NULL)
            continue;
        if (option->requires != NULL && value_of(option->requires) == NULL)
            refuse("MissingArgument", "Argument '%s' required, but not found.", option->requires);
        if (option->forbids != NULL && value_of(option->forbids) != NULL)
            refuse("ForbiddenArgument", "Argument '%s' cannot be used together with its opposite.", option->forbids);
    }
}

static int is_id(const char *id) {
    size_t length = strspn(id, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-");
    return id[length] == '\0' && length >= 1 && length <= 64;
}

static int unix_address(struct sockaddr_un *address, const char *path) {
    *address = (struct sockaddr_un){.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof address->sun_path)
        return -ENAMETOOLONG;
    strcpy(address->sun_path, path);
    return 0;
}

static int find_companion(void) {
    int type = 0;
    socklen_t size = sizeof type;
    if (getsockopt(INHERITED_FD, SOL_SOCKET, SO_TYPE, &type, &size) == 0 && type == SOCK_SEQPACKET)
        return INHERITED_FD;
    const char *places[] = {COMPANION, beside("companion.sock")};
    for (size_t i = 0; i < COUNT(places); i++) {
        struct sockaddr_un address;
        int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
        if (fd >= 0 && unix_address(&address, places[i]) == 0 &&
            connect(fd, (struct sockaddr *)&address, sizeof address) == 0)
            return fd;
        close(fd);
    }
    return -1;
}

static int listen_at(const char *path) {
    struct sockaddr_un address;
    int result = unix_address(&address, path);
    if (result < 0)
        return result;
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -errno;
    if (bind(fd, (struct sockaddr *)&address, sizeof address) != 0 || listen(fd, 128) != 0) {
        result = -errno;
        close(fd);
        return result;
    }
    return fd;
}

static int open_file(const char *path, int flags) {
    int fd = open(path, flags | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, 0600);
    return fd < 0 ? -errno : fd;
}

static int open_tap(const char *name) {
    struct ifreq request = {.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR};
    if (strlen(name) >= sizeof request.ifr_name)
        return -ENAMETOOLONG;
    strcpy(request.ifr_name, name);
    int fd = open_file("/dev/net/tun", O_RDWR);
    if (fd >= 0 && ioctl(fd, TUNSETIFF, &request) != 0) {
        int result = -errno;
        close(fd);
        return result;
    }
    return fd;
}

static int act(const char *verb, const char *argument) {
    if (strcmp(verb, "listen") == 0)
        return listen_at(argument);
    if (strcmp(verb, "open-ro") == 0)
        return open_file(argument, O_RDONLY);
    if (strcmp(verb, "open-rw") == 0)
        return open_file(argument, O_RDWR);
    if (strcmp(verb, "create") == 0)
        return open_file(argument, O_RDWR | O_CREAT | O_TRUNC);
    if (strcmp(verb, "append") == 0)
        return open_file(argument, O_RDWR | O_CREAT | O_APPEND);
    if (strcmp(verb, "tap") == 0)
        return open_tap(argument);
    if (strcmp(verb, "stdout") == 0)
        return fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 0);
    if (strcmp(verb, "exit") == 0) {
        log_line(strcmp(argument, "0") == 0 ? "Firecracker exiting successfully. exit_code=0"
                                            : "Firecracker exiting with error.");
        exit(atoi(argument));
    }
    return -ENOSYS;
}

static void answer(int companion, int result) {
    char text[32] = "ok";
    union {
        struct cmsghdr header;
        char room[CMSG_SPACE(sizeof(int))];
    } control = {0};
    struct iovec part = {.iov_base = text};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (result < 0) {
        snprintf(text, sizeof text, "error %d", -result);
    } else {
        message.msg_control = &control;
        message.msg_controllen = sizeof control.room;
        control.header.cmsg_level = SOL_SOCKET;
        control.header.cmsg_type = SCM_RIGHTS;
        control.header.cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(&control.header), &result, sizeof result);
    }
    part.iov_len = strlen(text);
    if (sendmsg(companion, &message, MSG_NOSIGNAL) < 0)
        exit(1);
    if (result >= 0)
        close(result);
}

int main(int argc, char **argv) {
    char message[MESSAGE_BYTES];
    size_t size = sizeof "program\0firecracker";
    memcpy(message, "program\0firecracker", size);
    parse(argc, argv);
    if (value_of("id") != NULL && !is_id(value_of("id"))) {
        fprintf(stderr, "Invalid instance ID\n");
        return EXIT_INVALID_ID;
    }
    /* The real one's seccomp filters bring this along. */
    if (value_of("no-seccomp") == NULL)
        prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    log_line("Running Firecracker");
    int companion = find_companion();
    if (companion < 0) {
        fprintf(stderr, "stand-in: no companion as descriptor %d nor at " COMPANION "\n", INHERITED_FD);
        return 1;
    }
    for (size_t i = 0; i < COUNT(options); i++) {
        if (options[i].value == NULL)
            continue;
        int length = snprintf(message + size, sizeof message - size, "%s%c%s", options[i].name, '\0', options[i].value);
        if (length < 0 || (size_t)length + 1 >= sizeof message - size)
            return 1;
        size += (size_t)length + 1;
    }
    if (send(companion, message, size, MSG_NOSIGNAL) < 0)
        return 1;
    for (;;) {
        ssize_t got = recv(companion, message, sizeof message - 1, 0);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return 1;
        message[got] = '\0';
        char *argument = message;
        const char *verb = strsep(&argument, " ");
        answer(companion, act(verb, argument == NULL ? "" : argument));
    }
}
