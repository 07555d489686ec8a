"""What people would read of an item is in every representation of its parts, not only in the way back."""

import itertools
import json
import warnings
from typing import Any

import pytest

from fumehood.message_parts import (
    REPRESENTATIONS,
    StreamAssembler,
    UnrecognizedStreamError,
    from_representation,
    from_vendor,
    to_representation,
    to_vendor,
    validate,
)
from fumehood.message_parts.conversion import convert
from fumehood.message_parts.vendors import VENDORS
from tests.message_parts.test_stream_assembly import STREAMED
from tests.message_parts.test_vendor_round_trips import assert_round_trip
from tests.support.sdk_instances import MARK, InstanceGenerator, list_texts
from tests.support.vendor_item_samples import SAMPLES

VIEWS = [name for name in REPRESENTATIONS if name != "option1-compat"]


def view(representation: str, vendor: str, items: Any) -> list[dict[str, Any]]:
    """The parts as somebody sees them who has no use for the way back."""
    written: Any = convert(vendor, representation, items)
    assert is_paired(written)
    return [{key: value for key, value in part.items() if key != "fumehood.source"} for part in written]


def is_paired(written: Any) -> bool:
    return not [problem for problem in validate(written) if "has no call before it" not in problem.reason]


def find_hidden_texts(representation: str, vendor: str, item: Any) -> set[tuple[tuple[str, ...], str]]:
    shown = "\0".join(text for _, text in list_texts(view(representation, vendor, [item])))
    return {(path, text) for path, text in list_texts(item) if text and text not in shown}


# --- every sample, and every type of the SDKs ----------------------------------------------------------

# What is no content: identifiers, settings, names of the vendor's types, and what only the vendor can read.
IDENTIFIERS = {
    *("type", "id", "call_id", "status", "role", "object", "tool_use_id", "toolUseId", "traceId", "model"),
    *("created_by", "caller_id", "tool_id", "namespace", "agent_id", "next_agent_id", "previous_agent_id"),
    *("approval_request_id", "agentId", "sessionId", "knowledgeBaseId", "toolset_name", "server_name"),
}
SETTINGS = {
    *("detail", "size", "env", "user", "param", "moderation_details", "text", "execution", "retrieval_type"),
    *("actionGroupName", "executionType", "invocationType", "toolType", "tool", "name", "toolsAuthorization"),
    *(
        "videoMetadata",
        "speechMetadata",
        "partMetadata",
        "svg_usage",
        "from",
        "to",
        "retrieved_at",
        "file_id",
    ),
}
SEALED = {
    *(
        "signature",
        "thoughtSignature",
        "encrypted_content",
        "encrypted_stdout",
        "encrypted_index",
        "fingerprint",
    ),
    *("data", "bytes", "logprobs"),
}
READABLE_ALL_THE_SAME = {("text",), ("content", "text"), ("text", "text")}
NO_CONTENT = IDENTIFIERS | SETTINGS | SEALED
# Items that are no content as a whole: their tools may hold secrets, or nobody knows what they are.
OPAQUE_TYPES = {
    "additional_tools",
    "configuration_update",
    "redacted_thinking",
    "fallback",
    "UNKNOWN",
    "compaction",
}


def is_content(item: Any, path: tuple[str, ...], text: str) -> bool:
    if path in READABLE_ALL_THE_SAME:
        return True
    if text.startswith("{") and isinstance(
        json.loads(text), dict
    ):  # arguments: their texts are shown one by one
        return False
    return not NO_CONTENT & set(path) and item.get("type") not in OPAQUE_TYPES


@pytest.mark.parametrize("representation", VIEWS)
@pytest.mark.parametrize("vendor", SAMPLES)
def test_every_sample_shows_its_content(vendor: str, representation: str) -> None:
    for item in SAMPLES[vendor]:
        hidden = find_hidden_texts(representation, vendor, item)
        assert not [
            path for path, text in hidden if is_content(item, path, text) and path[-1:] not in KNOWN
        ], item


