"""Streams byte by byte: framing, keepalives, disconnects, slow and many clients."""

import asyncio
import re
from itertools import pairwise
from typing import Any

import pytest
from inline_snapshot import snapshot

from fumehood.gateway.streaming import server_sent_events
from fumehood.gateway.streaming.event_sender import CLIENT_DISCONNECTED
from fumehood.protocol.openai.api_errors import InternalServerError
from fumehood.protocol.openai.response_projection import INCLUDE_CODE_OUTPUTS, INCLUDE_EXECUTION
from fumehood.protocol.openai.responses import Response
from fumehood.protocol.openai.stream_events import ShellCallCommandDelta, StreamEvent
from tests.support.scripted_gateway import ScriptedGateway, code_events, run_gateway, text_events
from tests.support.sse_parsing import parse_events, read_body, read_head

pytestmark = pytest.mark.asyncio(loop_scope="module")


# --- framing ------------------------------------------------------------------------------------------


async def test_a_stream_is_its_events_and_done(gateway: ScriptedGateway) -> None:
    answer = await gateway.create_response(stream=True)
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert [name for name, _ in parse_events(answer.body)] == snapshot(
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.delta",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
    )
    assert [value["sequence_number"] for _, value in parse_events(answer.body)] == list(range(11))


async def test_events_that_are_there_share_a_write_and_none_is_split(gateway: ScriptedGateway) -> None:
    def script(response: Response) -> list[list[StreamEvent]]:
        events = text_events(response, [f"word {number} " for number in range(200)])
        return [events[:2], events[2:150], events[150:]]

    gateway.runs.script = script
    async with gateway.post_response(stream=True) as (reader, _):
        assert b"transfer-encoding: chunked" in await read_head(reader)
        writes = await read_body(reader)
    assert [write.count(b"event: ") for write in writes] == [2, 148, 58]
    assert all(write.endswith(b"\n\n") for write in writes)
    assert len(parse_events(b"".join(writes))) == 208


async def test_a_helper_that_throws_gets_no_parts_of_commands(gateway: ScriptedGateway) -> None:
    """`responses.stream()` of openai-node: a write of nothing but such parts would end the stream."""

    def script(response: Response) -> list[list[StreamEvent]]:
        *begin, last = text_events(response)
        part = ShellCallCommandDelta(output_index=0, command_index=0, delta="ls")
        return [begin[:4], [part], [*begin[4:], part], [part], [last]]

    gateway.runs.script = script
    helper = {"x-stainless-helper-method": "stream", "x-stainless-lang": "js"}
    answers = [await gateway.create_response(stream=True, headers=headers) for headers in (helper, None)]
    less, all_events = [[name for name, _ in parse_events(answer.body)] for answer in answers]
    assert all_events.count("response.shell_call_command.delta") == 3
    assert less == [name for name in all_events if name != "response.shell_call_command.delta"]
    assert less[-1] == "response.completed"


# --- include ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("include", "outputs", "execution"),
    [
        ([], None, False),
        ([INCLUDE_CODE_OUTPUTS], [{"type": "logs", "logs": "42\n"}], False),
        ([INCLUDE_EXECUTION], None, True),
    ],
)
@pytest.mark.parametrize("streamed", [True, False])
async def test_what_was_not_asked_for_is_not_sent(
    gateway: ScriptedGateway, include: list[str], outputs: Any, execution: bool, streamed: bool
) -> None:
    gateway.runs.script = lambda response: [code_events(response)]
    answer = await gateway.create_response(stream=streamed, include=include)
    if streamed:
        events = dict(parse_events(answer.body))
        items = [
            events["response.output_item.done"]["item"],
            events["response.completed"]["response"]["output"][0],
        ]
    else:
        items = answer.json["output"]
    for item in items:
        assert item["outputs"] == outputs
        assert ("fumehood:execution" in item) == execution


async def test_a_server_may_always_include_outputs() -> None:
    async with run_gateway(always_include=[INCLUDE_CODE_OUTPUTS]) as gateway:
        gateway.runs.script = lambda response: [code_events(response)]
        answer = await gateway.create_response()
    assert answer.json["output"][0]["outputs"] == [{"type": "logs", "logs": "42\n"}]


# --- silence, and those who leave ---------------------------------------------------------------------


async def test_a_silent_stream_shows_that_it_is_alive() -> None:
    async with run_gateway(keepalive_seconds=0.05) as gateway:
        gateway.runs.script = lambda response: [text_events(response)[:2]]
        async with gateway.session.post(
            gateway.url("/v1/responses"), json={"model": "m", "input": "hi", "stream": True}
        ) as response:
            first = await response.content.readuntil(b": still here\n\n")
            assert first.count(b"event: ") == 2
            assert await response.content.readuntil(b"\n\n") == b": still here\n\n"
            run = gateway.runs.runs[0]
            run.finish()
            rest = await response.content.read()
    assert len(parse_events(first + rest)) == 11
    assert run.cancelled is None


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_leaves_takes_its_run_with_it(gateway: ScriptedGateway, streamed: bool) -> None:
    gateway.runs.script = lambda response: [text_events(response)[:2]]
    async with gateway.post_response(stream=streamed):
        await gateway.runs.started.wait()
    run = gateway.runs.runs[0]
    async with asyncio.timeout(30):
        await run.ended.wait()
    assert run.cancelled == CLIENT_DISCONNECTED


