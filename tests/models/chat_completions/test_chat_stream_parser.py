"""Answers of chat completions servers, in all the shapes that are about."""

import itertools
import json
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from inline_snapshot import snapshot
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


def parser(*functions: str, max_line_bytes: int = 1 << 25, decode_repeats: bool = True) -> ChatStreamParser:
    ids = itertools.count(1)
    return ChatStreamParser(
        UpstreamErrorFactory("m", [SECRET]),
        functions,
        make_id=lambda _: f"made_{next(ids)}",
        max_line_bytes=max_line_bytes,
        decode_repeats=decode_repeats,
    )


def parse(*chunks: bytes, functions: Sequence[str] = ()) -> list[AnyModelEvent]:
    """The events of a turn that ends well."""
    reading = parser(*functions)
    events = [event for part in chunks for event in reading.feed(part)]
    events += reading.finish()
    assert reading.failure is None, reading.failure
    assert reading.has_ended
    assert [isinstance(event, ModelTurnEnded) for event in events].count(True) == 1
    assert isinstance(events[-1], ModelTurnEnded)
    return events


def fail(*chunks: bytes) -> tuple[list[AnyModelEvent], ModelError]:
    """The events of a turn that does not, and why."""
    reading = parser()
    events = [event for part in chunks for event in reading.feed(part)]
    events += reading.finish()
    assert reading.failure is not None
    assert not reading.has_ended
    return events, reading.failure


def calls(
    *deltas: object, finish: str | None = "tool_calls", functions: Sequence[str] = ("f", "g")
) -> list[AnyModelEvent]:
    events = parse(
        *(chunk({"tool_calls": [delta]}) for delta in deltas), chunk(finish=finish), DONE, functions=functions
    )
    assert events.pop() == ModelTurnEnded("calls")
    return events


def fragment(arguments: object = None, *, name: str | None = None, **fields: object) -> dict[str, object]:
    function = {"name": name, "arguments": arguments}
    return {**fields, "function": {key: value for key, value in function.items() if value is not None}}


# --- text ---------------------------------------------------------------------------------------------


def test_text() -> None:
    assert parse(chunk({"role": "assistant", "content": ""}), says("Hel", "lo")) == [
        ModelTextDelta("Hel"),
        ModelTextDelta("lo"),
        ModelTurnEnded("stop"),
    ]


def test_refusal_and_reasoning_by_both_names() -> None:
    assert parse(
        chunk({"reasoning_content": "I "}),
        chunk({"reasoning": "think"}),
        chunk({"reasoning": "once", "reasoning_content": "once"}),
        chunk({"content": None, "refusal": "No."}),
        chunk(finish="stop"),
        DONE,
    ) == [
        ModelReasoningDelta("I "),
        ModelReasoningDelta("think"),
        ModelReasoningDelta("once"),
        ModelRefusalDelta("No."),
        ModelTurnEnded("stop"),
    ]


def test_content_in_parts() -> None:
    thinking = {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}
    assert parse(
        chunk({"content": [thinking]}), chunk({"content": [{"type": "text", "text": "a"}]}), says()
    ) == [ModelReasoningDelta("hm"), ModelTextDelta("a"), ModelTurnEnded("stop")]


def test_logprobs() -> None:
    choice = {"index": 0, "delta": {"content": "a"}, "logprobs": {"content": [{"token": "a", "logprob": -1}]}}
    (text, _) = parse(data({"choices": [choice]}), says())
    whole = b'{"token":"a","bytes":[97],"logprob":-1.0,"top_logprobs":[]}'
    assert text == ModelTextDelta("a", [Raw(whole)])


def test_numbers_that_json_does_not_know() -> None:
    logprobs = b'{"content":[{"token":"a","logprob":-Infinity}]}'
    odd = b'data: {"choices":[{"delta":{"content":"a"},"logprobs":' + logprobs + b"}]}\n\n"
    (text, end) = parse(odd, b'data: {"usage":{"prompt_tokens":NaN,"completion_tokens":1e999}}\n\n', says())
    assert text == ModelTextDelta(
        "a", [Raw(b'{"token":"a","bytes":[97],"logprob":-9999.0,"top_logprobs":[]}')]
    )
    assert end == ModelTurnEnded("stop", Usage())


