"""The system calls that sandboxed code may make, as data.

This is an allow-list. Other calls get `DEFAULT` (ENOSYS), the error of a kernel that does not know the call, for which
libraries have fallbacks. The calls in `REFUSED` get EPERM instead, as an unprivileged process does from an ordinary
kernel: programs handle that.

Argument tests look at the low 32 bits only, as the kernel does for an `int`: `request | 1 << 32` would pass a 64-bit
comparison and still mean `request`. Flags that the kernel reads as a long (mmap, clone) have all relevant bits in the
low half.

`tools/build_seccomp.py` compiles this file into the committed programs;
tests/sandbox_server/seccomp/test_syscall_policy.py runs those programs and compares them with `evaluate`. Rules of one
call with different actions must not overlap: libseccomp does not promise an order.
"""

import errno
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

# Actions are the kernel's own SECCOMP_RET_* words, so a program's result compares directly.
type Action = int
ALLOW: Action = 0x7FFF0000
KILL_PROCESS: Action = 0x80000000


def errno_action(number: int) -> Action:
    """Return SECCOMP_RET_ERRNO: the call is not performed and fails with this errno."""
    return 0x00050000 | number


DEFAULT = errno_action(errno.ENOSYS)
# i386 by `int 0x80`, x32 by bit 30 of the number: no honest program uses either, and their numbers mean other calls.
# Killing leaves nothing to retry.
BAD_ARCH = KILL_PROCESS
X32_BIT = 0x40000000
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
WORD = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class ArgumentTest:
    """Holds when `args[index] & mask == value`."""

    index: int
    value: int
    mask: int = WORD


@dataclass(frozen=True, slots=True)
class SyscallRule:
    """The action for calls that pass all tests."""

    tests: tuple[ArgumentTest, ...]
    action: Action


@dataclass(frozen=True, slots=True)
class SeccompPolicy:
    """allowed: always. by_argument: the first matching rule. refused: with this action. Others: `DEFAULT`."""

    name: str
    allowed: frozenset[str]
    refused: Mapping[str, Action]
    by_argument: Mapping[str, tuple[SyscallRule, ...]]


def evaluate(policy: SeccompPolicy, name: str | None, args: Sequence[int]) -> Action:
    """Return the action for a call of the native architecture; `name` is None for an unnamed number."""
    if name is None:
        return DEFAULT
    if name in policy.allowed:
        return ALLOW
    for rule in policy.by_argument.get(name, ()):
        if all(args[test.index] & test.mask == test.value for test in rule.tests):
            return rule.action
    return policy.refused.get(name, DEFAULT)


def _allow_values(
    index: int, values: Iterable[int], action: Action = ALLOW, mask: int = WORD
) -> tuple[SyscallRule, ...]:
    """Return a rule for each value of one argument."""
    return tuple(SyscallRule((ArgumentTest(index, value, mask),), action) for value in values)


def _allow_without_bits(index: int, bits: int, otherwise: Action) -> tuple[SyscallRule, ...]:
    """Return rules that allow calls without these bits; one rule per bit gives the others a better errno."""
    single = [1 << n for n in range(32) if bits >> n & 1]
    denied = tuple(SyscallRule((ArgumentTest(index, bit, bit),), otherwise) for bit in single)
    return (SyscallRule((ArgumentTest(index, 0, bits),), ALLOW), *denied)


# ---------------------------------------------------------------------------------------------- by name

# Calls newer than the libseccomp that compiles the policy; from 424 on all architectures share numbers.
NUMBERS = {
    "fchmodat2": 452,
    "futex_wake": 454,
    "futex_wait": 455,
    "futex_requeue": 456,
    "mseal": 462,
    "setxattrat": 463,
    "getxattrat": 464,
    "listxattrat": 465,
    "removexattrat": 466,
}

