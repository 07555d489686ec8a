"""Servers with habits of their own, each ending in a right answer or a right error.

Every case is what a server writes on a real socket, and what must come out of it. docs/models.md has the same list
in words.
"""

import asyncio
import gzip
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from fumehood.models.chat_completions.chat_backend import ChatCompletionsBackend
from fumehood.models.model_settings import ModelSettings
from fumehood.models.responses_api.responses_backend import ResponsesApiBackend
from fumehood.models.retrying_backend import RetryingBackend
from fumehood.models.upstream.http1_client import PooledHttpClient
from fumehood.models.upstream.http_backend import HttpModelBackend
from fumehood.protocol.model_turns import (
    AnyModelEvent,
    ModelCallArgumentsDelta,
    ModelCallStarted,
    ModelReasoningDelta,
    ModelRefusalDelta,
    ModelRequest,
    ModelTextDelta,
    ModelTurnEnded,
)
from fumehood.protocol.openai.api_errors import (
    ModelError,
    ModelRateLimited,
    ModelRejectedRequest,
    ModelTimeout,
    ModelUnreachable,
)
from fumehood.protocol.openai.tool_specs import ModelToolDefinition
from tests.support import responses_events as wire
from tests.support.conversations import message, segment
from tests.support.raw_model_server import (
    BREAK_CONNECTION,
    DONE,
    ReceivedRequest,
    Responder,
    chunk,
    data,
    document,
    error,
    open_raw_model_server,
    says,
    stream,
)
from tests.support.recording_clock import RecordingClock

HANG = object()  # in what is written: nothing more comes, and nobody hangs up
CODE = Raw(b'{"type":"object","properties":{"code":{"type":"string"}},"required":["code"]}')
RUN = ModelToolDefinition(name="run", description="", parameters=CODE)
RUNNER = ModelToolDefinition(name="runner", description="", parameters=CODE)
REQUEST = ModelRequest(model="m", segments=[segment(message("hi"))], function_tools=[RUN, RUNNER])

