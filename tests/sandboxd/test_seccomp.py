"""The committed seccomp programs do what the policy says, and real work runs under them."""

import errno
import hashlib
import importlib.util
import itertools
import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.sandboxd.inside import filters
from fumehood.sandboxd.seccomp import load_blob, policy

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "src/fumehood/sandboxd/seccomp"
MANIFEST = json.loads((FOLDER / "manifest.json").read_text())
NUMBERS: dict[str, dict[str, int]] = MANIFEST["numbers"]
NAMES = {machine: {number: name for name, number in table.items()} for machine, table in NUMBERS.items()}
MACHINE = os.uname().machine
EVERY = [(name, machine) for name in policy.POLICIES for machine in policy.AUDIT_ARCH]
every_program = pytest.mark.parametrize(("name", "machine"), EVERY)
SIX: tuple[int, ...] = (0,) * 6
HIGH = policy.WORD << 32

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
        data = struct.pack("<IIQ6Q", number & policy.WORD, arch, 0, *args)
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


PROGRAMS = {(name, machine): Program(load_blob(name, machine)) for name, machine in EVERY}


def run(name: str, machine: str, number: int, args: Sequence[int]) -> int:
    return PROGRAMS[name, machine].run(policy.AUDIT_ARCH[machine], number, args)


def expected(name: str, machine: str, number: int, args: Sequence[int]) -> int:
    return policy.verdict(policy.POLICIES[name], NAMES[machine].get(number), args)


def near(values: set[int]) -> set[int]:
    """Each value, its neighbours by one bit, and itself with bits set that the kernel does not look at."""
    found = {0, policy.WORD, 1 << 63}
    for value in values:
        found |= {value, value | 1 << 32, value | HIGH, value << 32, value ^ policy.WORD}
        found |= {value ^ 1 << bit for bit in (0, 1, 6, 11, 18, 30, 31)}
    return found


def probes(rules: Sequence[policy.Rule]) -> Iterator[tuple[int, ...]]:
    """Arguments around every rule of a call."""
    values: dict[int, set[int]] = {}
    for test in itertools.chain.from_iterable(rule.when for rule in rules):
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
    for call, rules in policy.POLICIES[name].by_argument.items():
        if (number := NUMBERS[machine].get(call)) is None:
            continue
        for args in probes(rules):
            assert run(name, machine, number, args) == expected(name, machine, number, args), (call, args)


@given(
    program=st.sampled_from(EVERY),
    call=st.sampled_from(sorted(policy.NAMESPACES.by_argument)),
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
    others = {0x40000003, 0x40000028, 0, 0xC000003E, 0xC00000B7, 0xC00000F3} - {policy.AUDIT_ARCH[machine]}
    for arch, number in itertools.product(others, (0, 1, 39, 59, 500)):
        assert PROGRAMS[name, machine].run(arch, number, SIX) == policy.KILL_PROCESS


@every_program
def test_x32_numbers_are_killed(name: str, machine: str) -> None:
    for number in (*range(600), 0x3FFFFFFE):
        assert run(name, machine, policy.X32_BIT | number, SIX) == policy.KILL_PROCESS
    assert run(name, machine, -1, SIX) == policy.DEFAULT  # what a tracer sets to skip a call


@every_program
def test_what_must_never_pass_does_not(name: str, machine: str) -> None:
    """Said again without the policy, so that a slip in its data shows."""
    for call, numbers in UNNAMED.items():
        assert run(name, machine, numbers[machine == "aarch64"], SIX) == policy.fail(errno.ENOSYS), call
    for call in ("unshare", "setns", "mount", "pivot_root", "chroot", "ptrace", "process_vm_readv", "bpf"):
        assert run(name, machine, NUMBERS[machine][call], SIX) == policy.fail(errno.EPERM), call
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
        assert run(name, machine, NUMBERS[machine][call], args) != policy.ALLOW, (call, hex(value), hex(high))
    for family, kind, protocol in ((2, 3, 0), (2, 1, 132), (2, 2, 1), (10, 5, 132), (2, 10, 0), (16, 3, 0)):
        assert (
            run(name, machine, NUMBERS[machine]["socket"], (family, kind, protocol, 0, 0, 0)) != policy.ALLOW
        )
    for level, option in ((1, 26), (1, 50), (1, 51), (1, 60), (6, 31), (0, 64), (41, 64), (17, 100)):
        args = (3, level | 1 << 32, option | 1 << 32, 0, 0, 0)
        assert run(name, machine, NUMBERS[machine]["setsockopt"], args) != policy.ALLOW


@pytest.mark.parametrize("machine", policy.AUDIT_ARCH)
def test_degraded_makes_no_socket_that_can_be_given_an_address(machine: str) -> None:
    for call in ("socket", "bind", "connect", "listen", "accept4"):
        assert run("degraded", machine, NUMBERS[machine][call], (1, 1, 0, 0, 0, 0)) == policy.fail(
            errno.EACCES
        )
    for kind, flags in itertools.product((2, 3, 4, 10), (0, 0o2000000, 0o4000)):
        args = (1, kind | flags, 0, 0, 0, 0)
        assert run("degraded", machine, NUMBERS[machine]["socketpair"], args) != policy.ALLOW


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
    assert len(compared) >= len(NUMBERS[machine]) - len(policy.NUMBERS)


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
    assert set(policy.POLICY_OF_MODE) == {"namespaces", "pod", "unsafe-degraded"}
    assert set(policy.POLICY_OF_MODE.values()) == set(policy.POLICIES)


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"no seccomp program 'namespaces' for the architecture 'riscv64'"):
        load_blob("namespaces", "riscv64")