def test_deltas_that_say_nothing() -> None:
    nothing = [
        data({"choices": []}),
        data({"choices": None, "prompt_filter_results": []}),
        data({"choices": [{"index": 0, "delta": None}]}),
        chunk({"content": None, "tool_calls": None, "function_call": None, "reasoning_content": None}),
        chunk({"content": "", "tool_calls": []}, finish=""),
        data({"choices": [{"index": 1, "delta": {"content": "another answer"}}]}),
    ]
    assert parse(*nothing, says("a")) == [ModelTextDelta("a"), ModelTurnEnded("stop")]


# --- how it ends --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("finish", "reason"),
    [
        ("stop", "stop"),
        ("length", "length"),
        ("content_filter", "content_filter"),
        ("tool_calls", "stop"),
        ("function_call", "stop"),
        ("eos_token", "stop"),
        ("model_length", "length"),
    ],
)
def test_reasons(finish: str, reason: str) -> None:
    events = parse(chunk({"content": "a"}, finish=finish), DONE)
    assert events == [ModelTextDelta("a"), ModelTurnEnded(reason)]  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("finish", ["stop", "tool_calls", "function_call", "unheard-of"])
def test_calls_are_calls_whatever_the_server_calls_it(finish: str) -> None:
    assert calls(fragment("{}", name="f", index=0, id="c"), finish=finish) == [
        ModelCallStarted(0, "c", "f"),
        ModelCallArgumentsDelta(0, "{}"),
    ]


def test_a_call_that_is_cut_off_by_the_length() -> None:
    call = chunk({"tool_calls": [fragment('{"x', name="f", index=0, id="c")]}, finish="length")
    assert parse(call, DONE) == [
        ModelCallStarted(0, "c", "f"),
        ModelCallArgumentsDelta(0, '{"x'),
        ModelTurnEnded("length"),
    ]


def test_done_without_a_reason_and_a_reason_without_done() -> None:
    assert parse(chunk({"content": "a"}), DONE) == [ModelTextDelta("a"), ModelTurnEnded("stop")]
    assert parse(chunk({"content": "a"}), chunk(finish="length")) == [
        ModelTextDelta("a"),
        ModelTurnEnded("length"),
    ]
    assert parse(chunk({"content": "a"}), chunk(finish="length").rstrip()) == [
        ModelTextDelta("a"),
        ModelTurnEnded("length"),
    ]


def test_what_comes_after_the_end_is_not_read() -> None:
    assert parse(says("a") + b"data: rubbish\n\n" + chunk({"content": "b"})) == [
        ModelTextDelta("a"),
        ModelTurnEnded("stop"),
    ]


USAGE = {
    "prompt_tokens": 10,
    "completion_tokens": 5,
    "total_tokens": 15,
    "prompt_tokens_details": {"cached_tokens": 4, "audio_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 2},
}


@pytest.mark.parametrize(
    "chunks",
    [
        [chunk(finish="stop", usage=USAGE), DONE],
        [chunk(finish="stop"), data({"choices": [], "usage": USAGE}), DONE],
        [chunk(finish="stop", usage=None), data({"usage": USAGE})],
        [chunk({"content": ""}, usage={"prompt_tokens": 10}), chunk(finish="stop", usage=USAGE)],
    ],
    ids=["last chunk", "alone", "without choices and done", "on every chunk"],
)
def test_usage(chunks: list[bytes]) -> None:
    assert parse(*chunks) == [
        ModelTurnEnded(
            "stop",
            Usage(
                input_tokens=10,
                input_tokens_details=InputTokensDetails(cached_tokens=4),
                output_tokens=5,
                output_tokens_details=OutputTokensDetails(reasoning_tokens=2),
                total_tokens=15,
            ),
        )
    ]


def test_usage_with_gaps() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 4, "prompt_tokens_details": None, "cost": 0.1}
    (end,) = parse(chunk(finish="stop", usage=usage), DONE)
    assert end == ModelTurnEnded("stop", Usage(input_tokens=3, output_tokens=4, total_tokens=7))


# --- calls --------------------------------------------------------------------------------------------


