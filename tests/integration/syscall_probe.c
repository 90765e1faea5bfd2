/*
 * Asks the kernel about one system call after another and prints "name answer" a line: ok, an errno's name, or SIG<n>.
 * Each call runs in a child of its own, so that none can change what a later one sees. Static, no arguments.
 * A probe whose call does not exist on this architecture prints "absent".
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <pthread.h>
#include <unistd.h>

#ifndef SYS_openat2
#define SYS_openat2 437
#endif
#ifndef SYS_close_range
#define SYS_close_range 436
#endif
#ifndef SYS_faccessat2
#define SYS_faccessat2 439
#endif
#ifndef SYS_pidfd_getfd
#define SYS_pidfd_getfd 438
#endif
#ifndef SYS_process_madvise
#define SYS_process_madvise 440
#endif
#ifndef SYS_mount_setattr
#define SYS_mount_setattr 442
#endif
#ifndef SYS_quotactl_fd
#define SYS_quotactl_fd 443
#endif
#ifndef SYS_memfd_secret
#define SYS_memfd_secret 447
#endif
#define NR_FUTEX_WAITV 449
#define NR_STATMOUNT 457
#define NR_LISTMOUNT 458

static long zeros[64]; /* below 4 GiB in a non-PIE program: the 32-bit probes point here */
static char note[64];

static int family(long domain, int type) { return syscall(SYS_socket, domain, type, 0) < 0 ? errno : 0; }
static int answer(long result) { return result < 0 ? errno : 0; }

#define PROBE(name, expression) static int probe_##name(void) { return answer(expression); }
#define FAMILY(name, domain, type) static int probe_##name(void) { return family(domain, type); }

/* sockets */
FAMILY(socket_unix, 1, SOCK_STREAM)
FAMILY(socket_inet, 2, SOCK_STREAM)
FAMILY(socket_inet6, 10, SOCK_STREAM)
FAMILY(socket_netlink_route, 16, SOCK_RAW)
PROBE(socket_netlink_sock_diag, syscall(SYS_socket, 16, SOCK_RAW, 4))
PROBE(socket_netlink_netfilter, syscall(SYS_socket, 16, SOCK_RAW, 12))
PROBE(socket_netlink_high_bits, syscall(SYS_socket, 16, SOCK_RAW, 0x100000000L)) /* the kernel reads 32 bits */
FAMILY(socket_packet, 17, SOCK_RAW)
FAMILY(socket_key, 15, SOCK_RAW)
FAMILY(socket_rds, 21, SOCK_SEQPACKET)
FAMILY(socket_can, 29, SOCK_RAW)
FAMILY(socket_tipc, 30, SOCK_STREAM)
FAMILY(socket_alg, 38, SOCK_SEQPACKET)
FAMILY(socket_vsock, 40, SOCK_STREAM)
FAMILY(socket_xdp, 44, SOCK_RAW)
FAMILY(socket_vsock_high_bits, 0x100000028L, SOCK_STREAM) /* the kernel reads 32 bits, a filter compares 64 */
static int probe_socketpair_unix(void) { int fds[2]; return answer(socketpair(1, SOCK_STREAM, 0, fds)); }
static int probe_socketpair_tipc(void) { int fds[2]; return answer(socketpair(30, SOCK_STREAM, 0, fds)); }

/* io_uring and asynchronous io */
PROBE(io_uring_setup, syscall(425, 8, zeros))
PROBE(io_uring_enter, syscall(426, -1, 0, 0, 0, 0, 0))
PROBE(io_uring_register, syscall(427, -1, 0, 0, 0))
PROBE(io_setup, syscall(SYS_io_setup, 8, zeros))

/* other processes */
PROBE(ptrace, syscall(SYS_ptrace, 0 /* TRACEME */, 0, 0, 0))
PROBE(process_vm_readv, syscall(SYS_process_vm_readv, getpid(), 0, 0, 0, 0, 0))
PROBE(process_vm_writev, syscall(SYS_process_vm_writev, getpid(), 0, 0, 0, 0, 0))
PROBE(process_madvise, syscall(SYS_process_madvise, -1, 0, 0, 0, 0))
PROBE(pidfd_getfd, syscall(SYS_pidfd_getfd, -1, 0, 0))
PROBE(kcmp, syscall(SYS_kcmp, getpid(), getpid(), 0, 0, 0))

