"""What every implementation of `HostedTool` must pass; imports pytest, `interfaces` and `protocol`.

Give a test class the fixture `subject` and inherit from `ToolKit`; docs/testing.md has an example.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
import pytest
from msgspec import Raw

from fumehood.interfaces import (
    CallContext,
    Caller,
    CallSession,
    HostedTool,
    OfferedTool,
    ToolResult,
    ToolStep,
)
from fumehood.protocol.conversation import Entry
from fumehood.protocol.events import Created, ItemAdded, ItemDone, StreamEvent
from fumehood.protocol.folding import fold
from fumehood.protocol.items import OutputItem
from fumehood.protocol.responses import Response
from fumehood.protocol.tools import ToolSpec, read_tool

SOMEBODY = Caller("somebody")
_SECONDS = 60
_INDEX = 3


@dataclass(frozen=True, slots=True)
class Subject:
    """The implementation under test.

    configuration: an entry of `tools` that it serves. now: the monotonic time of its clock.
    works: arguments of a call that succeeds. broken: arguments that it cannot take, whole as they are.
    waits: arguments of a call that goes on until it is stopped, and whether such a call has come so far that it waits;
        without them stopping is not tested.
    """

    tool: HostedTool
    configuration: str
    works: str
    broken: Sequence[str] = ()
    waits: tuple[str, Callable[[], bool]] | None = None
    now: float = 0.0

    @property
    def spec(self) -> ToolSpec:
        return read_tool(Raw(self.configuration.encode()), "tools[0]")

    async def offer(self) -> OfferedTool:
        offered = await self.tool.offer(self.spec, SOMEBODY, [])
        assert offered is not None
        return offered

    def context(self, call_id: str = "call_1", output_index: int = _INDEX) -> CallContext:
        return CallContext(
            caller=SOMEBODY,
            response_id="resp_1",
            output_index=output_index,
            call_id=call_id,
            deadline=self.now + 10 * _SECONDS,
            place=itertools.count(output_index + 1).__next__,
        )

    async def begin(self) -> CallSession:
        return (await self.offer()).begin(self.context())


async def call(
    session: CallSession, arguments: str, fragment: int = 7
) -> tuple[list[StreamEvent], ToolResult]:
    """All events of a call whose arguments come in fragments; fails unless the result comes, and comes last."""
    events = [*session.open()]
    for start in range(0, len(arguments), fragment):
        events += session.feed([arguments[start : start + fragment]])
    async with asyncio.timeout(_SECONDS):
        steps = [step async for step in session.run()]
    for step in steps[:-1]:
        assert not isinstance(step, ToolResult), "a result that is not the last step"
        events += step
    result = steps[-1]
    assert isinstance(result, ToolResult), "no result"
    return [*events, *result.events], result


def check_whole(events: Sequence[StreamEvent], result: ToolResult, tool: HostedTool) -> None:
    """What holds for every call, however it went."""
    made = {_INDEX: result.item, **{further.output_index: further.item for further in result.further}}
    assert [*made] == [*range(_INDEX, _INDEX + len(made))]
    for index, item in made.items():
        check_item([event for event in events if getattr(event, "output_index", None) == index], item, tool)
    assert {getattr(event, "output_index", None) for event in events} == {*made}
    assert {event.sequence_number for event in events} == {-1}, "only the engine numbers"
    beginning = Created(response=Response(id="resp_1", created_at=0, model="m"))
    assert fold([beginning, *events]).output == [*made.values()]
    assert msgspec.json.encode(list(events))
    assert isinstance(msgspec.json.decode(result.exchange.arguments), dict)
    exchanges = [result.exchange, *(further.exchange for further in result.further)]
    assert {exchange.call_id for exchange in exchanges} == {"call_1"}
    assert [exchange.tells for exchange in exchanges] in (["both"], ["call", "result"])


def check_item(events: Sequence[StreamEvent], made: OutputItem, tool: HostedTool) -> None:
    """The events of one item."""
    first, last = events[0], events[-1]
    assert isinstance(first, ItemAdded)
    assert isinstance(last, ItemDone)
    assert [type(event) for event in events if isinstance(event, ItemAdded | ItemDone)] == [
        ItemAdded,
        ItemDone,
    ]
    assert last.item == made
    item = fields(made)
    assert item["type"] in tool.item_types
    assert fields(first.item)["id"] == item["id"]
    assert {getattr(event, "item_id", item["id"]) for event in events} == {item["id"]}


def told(result: ToolResult) -> str:
    """What the model reads, in whichever item it is."""
    return "".join([result.exchange.output, *(further.exchange.output for further in result.further)])


def fields(item: OutputItem) -> dict[str, object]:
    return msgspec.json.decode(msgspec.json.encode(item))


def entry_of(item: OutputItem) -> Entry:
    raw = msgspec.json.encode(item)
    known = fields(item)
    return Entry(type=str(known["type"]), id=str(known["id"]), turn=1, raw=raw)


class ToolKit:
    """A subclass has a fixture `subject` that gives a `Subject`."""

    async def test_what_the_model_is_told(self, subject: Subject) -> None:
        function = (await subject.offer()).function
        assert function.name.isidentifier()
        assert function.description
        schema = msgspec.json.decode(function.parameters)
        assert schema["type"] == "object"
        assert "properties" in schema

    async def test_the_configuration_is_shown(self, subject: Subject) -> None:
        assert subject.spec.type in subject.tool.types
        shown = msgspec.json.decode(subject.tool.echo(subject.spec))
        assert shown["type"] == subject.spec.type

    @pytest.mark.parametrize("fragment", [1, 7, 10_000])
    async def test_a_call_that_works(self, subject: Subject, fragment: int) -> None:
        offered = await subject.offer()
        events, result = await call(offered.begin(subject.context()), subject.works, fragment)
        check_whole(events, result, subject.tool)
        assert fields(result.item)["status"] == "completed"
        assert (result.exchange.name, result.exchange.arguments) == (offered.function.name, subject.works)
        assert told(result)

    async def test_arguments_that_cannot_be_taken_are_told_to_the_model(self, subject: Subject) -> None:
        for arguments in subject.broken:
            events, result = await call(await subject.begin(), arguments)
            check_whole(events, result, subject.tool)
            assert fields(result.item)["status"] in ("incomplete", "failed")
            assert told(result)

    @pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
    async def test_a_call_that_will_not_run(self, subject: Subject, share: float) -> None:
        session = await subject.begin()
        events = [*session.open(), *session.feed([subject.works[: int(share * len(subject.works))]])]
        result = session.abort("the turn was cut off")
        check_whole([*events, *result.events], result, subject.tool)
        assert fields(result.item)["status"] in ("incomplete", "failed")
        assert "the turn was cut off" in told(result)
        assert not result.files

    async def test_a_call_that_is_stopped(self, subject: Subject) -> None:
        if subject.waits is None:
            pytest.skip("the adapter knows no call that waits")
        arguments, is_waiting = subject.waits
        session = await subject.begin()
        events = [*session.open(), *session.feed([arguments])]
        async with asyncio.timeout(_SECONDS), aclosing(session.run()) as steps:
            running = asyncio.ensure_future(_until_result(steps, events))
            while not is_waiting():
                assert not running.done()
                await asyncio.sleep(0)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        result = session.abort("it was cancelled")
        check_whole([*events, *result.events], result, subject.tool)
        last = [result.item, *(further.item for further in result.further)][-1]
        assert fields(last)["status"] in ("incomplete", "failed")
        assert "it was cancelled" in told(result)

    async def test_calls_at_once(self, subject: Subject) -> None:
        offered = await subject.offer()
        sessions = [offered.begin(subject.context(f"call_{number}", number)) for number in range(3)]
        results = [
            result for _, result in await asyncio.gather(*(call(one, subject.works) for one in sessions))
        ]
        assert [result.exchange.call_id for result in results] == ["call_0", "call_1", "call_2"]
        assert len({str(fields(result.item)["id"]) for result in results}) == 3

    async def test_an_item_that_comes_back(self, subject: Subject) -> None:
        _, result = await call(await subject.begin(), subject.works)
        made = [(result.item, result.exchange)]
        made += [(further.item, further.exchange) for further in result.further]
        for item, before in made:
            exchange = subject.tool.recall(entry_of(item))
            assert exchange is not None
            assert (exchange.name, exchange.tells) == (before.name, before.tells)
            assert exchange.tells == "result" or isinstance(msgspec.json.decode(exchange.arguments), dict)
            assert exchange.tells == "call" or exchange.output
            assert subject.tool.recall(entry_of(item)) == exchange

    async def test_an_item_that_is_damaged_is_no_failure(self, subject: Subject) -> None:
        nested = b'{"x":%s%s}' % (b"[" * 100_000, b"]" * 100_000)
        for raw in (b"", b"5", b"\xff", b'{"id":"\xff"}', b'{"id":"\\ud800"}', nested):
            for kind in subject.tool.item_types:
                exchange = subject.tool.recall(Entry(type=kind, id="x", turn=0, raw=raw))
                assert exchange is None or exchange.name

    async def test_files_that_are_not_there(self, subject: Subject) -> None:
        offered = await subject.offer()
        assert not await offered.find_files([])
        assert not await offered.find_files(["/mnt/data/never-written.txt", "../x", "\N{SNOWMAN}"])


async def _until_result(steps: AsyncGenerator[ToolStep], events: list[StreamEvent]) -> None:
    async for step in steps:
        if not isinstance(step, ToolResult):
            events += step
