/*
 * kvm_probe: a device that opens proves nothing, and neither does a VM that runs three instructions. Where KVM is
 * itself emulated a loop runs a hundred times slower than a processor runs it, and no ordinary kernel boots. So a
 * loop is counted against the clock.
 *
 * The guest is nine bytes of 64-bit code at address 0, entered in long mode: page tables in memory, segments and
 * EFER set from outside, no interrupt, no device. It sums its counter, which takes 64-bit registers, and halts.
 *
 * Ending a run needs a signal, and this is called inside processes that own their signals. So the run has a thread
 * that blocks all of them; a timer sends one, the kick, to that thread alone, and only KVM's own mask lets it through,
 * which makes KVM_RUN return and delivers nothing. It dies pending, with the thread.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/kvm.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "native.h"

#ifndef __x86_64__
#error "the guest of this probe is x86-64 code"
#endif

#ifndef sigev_notify_thread_id /* glibc before 2.39 has the field without this name */
#define sigev_notify_thread_id _sigev_un._tid
#endif

enum { CODE = 0x0000, PML4 = 0x1000, PDPT = 0x2000, PAGE_DIRECTORY = 0x3000, GUEST_BYTES = 0x4000 };

/* Bits of Intel SDM volume 3, 2.5 (control registers), 2.2.1 (EFER) and 4.5 (paging). */
enum {
    CR0_PE = 1 << 0,
    CR0_ET = 1 << 4,
    CR4_PAE = 1 << 5,
    EFER_LME = 1 << 8,
    EFER_LMA = 1 << 10,
    PAGE_PRESENT = 1 << 0,
    PAGE_WRITABLE = 1 << 1,
    PAGE_LARGE = 1 << 7,
};
#define CR0_PG (1ull << 31)
#define RFLAGS_FIXED 2ull
#define TSS_ADDRESS 0xfffbd000ul /* three pages Intel's KVM wants below 4 GiB, out of the guest's memory */
#define CPUID_ENTRIES 256        /* KVM_MAX_CPUID_ENTRIES */

static const uint8_t guest_code[] = {
    0x48, 0x01, 0xc8, /* again: add rax, rcx */
    0x48, 0xff, 0xc9, /*        dec rcx      */
    0x75, 0xf8,       /*        jnz again    */
    0xf4,             /*        hlt          */
};

struct mapping {
    void *start;
    size_t size;
};

static void close_fd(const int *fd)
{
    if (*fd >= 0)
        close(*fd);
}

static void unmap(const struct mapping *mapping)
{
    if (mapping->start)
        munmap(mapping->start, mapping->size);
}

#define OWNED_FD __attribute__((cleanup(close_fd))) int
#define OWNED_MAPPING __attribute__((cleanup(unmap))) struct mapping

struct run {
    int vcpu;
    uint32_t deadline_ms;
    bool timed_out;
    int error; /* of KVM_RUN or of the timer; 0 when the guest came out by itself or time was up */
    bool ran;
    uint64_t elapsed_ns;
};

/* What says nothing about KVM is the caller's to hear as an error; the rest is an answer. */
static int failed(struct kvm_probe_report *report, int step, int error)
{
    report->step = step;
    report->error = error;
    switch (error) {
    case ENOMEM:
    case EMFILE:
    case ENFILE:
    case EAGAIN:
    case EINTR:
        return -error;
    default:
        return KVM_PROBE_UNUSABLE;
    }
}

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static int map(struct mapping *mapping, size_t size, int flags, int fd)
{
    void *start = mmap(NULL, size, PROT_READ | PROT_WRITE, flags, fd, 0);
    if (start == MAP_FAILED)
        return -errno;
    *mapping = (struct mapping){.start = start, .size = size};
    return 0;
}

/* One that already waits for the process, blocked by every thread, would end each KVM_RUN before it began. */
static int choose_kick(void)
{
    sigset_t pending;
    sigpending(&pending);
    int kick = SIGRTMAX;
    while (kick > SIGRTMIN && sigismember(&pending, kick) == 1)
        kick--;
    return kick;
}