/* memory, keys, kernel programs */
PROBE(userfaultfd, syscall(SYS_userfaultfd, 1 /* UFFD_USER_MODE_ONLY */))
PROBE(memfd_secret, syscall(SYS_memfd_secret, 0))
PROBE(vmsplice, syscall(SYS_vmsplice, -1, 0, 0, 0))
PROBE(mbind, syscall(SYS_mbind, 0, 0, 0, 0, 0, 0))
PROBE(set_mempolicy, syscall(SYS_set_mempolicy, 0, 0, 0))
PROBE(get_mempolicy, syscall(SYS_get_mempolicy, 0, 0, 0, 0, 0))
PROBE(keyctl, syscall(SYS_keyctl, 0, -1, 0, 0, 0))
PROBE(add_key, syscall(SYS_add_key, "user", "probe", "x", 1, -1))
PROBE(request_key, syscall(SYS_request_key, "user", "probe", 0, 0))
PROBE(bpf, syscall(SYS_bpf, 0, zeros, sizeof zeros))
PROBE(perf_event_open, syscall(SYS_perf_event_open, zeros, 0, -1, -1, 0))

/* mounts, namespaces, roots */
PROBE(mount, syscall(SYS_mount, "none", "/tmp", "tmpfs", 0, 0))
PROBE(umount2, syscall(SYS_umount2, "/tmp", 2))
PROBE(pivot_root, syscall(SYS_pivot_root, "/tmp", "/tmp"))
PROBE(open_tree, syscall(428, AT_FDCWD, "/tmp", 0))
PROBE(move_mount, syscall(429, -1, "", -1, "", 0))
PROBE(fsopen, syscall(430, "tmpfs", 0))
PROBE(fsconfig, syscall(431, -1, 0, 0, 0, 0))
PROBE(fsmount, syscall(432, -1, 0, 0))
PROBE(fspick, syscall(433, AT_FDCWD, "/tmp", 0))
PROBE(mount_setattr, syscall(SYS_mount_setattr, -1, "", 0, 0, 0))
PROBE(statmount, syscall(NR_STATMOUNT, 0, 0, 0, 0))
PROBE(listmount, syscall(NR_LISTMOUNT, 0, 0, 0, 0))
PROBE(setns, syscall(SYS_setns, -1, 0))
PROBE(unshare_user, syscall(SYS_unshare, CLONE_NEWUSER))
PROBE(unshare_fs, syscall(SYS_unshare, CLONE_FS))
PROBE(chroot, syscall(SYS_chroot, "/tmp"))
PROBE(name_to_handle_at, syscall(SYS_name_to_handle_at, AT_FDCWD, "/tmp", zeros, zeros, 0))
PROBE(open_by_handle_at, syscall(SYS_open_by_handle_at, -1, zeros, 0))
PROBE(sethostname, syscall(SYS_sethostname, "x", 1))
PROBE(fanotify_init, syscall(SYS_fanotify_init, 0x200 /* FAN_REPORT_FID */, 0))
PROBE(fanotify_mark, syscall(SYS_fanotify_mark, -1, 0, 0, -1, ""))

static int probe_clone_newuser(void)
{
    long pid = syscall(SYS_clone, CLONE_NEWUSER | SIGCHLD, 0, 0, 0, 0);
    if (pid == 0)
        _exit(0);
    return answer(pid);
}
static int probe_clone_newpid(void)
{
    long pid = syscall(SYS_clone, CLONE_NEWPID | SIGCHLD, 0, 0, 0, 0);
    if (pid == 0)
        _exit(0);
    return answer(pid);
}
static int probe_clone_plain(void)
{
    long pid = syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
    if (pid == 0)
        _exit(0);
    return answer(pid);
}
static int probe_clone3(void)
{
    unsigned long long arguments[8] = {0, 0, 0, 0, SIGCHLD};
    long pid = syscall(435, arguments, sizeof arguments);
    if (pid == 0)
        _exit(0);
    return answer(pid);
}
static int probe_clone3_newuser(void)
{
    unsigned long long arguments[8] = {CLONE_NEWUSER, 0, 0, 0, SIGCHLD};
    long pid = syscall(435, arguments, sizeof arguments);
    if (pid == 0)
        _exit(0);
    return answer(pid);
}

