"""Streams byte by byte: framing, silence, disconnects, slow and many readers; imports `fumehood.gateway`."""

import asyncio
import re
from itertools import pairwise
from typing import Any, cast

import pytest
from inline_snapshot import snapshot

from fumehood.gateway import sse
from fumehood.gateway.following import GONE
from fumehood.protocol.errors import ServerFault
from fumehood.protocol.events import StreamEvent
from fumehood.protocol.folding import EXECUTION, OUTPUTS
from fumehood.protocol.responses import Response
from fumehood.serving import stalled
from tests.support.gateway import Served, code_events, serving_gateway, text_events
from tests.support.sse import chunks, parse, read_body, read_head

pytestmark = pytest.mark.asyncio(loop_scope="module")


# --- framing ------------------------------------------------------------------------------------------


async def test_a_stream_is_its_events_and_done(gateway: Served) -> None:
    answer = await gateway.create(stream=True)
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert [name for name, _ in parse(answer.body)] == snapshot(
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
    assert [value["sequence_number"] for _, value in parse(answer.body)] == list(range(11))


async def test_events_that_are_there_share_a_write_and_none_is_split(gateway: Served) -> None:
    def script(response: Response) -> list[list[StreamEvent]]:
        events = text_events(response, [f"word {number} " for number in range(200)])
        return [events[:2], events[2:150], events[150:]]

    gateway.runs.script = script
    async with gateway.posted(stream=True) as (reader, _):
        assert b"transfer-encoding: chunked" in await read_head(reader)
        writes = await read_body(reader)
    assert [write.count(b"event: ") for write in writes] == [2, 148, 58]
    assert all(write.endswith(b"\n\n") for write in writes)
    assert len(parse(b"".join(writes))) == 208


# --- include ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("include", "outputs", "execution"),
    [([], None, False), ([OUTPUTS], [{"type": "logs", "logs": "42\n"}], False), ([EXECUTION], None, True)],
)
@pytest.mark.parametrize("streamed", [True, False])
async def test_what_was_not_asked_for_is_not_sent(
    gateway: Served, include: list[str], outputs: Any, execution: bool, streamed: bool
) -> None:
    gateway.runs.script = lambda response: [code_events(response)]
    answer = await gateway.create(stream=streamed, include=include)
    if streamed:
        events = dict(parse(answer.body))
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
    async with serving_gateway(always_include=[OUTPUTS]) as served:
        served.runs.script = lambda response: [code_events(response)]
        answer = await served.create()
    assert answer.json["output"][0]["outputs"] == [{"type": "logs", "logs": "42\n"}]


# --- silence, and those who leave ---------------------------------------------------------------------


async def test_a_silent_stream_shows_that_it_is_alive() -> None:
    async with serving_gateway(silence=0.05) as served:
        served.runs.script = lambda response: [text_events(response)[:2]]
        async with served.session.post(
            served.url("/v1/responses"), json={"model": "m", "input": "hi", "stream": True}
        ) as response:
            first = await response.content.readuntil(b": still here\n\n")
            assert first.count(b"event: ") == 2
            assert await response.content.readuntil(b"\n\n") == b": still here\n\n"
            run = served.runs.runs[0]
            run.say(*text_events(run.response)[2:])
            rest = await response.content.read()
    assert len(parse(first + rest)) == 11
    assert run.cancelled is None


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_leaves_takes_its_run_with_it(gateway: Served, streamed: bool) -> None:
    gateway.runs.script = lambda response: [text_events(response)[:2]]
    async with gateway.posted(stream=streamed):
        await gateway.runs.started.wait()
    run = gateway.runs.runs[0]
    async with asyncio.timeout(30):
        await run.ended.wait()
    assert run.cancelled == GONE


async def test_a_client_that_stays_is_left_alone(gateway: Served) -> None:
    gateway.runs.script = lambda response: [text_events(response)[:2]]
    async with gateway.posted(stream=True) as (reader, _):
        await read_head(reader)
        run = gateway.runs.runs[0]
        await asyncio.sleep(0.4)  # until it has been looked at
        assert run.cancelled is None
        run.say(*text_events(run.response)[2:])
        assert (await read_body(reader))[-1].endswith(b"data: [DONE]\n\n")


