/* Unit tests of hostpath.c, in a directory of their own under TMPDIR; mounts are made in a private namespace. */

#include "hostpath.c"

#include <dirent.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stddef.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "check.h"

static char base[PATH_MAX], home[PATH_MAX + 64];

static const char *in(const char *name)
{
    static char paths[8][PATH_MAX + 64];
    static unsigned turn;
    char *path = paths[turn++ % 8];
    snprintf(path, sizeof paths[0], "%s/%s", base, name);
    return path;
}

static void make(const char *name)
{
    CHECK(mkdir(in(name), 0755) == 0, "%s: %s", name, strerror(errno));
}

static int open_fds(void)
{
    DIR *directory = opendir("/proc/self/fd");
    int count = 0;
    while (directory && readdir(directory))
        count++;
    if (directory)
        closedir(directory);
    return count;
}

/* Verdict or -errno for two names; step is where it ended. */
static int judge(const char *path, const char *of, int *step)
{
    struct hostpath_id id;
    OWNED_FD fd = hostpath_open(path, &id, step);
    return fd < 0 ? fd : hostpath_check(fd, of, step);
}

static void expect(int wanted, const char *path, const char *of, const char *why)
{
    int step = 0;
    int got = judge(path, of, &step);
    CHECK(got == wanted, "%s: %s against %s gives %d at step %d, not %d", why, path, of, got, step, wanted);
}

static void test_below(void)
{
    static const struct {
        const char *path, *prefix, *rest;
    } table[] = {
        {"/", "/", ""},       {"/a", "/", "a"},     {"/a/b", "/", "a/b"},  {"/a", "/a", ""},
        {"/a/b", "/a", "b"},  {"/ab", "/a", NULL},  {"/a", "/a/b", NULL},  {"/", "/a", NULL},
        {"/A", "/a", NULL},   {"/a/b/c", "/a/b", "c"},
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        const char *rest = below(table[i].path, table[i].prefix);
        bool same = rest && table[i].rest ? strcmp(rest, table[i].rest) == 0 : rest == table[i].rest;
        CHECK(same, "%s below %s: %s", table[i].path, table[i].prefix, rest ? rest : "(no)");
    }
}

static void test_unescape(void)
{
    static const struct {
        const char *in, *out;
    } table[] = {
        {"", ""},           {"/a", "/a"},       {"/a\\040b", "/a b"},  {"\\134040", "\\040"}, {"\\012", "\n"},
        {"\\", "\\"},       {"\\0", "\\0"},     {"\\04", "\\04"},      {"\\048", "\\048"},    {"\\777", "\\777"},
        {"\\303\\274", "\303\274"},
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        char text[32];
        snprintf(text, sizeof text, "%s", table[i].in);
        unescape(text);
        CHECK(strcmp(text, table[i].out) == 0, "%s became %s", table[i].in, text);
    }
}

static void test_mountinfo_lines(void)
{
    static const struct {
        const char *text;
        int result;
        uint64_t id;
        const char *device, *root, *point;
    } table[] = {
        {"36 35 98:0 /m1 /m2 rw,noatime master:1 - ext3 /dev/root rw\n", 1, 36, "98:0", "/m1", "/m2"},
        {"36 35 98:0 / /a\\040b rw - ext3 x rw", 1, 36, "98:0", "/", "/a b"},
        {"36 35 98:0 / /a", 1, 36, "98:0", "/", "/a"},
        {"36 35 98:0 /", -EPROTO, 0, NULL, NULL, NULL},
        {"\n", -EPROTO, 0, NULL, NULL, NULL},
        {"      \n", -EPROTO, 0, NULL, NULL, NULL},
        {"x y z u v w\n", 1, 0, "z", "u", "v"},
        {"99999999999999999999999 1 8:1 / / rw\n", 1, UINT64_MAX, "8:1", "/", "/"},
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        OWNED_STREAM stream = fmemopen((void *)table[i].text, strlen(table[i].text), "r");
        OWNED_LINE line = NULL;
        size_t size = 0;
        struct mount mount = {0};
        int rc = next_mount(stream, &line, &size, &mount);
        CHECK(rc == table[i].result, "line %zu gives %d", i, rc);
        if (rc == 1 && table[i].result == 1)
            CHECK(mount.id == table[i].id && !strcmp(mount.device, table[i].device) &&
                      !strcmp(mount.root, table[i].root) && !strcmp(mount.point, table[i].point),
                  "line %zu gives %s %s %s", i, mount.device, mount.root, mount.point);
        if (rc == 1)
            CHECK(next_mount(stream, &line, &size, &mount) == 0, "line %zu has no end", i);
    }
}