# Not sync and syncfs: they flush the file systems of the host and so stall neighbours; sync() has no error
# return. Not splice, tee and vmsplice: aliased pages have a bad record and everybody has a fallback;
# shutil needs only sendfile and copy_file_range. Not cachestat: it shows which pages of shared files others
# have touched. Not inotify: it shows which shared files neighbours and the host open, and its instances are one
# quota for all sandboxes of a zygote. Not the handle calls: open_by_handle_at walks out of mounts. Attributes can be
# asked for and removed, but not set: see ATTRIBUTES. Not openat2: RESOLVE_CACHED, in memory, asks whether somebody has
# looked a name up lately.
FILES = """
    read write readv writev pread64 pwrite64 preadv pwritev pwritev2 lseek
    open creat openat close close_range dup dup2 dup3 flock
    stat lstat fstat newfstatat statx statfs fstatfs access faccessat faccessat2
    getdents getdents64 getcwd chdir fchdir
    mkdir mkdirat rmdir rename renameat renameat2 link linkat symlink symlinkat unlink unlinkat
    readlink readlinkat umask truncate ftruncate fallocate readahead
    chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat
    utime utimes futimesat utimensat
    fsync fdatasync sync_file_range sendfile copy_file_range
    getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr
    removexattr lremovexattr fremovexattr getxattrat listxattrat removexattrat
"""
# An access control list of 64 KiB on each of 100,000 files, or on memfds, is kernel memory that no cgroup counts, and
# which attribute is meant lies in memory, out of a filter's sight. EOPNOTSUPP: a file system that has none.
ATTRIBUTES = "setxattr lsetxattr fsetxattr setxattrat"

# Not io_uring (its work bypasses this filter) and not the old io_setup family (fs.aio-max-nr is one quota
# for the whole host): libraries fall back to threads.
WAITING = """
    poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2
    pipe pipe2 eventfd eventfd2 signalfd signalfd4
    timerfd_create timerfd_settime timerfd_gettime
"""

# mlock is bounded by RLIMIT_MEMLOCK and by the cgroup. Not mincore: of files that belong to the caller's kernel user,
# which an ordinary operator's packages do, it tells what others have read. Not mlockall, memfd_secret (unswappable,
# hidden from the supervisor), process_madvise, remap_file_pages, userfaultfd (widens kernel races), pkeys (unused),
# set_mempolicy and mbind (only asking is needed).
MEMORY = """
    brk munmap mremap mprotect msync mseal
    mlock mlock2 munlock munlockall get_mempolicy membarrier
"""

# execveat and memfds: running a program of one's own is what the sandbox is for. clone3 is absent although
# it is the modern way: its flags lie in memory, out of a filter's sight, and libc falls back to clone.
PROCESSES = """
    fork vfork execve execveat exit exit_group wait4 waitid
    getpid getppid gettid getpgid getpgrp setpgid getsid setsid
    set_tid_address set_robust_list rseq
    futex futex_waitv futex_wake futex_wait futex_requeue
    sched_yield sched_getaffinity sched_getparam sched_getscheduler
    sched_getattr sched_get_priority_max sched_get_priority_min sched_rr_get_interval
    getcpu getpriority getrusage getrlimit ioprio_get
    uname sysinfo times getrandom
"""

# Setting ids can only repeat the one id that is mapped, and subprocess(user=...) calls it.
IDENTITY = """
    getuid geteuid getgid getegid getresuid getresgid getgroups capget
    setuid setgid setreuid setregid setresuid setresgid
"""

# Signals reach the sandbox's own pid namespace only (for `degraded` see there).
SIGNALS = """
    rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigsuspend rt_sigtimedwait rt_sigqueueinfo
    rt_tgsigqueueinfo sigaltstack kill tkill tgkill pidfd_open pidfd_send_signal pause restart_syscall
"""

TIME = """
    time gettimeofday clock_gettime clock_getres nanosleep clock_nanosleep alarm getitimer setitimer
    timer_create timer_settime timer_gettime timer_getoverrun timer_delete
"""

# On sockets that exist; which may be made is ruled below. `socket`, `connect` and the rest of ADDRESSES
# are what the degraded policy takes away.
SOCKETS = """
    getsockname getpeername getsockopt shutdown sendto recvfrom sendmsg recvmsg sendmmsg recvmmsg
"""
ADDRESSES = "bind connect listen accept accept4"

