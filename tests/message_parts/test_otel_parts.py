"""Parts in each representation, and foreign parts."""

import json
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from inline_snapshot import snapshot

from fumehood.message_parts.canonical_parts import (
    GenericPart,
    Json,
    ToolCallPart,
    ToolCallResponsePart,
    ToolPart,
    VendorRoundTripData,
)
from fumehood.message_parts.conversion import convert, from_vendor, to_vendor
from fumehood.message_parts.otel_parts import (
    UnknownRepresentationError,
    from_representation,
    to_representation,
)
from fumehood.message_parts.part_schema import (
    REPRESENTATIONS,
    TOOL_PART_TYPES,
    MalformedPartError,
    find_part_error,
)
from fumehood.message_parts.redaction import drop_vendor_items
from fumehood.message_parts.validation import validate
from tests.support.vendor_item_samples import GEMINI, GEMINI_GROUNDED, OPENAI

CODE = OPENAI[2]


def represent_items(representation: str, items: Any, vendor: str = "openai") -> list[Any]:
    """As the representation shows it to somebody who does not care for the way back."""
    written: Any = convert(vendor, representation, items)
    return [{key: value for key, value in part.items() if key != "fumehood.source"} for part in written]


PAYLOAD = {"type": "code_interpreter", "code": "print(2)", "container_id": "cntr_1"}
OUTCOME = {
    "type": "code_interpreter",
    "outputs": [{"type": "logs", "logs": "2\n"}, {"type": "image", "url": "https://e.x/y.png"}],
}
HEADER = {"id": "ci_1", "name": "code_interpreter"}
WRITTEN = {
    "option1": [
        {
            "type": "tool_call",
            **HEADER,
            "tool_call": PAYLOAD,
            "arguments": {"code": "print(2)", "container_id": "cntr_1"},
        },
        {"type": "tool_call_response", "id": "ci_1", "response": OUTCOME},
    ],
    "option2": [
        {"type": "server_tool_call", **HEADER, "server_tool_call": PAYLOAD},
        {"type": "server_tool_call_response", "id": "ci_1", "server_tool_call_response": OUTCOME},
    ],
    "option3": [
        {
            "type": "server_tool",
            **HEADER,
            "tool_call": PAYLOAD,
            "tool_response": OUTCOME,
            "status": "completed",
        }
    ],
    "option3-alternative": [
        {
            "type": "server_tool_execution",
            **HEADER,
            "request": PAYLOAD,
            "response": OUTCOME,
            "execution_metadata": {"status": "completed"},
        }
    ],
}


@pytest.mark.parametrize("representation", WRITTEN)
def test_each_representation_of_a_call_and_its_response(representation: str) -> None:
    assert represent_items(representation, CODE) == WRITTEN[representation]


def test_the_source_field_of_a_call_and_its_response() -> None:
    written: Any = convert("openai", "option2", CODE)
    assert [part["fumehood.source"] for part in written] == snapshot(
        [
            {
                "vendor": "openai",
                "type": "code_interpreter_call",
                "status": "completed",
                "item": {
                    "type": "code_interpreter_call",
                    "id": "ci_1",
                    "status": "completed",
                    "container_id": None,
                    "code": None,
                    "outputs": None,
                },
                "moved": [["code", ["code"]], ["container_id", ["container_id"]]],
                "envelope": {"document": None, "places": [[]]},
            },
            {
                "vendor": "openai",
                "type": "code_interpreter_call",
                "status": "completed",
                "follows": True,
                "moved": [["outputs", ["outputs"]]],
            },
        ]
    )


def test_client_tools_are_not_server_tools() -> None:
    """The type does not tell: a shell in a container is the server's, one without is the client's, with its output."""
    theirs = [item for item in OPENAI if item["type"].startswith("shell_call")]
    ours = [{key: value for key, value in item.items() if key != "environment"} for item in theirs]
    assert [part["type"] for part in represent_items("option2", theirs)] == [
        "server_tool_call",
        "server_tool_call_response",
    ]
    assert [part["type"] for part in represent_items("option2", ours)] == ["tool_call", "tool_call_response"]
    for representation in REPRESENTATIONS:
        parts = from_representation(
            to_representation(representation, from_vendor("openai", [*theirs, *ours]))
        )
        assert [part.execution for part in parts if isinstance(part, ToolPart)] == [
            *("server", "server", "client", "client")
        ], representation


