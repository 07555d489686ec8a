"""Attacks by system calls, each made for real."""

import os
from textwrap import dedent

import pytest

from tests.attacks.conftest import Host
from tests.support.driver_client import SandboxClient

pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of x86_64")

CLONE = {
    "NEWNS": 0x00020000,
    "NEWCGROUP": 0x02000000,
    "NEWUTS": 0x04000000,
    "NEWIPC": 0x08000000,
    "NEWUSER": 0x10000000,
    "NEWPID": 0x20000000,
    "NEWNET": 0x40000000,
}
UNSHARE = {**CLONE, "NEWTIME": 0x80}

MOUNTS = {
    "mount tmpfs": "call(165, b'x', b'/tmp', b'tmpfs', 0, None)",
    "mount proc": "call(165, b'x', b'/tmp', b'proc', 0, None)",
    "mount bind": "call(165, b'/usr', b'/tmp', None, 4096, None)",
    "remount rw": "call(165, b'x', b'/usr', None, 32 | 4096, None)",
    "remount proc rw": "call(165, b'x', b'/proc', None, 32 | 4096, None)",
    "umount2": "call(166, b'/proc', 2)",
    "pivot_root": "call(155, b'/tmp', b'/tmp')",
    "chroot": "call(161, b'/tmp')",
    "move_mount": "call(429, -100, b'/proc', -100, b'/tmp', 0)",
    "open_tree": "call(428, -100, b'/', 1)",
    "fsopen": "call(430, b'tmpfs', 0)",
    "fsconfig": "call(431, 3, 1, b'size', b'1', 0)",
    "fsmount": "call(432, 3, 0, 0)",
    "fspick": "call(433, -100, b'/tmp', 0)",
    "mount_setattr": "call(442, -100, b'/usr', 0, bytes(32), 32)",
    "open_tree_attr": "call(467, -100, b'/', 1, bytes(32), 32)",
    "swapon": "call(167, b'/tmp/x', 0)",
}

KERNEL = {
    "add_key": "call(248, b'user', b'a', b'b', 1, -3)",
    "request_key": "call(249, b'user', b'a', None, -3)",
    "keyctl get session": "call(250, 0, -3, 1)",
    "keyctl join": "call(250, 1, None)",
    "bpf map": "call(321, 0, bytes(64), 64)",
    "bpf prog": "call(321, 5, bytes(64), 64)",
    "perf_event_open": "call(298, bytes(128), 0, -1, -1, 0)",
    "userfaultfd": "call(323, 0)",
    "userfaultfd user mode": "call(323, 1)",
    "io_uring_setup": "call(425, 8, bytes(120))",
    "io_uring_enter": "call(426, 3, 1, 0, 0, None)",
    "io_uring_register": "call(427, 3, 0, None, 0)",
    "io_setup": "call(206, 8, bytes(8))",
    "kexec_load": "call(246, 0, 0, None, 0)",
    "init_module": "call(175, bytes(8), 8, b'')",
    "finit_module": "call(313, 0, b'', 0)",
    "reboot": "call(169, 0xfee1dead, 672274793, 0, None)",
    "syslog": "call(103, 3, bytes(64), 64)",
    "quotactl": "call(179, 0, None, 0, None)",
    "open_by_handle_at": "call(304, 3, bytes(64), 0)",
    "name_to_handle_at": "call(303, -100, b'/', bytes(64), bytes(8), 0)",
    "fanotify_init": "call(300, 0, 0)",
    "memfd_secret": "call(447, 0)",
    "lookup_dcookie": "call(212, 0, bytes(8), 8)",
    "settimeofday": "call(164, bytes(16), None)",
    "clock_settime": "call(227, 0, bytes(16))",
    "iopl": "call(172, 3)",
    "ioperm": "call(173, 0, 1, 1)",
    "acct": "call(163, None)",
    "modify_ldt": "call(154, 0, bytes(16), 16)",
    "personality": "call(135, 0x0040000)",
    "seccomp filter": "call(317, 1, 0, bytes(16))",
    "prctl seccomp": "call(157, 22, 2, bytes(16), 0, 0)",
    "sync": "call(162)",
    "vmsplice": "call(278, 1, bytes(16), 1, 0)",
    "splice": "call(275, 0, None, 1, None, 10, 0)",
    "uselib": "call(134, b'/tmp/x')",
    "ustat": "call(136, 0, bytes(32))",
    "sysfs": "call(139, 3)",
    "map_shadow_stack": "call(453, 0, 4096, 0)",
    "remap_file_pages": "call(216, 0, 0, 0, 0, 0)",
    "cachestat": "call(451, 0, bytes(16), bytes(40), 0)",
    "mincore": "call(27, 0, 4096, bytes(1))",
    "openat2 in the cache only": "call(437, -100, b'/usr', bytes(16) + b'\\x20' + bytes(7), 24)",
    "process_mrelease": "call(448, 0, 0)",
    "pidfd_getfd": "call(438, 0, 0, 0)",
    "msgget": "call(68, 0, 0o1600)",
    "mq_open": "call(240, b'a', 0o102, 0o600, None)",
}