# Not msg* and mq_*: no library uses them, kernel exploits like their allocations.
SYSV_IPC = "shmat shmdt shmctl semget semop semtimedop semctl"

# Code may restrict itself with Landlock. It may not add seccomp filters: their JIT memory is one quota for the whole
# host (net.core.bpf_jit_limit), and when that is used up no new sandbox can start.
LANDLOCK = "landlock_create_ruleset landlock_add_rule landlock_restrict_self"

# EPERM, as from an ordinary kernel to a process without privileges: "not permitted" rather than "old kernel".
# unshare, setns, mount: browsers, bwrap and unshare(1) then say the right thing. ptrace, process_vm_*:
# strace, gdb and MPI know EPERM. set_mempolicy, mbind, move_pages: containers answer so, libnuma copes.
REFUSED = """
    unshare setns mount umount2 pivot_root chroot swapon swapoff reboot acct quotactl vhangup syslog
    ptrace process_vm_readv process_vm_writev
    init_module finit_module delete_module kexec_load kexec_file_load bpf perf_event_open
    sethostname setdomainname settimeofday clock_settime clock_adjtime adjtimex iopl ioperm
    setgroups capset sched_setattr ioprio_set mlockall
    set_mempolicy mbind move_pages migrate_pages
"""

# ---------------------------------------------------------------------------------------------- by argument

# CLONE_NEWTIME is not among them: in clone(2) its bit belongs to the exit signal.
CLONE_NEW = {
    "NEWNS": 0x00020000,
    "NEWCGROUP": 0x02000000,
    "NEWUTS": 0x04000000,
    "NEWIPC": 0x08000000,
    "NEWUSER": 0x10000000,
    "NEWPID": 0x20000000,
    "NEWNET": 0x40000000,
}
# CLONE_PARENT hands the caller's parent (init, or the zygote) a child it does not know of.
CLONE_PARENT = 0x00008000
# Descriptors shared with another process, not thread: its locks would outlive the process that the kernel names.
CLONE_FILES, CLONE_THREAD = 0x00000400, 0x00010000

MAP_HUGETLB = 0x40000
MFD_HUGETLB = 0x4
SHM_HUGETLB = 0x800

# Not TIOCSTI and TIOCLINUX (type into a terminal) nor TIOCSETD (loads line disciplines). FIOASYNC is
# signal-driven I/O, which nothing uses.
IOCTL = {
    "TCGETS": 0x5401,
    "TCSETS": 0x5402,
    "TCSETSW": 0x5403,
    "TCSETSF": 0x5404,
    "TCSBRK": 0x5409,
    "TCXONC": 0x540A,
    "TCFLSH": 0x540B,
    "TIOCSCTTY": 0x540E,
    "TIOCGPGRP": 0x540F,
    "TIOCSPGRP": 0x5410,
    "TIOCOUTQ": 0x5411,
    "TIOCGWINSZ": 0x5413,
    "TIOCSWINSZ": 0x5414,
    "FIONREAD": 0x541B,
    "FIONBIO": 0x5421,
    "TIOCNOTTY": 0x5422,
    "TIOCGSID": 0x5429,
    "TCGETS2": 0x802C542A,
    "TCSETS2": 0x402C542B,
    "TCSETSW2": 0x402C542C,
    "TCSETSF2": 0x402C542D,
    "TIOCGPTN": 0x80045430,
    "TIOCSPTLCK": 0x40045431,
    "FIONCLEX": 0x5450,
    "FIOCLEX": 0x5451,
}
# Python 3.14's Path.copy() tries a reflink first and falls back on EOPNOTSUPP, not on ENOSYS.
IOCTL_CLONE = {"FICLONE": 0x40049409, "FICLONERANGE": 0x4020940D, "FIDEDUPERANGE": 0xC0189436}
IOCTL_TYPING = {"TIOCSTI": 0x5412, "TIOCLINUX": 0x541C, "TIOCSETD": 0x5423}
# Whole families (the type byte) that programs probe and for which ENOTTY is the "not here" they know:
# block devices, file flags, XFS-style attributes, network interfaces.
IOCTL_FAMILIES_NOT_HERE = {"BLK": 0x1200, "FS_IOC": 0x6600, "FS_XATTR": 0x5800, "SIOC": 0x8900}