def test_the_id_is_what_call_and_result_share() -> None:
    computer: list[Any] = [item for item in OPENAI if item["type"].startswith("computer_call")]
    assert [part["id"] for part in represent_items("option2", computer)] == ["call_1", "call_1"]
    assert [part.id for part in from_vendor("openai", computer) if isinstance(part, ToolPart)] == [
        *("cu_1", "cuo_1")
    ]


def test_a_call_without_an_outcome_has_no_response() -> None:
    for hidden in (
        {**CODE, "outputs": None},
        {key: CODE[key] for key in ("type", "id", "code", "container_id")},
    ):
        assert [part["type"] for part in represent_items("option2", hidden)] == ["server_tool_call"]
    assert [part["type"] for part in represent_items("option2", {**CODE, "outputs": []})] == [
        *("server_tool_call", "server_tool_call_response")
    ]


def test_calls_derived_from_metadata_are_synthesized() -> None:
    parts = from_vendor("gemini", GEMINI_GROUNDED)
    assert [(part.kind, part.provenance) for part in parts if isinstance(part, ToolPart)] == [
        *(("web_search", "synthesized"), ("web_search", "synthesized")),
        *(("url_context", "synthesized"), ("url_context", "synthesized")),
    ]
    assert represent_items("option2", GEMINI_GROUNDED, "gemini")[1:3] == snapshot(
        [
            {
                "type": "server_tool_call",
                "id": None,
                "name": "web_search",
                "server_tool_call": {"type": "web_search", "queries": ["q"]},
            },
            {
                "type": "server_tool_call_response",
                "id": None,
                "server_tool_call_response": {
                    "type": "web_search",
                    "results": [{"url": "https://e.x", "title": "e.x"}],
                },
            },
        ]
    )
    observed = from_vendor("gemini", GEMINI)
    assert {part.provenance for part in observed if isinstance(part, ToolPart)} == {"observed"}
    for representation in REPRESENTATIONS:
        again = from_representation(to_representation(representation, parts))
        assert [part.provenance for part in again if isinstance(part, ToolCallPart)] == ["synthesized"] * 2, (
            representation
        )


GROUNDED: list[tuple[str, Any, Any, Any]] = [
    ("google_maps", {"groundingChunks": [{"maps": {"uri": "https://m.x", "title": "Café", "placeId": "p"}}]},
     {"queries": None}, {"results": [{"url": "https://m.x", "title": "Café", "place_id": "p"}]}),
    ("file_search", {"groundingChunks": [{"retrievedContext": {"title": "a.pdf", "text": "t", "documentName": "d"}}]},
     {"queries": None}, {"results": [{"file_id": "d", "title": "a.pdf", "text": "t"}]}),
    ("file_search", {"retrieval_queries": ["q"], "grounding_chunks": [{"retrieved_context": {"uri": "gs://a"}}]},
     {"queries": ["q"]}, {"results": [{"file_id": "gs://a"}]}),
    ("image_search", {"imageSearchQueries": ["q"], "groundingChunks": [
        {"image": {"sourceUri": "https://e.x", "imageUri": "https://e.x/i.png", "title": "i"}}]},
     {"queries": ["q"]}, {"results": [{"url": "https://e.x", "image_url": "https://e.x/i.png", "title": "i"}]}),
    ("web_search", {"groundingChunks": [{"web": {"uri": "https://e.x"}}]},
     {"queries": None}, {"results": [{"url": "https://e.x"}]}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "metadata", "asked", "found"), GROUNDED)
