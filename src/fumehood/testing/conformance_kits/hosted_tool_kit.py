"""Conformance tests of `HostedTool`.

`HostedToolKit` needs a fixture `subject` of type `ToolSubject`.
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
    Caller,
    ConfiguredTool,
    HostedTool,
    ToolCallContext,
    ToolCallResult,
    ToolCallSession,
    ToolCallStep,
)
from fumehood.protocol.conversation import ConversationEntry
from fumehood.protocol.openai.items import OutputItem
from fumehood.protocol.openai.response_aggregation import aggregate_events
from fumehood.protocol.openai.responses import Response
from fumehood.protocol.openai.stream_events import (
    OutputItemAdded,
    OutputItemDone,
    ResponseCreated,
    StreamEvent,
)
from fumehood.protocol.openai.tool_specs import ToolSpec, parse_tool

SOMEBODY = Caller("somebody")
_SECONDS = 60
_INDEX = 3


@dataclass(frozen=True, slots=True)
class ToolSubject:
    """The implementation under test.

    configuration: a `tools` entry that it serves.
    valid_arguments: of a call that succeeds.
    invalid_arguments: complete, but not accepted.
    hanging_call: arguments of a call that does not end, and a function that returns whether it hangs now; without it,
        the tests of interruption are skipped.
    monotonic_now: the time of the tool's clock.
    """

    tool: HostedTool
    configuration: str
    valid_arguments: str
    invalid_arguments: Sequence[str] = ()
    hanging_call: tuple[str, Callable[[], bool]] | None = None
    monotonic_now: float = 0.0

    @property
    def spec(self) -> ToolSpec:
        return parse_tool(Raw(self.configuration.encode()), "tools[0]")

    async def configure(self) -> ConfiguredTool:
        configured = await self.tool.configure(self.spec, SOMEBODY, [])
        assert configured is not None
        return configured

    def make_context(self, call_id: str = "call_1", output_index: int = _INDEX) -> ToolCallContext:
        return ToolCallContext(
            caller=SOMEBODY,
            response_id="resp_1",
            output_index=output_index,
            call_id=call_id,
            deadline=self.monotonic_now + 10 * _SECONDS,
            allocate_output_index=itertools.count(output_index + 1).__next__,
        )

    async def start_call(self) -> ToolCallSession:
        return (await self.configure()).start_call(self.make_context())


async def run_call(
    session: ToolCallSession, arguments: str, fragment: int = 7
) -> tuple[list[StreamEvent], ToolCallResult]:
    """Run a call and return its events and result. Fails unless the result comes last."""
    events = [*session.open()]
    for start in range(0, len(arguments), fragment):
        events += session.feed([arguments[start : start + fragment]])
    async with asyncio.timeout(_SECONDS):
        steps = [step async for step in session.run()]
    for step in steps[:-1]:
        assert not isinstance(step, ToolCallResult), "the result is not the last step"
        events += step
    result = steps[-1]
    assert isinstance(result, ToolCallResult), "no result"
    return [*events, *result.events], result


def assert_call_complete(events: Sequence[StreamEvent], result: ToolCallResult, tool: HostedTool) -> None:
    """Check the events and the result of any ended call."""
    items = {
        _INDEX: result.item,
        **{extra.output_index: extra.item for extra in result.additional_items},
    }
    assert [*items] == [*range(_INDEX, _INDEX + len(items))]
    for index, item in items.items():
        assert_item_complete(
            [event for event in events if getattr(event, "output_index", None) == index], item, tool
        )
    assert {getattr(event, "output_index", None) for event in events} == {*items}
    assert {event.sequence_number for event in events} == {-1}, "only the engine sets sequence numbers"
    beginning = ResponseCreated(response=Response(id="resp_1", created_at=0, model="m"))
    assert aggregate_events([beginning, *events]).output == [*items.values()]
    assert msgspec.json.encode(list(events))
    assert isinstance(msgspec.json.decode(result.exchange.arguments), dict)
    exchanges = [result.exchange, *(extra.exchange for extra in result.additional_items)]
    assert {exchange.call_id for exchange in exchanges} == {"call_1"}
    assert [exchange.half for exchange in exchanges] in (["both"], ["call", "result"])


def assert_item_complete(events: Sequence[StreamEvent], expected: OutputItem, tool: HostedTool) -> None:
    """Check the events of one item."""
    first, last = events[0], events[-1]
    assert isinstance(first, OutputItemAdded)
    assert isinstance(last, OutputItemDone)
    assert [type(event) for event in events if isinstance(event, OutputItemAdded | OutputItemDone)] == [
        OutputItemAdded,
        OutputItemDone,
    ]
    assert last.item == expected
    item = decode_fields(expected)
    assert item["type"] in tool.item_types
    assert decode_fields(first.item)["id"] == item["id"]
    assert {getattr(event, "item_id", item["id"]) for event in events} == {item["id"]}


def get_model_output(result: ToolCallResult) -> str:
    """Return the output that the model reads, of any item."""
    return "".join([result.exchange.output, *(extra.exchange.output for extra in result.additional_items)])


def decode_fields(item: OutputItem) -> dict[str, object]:
    return msgspec.json.decode(msgspec.json.encode(item))


def make_conversation_item(item: OutputItem) -> ConversationEntry:
    fields = decode_fields(item)
    return ConversationEntry(
        type=str(fields["type"]), id=str(fields["id"]), turn=1, raw=msgspec.json.encode(item)
    )


class HostedToolKit:
    """All tests of the seam."""

    async def test_the_function_that_the_model_sees(self, subject: ToolSubject) -> None:
        function = (await subject.configure()).function
        assert function.name.isidentifier()
        assert function.description
        schema = msgspec.json.decode(function.parameters)
        assert schema["type"] == "object"
        assert "properties" in schema

    async def test_the_configuration_is_echoed(self, subject: ToolSubject) -> None:
        assert subject.spec.type in subject.tool.types
        echoed = msgspec.json.decode(subject.tool.echo_spec(subject.spec))
        assert echoed["type"] == subject.spec.type

    @pytest.mark.parametrize("fragment", [1, 7, 10_000])
    async def test_a_call_that_works(self, subject: ToolSubject, fragment: int) -> None:
        configured = await subject.configure()
        events, result = await run_call(
            configured.start_call(subject.make_context()), subject.valid_arguments, fragment
        )
        assert_call_complete(events, result, subject.tool)
        assert decode_fields(result.item)["status"] == "completed"
        assert (result.exchange.name, result.exchange.arguments) == (
            configured.function.name,
            subject.valid_arguments,
        )
        assert get_model_output(result)

    async def test_invalid_arguments_are_reported_to_the_model(self, subject: ToolSubject) -> None:
        for arguments in subject.invalid_arguments:
            events, result = await run_call(await subject.start_call(), arguments)
            assert_call_complete(events, result, subject.tool)
            assert decode_fields(result.item)["status"] in ("incomplete", "failed")
            assert get_model_output(result)

    @pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
    async def test_a_call_that_will_not_run(self, subject: ToolSubject, share: float) -> None:
        session = await subject.start_call()
        events = [
            *session.open(),
            *session.feed([subject.valid_arguments[: int(share * len(subject.valid_arguments))]]),
        ]
        result = session.abort("the turn was cut off")
        assert_call_complete([*events, *result.events], result, subject.tool)
        assert decode_fields(result.item)["status"] in ("incomplete", "failed")
        assert "the turn was cut off" in get_model_output(result)
        assert not result.files

    async def test_a_call_that_is_stopped(self, subject: ToolSubject) -> None:
        if subject.hanging_call is None:
            pytest.skip("the adapter knows no call that waits")
        arguments, is_waiting = subject.hanging_call
        session = await subject.start_call()
        events = [*session.open(), *session.feed([arguments])]
        async with asyncio.timeout(_SECONDS), aclosing(session.run()) as steps:
            running = asyncio.ensure_future(_read_until_result(steps, events))
            while not is_waiting():
                assert not running.done()
                await asyncio.sleep(0)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        result = session.abort("it was cancelled")
        assert_call_complete([*events, *result.events], result, subject.tool)
        last = [result.item, *(further.item for further in result.additional_items)][-1]
        assert decode_fields(last)["status"] in ("incomplete", "failed")
        assert "it was cancelled" in get_model_output(result)

    async def test_calls_at_once(self, subject: ToolSubject) -> None:
        configured = await subject.configure()
        sessions = [
            configured.start_call(subject.make_context(f"call_{number}", number)) for number in range(3)
        ]
        results = [
            result
            for _, result in await asyncio.gather(
                *(run_call(one, subject.valid_arguments) for one in sessions)
            )
        ]
        assert [result.exchange.call_id for result in results] == ["call_0", "call_1", "call_2"]
        assert len({str(decode_fields(result.item)["id"]) for result in results}) == 3

    async def test_an_item_that_a_client_sends_back(self, subject: ToolSubject) -> None:
        _, result = await run_call(await subject.start_call(), subject.valid_arguments)
        made = [(result.item, result.exchange)]
        made += [(further.item, further.exchange) for further in result.additional_items]
        written = msgspec.json.decode(subject.valid_arguments, type=dict[str, object])
        for item, before in made:
            exchange = subject.tool.rebuild_exchange(make_conversation_item(item))
            assert exchange is not None
            assert (exchange.name, exchange.half) == (before.name, before.half)
            if exchange.half != "result":
                rebuilt = msgspec.json.decode(exchange.arguments, type=dict[str, object])
                assert rebuilt.items() <= written.items(), "arguments that the model did not write"
            assert exchange.half == "call" or exchange.output
            assert subject.tool.rebuild_exchange(make_conversation_item(item)) == exchange

    async def test_an_item_that_is_damaged_is_no_failure(self, subject: ToolSubject) -> None:
        nested = b'{"x":%s%s}' % (b"[" * 100_000, b"]" * 100_000)
        for raw in (b"", b"5", b"\xff", b'{"id":"\xff"}', b'{"id":"\\ud800"}', nested):
            for kind in subject.tool.item_types:
                exchange = subject.tool.rebuild_exchange(
                    ConversationEntry(type=kind, id="x", turn=0, raw=raw)
                )
                assert exchange is None or exchange.name

    async def test_files_that_are_not_there(self, subject: ToolSubject) -> None:
        configured = await subject.configure()
        assert not await configured.find_files([])
        assert not await configured.find_files(["/mnt/data/never-written.txt", "../x", "\N{SNOWMAN}"])


async def _read_until_result(steps: AsyncGenerator[ToolCallStep], events: list[StreamEvent]) -> None:
    async for step in steps:
        if not isinstance(step, ToolCallResult):
            events += step