# F_SETLEASE and F_NOTIFY would let code stall the supervisor's opens; F_SETOWN and F_SETSIG are
# signal-driven I/O. F_SETPIPE_SZ takes no more of the per-user pipe quota than more pipes would.
FCNTL = {
    "F_DUPFD": 0,
    "F_GETFD": 1,
    "F_SETFD": 2,
    "F_GETFL": 3,
    "F_SETFL": 4,
    "F_GETLK": 5,
    "F_SETLK": 6,
    "F_SETLKW": 7,
    "F_GETOWN": 9,
    "F_DUPFD_QUERY": 1027,
    "F_DUPFD_CLOEXEC": 1030,
    "F_SETPIPE_SZ": 1031,
    "F_GETPIPE_SZ": 1032,
    "F_ADD_SEALS": 1033,
    "F_GET_SEALS": 1034,
}
# EINVAL is how fcntl says "no such command". Not the locks of open files: the kernel names no process for them, so
# nobody could tell whose they are when there are too many (see host_exhaustion_watchdog.py).
FCNTL_UNKNOWN = {
    "F_OFD_GETLK": 36,
    "F_OFD_SETLK": 37,
    "F_OFD_SETLKW": 38,
    "F_SETOWN": 8,
    "F_SETSIG": 10,
    "F_GETSIG": 11,
    "F_SETOWN_EX": 15,
    "F_SETLEASE": 1024,
    "F_GETLEASE": 1025,
    "F_NOTIFY": 1026,
    "F_GET_RW_HINT": 1035,
    "F_SET_RW_HINT": 1036,
}

PRCTL = {
    "SET_PDEATHSIG": 1,
    "GET_PDEATHSIG": 2,
    "GET_DUMPABLE": 3,
    "GET_KEEPCAPS": 7,
    "GET_TIMING": 13,
    "SET_NAME": 15,
    "GET_NAME": 16,
    "GET_SECCOMP": 21,
    "CAPBSET_READ": 23,
    "GET_SECUREBITS": 27,
    "SET_TIMERSLACK": 29,
    "GET_TIMERSLACK": 30,
    "SET_CHILD_SUBREAPER": 36,  # collects only the caller's own orphans
    "GET_CHILD_SUBREAPER": 37,
    "SET_NO_NEW_PRIVS": 38,
    "GET_NO_NEW_PRIVS": 39,
    "SET_THP_DISABLE": 41,
    "GET_THP_DISABLE": 42,
    "SVE_GET_VL": 51,
    "GET_SPECULATION_CTRL": 52,
    "GET_TAGGED_ADDR_CTRL": 56,
    "SME_GET_VL": 64,
    "GET_AUXV": 0x41555856,
}
# Not dumpable would hide the process's /proc and namespaces from the supervisor's helpers.
PRCTL_REFUSED = {"SET_DUMPABLE": 4, "SET_KEEPCAPS": 8, "CAPBSET_DROP": 24, "SET_SECUREBITS": 28, "SET_MM": 35}
# EINVAL: a kernel without Yama, without seccomp filters (man-db goes on without only for this), without KSM, without
# names for mappings (newer glibc gives some; no cgroup counts them).
PRCTL_UNKNOWN = {
    "SET_PTRACER": 0x59616D61,
    "SET_SECCOMP": 22,
    "SCHED_CORE": 62,
    "SET_MEMORY_MERGE": 67,
    "SET_VMA": 0x53564D41,
}