def test_grounding_metadata_becomes_synthesized_searches(
    kind: str, metadata: Any, asked: Any, found: Any
) -> None:
    """Also where the queries are not told, as for files and maps."""
    document: Any = {"candidates": [{"content": {"parts": [{"text": "a"}]}, "groundingMetadata": metadata}]}
    (_, call, result) = from_vendor("gemini", document)
    assert isinstance(call, ToolCallPart)
    assert isinstance(result, ToolCallResponsePart)
    assert (call.kind, result.kind, call.provenance, result.provenance) == (kind, kind, *["synthesized"] * 2)
    assert (call.payload, result.payload) == (asked, found)
    for representation in REPRESENTATIONS:
        written: Any = convert("gemini", representation, document)
        assert validate(written) == []
        assert convert(representation, "gemini", written) == document


@pytest.mark.parametrize(
    "part",
    [
        {
            "type": "server_tool_call",
            "id": None,
            "name": "x",
            "server_tool_call": {"type": "x", "deep": {"a": [1]}},
        },
        {
            "type": "server_tool_call_response",
            "id": "1",
            "server_tool_call_response": {"type": "x"},
            "more": 1,
        },
        {
            "type": "server_tool",
            "id": "1",
            "name": "x",
            "tool_call": {"type": "x"},
            "status": "completed",
            "more": 1,
        },
        {
            "type": "server_tool_execution",
            "id": "1",
            "name": "code_interpreter",
            "request": {"type": "code_interpreter", "code": "1"},
            "response": {"type": "code_interpreter", "outputs": []},
            "execution_metadata": {
                "status": "completed",
                "duration_ms": 250,
                "timestamp": "2026-01-12T10:30:45Z",
            },
        },
        {
            "type": "tool_call",
            "id": "1",
            "name": "f",
            "tool_call": {"type": "function", "arguments": {"a": 1}},
            "arguments": '{"a": 1}',
        },
        {"type": "text", "content": "x", "more": 1},
        {"type": "reasoning", "content": "x"},
        {"type": "blob", "mime_type": None, "modality": "image", "content": "aGk="},
        {"type": "file", "mime_type": "image/png", "modality": "image", "file_id": "f"},
        {"type": "uri", "mime_type": None, "modality": "image", "uri": "https://e.x"},
        {"type": "somebody:else", "anything": [1]},
    ],
)
def test_foreign_parts_keep_their_fields(part: Any) -> None:
    representation = {"server_tool": "option3", "server_tool_execution": "option3-alternative"}.get(
        part["type"], "option2"
    )
    assert to_representation(representation, from_representation([part])) == [part]


CALL: Any = {"type": "weird", "q": 1}
RESPONSE: Any = {"type": "weird", "z": []}
FOREIGN: dict[str, list[list[Any]]] = {
    "option1": [
        [{"type": "tool_call", "id": "a", "name": "t", "tool_call": CALL, "arguments": {"q": 1}}],
        [{"type": "tool_call_response", "id": "a", "response": RESPONSE}],
    ],
    "option2": [
        [{"type": "server_tool_call", "id": "a", "name": "t", "server_tool_call": CALL}],
        [{"type": "server_tool_call_response", "id": "a", "server_tool_call_response": RESPONSE}],
    ],
    "option3": [
        [{"type": "server_tool", "id": "a", "name": "t", "tool_call": CALL}],
        [{"type": "server_tool", "id": "a", "name": "t", "tool_response": RESPONSE}],
        [{"type": "server_tool", "id": "a", "name": "t", "tool_call": CALL, "tool_response": RESPONSE}],
    ],
    "option3-alternative": [
        [{"type": "server_tool_execution", "id": "a", "name": "t", "request": CALL,
          "execution_metadata": {"duration_ms": 5}}],
        [{"type": "server_tool_execution", "id": "a", "name": "t", "request": CALL, "response": RESPONSE,
          "execution_metadata": {"status": "failed"}}],
    ],
}  # fmt: skip
for _view in ("option1", "option2"):
    _calls, _responses = FOREIGN[_view]
    FOREIGN[_view].append([*_calls, *_responses])
# What has a meaning of its own in some representation, and what has not.
MEMBERS = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["shell", "weird", "u", 5]),
        "status": st.sampled_from(["completed", "odd", None, 5]),
        "execution_metadata": st.sampled_from(
            [{"duration_ms": 3}, {"status": "odd"}, {"status": "failed"}, 5]
        ),
        "arguments": st.just({"x": 1}),
        "timestamp": st.just("2026-01-12T10:30:45Z"),
    },
)