static void make_tree(void)
{
    make("top");
    make("top/homes");
    make("top/homes/u");
    make("top/homes/u/work");
    make("top/homes/v");
    make("else");
    make("else/project");
    FILE *file = fopen(in("file"), "w");
    CHECK(file && fclose(file) == 0, "%s", strerror(errno));
    CHECK(symlink("top/homes/u", in("to-home")) == 0 && symlink("loop", in("loop")) == 0 &&
              symlink("/proc/self/root", in("to-root")) == 0 && symlink("nowhere", in("broken")) == 0 &&
              symlink(in("top/homes"), in("else/up")) == 0,
          "%s", strerror(errno));
}

static void test_verdicts(void)
{
    expect(HOSTPATH_IS_ROOT, "/", home, "root");
    expect(HOSTPATH_IS_ROOT, "//", home, "root");
    expect(HOSTPATH_IS_ROOT, "/..", home, "root");
    expect(HOSTPATH_IS_HOME, home, home, "home");
    expect(HOSTPATH_IS_HOME, in("top/homes/u///"), home, "trailing slashes");
    expect(HOSTPATH_IS_HOME, in("top/homes/v/../u/."), home, "dots");
    expect(HOSTPATH_IS_HOME, in("to-home"), home, "link to home");
    expect(HOSTPATH_IS_HOME, in("top/homes/u"), in("to-home"), "home is a link");
    expect(HOSTPATH_IS_ABOVE_HOME, in("top/homes"), home, "parent");
    expect(HOSTPATH_IS_ABOVE_HOME, in("top"), home, "grandparent");
    expect(HOSTPATH_IS_ABOVE_HOME, base, home, "base");
    expect(HOSTPATH_IS_ABOVE_HOME, in("else/up"), home, "link to the parent");
    expect(HOSTPATH_IS_ABOVE_HOME, in("top/homes"), in("to-home"), "home's parent is the real one");
    expect(HOSTPATH_ALLOWED, in("else"), in("to-home"), "not the parent of home's link");
    expect(HOSTPATH_ALLOWED, in("top/homes/u/work"), home, "below home");
    expect(HOSTPATH_ALLOWED, in("top/homes/v"), home, "beside home");
    expect(HOSTPATH_ALLOWED, in("else/project"), home, "elsewhere");
    expect(HOSTPATH_ALLOWED, in("else/project"), "/", "home is the root");
    expect(HOSTPATH_IS_ROOT, "/", "/", "home is the root");
    expect(-ENOENT, in("top/HOMES"), home, "another case is another name");
    expect(-ENOENT, in("else"), in("nowhere"), "no such home");
    expect(-ENOTDIR, in("else"), in("file"), "home is a file");
}

static void test_open_errors(bool openat2_works)
{
    char long_name[PATH_MAX + 10];
    memset(long_name, 'x', sizeof long_name);
    long_name[sizeof long_name - 1] = '\0';
    const struct {
        const char *path;
        int result, step;
    } table[] = {
        {in("nowhere"), -ENOENT, HOSTPATH_OPEN},   {in("broken"), -ENOENT, HOSTPATH_OPEN},
        {"", -ENOENT, HOSTPATH_OPEN},              {in("file"), -ENOTDIR, HOSTPATH_OPEN},
        {in("file/x"), -ENOTDIR, HOSTPATH_OPEN},   {in("loop"), -ELOOP, HOSTPATH_OPEN},
        {long_name, -ENAMETOOLONG, HOSTPATH_OPEN},
    };
    struct hostpath_id id;
    int step;
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        step = 0;
        int rc = hostpath_open(table[i].path, &id, &step);
        CHECK(rc == table[i].result && step == table[i].step, "%.80s gives %d at %d", table[i].path, rc, step);
    }
    static const char *const links[] = {"/proc/self/root", "/proc/self/root/", "/proc/self/cwd/..", "/proc/thread-self/root"};
    for (size_t i = 0; i < sizeof links / sizeof *links; i++) {
        step = 0;
        OWNED_FD fd = hostpath_open(links[i], &id, &step);
        if (openat2_works)
            CHECK(fd == -ELOOP && step == HOSTPATH_PROC_LINK, "%s gives %d at %d", links[i], fd, step);
        else
            CHECK(fd >= 0, "%s gives %d at %d", links[i], fd, step);
    }
    if (!openat2_works) {
        expect(HOSTPATH_IS_ROOT, "/proc/self/root", home, "followed and compared");
        expect(HOSTPATH_IS_ROOT, in("to-root"), home, "followed and compared");
        char through[PATH_MAX + 128];
        snprintf(through, sizeof through, "/proc/self/root%s", in("top/homes"));
        expect(HOSTPATH_IS_ABOVE_HOME, through, home, "followed and compared");
    }
    OWNED_FD fd = hostpath_open(in("else"), &id, &step);
    struct stat status;
    CHECK(fd >= 0 && stat(in("else"), &status) == 0 && id.device == status.st_dev && id.inode == status.st_ino, "id");
    CHECK(fcntl(fd, F_GETFD) == FD_CLOEXEC && fcntl(fd, F_GETFL) & O_PATH, "flags");
    CHECK(hostpath_check(-1, "/", &step) == -EBADF && step == HOSTPATH_IDENTIFY, "no descriptor");
}