def test_a_call_in_fragments() -> None:
    assert calls(
        fragment("", name="f", index=0, id="c", type="function"),
        fragment('{"x"', index=0),
        fragment(":1}", index=0, id=""),
    ) == [
        ModelCallStarted(0, "c", "f"),
        ModelCallArgumentsDelta(0, '{"x"'),
        ModelCallArgumentsDelta(0, ":1}"),
    ]


def test_a_call_is_told_before_its_arguments() -> None:
    reading = parser("f")
    assert reading.feed(chunk({"tool_calls": [fragment("", name="f", index=0, id="c")]})) == [
        ModelCallStarted(0, "c", "f")
    ]


def test_several_at_once() -> None:
    assert calls(
        fragment("", name="f", index=0, id="a"),
        fragment("", name="g", index=1, id="b"),
        fragment("{", index=0),
        fragment("[", index=1),
        fragment("}", index=0),
    ) == [
        ModelCallStarted(0, "a", "f"),
        ModelCallStarted(1, "b", "g"),
        ModelCallArgumentsDelta(0, "{"),
        ModelCallArgumentsDelta(1, "["),
        ModelCallArgumentsDelta(0, "}"),
    ]


def test_the_index_of_all_is_0() -> None:
    assert calls(
        fragment("{}", name="f", index=0, id="a"),
        fragment("{", name="f", index=0, id="b"),
        fragment("}", index=0),
    ) == [
        ModelCallStarted(0, "a", "f"),
        ModelCallArgumentsDelta(0, "{}"),
        ModelCallStarted(1, "b", "f"),
        ModelCallArgumentsDelta(1, "{"),
        ModelCallArgumentsDelta(1, "}"),
    ]


def test_no_index() -> None:
    assert calls(
        fragment("{", name="f", id="a"),
        fragment("}"),
        fragment("[", name="f", id="b"),
        fragment("1", id="a"),
        fragment("]", id="b"),
    ) == [
        ModelCallStarted(0, "a", "f"),
        ModelCallArgumentsDelta(0, "{"),
        ModelCallArgumentsDelta(0, "}"),
        ModelCallStarted(1, "b", "f"),
        ModelCallArgumentsDelta(1, "["),
        ModelCallArgumentsDelta(0, "1"),
        ModelCallArgumentsDelta(1, "]"),
    ]


def test_neither_index_nor_id() -> None:
    assert calls(fragment("{}", name="f"), fragment("{", name="f"), fragment("}")) == [
        ModelCallStarted(0, "made_1", "f"),
        ModelCallArgumentsDelta(0, "{}"),
        ModelCallStarted(1, "made_2", "f"),
        ModelCallArgumentsDelta(1, "{"),
        ModelCallArgumentsDelta(1, "}"),
    ]


def test_another_id_in_every_fragment() -> None:
    assert calls(fragment("{", name="f", index=0, id="a"), fragment("}", index=0, id="b")) == [
        ModelCallStarted(0, "a", "f"),
        ModelCallArgumentsDelta(0, "{"),
        ModelCallArgumentsDelta(0, "}"),
    ]


def test_an_id_that_cannot_be_used() -> None:
    events = calls(
        fragment("{}", name="f", index=0, id="x" * 65),
        fragment("{}", name="f", index=1, id="twice"),
        fragment("{}", name="f", index=2, id="twice"),
    )
    assert [event.call_id for event in events if isinstance(event, ModelCallStarted)] == [
        "made_1",
        "twice",
        "made_2",
    ]


def test_a_name_in_pieces() -> None:
    events = calls(
        fragment(name="code", index=0, id="c"),
        fragment(name="_interp", index=0),
        fragment(name="reter", index=0),
        fragment("{}", index=0),
        functions=["code", "code_interpreter"],
    )
    assert events == [ModelCallStarted(0, "c", "code_interpreter"), ModelCallArgumentsDelta(0, "{}")]


def test_a_name_that_was_not_offered() -> None:
    events = calls(fragment("", name="nobody", index=0, id="c"), fragment("{}", index=0))
    assert events == [ModelCallStarted(0, "c", "nobody"), ModelCallArgumentsDelta(0, "{}")]