@pytest.mark.parametrize("representation", FOREIGN)
@given(data=st.data())
def test_unknown_fields_survive_every_representation(representation: str, data: st.DataObject) -> None:
    parts = [data.draw(MEMBERS) | part for part in data.draw(st.sampled_from(FOREIGN[representation]))]
    assume(not any(map(find_part_error, parts)))
    for other in REPRESENTATIONS:
        written: Any = json.loads(json.dumps(to_representation(other, from_representation(parts))))
        assert [problem for problem in map(find_part_error, written) if problem] == []
        assert to_representation(representation, from_representation(written)) == parts


@pytest.mark.parametrize("representation", REPRESENTATIONS)
def test_halves_with_different_execution_are_two_parts(representation: str) -> None:
    """Others may write a call as the server's and its response as the client's; neither is lost or told twice."""
    call: Any = {"type": "function", "arguments": "{}"}
    response: Any = {"type": "function", "result": "r"}
    calls: list[Any] = [
        {"type": "server_tool_call", "id": "a", "name": "f", "server_tool_call": call},
        {"type": "tool_call", "id": "b", "name": "f", "tool_call": call, "arguments": "{}"},
    ]
    responses: list[Any] = [
        {"type": "tool_call_response", "id": "a", "response": response},
        {"type": "server_tool_call_response", "id": "b", "server_tool_call_response": response},
    ]
    parts = [*calls, *responses]
    written: Any = json.loads(json.dumps(to_representation(representation, from_representation(parts))))
    assert validate(written) == []
    assert to_representation("option2", from_representation(written)) == parts


def test_malformed_parts_and_unknown_representations_are_rejected() -> None:
    with pytest.raises(MalformedPartError, match=r"part 1: `server_tool_call` is missing"):
        from_representation([{"type": "text", "content": ""}, {"type": "server_tool_call", "name": "x"}])
    with pytest.raises(UnknownRepresentationError, match="option2"):
        to_representation("option9", [])


HOSTILE: list[Any] = [
    5,
    {"vendor": 5},
    {"vendor": "openai"},
    {"vendor": "openai", "item": {}, "moved": 5},
    {"vendor": "openai", "item": {}, "moved": [[]]},
    {"vendor": "openai", "item": {}, "moved": [["code", ["a", {}]]]},
    {"vendor": "openai", "item": {}, "moved": [["code", ["a"], "no such lens"]]},
    {"vendor": "openai", "item": [], "moved": [["code", [10**12]]]},
    {"vendor": "openai", "item": [], "moved": [["code", [-1]]]},
    {"vendor": "openai", "item": {}, "moved": [["__class__", ["a"]]]},
    {"vendor": "openai", "item": {}, "envelope": {}},
    {"vendor": "openai", "item": {}, "envelope": {"document": [], "places": [[7]]}},
    {"vendor": "openai", "item": {}, "envelope": {"document": 1, "places": 5}},
    {"vendor": "openai", "item": {}, "place": "x"},
    {"vendor": "openai", "follows": True},
]


@pytest.mark.parametrize("source", HOSTILE)
@pytest.mark.parametrize("kind", ["server_tool_call", "fumehood:item"])
def test_an_untrusted_source_is_read_or_rejected(kind: str, source: Any) -> None:
    """Telemetry comes from anywhere: a part may be refused with a reason, and nothing else happens."""
    part: Any = {"type": kind, "fumehood.source": source}
    if kind == "server_tool_call":
        part |= {"id": "1", "name": "code_interpreter", kind: {"type": "code_interpreter", "code": "1"}}
    try:
        convert("option2", "openai", [part])
    except MalformedPartError as refused:
        assert "fumehood.source" in str(refused)  # noqa: PT017 - both ends are right


ASIDE: dict[str, Any] = {
    "type": "text",
    "id": 5,
    "name": 5,
    "status": "failed",
    "execution_metadata": 5,
    "more": 1,
    **{
        key: {"type": "code_interpreter"}
        for form in TOOL_PART_TYPES.values()
        for key in (form.call, form.response)
        if key
    },
}