# Not MADV_MERGEABLE: pages merged across sandboxes are a side channel. Nor MADV_COLD and MADV_PAGEOUT, which evict
# pages of shared files, HWPOISON and SOFT_OFFLINE.
MADVISE = (*range(5), 8, 9, 10, 11, *range(14, 20), *range(22, 26), 102, 103)
MADVISE_UNKNOWN = (12, 13, 20, 21, 100, 101)

# AMX libraries ask for tile state by ARCH_REQ_XCOMP_PERM. Not ARCH_SET_CPUID, ARCH_MAP_VDSO_*, ARCH_SHSTK_*.
ARCH_PRCTL = {
    "SET_GS": 0x1001,
    "SET_FS": 0x1002,
    "GET_FS": 0x1003,
    "GET_GS": 0x1004,
    "GET_XCOMP_SUPP": 0x1021,
    "GET_XCOMP_PERM": 0x1022,
    "REQ_XCOMP_PERM": 0x1023,
}
ARCH_CET_STATUS = 0x3001  # asked by Debian's and Ubuntu's ld.so at every start; EINVAL is "no CET"

# Query and PER_LINUX. Anything else turns off ASLR, makes data executable or pretends another ABI.
PERSONALITY = (0, 0xFFFFFFFF)

# mode & S_IFMT; devices are EPERM as for everybody who is not root.
S_IFMT, S_IFIFO, S_IFCHR, S_IFBLK, S_IFREG = 0xF000, 0x1000, 0x2000, 0x6000, 0x8000

# policy & ~SCHED_RESET_ON_FORK: OTHER, BATCH, IDLE; FIFO, RR and DEADLINE would outrun the cgroup's share.
SCHED_MASK = WORD & ~0x40000000
SCHED_ORDINARY, SCHED_REALTIME = (0, 3, 5), (1, 2, 6)

# Every resource but RLIMIT_CORE: the jail sets that to 1, which alone keeps the kernel from piping a crashed
# program's memory into the host's crash handler; 0 would not. Reading it by prlimit64 is refused as well: a rule
# that looks at two arguments beside rules that look at one is compiled wrongly by libseccomp 2.5.
RLIMIT_CORE = 4
LIMITS = [resource for resource in range(16) if resource != RLIMIT_CORE]

AF_UNIX, AF_INET, AF_INET6, AF_COUNT = 1, 2, 10, 47
SOCK_STREAM, SOCK_DGRAM, SOCK_RAW, SOCK_SEQPACKET = 1, 2, 3, 5
UNIX_KINDS = SOCK_STREAM, SOCK_DGRAM, SOCK_SEQPACKET
SOCK_TYPE = 0xF  # the rest of the word is SOCK_CLOEXEC and SOCK_NONBLOCK
TCP, UDP, ICMP, ICMP6 = 6, 17, 1, 58
# STREAM or DGRAM protocols of their own that the kernel would load a module for: DCCP, SCTP, UDP-Lite, MPTCP.
EXOTIC_PROTOCOLS = (33, 132, 136, 262)

SOL_SOCKET, SOL_IP, SOL_TCP, SOL_IPV6 = 1, 0, 6, 41
# By name, because the list that must stay out is long and grows: SO_ATTACH_FILTER and its kin (host-wide JIT
# memory, see LANDLOCK), SO_ZEROCOPY, TCP_ULP, TCP_MD5SIG, UDP_ENCAP, multicast, all of netfilter's.
SOCKET_OPTIONS = {
    # REUSEADDR BROADCAST SNDBUF RCVBUF KEEPALIVE OOBINLINE PRIORITY LINGER REUSEPORT PASSCRED RCVLOWAT
    # RCVTIMEO SNDTIMEO TIMESTAMP
    SOL_SOCKET: (2, 6, 7, 8, 9, 10, 12, 13, 15, 16, 18, 20, 21, 29),
    # TOS TTL PKTINFO MTU_DISCOVER RECVERR BIND_ADDRESS_NO_PORT
    SOL_IP: (1, 2, 8, 10, 11, 24),
    # NODELAY MAXSEG CORK KEEPIDLE KEEPINTVL KEEPCNT SYNCNT LINGER2 DEFER_ACCEPT WINDOW_CLAMP QUICKACK
    # USER_TIMEOUT FASTOPEN NOTSENT_LOWAT FASTOPEN_CONNECT
    SOL_TCP: (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 18, 23, 25, 30),
    # UNICAST_HOPS MTU_DISCOVER RECVERR V6ONLY RECVPKTINFO TCLASS
    SOL_IPV6: (16, 23, 25, 26, 49, 67),
}


