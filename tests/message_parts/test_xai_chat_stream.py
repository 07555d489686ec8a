"""Chunks of xAI's chat API, put together: whole, cut off, failed, cancelled."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.message_parts.canonical_parts import Json, TextPart, ToolCallPart, ToolCallResponsePart
from fumehood.message_parts.conversion import from_vendor, to_vendor
from fumehood.message_parts.representations import from_representation, to_representation
from fumehood.message_parts.streaming.assembler import StreamAssembler, assemble_stream
from fumehood.message_parts.validation import validate

type Object = dict[str, Any]


def call(number: int, kind: str, arguments: str, **more: Any) -> Object:
    made = {"id": f"call_{number}", "type": f"TOOL_CALL_TYPE_{kind}_TOOL"}
    return {**made, "function": {"name": kind.lower(), "arguments": arguments}, **more}


CODE = call(1, "CODE_EXECUTION", '{"code":"print(2)"}')
ENDED = {**CODE, "status": "TOOL_CALL_STATUS_COMPLETED"}
SEARCH = call(2, "WEB_SEARCH", '{"query":"q"}')
FAILED = {**SEARCH, "status": "TOOL_CALL_STATUS_FAILED", "error_message": "no network"}
CITED = {"id": "1", "start_index": 6, "web_citation": {"url": "https://e.x"}}


def output(place: int, reason: str | None = None, **delta: Any) -> Object:
    """The default of each member is left out, as protobuf does it."""
    made: Object = {"delta": delta} if delta else {}
    return made | ({"index": place} if place else {}) | ({"finish_reason": reason} if reason else {})


def chunk(*outputs: Object, **more: Any) -> Object:
    return {"id": "x", "model": "grok-4", "created": "2026-01-12T10:30:45Z", "outputs": [*outputs], **more}


CHUNKS: list[Any] = [
    chunk(output(0, role="ROLE_ASSISTANT", reasoning_content="I com")),
    chunk(output(0, role="ROLE_ASSISTANT", reasoning_content="pute.")),
    chunk(output(0, role="ROLE_ASSISTANT", tool_calls=[CODE])),
    chunk(output(1, role="ROLE_TOOL", content="2\n", tool_calls=[ENDED])),
    chunk(output(2, role="ROLE_ASSISTANT", tool_calls=[SEARCH])),
    chunk(output(3, role="ROLE_TOOL", tool_calls=[FAILED])),
    chunk(output(4, role="ROLE_ASSISTANT", content="It is "), usage={"completion_tokens": 1}),
    chunk(output(4, role="ROLE_ASSISTANT", content="2.", citations=[CITED], encrypted_content="AA")),
    chunk(
        {
            **output(4, "REASON_STOP", role="ROLE_ASSISTANT", encrypted_content="A="),
            "logprobs": {"content": [{"token": "2."}]},
        },
        usage={"completion_tokens": 9},
        citations=["https://e.x"],
    ),
    {"id": "x", "citations": ["https://f.x"], "divination": {"by": "stars"}},
]
WHOLE: Any = {
    "id": "x",
    "model": "grok-4",
    "created": "2026-01-12T10:30:45Z",
    "outputs": [
        {"message": {"role": "ROLE_ASSISTANT", "reasoning_content": "I compute.", "tool_calls": [CODE]}},
        {"index": 1, "message": {"role": "ROLE_TOOL", "content": "2\n", "tool_calls": [ENDED]}},
        {"index": 2, "message": {"role": "ROLE_ASSISTANT", "tool_calls": [SEARCH]}},
        {"index": 3, "message": {"role": "ROLE_TOOL", "tool_calls": [FAILED]}},
        {
            "index": 4,
            "finish_reason": "REASON_STOP",
            "message": {
                "role": "ROLE_ASSISTANT",
                "content": "It is 2.",
                "citations": [CITED],
                "encrypted_content": "AAA=",
            },
            "logprobs": {"content": [{"token": "2."}]},
        },
    ],
    "usage": {"completion_tokens": 9},
    "citations": ["https://e.x", "https://f.x"],
    "divination": {"by": "stars"},
}


def test_chunks_add_up_to_what_comes_in_one_piece() -> None:
    before = json.dumps(CHUNKS)
    assert assemble_stream("xai", CHUNKS) == WHOLE
    assert json.dumps(CHUNKS) == before, "chunks are not changed"
    parts = from_vendor("xai", WHOLE)
    assert to_vendor("xai", parts) == WHOLE
    assert to_vendor("xai", from_representation(to_representation("option2", parts))) == WHOLE


def _camel(value: Json) -> Any:
    """As protobuf writes its names in JSON unless told otherwise."""
    if isinstance(value, list):
        return [_camel(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    return {
        re.sub("_(.)", lambda found: found[1].upper(), key): _camel(inner) for key, inner in value.items()
    }


def test_a_call_that_is_told_twice_is_one_call() -> None:
    assistant = "ROLE_ASSISTANT"
    chunks = [chunk(output(0, role=assistant, tool_calls=calls)) for calls in ([CODE, SEARCH], [ENDED])]
    whole = assemble_stream("xai", [*chunks, chunk(output(0, "REASON_STOP"))])
    assert from_vendor("xai", whole) == from_vendor(
        "xai",
        chunk(
            {"message": {"role": assistant, "tool_calls": [ENDED, SEARCH]}, "finish_reason": "REASON_STOP"}
        ),
    )


def test_both_kinds_of_names_are_understood() -> None:
    assert assemble_stream("xai", _camel(CHUNKS)) == _camel(WHOLE)
    attributes, camel = (from_vendor("xai", document) for document in (WHOLE, _camel(WHOLE)))
    assert [type(part) for part in attributes] == [type(part) for part in camel]
    assert to_vendor("xai", camel) == _camel(WHOLE)


def test_at_every_moment_the_parts_are_parts_and_texts_only_grow() -> None:
    assembler, said = StreamAssembler("xai"), ""
    for each in CHUNKS:
        assembler.feed(each)
        parts = assembler.build_parts()
        for representation in ("option1", "option2", "option3", "option3-alternative"):
            assert validate([*to_representation(representation, parts)]) == []
        text = "".join(part.content for part in parts if isinstance(part, TextPart))
        assert text.startswith(said)
        said = text
    assert said == "It is 2."


def _statuses(assembler: StreamAssembler, ended: Any = None) -> list[tuple[str, str, str | None]]:
    return [
        (type(part).__name__, part.kind, part.status)
        for part in assembler.build_parts(ended)
        if isinstance(part, ToolCallPart | ToolCallResponsePart)
    ]


def test_what_ended_before_the_stream_broke_off_stays_as_it_ended() -> None:
    assembler = StreamAssembler("xai")
    for each in CHUNKS[:3]:
        assembler.feed(each)
    assert _statuses(assembler) == [("ToolCallPart", "code_interpreter", "in_progress")]
    assert _statuses(assembler, "cancelled") == [("ToolCallPart", "code_interpreter", "cancelled")]
    for each in CHUNKS[3:5]:
        assembler.feed(each)
    ran, answered = (
        ("ToolCallPart", "code_interpreter", None),
        ("ToolCallResponsePart", "code_interpreter", "completed"),
    )
    assert _statuses(assembler, "cancelled") == [ran, answered, ("ToolCallPart", "web_search", "cancelled")]
    assembler.feed(CHUNKS[5])
    assert _statuses(assembler, "cancelled") == [
        ran,
        answered,
        ("ToolCallPart", "web_search", None),
        ("ToolCallResponsePart", "web_search", "failed"),
    ]


def _split_text(text: str, sizes: list[int]) -> list[str]:
    pieces: list[str] = []
    for size in sizes:
        pieces.append(text[:size])
        text = text[size:]
    return [*pieces, text]


@st.composite
def split_streams(draw: st.DrawFn) -> tuple[list[Object], Object]:
    """A response, and chunks of it cut anywhere."""
    outputs: list[Object] = []
    chunks: list[Object] = []
    for place in range(draw(st.integers(1, 4))):
        role = draw(st.sampled_from(["ROLE_ASSISTANT", "ROLE_TOOL"]))
        message: Object = {"role": role}
        deltas: list[Object] = [{"role": role}]
        for name in draw(st.sets(st.sampled_from(["content", "reasoning_content", "encrypted_content"]))):
            text = draw(st.text(min_size=1, max_size=12))
            message[name] = text
            deltas += [
                {name: piece} for piece in _split_text(text, draw(st.lists(st.integers(0, 5), max_size=3)))
            ]
        for made in draw(st.permutations([CODE, FAILED, call(3, "MCP", "{}")]))[: draw(st.integers(0, 3))]:
            message["tool_calls"] = [*message.get("tool_calls", []), made]
            deltas.append({"tool_calls": [made]})
        outputs.append({"index": place, "message": message, "finish_reason": "REASON_STOP"})
        chunks += [{"id": "x", "outputs": [{"index": place, "delta": delta}]} for delta in deltas]
        chunks.append({"id": "x", "outputs": [{"index": place, "finish_reason": "REASON_STOP"}]})
    return chunks, {"id": "x", "outputs": outputs}


@given(made=split_streams(), broken=st.integers(0, 40))
def test_however_it_is_cut_it_adds_up(made: tuple[list[Object], Object], broken: int) -> None:
    chunks, whole = made
    assert assemble_stream("xai", chunks) == whole
    assembler = StreamAssembler("xai")
    for each in chunks[:broken]:
        assembler.feed(each)
    assert to_vendor("xai", assembler.build_parts()) == assembler.build_document()


NOTHINGS: list[Any] = [[], [{}], [{"outputs": None}], [{"outputs": [None, {"delta": []}]}]]


@pytest.mark.parametrize("chunks", NOTHINGS)
def test_nothing_comes_of_nothing(chunks: list[Any]) -> None:
    assert not [
        part
        for part in from_vendor("xai", assemble_stream("xai", chunks))
        if isinstance(part, TextPart | ToolCallPart)
    ]