/* the machine */
PROBE(quotactl, syscall(SYS_quotactl, 0x800001 << 8, 0, 0, 0))
PROBE(quotactl_fd, syscall(SYS_quotactl_fd, -1, 0, 0, 0))
PROBE(swapon, syscall(SYS_swapon, "/workspace/none", 0))
PROBE(swapoff, syscall(SYS_swapoff, "/workspace/none"))
PROBE(reboot, syscall(SYS_reboot, 0, 0, 0, 0))
PROBE(kexec_load, syscall(SYS_kexec_load, 0, 0, 0, 0))
PROBE(kexec_file_load, syscall(SYS_kexec_file_load, -1, -1, 0, 0, 0))
PROBE(init_module, syscall(SYS_init_module, 0, 0, 0))
PROBE(finit_module, syscall(SYS_finit_module, -1, "", 0))
PROBE(delete_module, syscall(SYS_delete_module, "none", 0))
PROBE(acct, syscall(SYS_acct, "/workspace/none"))
PROBE(settimeofday, syscall(SYS_settimeofday, 0, 0))
PROBE(clock_settime, syscall(SYS_clock_settime, 0, 0))
PROBE(adjtimex, syscall(SYS_adjtimex, 0))
PROBE(clock_adjtime, syscall(SYS_clock_adjtime, 0, 0))
PROBE(syslog, syscall(SYS_syslog, 10, 0, 0))
PROBE(vhangup, syscall(SYS_vhangup))
PROBE(lookup_dcookie, syscall(
#ifdef SYS_lookup_dcookie
    SYS_lookup_dcookie
#else
    18
#endif
    , 0, 0, 0))

/* personality */
PROBE(personality_ask, syscall(SYS_personality, 0xffffffffUL))
PROBE(personality_linux, syscall(SYS_personality, 0UL))
PROBE(personality_no_randomize, syscall(SYS_personality, 0x0040000UL))
PROBE(personality_read_implies_exec, syscall(SYS_personality, 0x0400000UL))

/* what programs need */
static int probe_openat2(void)
{
    unsigned long long how[3] = {O_RDONLY, 0, 0x08 /* RESOLVE_BENEATH */};
    int root = open("/", O_PATH | O_DIRECTORY);
    return answer(syscall(SYS_openat2, root, "etc", how, sizeof how));
}
PROBE(memfd_create, syscall(SYS_memfd_create, "probe", 0))
PROBE(inotify_init1, inotify_init1(IN_CLOEXEC))
PROBE(eventfd2, eventfd(0, EFD_CLOEXEC))
PROBE(close_range, syscall(SYS_close_range, 100, 200, 0))
PROBE(faccessat2, syscall(SYS_faccessat2, AT_FDCWD, "/", R_OK, 0x200))
PROBE(statx, syscall(SYS_statx, AT_FDCWD, "/", 0, 0x7ff, (char[512]){0}))
PROBE(getrandom, syscall(SYS_getrandom, note, sizeof note, 0))
PROBE(pidfd_open, syscall(434, getpid(), 0))
PROBE(membarrier, syscall(SYS_membarrier, 0, 0))
PROBE(execveat_missing, syscall(SYS_execveat, AT_FDCWD, "/none", 0, 0, 0)) /* ENOENT: the kernel was asked */
PROBE(futex_waitv_empty, syscall(NR_FUTEX_WAITV, 0, 0, 0, 0, 0))           /* EINVAL: the kernel was asked */
PROBE(rseq_unaligned, syscall(334
#ifdef __aarch64__
    - 41
#endif
    , 1, 32, 0, 0)) /* EINVAL, never EPERM or ENOSYS */