/* Runs `body` in a child, so that what it does to itself stays there; its failed checks are counted here. */
static void in_a_child(void (*body)(int), int argument)
{
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        checks_failed = 0;
        body(argument);
        fflush(NULL);
        _exit(checks_failed ? 1 : 0);
    }
    int status = -1;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0, "child gives %#x", (unsigned)status);
}

static void without_openat2(int error)
{
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_openat2, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (unsigned)error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {.len = sizeof filter / sizeof *filter, .filter = filter};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0,
          "%s", strerror(errno));
    test_open_errors(false);
    test_verdicts();
}

static bool write_text(const char *path, const char *text)
{
    OWNED_FD fd = open(path, O_WRONLY | O_CLOEXEC);
    return fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text);
}

/* A mount namespace of this process's own; as an ordinary user inside a user namespace. */
static bool own_mounts(void)
{
    char uids[64], gids[64];
    snprintf(uids, sizeof uids, "0 %u 1", getuid());
    snprintf(gids, sizeof gids, "0 %u 1", getgid());
    if (getuid() != 0) {
        if (unshare(CLONE_NEWUSER | CLONE_NEWNS) < 0 || !write_text("/proc/self/uid_map", uids) ||
            !write_text("/proc/self/setgroups", "deny") || !write_text("/proc/self/gid_map", gids))
            return false;
    } else if (unshare(CLONE_NEWNS) < 0) {
        return false;
    }
    return mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0;
}

static void bind(const char *what, const char *where)
{
    CHECK(mount(in(what), in(where), NULL, MS_BIND, NULL) == 0, "%s on %s: %s", what, where, strerror(errno));
}

