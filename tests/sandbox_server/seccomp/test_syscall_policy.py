"""The committed seccomp programs match the policy."""

import errno
import hashlib
import itertools
import json
import random
import re
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.sandbox_server.inside.jail import seccomp_installer
from fumehood.sandbox_server.seccomp import load_program, syscall_policy
from tests.support.seccomp_programs import FOLDER, MACHINE, live, run_python_under_filter

ROOT = Path(__file__).parents[3]
MANIFEST = json.loads((FOLDER / "manifest.json").read_text())
NUMBERS: dict[str, dict[str, int]] = MANIFEST["numbers"]
NAMES = {machine: {number: name for name, number in table.items()} for machine, table in NUMBERS.items()}
EVERY = [(name, machine) for name in syscall_policy.POLICIES for machine in syscall_policy.AUDIT_ARCH]
every_program = pytest.mark.parametrize(("name", "machine"), EVERY)
SIX: tuple[int, ...] = (0,) * 6
HIGH = syscall_policy.WORD << 32

# Calls the policy does not name at all, with their numbers on x86_64 and aarch64.
_UNNAMED = """
    add_key:248:217 request_key:249:218 keyctl:250:219 io_setup:206:0 mq_open:240:180 msgget:68:186
    splice:275:76 tee:276:77 vmsplice:278:75 sync:162:81 syncfs:306:267 fanotify_init:300:262
    name_to_handle_at:303:264 open_by_handle_at:304:265 kcmp:312:272 seccomp:317:277 userfaultfd:323:282
    io_uring_setup:425:425 io_uring_enter:426:426 open_tree:428:428 move_mount:429:429 fsopen:430:430
    fsconfig:431:431 clone3:435:435 pidfd_getfd:438:438 process_madvise:440:440 mount_setattr:442:442
    memfd_secret:447:447 cachestat:451:451 statmount:457:457 listmount:458:458 lsm_get_self_attr:459:459
    open_tree_attr:467:467
"""
UNNAMED = {name: (int(x86), int(arm)) for name, x86, arm in (row.split(":") for row in _UNNAMED.split())}


# ------------------------------------------------------------------------------- the programs, interpreted


class Program:
    """A classic BPF machine, as much of it as seccomp programs use."""

    def __init__(self, code: bytes) -> None:
        self.code = list(struct.iter_unpack("<HBBI", code))

    def run(self, arch: int, number: int, args: Sequence[int]) -> int:
        data = struct.pack("<IIQ6Q", number & syscall_policy.WORD, arch, 0, *args)
        at = accumulator = 0
        while True:
            code, yes, no, k = self.code[at]
            at += 1
            match code:
                case 0x20:  # ld [k]
                    (accumulator,) = struct.unpack_from("<I", data, k)
                case 0x54:  # and #k
                    accumulator &= k
                case 0x05:  # ja
                    at += k
                case 0x15:  # jeq
                    at += yes if accumulator == k else no
                case 0x25:  # jgt
                    at += yes if accumulator > k else no
                case 0x35:  # jge
                    at += yes if accumulator >= k else no
                case 0x45:  # jset
                    at += yes if accumulator & k else no
                case 0x06:  # ret #k
                    return k
                case _:
                    raise AssertionError(f"instruction {code:#x}")


PROGRAMS = {(name, machine): Program(load_program(name, machine)) for name, machine in EVERY}


def run(name: str, machine: str, number: int, args: Sequence[int]) -> int:
    return PROGRAMS[name, machine].run(syscall_policy.AUDIT_ARCH[machine], number, args)


def expected(name: str, machine: str, number: int, args: Sequence[int]) -> int:
    return syscall_policy.evaluate(syscall_policy.POLICIES[name], NAMES[machine].get(number), args)


def near(values: set[int]) -> set[int]:
    """Each value, its neighbours by one bit, and itself with bits set that the kernel does not look at."""
    found = {0, syscall_policy.WORD, 1 << 63}
    for value in values:
        found |= {value, value | 1 << 32, value | HIGH, value << 32, value ^ syscall_policy.WORD}
        found |= {value ^ 1 << bit for bit in (0, 1, 6, 11, 18, 30, 31)}
    return found


def probes(rules: Sequence[syscall_policy.SyscallRule]) -> Iterator[tuple[int, ...]]:
    """Arguments around every rule of a call."""
    values: dict[int, set[int]] = {}
    for test in itertools.chain.from_iterable(rule.tests for rule in rules):
        values.setdefault(test.index, set()).add(test.value)
    where = sorted(values)
    if len(where) == 1:
        choices = [near(values[where[0]])]
    else:
        choices = [{other for v in values[i] for other in (v, v ^ 1, v | HIGH)} for i in where]
    for combination in itertools.product(*choices):
        args = list(SIX)
        for index, value in zip(where, combination, strict=True):
            args[index] = value
        yield tuple(args)