@pytest.mark.parametrize("name", ASIDE)
@pytest.mark.parametrize("representation", REPRESENTATIONS)
def test_displaced_fields_of_an_untrusted_source_replace_nothing(representation: str, name: str) -> None:
    call: Any = {"type": "weird", "q": 1}
    parts: list[Any] = [
        {"type": "server_tool_call", "id": "a", "name": "t", "server_tool_call": call},
        {"type": "server_tool_call_response", "id": "a", "server_tool_call_response": {"type": "weird"}},
        {"type": "server_tool", "id": "b", "name": "t", "tool_call": call},
    ]
    for number, part in enumerate(parts):
        aside: Any = {"aside": {name: ASIDE[name]}}
        source = {"call": aside} if part["type"] == "server_tool" else aside
        hostile = [*parts]
        hostile[number] = {**part, "fumehood.source": source}
        written: Any = json.loads(json.dumps(to_representation(representation, from_representation(hostile))))
        assert validate(written) == []
        shown = to_representation(representation, from_representation(parts))
        assert [each["type"] for each in written] == [each["type"] for each in shown]
        assert [each["id"] for each in written] == [each["id"] for each in shown]


@pytest.mark.parametrize("tool", ["deep_research", "fabric_dataagent", "novelty", "no.vel", "no|vel", "0"])
def test_an_azure_step_with_output_becomes_call_and_response(tool: str) -> None:
    for asked in ("input", "arguments"):
        step: Any = {"id": "c", "type": tool, "no": 1, tool: {asked: "q", "output": "a", "steps": [1]}}
        call, result = from_vendor("azure", [step])
        assert isinstance(call, ToolCallPart)
        assert isinstance(result, ToolCallResponsePart)
        assert (call.kind, call.call_id, call.payload) == (tool, "c", {"arguments": "q"})
        assert (result.kind, result.call_id, result.payload) == (tool, "c", {"output": "a"})
        assert to_vendor("azure", [call, result]) == [step]
    (alone,) = from_vendor("azure", [{"id": "c", "type": tool, "no": 1, tool: {"output": "a"}}])
    assert isinstance(alone, ToolCallPart)
    assert alone.payload == {"arguments": {"output": "a"}}


