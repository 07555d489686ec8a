"""Conformance tests of `SandboxProvider` and `Sandbox`.

`SandboxKit` needs a fixture `subject` of type `SandboxSubject`; docs/testing.md has an example.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

import pytest
from msgspec.structs import replace

from fumehood.interfaces import Sandbox, SandboxProvider, SandboxRef
from fumehood.protocol.sandbox.sandbox_errors import (
    ExecutionNotFound,
    InvalidSandboxRequest,
    SandboxConflict,
    SandboxGone,
    SandboxNotFound,
    SandboxServerUnreachable,
)
from fumehood.protocol.sandbox.sandbox_messages import (
    ExceptionRaised,
    ExecuteRequest,
    ExecutionEnd,
    ExecutionEvent,
    ExpressionResult,
    SandboxSpec,
    Stderr,
    Stdout,
)
from fumehood.testing.conformance_kits.assertions import assert_each_raises
from fumehood.testing.conformance_kits.sandbox_files_kit import SandboxFilesKit, read_content

type SandboxProgram = Literal[
    "prints hello",
    "speaks on every channel",
    "raises ValueError",
    "exits with 3",
    "waits to be interrupted",
    "waits for the file go",
    "writes out.txt",
    "deletes out.txt",
    "a command exits with 3",
    "a command waits to be interrupted",
]

PYTHON_PROGRAMS: Mapping[SandboxProgram, str] = {
    "prints hello": "print('hello')",
    "speaks on every channel": (
        "import sys\nprint('out', flush=True)\nprint('err', file=sys.stderr, flush=True)\n'value'"
    ),
    "raises ValueError": "raise ValueError('no')",
    "exits with 3": "import sys\nsys.exit(3)",
    "waits to be interrupted": "import time\nprint('waiting', flush=True)\nwhile True: time.sleep(0.01)",
    "waits for the file go": (
        "import os, time\nprint('waiting', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.01)\n"
        "open('done.txt', 'w').write('done')\nprint('done')"
    ),
    "writes out.txt": "open('out.txt', 'w').write('made')\nNone",
    "deletes out.txt": "import os\nos.remove('out.txt')",
    "a command exits with 3": "echo out; echo err >&2; echo made > out.txt; exit 3",
    "a command waits to be interrupted": "echo waiting; while :; do sleep 60; done",
}
"""For sandboxes that run Python and a shell."""

_SECONDS = 60
_GONE = (SandboxGone, SandboxNotFound)


@dataclass(frozen=True, slots=True)
class SandboxSubject:
    """The implementation under test.

    programs: code by its behaviour.
    make_provider: makes a second provider, which a test closes; without it, the tests of `close` are skipped.
    """

    provider: SandboxProvider
    programs: Mapping[SandboxProgram, str] = field(default_factory=lambda: PYTHON_PROGRAMS)
    make_provider: Callable[[], Awaitable[SandboxProvider]] | None = None

    @asynccontextmanager
    async def create_sandbox(self, name: str | None = None) -> AsyncGenerator[Sandbox]:
        """Create a sandbox for the block."""
        async with asyncio.timeout(_SECONDS):
            ref = await self.provider.create(SandboxSpec(), name)
            try:
                yield await self.provider.attach(ref)
            finally:
                await self.provider.destroy(ref)

    def make_request(self, program: SandboxProgram, execution_id: str | None = None) -> ExecuteRequest:
        language = "shell" if program.startswith("a command") else "python"
        return ExecuteRequest(code=self.programs[program], language=language, execution_id=execution_id)

    @asynccontextmanager
    async def run_until_waiting(
        self, sandbox: Sandbox, program: SandboxProgram, execution_id: str | None = None
    ) -> AsyncGenerator[AsyncGenerator[ExecutionEvent]]:
        """Yield the events of a program once it has printed that it is waiting."""
        async with aclosing(sandbox.execute(self.make_request(program, execution_id))) as events:
            await read_until_waiting(events)
            yield events

    async def run(
        self, sandbox: Sandbox, program: SandboxProgram, execution_id: str | None = None
    ) -> list[ExecutionEvent]:
        return await read_events(sandbox.execute(self.make_request(program, execution_id)))


async def read_events(events: AsyncGenerator[ExecutionEvent]) -> list[ExecutionEvent]:
    """Return all events. Fails unless `ExecutionEnd` comes last, once."""
    found = [event async for event in events]
    assert [isinstance(event, ExecutionEnd) for event in found] == [False] * (len(found) - 1) + [True], found
    return found


def get_end(events: list[ExecutionEvent]) -> ExecutionEnd:
    last = events[-1]
    assert isinstance(last, ExecutionEnd)
    return last


def collect_stdout(events: list[ExecutionEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, Stdout))


async def read_until_waiting(events: AsyncGenerator[ExecutionEvent]) -> None:
    """Read until the program prints that it is waiting."""
    async for event in events:
        if isinstance(event, Stdout) and "waiting" in event.text:
            return
    raise AssertionError("the program ended before it waited")


class SandboxProviderKit:
    """Sandboxes are created, found again, and destroyed."""

    async def test_a_sandbox_lives_until_it_is_destroyed(self, subject: SandboxSubject) -> None:
        ref = await subject.provider.create(SandboxSpec(memory="1g", tenant="somebody"))
        (info,) = [info for info in await subject.provider.list_sandboxes() if info.id == ref.id]
        assert (info.memory, info.tenant, info.running, info.waiting) == ("1g", "somebody", None, 0)
        assert 0 < info.created_at <= info.last_used_at
        sandbox = await subject.provider.attach(ref)
        assert sandbox.id == ref.id
        await subject.provider.destroy(ref)
        assert ref.id not in [info.id for info in await subject.provider.list_sandboxes()]

    async def test_sandboxes_are_separate(self, subject: SandboxSubject) -> None:
        async with subject.create_sandbox() as one, subject.create_sandbox() as other:
            assert one.id != other.id
            await one.write_file("mine.txt", b"mine")
            assert (await other.list_files()).files == []

    async def test_a_name_that_lives_gives_that_one(self, subject: SandboxSubject) -> None:
        async with subject.create_sandbox("kit-again") as sandbox:
            await sandbox.write_file("here.txt", b"x")
            again = await subject.provider.create(SandboxSpec(), "kit-again")
            found = await subject.provider.attach(SandboxRef(again.id))
            assert [file.path for file in (await found.list_files()).files] == ["here.txt"]
            names = [info.id for info in await subject.provider.list_sandboxes()]
            assert names.count("kit-again") == 1

    async def test_concurrent_creates_of_a_name_make_one_sandbox(self, subject: SandboxSubject) -> None:
        asked = [subject.provider.create(SandboxSpec(), "kit-at-once") for _ in range(3)]
        refs = await asyncio.gather(*asked)
        try:
            assert {ref.id for ref in refs} == {"kit-at-once"}
            names = [info.id for info in await subject.provider.list_sandboxes()]
            assert names.count("kit-at-once") == 1
        finally:
            await subject.provider.destroy(refs[0])

    async def test_a_name_that_lives_with_another_spec_is_a_conflict(self, subject: SandboxSubject) -> None:
        async with subject.create_sandbox("kit-conflict") as sandbox:
            with pytest.raises(SandboxConflict):
                await subject.provider.create(SandboxSpec(memory="4g"), "kit-conflict")
            assert (await sandbox.list_files()).files == []

    @pytest.mark.parametrize("name", ["", "..", "a/b", "a b", "-x", "x" * 65, "\u00e4"])
    async def test_what_is_no_name_is_refused(self, subject: SandboxSubject, name: str) -> None:
        with pytest.raises(InvalidSandboxRequest):
            await subject.provider.create(SandboxSpec(), name)

    @pytest.mark.parametrize("name", ["kit-never-made", "..", "a/b", ""])
    async def test_what_never_was_is_not_found(self, subject: SandboxSubject, name: str) -> None:
        with pytest.raises(SandboxNotFound):
            await subject.provider.attach(SandboxRef(name))
        await subject.provider.destroy(SandboxRef(name))

    async def test_what_was_destroyed_is_gone(self, subject: SandboxSubject) -> None:
        async with subject.create_sandbox() as sandbox:
            await sandbox.write_file("file.txt", b"x")
            await subject.provider.destroy(SandboxRef(sandbox.id))
            await assert_each_raises(
                _GONE,
                subject.provider.attach(SandboxRef(sandbox.id)),
                subject.run(sandbox, "prints hello"),
                sandbox.list_files(),
                read_content(sandbox, "file.txt"),
                sandbox.write_file("file.txt", b"x"),
                sandbox.delete_file("file.txt"),
                sandbox.unpack_archive(b"", kind="tar"),
                sandbox.interrupt(),
            )
            await subject.provider.destroy(SandboxRef(sandbox.id))

    async def test_a_name_can_be_reused(self, subject: SandboxSubject) -> None:
        async with subject.create_sandbox("kit-reborn") as sandbox:
            await sandbox.write_file("old.txt", b"x")
        async with subject.create_sandbox("kit-reborn") as sandbox:
            assert (await sandbox.list_files()).files == []

    async def test_destroying_ends_what_runs(self, subject: SandboxSubject) -> None:
        async with subject.create_sandbox() as sandbox:
            async with subject.run_until_waiting(sandbox, "waits to be interrupted") as events:
                await subject.provider.destroy(SandboxRef(sandbox.id))
                try:
                    end = get_end(await read_events(events))
                except _GONE:
                    return
            assert (end.status, end.state_kept) == ("lost", False)

    async def test_a_lifetime_is_extended(self, subject: SandboxSubject) -> None:
        async with subject.create_sandbox() as sandbox:
            await subject.provider.extend_lifetime(SandboxRef(sandbox.id), time.time() + 86_400)
            assert get_end(await subject.run(sandbox, "prints hello")).status == "ok"
        await subject.provider.extend_lifetime(SandboxRef(sandbox.id), time.time() + 86_400)
        assert sandbox.id not in [info.id for info in await subject.provider.list_sandboxes()]

    async def test_closing(self, subject: SandboxSubject) -> None:
        if subject.make_provider is None:
            pytest.skip("the adapter makes no second provider")
        provider = await subject.make_provider()
        ref = await provider.create(SandboxSpec())
        sandbox = await provider.attach(ref)
        await provider.destroy(ref)
        await provider.close()
        await provider.close()
        with pytest.raises((SandboxServerUnreachable, *_GONE)):
            await sandbox.list_files()
        with pytest.raises(SandboxServerUnreachable):
            await provider.create(SandboxSpec())


class SandboxExecutionKit:
    """Executions run once, one after another, and their events can be read from any point."""

    async def test_events_and_their_end(self, subject: SandboxSubject) -> None:
        async with subject.create_sandbox() as sandbox:
            events = await subject.run(sandbox, "prints hello")
            assert collect_stdout(events) == "hello\n"
            end = get_end(events)
            assert (end.status, end.exit_code, end.state_kept, end.reason) == ("ok", 0, True, "")
            assert end.duration_ms >= 0

    async def test_every_channel(self, subject: SandboxSubject) -> None:
        async with subject.create_sandbox() as sandbox:
            events = await subject.run(sandbox, "speaks on every channel")
            assert collect_stdout(events) == "out\n"
            assert "".join(event.text for event in events if isinstance(event, Stderr)) == "err\n"
            (result,) = [event for event in events if isinstance(event, ExpressionResult)]
            assert result.data["text/plain"] == "'value'"

    async def test_code_that_raises(self, subject: SandboxSubject) -> None:
        async with subject.create_sandbox() as sandbox:
            events = await subject.run(sandbox, "raises ValueError")
            (raised,) = [event for event in events if isinstance(event, ExceptionRaised)]
            assert (raised.name, raised.value) == ("ValueError", "no")
            end = get_end(events)
            assert (end.status, end.exit_code, end.state_kept) == ("error", 1, True)

    async def test_code_that_exits(self, subject: SandboxSubject) -> None:
        async with subject.create_sandbox() as sandbox:
            end = get_end(await subject.run(sandbox, "exits with 3"))
            assert (end.status, end.exit_code) == ("error", 3)

    async def test_a_command(self, subject: SandboxSubject) -> None:
        async with subject.create_sandbox() as sandbox:
            events = await subject.run(sandbox, "a command exits with 3")
            assert "".join(event.text for event in events if isinstance(event, Stdout)) == "out\n"
            assert "".join(event.text for event in events if isinstance(event, Stderr)) == "err\n"
            assert (get_end(events).status, get_end(events).exit_code) == ("error", 3)
            assert [entry.path for entry in (await sandbox.list_files()).files] == ["out.txt"]

    async def test_interrupt_of_a_command(self, subject: SandboxSubject) -> None:
        async with subject.create_sandbox() as sandbox:
            async with subject.run_until_waiting(sandbox, "a command waits to be interrupted") as events:
                assert await sandbox.interrupt()
                end = get_end(await read_events(events))
            assert (end.status, end.exit_code, end.state_kept) == ("interrupted", -1, True)
            assert get_end(await subject.run(sandbox, "prints hello")).status == "ok"

    async def test_leaving_the_events_does_not_stop_the_code(self, subject: SandboxSubject) -> None:
        async with subject.create_sandbox() as sandbox:
            async with subject.run_until_waiting(sandbox, "waits for the file go", "left"):
                pass
            await sandbox.write_file("go", b"")
            events = await read_events(sandbox.follow("left"))
            assert collect_stdout(events) == "waiting\ndone\n"
            assert get_end(events).status == "ok"
            assert "done.txt" in [file.path for file in (await sandbox.list_files()).files]

    async def test_events_can_be_read_from_any_point(self, subject: SandboxSubject) -> None:
        async with subject.create_sandbox() as sandbox:
            events = await subject.run(sandbox, "speaks on every channel", "read-again")
            assert len(events) >= 3
            for after in range(-1, len(events) - 1):
                assert await read_events(sandbox.follow("read-again", after=after)) == events[after + 1 :]
            assert [event async for event in sandbox.follow("read-again", after=len(events) - 1)] == []

    async def test_several_read_at_once(self, subject: SandboxSubject) -> None:
        async with (
            subject.create_sandbox() as sandbox,
            subject.run_until_waiting(sandbox, "waits for the file go", "shared") as events,
        ):
            reading = [asyncio.ensure_future(read_events(sandbox.follow("shared"))) for _ in range(3)]
            await sandbox.write_file("go", b"")
            one, two, three = await asyncio.gather(*reading)
            assert one == two == three
            assert one[-1] == (await read_events(events))[-1]

    async def test_there_is_no_such_execution(self, subject: SandboxSubject) -> None:
        async with subject.create_sandbox() as sandbox:
            for unknown in ("never-asked", "..", ""):
                with pytest.raises(ExecutionNotFound):
                    await read_events(sandbox.follow(unknown))

    async def test_an_execution_id_runs_once(self, subject: SandboxSubject) -> None:
        async with subject.create_sandbox() as sandbox:
            first = await subject.run(sandbox, "writes out.txt", "once")
            mark = (await sandbox.list_files()).mark
            assert await subject.run(sandbox, "writes out.txt", "once") == first
            assert (await sandbox.list_files(mark)).files == []

    async def test_asking_again_attaches_to_the_call_that_runs(self, subject: SandboxSubject) -> None:
        async with (
            subject.create_sandbox() as sandbox,
            subject.run_until_waiting(sandbox, "waits for the file go", "attached") as first,
            subject.run_until_waiting(sandbox, "waits for the file go", "attached") as second,
        ):
            await sandbox.write_file("go", b"")
            assert get_end(await read_events(first)) == get_end(await read_events(second))

    async def test_an_execution_id_of_another_code_is_a_conflict(self, subject: SandboxSubject) -> None:
        async with subject.create_sandbox() as sandbox:
            await subject.run(sandbox, "prints hello", "taken")
            as_command = replace(subject.make_request("prints hello", "taken"), language="shell")
            with pytest.raises(SandboxConflict):
                await subject.run(sandbox, "writes out.txt", "taken")
            with pytest.raises(SandboxConflict):
                await read_events(sandbox.execute(as_command))
            assert (await sandbox.list_files()).files == []

    async def test_calls_run_one_after_another(self, subject: SandboxSubject) -> None:
        async with (
            subject.create_sandbox() as sandbox,
            subject.run_until_waiting(sandbox, "waits for the file go", "first") as first,
        ):
            second = asyncio.ensure_future(subject.run(sandbox, "writes out.txt", "second"))
            await self._wait_until_queued(subject, sandbox)
            assert [file.path for file in (await sandbox.list_files()).files] == []
            await sandbox.write_file("go", b"")
            assert get_end(await read_events(first)).status == "ok"
            assert get_end(await second).status == "ok"

    async def _wait_until_queued(self, subject: SandboxSubject, sandbox: Sandbox) -> None:
        while True:
            (info,) = [info for info in await subject.provider.list_sandboxes() if info.id == sandbox.id]
            if info.waiting:
                assert (info.running, info.waiting) == ("first", 1)
                return
            await asyncio.sleep(0.01)  # there is no notification of its arrival

    @pytest.mark.parametrize("by_id", [False, True])
    async def test_interrupt(self, subject: SandboxSubject, by_id: bool) -> None:
        async with subject.create_sandbox() as sandbox:
            async with subject.run_until_waiting(sandbox, "waits to be interrupted", "stopped") as events:
                assert await sandbox.interrupt("stopped" if by_id else None)
                rest = await read_events(events)
            assert [event.name for event in rest if isinstance(event, ExceptionRaised)] == [
                "KeyboardInterrupt"
            ]
            end = get_end(rest)
            assert (end.status, end.exit_code, end.state_kept) == ("interrupted", -1, True)
            assert end.reason
            assert get_end(await subject.run(sandbox, "prints hello")).status == "ok"

    async def test_nothing_to_interrupt(self, subject: SandboxSubject) -> None:
        async with subject.create_sandbox() as sandbox:
            assert not await sandbox.interrupt()
            await subject.run(sandbox, "prints hello", "over")
            assert not await sandbox.interrupt()
            assert not await sandbox.interrupt("over")

    async def test_interrupt_of_a_call_that_waits(self, subject: SandboxSubject) -> None:
        async with subject.create_sandbox() as sandbox:
            async with subject.run_until_waiting(sandbox, "waits to be interrupted", "first") as first:
                second = asyncio.ensure_future(subject.run(sandbox, "writes out.txt", "second"))
                await self._wait_until_queued(subject, sandbox)
                assert await sandbox.interrupt("second")
                assert await sandbox.interrupt("first")
                assert get_end(await read_events(first)).status == "interrupted"
                assert get_end(await second).status == "interrupted"
            assert (await sandbox.list_files()).files == []


class SandboxKit(SandboxProviderKit, SandboxExecutionKit, SandboxFilesKit):
    """All tests of both seams."""