def test_a_damaged_program_is_refused() -> None:
    for size in (0, 7, 9, 8 * 4097):
        with pytest.raises(OSError, match="seccomp program of"):
            filters.install(bytes(size))


# ------------------------------------------------------------------------------- the programs, installed

live = pytest.mark.skipif(MACHINE not in policy.AUDIT_ARCH, reason=f"no program for {MACHINE}")

# Loads filters.py by its path, as the jail does, and so shows that it needs nothing of the package.
PROLOGUE = f"""
import ctypes, importlib.util, json, mmap, os, sys
spec = importlib.util.spec_from_file_location("filters", {filters.__file__!r})
filters = importlib.util.module_from_spec(spec)
spec.loader.exec_module(filters)
program = open(sys.argv[1], "rb").read()
"""
UNDER = (
    PROLOGUE
    + "filters.forbid_new_privileges(); filters.install(program); os.execv(sys.argv[2], sys.argv[2:])"
)


def python(code: str, name: str, *args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs `code` after the prologue, in an interpreter of its own."""
    blob = str(FOLDER / f"{name}.{MACHINE}.bpf")
    command = [sys.executable, "-c", PROLOGUE + code, blob, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=cwd)


def under(name: str, *command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs a program with the filter on."""
    blob = str(FOLDER / f"{name}.{MACHINE}.bpf")
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(cwd),
        "TMPDIR": str(cwd),
        "LANG": "C.UTF-8",
        "MPLBACKEND": "Agg",
    }
    whole = [sys.executable, "-c", UNDER, blob, *command]
    return subprocess.run(whole, capture_output=True, text=True, timeout=300, cwd=cwd, env=env)


@live
def test_install_needs_no_new_privs(tmp_path: Path) -> None:
    done = python("filters.install(program)", "namespaces", cwd=tmp_path)
    assert "PermissionError: [Errno 13] seccomp without no_new_privs" in done.stderr


@live
def test_install_covers_threads_that_run_already(tmp_path: Path) -> None:
    code = """
import threading
go, seen = threading.Event(), []
thread = threading.Thread(target=lambda: (go.wait(), seen.append(open("/proc/thread-self/status").read())))
thread.start()
filters.forbid_new_privileges(); filters.install(program)
go.set(); thread.join()
print("Seccomp:\\t2" in seen[0])
"""
    done = python(code, "namespaces", cwd=tmp_path)
    assert done.stdout == "True\n", done.stderr


CALLS = """
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
libc.syscall.argtypes = [ctypes.c_long] + [ctypes.c_ulong] * 6
filters.forbid_new_privileges(); filters.install(program)
found = []
for number, *args in json.loads(sys.argv[2]):
    ctypes.set_errno(0)
    result = libc.syscall(number, *args)
    found.append(ctypes.get_errno() if result == -1 else 0)
print(json.dumps(found))
"""


