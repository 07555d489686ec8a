"""Parses responses of Chat Completions servers, in all the forms that servers send."""

import itertools
import json
from collections.abc import Callable, Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from fumehood.models.chat_completions.chat_stream_parser import ChatStreamParser
from fumehood.models.upstream.upstream_errors import UpstreamErrorFactory
from fumehood.protocol.model_turns import (
    AnyModelEvent,
    ModelCallArgumentsDelta,
    ModelCallStarted,
    ModelReasoningDelta,
    ModelRefusalDelta,
    ModelTextDelta,
    ModelTurnEnded,
    TurnEndReason,
)
from fumehood.protocol.openai.api_errors import (
    ModelError,
    ModelRateLimited,
    ModelRejectedRequest,
    ModelUnreachable,
)
from fumehood.protocol.openai.responses import InputTokensDetails, OutputTokensDetails, Usage
from tests.support.raw_model_server import DONE, chunk, data, says

SECRET = "sk-very-secret-key"


PARTLY_INVALID_UTF8 = chunk({"content": "a?c"}).replace(b"?", b"\xff")
LONE_SURROGATE = b'data: {"choices":[{"delta":{"content":"a\\ud83d"}}]}\n\n'
STOP = ModelTurnEnded("stop")


def new_parser(
    *functions: str, max_line_bytes: int = 1 << 25, decode_repeats: bool = True
) -> ChatStreamParser:
    ids = itertools.count(1)
    return ChatStreamParser(
        UpstreamErrorFactory("m", [SECRET]),
        functions,
        make_id=lambda _: f"made_{next(ids)}",
        max_line_bytes=max_line_bytes,
        decode_repeats=decode_repeats,
    )


def parse(
    chunks: Iterable[bytes], functions: Sequence[str] = (), *, decode_repeats: bool = True
) -> tuple[list[AnyModelEvent], ModelError | None]:
    """The events of a turn, and why it failed. A turn that did not fail ends once, with its last event."""
    parser = new_parser(*functions, decode_repeats=decode_repeats)
    events = [event for part in chunks for event in parser.feed(part)]
    events += parser.finish()
    ends = [isinstance(event, ModelTurnEnded) for event in events]
    assert parser.has_ended == (parser.failure is None)
    assert ends.count(True) == (1 if parser.has_ended else 0)
    assert not parser.has_ended or ends[-1]
    return events, parser.failure


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"id": "chatcmpl-1", "model": "theirs-2026"}, ("chatcmpl-1", "theirs-2026")),
        ({"id": 7, "model": None}, (None, None)),
        ({"id": "x" * 1000}, (None, None)),
        ({}, (None, None)),
    ],
)
@pytest.mark.parametrize("streamed", [True, False])
def test_the_servers_id_and_model_are_reported(
    fields: dict[str, object], expected: tuple[str | None, str | None], streamed: bool
) -> None:
    part = {"role": "assistant", "content": "a"}
    choice = {"index": 0, "delta" if streamed else "message": part, "finish_reason": "stop"}
    body = json.dumps({**fields, "choices": [choice]}).encode()
    events, failure = parse([b"data: " + body + b"\n\ndata: [DONE]\n\n" if streamed else body])
    assert failure is None
    end = events[-1]
    assert isinstance(end, ModelTurnEnded)
    assert (end.response_id, end.response_model) == expected


# --- turns that end well ------------------------------------------------------------------------------


def make_logprobs(logprob: bytes) -> bytes:
    logprobs = b'{"content":[{"token":"a","logprob":' + logprob + b"}]}"
    return b'data: {"choices":[{"delta":{"content":"a"},"logprobs":' + logprobs + b"}]}\n\n"


def expect_logprob(logprob: bytes) -> ModelTextDelta:
    return ModelTextDelta(
        "a", [Raw(b'{"token":"a","bytes":[97],"logprob":' + logprob + b',"top_logprobs":[]}')]
    )


def fragment(arguments: object = None, *, name: str | None = None, **fields: object) -> dict[str, object]:
    function = {"name": name, "arguments": arguments}
    return {**fields, "function": {key: value for key, value in function.items() if value is not None}}


