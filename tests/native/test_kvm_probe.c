/* Unit tests of kvm_probe.c; what needs a KVM that opens is skipped, by name, where there is none. */

#include "kvm_probe.c"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "check.h"

#define DEVICE "/dev/kvm"

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

static void test_answers_without_kvm(void)
{
    static const struct {
        const char *device;
        int state, step, error;
    } table[] = {
        {"/nonexistent/kvm", KVM_PROBE_ABSENT, KVM_PROBE_OPEN, ENOENT},
        {"/dev/null/kvm", KVM_PROBE_ABSENT, KVM_PROBE_OPEN, ENOTDIR},
        {"/dev/null", KVM_PROBE_UNUSABLE, KVM_PROBE_API_VERSION, ENOTTY},
        {"/", KVM_PROBE_UNUSABLE, KVM_PROBE_OPEN, EISDIR},
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        struct kvm_probe_report report;
        int state = kvm_probe(table[i].device, 1, 1, &report);
        CHECK(state == table[i].state && report.step == table[i].step && report.error == table[i].error,
              "%s gives %d, step %d, error %d", table[i].device, state, report.step, report.error);
    }
    struct kvm_probe_report report;
    CHECK(kvm_probe(DEVICE, 0, 1000, &report) == -EINVAL && report.step == KVM_PROBE_TIMER, "no turns");
    CHECK(kvm_probe(DEVICE, 1000, 0, &report) == -EINVAL && report.step == KVM_PROBE_TIMER, "no time");
}

static void test_no_access(void)
{
    char path[] = "/tmp/kvm-probe-XXXXXX";
    OWNED_FD fd = mkstemp(path);
    CHECK(fd >= 0 && fchmod(fd, 0) == 0, "%s", strerror(errno));
    pid_t child = fork();
    if (child == 0) {
        struct kvm_probe_report report;
        if (getuid() == 0 && setuid(65534) < 0)
            _exit(2);
        _exit(kvm_probe(path, 1, 1, &report) == KVM_PROBE_NO_ACCESS && report.error == EACCES ? 0 : 1);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0, "child gives %#x", (unsigned)status);
    unlink(path);
}

static void test_short_loops_end(void)
{
    static const uint64_t table[] = {1, 2, 3, 1000, 1001};
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        struct kvm_probe_report report;
        int state = kvm_probe(DEVICE, table[i], 10000, &report);
        CHECK(state == KVM_PROBE_OK && report.step == 0 && report.turns == table[i],
              "%llu turns: %d, step %d, error %d, exit %u, %llu done", (unsigned long long)table[i], state, report.step,
              report.error, report.exit_reason, (unsigned long long)report.turns);
    }
}

static void test_endless_loop_is_ended(uint32_t deadline_ms)
{
    struct kvm_probe_report report;
    uint64_t start = now_ns();
    int state = kvm_probe(DEVICE, UINT64_MAX, deadline_ms, &report);
    uint64_t took_ms = (now_ns() - start) / 1000000;
    CHECK(state == KVM_PROBE_UNUSABLE && report.step == KVM_PROBE_DEADLINE && report.error == 0, "%d, step %d, error %d",
          state, report.step, report.error);
    CHECK(report.turns > 0 && report.elapsed_ns >= deadline_ms * 1000000ull, "%llu turns in %llu ns",
          (unsigned long long)report.turns, (unsigned long long)report.elapsed_ns);
    CHECK(took_ms >= deadline_ms && took_ms < deadline_ms + 1500, "took %llu ms", (unsigned long long)took_ms);
}

/* A signal that waits for the whole process, blocked everywhere, is neither taken away nor does it end the run. */
static void test_signals_stay_as_they_are(void)
{
    sigset_t waiting, before, after, pending;
    sigemptyset(&waiting);
    sigaddset(&waiting, SIGRTMAX);
    pthread_sigmask(SIG_BLOCK, &waiting, NULL);
    kill(getpid(), SIGRTMAX);
    pthread_sigmask(SIG_SETMASK, NULL, &before);
    test_endless_loop_is_ended(60);
    pthread_sigmask(SIG_SETMASK, NULL, &after);
    CHECK(memcmp(&before, &after, 8) == 0, "the mask has changed");
    sigpending(&pending);
    CHECK(sigismember(&pending, SIGRTMAX), "the signal of the process is gone");
    sigaddset(&waiting, SIGRTMAX - 1);
    siginfo_t info;
    const struct timespec none = {0};
    CHECK(sigtimedwait(&waiting, &info, &none) == SIGRTMAX && info.si_code == SI_USER, "another signal came");
    CHECK(sigtimedwait(&waiting, &info, &none) < 0, "the timer's signal was left behind");
    pthread_sigmask(SIG_UNBLOCK, &waiting, NULL);
    for (int signal = 1; signal <= SIGRTMAX; signal++) {
        struct sigaction action;
        if (sigaction(signal, NULL, &action) == 0 && signal != SIGSEGV && signal != SIGBUS && signal != SIGFPE)
            CHECK(action.sa_handler == SIG_DFL || action.sa_handler == SIG_IGN, "a handler for %d", signal);
    }
}

static void *probe_in_a_thread(void *state)
{
    struct kvm_probe_report report;
    *(int *)state = kvm_probe(DEVICE, UINT64_MAX, 100, &report);
    return NULL;
}

static void test_several_at_a_time(void)
{
    pthread_t threads[3];
    int states[3] = {-1, -1, -1};
    for (int i = 0; i < 3; i++)
        CHECK(pthread_create(&threads[i], NULL, probe_in_a_thread, &states[i]) == 0, "thread %d", i);
    for (int i = 0; i < 3; i++) {
        pthread_join(threads[i], NULL);
        CHECK(states[i] == KVM_PROBE_UNUSABLE, "thread %d gives %d", i, states[i]);
    }
}

int main(void)
{
    int before = open_fds();
    test_answers_without_kvm();
    test_no_access();
    OWNED_FD device = open(DEVICE, O_RDWR | O_CLOEXEC);
    if (device < 0) {
        printf("skipped: runs of a guest: %s: %s\n", DEVICE, strerror(errno));
    } else {
        before++;
        test_short_loops_end();
        test_endless_loop_is_ended(50);
        test_signals_stay_as_they_are();
        test_several_at_a_time();
    }
    CHECK(open_fds() == before, "%d descriptors before, %d after", before, open_fds());
    return finish("kvm_probe");
}
