/*
 * hostpath: one look-up of a name, then only descriptors.
 *
 * A directory is known by device and inode, so symbolic links, trailing slashes, bind mounts and file systems that
 * ignore case change nothing. The walk towards the root also compares the mount, for a directory bound onto a child
 * of its own has a ".." with the same device and inode, and is not the root.
 *
 * Home can have a second path that ".." never shows: with /data/homes bound on /home, home's parents are /home and
 * /, and yet /data holds home. Every path to it goes through some mount of home's file system, so each such mount
 * in mountinfo whose root is above home is walked too: down towards home, then up to the root.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/openat2.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "native.h"

#define DIRECTORY (O_PATH | O_DIRECTORY | O_CLOEXEC)
#define DEPTH_MAX 4096 /* directories between a mount's root and /: PATH_MAX bytes hold half as many names */

static void close_fd(const int *fd)
{
    if (*fd >= 0)
        close(*fd);
}

static void close_stream(FILE **stream)
{
    if (*stream)
        fclose(*stream);
}

static void free_line(char **line)
{
    free(*line);
}

#define OWNED_FD __attribute__((cleanup(close_fd))) int
#define OWNED_STREAM __attribute__((cleanup(close_stream))) FILE *
#define OWNED_LINE __attribute__((cleanup(free_line))) char *

struct place {
    struct hostpath_id id;
    uint64_t mount;
};

static bool same_directory(const struct place *a, const struct place *b)
{
    return a->id.device == b->id.device && a->id.inode == b->id.inode;
}

static int open_directory(int at, const char *path, int more_flags)
{
    int fd = openat(at, path, DIRECTORY | more_flags);
    return fd >= 0 ? fd : -errno;
}

static int mount_of(int fd, uint64_t *mount)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/thread-self/fdinfo/%d", fd);
    OWNED_FD info = open(path, O_RDONLY | O_CLOEXEC);
    if (info < 0)
        return -errno;
    char text[512]; /* pos, flags, mnt_id, ino: under 100 bytes for a directory */
    ssize_t length = read(info, text, sizeof text - 1);
    if (length < 0)
        return -errno;
    text[length] = '\0';
    const char *field = strstr(text, "mnt_id:");
    if (!field)
        return -ENOTSUP;
    *mount = strtoull(field + strlen("mnt_id:"), NULL, 10);
    return 0;
}

static int identify(int fd, struct place *place)
{
    struct stat status;
    if (fstat(fd, &status) < 0)
        return -errno;
    place->id.device = status.st_dev;
    place->id.inode = status.st_ino;
    return mount_of(fd, &place->mount);
}

/* 1 when `wanted` is above `start`, 0 when the root was reached without meeting it. */
static int is_above(const struct place *wanted, int start)
{
    struct place here, parent;
    int rc = identify(start, &here);
    if (rc < 0)
        return rc;
    OWNED_FD owned = -1;
    int at = start;
    for (int depth = 0; depth < DEPTH_MAX; depth++) {
        int up = open_directory(at, "..", 0);
        if (up < 0)
            return up;
        close_fd(&owned);
        at = owned = up;
        rc = identify(at, &parent);
        if (rc < 0)
            return rc;
        if (same_directory(&parent, &here) && parent.mount == here.mount)
            return 0;
        if (same_directory(&parent, wanted))
            return 1;
        here = parent;
    }
    return -ELOOP;
}

/* One line of mountinfo (proc_pid_mountinfo(5)); the strings point into `line`. */
struct mount {
    uint64_t id;
    const char *device;
    const char *root;
    const char *point;
};

/* Blank, tab, newline, '#' and backslash are written as three octal digits. */
static void unescape(char *text)
{
    char *out = text;
    for (const char *in = text; *in; in++) {
        if (in[0] == '\\' && in[1] >= '0' && in[1] <= '3' && in[2] >= '0' && in[2] <= '7' && in[3] >= '0' &&
            in[3] <= '7') {
            *out++ = (char)((in[1] - '0') << 6 | (in[2] - '0') << 3 | (in[3] - '0'));
            in += 3;
        } else {
            *out++ = *in;
        }
    }
    *out = '\0';
}

/* 1 with a mount, 0 at the end. */
static int next_mount(FILE *table, char **line, size_t *size, struct mount *mount)
{
    errno = 0;
    if (getline(line, size, table) < 0)
        return errno ? -errno : 0;
    char *rest = NULL;
    const char *id = strtok_r(*line, " ", &rest);
    const char *parent = strtok_r(NULL, " ", &rest);
    const char *device = strtok_r(NULL, " ", &rest);
    char *root = strtok_r(NULL, " ", &rest);
    char *point = strtok_r(NULL, " ", &rest);
    if (!id || !parent || !device || !root || !point)
        return -EPROTO;
    unescape(root);
    unescape(point);
    *mount = (struct mount){.id = strtoull(id, NULL, 10), .device = device, .root = root, .point = point};
    return 1;
}