def refusals(name: str) -> list[tuple[str, tuple[int, ...], int]]:
    """(call, arguments, errno); harmless if one should get through after all."""
    eperm = sorted(set(policy.REFUSED.split()) - {"reboot", "vhangup", "iopl", "ioperm"})
    found: list[tuple[str, tuple[int, ...], int]] = [(call, SIX, errno.ENOSYS) for call in UNNAMED]
    found += [(call, SIX, errno.EPERM) for call in eperm]
    found += [
        ("clone", (bit | 17 | high, 0), errno.EPERM)
        for bit in policy.CLONE_NEW.values()
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
    if name != "degraded":
        found += [("socket", (family, 3, 0), errno.EAFNOSUPPORT) for family in (16, 17, 38, 40)]
        found += [("socket", (2, 3, 6), errno.EPERM), ("socket", (2, 1, 132), errno.EPROTONOSUPPORT)]
        found += [("setsockopt", (0, 1, 26, 0, 0), errno.ENOSYS), ("shmget", (0, 4096, 0xA00), errno.ENOMEM)]
    else:
        found += [("socket", (family, 1, 0), errno.EACCES) for family in (1, 2, 10, 16)]
        found += [("connect", SIX, errno.EACCES), ("shmget", (0, 4096, 0o1600), errno.ENOSYS)]
        found += [("socketpair", (1, 2, 0, 0), errno.ENOSYS)]
    return found


@live
@pytest.mark.parametrize("name", policy.POLICIES)
def test_forbidden_calls_fail_with_the_errno_promised(name: str, tmp_path: Path) -> None:
    wanted = refusals(name)
    unnamed = {call: numbers[MACHINE == "aarch64"] for call, numbers in UNNAMED.items()}
    wanted = [entry for entry in wanted if entry[0] in unnamed or entry[0] in NUMBERS[MACHINE]]
    numbered = [
        (unnamed.get(call) or NUMBERS[MACHINE].get(call, 0), *args, *[0] * (6 - len(args)))
        for call, args, _ in wanted
    ]
    done = python(CALLS, name, json.dumps(numbered), cwd=tmp_path)
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
filters.forbid_new_privileges(); filters.install(program)
"""
    done = python(before + code + "; print('alive')", "namespaces", cwd=tmp_path)
    # a kernel without 32-bit emulation faults before the filter is asked
    assert done.returncode in (-signal.SIGSYS, -signal.SIGSEGV), done.stdout


# ------------------------------------------------------------------------------- real work

MP = """
import multiprocessing as mp
from concurrent.futures import ProcessPoolExecutor
def square(x): return x * x
if __name__ == "__main__":
    with ProcessPoolExecutor(2, mp_context=mp.get_context("{method}")) as pool:
        assert list(pool.map(square, range(20))) == [x * x for x in range(20)]
    lock, value = mp.Lock(), mp.Value("i", 3)
    with lock: assert value.value == 3
"""

WORK = {
    "fork": MP.format(method="fork"),
    "spawn": MP.format(method="spawn"),
    "forkserver": MP.format(method="forkserver"),
    "shared_memory": """
from multiprocessing.shared_memory import SharedMemory
block = SharedMemory(create=True, size=4096); block.buf[0] = 7; block.close(); block.unlink()
""",
    "threads": """
import threading, queue, time, concurrent.futures as f
with f.ThreadPoolExecutor(16) as pool: assert sum(pool.map(lambda x: x, range(1000))) == 499500
threading.stack_size(1 << 20); t = threading.Timer(0.01, lambda: None); t.start(); t.join()
""",
    "subprocess": """
import os, shutil, subprocess, sys
assert subprocess.run(["/bin/echo", "x"], capture_output=True, text=True).stdout == "x\\n"
assert subprocess.run("exit 3", shell=True, start_new_session=True, cwd="/").returncode == 3
assert os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)[1] == 0
try: subprocess.run(["sleep", "9"], timeout=0.05)
except subprocess.TimeoutExpired: pass
assert os.system("echo a | cat | grep -q a") == 0
fd = os.memfd_create("x", 0); os.write(fd, open("/bin/true", "rb").read())
assert subprocess.run([f"/proc/self/fd/{fd}"], pass_fds=[fd]).returncode == 0
""",
    "asyncio": """