# Times are in `execution_metadata`, an outcome is an error or none, and the name of an agent is with its call.
KNOWN = {("completed_at",), ("outcome",), ("agentCollaboratorName",), ("image_url",)}


def sdk_types() -> dict[str, list[Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import mistralai.client.models as mistral
        from anthropic.types.beta import BetaContentBlock
        from google.genai import interactions
        from google.genai import types as gemini
        from openai.types.responses import ResponseItem, ResponseOutputItem
    return {
        "openai": [ResponseOutputItem, ResponseItem],
        "anthropic": [BetaContentBlock],
        "gemini-interactions": [interactions.Step],
        "gemini": [gemini.Part],
        "mistral": [
            mistral.FunctionCallEntry,
            mistral.FunctionResultEntry,
            mistral.MessageInputEntry,
            mistral.AgentHandoffEntry,
        ],
    }


# Alternatives of which an item has one, and details of what is shown as a whole.
ALTERNATIVES = {
    *(
        "action",
        "uri",
        "file_data",
        "file_url",
        "file_id",
        "raw",
        "details",
        "tool_changes",
        "audioTranscription",
    ),
}


@pytest.mark.parametrize("vendor", ["openai", "anthropic", "gemini-interactions", "gemini", "mistral"])
def test_every_type_of_the_sdk_shows_its_content(vendor: str) -> None:
    made = [item for kind in sdk_types()[vendor] for item in InstanceGenerator().generate(kind)]
    if vendor == "gemini":  # a part has one of its fields
        made = [{key: value} for item in made for key, value in item.items()]
    assert len(made) > 3
    hidden: set[tuple[Any, ...]] = set()
    for representation, item in itertools.product(VIEWS, made):
        for path, text in find_hidden_texts(representation, vendor, item):
            if MARK in text and is_content(item, path, text) and not ALTERNATIVES & set(path):
                hidden.add((representation, item.get("type"), *path))
    assert hidden == set()


# --- what used to be hidden ----------------------------------------------------------------------------


@pytest.mark.parametrize("representation", VIEWS)
@pytest.mark.parametrize(
    ("item", "texts"),
    [
        ({"type": "code_interpreter_call", "arguments": '{"code":"print(2)"}'}, ["print(2)"]),
        ({"type": "code_execution_call", "arguments": '{"code": "print(2)"}', "outputs": []}, ["print(2)"]),
        ({"type": "code_interpreter_call", "code": None, "arguments": "print(2)"}, ["print(2)"]),
        ({"type": "web_search_call", "arguments": '{"query":"otters","num_results":3}'}, ["otters"]),
        (
            {"type": "web_search_call", "name": "browse_page", "arguments": '{"url":"https://e.x"}'},
            ["https://e.x"],
        ),
        ({"type": "web_search_call", "arguments": '{"of":"stars"}', "action": {"type": "search"}}, ["stars"]),
        ({"type": "file_search_call", "arguments": '{"query":"otters"}'}, ["otters"]),
        (
            {
                "type": "web_search_call",
                "arguments": '{"url":"https://e.x","instructions":"Read it.","type":"t"}',
            },
            ["https://e.x", "Read it."],
        ),
        (
            {
                "type": "code_execution_call",
                "arguments": '{"code": "1", "outputs": "o", "note": {"why": "because"}}',
            },
            ['"code": "1"', "because"],
        ),
        (
            {"type": "x_search_call", "name": "x_keyword_search", "arguments": '{"query":"otters"}'},
            ["otters"],
        ),
        (
            {"type": "view_image_call", "arguments": '{"image_url":"https://e.x/a.png"}'},
            ["https://e.x/a.png"],
        ),
        ({"type": "view_x_video_call", "input": '{"video_url":"https://e.x/v"}'}, ["https://e.x/v"]),
        (
            {"type": "custom_tool_call", "name": "x_user_search", "arguments": "otters", "call_id": "c"},
            ["otters"],
        ),
        (
            {
                "type": "TOOL_CALL_TYPE_WEB_SEARCH_TOOL",
                "function": {"name": "open", "arguments": '{"url":"u://x"}'},
            },
            ["u://x"],
        ),
        (
            {
                "type": "TOOL_CALL_TYPE_CODE_EXECUTION_TOOL",
                "function": {"name": "code_execution", "arguments": "not JSON"},
                "status": "TOOL_CALL_STATUS_FAILED",
                "error_message": "no sandbox",
            },
            ["not JSON", "no sandbox"],
        ),
    ],
)
def test_items_of_xai_show_their_arguments(item: Any, texts: list[str], representation: str) -> None:
    item = {"id": "i1", "status": "completed", **item}
    assert_round_trip("xai", [item])
    shown = json.dumps(view(representation, "xai", [item]))
    assert [text for text in texts if text not in shown] == []


def test_a_name_that_stands_for_another_kind_is_not_shown_as_the_tools() -> None:
    item: Any = {"type": "view_image_call", "id": "v", "name": "shell", "arguments": "{}"}
    assert_round_trip("xai", [item])
    (part,) = view("option2", "xai", [item])
    assert part["name"] == "view_image"


# As AWS's guide prints them.
NOVA_CALL: Any = {
    "toolUse": {
        "input": {"code": "numbers = [10, 24]\nsum(numbers)"},
        "name": "nova_code_interpreter",
        "toolUseId": "tooluse_1",
        "type": "server_tool_use",
    }
}


def nova_result(text: str, status: str = "success") -> Any:
    return {
        "toolResult": {
            "content": [{"text": text}],
            "status": status,
            "toolUseId": "tooluse_1",
            "type": "nova_code_interpreter_result",
        }
    }


@pytest.mark.parametrize("representation", VIEWS)
def test_bedrock_nova_shows_code_and_output(representation: str) -> None:
    good = nova_result('{"stdOut":"(34, 2)","stdErr":"","exitCode":0,"isError":false}')
    bad = nova_result('{"stdOut": "", "stdErr": "NameError", "exitCode": 1, "isError": true}', "error")
    empty: Any = {"toolResult": {"toolUseId": "x", "content": []}}
    for result in (good, bad, nova_result("not JSON"), empty):
        assert_round_trip("bedrock", [NOVA_CALL, result])
    shown = json.dumps(view(representation, "bedrock", [NOVA_CALL, good]))
    assert "numbers = [10, 24]" in shown
    assert '{"type": "logs", "logs": "(34, 2)"}' in shown
    assert '"exit_code": 0' in shown
    shown = json.dumps(view(representation, "bedrock", [NOVA_CALL, bad]))
    assert '"error": "NameError"' in shown
    assert "not JSON" in json.dumps(view(representation, "bedrock", [NOVA_CALL, nova_result("not JSON")]))


def test_bedrock_nova_streams_code_and_output() -> None:
    start = {"toolUseId": "t", "name": "nova_code_interpreter", "type": "server_tool_use"}
    events: list[Any] = [
        {"contentBlockStart": {"contentBlockIndex": 0, "start": {"toolUse": start}}},
        {"contentBlockDelta": {"contentBlockIndex": 0, "delta": {"toolUse": {"input": '{"code": "1+1"}'}}}},
        {"contentBlockStop": {"contentBlockIndex": 0}},
        {
            "contentBlockStart": {
                "contentBlockIndex": 1,
                "start": {"toolResult": {"toolUseId": "t", "type": "nova_code_interpreter_result"}},
            }
        },
        {
            "contentBlockDelta": {
                "contentBlockIndex": 1,
                "delta": {"toolResult": [{"text": '{"stdOut":"2","exitCode":0}'}]},
            }
        },
    ]
    assembler = StreamAssembler("bedrock")
    for event in events:
        assembler.feed(event)
    call, result = assembler.build_parts()
    assert getattr(call, "payload", None) == {"code": "1+1"}
    assert getattr(result, "payload", None) == {"outputs": [{"type": "logs", "logs": "2"}], "exit_code": 0}


FAILED: list[tuple[str, Any, str]] = [
    (
        "gemini",
        {"codeExecutionResult": {"outcome": "OUTCOME_FAILED", "output": "ZeroDivisionError"}},
        "OUTCOME_FAILED",
    ),
    (
        "gemini",
        {"codeExecutionResult": {"outcome": "OUTCOME_DEADLINE_EXCEEDED"}},
        "OUTCOME_DEADLINE_EXCEEDED",
    ),
    (
        "gemini-interactions",
        {"type": "code_execution_result", "call_id": "c", "result": "x", "is_error": True},
        "failed",
    ),
    ("anthropic", {"type": "tool_result", "tool_use_id": "t", "content": "no", "is_error": True}, "failed"),
    (
        "anthropic",
        {
            "type": "text_editor_code_execution_tool_result",
            "tool_use_id": "t",
            "content": {
                "type": "text_editor_code_execution_tool_result_error",
                "error_code": "file_not_found",
            },
        },
        "file_not_found",
    ),
    ("bedrock", {"toolResult": {"toolUseId": "t", "content": [{"text": "no"}], "status": "error"}}, "error"),
    (
        "openai",
        {"type": "code_interpreter_call", "id": "c", "status": "failed", "code": "1", "outputs": None},
        "failed",
    ),
    (
        "openai",
        {
            "type": "image_generation_call",
            "id": "i",
            "status": "failed",
            "result": None,
            "error": {"message": "not allowed", "code": "moderation_blocked"},
        },
        "not allowed",
    ),
    ("openai", {"type": "mcp_call", "id": "m", "name": "t", "arguments": "{}", "error": "gone"}, "gone"),
]


@pytest.mark.parametrize("representation", VIEWS)
@pytest.mark.parametrize(("vendor", "item", "error"), FAILED)
def test_a_failure_has_an_error(vendor: str, item: Any, error: str, representation: str) -> None:
    assert_round_trip(vendor, [item])
    errors: set[Any] = {
        payload["error"]
        for part in view(representation, vendor, [item])
        for payload in part.values()
        if isinstance(payload, dict) and "error" in payload
    }
    assert errors == {error}


@pytest.mark.parametrize("representation", VIEWS)
def test_success_has_no_error(representation: str) -> None:
    parts = view(
        representation, "gemini", [{"codeExecutionResult": {"outcome": "OUTCOME_OK", "output": "2"}}]
    )
    assert "error" not in json.dumps(parts)


@pytest.mark.parametrize("representation", VIEWS)
def test_text_steps_of_interactions_are_text(representation: str) -> None:
    """Earlier versions of the API have content where there are steps now."""
    document: Any = {
        "id": "v1_1",
        "outputs": [
            {"type": "thought", "summary": [{"type": "text", "text": "I think."}]},
            {
                "type": "text",
                "text": "It is 2.",
                "annotations": [{"type": "url_citation", "url": "https://e.x"}],
            },
            {"type": "image", "uri": "https://e.x/a.png", "mime_type": "image/png"},
        ],
    }
    assert_round_trip("gemini-interactions", document)
    assert view(representation, "gemini-interactions", document) == [
        {"type": "reasoning", "content": "I think."},
        {
            "type": "text",
            "content": "It is 2.",
            "annotations": [{"type": "url_citation", "url": "https://e.x"}],
        },
        {"type": "uri", "mime_type": "image/png", "modality": "image", "uri": "https://e.x/a.png"},
    ]


def test_text_steps_of_interactions_stream() -> None:
    events: list[Any] = [
        {"event_type": "interaction.start", "interaction": {"id": "v1_1"}},
        {"event_type": "content.start", "index": 0, "content": {"type": "thought"}},
        {
            "event_type": "content.delta",
            "index": 0,
            "delta": {"type": "thought_summary", "content": {"type": "text", "text": "I think."}},
        },
        {"event_type": "content.stop", "index": 0},
        {"event_type": "content.delta", "index": 1, "delta": {"type": "text", "text": "It is "}},
        {"event_type": "content.delta", "index": 1, "delta": {"type": "text", "text": "2."}},
        {"event_type": "content.stop", "index": 1},
    ]
    assembler = StreamAssembler("gemini-interactions")
    for event in events:
        assembler.feed(event)
    assert assembler.build_document() == [
        {"type": "thought", "summary": [{"type": "text", "text": "I think."}]},
        {"type": "text", "text": "It is 2."},
    ]


# --- streams -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_response_of_azure_streams_like_one_of_openai(is_wrapped: bool) -> None:
    events, whole = STREAMED["openai"]
    assembler = StreamAssembler("azure")
    for event in events:
        assembler.feed({"event": event["type"], "data": event} if is_wrapped else event)
    assert assembler.build_document() == whole
    assert "print(2)" in json.dumps(to_representation("option2", assembler.build_parts()))


def test_messages_of_a_thread_of_azure_are_text() -> None:
    def delta(text: str) -> Any:
        content = [{"index": 0, "type": "text", "text": {"value": text}}]
        return {"event": "thread.message.delta", "data": {"id": "m", "delta": {"content": content}}}

    assembler = StreamAssembler("azure")
    for event in (*STREAMED["azure"][0], delta("It is "), delta("2.")):
        assembler.feed(event)
    document = assembler.build_document()
    assert_round_trip("azure", document)
    assert view("option2", "azure", document)[-1] == {"type": "text", "content": "It is 2."}


@pytest.mark.parametrize("vendor", VENDORS)
def test_a_stream_of_something_else_is_an_error(vendor: str) -> None:
    assembler = StreamAssembler(vendor)
    assert not assembler.build_document(), "nothing has arrived yet"
    strange: list[Any] = [{"kind": "divination", "by": "secret stars"}, {"kind": "end"}]
    for event in strange:
        assembler.feed(event)
    for build in (assembler.build_document, assembler.build_parts):
        with pytest.raises(
            UnrecognizedStreamError, match=f"as one of {vendor}: its first event is an object with"
        ) as error:
            build()
        assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("vendor", "other"), [("anthropic", "openai"), ("openai", "anthropic"), ("mistral", "gemini")]
)
def test_a_stream_of_another_vendor_is_an_error(vendor: str, other: str) -> None:
    assembler = StreamAssembler(vendor)
    for event in STREAMED[other][0]:
        assembler.feed(event)
    with pytest.raises(UnrecognizedStreamError, match="Name the vendor that sent it"):
        assembler.build_document()


def test_a_stream_without_its_start_is_an_error() -> None:
    assembler = StreamAssembler("openai")
    assembler.feed(
        {"type": "response.output_text.delta", "output_index": 0, "content_index": 0, "delta": "x"}
    )
    with pytest.raises(UnrecognizedStreamError, match="Feed it from its first event"):
        assembler.build_document()


ERRORS: list[tuple[str, Any, str]] = [
    ("openai", {"type": "error", "code": "server_error", "message": "It broke."}, "It broke."),
    (
        "openai",
        {"type": "response.failed", "response": {"output": [], "error": {"message": "It broke."}}},
        "It broke.",
    ),
    (
        "anthropic",
        {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}},
        "Overloaded",
    ),
    ("bedrock", {"throttlingException": {"message": "Too many"}}, "Too many"),
    ("bedrock-agents", {"throttlingException": {"message": "Too many"}}, "Too many"),
    ("gemini", {"error": {"code": 503, "message": "Unavailable"}}, "Unavailable"),
    (
        "gemini-interactions",
        {"event_type": "error", "error": {"code": "x", "message": "It broke."}},
        "It broke.",
    ),
    ("mistral", {"type": "conversation.response.error", "message": "It broke.", "code": 1}, "It broke."),
    ("azure", {"event": "error", "data": {"message": "It broke."}}, "It broke."),
]