/* Sets the mask KVM uses while the guest runs: everything blocked but `kick` (and what libc keeps for itself). */
static int let_through(int vcpu, int kick)
{
    enum { KERNEL_SIGSET_BYTES = 8 };
    union {
        struct kvm_signal_mask mask;
        uint8_t bytes[sizeof(struct kvm_signal_mask) + KERNEL_SIGSET_BYTES];
    } request = {.mask.len = KERNEL_SIGSET_BYTES};
    sigset_t blocked;
    sigfillset(&blocked);
    sigdelset(&blocked, kick);
    memcpy(request.bytes + sizeof(struct kvm_signal_mask), &blocked, KERNEL_SIGSET_BYTES);
    return ioctl(vcpu, KVM_SET_SIGNAL_MASK, &request) < 0 ? -errno : 0;
}

static void *run_guest(void *argument)
{
    struct run *run = argument;
    struct sigevent event = {.sigev_notify = SIGEV_THREAD_ID, .sigev_signo = choose_kick()};
    event.sigev_notify_thread_id = gettid();
    timer_t timer;
    if (timer_create(CLOCK_MONOTONIC, &event, &timer) < 0) {
        run->error = errno;
        return NULL;
    }
    uint64_t start = now_ns(), deadline = start + run->deadline_ms * 1000000ull;
    const struct itimerspec when = {
        .it_value = {.tv_sec = run->deadline_ms / 1000, .tv_nsec = run->deadline_ms % 1000 * 1000000l},
    };
    int rc = let_through(run->vcpu, event.sigev_signo);
    if (rc == 0 && timer_settime(timer, 0, &when, NULL) < 0)
        rc = -errno;
    if (rc < 0) {
        run->error = -rc;
    } else {
        run->ran = true;
        while (ioctl(run->vcpu, KVM_RUN, 0) < 0) {
            if (errno != EINTR && errno != EAGAIN) {
                run->error = errno;
                break;
            }
            if (now_ns() >= deadline) {
                run->timed_out = true;
                break;
            }
        }
        run->elapsed_ns = now_ns() - start;
    }
    timer_delete(timer);
    return NULL;
}

static int run_in_a_thread(struct run *run)
{
    sigset_t all, before;
    pthread_t thread;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&thread, NULL, run_guest, run);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error)
        return -error;
    pthread_join(thread, NULL);
    return 0;
}

static void fill(uint8_t *memory)
{
    const uint64_t table = PAGE_PRESENT | PAGE_WRITABLE;
    memcpy(memory + CODE, guest_code, sizeof guest_code);
    memcpy(memory + PML4, &(uint64_t){PDPT | table}, sizeof(uint64_t));
    memcpy(memory + PDPT, &(uint64_t){PAGE_DIRECTORY | table}, sizeof(uint64_t));
    memcpy(memory + PAGE_DIRECTORY, &(uint64_t){table | PAGE_LARGE}, sizeof(uint64_t)); /* the first 2 MiB */
}

static int set_cpuid(int kvm, int vcpu)
{
    union {
        struct kvm_cpuid2 list;
        uint8_t bytes[sizeof(struct kvm_cpuid2) + CPUID_ENTRIES * sizeof(struct kvm_cpuid_entry2)];
    } cpuid = {.list.nent = CPUID_ENTRIES};
    if (ioctl(kvm, KVM_GET_SUPPORTED_CPUID, &cpuid) < 0 || ioctl(vcpu, KVM_SET_CPUID2, &cpuid) < 0)
        return -errno;
    return 0;
}

/* The descriptors are loaded from here, and the guest loads none, so it needs no GDT. */
static int enter_long_mode(int vcpu, uint64_t turns)
{
    struct kvm_sregs special;
    if (ioctl(vcpu, KVM_GET_SREGS, &special) < 0)
        return -errno;
    const struct kvm_segment code = {
        .limit = 0xffffffff, .selector = 1 << 3, .type = 11, .present = 1, .s = 1, .l = 1, .g = 1,
    };
    const struct kvm_segment data = {
        .limit = 0xffffffff, .selector = 2 << 3, .type = 3, .present = 1, .s = 1, .db = 1, .g = 1,
    };
    special.cs = code;
    special.ds = special.es = special.fs = special.gs = special.ss = data;
    special.cr0 = CR0_PE | CR0_ET | CR0_PG;
    special.cr3 = PML4;
    special.cr4 = CR4_PAE;
    special.efer = EFER_LME | EFER_LMA;
    const struct kvm_regs general = {.rip = CODE, .rcx = turns, .rflags = RFLAGS_FIXED};
    if (ioctl(vcpu, KVM_SET_SREGS, &special) < 0 || ioctl(vcpu, KVM_SET_REGS, &general) < 0)
        return -errno;
    return 0;
}