def _clone() -> tuple[SyscallRule, ...]:
    never = CLONE_PARENT | sum(CLONE_NEW.values())
    both = CLONE_FILES | CLONE_THREAD
    _, *denied = _allow_without_bits(0, never, errno_action(errno.EPERM))
    return (
        SyscallRule((ArgumentTest(0, 0, never | CLONE_FILES),), ALLOW),
        SyscallRule((ArgumentTest(0, both, never | both),), ALLOW),
        SyscallRule((ArgumentTest(0, CLONE_FILES, both),), errno_action(errno.EPERM)),
        *denied,
    )


def _ioctl() -> tuple[SyscallRule, ...]:
    return (
        *_allow_values(1, IOCTL.values()),
        *_allow_values(1, IOCTL_CLONE.values(), errno_action(errno.EOPNOTSUPP)),
        *_allow_values(1, IOCTL_TYPING.values(), errno_action(errno.EPERM)),
        *_allow_values(1, IOCTL_FAMILIES_NOT_HERE.values(), errno_action(errno.ENOTTY), mask=0xFF00),
    )


def _prctl() -> tuple[SyscallRule, ...]:
    return (
        *_allow_values(0, PRCTL.values()),
        *_allow_values(0, PRCTL_REFUSED.values(), errno_action(errno.EPERM)),
        *_allow_values(0, PRCTL_UNKNOWN.values(), errno_action(errno.EINVAL)),
    )


def _mknod(index: int) -> tuple[SyscallRule, ...]:
    return (
        *_allow_values(index, (0, S_IFREG, S_IFIFO), mask=S_IFMT),
        *_allow_values(index, (S_IFCHR, S_IFBLK), errno_action(errno.EPERM), mask=S_IFMT),
    )


def _socket() -> tuple[SyscallRule, ...]:
    """Unix sockets and TCP: the network namespace holds nothing but its own lo.

    No UDP: its buffers count against no cgroup v1, and a quota of the whole host (udp_mem) is soon full.
    """

    def inet(kind: int, protocol: int, action: Action) -> list[SyscallRule]:
        families = (AF_INET, AF_INET6)
        return [
            SyscallRule(
                (ArgumentTest(0, f), ArgumentTest(1, kind, SOCK_TYPE), ArgumentTest(2, protocol)), action
            )
            for f in families
        ]

    rules = [*_unix_sockets(*UNIX_KINDS)]
    rules += inet(SOCK_STREAM, 0, ALLOW) + inet(SOCK_STREAM, TCP, ALLOW)
    for protocol in EXOTIC_PROTOCOLS:
        rules += inet(SOCK_STREAM, protocol, errno_action(errno.EPROTONOSUPPORT))
        rules += inet(SOCK_DGRAM, protocol, errno_action(errno.EPROTONOSUPPORT))
    for protocol in (0, UDP, ICMP, ICMP6):  # EACCES is also what a closed ping_group_range gives
        rules += inet(SOCK_DGRAM, protocol, errno_action(errno.EACCES))
    rules += [
        SyscallRule(
            (ArgumentTest(0, family), ArgumentTest(1, SOCK_RAW, SOCK_TYPE)), errno_action(errno.EPERM)
        )
        for family in (AF_INET, AF_INET6)
    ]
    others = sorted(set(range(AF_COUNT)) - {AF_UNIX, AF_INET, AF_INET6})
    return (*rules, *_allow_values(0, others, errno_action(errno.EAFNOSUPPORT)))