async def test_a_client_that_stays_is_left_alone(gateway: ScriptedGateway) -> None:
    gateway.runs.script = lambda response: [text_events(response)[:2]]
    async with gateway.post_response(stream=True) as (reader, _):
        await read_head(reader)
        run = gateway.runs.runs[0]
        await asyncio.sleep(0.4)  # until it has been looked at
        assert run.cancelled is None
        run.finish()
        assert (await read_body(reader))[-1].endswith(b"data: [DONE]\n\n")


# --- runs that break ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (InternalServerError("You read too slowly."), "You read too slowly."),
        (RuntimeError("a secret"), "Internal server error; see the server log."),
    ],
)
async def test_a_stream_that_breaks_says_so(gateway: ScriptedGateway, fault: Exception, message: str) -> None:
    gateway.runs.script = lambda response: [text_events(response)[:2]]
    async with gateway.post_response(stream=True) as (reader, _):
        await read_head(reader)
        gateway.runs.runs[0].fail(fault)
        events = parse_events(b"".join(await read_body(reader)))
    (_, told), (kind, last) = events[-2:]
    assert told == {
        "type": "error",
        "sequence_number": 2,
        "error": {"message": message, "type": "server_error", "param": None, "code": "server_error"},
    }
    assert (kind, last["sequence_number"]) == ("response.failed", 3)
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": message}
    assert gateway.runs.runs[0].cancelled == "stream failed"


# --- many and slow ------------------------------------------------------------------------------------


async def test_200_streams_at_once(gateway: ScriptedGateway) -> None:
    gate = asyncio.Event()
    gateway.runs.script = lambda response: [text_events(response)[:2]]

    async def one() -> list[tuple[str, Any]]:
        async with gateway.session.post(
            gateway.url("/v1/responses"), json={"model": "m", "input": "hi", "stream": True}
        ) as response:
            await gate.wait()
            return parse_events(await response.content.read())

    tasks = [asyncio.ensure_future(one()) for _ in range(200)]
    while len(gateway.runs.runs) < 200:
        await asyncio.sleep(0.01)
    metrics = (await gateway.request("GET", "/metrics")).body.decode()
    assert re.search(r"^fumehood_open_streams 200\.0$", metrics, re.MULTILINE)
    for run in gateway.runs.runs:
        run.finish()
    gate.set()
    streams = await asyncio.gather(*tasks)
    assert {len(events) for events in streams} == {11}
    assert len({events[0][1]["response"]["id"] for events in streams}) == 200
    metrics = (await gateway.request("GET", "/metrics")).body.decode()
    assert re.search(r"^fumehood_open_streams 0\.0$", metrics, re.MULTILINE)


async def test_others_have_their_turns_between_large_events(gateway: ScriptedGateway) -> None:
    """One batch, most of whose events are larger than a write: between any two of those the loop goes round."""
    gateway.runs.script = lambda response: [text_events(response, ["x" * 1_100_000] * 3)]
    rounds = 0

    async def go_round() -> None:
        nonlocal rounds
        while True:
            await asyncio.sleep(0)
            rounds += 1

    encoded: list[int] = []
    encode = server_sent_events.encode_batch

    def encoding(*arguments: Any) -> tuple[bytearray, int]:
        encoded.append(rounds)
        return encode(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_sent_events.SseEncoder, "encode_batch", staticmethod(encoding))
        going = asyncio.create_task(go_round())
        answer = await gateway.create_response(stream=True)
        going.cancel()
    assert len(parse_events(answer.body)) == 11
    assert len(encoded) >= 6
    assert all(later > earlier for earlier, later in pairwise(encoded))


async def test_a_slow_reader_gets_everything_and_slows_down_nobody(gateway: ScriptedGateway) -> None:
    pieces = ["x" * 10_000] * 2_000
    gateway.runs.script = lambda response: [[event] for event in text_events(response, pieces)]
    body = {"model": "m", "input": "hi", "stream": True}
    # The client buffers little, and does not read yet.
    async with gateway.session.post(gateway.url("/v1/responses"), json=body) as slow:
        gateway.runs.script = lambda response: [text_events(response)]
        assert len(parse_events((await gateway.create_response(stream=True)).body)) == 11
        assert gateway.app.metrics.open_streams == 1
        assert len(parse_events(await slow.read())) == 2_008