USAGE = {
    "prompt_tokens": 10,
    "completion_tokens": 5,
    "total_tokens": 15,
    "prompt_tokens_details": {"cached_tokens": 4, "audio_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 2},
}
USAGE_END = ModelTurnEnded(
    "stop",
    Usage(
        input_tokens=10,
        input_tokens_details=InputTokensDetails(cached_tokens=4),
        output_tokens=5,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=2),
        total_tokens=15,
    ),
)
FINISH_REASONS: dict[str, TurnEndReason] = {
    "stop": "stop",
    "length": "length",
    "content_filter": "content_filter",
    "tool_calls": "stop",
    "function_call": "stop",
    "eos_token": "stop",
    "model_length": "length",
}
MESSAGE = {
    "role": "assistant",
    "content": "a",
    "reasoning_content": "hm",
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
DOCUMENT = json.dumps(
    {
        "object": "chat.completion",
        "choices": [{"index": 0, "message": MESSAGE, "finish_reason": "tool_calls"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
    },
    indent=2,
).encode()
DOCUMENT_EVENTS = [
    ModelReasoningDelta("hm"),
    ModelTextDelta("a"),
    ModelCallStarted(0, "c", "f"),
    ModelCallArgumentsDelta(0, "{}"),
    ModelTurnEnded("calls", Usage(input_tokens=1, output_tokens=2, total_tokens=3)),
]
LONG = "x" * 1_000_000
LONG_BODY = says("a", LONG, "b")
TURNS: dict[str, tuple[Sequence[bytes], Sequence[AnyModelEvent]]] = {
    "text": (
        [chunk({"role": "assistant", "content": ""}), says("Hel", "lo")],
        [ModelTextDelta("Hel"), ModelTextDelta("lo"), STOP],
    ),
    "refusal, and reasoning by both names": (
        [
            chunk({"reasoning_content": "I "}),
            chunk({"reasoning": "think"}),
            chunk({"reasoning": "once", "reasoning_content": "once"}),
            chunk({"content": None, "refusal": "No."}),
            chunk(finish="stop"),
            DONE,
        ],
        [
            ModelReasoningDelta("I "),
            ModelReasoningDelta("think"),
            ModelReasoningDelta("once"),
            ModelRefusalDelta("No."),
            STOP,
        ],
    ),
    "content parts": (
        [
            chunk({"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}]}),
            chunk({"content": [{"type": "text", "text": "a"}]}),
            says(),
        ],
        [ModelReasoningDelta("hm"), ModelTextDelta("a"), STOP],
    ),
    "logprobs": ([make_logprobs(b"-1"), says()], [expect_logprob(b"-1.0"), STOP]),
    "numbers that are not JSON": (
        [
            make_logprobs(b"-Infinity"),
            b'data: {"usage":{"prompt_tokens":NaN,"completion_tokens":1e999}}\n\n',
            says(),
        ],
        [expect_logprob(b"-9999.0"), ModelTurnEnded("stop", Usage())],
    ),
    "empty deltas and other choices": (
        [
            data({"choices": []}),
            data({"choices": None, "prompt_filter_results": []}),
            data({"choices": [{"index": 0, "delta": None}]}),
            chunk({"content": None, "tool_calls": None, "function_call": None, "reasoning_content": None}),
            chunk({"content": "", "tool_calls": []}, finish=""),
            data({"choices": [{"index": 1, "delta": {"content": "another answer"}}]}),
            says("a"),
        ],
        [ModelTextDelta("a"), STOP],
    ),
    **{
        f"finish_reason {finish}": (
            [chunk({"content": "a"}, finish=finish), DONE],
            [ModelTextDelta("a"), ModelTurnEnded(reason)],
        )
        for finish, reason in FINISH_REASONS.items()
    },
    "a call that the length limit cut off": (
        [chunk({"tool_calls": [fragment('{"x', name="f", index=0, id="c")]}, finish="length"), DONE],
        [ModelCallStarted(0, "c", "f"), ModelCallArgumentsDelta(0, '{"x'), ModelTurnEnded("length")],
    ),
    "[DONE] without a reason": ([chunk({"content": "a"}), DONE], [ModelTextDelta("a"), STOP]),
    "a reason without [DONE]": (
        [chunk({"content": "a"}), chunk(finish="length")],
        [ModelTextDelta("a"), ModelTurnEnded("length")],
    ),
    "a reason without a newline": (
        [chunk({"content": "a"}), chunk(finish="length").rstrip()],
        [ModelTextDelta("a"), ModelTurnEnded("length")],
    ),
    "data after the end": (
        [says("a") + b"data: rubbish\n\n" + chunk({"content": "b"})],
        [ModelTextDelta("a"), STOP],
    ),
    "usage in the last chunk": ([chunk(finish="stop", usage=USAGE), DONE], [USAGE_END]),
    "usage alone": ([chunk(finish="stop"), data({"choices": [], "usage": USAGE}), DONE], [USAGE_END]),
    "usage without choices and [DONE]": (
        [chunk(finish="stop", usage=None), data({"usage": USAGE})],
        [USAGE_END],
    ),
    "usage in every chunk": (
        [chunk({"content": ""}, usage={"prompt_tokens": 10}), chunk(finish="stop", usage=USAGE)],
        [USAGE_END],
    ),
    "usage with gaps": (
        [
            chunk(
                finish="stop",
                usage={
                    "prompt_tokens": 3,
                    "completion_tokens": 4,
                    "prompt_tokens_details": None,
                    "cost": 0.1,
                },
            ),
            DONE,
        ],
        [ModelTurnEnded("stop", Usage(input_tokens=3, output_tokens=4, total_tokens=7))],
    ),
    "the old function_call": (
        [
            chunk({"function_call": {"name": "f", "arguments": ""}}),
            chunk({"function_call": {"arguments": "{}"}}, finish="function_call"),
            DONE,
        ],
        [ModelCallStarted(0, "made_1", "f"), ModelCallArgumentsDelta(0, "{}"), ModelTurnEnded("calls")],
    ),
    "a document": ([DOCUMENT], DOCUMENT_EVENTS),
    "a document in pieces": ([b" \n", DOCUMENT[:50], DOCUMENT[50:]], DOCUMENT_EVENTS),
    "long lines in small pieces": (
        [LONG_BODY[start : start + 1000] for start in range(0, len(LONG_BODY), 1000)],
        [ModelTextDelta("a"), ModelTextDelta(LONG), ModelTextDelta("b"), STOP],
    ),
    "invalid UTF-8": (
        [PARTLY_INVALID_UTF8, says("b")],
        [ModelTextDelta("a\ufffdc"), ModelTextDelta("b"), STOP],
    ),
    "a lone surrogate": ([LONE_SURROGATE, says("b")], [ModelTextDelta("a?"), ModelTextDelta("b"), STOP]),
    "numbers as strings": (
        [
            data({"choices": [{"index": "0", "delta": {"content": "a"}}], "usage": {"prompt_tokens": "3"}}),
            chunk(finish="stop"),
        ],
        [ModelTextDelta("a"), ModelTurnEnded("stop", Usage(input_tokens=3, total_tokens=3))],
    ),
}


@pytest.mark.parametrize(("chunks", "expected"), TURNS.values(), ids=TURNS)
def test_turn(chunks: Sequence[bytes], expected: Sequence[AnyModelEvent]) -> None:
    assert parse(chunks) == (expected, None)


STREAM_FORMATS: dict[str, Callable[[bytes], bytes]] = {
    "CRLF": lambda body: body.replace(b"\n", b"\r\n"),
    "no space": lambda body: body.replace(b"data: ", b"data:"),
    "single newlines": lambda body: body.replace(b"\n\n", b"\n"),
    "other fields": lambda body: body.replace(b"data: ", b"event: chunk\nid: 1\nretry: 5\ndata: "),
    "comments": lambda body: b": hello\n\n" + body.replace(b"\n\n", b"\n: keep-alive\n\n"),
    "BOM": lambda body: b"\xef\xbb\xbf" + body,
    "blank lines": lambda body: b"\n\n" + body.replace(b"\n\n", b"\n\n\n\n"),
    "over several lines": lambda body: body.replace(b'"choices"', b'\ndata: "choices"'),
    "padded end": lambda body: body.replace(b"[DONE]", b" [DONE] "),
}


@pytest.mark.parametrize("change", STREAM_FORMATS.values(), ids=STREAM_FORMATS)
def test_stream_format(change: Callable[[bytes], bytes]) -> None:
    words = ["one", "two", "three", "four"]
    assert parse([change(says(*words))]) == ([*map(ModelTextDelta, words), STOP], None)


# --- calls --------------------------------------------------------------------------------------------

ONE_CALL = [ModelCallStarted(0, "c", "f"), ModelCallArgumentsDelta(0, "{}")]
SPLIT_CALL = [ModelCallStarted(0, "c", "f"), ModelCallArgumentsDelta(0, "{"), ModelCallArgumentsDelta(0, "}")]
CALLS: dict[str, tuple[Sequence[object], Sequence[AnyModelEvent]]] = {
    "in fragments": (
        [
            fragment("", name="f", index=0, id="c", type="function"),
            fragment("{", index=0),
            fragment("}", index=0, id=""),
        ],
        SPLIT_CALL,
    ),
    "several at once": (
        [
            fragment("", name="f", index=0, id="a"),
            fragment("", name="g", index=1, id="b"),
            fragment("{", index=0),
            fragment("[", index=1),
            fragment("}", index=0),
        ],
        [
            ModelCallStarted(0, "a", "f"),
            ModelCallStarted(1, "b", "g"),
            ModelCallArgumentsDelta(0, "{"),
            ModelCallArgumentsDelta(1, "["),
            ModelCallArgumentsDelta(0, "}"),
        ],
    ),
    "index 0 for all": (
        [
            fragment("{}", name="f", index=0, id="a"),
            fragment("{", name="f", index=0, id="b"),
            fragment("}", index=0),
        ],
        [
            ModelCallStarted(0, "a", "f"),
            ModelCallArgumentsDelta(0, "{}"),
            ModelCallStarted(1, "b", "f"),
            ModelCallArgumentsDelta(1, "{"),
            ModelCallArgumentsDelta(1, "}"),
        ],
    ),
    "no index": (
        [
            fragment("{", name="f", id="a"),
            fragment("}"),
            fragment("[", name="f", id="b"),
            fragment("1", id="a"),
            fragment("]", id="b"),
        ],
        [
            ModelCallStarted(0, "a", "f"),
            ModelCallArgumentsDelta(0, "{"),
            ModelCallArgumentsDelta(0, "}"),
            ModelCallStarted(1, "b", "f"),
            ModelCallArgumentsDelta(1, "["),
            ModelCallArgumentsDelta(0, "1"),
            ModelCallArgumentsDelta(1, "]"),
        ],
    ),
    "neither index nor id": (
        [fragment("{}", name="f"), fragment("{", name="f"), fragment("}")],
        [
            ModelCallStarted(0, "made_1", "f"),
            ModelCallArgumentsDelta(0, "{}"),
            ModelCallStarted(1, "made_2", "f"),
            ModelCallArgumentsDelta(1, "{"),
            ModelCallArgumentsDelta(1, "}"),
        ],
    ),
    "another id in every fragment": (
        [fragment("{", name="f", index=0, id="c"), fragment("}", index=0, id="b")],
        SPLIT_CALL,
    ),
    "ids that are too long or used": (
        [
            fragment("{}", name="f", index=0, id="x" * 65),
            fragment("{}", name="f", index=1, id="twice"),
            fragment("{}", name="f", index=2, id="twice"),
        ],
        [
            event
            for key, call_id in enumerate(["made_1", "twice", "made_2"])
            for event in (ModelCallStarted(key, call_id, "f"), ModelCallArgumentsDelta(key, "{}"))
        ],
    ),
    "a name in pieces": (
        [
            fragment(name="code", index=0, id="c"),
            fragment(name="_interp", index=0),
            fragment(name="reter", index=0),
            fragment("{}", index=0),
        ],
        [ModelCallStarted(0, "c", "code_interpreter"), ModelCallArgumentsDelta(0, "{}")],
    ),
    "a name that was not offered": (
        [fragment("", name="nobody", index=0, id="c"), fragment("{}", index=0)],
        [ModelCallStarted(0, "c", "nobody"), ModelCallArgumentsDelta(0, "{}")],
    ),
    "a name in every fragment": (
        [fragment("{", name="f", index=0, id="c"), fragment("}", name="f", index=0, id="c")],
        SPLIT_CALL,
    ),
    "arguments before the name": (
        [fragment("{", index=0, id="c"), fragment("}", name="f", index=0)],
        SPLIT_CALL,
    ),
    "arguments as an object, and none": (
        [fragment({"x": [1, "é"]}, name="f", index=0, id="a"), fragment(name="g", index=1, id="b")],
        [
            ModelCallStarted(0, "a", "f"),
            ModelCallArgumentsDelta(0, '{"x":[1,"é"]}'),
            ModelCallStarted(1, "b", "g"),
            ModelCallArgumentsDelta(1, "{}"),
        ],
    ),
}


@pytest.mark.parametrize(("deltas", "expected"), CALLS.values(), ids=CALLS)
def test_calls(deltas: Sequence[object], expected: Sequence[AnyModelEvent]) -> None:
    chunks = [chunk({"tool_calls": [delta]}) for delta in deltas]
    events, _ = parse([*chunks, chunk(finish="tool_calls"), DONE], ["f", "g", "code", "code_interpreter"])
    assert events == [*expected, ModelTurnEnded("calls")]


@pytest.mark.parametrize("finish", ["stop", "tool_calls", "function_call", "unheard-of"])
def test_calls_end_a_turn_with_any_finish_reason(finish: str) -> None:
    call = chunk({"tool_calls": [fragment("{}", name="f", index=0, id="c")]})
    assert parse([call, chunk(finish=finish), DONE])[0] == [*ONE_CALL, ModelTurnEnded("calls")]


def test_a_call_starts_before_its_arguments() -> None:
    named = chunk({"tool_calls": [fragment("", name="f", index=0, id="c")]})
    assert new_parser("f").feed(named) == [ModelCallStarted(0, "c", "f")]


# --- failures -----------------------------------------------------------------------------------------

INVALID = "The server of the model 'm' sent an invalid chat completions response: "
EMPTY = INVALID + "its response is empty or of another kind."
FLAT_ERROR = {"object": "error", "message": "the prompt is too long", "code": 400}
FAILURES: dict[str, tuple[Sequence[bytes], type[ModelError], str, str]] = {
    "a call without a name": (
        [chunk({"tool_calls": [fragment("{}", index=0)]}), DONE],
        ModelError,
        "server_error",
        "without naming it",
    ),
    "too many calls": (
        [chunk({"tool_calls": [fragment("{}", name="f", index=index)]}) for index in range(129)],
        ModelError,
        "server_error",
        "more than 128 calls",
    ),
    "cut off": ([chunk({"content": "b"})[:-5]], ModelUnreachable, "server_error", "broke before"),
    "finish_reason error": (
        [chunk(finish="error"), DONE],
        ModelError,
        "server_error",
        "ended the turn with an unspecified error",
    ),
    **{
        f"unreadable {line[:20]!r}": ([line, says("b")], ModelError, "server_error", INVALID + words)
        for line, words in (
            (b"data: rubbish\n\n", "Expecting value"),
            (b'data: {"choices": 5}\n\n', "Expected `array"),
            (b'data: {"choices": [\n\n', "Expecting value"),
            (b"data: " + b"[" * 100_000 + b"\n\n", "maximum recursion"),
        )
    },
    **{
        f"error event {error}": ([data({"error": error}), says("b")], error_class, code, "")
        for error, error_class, code in (
            ({"message": "overloaded", "code": 503}, ModelUnreachable, "server_error"),
            ({"message": "slow down", "type": "rate_limit_error"}, ModelRateLimited, "rate_limit_exceeded"),
            (
                {"message": "bad", "type": "invalid_request_error", "code": "bad_thing"},
                ModelRejectedRequest,
                "bad_thing",
            ),
            ({"message": "maximum context length is 8"}, ModelRejectedRequest, "context_length_exceeded"),
            ({"message": "no such key", "code": 401}, ModelError, "server_error"),
            ("just a string", ModelError, "server_error"),
            ({}, ModelError, "server_error"),
        )
    },
    "an error event with secrets": (
        [data({"error": {"message": f"key {SECRET} and sk-another1 and Bearer abc are wrong", "code": 500}})],
        ModelError,
        "server_error",
        "The server of the model 'm' failed: key [hidden] and [hidden] and [hidden] are wrong.",
    ),
    "a flat error": (
        [data(FLAT_ERROR)],
        ModelRejectedRequest,
        "context_length_exceeded",
        "the prompt is too long",
    ),
}


@pytest.mark.parametrize(("chunks", "error_class", "code", "words"), FAILURES.values(), ids=FAILURES)
def test_failure(chunks: Sequence[bytes], error_class: type[ModelError], code: str, words: str) -> None:
    events, failure = parse([chunk({"content": "a"}), *chunks])
    assert failure is not None
    assert [event for event in events if isinstance(event, ModelTextDelta)] == [ModelTextDelta("a")]
    assert (type(failure), failure.wire_code) == (error_class, code)
    assert words in failure.message


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        *((body, EMPTY) for body in (b"", b"\n\n", b": ping\n\n", DONE.rstrip())),
        (b"<html>\n<body>Welcome</body>\n</html>\n", EMPTY),
        (
            json.dumps(FLAT_ERROR).encode(),
            "The server of the model 'm' rejected the request as too long: the prompt is too long.",
        ),
    ],
)
def test_body_without_events(body: bytes, expected: str) -> None:
    events, failure = parse([body])
    assert (events, failure and failure.message) == ([], expected)


def test_a_line_that_does_not_end() -> None:
    parser = new_parser(max_line_bytes=1000)
    assert parser.feed(chunk({"content": "a"})) == [ModelTextDelta("a")]
    assert parser.feed(b"data: " + b"x" * 995) == []
    assert parser.failure is not None
    assert "a line of more than 1000 bytes" in parser.failure.message


# --- any split of the bytes gives the same events -----------------------------------------------------

TEXTS = st.text(st.characters(codec="utf-8"), max_size=8)
DELTAS = st.one_of(
    TEXTS.map(lambda text: {"content": text}),
    TEXTS.map(lambda text: {"reasoning_content": text}),
    TEXTS.map(lambda text: {"refusal": text}),
    st.tuples(st.integers(0, 2), TEXTS).map(
        lambda pair: {"tool_calls": [{"index": pair[0], "function": {"arguments": pair[1]}}]}
    ),
    st.tuples(st.integers(0, 2), st.sampled_from("abc")).map(
        lambda pair: {"tool_calls": [fragment("", name="f", index=pair[0], id=pair[1])]}
    ),
)


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """Streams in the formats of various servers."""
    separator = draw(st.sampled_from(["\n\n", "\r\n\r\n", "\n", "\n: ping\n\n"]))
    lines: list[str] = []
    for delta in draw(st.lists(DELTAS, max_size=12)):
        choices = [{"index": 0, "delta": delta, "finish_reason": None}]
        value = {"id": draw(st.sampled_from(["same", "same", "other"])), "choices": choices}
        ascii_only = draw(st.booleans())
        copies = draw(st.sampled_from([1, 1, 3]))
        lines += [f"data: {json.dumps(value, ensure_ascii=ascii_only)}"] * copies
    lines.append("data: " + json.dumps({"choices": [{"delta": {}, "finish_reason": "stop"}]}))
    start = draw(st.sampled_from(["", "\ufeff", "\n", ": hello\n\n"]))
    return (start + separator.join([*lines, "data: [DONE]"]) + separator).encode()


def outcome(chunks: Sequence[bytes], decode_repeats: bool = True) -> tuple[list[AnyModelEvent], str | None]:
    events, failure = parse(chunks, ["f", "fg"], decode_repeats=decode_repeats)
    return events, failure and failure.message


@given(streams(), st.data())
def test_any_split_gives_the_same_events(body: bytes, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=10)))
    chunks = [body[start:end] for start, end in itertools.pairwise([0, *cuts, len(body)])]
    whole = outcome([body])
    assert outcome(chunks) == whole
    assert outcome([bytes([byte]) for byte in body]) == whole


@given(streams())
def test_decoding_in_batches_gives_the_same_events(body: bytes) -> None:
    assert outcome([body]) == outcome([body], decode_repeats=False)


@given(st.lists(st.binary(max_size=40), max_size=6))
def test_random_bytes_end_the_turn(chunks: list[bytes]) -> None:
    events, failure = outcome([b"data: ", *chunks])
    assert failure is not None or isinstance(events[-1], ModelTurnEnded)