def test_unshare(box: SandboxClient) -> None:
    program = f"""
        answers = {{}}
        for name, flags in {UNSHARE!r}.items():
            answers[name] = [call(272, flags), call(272, flags | 1 << 32), attempt(os.unshare, flags)]
        report(answers)
    """
    assert box.ask(dedent(program)) == dict.fromkeys(UNSHARE, ["EPERM"] * 3)


def test_clone(box: SandboxClient) -> None:
    """Also together with CLONE_NEWUSER, which would grant the others, and with the high half of the word set."""
    program = f"""
        answers = {{}}
        for name, flag in {CLONE!r}.items():
            for extra in (17, 0x10000000 | 17, 17 | 1 << 32, 17 | 1 << 63):
                answer = call(56, flag | extra, 0, 0, 0, 0)
                if answer == "0": os._exit(99)
                answers.setdefault(name, []).append(answer)
        report(answers)
    """
    assert box.ask(dedent(program)) == dict.fromkeys(CLONE, ["EPERM"] * 4)


def test_clone3_and_clone_parent(box: SandboxClient) -> None:
    """clone3's flags lie in memory where no filter sees them, so the call is not there at all."""
    program = """
        import struct
        answers = []
        for flags in (0, 0x10000000, 0x10000000 | 0x20000):
            answer = call(435, struct.pack("=11Q", flags, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0), 88)
            if answer == "0": os._exit(99)
            answers.append(answer)
        answer = call(56, 0x8000 | 17, 0, 0, 0, 0)
        if answer == "0": os._exit(99)
        report([*answers, answer])
    """
    assert box.ask(dedent(program)) == ["ENOSYS"] * 3 + ["EPERM"]


def test_setns(box: SandboxClient) -> None:
    program = """
        kinds = ("user", "mnt", "net", "pid", "ipc", "uts", "cgroup", "time")
        answers = [call(308, os.open(f"/proc/self/ns/{kind}", os.O_RDONLY), 0) for kind in kinds]
        report([*answers, call(308, os.pidfd_open(1), 0x10000000), call(308, os.pidfd_open(1), 0x20000)])
    """
    assert set(box.ask(dedent(program))) == {"EPERM"}


def test_namespace_programs(box: SandboxClient) -> None:
    """The usual tools, as a model would call them."""
    program = """
        import subprocess
        commands = (["unshare", "-Ur", "id", "-u"], ["unshare", "-m", "true"], ["nsenter", "-t", "1", "-m", "true"],
                    ["unshare", "--user", "--map-root-user", "--net", "true"])
        report([subprocess.run(line, capture_output=True).returncode != 0 for line in commands])
    """
    assert all(box.ask(dedent(program)))


def test_mounts(box: SandboxClient) -> None:
    program = "report({" + ", ".join(f"{name!r}: {attack}" for name, attack in MOUNTS.items()) + "})"
    answers: dict[str, str] = box.ask(program)
    assert {name: answer for name, answer in answers.items() if answer not in ("EPERM", "ENOSYS")} == {}


def test_kernel_interfaces(box: SandboxClient) -> None:
    program = "report({" + ", ".join(f"{name!r}: {attack}" for name, attack in KERNEL.items()) + "})"
    answers: dict[str, str] = box.ask(program)
    allowed = {"EPERM", "ENOSYS"}
    wrong = {name: answer for name, answer in answers.items() if answer not in allowed}
    assert wrong == {"prctl seccomp": "EINVAL"}


def test_every_unknown_number(box: SandboxClient) -> None:
    """Past the newest call this kernel knows, and at the edges of the word."""
    program = """
        numbers = [*range(470, 512), *range(548, 1100), 0x3FFFFFFF, 0x7FFFFFF]
        report(sorted({call(number, 0, 0, 0, 0, 0, 0) for number in numbers}))
    """
    assert box.ask(dedent(program)) == ["ENOSYS"]


FOREIGN = {
    "x32 getpid": "call(0x40000000 + 39)",
    "x32 mount": "call(0x40000000 + 165, b'x', b'/tmp', b'tmpfs', 0, None)",
    "x32 ptrace": "call(0x40000000 + 521, 0, 0, 0, 0)",
    "x32 of 512": "call(0x40000000 + 512, 0, 0, 0)",
    "int 0x80 getpid": "i386(20)",
    "int 0x80 mount": "i386(21)",
    "int 0x80 ptrace": "i386(26)",
    "int 0x80 socketcall": "i386(102)",
}
I386 = """
    import mmap
    def i386(number):
        page = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 7)  # readable, writable, executable
        # push rbx; mov eax, number; xor ebx, ebx; xor ecx, ecx; xor edx, edx; int 0x80; pop rbx; ret
        page.write(b"\\x53\\xb8" + number.to_bytes(4, "little") + bytes.fromhex("31db31c931d2cd805bc3"))
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        return ctypes.CFUNCTYPE(ctypes.c_int)(address)()
"""