static int judge(const struct run *run, const struct kvm_run *shared, const struct kvm_regs *after, uint64_t turns,
                 struct kvm_probe_report *report)
{
    report->turns = turns - after->rcx;
    report->elapsed_ns = run->elapsed_ns;
    if (run->timed_out)
        return failed(report, KVM_PROBE_DEADLINE, 0);
    if (shared->exit_reason != KVM_EXIT_HLT) {
        report->exit_reason = shared->exit_reason;
        return failed(report, KVM_PROBE_RUN, 0);
    }
    uint64_t sum = turns % 2 ? (turns + 1) / 2 * turns : turns / 2 * (turns + 1);
    if (after->rcx != 0 || after->rax != sum)
        return failed(report, KVM_PROBE_RESULT, 0);
    return KVM_PROBE_OK;
}

int kvm_probe(const char *device, uint64_t turns, uint32_t deadline_ms, struct kvm_probe_report *report)
{
    *report = (struct kvm_probe_report){0};
    if (turns == 0 || deadline_ms == 0) { /* the counter would wrap; a timer set to 0 never fires */
        report->step = KVM_PROBE_TIMER;
        return -EINVAL;
    }
    OWNED_FD kvm = open(device, O_RDWR | O_CLOEXEC);
    if (kvm < 0) {
        int rc = failed(report, KVM_PROBE_OPEN, errno);
        switch (report->error) {
        case ENOENT:
        case ENOTDIR:
        case ENXIO:
        case ENODEV:
            return KVM_PROBE_ABSENT;
        case EACCES:
        case EPERM:
            return KVM_PROBE_NO_ACCESS;
        default:
            return rc;
        }
    }
    int version = ioctl(kvm, KVM_GET_API_VERSION, 0);
    if (version != KVM_API_VERSION)
        return failed(report, KVM_PROBE_API_VERSION, version < 0 ? errno : 0);
    OWNED_FD vm = ioctl(kvm, KVM_CREATE_VM, 0);
    if (vm < 0)
        return failed(report, KVM_PROBE_CREATE_VM, errno);
    if (ioctl(vm, KVM_SET_TSS_ADDR, TSS_ADDRESS) < 0)
        return failed(report, KVM_PROBE_CREATE_VM, errno);

    OWNED_MAPPING memory = {0};
    int rc = map(&memory, GUEST_BYTES, MAP_PRIVATE | MAP_ANONYMOUS, -1);
    if (rc < 0)
        return failed(report, KVM_PROBE_MEMORY, -rc);
    fill(memory.start);
    const struct kvm_userspace_memory_region region = {
        .memory_size = GUEST_BYTES,
        .userspace_addr = (uintptr_t)memory.start,
    };
    if (ioctl(vm, KVM_SET_USER_MEMORY_REGION, &region) < 0)
        return failed(report, KVM_PROBE_MEMORY, errno);

    OWNED_FD vcpu = ioctl(vm, KVM_CREATE_VCPU, 0);
    if (vcpu < 0)
        return failed(report, KVM_PROBE_CREATE_VCPU, errno);
    int shared_bytes = ioctl(kvm, KVM_GET_VCPU_MMAP_SIZE, 0);
    if (shared_bytes < (int)sizeof(struct kvm_run))
        return failed(report, KVM_PROBE_CREATE_VCPU, shared_bytes < 0 ? errno : EPROTO);
    OWNED_MAPPING shared = {0};
    rc = map(&shared, (size_t)shared_bytes, MAP_SHARED, vcpu);
    if (rc < 0)
        return failed(report, KVM_PROBE_CREATE_VCPU, -rc);

    rc = set_cpuid(kvm, vcpu);
    if (rc < 0)
        return failed(report, KVM_PROBE_CPUID, -rc);
    rc = enter_long_mode(vcpu, turns);
    if (rc < 0)
        return failed(report, KVM_PROBE_REGISTERS, -rc);

    struct run run = {.vcpu = vcpu, .deadline_ms = deadline_ms};
    rc = run_in_a_thread(&run);
    if (rc < 0)
        return failed(report, KVM_PROBE_TIMER, -rc);
    if (run.error)
        return failed(report, run.ran ? KVM_PROBE_RUN : KVM_PROBE_TIMER, run.error);
    struct kvm_regs after;
    if (ioctl(vcpu, KVM_GET_REGS, &after) < 0)
        return failed(report, KVM_PROBE_REGISTERS, errno);
    return judge(&run, shared.start, &after, turns, report);
}