/* What of `path` is below `prefix`: "" when they are the same, NULL when `prefix` does not lead to it. */
static const char *below(const char *path, const char *prefix)
{
    size_t length = strlen(prefix);
    if (strcmp(prefix, "/") == 0)
        length = 0;
    if (strncmp(path, prefix, length) != 0)
        return NULL;
    if (path[length] == '\0')
        return path + length;
    return path[length] == '/' ? path + length + 1 : NULL;
}

struct location {
    char device[32];           /* major:minor as mountinfo has it; btrfs gives a stat another number */
    char inside[2 * PATH_MAX]; /* path from the root of the file system */
};

static int locate(int home_fd, const struct place *home, FILE *table, struct location *location)
{
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/thread-self/fd/%d", home_fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return -errno;
    path[length] = '\0';

    OWNED_LINE line = NULL;
    size_t size = 0;
    struct mount mount;
    int rc;
    while ((rc = next_mount(table, &line, &size, &mount)) > 0) {
        if (mount.id != home->mount)
            continue;
        const char *rest = below(path, mount.point);
        if (!rest)
            return -ENOTSUP;
        const char *root = strcmp(mount.root, "/") == 0 ? "" : mount.root;
        int written = snprintf(location->inside, sizeof location->inside, "%s/%s", root, rest);
        if (written < 0 || (size_t)written >= sizeof location->inside)
            return -ENAMETOOLONG;
        if (written > 1 && location->inside[written - 1] == '/')
            location->inside[written - 1] = '\0';
        written = snprintf(location->device, sizeof location->device, "%s", mount.device);
        return written < 0 || (size_t)written >= sizeof location->device ? -EPROTO : 0;
    }
    /* After a chroot into a plain directory the mount under / is not listed, and nothing can be said of others. */
    return rc < 0 ? rc : -ENOTSUP;
}

/*
 * 1 when `wanted` is on the way from `top`, the root of a mount, down `rest`. Stops where something else is mounted
 * over the way, for home cannot be reached there; what was passed still holds it underneath.
 */
static int is_on_the_way_down(const struct place *wanted, int top, uint64_t mount, const char *rest)
{
    OWNED_FD owned = -1;
    int at = top;
    for (;;) {
        struct place here;
        int rc = identify(at, &here);
        if (rc < 0)
            return rc;
        if (here.mount != mount)
            return 0;
        if (same_directory(&here, wanted))
            return 1;
        size_t length = strcspn(rest, "/");
        if (length == 0)
            return 0;
        char name[NAME_MAX + 1];
        if (length > NAME_MAX)
            return -ENAMETOOLONG;
        memcpy(name, rest, length);
        name[length] = '\0';
        rest += length + (rest[length] == '/');
        int down = open_directory(at, name, O_NOFOLLOW);
        if (down < 0)
            return down;
        close_fd(&owned);
        at = owned = down;
    }
}

static int is_around(const struct place *wanted, const struct mount *mount, const char *rest)
{
    OWNED_FD top = open_directory(AT_FDCWD, mount->point, 0);
    if (top < 0)
        return top;
    struct place here;
    int rc = identify(top, &here);
    if (rc < 0)
        return rc;
    if (here.mount != mount->id) /* hidden under a later mount */
        return 0;
    rc = is_above(wanted, top);
    return rc != 0 ? rc : is_on_the_way_down(wanted, top, mount->id, rest);
}

/* 1 when `wanted` leads to home by way of any mount of home's file system. */
static int is_above_elsewhere(const struct place *wanted, int home_fd, const struct place *home)
{
    OWNED_STREAM table = fopen("/proc/thread-self/mountinfo", "re");
    if (!table)
        return -errno;
    struct location location;
    int rc = locate(home_fd, home, table, &location);
    if (rc < 0)
        return rc;
    if (fseek(table, 0, SEEK_SET) < 0)
        return -errno;

    OWNED_LINE line = NULL;
    size_t size = 0;
    struct mount mount;
    while ((rc = next_mount(table, &line, &size, &mount)) > 0) {
        if (mount.id == home->mount || strcmp(mount.device, location.device) != 0)
            continue;
        const char *rest = below(location.inside, mount.root);
        if (!rest)
            continue;
        int found = is_around(wanted, &mount, rest);
        /* What this process may not reach, or what went away meanwhile, leads nobody to home. */
        if (found == -EACCES || found == -ENOENT || found == -ENOTDIR)
            continue;
        if (found != 0)
            return found;
    }
    return rc;
}