def test_files_of_a_command_are_in_its_output() -> None:
    def ran(*files: Any) -> Any:
        outcome = {"type": "bash_code_execution_result", "stdout": "o", "stderr": "", "return_code": 0}
        return {
            "type": "bash_code_execution_tool_result",
            "tool_use_id": "t",
            "content": {**outcome, "content": [*files]},
        }

    file: Any = {"type": "bash_code_execution_output", "file_id": "f"}
    for files, attributes in (
        ([file, {**file, "file_id": "g"}], {"file_ids": ["f", "g"]}),
        ([], {}),
        ([file, 5], {}),
    ):
        (result,) = from_vendor("anthropic", [ran(*files)])
        assert isinstance(result, ToolCallResponsePart)
        assert result.payload["outputs"] == [{"stdout": "o", "stderr": "", "exit_code": 0, **attributes}]
        assert to_vendor("anthropic", [result]) == [ran(*files)]
    (result,) = drop_vendor_items(from_vendor("anthropic", [ran(file)]))
    assert to_vendor("anthropic", [result]) == [ran(file)]
    made: Any = to_vendor("openai", [result])
    assert made[0]["output"] == [{"stdout": "o", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]


def test_output_recorded_before_file_ids_existed_converts_back() -> None:
    """As an earlier version wrote it."""
    content: Any = {"type": "bash_code_execution_result", "content": [{"type": "x", "file_id": "f"}]}
    item = {
        "type": "bash_code_execution_tool_result",
        "tool_use_id": "t",
        "content": {**content, "stdout": None},
    }
    payload = {"type": "shell", "outputs": [{"stdout": "o"}]}
    source: Any = {"vendor": "anthropic", "item": item, "moved": [["outputs", ["content"], "process"]]}
    part: Any = {"type": "server_tool_call_response", "id": "t", "server_tool_call_response": payload}
    back = convert("option2", "anthropic", [{**part, "fumehood.source": source}])
    assert back == [{**item, "content": {**content, "stdout": "o"}}]


def test_tools_that_could_not_be_listed_have_failed() -> None:
    for error, status in (("boom", "failed"), (None, None)):
        listed: Any = {"type": "mcp_list_tools", "id": "m", "server_label": "s", "tools": [], "error": error}
        parts = from_vendor("openai", [listed])
        assert [part.status for part in parts if isinstance(part, ToolPart)] == [status] * 2


@pytest.mark.parametrize(
    "item", [{"type": "novelty", "a": [None, 1.0, True]}, "text", 7, None, [], {"no": "type"}]
)
def test_unknown_items_are_carried_whole(item: Json) -> None:
    kind = "novelty" if isinstance(item, dict) and "type" in item else ""
    source = VendorRoundTripData(vendor="openai", item=item)
    assert from_vendor("openai", [item]) == [GenericPart(type=kind, source=source)]


def test_a_response_without_its_call_is_written_as_a_new_item() -> None:
    """The call knew the item; without it, the result is written anew."""
    parts = from_vendor("openai", [CODE, OPENAI[0]])
    results = [part for part in parts if isinstance(part, ToolCallResponsePart)]
    assert to_vendor("openai", [*results, *parts[2:]]) == [
        {**CODE, "container_id": "", "code": None, "id": "ci_1"},
        OPENAI[0],
    ]
    other: Any = {**CODE, "id": "ci_2", "outputs": [{"type": "logs", "logs": "of another\n"}]}
    silent: Any = {**CODE, "outputs": None}
    for first in (CODE, silent):
        *others_kept, _, parted = from_vendor("openai", [first, other])
        assert to_vendor("openai", [*others_kept, parted]) == [
            first,
            {**other, "container_id": "", "code": None},
        ]
    anthropic = from_vendor("anthropic", [{"type": "text", "text": "a"}])
    made: Any = to_vendor("openai", [*anthropic, *results])
    assert [item["type"] for item in made] == ["message", "code_interpreter_call"]


def test_user_text_stays_user_text() -> None:
    attributes: list[Json] = [
        {"type": "message", "role": role, "content": "x"} for role in ("user", "system", "assistant")
    ]
    parts = from_vendor("openai", attributes)
    for representation in REPRESENTATIONS:
        again = drop_vendor_items(from_representation(to_representation(representation, parts)))
        made: Any = to_vendor("openai", again)
        assert [item["role"] for item in made] == ["user", "system", "assistant"], representation
    entries: Any = to_vendor("mistral", parts)
    assert [entry["type"] for entry in entries] == ["message.input", "message.input", "message.output"]
    steps: Any = to_vendor("gemini-interactions", parts)
    assert [step["type"] for step in steps] == ["user_input", "user_input", "model_output"]


def test_an_mcp_tool_may_have_the_name_of_a_kind() -> None:
    asked: Any = {
        "type": "mcp_approval_request",
        "id": "1",
        "server_label": "s",
        "name": "shell",
        "arguments": "{}",
    }
    called: Any = {
        "type": "mcp_call",
        "id": "2",
        "server_label": "s",
        "name": "web_search",
        "arguments": "{}",
    }
    for representation in REPRESENTATIONS:
        assert convert(representation, "openai", convert("openai", representation, [asked, called])) == [
            asked,
            called,
        ]


def test_a_result_may_name_its_call_by_either_id() -> None:
    call: Any = {"type": "local_shell_call", "id": "lsh", "call_id": "call", "action": {"command": ["ls"]}}
    for named in ({"id": "call"}, {"id": "other", "call_id": "call"}):
        result: Any = {"type": "local_shell_call_output", **named, "output": "a"}
        assert [part["id"] for part in represent_items("option2", [call, result])] == ["call", "call"]


def test_a_list_index_out_of_range_is_rejected() -> None:
    document: Any = {"output": [CODE]}
    written: Any = convert("openai", "option2", document)
    written[0]["fumehood.source"]["place"] = 7
    with pytest.raises(MalformedPartError, match="there is no list 7"):
        convert("option2", "openai", written)