import asyncio
async def main():
    p = await asyncio.create_subprocess_exec("cat", stdin=-1, stdout=-1)
    assert (await p.communicate(b"hi"))[0] == b"hi"
    assert await asyncio.to_thread(lambda: 5) == 5
    await asyncio.gather(*[asyncio.sleep(0.001) for _ in range(50)])
asyncio.run(main())
""",
    "loopback": """
import asyncio, http.server, socket, threading, urllib.request
from multiprocessing.connection import Client, Listener
async def main():
    async def echo(r, w): w.write(await r.readline()); await w.drain(); w.close()
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    r, w = await asyncio.open_connection(*server.sockets[0].getsockname())
    w.write(b"x\\n"); assert await r.readline() == b"x\\n"; w.close(); server.close()
asyncio.run(main())
web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
threading.Thread(target=web.serve_forever, daemon=True).start()
assert urllib.request.urlopen(f"http://127.0.0.1:{web.server_port}/").status == 200
with Listener(family="AF_UNIX") as listener:
    t = threading.Thread(target=lambda: Client(listener.address).send(1)); t.start()
    assert listener.accept().recv() == 1
try: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
except PermissionError: pass
else: raise AssertionError("UDP")
assert socket.getaddrinfo("localhost", 80)
""",
    "files": """
import fcntl, mmap, os, pathlib, select, shutil, tempfile, zipfile, tarfile
with tempfile.TemporaryDirectory() as d:
    a = pathlib.Path(d, "a"); a.write_bytes(b"x" * 100000); os.chmod(a, 0o640); os.utime(a, (1, 1))
    shutil.copy2(a, f"{d}/b"); shutil.copytree(d, f"{d}2"); shutil.move(f"{d}/b", f"{d}2/c")
    shutil.rmtree(f"{d}2")
    os.mkfifo(f"{d}/f"); os.symlink("a", f"{d}/l"); os.link(a, f"{d}/h"); os.stat(f"{d}/l")
    os.truncate(a, 9); os.posix_fallocate(os.open(a, os.O_RDWR), 0, 99)
    list(os.walk(d)); shutil.disk_usage(d)
    with open(a, "r+b") as f:
        fcntl.flock(f, fcntl.LOCK_EX); fcntl.lockf(f, fcntl.LOCK_EX)
        m = mmap.mmap(f.fileno(), 0); m[0] = 1; m.flush()
        m.madvise(mmap.MADV_DONTNEED); m.close(); os.fsync(f.fileno())
    with zipfile.ZipFile(f"{d}/z", "w") as z: z.write(a)
    with tarfile.open(f"{d}/t.gz", "w:gz") as t: t.add(a)
m = mmap.mmap(-1, 1 << 22); m.madvise(mmap.MADV_HUGEPAGE) if hasattr(mmap, "MADV_HUGEPAGE") else 0
r, w = os.pipe(); fcntl.fcntl(w, 1031, 1 << 16); select.epoll().register(r); os.isatty(r); os.sync()
""",
    "sqlite": """
import sqlite3
db = sqlite3.connect("w.db"); assert db.execute("pragma journal_mode=wal").fetchone()[0] == "wal"
db.execute("create table t(a)")
db.executemany("insert into t values(?)", [(i,) for i in range(999)]); db.commit()
assert sqlite3.connect("w.db").execute("select sum(a) from t").fetchone()[0] == 498501
""",
    "system": """
import ctypes, faulthandler, locale, os, platform, resource, signal, time, uuid, zoneinfo
resource.setrlimit(resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE))
os.sched_getaffinity(0); os.nice(1)
os.sched_setaffinity(0, os.sched_getaffinity(0)); os.setuid(os.getuid()); platform.platform(); os.cpu_count()
signal.signal(signal.SIGALRM, lambda *_: None); signal.setitimer(signal.ITIMER_REAL, 0.01); time.sleep(0.05)
signal.pidfd_send_signal(os.pidfd_open(os.getpid()), 0); uuid.uuid4(); os.urandom(8)
""",
    "numpy": """