@every_program
def test_every_number_is_decided_as_the_policy_says(name: str, machine: str) -> None:
    noise = random.Random(1)
    for number in range(1024):
        for args in (SIX, (2**64 - 1,) * 6, tuple(noise.getrandbits(64) for _ in range(6))):
            call = NAMES[machine].get(number, number)
            assert run(name, machine, number, args) == expected(name, machine, number, args), call


@every_program
def test_every_rule_holds_at_its_edges(name: str, machine: str) -> None:
    for call, rules in syscall_policy.POLICIES[name].by_argument.items():
        if (number := NUMBERS[machine].get(call)) is None:
            continue
        for args in probes(rules):
            assert run(name, machine, number, args) == expected(name, machine, number, args), (call, args)


@given(
    program=st.sampled_from(EVERY),
    call=st.sampled_from(sorted(syscall_policy.NAMESPACES.by_argument)),
    args=st.tuples(*[st.one_of(st.integers(0, 64), st.integers(0, 2**64 - 1))] * 6),
)
def test_any_arguments_are_decided_as_the_policy_says(
    program: tuple[str, str], call: str, args: tuple[int, ...]
) -> None:
    number = NUMBERS[program[1]].get(call)
    if number is not None:
        assert run(*program, number, args) == expected(*program, number, args)


@every_program
def test_other_architectures_are_killed(name: str, machine: str) -> None:
    others = {0x40000003, 0x40000028, 0, 0xC000003E, 0xC00000B7, 0xC00000F3} - {
        syscall_policy.AUDIT_ARCH[machine]
    }
    for arch, number in itertools.product(others, (0, 1, 39, 59, 500)):
        assert PROGRAMS[name, machine].run(arch, number, SIX) == syscall_policy.KILL_PROCESS


@every_program
def test_x32_numbers_are_killed(name: str, machine: str) -> None:
    for number in (*range(600), 0x3FFFFFFE):
        assert run(name, machine, syscall_policy.X32_BIT | number, SIX) == syscall_policy.KILL_PROCESS
    assert run(name, machine, -1, SIX) == syscall_policy.DEFAULT  # what a tracer sets to skip a call


@every_program
def test_what_must_never_pass_does_not(name: str, machine: str) -> None:
    """Said again without the policy, so that a slip in its data shows."""
    for call, numbers in UNNAMED.items():
        assert run(name, machine, numbers[machine == "aarch64"], SIX) == syscall_policy.errno_action(
            errno.ENOSYS
        ), call
    for call in ("unshare", "setns", "mount", "pivot_root", "chroot", "ptrace", "process_vm_readv", "bpf"):
        assert run(name, machine, NUMBERS[machine][call], SIX) == syscall_policy.errno_action(errno.EPERM), (
            call
        )
    forbidden: list[tuple[str, int, int]] = [
        *[("clone", 0, 1 << bit | 17) for bit in (15, 17, 25, 26, 27, 28, 29, 30)],
        *[("ioctl", 1, request) for request in (0x5412, 0x541C, 0x5423, 0x40049409, 0x8933, 0x5452)],
        *[("prctl", 0, option) for option in (4, 22, 35, 62, 0x59616D61)],
        *[("fcntl", 1, command) for command in (8, 10, 1024, 1026)],
        *[("socket", 0, family) for family in (0, *range(3, 10), *range(11, 64))],
        ("mmap", 3, 0x40022),
        ("memfd_create", 1, 4),
        ("madvise", 2, 12),
        ("personality", 0, 0x40000),
        ("personality", 0, 0x400000),
        ("mknodat", 2, 0o020666),
        ("mknodat", 2, 0o060666),
        ("sched_setscheduler", 1, 1),
        ("sched_setscheduler", 1, 0x40000002),
    ]
    for (call, index, value), high in itertools.product(forbidden, (0, 1 << 32, 1 << 63, HIGH)):
        args = list(SIX)
        args[index] = value | high
        assert run(name, machine, NUMBERS[machine][call], args) != syscall_policy.ALLOW, (
            call,
            hex(value),
            hex(high),
        )
    for family, kind, protocol in ((2, 3, 0), (2, 1, 132), (2, 2, 1), (10, 5, 132), (2, 10, 0), (16, 3, 0)):
        assert (
            run(name, machine, NUMBERS[machine]["socket"], (family, kind, protocol, 0, 0, 0))
            != syscall_policy.ALLOW
        )
    for level, option in ((1, 26), (1, 50), (1, 51), (1, 60), (6, 31), (0, 64), (41, 64), (17, 100)):
        args = (3, level | 1 << 32, option | 1 << 32, 0, 0, 0)
        assert run(name, machine, NUMBERS[machine]["setsockopt"], args) != syscall_policy.ALLOW


