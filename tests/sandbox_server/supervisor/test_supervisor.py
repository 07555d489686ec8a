"""Real sandboxes from creation to end: state, limits, deadlines, files."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio

from fumehood.protocol.sandbox.sandbox_errors import (
    FileRefused,
    SandboxError,
    SandboxFileNotFound,
    SandboxGone,
    SandboxPayloadTooLarge,
    SandboxStartFailed,
)
from fumehood.protocol.sandbox.sandbox_messages import MemoryTier, SandboxSpec
from fumehood.sandbox_server.supervisor.sandbox_instance import SandboxInstance
from fumehood.sandbox_server.supervisor.supervisor import Supervisor
from tests.support.host_census import descendants
from tests.support.sandbox_runs import has_cgroups, run, settings, start, wait_for_outcome
from tests.support.waiting import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="module")
needs_cgroups = pytest.mark.skipif(not has_cgroups(), reason="memory cannot be bounded as this user")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def supervisor() -> AsyncIterator[Supervisor]:
    async with Supervisor(settings()) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(supervisor: Supervisor) -> AsyncIterator[SandboxInstance]:
    made = await supervisor.create()
    yield made
    await made.destroy()


@needs_cgroups
async def test_what_makes_sandboxes_goes_before_busy_ones(supervisor: Supervisor) -> None:
    tree = supervisor._resource_allocator.cgroup_tree  # pyright: ignore[reportPrivateUsage]
    assert tree is not None
    if not tree.has_cpu:
        pytest.skip("processors are not shared out by cgroups here")
    files = [path / "zygote" / name for path in tree.paths for name in ("cpu.shares", "cpu.weight")]
    weights = [(file.name, int(file.read_text())) for file in files if file.exists()]
    assert weights in ([("cpu.shares", 102_400)], [("cpu.weight", 10_000)])


async def test_on_the_host_the_code_is_never_root(supervisor: Supervisor, sandbox: SandboxInstance) -> None:
    execution = start(sandbox, "import time; time.sleep(30)", timeout=30)
    await asyncio.sleep(0.2)
    jail = supervisor.zygote.pid
    assert jail is not None
    users = {_user_of(pid) for pid in {jail, *descendants(jail)}}
    execution.interrupt()
    await wait_for_outcome(execution)
    assert 0 not in users
    assert len(users) >= (2 if os.geteuid() == 0 else 1), (
        "as root, zygote and sandbox have users of their own"
    )


@pytest.mark.root
async def test_as_root_every_sandbox_has_a_kernel_user_of_its_own(supervisor: Supervisor) -> None:
    one, other = await supervisor.create(), await supervisor.create()
    maps = [
        (await run(box, "print(open('/proc/self/uid_map').read())")).stdout.split() for box in (one, other)
    ]
    await one.destroy()
    await other.destroy()
    assert [row[0] for row in maps] == ["1000", "1000"]
    assert one.resources.uid != other.resources.uid
    assert 0 not in (one.resources.uid, other.resources.uid)


async def test_time_out_interrupts_and_keeps_the_state(sandbox: SandboxInstance) -> None:
    await run(sandbox, "kept = 7")
    began = asyncio.get_running_loop().time()
    outcome = await run(sandbox, "while True: pass", timeout=0.5)
    assert asyncio.get_running_loop().time() - began < 1.5
    assert (outcome.end.status, outcome.end.exit_code, outcome.end.state_kept) == ("timeout", -1, True)
    assert "longer than 0.5 s" in outcome.end.reason
    assert (await run(sandbox, "kept")).result == "7"


async def test_time_out_kills_what_ignores_the_interrupt(supervisor: Supervisor) -> None:
    sandbox = await supervisor.create()
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
    began = asyncio.get_running_loop().time()
    outcome = await run(sandbox, code, timeout=0.5)
    assert asyncio.get_running_loop().time() - began < 3.5
    assert (outcome.end.status, outcome.end.exit_code, outcome.end.state_kept) == ("timeout", -1, False)
    assert "killed" in outcome.end.reason
    with pytest.raises(SandboxGone, match="did not stop"):
        start(sandbox, "1", timeout=1)


async def test_interrupting_a_waiting_call_leaves_the_running_one_alone(sandbox: SandboxInstance) -> None:
    running = start(sandbox, "import time\ntime.sleep(0.5)\n'done'", timeout=10)
    waiting = start(sandbox, "ran = True", timeout=10)
    await asyncio.sleep(0.1)
    waiting.interrupt()
    assert (await wait_for_outcome(running)).result == "'done'"
    end = (await wait_for_outcome(waiting)).end
    assert (end.status, end.reason) == ("interrupted", "The code was interrupted before it started.")
    assert (await run(sandbox, "'ran' in globals()")).result == "False"


async def test_a_cancelled_creation_leaves_nothing(supervisor: Supervisor) -> None:
    before = set(supervisor.claimed_sandboxes())
    for pause in range(12):
        creation = asyncio.create_task(supervisor.create())
        await asyncio.sleep(pause * 0.004)
        creation.cancel()
        made = (await asyncio.gather(creation, return_exceptions=True))[0]
        if isinstance(made, SandboxInstance):
            await made.destroy()
    await wait_until(lambda: set(supervisor.claimed_sandboxes()) == before)


async def test_a_failure_of_the_supervisor_still_ends_the_call(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = await supervisor.create()

    def failing() -> int:
        raise RuntimeError("no idea")

    monkeypatch.setattr(sandbox, "count_oom_kills", failing)
    end = (await run(sandbox, "1")).end
    monkeypatch.undo()
    assert (end.status, end.state_kept, end.reason) == (
        "lost",
        False,
        "The sandbox was lost: the supervisor failed: no idea.",
    )
    await sandbox.destroy()


async def test_nothing_is_made_by_a_supervisor_that_is_closing() -> None:
    closing = Supervisor(settings(preload=()))
    async with closing:
        zygote = closing.zygote.pid
        creations = [asyncio.create_task(closing.create()) for _ in range(3)]
        await asyncio.sleep(0)
    answers = await asyncio.gather(*creations, return_exceptions=True)
    assert all(isinstance(answer, SandboxError) for answer in answers), answers
    with pytest.raises(SandboxStartFailed, match="shutting down"):
        await closing.create()
    assert zygote is not None
    assert not os.path.exists(f"/proc/{zygote}")


@pytest.mark.parametrize(
    ("code", "status", "exit_code"),
    [("1/0", "error", 1), ("import sys; sys.exit(3)", "error", 3), ("exit(0)", "ok", 0)],
)
async def test_exit_codes(sandbox: SandboxInstance, code: str, status: str, exit_code: int) -> None:
    end = (await run(sandbox, code)).end
    assert (end.status, end.exit_code, end.state_kept) == (status, exit_code, True)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os; os._exit(7)", "exited with code 7"),
        ("import os; os.kill(os.getpid(), 9)", "ended by SIGKILL"),
        ("import ctypes; ctypes.string_at(0)", "ended by SIGSEGV"),
    ],
)
async def test_lost_interpreters_are_reported(supervisor: Supervisor, code: str, reason: str) -> None:
    sandbox = await supervisor.create()
    end = (await run(sandbox, code)).end
    assert (end.status, end.exit_code, end.state_kept) == ("lost", -1, False)
    assert reason in end.reason
    await sandbox.destroy()


async def test_last_words_are_heard(supervisor: Supervisor) -> None:
    for _ in range(10):
        sandbox = await supervisor.create()
        outcome = await run(sandbox, "import os\nprint('x' * 40_000 + 'last', flush=True)\nos._exit(0)")
        assert outcome.stdout.endswith("xlast\n")
        assert outcome.end.status == "lost"


@needs_cgroups
async def test_memory_that_rlimits_do_not_see_ends_the_sandbox(supervisor: Supervisor) -> None:
    sandbox = await supervisor.create()
    code = "import os\nfd = os.memfd_create('m')\nblock = bytes(1 << 20)\nwhile True: os.write(fd, block)"
    end = (await run(sandbox, code)).end
    assert (end.status, end.exit_code, end.state_kept) == ("out_of_memory", -1, False)
    assert "1g" in end.reason


@needs_cgroups
async def test_a_child_killed_for_memory_is_only_a_note(sandbox: SandboxInstance) -> None:
    # Shared pages are in no RLIMIT_DATA, but count as the child's when the kernel looks for a victim.
    child = "import mmap; m = mmap.mmap(-1, 2 << 30)\nfor i in range(0, len(m), 4096): m[i] = 1"
    code = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}]).returncode"
    outcome = await run(sandbox, code)
    assert outcome.result == "-9"
    assert outcome.end.state_kept
    assert any("out of memory" in note for note in outcome.notes)


@needs_cgroups
@pytest.mark.parametrize(
    ("tier", "bytes_"), [("1g", 1 << 30), ("4g", 4 << 30), ("16g", 16 << 30), ("64g", 64 << 30)]
)
async def test_tiers_are_set_at_hand_over(supervisor: Supervisor, tier: MemoryTier, bytes_: int) -> None:
    sandbox = await supervisor.create(SandboxSpec(memory=tier))
    code = (
        "import os, resource\n"
        "room = os.statvfs('/mnt/data')\n"
        "print(*resource.getrlimit(resource.RLIMIT_DATA), room.f_blocks * room.f_frsize)"
    )
    outcome = await run(sandbox, code)
    *data, room = map(int, outcome.stdout.split())
    assert data == [bytes_ * 9 // 10] * 2
    # A disk keeps a little for itself; in memory the quota is exact.
    assert (bytes_ // 2 * 0.99 if sandbox.resources.disk else bytes_ // 2) <= room <= bytes_ // 2
    assert sandbox.resources.cgroup is not None
    limit = _memory_limit(sandbox)
    assert limit == bytes_
    await sandbox.destroy()


async def test_refused_files_say_why(sandbox: SandboxInstance) -> None:
    await run(sandbox, "import os\nos.symlink('/etc/passwd', 'link'); os.mkfifo('fifo')")
    await run(sandbox, "open('big', 'wb').truncate(1 << 40)")
    for path, reason in (
        ("link", "symbolic links"),
        ("fifo", "not a regular file"),
        ("big", "larger than"),
        ("../etc/passwd", "relative"),
        ("/etc/passwd", "relative"),
        ("none", "No such file"),
    ):
        with pytest.raises((FileRefused, SandboxFileNotFound, SandboxPayloadTooLarge), match=reason):
            await sandbox.files.read(path, limit=1000)
    with pytest.raises(FileRefused, match="symbolic links"):
        await sandbox.files.write("link/x", b"")
    with pytest.raises(FileRefused, match="relative"):
        await sandbox.files.write("a/../../x", b"")


async def test_a_write_beyond_the_quota_leaves_nothing(sandbox: SandboxInstance) -> None:
    await run(sandbox, "open('fill', 'wb').write(bytes(500 << 20))")
    with pytest.raises(FileRefused, match="quota"):
        await sandbox.files.write("new", bytes(32 << 20))
    assert [item.path for item in (await sandbox.files.list()).files] == ["fill"]
    assert (await run(sandbox, "import os; os.listdir()")).result == "['fill']"


async def test_the_pool_refills_and_never_hands_out_twice() -> None:
    async with Supervisor(settings(preload=(), pool=2)) as pooled:
        seen: set[str] = set()
        for _ in range(6):
            sandbox = await pooled.create()
            assert sandbox.id not in seen
            seen.add(sandbox.id)
            assert (await run(sandbox, "'left' in globals()")).result == "False"
            await run(sandbox, "left = 1; open('left', 'w').close()")
            await sandbox.destroy()


async def test_closing_goes_on_when_a_task_has_just_ended() -> None:
    """The loop has to get its turn to hear of it."""
    closing = Supervisor(settings(preload=()))
    async with closing:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        ended.set_result(None)
        closing._tasks.add(cast(Any, ended))  # pyright: ignore[reportPrivateUsage]
        loop.call_soon(closing._tasks.discard, ended)  # pyright: ignore[reportPrivateUsage]
    assert closing.live_count == 0


def _memory_limit(sandbox: SandboxInstance) -> int:
    for name in ("memory.limit_in_bytes", "memory.max"):
        for path in Path("/sys/fs/cgroup").glob(f"**/fumehood-{os.getpid()}-*/sb-{sandbox.number}/{name}"):
            return int(path.read_text())
    raise AssertionError("the sandbox has no cgroup")


def _user_of(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return -1
    return next(int(line.split()[1]) for line in lines if line.startswith("Uid:"))