@pytest.mark.parametrize(("vendor", "event", "message"), ERRORS)
def test_an_error_that_ends_a_stream_is_shown(vendor: str, event: Any, message: str) -> None:
    assembler = StreamAssembler(vendor)
    assembler.feed(event)
    document = assembler.build_document()
    assert_round_trip(vendor, document)
    (part,) = view("option2", vendor, document)
    assert part["message"] == message


ITEM: Any = {"type": "function_call", "id": "f", "call_id": "c", "name": "f", "arguments": "{}"}
STEP: Any = {"id": "step_1", "step_details": {"type": "tool_calls", "tool_calls": []}}
FAILED_RESPONSES: list[tuple[str, Any, dict[str, Any]]] = [
    ("openai", {"output": [ITEM], "error": {"code": "server_error", "message": "It broke."}},
     {"message": "It broke.", "code": "server_error"}),
    ("openai", {"output": [], "error": {"code": "server_error", "message": "It broke."}},
     {"message": "It broke.", "code": "server_error"}),
    ("azure", {"data": [{**STEP, "last_error": {"code": "rate_limit", "message": "Too fast."}}]},
     {"message": "Too fast.", "code": "rate_limit"}),
    ("gemini", {"candidates": [{"content": {"parts": [{"text": ""}]}}], "promptFeedback": {"blockReason": "SAFETY"}},
     {"message": "SAFETY"}),
    ("gemini-interactions", {"steps": [{"type": "thought"}], "error": {"message": "It broke."}},
     {"message": "It broke."}),
]  # fmt: skip