def test_a_name_in_every_fragment() -> None:
    events = calls(fragment("{", name="f", index=0, id="c"), fragment("}", name="f", index=0, id="c"))
    assert events == [
        ModelCallStarted(0, "c", "f"),
        ModelCallArgumentsDelta(0, "{"),
        ModelCallArgumentsDelta(0, "}"),
    ]


def test_arguments_before_the_name() -> None:
    events = calls(fragment("{", index=0, id="c"), fragment("}", name="f", index=0))
    assert events == [
        ModelCallStarted(0, "c", "f"),
        ModelCallArgumentsDelta(0, "{"),
        ModelCallArgumentsDelta(0, "}"),
    ]


def test_arguments_as_an_object_and_none_at_all() -> None:
    events = calls(fragment({"x": [1, "é"]}, name="f", index=0, id="a"), fragment(name="g", index=1, id="b"))
    assert events == [
        ModelCallStarted(0, "a", "f"),
        ModelCallArgumentsDelta(0, '{"x":[1,"é"]}'),
        ModelCallStarted(1, "b", "g"),
        ModelCallArgumentsDelta(1, "{}"),
    ]


def test_the_old_function_call() -> None:
    events = parse(
        chunk({"function_call": {"name": "f", "arguments": ""}}),
        chunk({"function_call": {"arguments": "{}"}}, finish="function_call"),
        DONE,
    )
    assert events == [
        ModelCallStarted(0, "made_1", "f"),
        ModelCallArgumentsDelta(0, "{}"),
        ModelTurnEnded("calls"),
    ]


def test_a_call_of_nothing_is_an_error() -> None:
    _, error = fail(chunk({"tool_calls": [fragment("{}", index=0)]}), DONE)
    assert "without naming it" in error.message


def test_there_is_a_limit_of_calls() -> None:
    many = [chunk({"tool_calls": [fragment("{}", name="f", index=index)]}) for index in range(129)]
    _, error = fail(*many)
    assert "more than 128 calls" in error.message


# --- bytes --------------------------------------------------------------------------------------------