static int probe_posix_spawn(void)
{
    pid_t pid;
    char *arguments[] = {"true", NULL};
    int failed = posix_spawn(&pid, "/bin/true", NULL, NULL, arguments, NULL), status;
    if (failed)
        return failed;
    waitpid(pid, &status, 0);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? 0 : ECHILD;
}
static int probe_vfork(void)
{
    pid_t pid = vfork();
    if (pid == 0)
        _exit(0);
    return answer(pid);
}
static void *idle(void *unused) { return unused; }
static int probe_pthread_create(void)
{
    pthread_t thread;
    int failed = pthread_create(&thread, NULL, idle, NULL);
    return failed ? failed : pthread_join(thread, NULL);
}
static int probe_mkfifo(void) { return answer(mknod("/workspace/fifo", 0010644, 0)); }
static int probe_mknod_char(void) { return answer(mknod("/workspace/null", 0020644, 0x103)); }
static int probe_setuid_root(void) { return answer(setuid(0)); }

#ifdef __x86_64__
PROBE(modify_ldt, syscall(SYS_modify_ldt, 0, zeros, sizeof zeros))
PROBE(iopl, syscall(SYS_iopl, 0))
PROBE(ioperm, syscall(SYS_ioperm, 0x80, 1, 0))
PROBE(x32_socket_vsock, syscall(0x40000000 | SYS_socket, 40, SOCK_STREAM, 0))
PROBE(x32_ptrace, syscall(0x40000000 | 521, 0, 0, 0, 0))

/* the 32-bit table, which any 64-bit program reaches with int 0x80 */
static long old_call(long number, long one, long two, long three)
{
    long result;
    __asm__ volatile("int $0x80" : "=a"(result) : "a"(number), "b"(one), "c"(two), "d"(three), "S"(0), "D"(0)
                     : "memory", "r8", "r9", "r10", "r11");
    if ((int)result < 0 && (int)result > -4096) {
        errno = -(int)result;
        return -1;
    }
    return (int)result;
}
static int socketcall_family(int domain, int type)
{
    int *arguments = (int *)zeros;
    arguments[0] = domain, arguments[1] = type, arguments[2] = 0;
    return answer(old_call(102, 1 /* SYS_SOCKET */, (long)arguments, 0));
}
PROBE(i386_getpid, old_call(20, 0, 0, 0))
PROBE(i386_socket_unix, old_call(359, 1, SOCK_STREAM, 0))
PROBE(i386_socket_vsock, old_call(359, 40, SOCK_STREAM, 0))
static int probe_i386_socketcall_unix(void) { return socketcall_family(1, SOCK_STREAM); }
static int probe_i386_socketcall_vsock(void) { return socketcall_family(40, SOCK_STREAM); }
static int probe_i386_socketcall_netlink(void) { return socketcall_family(16, SOCK_RAW); }
PROBE(i386_ptrace, old_call(26, 0, 0, 0))
PROBE(i386_keyctl, old_call(288, 0, -1, 0))
PROBE(i386_unshare_user, old_call(310, CLONE_NEWUSER, 0, 0))
static int probe_i386_clone_newuser(void)
{
    long pid = old_call(120, CLONE_NEWUSER | SIGCHLD, 0, 0);
    if (pid == 0)
        _exit(0);
    return answer(pid);
}
PROBE(i386_umount, old_call(22, (long)zeros, 0, 0))
PROBE(i386_stime, old_call(25, 0, 0, 0))
#else
#define probe_modify_ldt NULL
#define probe_iopl NULL
#define probe_ioperm NULL
#define probe_x32_socket_vsock NULL
#define probe_x32_ptrace NULL
#define probe_i386_getpid NULL
#define probe_i386_socket_unix NULL
#define probe_i386_socket_vsock NULL
#define probe_i386_socketcall_unix NULL
#define probe_i386_socketcall_vsock NULL
#define probe_i386_socketcall_netlink NULL
#define probe_i386_ptrace NULL
#define probe_i386_keyctl NULL
#define probe_i386_unshare_user NULL
#define probe_i386_clone_newuser NULL
#define probe_i386_umount NULL
#define probe_i386_stime NULL
#endif