@pytest.mark.parametrize("machine", syscall_policy.AUDIT_ARCH)
def test_degraded_makes_no_socket_that_can_be_given_an_address(machine: str) -> None:
    for call in ("socket", "bind", "connect", "listen", "accept4"):
        assert run(
            "degraded", machine, NUMBERS[machine][call], (1, 1, 0, 0, 0, 0)
        ) == syscall_policy.errno_action(errno.EACCES)
    for kind, flags in itertools.product((2, 3, 4, 10), (0, 0o2000000, 0o4000)):
        args = (1, kind | flags, 0, 0, 0, 0)
        assert run("degraded", machine, NUMBERS[machine]["socketpair"], args) != syscall_policy.ALLOW


@pytest.mark.parametrize(
    ("machine", "header", "pattern"),
    [
        ("x86_64", "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", r"#define __NR_(\w+) (\d+)"),
        ("aarch64", "/usr/include/asm-generic/unistd.h", r"#define __NR(?:3264)?_(\w+) (\d+)"),
    ],
)
def test_numbers_agree_with_the_kernel_headers(machine: str, header: str, pattern: str) -> None:
    if not Path(header).is_file():
        pytest.skip(f"no {header}")
    table = {name: int(number) for name, number in re.findall(pattern, Path(header).read_text())}
    renamed = {"fstatat": "newfstatat"}  # only the generic header says it so
    table |= {renamed[name]: number for name, number in table.items() if name in renamed}
    compared = {name: number for name, number in NUMBERS[machine].items() if name in table}
    assert compared == {name: table[name] for name in compared}
    assert len(compared) >= len(NUMBERS[machine]) - len(syscall_policy.NUMBERS)


# ------------------------------------------------------------------------------- the files


def test_blobs_are_those_of_the_manifest() -> None:
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in FOLDER.glob("*.bpf")}
    assert found == {name: blob["sha256"] for name, blob in MANIFEST["blobs"].items()}
    assert {f"{name}.{machine}.bpf" for name, machine in EVERY} == set(found)