type Turn = Mapping[str, Any]
type Fault = tuple[type[ModelError], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuirkCase:
    """What a server answers with, one after another, and what becomes of it."""

    answers: Sequence[Responder]
    expected: Turn | Fault
    request: ModelRequest = REQUEST
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    backoffs: Sequence[float] = ()


def summarize_turn(events: Sequence[AnyModelEvent]) -> Turn:
    """A turn in short: what was said, thought and called, and how it ended."""
    summary: dict[str, Any] = {"end": ""}
    calls: dict[int, list[str]] = {}
    for event in events:
        match event:
            case ModelTextDelta():
                summary["text"] = summary.get("text", "") + event.delta
            case ModelReasoningDelta():
                summary["thought"] = summary.get("thought", "") + event.delta
            case ModelRefusalDelta():
                summary["refusal"] = summary.get("refusal", "") + event.delta
            case ModelCallStarted():
                made = re.fullmatch("call_[0-9a-f]{48}", event.call_id)
                calls[event.key] = ["made" if made else event.call_id, event.name, ""]
            case ModelCallArgumentsDelta():
                calls[event.key][2] += event.delta
            case ModelTurnEnded():
                summary["end"] = event.reason
                if event.usage is not None:
                    summary["usage"] = (event.usage.input_tokens, event.usage.output_tokens)
            case _:
                pass
    return summary | ({"calls": [tuple(call) for call in calls.values()]} if calls else {})


# --- what is written ----------------------------------------------------------------------------------


def raw(*written: object) -> Responder:
    """These bytes as they are, and the end of the connection."""

    async def answer(_: ReceivedRequest, writer: asyncio.StreamWriter) -> bool:
        for piece in written:
            if piece is HANG:
                await asyncio.Event().wait()
            elif isinstance(piece, bytes):
                writer.write(piece)
                await writer.drain()
        return False

    return answer


def dripping(body: bytes, head: bytes) -> Responder:
    """One byte at a time."""
    return raw(head, *(body[place : place + 1] for place in range(len(body))))


def http(*lines: str, version: str = "1.1", status: str = "200 OK") -> bytes:
    return "\r\n".join(
        [f"HTTP/{version} {status}", "Content-Type: text/event-stream", *lines, "", ""]
    ).encode()


def chunked(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


def called(*deltas: Mapping[str, Any], finish: str | None = "tool_calls") -> Responder:
    """Each of these in a chunk of its own."""
    return stream(*(chunk({"tool_calls": [delta]}) for delta in deltas), chunk(finish=finish), DONE)


def part(
    arguments: object = None, name: str | None = None, index: int | None = 0, call_id: str | None = None
) -> dict[str, Any]:
    """A fragment of a call; what is None is not there."""
    function = {"name": name, "arguments": arguments}
    summary = {key: value for key, value in function.items() if value is not None}
    fields = {"index": index, "id": call_id, "function": summary}
    return {key: value for key, value in fields.items() if value is not None}


def usage(**numbers: object) -> bytes:
    return data({"choices": [], "usage": numbers})


HELLO = says("Hel", "lo")
TEXT: Turn = {"text": "Hello", "end": "stop"}
CALL: Turn = {"calls": [("c", "run", '{"code":"1"}')], "end": "calls"}
MADE: Turn = {"calls": [("made", "run", '{"code":"1"}')], "end": "calls"}
BROKE: Fault = (ModelUnreachable, "broke before its response was complete")
SILENT: Fault = (ModelTimeout, "sent nothing for 0.1 seconds")
IMPATIENT = {"read_timeout": 0.1}
HALF = rb'o\ud83d"'
LATIN = says("Hel\u00e9").replace(b"\xc3\xa9", b"\xe9")
FENCED = "Here:\n```python\nprint(1)\n```\n"
forced = ModelRequest(model="m", segments=REQUEST.segments, function_tools=[RUN, RUNNER], tool_choice=RUN)


# --- on the way, the same for both kinds of servers ---------------------------------------------------


def transport_cases(body: bytes, partial: bytes) -> dict[str, QuirkCase]:
    """body: a whole answer, `Hello`; begun: one that goes on after `Hel`."""

    def quirk(*written: object, outcome: Turn | Fault = TEXT, **more: Any) -> QuirkCase:
        return QuirkCase(answers=[raw(*written)], expected=outcome, **more)

    chunks = http("Transfer-Encoding: chunked")
    busy = {"error": {"message": "later", "code": "busy"}}
    dated = {"Retry-After": "Sun, 06 Nov 1994 08:49:41 GMT", "Date": "Sun, 06 Nov 1994 08:49:37 GMT"}
    good = stream(body)
    return {
        "HTTP/1.0, to the end of the connection": quirk(http(version="1.0") + body),
        "one byte at a time": QuirkCase(answers=[dripping(body, http())], expected=TEXT),
        "all in one write": quirk(chunks + chunked(body) + b"0\r\n\r\n"),
        "chunked, and no end": quirk(chunks + chunked(body), HANG),
        "chunked, and cut off after the end": quirk(chunks + chunked(body)),
        "a length that is too great": quirk(http(f"Content-Length: {len(body) + 99}") + body),
        "a length that is too small": quirk(
            http("Content-Length: 9") + body, outcome=(ModelError, "sent an invalid")
        ),
        "a length that is none": quirk(
            http("Content-Length: many") + body, outcome=(ModelError, "is not valid HTTP")
        ),
        "CRLF": quirk(http() + body.replace(b"\n", b"\r\n")),
        "a byte order mark": quirk(http() + b"\xef\xbb\xbf" + body),
        "comments and other fields": quirk(
            http() + b": hi\nid: 5\nretry: 9\n\n" + body.replace(b"data: ", b": ping\nevent: x\ndata: ")
        ),
        "data without a space": quirk(http() + body.replace(b"data: ", b"data:")),
        "rubbish after the end": quirk(http() + body + b"data: [DONE]\n\n\xff\xfe rubbish\n\n{"),
        "a line of a megabyte": quirk(
            http() + body.replace(b"Hel", b"Hel" * 350_000),
            outcome={"text": "Hel" * 350_000 + "lo", "end": "stop"},
        ),
        "a line without end": quirk(
            http() + b"data: " + b"x" * 40_000_000, outcome=(ModelError, "a line of more than 33554432 bytes")
        ),
        "no answer at all": QuirkCase(answers=[raw()] * 3, expected=BROKE, backoffs=[0.25, 0.5]),
        "cut off before the first event, then good": QuirkCase(
            answers=[raw(http()[:-9]), raw(chunks), good], expected=TEXT, backoffs=[0.25, 0.5]
        ),
        "cut off after it": quirk(chunks + chunked(partial), outcome=BROKE),
        "reset after it": QuirkCase(answers=[stream(partial, BREAK_CONNECTION)], expected=BROKE),
        "silence instead of a head": quirk(HANG, outcome=SILENT, settings=IMPATIENT),
        "silence in the head": quirk(b"HTTP/1.1 200 OK\r\nX: ", HANG, outcome=SILENT, settings=IMPATIENT),
        "silence instead of a body": quirk(http(), HANG, outcome=SILENT, settings=IMPATIENT),
        "silence in an event": quirk(http(), partial[:-9], HANG, outcome=SILENT, settings=IMPATIENT),
        "a head without end": quirk(
            b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20_000, HANG, outcome=(ModelError, "is not valid HTTP")
        ),
        "another protocol": quirk(b"220 mail.example\r\n", outcome=(ModelError, "is not valid HTTP")),
        "gzip": quirk(
            http("Content-Encoding: gzip") + gzip.compress(body), outcome=(ModelError, "is compressed")
        ),
        "a redirect": quirk(
            http("Location: http://127.0.0.1:1/", "Content-Length: 0", status="308 Moved"),
            outcome=(ModelError, "has moved (HTTP 308)"),
        ),
        "nothing in it": quirk(http("Content-Length: 0"), outcome=(ModelError, "its response is empty")),
        "a page of HTML": quirk(
            http() + b"<html>hello</html>", outcome=(ModelError, "its response is empty")
        ),
        "an error as JSON, and 200": QuirkCase(
            answers=[document(b'{"error":{"message":"no such model","type":"invalid_request_error"}}')],
            expected=(ModelRejectedRequest, "refused the request: no such model"),
        ),
        "an error as an event": QuirkCase(
            answers=[stream(partial, b'event: error\ndata: {"error":{"message":"oh","code":500}}\n\n')],
            expected=(ModelError, "failed: oh"),
        ),
        "an error without a name": QuirkCase(
            answers=[stream(b'data: {"object":"error","message":"oh","code":404}\n\n')],
            expected=(ModelRejectedRequest, "oh"),
        ),
        "busy, to be asked again in seconds": QuirkCase(
            answers=[error("429 Too Many", busy, headers={"Retry-After": "3"}), good],
            expected=TEXT,
            backoffs=[3.0],
        ),
        "busy, to be asked again at a time": QuirkCase(
            answers=[error("429 Too Many", busy, headers=dated), good], expected=TEXT, backoffs=[4.0]
        ),
        "busy for too long": QuirkCase(
            answers=[error("429 Too Many", busy, headers={"Retry-After": "600"})],
            expected=(ModelRateLimited, "is busy: later"),
        ),
        "down, then good": QuirkCase(
            answers=[error("503 Unavailable", busy), error("502 Bad Gateway", {}), good],
            expected=TEXT,
            backoffs=[0.25, 0.5],
        ),
        "down": QuirkCase(
            answers=[error("503 Unavailable", busy)] * 3,
            expected=(ModelUnreachable, "is unavailable (HTTP 503): later"),
            backoffs=[0.25, 0.5],
        ),
        "broken, which asking again does not help": QuirkCase(
            answers=[error("500 Internal", {"error": "oh"})], expected=(ModelError, "failed (HTTP 500): oh")
        ),
    }


# --- what chat completions servers say ----------------------------------------------------------------


CHAT: dict[str, QuirkCase] = {
    name: QuirkCase(answers=[answer], expected=outcome)
    for name, answer, outcome in (
        # how it ends
        ("no [DONE]", stream(says("Hello").removesuffix(DONE)), TEXT),
        ("no reason", stream(chunk({"content": "Hello"}), DONE), TEXT),
        ("neither", stream(chunk({"content": "Hello"})), BROKE),
        ("calls that stop", called(part('{"code":"1"}', "run", call_id="c"), finish="stop"), CALL),
        ("calls without a reason", called(part('{"code":"1"}', "run", call_id="c"), finish=None), CALL),
        ("tool_calls and none there", stream(says("Hello", finish="tool_calls")), TEXT),
        ("a reason of its own", stream(says("Hello", finish="eos")), TEXT),
        ("one JSON document", document(b'{"choices":[{"message":{"content":"Hello"}}]}'), TEXT),
        # calls
        (
            "no index",
            called(part("", "run", None, "c"), part('{"code"', index=None), part(':"1"}', index=None)),
            CALL,
        ),
        ("no index and no id", called(part('{"code"', "run", None), part(':"1"}', index=None)), MADE),
        ("arguments in one piece", called(part('{"code":"1"}', "run", call_id="c")), CALL),
        ("arguments as an object", called(part({"code": "1"}, "run", call_id="c")), CALL),
        (
            "no arguments",
            called(part(None, "run", call_id="c")),
            {"calls": [("c", "run", "{}")], "end": "calls"},
        ),
        ("a name in pieces", called(part("", "ru", call_id="c"), part('{"code":"1"}', "n")), CALL),
        (
            "a name in every chunk",
            called(part("", "run", call_id="c"), part('{"code":', "run"), part('"1"}', "run")),
            CALL,
        ),
        ("no name", called(part("{}", call_id="c")), (ModelError, "without naming it")),
        (
            "two at once",
            called(
                part("", "run", 0, "c"),
                part("", "runner", 1, "d"),
                part('{"code":', None, 1),
                part('{"code":"1"}', None, 0),
                part('"2"}', None, 1),
            ),
            {"calls": [("c", "run", '{"code":"1"}'), ("d", "runner", '{"code":"2"}')], "end": "calls"},
        ),
        (
            "the same index twice",
            called(part('{"code":"1"}', "run", 0, "c"), part('{"code":"2"}', "run", 0, "d")),
            {"calls": [("c", "run", '{"code":"1"}'), ("d", "run", '{"code":"2"}')], "end": "calls"},
        ),
        (
            "the same id twice",
            called(part('{"code":"1"}', "run", 0, "c"), part('{"code":"2"}', "run", 1, "c")),
            {"calls": [("c", "run", '{"code":"1"}'), ("made", "run", '{"code":"2"}')], "end": "calls"},
        ),
        ("an empty id", called(part('{"code":"1"}', "run", 0, "")), MADE),
        ("an id of a thousand characters", called(part('{"code":"1"}', "run", 0, "x" * 1000)), MADE),
        (
            "the old function_call",
            stream(
                chunk({"function_call": {"name": "run", "arguments": '{"code":"1"}'}}), chunk(finish="stop")
            ),
            MADE,
        ),
        (
            "a flood of calls",
            called(*(part("{}", "run", number) for number in range(200))),
            (ModelError, "128 calls"),
        ),
        ("code between fences", stream(says(FENCED)), {"text": FENCED, "end": "stop"}),
        # what it says
        ("nulls", stream(chunk({"content": None, "tool_calls": None, "refusal": None}), HELLO), TEXT),
        ("empty deltas", stream(chunk({}), chunk({"content": ""}), chunk({"tool_calls": []}), HELLO), TEXT),
        ("other choices", stream(data({"choices": [{"index": 1, "delta": {"content": "x"}}]}), HELLO), TEXT),
        ("reasoning_content", stream(chunk({"reasoning_content": "hm"}), HELLO), {**TEXT, "thought": "hm"}),
        ("reasoning", stream(chunk({"reasoning": "hm"}), HELLO), {**TEXT, "thought": "hm"}),
        (
            "both",
            stream(chunk({"reasoning": "hm", "reasoning_content": "hm"}), HELLO),
            {**TEXT, "thought": "hm"},
        ),
        ("<think> in one piece", stream(says("<think>\nhm</think>\n\nHello")), {**TEXT, "thought": "hm"}),
        (
            "<think> in pieces",
            stream(says(" ", "<th", "ink>h", "m</", "think", ">", "\n\n", "Hel", "lo")),
            {**TEXT, "thought": "hm"},
        ),
        ("<think> without end", stream(says("<think>hm</th")), {"thought": "hm</th", "end": "stop"}),
        ("less than <think>", stream(says(" <th", "ree")), {"text": " <three", "end": "stop"}),
        ("<think> later", stream(says("a <think>")), {"text": "a <think>", "end": "stop"}),
        (
            "<think> and a call",
            stream(
                chunk({"content": "<think>hm</think>\n"}),
                chunk({"tool_calls": [part('{"code":"1"}', "run", call_id="c")]}, finish="tool_calls"),
                DONE,
            ),
            {**CALL, "thought": "hm"},
        ),
        (
            "a refusal",
            stream(chunk({"refusal": "No."}), chunk(finish="stop")),
            {"refusal": "No.", "end": "stop"},
        ),
        ("bytes that are not UTF-8", stream(LATIN), {"text": "Hel\ufffd", "end": "stop"}),
        (
            "half a surrogate pair",
            stream(says("Hello").replace(b'o"', HALF)),
            {"text": "Hello?", "end": "stop"},
        ),
        ("a key twice", stream(says("Hello").replace(b'"content":', b'"content":"x","content":')), TEXT),
        ("rubbish", stream(b"data: rubbish\n\n"), (ModelError, "Expecting value")),
        ("types that make no sense", stream(b'data: {"choices":5}\n\n'), (ModelError, "Expected `array")),
        # usage
        (
            "usage before",
            stream(usage(prompt_tokens=3, completion_tokens=2), HELLO),
            {**TEXT, "usage": (3, 2)},
        ),
        (
            "usage after",
            stream(HELLO.removesuffix(DONE), usage(prompt_tokens=3, completion_tokens=2), DONE),
            {**TEXT, "usage": (3, 2)},
        ),
        ("usage of null", stream(chunk({"content": "Hello"}, finish="stop", usage=None), DONE), TEXT),
        (
            "usage of floats below nothing",
            stream(usage(prompt_tokens=3.0, completion_tokens=-2, total_tokens=0.5), HELLO),
            {**TEXT, "usage": (3, 0)},
        ),
        (
            "usage beyond measure",
            stream(usage(prompt_tokens=10**30), HELLO.replace(b'"index":0', b'"index":0,"x":1e999')),
            {**TEXT, "usage": (1 << 48, 0)},
        ),
    )
} | {
    "code between fences where a call is forced": QuirkCase(
        answers=[stream(says("Here:\n```py", "thon\nprint(1)\n```\n"))],
        request=forced,
        expected={"calls": [("made", "run", '{"code":"print(1)\\n"}')], "end": "calls"},
    ),
    "two blocks where a call is forced": QuirkCase(
        answers=[stream(says(FENCED + FENCED))], request=forced, expected={"text": FENCED * 2, "end": "stop"}
    ),
    "a forced call that is one": QuirkCase(
        answers=[
            stream(
                chunk({"content": FENCED}),
                chunk({"tool_calls": [part('{"code":"1"}', "run", call_id="c")]}, finish="tool_calls"),
                DONE,
            )
        ],
        request=forced,
        expected={**CALL, "text": FENCED},
    ),
}

# --- what servers of the Responses API say ------------------------------------------------------------


RESPONSES: dict[str, QuirkCase] = {
    name: QuirkCase(answers=[answer], expected=outcome)
    for name, answer, outcome in (
        ("[DONE] instead of an end", stream(wire.message("Hello"), DONE), TEXT),
        ("no end", stream(wire.message("Hello")), BROKE),
        ("one JSON document", document(msgspec.json.encode(wire.response(output=[
            {"type": "message", "content": [{"type": "output_text", "text": "Hello"}]}
        ]))), TEXT),
        ("no deltas", stream(wire.done(0, type="message", content="Hello"), wire.ended()), TEXT),
        ("arguments as an object", stream(
            wire.done(0, type="function_call", call_id="c", name="run", arguments={"code": "1"}), wire.ended()
        ), CALL),
        ("the same id twice", stream(
            wire.call("run", "{}", call_id="c"), wire.call("run", "{}", index=1, call_id="c"), wire.ended()
        ), {"calls": [("c", "run", "{}"), ("made", "run", "{}")], "end": "calls"}),
        ("no id", stream(wire.call("run", '{"code":"1"}', call_id=""), wire.ended()), MADE),
        ("an error that is flat", stream(wire.event("error", code="server_error", message="oh")), (ModelError, "oh")),
        ("an error after the end of all", stream(wire.says("Hello"), wire.event("error", message="oh")), TEXT),
        ("usage of floats below nothing",
            stream(wire.says("Hello", usage={"input_tokens": 3.0, "output_tokens": -1})),
            {**TEXT, "usage": (3, 0)}),
        ("half a surrogate pair", stream(wire.says("Hello").replace(b'o"', HALF)), {"text": "Hello?", "end": "stop"}),
    )
} | {
    "failed before it began": QuirkCase(
        answers=[stream(wire.ended("failed", error={"code": "rate_limit_exceeded", "message": "slow"}))] * 3,
        expected=(ModelRateLimited, "is busy: slow"),
        backoffs=[0.25, 0.5],
    ),
    "code between fences where a call is forced": QuirkCase(
        answers=[stream(wire.says(FENCED))],
        request=forced,
        expected={"calls": [("made", "run", '{"code":"print(1)\\n"}')], "end": "calls"},
    ),
}  # fmt: skip


# --- the visit ----------------------------------------------------------------------------------------

type Kind = Callable[[ModelSettings, PooledHttpClient], HttpModelBackend]


def _quirk_params() -> list[Any]:
    partial = wire.created() + wire.added(0, type="message") + wire.delta("output_text", 0, "Hel")
    groups: list[tuple[str, Kind, dict[str, QuirkCase]]] = [
        ("chat", ChatCompletionsBackend, CHAT | transport_cases(HELLO, chunk({"content": "Hel"}))),
        (
            "responses",
            ResponsesApiBackend,
            RESPONSES | transport_cases(wire.says("Hel", "lo"), partial),
        ),
    ]
    return [
        pytest.param(backend_class, quirk, id=f"{group}: {name}")
        for group, backend_class, cases in groups
        for name, quirk in cases.items()
    ]


@pytest.mark.parametrize(("backend_class", "quirk"), _quirk_params())
async def test_upstream_quirk(backend_class: Kind, quirk: QuirkCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fumehood.models.upstream.http_backend._USAGE_TIMEOUT", 0.05)
    monkeypatch.setattr("fumehood.models.upstream.http1_client._DRAIN_SECONDS", 0.05)
    clock = RecordingClock()
    async with asyncio.timeout(30), open_raw_model_server(*quirk.answers) as server:
        upstream = PooledHttpClient()
        settings = ModelSettings(base_url=server.url, **quirk.settings)
        backend = RetryingBackend(backend_class(settings, upstream), 2, clock, jitter=lambda: 1.0)
        events: list[AnyModelEvent] = []
        failure: ModelError | None = None
        try:
            async for batch in backend.stream(quirk.request):
                assert batch
                events.extend(batch)
        except ModelError as error:
            failure = error
        await upstream.close()
    if isinstance(quirk.expected, tuple):
        error_class, words = quirk.expected
        assert failure is not None
        assert type(failure) is error_class
        assert words in failure.message
        assert not any(isinstance(event, ModelTurnEnded) for event in events)
    else:
        assert failure is None
        assert summarize_turn(events) == quirk.expected
        assert isinstance(events[-1], ModelTurnEnded)
    assert not server.responders, "it was not asked for everything"
    assert clock.sleeps == [*quirk.backoffs]