/* 1 when both are in one file system and the way to `directory` in it goes through `place`. */
static int is_below_elsewhere(int directory_fd, const struct place *directory, int place_fd, const struct place *place)
{
    struct location inner, outer;
    OWNED_STREAM table = fopen("/proc/thread-self/mountinfo", "re");
    if (!table)
        return -errno;
    int rc = locate(directory_fd, directory, table, &inner);
    if (rc < 0)
        return rc;
    if (fseek(table, 0, SEEK_SET) < 0)
        return -errno;
    rc = locate(place_fd, place, table, &outer);
    if (rc < 0)
        return rc;
    return strcmp(inner.device, outer.device) == 0 && below(inner.inside, outer.inside) != NULL;
}

int hostpath_open(const char *path, struct hostpath_id *id, int *step)
{
    *step = HOSTPATH_OPEN;
    const struct open_how how = {.flags = DIRECTORY, .resolve = RESOLVE_NO_MAGICLINKS};
    OWNED_FD fd = (int)syscall(SYS_openat2, AT_FDCWD, path, &how, sizeof how);
    if (fd < 0 && (errno == ENOSYS || errno == EPERM)) { /* EPERM: an old filter's answer to a call it does not know */
        fd = open_directory(AT_FDCWD, path, 0);
        if (fd < 0)
            return fd;
    } else if (fd < 0) {
        int error = errno;
        if (error == ELOOP) { /* only to say which of the two it was; what this opens is not used */
            OWNED_FD followed = open_directory(AT_FDCWD, path, 0);
            if (followed != -ELOOP)
                *step = HOSTPATH_PROC_LINK;
        }
        return -error;
    }

    *step = HOSTPATH_IDENTIFY;
    struct stat status;
    if (fstat(fd, &status) < 0)
        return -errno;
    id->device = status.st_dev;
    id->inode = status.st_ino;
    int given = fd;
    fd = -1;
    return given;
}

int hostpath_check(int directory_fd, const char *home, int *step)
{
    struct place directory, root, home_place;

    *step = HOSTPATH_IDENTIFY;
    int rc = identify(directory_fd, &directory);
    if (rc < 0)
        return rc;

    *step = HOSTPATH_OPEN_ROOT;
    OWNED_FD root_fd = open_directory(AT_FDCWD, "/", 0);
    if (root_fd < 0)
        return root_fd;
    rc = identify(root_fd, &root);
    if (rc < 0)
        return rc;
    if (same_directory(&directory, &root))
        return HOSTPATH_IS_ROOT;

    *step = HOSTPATH_OPEN_HOME;
    OWNED_FD home_fd = open_directory(AT_FDCWD, home, 0);
    if (home_fd < 0)
        return home_fd;
    rc = identify(home_fd, &home_place);
    if (rc < 0)
        return rc;
    if (same_directory(&directory, &home_place))
        return HOSTPATH_IS_HOME;

    *step = HOSTPATH_PARENTS;
    rc = is_above(&directory, home_fd);
    if (rc < 0)
        return rc;
    if (rc > 0)
        return HOSTPATH_IS_ABOVE_HOME;

    *step = HOSTPATH_MOUNTS;
    rc = is_above_elsewhere(&directory, home_fd, &home_place);
    if (rc < 0)
        return rc;
    return rc > 0 ? HOSTPATH_IS_ABOVE_HOME : HOSTPATH_ALLOWED;
}

int hostpath_is_inside(int directory_fd, const char *path, int *step)
{
    struct place directory, place;

    *step = HOSTPATH_IDENTIFY;
    int rc = identify(directory_fd, &directory);
    if (rc < 0)
        return rc;

    *step = HOSTPATH_OPEN_HOME;
    OWNED_FD place_fd = open_directory(AT_FDCWD, path, 0);
    if (place_fd < 0)
        return place_fd;
    rc = identify(place_fd, &place);
    if (rc < 0)
        return rc;
    if (same_directory(&directory, &place))
        return 1;

    *step = HOSTPATH_PARENTS;
    rc = is_above(&place, directory_fd);
    if (rc != 0)
        return rc;

    *step = HOSTPATH_MOUNTS;
    return is_below_elsewhere(directory_fd, &directory, place_fd, &place);
}