import numpy as n
a = n.random.rand(500, 500); n.linalg.inv(a) @ a; n.fft.fft(a); n.save("a", a); n.load("a.npy", mmap_mode="r")
""",
    "pandas": """
import pandas as p
d = p.DataFrame({"a": [1, 1, 2], "b": [1., 2, 3]}); d.groupby("a").b.mean(); d.to_csv("x"); p.read_csv("x")
""",
    "matplotlib": """
import matplotlib.pyplot as p
p.plot([1, 3, 2]); p.title("t"); p.savefig("x.png"); p.savefig("x.pdf")
""",
    "pyarrow": """
import pyarrow as a, pyarrow.parquet as q
q.write_table(a.table({"a": list(range(9999))}), "x"); q.read_table("x", memory_map=True)
""",
    "sklearn": """
from sklearn.cluster import KMeans
from sklearn.ensemble import RandomForestClassifier
import numpy as n
x = n.random.rand(400, 5); KMeans(3, n_init=2).fit(x)
RandomForestClassifier(20, n_jobs=2).fit(x, x[:, 0] > .5)
""",
    "polars": """
import polars as p
d = p.DataFrame({"a": [1, 1, 2]}); d.lazy().group_by("a").len().collect()
d.write_parquet("x"); p.scan_parquet("x").collect()
""",
    "duckdb": """
import duckdb
db = duckdb.connect("x.db"); db.sql("create table t as select range a from range(99999)")
db.sql("select sum(a) from t").fetchall(); db.sql("copy t to 'x.parquet'")
""",
    "joblib": """
from joblib import Parallel, delayed
import math
for backend in ("loky", "threading", "multiprocessing"):
    assert Parallel(2, backend=backend)(delayed(math.sqrt)(i * i) for i in range(9)) == list(range(9))
""",
}
# They listen on sockets; spawn, loky and joblib's multiprocessing get by with pipes and pairs.
NEEDS_SOCKETS = {"forkserver", "loopback"}
LIBRARIES = {"numpy", "pandas", "matplotlib", "pyarrow", "sklearn", "polars", "duckdb", "joblib"}


# The filters differ little; libraries, which take long, are tried under each of them by the slow tests only.
TRIALS = [
    pytest.param(
        name,
        work,
        id=f"{name}-{work}",
        marks=[pytest.mark.slow] if name != "namespaces" and work in LIBRARIES else [],
    )
    for name in policy.POLICIES
    for work in WORK
]


@live
@pytest.mark.parametrize(("name", "work"), TRIALS)
def test_python_works(name: str, work: str, tmp_path: Path) -> None:
    if work in LIBRARIES and importlib.util.find_spec(work) is None:
        pytest.skip(f"{work} is not installed")
    script = tmp_path / "work.py"
    script.write_text(WORK[work])
    done = under(name, sys.executable, str(script), cwd=tmp_path)
    if name == "degraded" and work in NEEDS_SOCKETS:
        assert done.returncode == 1, done.stderr
    else:
        assert done.returncode == 0, done.stderr


SHELL = {
    "bash": """
for i in 1 2 3; do echo $i & done | sort > o; wait; cat <(echo x) <<< y; trap 'echo t' EXIT; [[ -s o ]]
""",
    "git": """
git init -q r; cd r; git config user.email a@b; git config user.name a; echo x > f; git add f
git commit -qm m; git log | grep -q m; git gc -q; git clone -q . ../s
""",
    "tar": """
mkdir d; echo x > d/f; ln -s f d/l; tar cf - d | gzip > t.gz; rm -r d; tar xzf t.gz; test -e d/l
cp -a d e; cp --reflink=auto d/f g; mv e h; rm -rf h; find . | xargs ls -la > /dev/null; sync
""",
}


@live
@pytest.mark.parametrize("tool", SHELL)
@pytest.mark.parametrize("name", policy.POLICIES)
def test_tools_work(name: str, tool: str, tmp_path: Path) -> None:
    if shutil.which(tool) is None or (bash := shutil.which("bash")) is None:
        pytest.skip(f"no {tool}")
    done = under(name, bash, "-euo", "pipefail", "-c", SHELL[tool], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