@pytest.mark.parametrize("attack", FOREIGN.values(), ids=FOREIGN)
def test_foreign_tables(box: SandboxClient, attack: str) -> None:
    """32-bit and x32 calls have other numbers: whoever makes one is killed, with SIGSYS and nothing else."""
    program = dedent(I386) + dedent(f"""
        import signal
        child = os.fork()
        if child == 0:
            {attack}
            os._exit(77)
        report(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """)
    assert box.ask(program) == -31


def test_a_foreign_call_by_the_interpreter_ends_the_sandbox(host: Host, box: SandboxClient) -> None:
    outcome = box.run("call(0x40000000 + 39)")
    assert (outcome.end.status, outcome.end.exit_code, outcome.end.state_kept) == ("lost", -1, False)
    assert "SIGSYS" in outcome.end.reason
    host.check()


HIGH_BITS = {
    # argument | 1 << 32 still means the argument to the kernel, which takes an int
    "prctl SET_DUMPABLE": ("call(157, 4 | {high}, 0, 0, 0, 0)", {"EPERM"}),
    "prctl SET_SECCOMP": ("call(157, 22 | {high}, 2, bytes(16), 0, 0)", {"EINVAL"}),
    "prctl SET_MM": ("call(157, 35 | {high}, 1, 0, 0, 0)", {"EPERM"}),
    "fcntl F_SETLEASE": ("call(72, os.open('/mnt/data/f', 66), 1024 | {high}, 1)", {"EINVAL"}),
    "fcntl F_NOTIFY": ("call(72, os.open('/mnt/data', 0), 1026 | {high}, 1)", {"EINVAL"}),
    "fcntl F_SETOWN": ("call(72, 0, 8 | {high}, 1)", {"EINVAL"}),
    "ioctl TIOCSTI": ("call(16, 0, 0x5412 | {high}, b'x')", {"EPERM"}),
    "ioctl unknown": ("call(16, 0, 0x4B4B | {high}, 0)", {"ENOSYS"}),
    "socket netlink": ("call(41, 16 | {high}, 3, 0)", {"EAFNOSUPPORT"}),
    "socket packet": ("call(41, 17 | {high}, 3, 0)", {"EAFNOSUPPORT"}),
    "socket raw": ("call(41, 2 | {high}, 3 | {high}, 1)", {"EPERM"}),
    "socket vsock": ("call(41, 40 | {high}, 1, 0)", {"EAFNOSUPPORT"}),
    "socket beyond": ("call(41, 99 | {high}, 1, 0)", {"ENOSYS", "EAFNOSUPPORT"}),
    "setsockopt ATTACH_FILTER": (
        "call(54, socket.socketpair()[0].detach(), 1 | {high}, 26 | {high}, bytes(16), 16)",
        {"ENOSYS", "EPERM"},
    ),
    "mknod device": ("call(133, b'/mnt/data/n', 0x2000 | 0o600 | {high}, 0x103)", {"EPERM"}),
    "personality": ("call(135, 0x0040000 | {high})", {"ENOSYS"}),
    "mmap hugetlb": ("call(9, 0, 1 << 21, 3, 0x40022 | {high}, -1, 0)", {"ENOMEM"}),
    "memfd hugetlb": ("call(319, b'x', 4 | {high})", {"EINVAL"}),
    "shmget hugetlb": ("call(29, 0, 1 << 21, 0o5600 | {high})", {"ENOMEM"}),
    "sched realtime": ("call(144, 0, 1 | {high}, b'\\1\\0\\0\\0')", {"EPERM"}),
    "madvise mergeable": ("call(28, 0, 4096, 12 | {high})", {"EINVAL"}),
    "madvise cold": ("call(28, 0, 4096, 20 | {high})", {"EINVAL"}),
    "madvise pageout": ("call(28, 0, 4096, 21 | {high})", {"EINVAL"}),
    "prctl SET_VMA": ("call(157, 0x53564d41 | {high}, 0, 0, 4096, b'x')", {"EINVAL"}),
}


@pytest.mark.parametrize("high", ["0", "1 << 32", "1 << 63", "0xffffffff << 32"])
def test_arguments_with_high_bits(box: SandboxClient, high: str) -> None:
    parts = [f"{name!r}: {attack.format(high=f'({high})')}" for name, (attack, _) in HIGH_BITS.items()]
    answers: dict[str, str] = box.ask("report({" + ", ".join(parts) + "})")
    wrong = {name: answer for name, answer in answers.items() if answer not in HIGH_BITS[name][1]}
    assert wrong == {}
