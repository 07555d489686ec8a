"""Attacks beyond the list in the design: neighbours, helpers, accounting.

In one process with the supervisor, since several of them look at what it holds: descriptors, users, cgroups,
and for how long its event loop stands still.
"""

import asyncio
import contextlib
import ctypes
import math
import mmap
import os
import random
import resource
import time
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import pytest_asyncio

from fumehood.protocol.sandbox.sandbox_errors import (
    FileRefused,
    SandboxError,
    SandboxFileNotFound,
    SandboxServerAtCapacity,
)
from fumehood.sandbox_server.supervisor.in_process_sandbox import iter_events
from fumehood.sandbox_server.supervisor.sandbox_instance import SandboxInstance
from fumehood.sandbox_server.supervisor.supervisor import Supervisor
from tests.support.sandbox_runs import ExecutionOutcome, has_cgroups, run, settings, start
from tests.support.waiting import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="module")
needs_cgroups = pytest.mark.skipif(not has_cgroups(), reason="memory cannot be bounded as this user")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs uid 0")

FORGE = """
import os, socket, struct, sys
output = sys.__stdout__._output
channel = output._channel
def send(kind, body=b"", more=0, call=None):
    channel.send(struct.pack("!BB16s", kind, more, output._call if call is None else call) + body)
def send_whole(kind, body):
    for start in range(0, len(body), 65536):
        send(kind, body[start:start + 65536], int(start + 65536 < len(body)))
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def supervisor() -> AsyncIterator[Supervisor]:
    async with Supervisor(settings(preload=())) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(supervisor: Supervisor) -> AsyncIterator[SandboxInstance]:
    made = await supervisor.create()
    yield made
    await made.destroy()


@pytest_asyncio.fixture(loop_scope="module")
async def neighbour(supervisor: Supervisor) -> AsyncIterator[SandboxInstance]:
    """Another tenant, which must be itself afterwards."""
    made = await supervisor.create()
    await run(made, "mine = 'kept'")
    yield made
    assert (await run(made, "mine")).result == "'kept'"
    await made.destroy()


async def attack(box: SandboxInstance, program: str, timeout: float = 30) -> ExecutionOutcome:
    return await run(box, dedent(program), timeout=timeout)


async def longest_stall(work: Coroutine[Any, Any, ExecutionOutcome]) -> tuple[ExecutionOutcome, float]:
    """The outcome, and the longest time for which the event loop served nobody."""
    task = asyncio.ensure_future(work)
    worst = 0.0
    while not task.done():
        before = time.monotonic()
        await asyncio.sleep(0.005)
        worst = max(worst, time.monotonic() - before - 0.005)
    return await task, worst


def holdings(supervisor: Supervisor) -> tuple[int, int, list[int]]:
    """Open files, free users, and cgroups per hierarchy."""
    tree = supervisor._resource_allocator.cgroup_tree  # pyright: ignore[reportPrivateUsage]
    paths = [] if tree is None else tree.paths
    cgroups = [sum(child.is_dir() for child in path.iterdir()) for path in paths]
    return len(os.listdir("/proc/self/fd")), len(supervisor._resource_allocator._free_uids), cgroups  # pyright: ignore[reportPrivateUsage]


# ---- what one may learn of another -------------------------------------------------------------------------


async def test_the_supervisors_pidfd_is_worthless(sandbox: SandboxInstance) -> None:
    """SO_PEERPIDFD gives a handle of whoever made the channel; nothing can be done with it."""
    outcome = await attack(
        sandbox,
        FORGE
        + dedent(
            """
            import ctypes, errno, signal
            try: handle = struct.unpack("i", channel.getsockopt(1, 77, 4))[0]
            except OSError: handle = -1  # an older kernel
            answers = {struct.unpack("iii", channel.getsockopt(1, 17, 12))[0] and "pid"}
            for number in (0, signal.SIGWINCH, signal.SIGSTOP):
                try: answers.add(signal.pidfd_send_signal(handle, number) or "sent")
                except OSError as error: answers.add(errno.errorcode[error.errno])
            libc = ctypes.CDLL(None, use_errno=True)
            for call in (438, 440, 448, 308):  # pidfd_getfd, process_madvise, process_mrelease, setns
                result = libc.syscall(call, handle, 3, 0)
                answers.add("done" if result >= 0 else errno.errorcode[ctypes.get_errno()])
            print(*sorted(map(str, answers)))
            """
        ),
    )
    assert set(outcome.stdout.split()) <= {"0", "EINVAL", "EBADF", "EPERM", "ENOSYS"}, outcome


@needs_root  # to others the kernel does not tell what is cached
async def test_the_hosts_page_cache_stays(sandbox: SandboxInstance) -> None:
    """Advice to drop a shared file's pages would send every neighbour's imports to the disk."""
    shared = Path("/usr/bin/env").resolve()
    shared.read_bytes()
    before = _pages_cached(shared)
    program = f"""
        import os
        fd = os.open({str(shared)!r}, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        print("advised")
    """
    outcome = await attack(sandbox, program)
    assert outcome.stdout == "advised\n" or outcome.raised is not None
    assert _pages_cached(shared) >= before > 0


def _pages_cached(path: Path) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    with path.open("rb") as file:
        size = path.stat().st_size
        at = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    assert libc.mincore(ctypes.c_void_p(at), ctypes.c_size_t(size), pages) == 0
    libc.munmap(ctypes.c_void_p(at), ctypes.c_size_t(size))
    return sum(page & 1 for page in pages)


# ---- the channel -------------------------------------------------------------------------------------------


async def test_nested_rubbish_in_an_end(sandbox: SandboxInstance) -> None:
    """Deeper than a decoder goes, in a field that nobody asked for."""
    body = """b'{"exit_code":0,"interrupted":false,"x":' + b"[" * 60000"""
    outcome = await attack(sandbox, f"{FORGE}\nsend(23, {body})\nimport time; time.sleep(5)")
    assert (outcome.end.status, outcome.end.state_kept) == ("lost", False), outcome
    assert "malformed END" in outcome.end.reason


async def test_a_display_of_a_million_forms(sandbox: SandboxInstance, neighbour: SandboxInstance) -> None:
    """Twelve megabytes of keys cost seconds to decode; nobody else may wait for that."""
    body = """b"{" + b",".join(b'"%x":""' % number for number in range(1_100_000)) + b"}" """
    outcome, stall = await longest_stall(attack(sandbox, f"{FORGE}\nsend_whole(20, {body})", 60))
    assert outcome.end.status == "lost", outcome.end
    assert stall < 0.5
    assert (await run(neighbour, "1 + 1")).result == "2"


SHOW = """
    import time
    class Shown:
        def _repr_html_(self): return {content}
    display(Shown())
    time.sleep({seconds})
"""


async def test_output_of_calls_that_run_is_bounded_together() -> None:
    """It is the server's own memory, for as long as they run; one odd character makes a text four times as large."""
    async with Supervisor(settings(preload=(), retained_output_bytes=1 << 20)) as small:  # for all: 16 MiB
        modest, greedy = await small.create(), await small.create()
        waiting = start(modest, dedent(SHOW).format(content="'x' * 2_000_000", seconds=60), timeout=90)
        await anext(iter_events(waiting))
        outcome = await attack(greedy, SHOW.format(content="chr(0x1F600) + 'x' * 4_000_000", seconds=60))
        assert (outcome.end.status, outcome.end.state_kept) == ("lost", False), outcome.end
        assert "exceeded the server's output limit" in outcome.end.reason
        assert (modest.end_reason, waiting.has_ended) == (None, False)


async def test_unfinished_messages_between_calls_are_not_kept(sandbox: SandboxInstance) -> None:
    """Megabytes of a message that never ends, sent while nothing runs, would stay with the supervisor."""
    program = """
        import threading, time
        def late():
            time.sleep(0.3)
            for _ in range(190): send(20, b"z" * 65536, 1, bytes(16))
        threading.Thread(target=late).start()
    """
    await attack(sandbox, FORGE + dedent(program))
    await wait_until(lambda: sandbox.end_reason is not None)
    assert sandbox.end_reason is not None
    assert "broke the protocol" in sandbox.end_reason


async def test_an_exit_is_not_told_as_a_signal(sandbox: SandboxInstance) -> None:
    outcome = await attack(sandbox, "import os; os._exit(137)")
    assert outcome.end.status == "lost"
    assert "killed by" not in outcome.end.reason


@pytest.mark.parametrize("timeout", [math.nan, -1.0, math.inf])
async def test_times_that_are_none_are_refused(sandbox: SandboxInstance, timeout: float) -> None:
    """NaN compares with nothing: in the loop's heap of timers it would put everybody's in disorder."""
    with pytest.raises(ValueError):
        start(sandbox, "1", timeout=timeout)


# ---- what a supervisor takes it gives back -----------------------------------------------------------------


async def test_capacity_holds_in_a_flood() -> None:
    async with Supervisor(settings(preload=(), pool=2, capacity=6)) as crowded:
        await wait_until(lambda: len(crowded._pool) == 2)  # pyright: ignore[reportPrivateUsage]
        peak = 0

        async def one() -> SandboxInstance | None:
            nonlocal peak
            try:
                made = await crowded.create()
            except SandboxServerAtCapacity:
                return None
            finally:
                peak = max(peak, len(crowded._live))  # pyright: ignore[reportPrivateUsage]
            return made

        made = await asyncio.gather(*[one() for _ in range(40)])
        for _ in range(50):
            peak = max(peak, len(crowded._live))  # pyright: ignore[reportPrivateUsage]
            await asyncio.sleep(0.01)
        assert sum(box is not None for box in made) == 6
        assert peak <= 6


async def test_a_creation_given_up_at_the_hand_over_leaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asked has gone away just when the sandbox was ready."""
    reached = asyncio.Event()

    async def never(*_: object) -> None:
        reached.set()
        await asyncio.sleep(60)

    async with Supervisor(settings(preload=(), capacity=8)) as hurried:
        await (await hurried.create()).destroy()
        await asyncio.sleep(0.3)
        before = holdings(hurried)
        with monkeypatch.context() as patch:
            patch.setattr(SandboxInstance, "claim", never)
            creation = asyncio.create_task(hurried.create())
            await asyncio.wait_for(reached.wait(), 30)
            creation.cancel()
            with pytest.raises(asyncio.CancelledError):
                await creation
        await wait_until(lambda: holdings(hurried) == before)
        assert hurried.claimed_sandboxes() == []


async def test_creations_without_descriptors_leak_nothing(supervisor: Supervisor) -> None:
    await (await supervisor.create()).destroy()
    await asyncio.sleep(0.3)
    before = holdings(supervisor)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for spare in range(1, 8):
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[0] + spare, hard))
        try:
            with contextlib.suppress(OSError, SandboxError):  # enough for one in the end
                await (await asyncio.wait_for(supervisor.create(), 20)).destroy()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    await wait_until(lambda: holdings(supervisor) == before)
    assert supervisor.claimed_sandboxes() == []


@needs_root
async def test_without_a_user_of_its_own_there_is_no_sandbox() -> None:
    """Else it would silently run as the zygote's user, together with all that come after it."""
    async with Supervisor(settings(preload=())) as poor:
        poor._resource_allocator._free_uids.clear()  # pyright: ignore[reportPrivateUsage]
        with pytest.raises(SandboxServerAtCapacity):
            await poor.create()


async def test_sudden_ends_leave_nothing(supervisor: Supervisor) -> None:
    dice = random.Random(2)
    ends = (
        "import os; os._exit(3)",
        "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
        "import os, signal; os.killpg(0, signal.SIGSTOP)",
        "import ctypes; ctypes.string_at(0)",
        "import os; os.execv('/usr/bin/true', ['true'])",
        "import os; os.closerange(3, 64)",
        "import os\nif os.fork() == 0: os.kill(os.getppid(), 9)\nimport time; time.sleep(9)",
    )
    await (await supervisor.create()).destroy()
    await asyncio.sleep(0.3)
    before = holdings(supervisor)
    for number in range(24):
        box = await supervisor.create()
        call = asyncio.create_task(attack(box, ends[number % len(ends)], 0.5))
        if number % 3 == 0:
            await asyncio.sleep(dice.random() * 0.02)
            await asyncio.gather(box.destroy(), box.destroy())
        elif number % 3 == 1:
            await asyncio.sleep(dice.random() * 0.02)
            call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            assert (await asyncio.wait_for(call, 10)).end.exit_code == -1
        await box.destroy()
    await wait_until(lambda: holdings(supervisor) == before)


# ---- files -------------------------------------------------------------------------------------------------


async def test_the_helpers_temporary_name_leads_nowhere(sandbox: SandboxInstance) -> None:
    """Code sees the helper's unfinished file and puts a link, or another directory, in its place."""
    program = """
        import os, threading
        os.makedirs("d", exist_ok=True)
        def replace():
            while True:
                try:
                    for name in os.listdir("/mnt/data"):
                        if name.startswith(".fumehood"):
                            os.unlink(f"/mnt/data/{name}"); os.symlink("/etc/passwd", f"/mnt/data/{name}")
                except OSError: pass
        def swap():
            steps = (lambda: os.rename("/mnt/data/d", "/mnt/data/e"),
                     lambda: os.symlink("/etc", "/mnt/data/d"),
                     lambda: os.unlink("/mnt/data/d"), lambda: os.rename("/mnt/data/e", "/mnt/data/d"))
            while True:
                for step in steps:
                    try: step()
                    except OSError: pass
        for target in (replace, swap): threading.Thread(target=target, daemon=True).start()
    """
    await attack(sandbox, program)
    done = 0
    for _ in range(40):
        with contextlib.suppress(FileRefused, SandboxFileNotFound):
            await asyncio.wait_for(sandbox.files.write("d/passwd", b"ours" * 1000), 20)
            done += 1
        with contextlib.suppress(FileRefused, SandboxFileNotFound):
            assert b"root:" not in await sandbox.files.read("d/passwd", limit=1 << 20)
    assert done


async def test_whiteouts_are_no_files(sandbox: SandboxInstance) -> None:
    """renameat2 may leave a character device 0:0 behind without any right; it is neither listed nor read."""
    program = """
        import ctypes
        open("a", "w").close()
        number = {"x86_64": 316, "aarch64": 276}[__import__("os").uname().machine]
        ctypes.CDLL(None).syscall(number, -100, b"/mnt/data/a", -100, b"/mnt/data/b", 4)
    """
    await attack(sandbox, program)
    assert [entry.path for entry in (await sandbox.files.list()).files] in (["a"], ["b"])
    if (await sandbox.files.list()).files[0].path == "b":
        with pytest.raises(FileRefused):
            await sandbox.files.read("a", limit=10)


SPINNING = """
    import os, threading, time
    reader, writer = os.pipe()
    for _ in range(200):
        if os.fork() == 0:
            os.setsid(); os.close(writer); os.read(reader, 1)
            while True: pass
    def start(): time.sleep(0.5); os.close(writer)
    threading.Thread(target=start, daemon=True).start()
"""


@pytest.mark.slow
@needs_cgroups
async def test_uploads_to_a_busy_sandbox_hold_nobody_up(
    sandbox: SandboxInstance, neighbour: SandboxInstance
) -> None:
    """The helper shares the sandbox's processor time, so uploads may last; threads must not wait for them."""
    await neighbour.files.write("x", b"1")
    await attack(sandbox, SPINNING)
    await asyncio.sleep(1)
    large = bytes(32 << 20)
    uploads = [asyncio.create_task(sandbox.files.write(f"b{number}", large)) for number in range(10)]
    await asyncio.sleep(0.5)
    try:
        for _ in range(3):
            assert await asyncio.wait_for(neighbour.files.read("x", limit=10), 5) == b"1"
            assert len((await asyncio.wait_for(neighbour.files.list(), 5)).files) == 1
    finally:
        await sandbox.destroy()
        await asyncio.gather(*uploads, return_exceptions=True)


# ---- accounting --------------------------------------------------------------------------------------------


@needs_cgroups
async def test_an_upload_at_the_memory_limit_fails_alone(sandbox: SandboxInstance) -> None:
    """It is the helper that must go when there is no room for what it writes, not the program's variables."""
    program = """
        import os
        kept, memory, size = "kept", os.memfd_create("m"), 0
        while size < (1 << 30) - (14 << 20): size += os.write(memory, bytes(1 << 20))
    """
    await attack(sandbox, program, 60)
    for number in range(3):
        with contextlib.suppress(FileRefused):
            await sandbox.files.write(f"b{number}", bytes(16 << 20))
    assert sandbox.end_reason is None
    assert (await run(sandbox, "kept")).result == "'kept'"


@needs_cgroups
async def test_memory_that_is_not_mapped_is_not_paid_for_by_neighbours() -> None:
    """When all memory is used up the kernel ends the process that has most mapped, and a memfd is not."""
    take = """
        import os, time
        memory, size = os.memfd_create("m"), 0
        while size < 680 << 20: size += os.write(memory, bytes(1 << 20))
        time.sleep(60)
    """
    async with Supervisor(settings(preload=(), memory_total=1200 << 20)) as crowded:
        victim, hog = await crowded.create(), await crowded.create()
        assert (await run(victim, "mine = bytearray(b'x' * (300 << 20))")).end.status == "ok"
        outcome = await attack(hog, take, 60)
        assert outcome.end.status == "lost", outcome.end
        assert "it held most of it" in outcome.end.reason
        assert (await run(victim, "len(mine) >> 20")).result == "300"


@needs_cgroups
async def test_network_buffers_count(sandbox: SandboxInstance) -> None:
    """What waits in the sandbox's own loopback is the host's memory, and its TCP and UDP quotas."""
    program = """
        import socket
        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        kept = []
        for _ in range(120):  # far below what would trouble the host's own TCP
            try:
                there = socket.create_connection(listener.getsockname(), timeout=2)
                kept += [there, listener.accept()[0]]
                there.setblocking(False)
                while True: there.send(bytes(1 << 20))
            except BlockingIOError: pass
            except OSError: break  # its share is used up
        try:
            for _ in range(200):
                kept.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)); kept[-1].bind(("127.0.0.1", 0))
                kept[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
                sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
                for _ in range(20): sender.sendto(bytes(60000), kept[-1].getsockname())
        except OSError: pass  # without UDP there is nothing to fill
    """
    cgroup = sandbox.resources.cgroup
    assert cgroup is not None
    before, charged_before = _socket_memory(), cgroup.memory_current()
    await attack(sandbox, program, 60)
    grown, charged = _socket_memory() - before, cgroup.memory_current() - charged_before
    assert grown <= max(charged, 0) + (128 << 20), (grown >> 20, charged >> 20)


def _socket_memory() -> int:
    """Bytes in the buffers of all TCP and UDP sockets of the host."""
    pages = 0
    for line in Path("/proc/net/sockstat").read_text().splitlines():
        name, *fields = line.split()
        if name in ("TCP:", "UDP:"):
            pages += int(fields[fields.index("mem") + 1])
    return pages * mmap.PAGESIZE


THREADS = """
    import threading, time
    threading.stack_size(65536)
    try:
        for _ in range(400): threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    except RuntimeError: print("no more")
"""


@pytest.mark.slow
@needs_cgroups
async def test_a_crowd_full_of_threads_stops_nobody() -> None:
    """Each within its own bound: together they must not use up what the zygote and the others need."""
    async with Supervisor(settings(preload=(), capacity=24)) as crowded:
        other = await crowded.create()
        for _ in range(18):
            assert (await attack(await crowded.create(), THREADS)).stdout == "no more\n"
        await other.files.write("x", b"1")
        outcome = await attack(
            other, "import subprocess; print(subprocess.run(['echo', 'hi'], capture_output=True).stdout)"
        )
        assert outcome.stdout == "b'hi\\n'\n", outcome
        assert (await run(await crowded.create(), "1 + 1")).result == "2"


# ---- unsafe-degraded: the little that is promised there ----------------------------------------------------


async def test_degraded_neighbours_are_neither_slowed_nor_locked_out() -> None:
    """Landlock knows nothing of chmod, and the kernel lets a user move all its processes to one processor."""
    async with Supervisor(settings(preload=(), mode="unsafe-degraded")) as degraded:
        victim, box = await degraded.create(), await degraded.create()
        if degraded.zygote.info.landlock < 6:
            pytest.skip("Landlock cannot scope signals here")
        await victim.files.write("hers.txt", b"x")
        scratch = victim.resources.scratch_directory
        assert scratch is not None
        program = """
            import os, errno
            done = []
            def attempt(name, function, *args):
                try: function(*args); done.append(name)
                except OSError: pass
            for name, pid in {pids}:
                attempt(f"affinity of {name}", os.sched_setaffinity, pid, [0])
                attempt(f"policy of {name}", os.sched_setscheduler, pid, os.SCHED_IDLE, os.sched_param(0))
                attempt(f"signal to {name}", os.kill, pid, 0)
            root, own = os.path.split(os.path.dirname(os.getcwd()))
            # Names that can be guessed; the true one is known only to the test.
            for name in [*{shared}, *map(str, range(1, 50))]:
                if name != own:
                    attempt(f"chmod {name}", os.chmod, f"{root}/{name}/data", 0)
                    attempt(f"chmod {name}", os.chmod, f"{root}/{name}", 0)
            print(done)
        """
        pids = [("the zygote", degraded.zygote.pid), ("the supervisor", os.getpid())]
        if victim.resources.cgroup is not None:
            pids += [("a neighbour", pid) for pid in victim.resources.cgroup.processes()]
        affinity = os.sched_getaffinity(0)
        try:
            shared = ["cache"] if os.geteuid() == 0 else []  # an ordinary user owns it, whatever we do
            program = program.replace("{pids}", repr(pids)).replace("{shared}", repr(shared))
            outcome = await attack(box, program)
        finally:
            os.sched_setaffinity(0, affinity)
        assert outcome.stdout == "[]\n", outcome
        assert await victim.files.read("hers.txt", limit=10) == b"x"
        await victim.files.write("more.txt", b"y")
        assert (await run(victim, "import os; sorted(os.listdir())")).result == "['hers.txt', 'more.txt']"
