"""What every implementation of `Sandbox` and `SandboxProvider` must pass; imports pytest, `interfaces`, `protocol`.

Give a test class the fixture `subject` and inherit from `SandboxKit`; docs/testing.md has an example.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

import pytest
from msgspec.structs import replace

from fumehood.interfaces import Sandbox, SandboxProvider, SandboxRef
from fumehood.protocol.sandbox import (
    AnyOutput,
    End,
    ExecuteRequest,
    Raised,
    Result,
    SandboxSpec,
    Stderr,
    Stdout,
)
from fumehood.protocol.sandbox_errors import (
    Conflict,
    ExecutionNotFound,
    RequestRefused,
    SandboxGone,
    SandboxNotFound,
    Unreachable,
)
from fumehood.testing.sandbox_kit_files import FilesKit

type Program = Literal[
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

PYTHON_PROGRAMS: Mapping[Program, str] = {
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
"""What a sandbox is asked to run, where it runs Python and a shell."""

_SECONDS = 60
_GONE = (SandboxGone, SandboxNotFound)


@dataclass(frozen=True, slots=True)
class Subject:
    """The implementation under test.

    programs: the code that makes a sandbox of it behave as named.
    another: makes a provider of its own, which a test then closes; without it closing is not tested.
    """

    provider: SandboxProvider
    programs: Mapping[Program, str] = field(default_factory=lambda: PYTHON_PROGRAMS)
    another: Callable[[], Awaitable[SandboxProvider]] | None = None

    @asynccontextmanager
    async def sandbox(self, name: str | None = None) -> AsyncGenerator[Sandbox]:
        """A new sandbox for as long as a test needs it."""
        async with asyncio.timeout(_SECONDS):
            ref = await self.provider.create(SandboxSpec(), name)
            try:
                yield await self.provider.attach(ref)
            finally:
                await self.provider.destroy(ref)

    def request(self, program: Program, execution_id: str | None = None) -> ExecuteRequest:
        language = "shell" if program.startswith("a command") else "python"
        return ExecuteRequest(code=self.programs[program], language=language, execution_id=execution_id)

    async def run(
        self, sandbox: Sandbox, program: Program, execution_id: str | None = None
    ) -> list[AnyOutput]:
        return await events_of(sandbox.execute(self.request(program, execution_id)))


async def events_of(events: AsyncGenerator[AnyOutput]) -> list[AnyOutput]:
    """All of them; fails unless one `End` comes, and comes last."""
    seen = [event async for event in events]
    assert [isinstance(event, End) for event in seen] == [False] * (len(seen) - 1) + [True], seen
    return seen


def end_of(events: list[AnyOutput]) -> End:
    last = events[-1]
    assert isinstance(last, End)
    return last


def printed(events: list[AnyOutput]) -> str:
    return "".join(event.text for event in events if isinstance(event, Stdout))


async def until_waiting(events: AsyncGenerator[AnyOutput]) -> None:
    """Read up to the word that the waiting programs begin with."""
    async for event in events:
        if isinstance(event, Stdout) and "waiting" in event.text:
            return
    raise AssertionError("the program ended before it waited")


class ProviderKit:
    """Sandboxes come, are found again, and go."""

    async def test_a_sandbox_lives_until_it_is_destroyed(self, subject: Subject) -> None:
        ref = await subject.provider.create(SandboxSpec(memory="1g", tenant="somebody"))
        (info,) = [info for info in await subject.provider.sandboxes() if info.id == ref.id]
        assert (info.memory, info.tenant, info.running, info.waiting) == ("1g", "somebody", None, 0)
        assert 0 < info.created_at <= info.last_used_at
        sandbox = await subject.provider.attach(ref)
        assert sandbox.id == ref.id
        await subject.provider.destroy(ref)
        assert ref.id not in [info.id for info in await subject.provider.sandboxes()]

    async def test_each_is_another_one(self, subject: Subject) -> None:
        async with subject.sandbox() as one, subject.sandbox() as other:
            assert one.id != other.id
            await one.write("mine.txt", b"mine")
            assert (await other.list()).files == []

    async def test_a_name_that_lives_gives_that_one(self, subject: Subject) -> None:
        async with subject.sandbox("kit-again") as sandbox:
            await sandbox.write("here.txt", b"x")
            again = await subject.provider.create(SandboxSpec(), "kit-again")
            found = await subject.provider.attach(SandboxRef(again.id))
            assert [file.path for file in (await found.list()).files] == ["here.txt"]
            names = [info.id for info in await subject.provider.sandboxes()]
            assert names.count("kit-again") == 1

    async def test_asked_at_once_a_name_is_made_once(self, subject: Subject) -> None:
        asked = [subject.provider.create(SandboxSpec(), "kit-at-once") for _ in range(3)]
        refs = await asyncio.gather(*asked)
        try:
            assert {ref.id for ref in refs} == {"kit-at-once"}
            names = [info.id for info in await subject.provider.sandboxes()]
            assert names.count("kit-at-once") == 1
        finally:
            await subject.provider.destroy(refs[0])

    async def test_a_name_that_lives_with_another_spec_is_a_conflict(self, subject: Subject) -> None:
        async with subject.sandbox("kit-conflict") as sandbox:
            with pytest.raises(Conflict):
                await subject.provider.create(SandboxSpec(memory="4g"), "kit-conflict")
            assert (await sandbox.list()).files == []

    @pytest.mark.parametrize("name", ["", "..", "a/b", "a b", "-x", "x" * 65, "\u00e4"])
    async def test_what_is_no_name_is_refused(self, subject: Subject, name: str) -> None:
        with pytest.raises(RequestRefused):
            await subject.provider.create(SandboxSpec(), name)

    @pytest.mark.parametrize("name", ["kit-never-made", "..", "a/b", ""])
    async def test_what_never_was_is_not_found(self, subject: Subject, name: str) -> None:
        with pytest.raises(SandboxNotFound):
            await subject.provider.attach(SandboxRef(name))
        await subject.provider.destroy(SandboxRef(name))

    async def test_what_was_destroyed_is_gone(self, subject: Subject) -> None:
        async with subject.sandbox() as sandbox:
            await sandbox.write("file.txt", b"x")
            await subject.provider.destroy(SandboxRef(sandbox.id))
            with pytest.raises(_GONE):
                await subject.provider.attach(SandboxRef(sandbox.id))
            with pytest.raises(_GONE):
                await subject.run(sandbox, "prints hello")
            with pytest.raises(_GONE):
                await sandbox.list()
            with pytest.raises(_GONE):
                [piece async for piece in sandbox.read("file.txt")]
            with pytest.raises(_GONE):
                await sandbox.write("file.txt", b"x")
            with pytest.raises(_GONE):
                await sandbox.delete("file.txt")
            with pytest.raises(_GONE):
                await sandbox.unpack(b"", kind="tar")
            with pytest.raises(_GONE):
                await sandbox.interrupt()
            await subject.provider.destroy(SandboxRef(sandbox.id))

    async def test_a_name_can_be_given_again(self, subject: Subject) -> None:
        async with subject.sandbox("kit-reborn") as sandbox:
            await sandbox.write("old.txt", b"x")
        async with subject.sandbox("kit-reborn") as sandbox:
            assert (await sandbox.list()).files == []

    async def test_destroying_ends_what_runs(self, subject: Subject) -> None:
        async with subject.sandbox() as sandbox:
            events = sandbox.execute(subject.request("waits to be interrupted"))
            await until_waiting(events)
            await subject.provider.destroy(SandboxRef(sandbox.id))
            try:
                end = end_of(await events_of(events))
            except _GONE:
                return
            assert (end.status, end.state_kept) == ("lost", False)

    async def test_closing(self, subject: Subject) -> None:
        if subject.another is None:
            pytest.skip("the adapter makes no second provider")
        provider = await subject.another()
        ref = await provider.create(SandboxSpec())
        sandbox = await provider.attach(ref)
        await provider.destroy(ref)
        await provider.close()
        await provider.close()
        with pytest.raises((Unreachable, *_GONE)):
            await sandbox.list()
        with pytest.raises(Unreachable):
            await provider.create(SandboxSpec())


class CallsKit:
    """Code runs once, one after another, and its events can be read from any point."""

    async def test_events_and_their_end(self, subject: Subject) -> None:
        async with subject.sandbox() as sandbox:
            events = await subject.run(sandbox, "prints hello")
            assert printed(events) == "hello\n"
            end = end_of(events)
            assert (end.status, end.exit_code, end.state_kept, end.reason) == ("ok", 0, True, "")
            assert end.duration_ms >= 0

    async def test_every_channel(self, subject: Subject) -> None:
        async with subject.sandbox() as sandbox:
            events = await subject.run(sandbox, "speaks on every channel")
            assert printed(events) == "out\n"
            assert "".join(event.text for event in events if isinstance(event, Stderr)) == "err\n"
            (result,) = [event for event in events if isinstance(event, Result)]
            assert result.data["text/plain"] == "'value'"

    async def test_code_that_raises(self, subject: Subject) -> None:
        async with subject.sandbox() as sandbox:
            events = await subject.run(sandbox, "raises ValueError")
            (raised,) = [event for event in events if isinstance(event, Raised)]
            assert (raised.name, raised.value) == ("ValueError", "no")
            end = end_of(events)
            assert (end.status, end.exit_code, end.state_kept) == ("error", 1, True)

    async def test_code_that_exits(self, subject: Subject) -> None:
        async with subject.sandbox() as sandbox:
            end = end_of(await subject.run(sandbox, "exits with 3"))
            assert (end.status, end.exit_code) == ("error", 3)

    async def test_a_command(self, subject: Subject) -> None:
        async with subject.sandbox() as sandbox:
            events = await subject.run(sandbox, "a command exits with 3")
            assert "".join(event.text for event in events if isinstance(event, Stdout)) == "out\n"
            assert "".join(event.text for event in events if isinstance(event, Stderr)) == "err\n"
            assert (end_of(events).status, end_of(events).exit_code) == ("error", 3)
            assert [entry.path for entry in (await sandbox.list()).files] == ["out.txt"]

    async def test_interrupt_of_a_command(self, subject: Subject) -> None:
        async with subject.sandbox() as sandbox:
            async with aclosing(
                sandbox.execute(subject.request("a command waits to be interrupted"))
            ) as events:
                await until_waiting(events)
                assert await sandbox.interrupt()
                end = end_of(await events_of(events))
            assert (end.status, end.exit_code, end.state_kept) == ("interrupted", -1, True)
            assert end_of(await subject.run(sandbox, "prints hello")).status == "ok"

    async def test_code_and_a_command_are_not_the_same(self, subject: Subject) -> None:
        async with subject.sandbox() as sandbox:
            request = subject.request("prints hello", "once")
            await events_of(sandbox.execute(request))
            with pytest.raises(Conflict):
                await events_of(sandbox.execute(replace(request, language="shell")))

    async def test_leaving_the_events_does_not_stop_the_code(self, subject: Subject) -> None:
        async with subject.sandbox() as sandbox:
            async with aclosing(sandbox.execute(subject.request("waits for the file go", "left"))) as events:
                await until_waiting(events)
            await sandbox.write("go", b"")
            events = await events_of(sandbox.follow("left"))
            assert printed(events) == "waiting\ndone\n"
            assert end_of(events).status == "ok"
            assert "done.txt" in [file.path for file in (await sandbox.list()).files]

    async def test_events_can_be_read_from_any_point(self, subject: Subject) -> None:
        async with subject.sandbox() as sandbox:
            events = await subject.run(sandbox, "speaks on every channel", "read-again")
            assert len(events) >= 3
            for after in range(-1, len(events) - 1):
                assert await events_of(sandbox.follow("read-again", after=after)) == events[after + 1 :]
            assert [event async for event in sandbox.follow("read-again", after=len(events) - 1)] == []

    async def test_several_read_at_once(self, subject: Subject) -> None:
        async with (
            subject.sandbox() as sandbox,
            aclosing(sandbox.execute(subject.request("waits for the file go", "shared"))) as events,
        ):
            await until_waiting(events)
            reading = [asyncio.ensure_future(events_of(sandbox.follow("shared"))) for _ in range(3)]
            await sandbox.write("go", b"")
            one, two, three = await asyncio.gather(*reading)
            assert one == two == three
            assert one[-1] == (await events_of(events))[-1]

    async def test_there_is_no_such_execution(self, subject: Subject) -> None:
        async with subject.sandbox() as sandbox:
            for unknown in ("never-asked", "..", ""):
                with pytest.raises(ExecutionNotFound):
                    await events_of(sandbox.follow(unknown))

    async def test_an_execution_id_runs_once(self, subject: Subject) -> None:
        async with subject.sandbox() as sandbox:
            first = await subject.run(sandbox, "writes out.txt", "once")
            mark = (await sandbox.list()).mark
            assert await subject.run(sandbox, "writes out.txt", "once") == first
            assert (await sandbox.list(mark)).files == []

    async def test_asking_again_attaches_to_the_call_that_runs(self, subject: Subject) -> None:
        async with subject.sandbox() as sandbox:
            request = subject.request("waits for the file go", "attached")
            async with (
                aclosing(sandbox.execute(request)) as first,
                aclosing(sandbox.execute(request)) as second,
            ):
                await until_waiting(first)
                await until_waiting(second)
                await sandbox.write("go", b"")
                assert end_of(await events_of(first)) == end_of(await events_of(second))

    async def test_an_execution_id_of_another_code_is_a_conflict(self, subject: Subject) -> None:
        async with subject.sandbox() as sandbox:
            await subject.run(sandbox, "prints hello", "taken")
            with pytest.raises(Conflict):
                await subject.run(sandbox, "writes out.txt", "taken")
            assert (await sandbox.list()).files == []

    async def test_calls_run_one_after_another(self, subject: Subject) -> None:
        async with (
            subject.sandbox() as sandbox,
            aclosing(sandbox.execute(subject.request("waits for the file go", "first"))) as first,
        ):
            await until_waiting(first)
            second = asyncio.ensure_future(subject.run(sandbox, "writes out.txt", "second"))
            await self._until_waiting_for_its_turn(subject, sandbox)
            assert [file.path for file in (await sandbox.list()).files] == []
            await sandbox.write("go", b"")
            assert end_of(await events_of(first)).status == "ok"
            assert end_of(await second).status == "ok"

    async def _until_waiting_for_its_turn(self, subject: Subject, sandbox: Sandbox) -> None:
        while True:
            (info,) = [info for info in await subject.provider.sandboxes() if info.id == sandbox.id]
            if info.waiting:
                assert (info.running, info.waiting) == ("first", 1)
                return
            await asyncio.sleep(0.01)  # it is on its way, and nothing tells when it has arrived

    @pytest.mark.parametrize("by_id", [False, True])
    async def test_interrupt(self, subject: Subject, by_id: bool) -> None:
        async with subject.sandbox() as sandbox:
            async with aclosing(
                sandbox.execute(subject.request("waits to be interrupted", "stopped"))
            ) as events:
                await until_waiting(events)
                assert await sandbox.interrupt("stopped" if by_id else None)
                rest = await events_of(events)
            assert [event.name for event in rest if isinstance(event, Raised)] == ["KeyboardInterrupt"]
            end = end_of(rest)
            assert (end.status, end.exit_code, end.state_kept) == ("interrupted", -1, True)
            assert end.reason
            assert end_of(await subject.run(sandbox, "prints hello")).status == "ok"

    async def test_nothing_to_interrupt(self, subject: Subject) -> None:
        async with subject.sandbox() as sandbox:
            assert not await sandbox.interrupt()
            await subject.run(sandbox, "prints hello", "over")
            assert not await sandbox.interrupt()
            assert not await sandbox.interrupt("over")

    async def test_interrupt_of_a_call_that_waits(self, subject: Subject) -> None:
        async with subject.sandbox() as sandbox:
            async with aclosing(
                sandbox.execute(subject.request("waits to be interrupted", "first"))
            ) as first:
                await until_waiting(first)
                second = asyncio.ensure_future(subject.run(sandbox, "writes out.txt", "second"))
                await self._until_waiting_for_its_turn(subject, sandbox)
                assert await sandbox.interrupt("second")
                assert await sandbox.interrupt("first")
                assert end_of(await events_of(first)).status == "interrupted"
                assert end_of(await second).status == "interrupted"
            assert (await sandbox.list()).files == []


class SandboxKit(ProviderKit, CallsKit, FilesKit):
    """Every promise of the two seams; a subclass has a fixture `subject` that gives a `Subject`."""