def _unix_sockets_only() -> tuple[SyscallRule, ...]:
    others = sorted(set(range(AF_COUNT)) - {AF_UNIX, AF_INET, AF_INET6})
    inet = _allow_values(0, (AF_INET, AF_INET6), errno_action(errno.EACCES))
    return (*_unix_sockets(*UNIX_KINDS), *inet, *_allow_values(0, others, errno_action(errno.EAFNOSUPPORT)))


def _unix_sockets(*kinds: int) -> tuple[SyscallRule, ...]:
    return tuple(
        SyscallRule((ArgumentTest(0, AF_UNIX), ArgumentTest(1, kind, SOCK_TYPE)), ALLOW) for kind in kinds
    )


def _setsockopt() -> tuple[SyscallRule, ...]:
    pairs = [(level, option) for level, options in SOCKET_OPTIONS.items() for option in options]
    return tuple(
        SyscallRule((ArgumentTest(1, level), ArgumentTest(2, option)), ALLOW) for level, option in pairs
    )


# POSIX_FADV_DONTNEED would drop a shared file's pages for the whole host: it is told "done", and nothing is.
# RWF_NOWAIT tells whether somebody else has read a page lately.
FADVISE, FADV_DONTNEED, RWF_NOWAIT = (0, 1, 2, 3, 5), 4, 8


_BY_ARGUMENT: Mapping[str, tuple[SyscallRule, ...]] = {
    "fadvise64": (*_allow_values(3, FADVISE), *_allow_values(3, [FADV_DONTNEED], errno_action(0))),
    "preadv2": _allow_without_bits(5, RWF_NOWAIT, errno_action(errno.EOPNOTSUPP)),
    "clone": _clone(),
    # ENOMEM is what a host without reserved huge pages answers, EINVAL a kernel without them.
    "mmap": _allow_without_bits(3, MAP_HUGETLB, errno_action(errno.ENOMEM)),
    "memfd_create": _allow_without_bits(1, MFD_HUGETLB, errno_action(errno.EINVAL)),
    "shmget": _allow_without_bits(2, SHM_HUGETLB, errno_action(errno.ENOMEM)),
    "madvise": (*_allow_values(2, MADVISE), *_allow_values(2, MADVISE_UNKNOWN, errno_action(errno.EINVAL))),
    "ioctl": _ioctl(),
    "fcntl": (
        *_allow_values(1, FCNTL.values()),
        *_allow_values(1, FCNTL_UNKNOWN.values(), errno_action(errno.EINVAL)),
    ),
    "prctl": _prctl(),
    "arch_prctl": (
        *_allow_values(0, ARCH_PRCTL.values()),
        *_allow_values(0, [ARCH_CET_STATUS], errno_action(errno.EINVAL)),
    ),
    "personality": _allow_values(0, PERSONALITY),
    "mknod": _mknod(1),
    "mknodat": _mknod(2),
    "sched_setscheduler": (
        *_allow_values(1, SCHED_ORDINARY, mask=SCHED_MASK),
        *_allow_values(1, SCHED_REALTIME, errno_action(errno.EPERM), mask=SCHED_MASK),
    ),
    "setrlimit": (*_allow_values(0, LIMITS), *_allow_values(0, [RLIMIT_CORE], errno_action(errno.EPERM))),
    "prlimit64": (*_allow_values(1, LIMITS), *_allow_values(1, [RLIMIT_CORE], errno_action(errno.EPERM))),
    "socket": _socket(),
    "socketpair": _unix_sockets(*UNIX_KINDS),
    "setsockopt": _setsockopt(),
}

# ---------------------------------------------------------------------------------------------- the policies


def _parse_names(*groups: str) -> frozenset[str]:
    return frozenset(name for group in groups for name in group.split())


_COMMON = _parse_names(FILES, WAITING, MEMORY, PROCESSES, IDENTITY, SIGNALS, TIME, SOCKETS, LANDLOCK)
_REFUSED: Mapping[str, Action] = {
    **dict.fromkeys(sorted(_parse_names(REFUSED)), errno_action(errno.EPERM)),
    **dict.fromkeys(ATTRIBUTES.split(), errno_action(errno.EOPNOTSUPP)),
}