@pytest.mark.parametrize("representation", VIEWS)
@pytest.mark.parametrize(("vendor", "document", "expected"), FAILED_RESPONSES)
def test_an_error_of_the_whole_response_is_shown(
    vendor: str, document: Any, expected: dict[str, Any], representation: str
) -> None:
    assert_round_trip(vendor, document)
    shown = [part for part in view(representation, vendor, document) if "message" in part]
    assert [{key: value for key, value in part.items() if key != "type"} for part in shown] == [expected]


# --- observed times ------------------------------------------------------------------------------------

TIMED: list[tuple[str, list[Any], Any]] = [
    (
        "mistral",
        SAMPLES["mistral"][:1],
        {"status": None, "duration_ms": 1000, "timestamp": "2026-01-12T10:30:45Z"},
    ),
    ("mistral", SAMPLES["mistral"][1:2], {"status": None, "timestamp": "2026-01-12T10:30:45Z"}),
    ("bedrock-agents", SAMPLES["bedrock-agents"][1:3], {"status": None, "duration_ms": 12}),
    (
        "openai",
        [
            {
                "type": "code_interpreter_call",
                "id": "c",
                "status": "completed",
                "code": "1",
                "outputs": [],
                "fumehood:execution": {"stdout": "", "exit_code": 3, "duration_ms": 250},
            }
        ],
        {"status": "completed", "duration_ms": 250},
    ),
    ("openai", SAMPLES["openai"][2:3], {"status": "completed"}),
]


@pytest.mark.parametrize(("vendor", "items", "expected"), TIMED)
def test_observed_times_are_in_the_execution_metadata(vendor: str, items: list[Any], expected: Any) -> None:
    assert_round_trip(vendor, items)
    written: Any = convert(vendor, "option3-alternative", items)
    known = {name: value for name, value in expected.items() if value is not None}
    assert [part.get("execution_metadata") for part in written] == [known]
    again = to_representation("option3-alternative", from_representation(convert(vendor, "option2", items)))  # pyright: ignore[reportArgumentType]
    assert again == written
    assert to_vendor(vendor, from_vendor(vendor, items)) == items
