"""A sandbox server that a process starts for itself; real sandboxes."""

import asyncio
import dataclasses
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import pytest

from fumehood.interfaces import SandboxRef
from fumehood.protocol.sandbox.sandbox_errors import SandboxGone, SandboxNotFound, SandboxServerUnreachable
from fumehood.protocol.sandbox.sandbox_messages import ExecuteRequest, SandboxSpec, Stdout
from fumehood.sandbox_client.local_server_provider import (
    LocalServerProvider,
    LocalServerSettings,
    remove_abandoned_directories,
)
from tests.support.sandbox_runs import has_cgroups
from tests.support.slow_start import SlowStart

SETTINGS = LocalServerSettings(
    pool=0, limits="enforced" if has_cgroups() else "best-effort", options=("--preload", "")
)
PATIENCE = 60


@pytest.fixture
def short_path() -> Generator[Path]:
    """The path of a socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="fh", dir="/tmp") as path:
        yield Path(path)


@pytest.fixture
async def local(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[LocalServerProvider]:
    monkeypatch.setattr("tempfile.tempdir", str(short_path))
    async with LocalServerProvider(SETTINGS) as provider:
        yield provider
    assert list(short_path.iterdir()) == []


async def until_ended(pid: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while _running(pid):
        assert time.monotonic() < deadline, "the server is still there"
        await asyncio.sleep(0.02)


def _running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return "\nState:\tZ" not in status  # whoever inherits it may take its time to notice


async def printed(provider: LocalServerProvider, code: str) -> str:
    sandbox = await provider.attach(await provider.create(SandboxSpec(), "one"))
    events = [event async for event in sandbox.execute(ExecuteRequest(code=code))]
    return "".join(event.text for event in events if isinstance(event, Stdout))


async def test_it_starts_serves_and_ends(local: LocalServerProvider) -> None:
    pid = local.server_pid
    assert pid is not None
    assert os.getsid(pid) == pid
    assert await printed(local, "print(6 * 7)") == "42\n"
    assert (await local.health()).live == 1
    await local.close()
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(SandboxServerUnreachable, match="has been closed"):
        await local.list_sandboxes()


async def test_the_server_knows_no_secret(
    local: LocalServerProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    await local.close()
    monkeypatch.setenv("OPENAI_API_KEY", "s3cret")
    monkeypatch.setenv("FUMEHOOD_SANDBOX_TOKEN", "another-s3cret-of-ours")
    async with LocalServerProvider(SETTINGS) as provider:
        environ = Path(f"/proc/{provider.server_pid}/environ").read_bytes()
        assert b"s3cret" not in environ
        assert b"PATH=" in environ


async def test_a_server_that_dies_is_replaced_and_its_sandboxes_are_gone(local: LocalServerProvider) -> None:
    ref = await local.create(SandboxSpec(), "old")
    sandbox = await local.attach(ref)
    events = sandbox.execute(ExecuteRequest(code="import time\nprint('here', flush=True)\ntime.sleep(60)"))
    assert await anext(events) == Stdout("here\n")
    first = local.server_pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    with pytest.raises(SandboxGone, match="its server on this host has ended"):
        await anext(events)
    with pytest.raises(SandboxGone):
        await sandbox.list_files()
    with pytest.raises(SandboxNotFound):
        await local.attach(SandboxRef("old"))
    assert local.server_pid not in (None, first)
    with pytest.raises(SandboxGone):
        await sandbox.list_files()
    assert await printed(local, "print('again')") == "again\n"


async def test_a_server_that_dies_while_it_is_asked(local: LocalServerProvider) -> None:
    first = local.server_pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)  # it takes the request, and never answers
    asking = asyncio.ensure_future(local.create(SandboxSpec(), "new"))
    await asyncio.sleep(0.1)
    os.kill(first, signal.SIGKILL)
    with pytest.raises(SandboxGone):
        await asking
    assert (await local.create(SandboxSpec(), "new")).id == "new"
    assert local.server_pid not in (None, first)


async def test_callers_at_once_start_one_server(local: LocalServerProvider) -> None:
    assert local.server_pid is not None
    os.kill(local.server_pid, signal.SIGKILL)
    await until_dead(local)
    await asyncio.gather(*(local.list_sandboxes() for _ in range(5)))
    assert len(children_named("sandbox")) == 1


@pytest.fixture
def slow_provider(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[SlowStart, LocalServerProvider]:
    """A provider whose server starts when it is told to."""
    monkeypatch.setattr("tempfile.tempdir", str(short_path))
    slow = SlowStart(short_path)
    options = (*SETTINGS.options, "--config", str(slow.config))
    return slow, LocalServerProvider(dataclasses.replace(SETTINGS, options=options))


async def test_a_start_outlives_the_caller_that_caused_it(
    slow_provider: tuple[SlowStart, LocalServerProvider],
) -> None:
    slow, provider = slow_provider
    pids: set[int] = set()
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(provider.health(), 0.5)
        pids.update(children_named("sandbox"))
    assert len(pids) == 1, "a caller that gave up ended the start"
    with slow.open():
        async with asyncio.timeout(PATIENCE):
            assert (await provider.health()).status == "ok"
    assert provider.server_pid in pids
    await provider.close()
    assert children_named("sandbox") == []


async def test_closing_ends_a_start_and_tells_those_who_wait(
    slow_provider: tuple[SlowStart, LocalServerProvider],
) -> None:
    _, provider = slow_provider
    waiting = asyncio.ensure_future(provider.health())
    while not children_named("sandbox"):
        await asyncio.sleep(0.01)
    async with asyncio.timeout(10):  # a server that was never ready has nothing to end in good order
        await provider.close()
        with pytest.raises(SandboxServerUnreachable, match="has been closed"):
            await waiting
    assert children_named("sandbox") == []


FAILED_START = "Could not start the sandbox server on this host: %s"


async def until_dead(local: LocalServerProvider) -> None:
    while local.server_pid is not None:
        await asyncio.sleep(0.01)


def children_named(word: str) -> list[int]:
    found: list[int] = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            mine = f"\nPPid:\t{os.getpid()}\n" in status.read_text()
            if mine and word.encode() in (status.parent / "cmdline").read_bytes().split(b"\0"):
                found.append(int(status.parent.name))
        except OSError:
            continue
    return found


async def test_why_it_cannot_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    token = tmp_path / "token"
    token.write_text("t" * 40)
    token.chmod(0o600)
    nowhere = LocalServerSettings(
        mode="pod",
        options=("--guest-socket", str(tmp_path / "none"), "--token-file", str(token)),
        environment={"FUMEHOOD_SANDBOX_START_TIMEOUT": "0.1"},
    )
    provider = LocalServerProvider(nowhere)
    for _ in range(2):  # each caller tries again
        with pytest.raises(SandboxServerUnreachable, match="Start the code container") as caught:
            await provider.create(SandboxSpec())
        assert "This host cannot isolate code, so the server does not start." in str(caught.value)
    await provider.close()
    assert [record.msg for record in caplog.records] == [FAILED_START] * 2
    caplog.clear()
    with pytest.raises(SandboxServerUnreachable, match="No such option"):
        await LocalServerProvider(LocalServerSettings(options=("--no-such-option",))).start()
    with pytest.raises(SandboxServerUnreachable, match=r"not ready within 0\.01 s"):
        await LocalServerProvider(LocalServerSettings(start_timeout=0.01)).start()
    assert caplog.records == []  # who starts it reports why it did not
    assert children_named("sandbox") == []


async def test_its_log_is_passed_on(local: LocalServerProvider, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "fumehood.sandbox_client.local_server_provider")
    await local.create(SandboxSpec(), "logged")
    while not any(
        record.msg == "sandbox_created" and getattr(record, "fields", {})["sandbox"] == "logged"
        for record in caplog.records
    ):
        await asyncio.sleep(0.01)
    assert all(record.name == "fumehood.sandbox_client.local_server_provider" for record in caplog.records)


_STARTER = """
import asyncio, sys, tempfile
tempfile.tempdir = sys.argv[1]
from fumehood.sandbox_client.local_server_provider import LocalServerProvider, LocalServerSettings
async def main():
    provider = LocalServerProvider(LocalServerSettings(pool=0, limits=sys.argv[2], options=("--preload", "")))
    await provider.start()
    print(provider.server_pid, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


async def test_it_ends_when_its_user_is_killed(short_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _STARTER, short_path, SETTINGS.limits], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    with process.stdout:
        server = int(await asyncio.to_thread(process.stdout.readline))
    process.kill()
    await asyncio.to_thread(process.wait)
    await until_ended(server)
    (left,) = short_path.glob("fumehood-local-*")
    assert [path.name for path in left.iterdir()] == ["lock"]
    os.utime(left, (1, 1))
    remove_abandoned_directories(short_path)
    assert not left.exists()