#define ROW(name) {#name, probe_##name}
static const struct { const char *name; int (*run)(void); } table[] = {
    ROW(socket_unix), ROW(socket_inet), ROW(socket_inet6), ROW(socket_netlink_route), ROW(socket_netlink_sock_diag),
    ROW(socket_netlink_netfilter), ROW(socket_netlink_high_bits), ROW(socket_packet), ROW(socket_key),
    ROW(socket_rds), ROW(socket_can), ROW(socket_tipc), ROW(socket_alg), ROW(socket_vsock), ROW(socket_xdp),
    ROW(socket_vsock_high_bits), ROW(socketpair_unix), ROW(socketpair_tipc), ROW(io_uring_setup), ROW(io_uring_enter),
    ROW(io_uring_register), ROW(io_setup), ROW(ptrace), ROW(process_vm_readv), ROW(process_vm_writev),
    ROW(process_madvise), ROW(pidfd_getfd), ROW(kcmp), ROW(userfaultfd), ROW(memfd_secret), ROW(vmsplice), ROW(mbind),
    ROW(set_mempolicy), ROW(get_mempolicy), ROW(keyctl), ROW(add_key), ROW(request_key), ROW(bpf),
    ROW(perf_event_open), ROW(mount), ROW(umount2), ROW(pivot_root), ROW(open_tree), ROW(move_mount), ROW(fsopen),
    ROW(fsconfig), ROW(fsmount), ROW(fspick), ROW(mount_setattr), ROW(statmount), ROW(listmount), ROW(setns),
    ROW(unshare_user), ROW(unshare_fs), ROW(chroot), ROW(name_to_handle_at), ROW(open_by_handle_at), ROW(sethostname),
    ROW(fanotify_init), ROW(fanotify_mark), ROW(clone_newuser), ROW(clone_newpid), ROW(clone_plain), ROW(clone3),
    ROW(clone3_newuser), ROW(quotactl), ROW(quotactl_fd), ROW(swapon), ROW(swapoff), ROW(reboot), ROW(kexec_load),
    ROW(kexec_file_load), ROW(init_module), ROW(finit_module), ROW(delete_module), ROW(acct), ROW(settimeofday),
    ROW(clock_settime), ROW(adjtimex), ROW(clock_adjtime), ROW(syslog), ROW(vhangup), ROW(lookup_dcookie),
    ROW(personality_ask), ROW(personality_linux), ROW(personality_no_randomize), ROW(personality_read_implies_exec),
    ROW(openat2), ROW(memfd_create), ROW(inotify_init1), ROW(eventfd2), ROW(close_range), ROW(faccessat2), ROW(statx),
    ROW(getrandom), ROW(pidfd_open), ROW(membarrier), ROW(execveat_missing), ROW(futex_waitv_empty),
    ROW(rseq_unaligned), ROW(posix_spawn), ROW(vfork), ROW(pthread_create), ROW(mkfifo), ROW(mknod_char),
    ROW(setuid_root), ROW(modify_ldt), ROW(iopl), ROW(ioperm), ROW(x32_socket_vsock), ROW(x32_ptrace),
    ROW(i386_getpid), ROW(i386_socket_unix), ROW(i386_socket_vsock), ROW(i386_socketcall_unix),
    ROW(i386_socketcall_vsock), ROW(i386_socketcall_netlink), ROW(i386_ptrace), ROW(i386_keyctl),
    ROW(i386_unshare_user), ROW(i386_clone_newuser), ROW(i386_umount), ROW(i386_stime),
};

static void print_answer(const char *name, int status)
{
    if (WIFSIGNALED(status))
        printf("%s SIG%d\n", name, WTERMSIG(status));
    else if (WEXITSTATUS(status) == 0)
        printf("%s ok\n", name);
    else
        printf("%s %s\n", name, strerrorname_np(WEXITSTATUS(status)));
}

int main(void)
{
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        int status;
        if (table[i].run == NULL) {
            printf("%s absent\n", table[i].name);
            continue;
        }
        fflush(stdout);
        pid_t pid = fork();
        if (pid == 0)
            _exit(table[i].run());
        waitpid(pid, &status, 0);
        print_answer(table[i].name, status);
    }
    return 0;
}