def test_blobs_are_what_libseccomp_makes_of_the_policy() -> None:
    command = [sys.executable, str(ROOT / "tools/build_seccomp.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode == 3:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_mode_has_a_policy() -> None:
    assert set(syscall_policy.POLICY_OF_MODE) == {"namespaces", "pod", "unsafe-degraded"}
    others = {syscall_policy.HELPER.name, syscall_policy.POD_NETWORK.name}
    assert {*syscall_policy.POLICY_OF_MODE.values()} | others == set(syscall_policy.POLICIES)


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"no seccomp program 'namespaces' for the architecture 'riscv64'"):
        load_program("namespaces", "riscv64")


def test_a_damaged_program_is_refused() -> None:
    for size in (0, 7, 9, 8 * 4097):
        with pytest.raises(OSError, match="seccomp program of"):
            seccomp_installer.install(bytes(size))


# ------------------------------------------------------------------------------- the programs, installed


@live
def test_install_needs_no_new_privs(tmp_path: Path) -> None:
    done = run_python_under_filter("seccomp_installer.install(program)", "namespaces", cwd=tmp_path)
    assert "PermissionError: [Errno 13] seccomp without no_new_privs" in done.stderr


@live
def test_install_covers_threads_that_run_already(tmp_path: Path) -> None:
    code = """
import threading
go, seen = threading.Event(), []
thread = threading.Thread(target=lambda: (go.wait(), seen.append(open("/proc/thread-self/status").read())))
thread.start()
install()
go.set(); thread.join()
print("Seccomp:\\t2" in seen[0])
"""
    done = run_python_under_filter(code, "namespaces", cwd=tmp_path)
    assert done.stdout == "True\n", done.stderr


CALLS = """
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
libc.syscall.argtypes = [ctypes.c_long] + [ctypes.c_ulong] * 6
install()
found = []
for number, *args in json.loads(sys.argv[2]):
    ctypes.set_errno(0)
    result = libc.syscall(number, *args)
    found.append(ctypes.get_errno() if result == -1 else 0)
print(json.dumps(found))
"""


def refusals(name: str) -> list[tuple[str, tuple[int, ...], int]]:
    """(call, arguments, errno); harmless if one should get through after all."""
    eperm = sorted(set(syscall_policy.REFUSED.split()) - {"reboot", "vhangup", "iopl", "ioperm"})
    found: list[tuple[str, tuple[int, ...], int]] = [(call, SIX, errno.ENOSYS) for call in UNNAMED]
    found += [(call, SIX, errno.EPERM) for call in eperm]
    found += [
        ("clone", (bit | 17 | high, 0), errno.EPERM)
        for bit in syscall_policy.CLONE_NEW.values()
        for high in (0, 2**32)
    ]
    found += [
        ("ioctl", (0, 0x5412 | 1 << 32, 0), errno.EPERM),
        ("ioctl", (0, 0x40049409, 0), errno.EOPNOTSUPP),
        ("ioctl", (0, 0x8912, 0), errno.ENOTTY),
        ("fcntl", (0, 1024, 0), errno.EINVAL),
        ("fcntl", (0, 1026, 0), errno.EINVAL),
        ("prctl", (4, 0), errno.EPERM),
        ("prctl", (22, 2), errno.EINVAL),
        ("prctl", (0x59616D61, 1), errno.EINVAL),
        ("prctl", (35, 1), errno.EPERM),
        ("mmap", (0, 1 << 21, 3, 0x40022 | 1 << 40, 2**64 - 1, 0), errno.ENOMEM),
        ("memfd_create", (0, 4), errno.EINVAL),
        ("madvise", (0, 0, 12), errno.EINVAL),
        ("personality", (0x40000,), errno.ENOSYS),
        ("mknodat", (0, 0, 0o020666, 0x103), errno.EPERM),
        ("sched_setscheduler", (0, 1, 0), errno.EPERM),
        ("setrlimit", (4, 0), errno.EPERM),
        ("prlimit64", (0, 4, 1 << 32, 0), errno.EPERM),
        ("inotify_init1", (0,), errno.ENOSYS),
    ]
    if name != "namespaces":
        found += [("prlimit64", (1, 7, 0, 0), errno.ENOSYS), ("setpriority", (0, 1, 0), errno.ENOSYS)]
        found += [
            ("sched_setaffinity", (1, 0, 0), errno.ENOSYS),
            ("sched_setscheduler", (1, 5, 0), errno.ENOSYS),
        ]
    if name not in ("degraded", "helper"):
        found += [("socket", (family, 3, 0), errno.EAFNOSUPPORT) for family in (16, 17, 38, 40)]
        if name == "pod":  # no network at all
            found += [("socket", (family, kind, 0), errno.EACCES) for family in (2, 10) for kind in (1, 2, 3)]
        else:
            found += [("socket", (2, 3, 6), errno.EPERM), ("socket", (2, 1, 132), errno.EPROTONOSUPPORT)]
        found += [("setsockopt", (0, 1, 26, 0, 0), errno.ENOSYS), ("shmget", (0, 4096, 0xA00), errno.ENOMEM)]
    else:
        found += [("socket", (family, 1, 0), errno.EACCES) for family in (1, 2, 10, 16)]
        found += [("connect", SIX, errno.EACCES), ("shmget", (0, 4096, 0o1600), errno.ENOSYS)]
        found += [("socketpair", (1, 2, 0, 0), errno.ENOSYS)]
    return found


@live
@pytest.mark.parametrize("name", syscall_policy.POLICIES)
def test_forbidden_calls_fail_with_the_errno_promised(name: str, tmp_path: Path) -> None:
    wanted = refusals(name)
    unnamed = {call: numbers[MACHINE == "aarch64"] for call, numbers in UNNAMED.items()}
    wanted = [entry for entry in wanted if entry[0] in unnamed or entry[0] in NUMBERS[MACHINE]]
    numbered = [
        (unnamed.get(call) or NUMBERS[MACHINE].get(call, 0), *args, *[0] * (6 - len(args)))
        for call, args, _ in wanted
    ]
    done = run_python_under_filter(CALLS, name, json.dumps(numbered), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = [
        (call, args, errno.errorcode.get(got, got))
        for (call, args, _), got in zip(wanted, json.loads(done.stdout), strict=True)
    ]
    assert found == [(call, args, errno.errorcode[number]) for call, args, number in wanted]


@live
@pytest.mark.skipif(MACHINE != "x86_64", reason="x86 only")
@pytest.mark.parametrize(
    "code",
    [
        "ctypes.CDLL(None).syscall(0x40000000 | 39)",
        # mov eax, 20 (i386 getpid); int 0x80; ret
        "page.write(bytes.fromhex('b814000000cd80c3')); ctypes.CFUNCTYPE(ctypes.c_int)(start)()",
    ],
    ids=["x32", "i386"],
)
def test_foreign_calls_kill(code: str, tmp_path: Path) -> None:
    before = """
page = mmap.mmap(-1, 4096, prot=7); start = ctypes.addressof(ctypes.c_char.from_buffer(page))
install()
"""
    done = run_python_under_filter(before + code + "; print('alive')", "namespaces", cwd=tmp_path)
    # a kernel without 32-bit emulation faults before the filter is asked
    assert done.returncode in (-signal.SIGSYS, -signal.SIGSEGV), done.stdout