# --- runs that break ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (ServerFault("You read too slowly."), "You read too slowly."),
        (RuntimeError("a secret"), "The server failed; its log says why."),
    ],
)
async def test_a_stream_that_breaks_says_so(gateway: Served, fault: Exception, message: str) -> None:
    gateway.runs.script = lambda response: [text_events(response)[:2]]
    async with gateway.posted(stream=True) as (reader, _):
        await read_head(reader)
        gateway.runs.runs[0].break_off(fault)
        events = parse(b"".join(await read_body(reader)))
    (_, told), (kind, last) = events[-2:]
    assert told == {
        "type": "error",
        "sequence_number": 2,
        "error": {"message": message, "type": "server_error", "param": None, "code": "server_error"},
    }
    assert (kind, last["sequence_number"]) == ("response.failed", 3)
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": message}
    assert gateway.runs.runs[0].cancelled == "its stream broke off"


# --- many and slow ------------------------------------------------------------------------------------


async def test_200_streams_at_once(gateway: Served) -> None:
    gate = asyncio.Event()
    gateway.runs.script = lambda response: [text_events(response)[:2]]

    async def one() -> list[tuple[str, Any]]:
        async with gateway.session.post(
            gateway.url("/v1/responses"), json={"model": "m", "input": "hi", "stream": True}
        ) as response:
            await gate.wait()
            return parse(await response.content.read())

    tasks = [asyncio.ensure_future(one()) for _ in range(200)]
    while len(gateway.runs.runs) < 200:
        await asyncio.sleep(0.01)
    metrics = (await gateway.ask("GET", "/metrics")).body.decode()
    assert re.search(r"^fumehood_streams 200\.0$", metrics, re.MULTILINE)
    for run in gateway.runs.runs:
        run.say(*text_events(run.response)[2:])
    gate.set()
    streams = await asyncio.gather(*tasks)
    assert {len(events) for events in streams} == {11}
    assert len({events[0][1]["response"]["id"] for events in streams}) == 200
    metrics = (await gateway.ask("GET", "/metrics")).body.decode()
    assert re.search(r"^fumehood_streams 0\.0$", metrics, re.MULTILINE)


async def test_others_have_their_turns_between_large_events(gateway: Served) -> None:
    """One batch, most of whose events are larger than a write: between any two of those the loop goes round."""
    gateway.runs.script = lambda response: [text_events(response, ["x" * 1_100_000] * 3)]
    rounds = 0

    async def go_round() -> None:
        nonlocal rounds
        while True:
            await asyncio.sleep(0)
            rounds += 1

    encoded: list[int] = []
    encode = sse.encode_some

    def encoding(*arguments: Any) -> tuple[bytearray, int]:
        encoded.append(rounds)
        return encode(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sse.EventStream, "some", staticmethod(encoding))
        going = asyncio.create_task(go_round())
        answer = await gateway.create(stream=True)
        going.cancel()
    assert len(parse(answer.body)) == 11
    assert len(encoded) >= 6
    assert all(later > earlier for earlier, later in pairwise(encoded))


async def test_a_slow_reader_gets_everything_and_holds_up_nobody(gateway: Served) -> None:
    pieces = ["x" * 10_000] * 2_000
    gateway.runs.script = lambda response: [[event] for event in text_events(response, pieces)]
    # The reader's own buffer holds little, and nothing is taken out of it yet.
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=1000)
    try:
        body = b'{"model":"m","input":"hi","stream":true}'
        writer.write(
            b"POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(body), body)
        )
        await gateway.runs.started.wait()
        gateway.runs.script = lambda response: [text_events(response)]
        assert len(parse((await gateway.create(stream=True)).body)) == 11
        assert not gateway.runs.runs[0].ended.is_set()
        received = bytearray()
        async with asyncio.timeout(60):
            while not received.endswith(b"0\r\n\r\n"):
                received += await reader.read(1 << 20)
    finally:
        writer.close()
    assert len(parse(b"".join(chunks(bytes(received.partition(b"\r\n\r\n")[2]))))) == 2_008


async def test_a_reader_that_takes_nothing_is_left(gateway: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would keep its place among the responses at once for ever, and enough of them everybody out."""
    monkeypatch.setattr(stalled, "_SECONDS", 0.1)
    pieces = ["x" * 100_000] * 2_000  # more than any kernel keeps for the two ends of a connection
    gateway.runs.script = lambda response: [[event] for event in text_events(response, pieces)[:-1]]
    async with gateway.posted(stream=True) as (_, writer):
        cast(asyncio.Transport, writer.transport).pause_reading()  # or the stream's own buffer takes it all
        await gateway.runs.started.wait()
        run = gateway.runs.runs[0]
        async with asyncio.timeout(30):
            await run.ended.wait()
    assert run.cancelled == GONE
    assert gateway.app.metrics.figures.readers_cut["stalled"] == 1