static void with_mounts(int unused)
{
    (void)unused;
    if (!own_mounts()) {
        printf("skipped: no mount namespace here: %s\n", strerror(errno));
        return;
    }
    make("bound");
    bind("top/homes/u", "bound");
    expect(HOSTPATH_IS_HOME, in("bound"), home, "home bound elsewhere");
    expect(HOSTPATH_IS_HOME, home, in("bound"), "home by its other name");
    expect(HOSTPATH_IS_ABOVE_HOME, in("top/homes"), in("bound"), "above the other name of home");
    expect(HOSTPATH_ALLOWED, in("bound/work"), home, "below home, bound");
    CHECK(umount(in("bound")) == 0, "%s", strerror(errno));
    bind("top", "bound");
    expect(HOSTPATH_IS_ABOVE_HOME, in("bound"), home, "an ancestor bound elsewhere");
    expect(HOSTPATH_IS_ABOVE_HOME, in("bound/homes"), home, "below an ancestor bound elsewhere");
    CHECK(umount(in("bound")) == 0, "%s", strerror(errno));

    make("around");
    make("around/a b\n\\x");
    bind("top/homes", "around/a b\n\\x");
    expect(HOSTPATH_IS_ABOVE_HOME, in("around"), home, "holds a bound ancestor under a name mountinfo escapes");
    CHECK(umount(in("around/a b\n\\x")) == 0, "%s", strerror(errno));
    expect(HOSTPATH_ALLOWED, in("around"), home, "nothing bound in it any more");

    make("place");
    bind("top/homes", "place");
    make("place/w");
    expect(HOSTPATH_IS_ABOVE_HOME, in("top"), in("place/u"), "holds what home's parent was bound from");
    CHECK(mount("none", in("place"), "tmpfs", 0, NULL) == 0, "%s", strerror(errno));
    expect(HOSTPATH_ALLOWED, in("place"), home, "hides the bound ancestor");
    make("around/b");
    bind("top/homes", "around/b");
    CHECK(mount("none", in("around/b"), "tmpfs", 0, NULL) == 0, "%s", strerror(errno));
    expect(HOSTPATH_ALLOWED, in("around"), home, "the bound ancestor in it is hidden");
    CHECK(umount(in("around/b")) == 0, "%s", strerror(errno));
    expect(HOSTPATH_IS_ABOVE_HOME, in("around"), home, "the bound ancestor in it is seen again");
    CHECK(umount(in("around/b")) == 0, "%s", strerror(errno));
    CHECK(umount(in("place")) == 0 && umount(in("place")) == 0, "%s", strerror(errno));

    make("covered");
    make("covered/homes");
    make("covered/homes/u");
    make("second");
    bind("covered/homes/u", "second");
    CHECK(mount("none", in("covered/homes"), "tmpfs", 0, NULL) == 0, "%s", strerror(errno));
    expect(HOSTPATH_IS_ABOVE_HOME, in("covered"), in("second"), "home underneath what was mounted over the way");
    expect(HOSTPATH_ALLOWED, in("covered/homes"), in("second"), "the mount itself does not lead to home");
    CHECK(umount(in("second")) == 0 && umount(in("covered/homes")) == 0, "%s", strerror(errno));

    make("self");
    make("self/self");
    bind("self", "self/self");
    make("self/self/u");
    expect(HOSTPATH_IS_ABOVE_HOME, base, in("self/self/u"), "the walk does not end where .. is the same directory");
    struct place wanted;
    OWNED_FD base_fd = open_directory(AT_FDCWD, base, 0), low = open_directory(AT_FDCWD, in("self/self/u"), 0);
    CHECK(identify(base_fd, &wanted) == 0 && is_above(&wanted, low) == 1, "nor does it by itself");
    close_fd(&low);
    low = -1;
    CHECK(umount(in("self/self")) == 0, "%s", strerror(errno));

    CHECK(mount("none", in("else"), "tmpfs", 0, NULL) == 0, "%s", strerror(errno));
    make("else/u");
    expect(HOSTPATH_IS_ABOVE_HOME, in("else"), in("else/u"), "the root of home's own mount");
    expect(HOSTPATH_IS_ABOVE_HOME, base, in("else/u"), "on the other side of home's mount");
    expect(HOSTPATH_ALLOWED, in("top"), in("else/u"), "beside home's mount");
    CHECK(umount(in("else")) == 0, "%s", strerror(errno));

    if (getuid() == 0) {
        CHECK(chroot(in("top")) == 0 && chdir("/") == 0, "%s", strerror(errno));
        int step;
        CHECK(judge("/homes", "/homes/u", &step) < 0, "without /proc nothing is allowed");
    }
}

static void test_descriptors_are_closed(void)
{
    int before = open_fds();
    for (int i = 0; i < 20; i++) {
        int step;
        judge("/", base, &step);
        judge(in("else"), home, &step);
        judge(in("top"), home, &step);
        judge(in("top"), in("nowhere"), &step);
        judge(in("file"), base, &step);
        judge("/proc/self/root", base, &step);
    }
    CHECK(open_fds() == before, "%d descriptors before, %d after", before, open_fds());
}

int main(void)
{
    const char *tmp = getenv("TMPDIR");
    char made[PATH_MAX];
    snprintf(made, sizeof made, "%s/hostpath-XXXXXX", tmp ? tmp : "/tmp");
    if (!mkdtemp(made) || !realpath(made, base)) {
        perror(made);
        return 1;
    }

    test_below();
    test_unescape();
    test_mountinfo_lines();
    snprintf(home, sizeof home, "%s/top/homes/u", base);
    make_tree();
    test_verdicts();
    test_open_errors(true);
    in_a_child(without_openat2, ENOSYS);
    in_a_child(without_openat2, EPERM);
    in_a_child(with_mounts, 0);
    test_descriptors_are_closed();

    char command[PATH_MAX + 64];
    snprintf(command, sizeof command, "rm -rf --one-file-system -- '%s'", base);
    CHECK(system(command) == 0, "the tree is left");
    return finish("hostpath");
}