# Inside a network, ipc and pid namespace of its own: what reaches other processes reaches the sandbox's only.
NAMESPACES = SeccompPolicy(
    name="namespaces",
    allowed=_COMMON | _parse_names(ADDRESSES, SYSV_IPC, "setpriority sched_setaffinity sched_setparam"),
    refused=_REFUSED,
    by_argument=_BY_ARGUMENT,
)

# Where the zygote or the sandbox server may be in reach under the same user: only the caller's own limits,
# priority and processors (a lowered RLIMIT_CPU would kill it, SCHED_IDLE starve it).
_OWN_PROCESS_ONLY: Mapping[str, tuple[SyscallRule, ...]] = {
    "prlimit64": (
        *(SyscallRule((ArgumentTest(0, 0), ArgumentTest(1, limit)), ALLOW) for limit in LIMITS),
        *_allow_values(1, [RLIMIT_CORE], errno_action(errno.EPERM)),
    ),
    "setpriority": (SyscallRule((ArgumentTest(0, 0), ArgumentTest(1, 0)), ALLOW),),
    "sched_setaffinity": _allow_values(0, [0]),
    "sched_setparam": _allow_values(0, [0]),
    "sched_setscheduler": (
        *(
            SyscallRule((ArgumentTest(0, 0), ArgumentTest(1, policy, SCHED_MASK)), ALLOW)
            for policy in SCHED_ORDINARY
        ),
        *_allow_values(1, SCHED_REALTIME, errno_action(errno.EPERM), mask=SCHED_MASK),
    ),
}

# A pod's code shares the network namespace of the pod, and not every cluster enforces network policies: no sockets but
# unix ones. EACCES reads as "not permitted"; EAFNOSUPPORT would read as "no IPv6 here".
POD = SeccompPolicy(
    name="pod",
    allowed=_COMMON | _parse_names(ADDRESSES, SYSV_IPC),
    refused=_REFUSED,
    by_argument={**_BY_ARGUMENT, **_OWN_PROCESS_ONLY, "socket": _unix_sockets_only()},
)

# Where the pod lets the code have a network namespace of its own, as in gVisor: nothing but its own lo is in reach.
POD_NETWORK = SeccompPolicy("pod-network", POD.allowed, _REFUSED, {**_BY_ARGUMENT, **_OWN_PROCESS_ONLY})

# For `unsafe-degraded`: no namespaces, so the host's network, abstract sockets, SysV segments and processes
# of the same uid are in reach, and the filter is all there is.
# - No socket at all. A pair may be a stream or seqpacket one: a datagram socket, even of a pair, can be sent
#   to any address by sendmsg, whose address lies in memory. (SOCK_RAW is a datagram to AF_UNIX.)
# - No SysV IPC.
# - Signals cannot be ruled here: pids are not known when the filter is made. Use another uid, or Landlock's
#   signal scope (ABI 6).
# multiprocessing's forkserver and managers need a unix socket and do not work in this mode.
DEGRADED = SeccompPolicy(
    name="degraded",
    allowed=_COMMON,
    refused={**_REFUSED, **dict.fromkeys(["socket", *ADDRESSES.split()], errno_action(errno.EACCES))},
    by_argument={
        **{name: rules for name, rules in _BY_ARGUMENT.items() if name not in ("socket", "shmget")},
        "socketpair": _unix_sockets(SOCK_STREAM, SOCK_SEQPACKET),
        **_OWN_PROCESS_ONLY,
    },
)

# For the helpers that work on files, in every mode: trusted processes that read untrusted input.
HELPER = SeccompPolicy(
    name="helper",
    allowed=DEGRADED.allowed | _parse_names("openat2"),
    refused=DEGRADED.refused,
    by_argument=DEGRADED.by_argument,
)

POLICIES = {policy.name: policy for policy in (NAMESPACES, POD, POD_NETWORK, DEGRADED, HELPER)}
POLICY_OF_MODE = {"namespaces": "namespaces", "pod": "pod", "unsafe-degraded": "degraded"}