HABITS: dict[str, Callable[[bytes], bytes]] = {
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


@pytest.mark.parametrize("change", HABITS.values(), ids=HABITS)
def test_habits_of_event_streams(change: Callable[[bytes], bytes]) -> None:
    body = says("one", "two", "three", "four")
    assert parse(change(body)) == [
        *map(ModelTextDelta, ["one", "two", "three", "four"]),
        ModelTurnEnded("stop"),
    ]


def test_long_lines_in_small_pieces() -> None:
    text = "x" * 1_000_000
    body = says("a", text, "b")
    chunks = [body[start : start + 1000] for start in range(0, len(body), 1000)]
    assert parse(*chunks) == [
        ModelTextDelta("a"),
        ModelTextDelta(text),
        ModelTextDelta("b"),
        ModelTurnEnded("stop"),
    ]


def test_a_line_that_does_not_end() -> None:
    reading = parser(max_line_bytes=1000)
    assert reading.feed(chunk({"content": "a"})) == [ModelTextDelta("a")]
    assert reading.feed(b"data: " + b"x" * 995) == []
    assert reading.failure is not None
    assert "a line of more than 1000 bytes" in reading.failure.message


def test_bytes_that_are_not_utf_8() -> None:
    body = chunk({"content": "a?c"}).replace(b"?", b"\xff")
    assert parse(body, says("b")) == [ModelTextDelta("a\ufffdc"), ModelTextDelta("b"), ModelTurnEnded("stop")]


def test_half_a_surrogate_pair() -> None:
    body = b'data: {"choices":[{"delta":{"content":"a\\ud83d"}}]}\n\n'
    assert parse(body, says("b")) == [ModelTextDelta("a?"), ModelTextDelta("b"), ModelTurnEnded("stop")]


def test_types_that_are_a_little_off() -> None:
    body = data({"choices": [{"index": "0", "delta": {"content": "a"}}], "usage": {"prompt_tokens": "3"}})
    assert parse(body, chunk(finish="stop")) == [
        ModelTextDelta("a"),
        ModelTurnEnded("stop", Usage(input_tokens=3, total_tokens=3)),
    ]


@pytest.mark.parametrize(
    ("line", "expected_text"),
    [
        (b"data: rubbish\n\n", "Expecting value"),
        (b'data: {"choices": 5}\n\n', "Expected `array"),
        (b'data: {"choices": [\n\n', "Expecting value"),
        (b"data: " + b"[" * 100_000 + b"\n\n", "recursion"),
    ],
)
def test_what_cannot_be_read_ends_the_turn(line: bytes, expected_text: str) -> None:
    events, error = fail(chunk({"content": "a"}), line, says("b"))
    assert events == [ModelTextDelta("a")]
    assert error.status == 502
    assert "sent an invalid chat completions response" in error.message
    assert expected_text in error.message


def test_an_answer_in_one_piece() -> None:
    message = {
        "role": "assistant",
        "content": "a",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    }
    answer = {
        "object": "chat.completion",
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
    }
    body = json.dumps(answer, indent=2).encode()
    expected = [
        ModelReasoningDelta("hm"),
        ModelTextDelta("a"),
        ModelCallStarted(0, "c", "f"),
        ModelCallArgumentsDelta(0, "{}"),
        ModelTurnEnded("calls", Usage(input_tokens=1, output_tokens=2, total_tokens=3)),
    ]
    assert parse(body) == expected
    assert parse(b" \n", body[:50], body[50:]) == expected


# --- errors -------------------------------------------------------------------------------------------


def test_a_stream_that_is_cut_off() -> None:
    events, error = fail(chunk({"content": "a"}), chunk({"content": "b"})[:-5])
    assert events == [ModelTextDelta("a")]
    assert isinstance(error, ModelUnreachable)


@pytest.mark.parametrize(
    "body", [b"", b"\n\n", b"<html>\n<body>Welcome</body>\n</html>\n", b": ping\n\n", DONE.rstrip()]
)
def test_an_answer_to_something_else(body: bytes) -> None:
    events, error = fail(body)
    assert events == []
    assert error.message == snapshot(
        "The server of the model 'm' sent an invalid chat completions response: "
        "its response is empty or of another kind."
    )


def test_errors_within_the_stream() -> None:
    for reported, kind, code in [
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
    ]:
        events, error = fail(chunk({"content": "a"}), data({"error": reported}), says("b"))
        assert events == [ModelTextDelta("a")]
        assert type(error) is kind, reported
        assert error.wire_code == code


def test_an_error_without_a_field_of_its_own() -> None:
    expected_text = {"object": "error", "message": "the prompt is too long", "code": 400}
    for body in (data(expected_text), json.dumps(expected_text).encode()):
        _, error = fail(body)
        assert error.wire_code == "context_length_exceeded"


def test_an_error_shows_no_secrets() -> None:
    _, error = fail(
        data({"error": {"message": f"key {SECRET} and sk-another1 and Bearer abc are wrong", "code": 500}})
    )
    assert error.message == snapshot(
        "The server of the model 'm' failed: key [hidden] and [hidden] and [hidden] are wrong."
    )


def test_a_turn_that_ends_with_an_error() -> None:
    _, error = fail(chunk({"content": "a"}, finish="error"), DONE)
    assert "ended the turn with an unspecified error" in error.message


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
    """A stream of a server with habits."""
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
    reading = parser("f", "fg", decode_repeats=decode_repeats)
    events = [event for part in chunks for event in reading.feed(part)]
    events += reading.finish()
    return events, reading.failure and reading.failure.message


@given(streams(), st.data())
def test_any_split_gives_the_same_events(body: bytes, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=10)))
    chunks = [body[start:end] for start, end in itertools.pairwise([0, *cuts, len(body)])]
    whole = outcome([body])
    assert outcome(chunks) == whole
    assert outcome([bytes([byte]) for byte in body]) == whole


@given(streams())
def test_reading_in_runs_gives_the_same_events(body: bytes) -> None:
    assert outcome([body]) == outcome([body], decode_repeats=False)


@given(st.lists(st.binary(max_size=40), max_size=6))
def test_rubbish_is_refused_and_nothing_worse(chunks: list[bytes]) -> None:
    events, failure = outcome([b"data: ", *chunks])
    assert failure is not None or isinstance(events[-1], ModelTurnEnded)
