"""Streams of xAI's chat API: complete, interrupted, failed, cancelled."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.message_parts.canonical_parts import (
    Json,
    TextPart,
    ToolCallPart,
    ToolPart,
)
from fumehood.message_parts.conversion import StreamAssembler, from_vendor, to_vendor
from tests.message_parts.test_stream_assembly import assemble_stream, feed_all
from tests.support.xai_chat_chunks import (
    CHUNKS,
    CODE,
    ENDED,
    FAILED,
    SEARCH,
    WHOLE,
    Object,
    call,
    chunk,
    output,
)


def _camel(value: Json) -> Any:
    """As protobuf writes its names in JSON unless told otherwise."""
    if isinstance(value, list):
        return [_camel(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    return {
        re.sub("_(.)", lambda found: found[1].upper(), key): _camel(inner) for key, inner in value.items()
    }


def test_a_repeated_call_is_one_call() -> None:
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


def _statuses(assembler: StreamAssembler, ended: Any = None) -> list[tuple[str, str, str | None]]:
    return [
        (type(part).__name__, part.kind, part.status)
        for part in assembler.build_parts(ended)
        if isinstance(part, ToolPart)
    ]


def test_finished_calls_keep_their_status_after_an_interruption() -> None:
    assembler = feed_all("xai", CHUNKS[:3])
    assert _statuses(assembler) == [("ToolCallPart", "code_interpreter", "in_progress")]
    assert _statuses(assembler, "cancelled") == [("ToolCallPart", "code_interpreter", "cancelled")]
    assembler = feed_all("xai", CHUNKS[:5])
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
    for index in range(draw(st.integers(1, 4))):
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
        outputs.append({"index": index, "message": message, "finish_reason": "REASON_STOP"})
        chunks += [{"id": "x", "outputs": [{"index": index, "delta": delta}]} for delta in deltas]
        chunks.append({"id": "x", "outputs": [{"index": index, "finish_reason": "REASON_STOP"}]})
    return chunks, {"id": "x", "outputs": outputs}


@given(made=split_streams(), broken=st.integers(0, 40))
def test_chunks_split_anywhere_add_up(made: tuple[list[Object], Object], broken: int) -> None:
    chunks, whole = made
    assert assemble_stream("xai", chunks) == whole
    assembler = feed_all("xai", chunks[:broken])
    assert to_vendor("xai", assembler.build_parts()) == assembler.build_document()


NOTHINGS: list[Any] = [[], [{}], [{"outputs": None}], [{"outputs": [None, {"delta": []}]}]]


@pytest.mark.parametrize("chunks", NOTHINGS)
def test_empty_chunks_give_no_parts(chunks: list[Any]) -> None:
    assert not [
        part
        for part in from_vendor("xai", assemble_stream("xai", chunks))
        if isinstance(part, TextPart | ToolCallPart)
    ]
