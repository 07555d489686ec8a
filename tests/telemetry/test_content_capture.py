"""Captured content in every profile, complete or truncated."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, get_args

import jsonschema_rs
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from fumehood.message_parts import read_published_schema
from fumehood.message_parts.validation import validate
from fumehood.protocol.attachments import Attachment
from fumehood.protocol.conversation import ConversationEntry, ConversationSegment, ToolExchange
from fumehood.protocol.model_turns import (
    AnyModelEvent,
    ModelCallArgumentsDelta,
    ModelCallStarted,
    ModelPassthroughItem,
    ModelReasoningDelta,
    ModelRequest,
    ModelTextDelta,
    ModelTurnEnded,
)
from fumehood.protocol.openai.items import CodeInterpreterCall, CodeInterpreterLogs
from fumehood.protocol.openai.responses import CreateResponse, IncompleteDetails, Response
from fumehood.protocol.openai.tool_specs import ModelToolDefinition, ToolSpec
from fumehood.telemetry.content_capture import ContentRecorder, ProfileName
from fumehood.telemetry.operation_records import RunRecord, SpanRecord, ToolCallRecord, TurnRecord
from fumehood.telemetry.semantic_conventions import (
    INPUT_MESSAGES,
    OUTPUT_MESSAGES,
    SYSTEM_INSTRUCTIONS,
    TOOL_DEFINITIONS,
)
from tests.support.turn_records import start_turn

OTEL = Path(__file__).parents[3] / "shared" / "reference" / "otel"
NAMES: list[ProfileName] = [*get_args(ProfileName.__value__)]
CALL = CodeInterpreterCall(
    id="ci_1",
    status="completed",
    code="print(1)",
    container_id="cntr_1",
    outputs=[CodeInterpreterLogs(logs="1\n")],
)
SECRETS: Any = {
    "type": "code_interpreter",
    "container": {
        "type": "auto",
        "network_policy": {
            "type": "allowlist",
            "allowed_domains": ["a.example"],
            "domain_secrets": [{"domain": "a.example", "name": "KEY", "value": "a-secret"}],
        },
    },
}


def entry(item: dict[str, Any]) -> ConversationEntry:
    return ConversationEntry(type=item["type"], id=None, turn=0, raw=msgspec.json.encode(item))


def message(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def run(**more: Any) -> RunRecord:
    request = {"model": "m", "input": "Hi", "instructions": "Be brief.", "tools": [SECRETS]}
    written = msgspec.json.encode(request | more)
    response = Response(id="resp_1", created_at=1, model="m", status="completed", output=[CALL])
    asked = msgspec.json.decode(written, type=CreateResponse)
    return RunRecord(request=asked, model=asked.model, streamed=False, response=response)


def turn(events: list[AnyModelEvent], *entries: ConversationEntry, **more: Any) -> TurnRecord:
    function = ModelToolDefinition(
        name="f", description="What f does.", parameters=Raw(b'{"type": "object"}')
    )
    request = ModelRequest(
        model="m",
        instructions="Be brief.",
        segments=[ConversationSegment(tuple(entries))],
        function_tools=[function],
        server_tools=[ToolSpec("web_search", None, b"{}")],
        **more,
    )
    record = start_turn(request)
    record.events = []
    record.add_events(events)
    return record


def capture_content(record: SpanRecord, profile: ProfileName = "option2", **settings: Any) -> dict[str, Any]:
    ContentRecorder(profile, in_events=True, **settings).on_end(record)
    assert json.loads(json.dumps(record.content)) == record.content
    return record.content


def redact_word(word: str) -> Callable[[str], str]:
    return lambda text: text.replace(word, "…")


@cache
def schema_of(view: str) -> jsonschema_rs.Validator:
    return jsonschema_rs.validator_for(json.loads(read_published_schema(view)))


@cache
def conventions_of(file: str) -> jsonschema_rs.Validator:
    """Without what they refer to elsewhere: the schema of all schemas, for the parameters of functions."""

    def here(schema: dict[str, Any]) -> dict[str, Any]:
        return {} if str(schema.get("$ref", "")).startswith("http://json-schema.org/") else schema

    return jsonschema_rs.validator_for(json.loads((OTEL / file).read_text(), object_hook=here))


def check_against_schemas(content: dict[str, Any], profile: ProfileName) -> None:
    """By our own schema of the view, and by OpenTelemetry's where it is at hand."""
    schema = schema_of("option1" if profile == "phoenix" else profile)
    for name, file in (
        (INPUT_MESSAGES, "gen-ai-input-messages.json"),
        (OUTPUT_MESSAGES, "gen-ai-output-messages.json"),
        (TOOL_DEFINITIONS, "gen-ai-tool-definitions.json"),
        (SYSTEM_INSTRUCTIONS, "gen-ai-system-instructions.json"),
    ):
        if name in (INPUT_MESSAGES, OUTPUT_MESSAGES):
            assert validate(content[name]) == []
            for part in (part for each in content[name] for part in each["parts"]):
                schema.validate(part)
        if (OTEL / file).exists() and name in content:
            conventions_of(file).validate(content[name])


@pytest.mark.parametrize("profile", NAMES)
def test_captured_content_of_a_run_is_valid_in_every_profile(profile: ProfileName) -> None:
    content = capture_content(run(), profile)
    check_against_schemas(content, profile)
    assert content[INPUT_MESSAGES] == [{"role": "user", "parts": [{"type": "text", "content": "Hi"}]}]
    assert content[SYSTEM_INSTRUCTIONS] == [{"type": "text", "content": "Be brief."}]
    assert content[TOOL_DEFINITIONS] == [{"type": "code_interpreter", "name": "code_interpreter"}]
    assert "a-secret" not in json.dumps(content)
    kinds = [part["type"] for each in content[OUTPUT_MESSAGES] for part in each["parts"]]
    assert (
        kinds
        == {
            "option1": ["tool_call", "tool_call_response"],
            "option2": ["server_tool_call", "server_tool_call_response"],
            "option3": ["server_tool"],
            "option3-alternative": ["server_tool_execution"],
            "phoenix": ["tool_call", "tool_call_response"],
        }[profile]
    )
    assert ("fumehood.source" in json.dumps(content[OUTPUT_MESSAGES])) is (profile != "phoenix")


def test_phoenix_finds_arguments_roles_and_reasons() -> None:
    output = capture_content(run(), "phoenix")[OUTPUT_MESSAGES]
    assert [(each["role"], each["finish_reason"]) for each in output] == [
        ("assistant", "stop"),
        ("tool", "stop"),
    ]
    assert output[0]["parts"][0]["arguments"] == {"code": "print(1)", "container_id": "cntr_1"}


@pytest.mark.parametrize("profile", NAMES)
def test_captured_content_of_a_turn_is_its_request_and_answer(profile: ProfileName) -> None:
    item: Any = msgspec.json.decode(msgspec.json.encode(CALL))
    passed = ModelPassthroughItem(
        Raw(msgspec.json.encode({"type": "web_search_call", "id": "ws", "status": "completed"}))
    )
    events: list[AnyModelEvent] = [
        *(
            ModelReasoningDelta("Let me "),
            ModelReasoningDelta("see."),
            passed,
            ModelTextDelta("I "),
            ModelTextDelta("try."),
        ),
        *(ModelCallStarted(0, "call_1", "code_interpreter"), ModelCallStarted(1, "call_2", "f")),
        *(
            ModelCallArgumentsDelta(0, '{"code": '),
            ModelCallArgumentsDelta(1, "not "),
            ModelCallArgumentsDelta(0, '"x"}'),
        ),
        *(ModelCallArgumentsDelta(1, "JSON"), ModelTurnEnded("calls")),
    ]
    content = capture_content(turn(events, entry(message("user", "Hi")), entry(item)), profile)
    check_against_schemas(content, profile)
    assert [each["role"] for each in content[INPUT_MESSAGES]][:2] == ["user", "assistant"]
    parts = [part for each in content[OUTPUT_MESSAGES] for part in each["parts"]]
    assert parts[0] == {"type": "reasoning", "content": "Let me see."}
    assert parts[-3] == {"type": "text", "content": "I try."}
    assert (parts[-2]["id"], parts[-2]["tool_call"]) == ("call_1", {"type": "code_interpreter", "code": "x"})
    assert (parts[-1]["id"], parts[-1]["tool_call"]) == (
        "call_2",
        {"type": "function", "arguments": "not JSON"},
    )
    assert {each["finish_reason"] for each in content[OUTPUT_MESSAGES]} == {"tool_call"}
    assert [each["name"] for each in content[TOOL_DEFINITIONS]] == ["f", "web_search"]


@pytest.mark.parametrize("profile", NAMES)
@pytest.mark.parametrize("half", ["both", "apart"])
def test_the_input_of_a_turn_is_what_the_model_was_sent(profile: ProfileName, half: str) -> None:
    """Its own ids, arguments and text, not those of the items that clients see."""
    exchange = ToolExchange(
        call_id="call_1",
        name="code_interpreter",
        arguments='{"code": "print(1)", "requirements": ["six"]}',
        output="1\n[figure 1]",
        images=("data:image/png;base64,iVBORw0KGgo=",),
    )
    item = msgspec.json.encode(CALL)
    whole = ConversationEntry(type="code_interpreter_call", id="ci_1", turn=1, raw=item, exchange=exchange)
    entries = [whole]
    if half == "apart":
        asked = msgspec.structs.replace(exchange, half="call", output="", images=())
        answered = msgspec.structs.replace(exchange, half="result", arguments="")
        entries = [msgspec.structs.replace(whole, exchange=each) for each in (asked, answered)]
    content = capture_content(turn([ModelTurnEnded("stop")], *entries), profile)
    check_against_schemas(content, profile)
    call, result, picture = [part for each in content[INPUT_MESSAGES] for part in each["parts"]]
    assert (call["type"], result["type"]) == ("tool_call", "tool_call_response")
    assert call["id"] == result["id"] == "call_1"
    assert call["tool_call"]["code"] == "print(1)"
    assert call["arguments"] == {"code": "print(1)", "requirements": ["six"]}
    assert result["response"]["outputs"] == [{"type": "logs", "logs": "1\n[figure 1]"}]
    assert picture["type"] == "uri"
    assert "ci_1" not in json.dumps(content)


@pytest.mark.parametrize("is_replayed", [True, False])
def test_reasoning_is_recorded_as_input_only_if_the_model_is_sent_it(is_replayed: bool) -> None:
    thought = {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "Hm."}]}
    sealed = {"type": "compaction", "id": "cmp", "encrypted_content": "gAAA"}
    record = turn([ModelTurnEnded("stop")], entry(sealed), entry(thought), entry(message("user", "Hi")))
    record.replays_reasoning = is_replayed
    content = capture_content(record)
    parts = [part["content"] for each in content[INPUT_MESSAGES] for part in each["parts"]]
    assert parts == (["Hm.", "Hi"] if is_replayed else ["Hi"])


def test_the_text_of_a_file_is_recorded_as_the_model_reads_it() -> None:
    asked = {
        "type": "message",
        "role": "user",
        "content": [
            {"type": "input_text", "text": "What is it?"},
            {"type": "input_file", "file_id": "file_1"},
            {"type": "input_image", "image_url": "https://e.x/a.png"},
        ],
    }
    text = Attachment(name="a.csv", kind="text", text="1,2")
    made = msgspec.structs.replace(entry(asked), attachments=(text, Attachment(kind="picture")))
    (message_,) = capture_content(turn([ModelTurnEnded("stop")], made))[INPUT_MESSAGES][:1]
    assert [part["type"] for part in message_["parts"]][:2] == ["text", "text"]
    assert "1,2" in message_["parts"][1]["content"]


@pytest.mark.parametrize(
    ("name", "arguments", "payload"),
    [
        ("shell", '{"commands": ["ls"]}', {"commands": ["ls"]}),
        ("shell", '{"commands": "ls"}', {"commands": None, "arguments": {"commands": "ls"}}),
        ("code_interpreter", "not JSON", {"code": None, "arguments": "not JSON"}),
        ("f", '{"a": 1}', {"arguments": {"a": 1}}),
    ],
)
def test_arguments_of_any_shape_are_recorded(name: str, arguments: str, payload: dict[str, Any]) -> None:
    events: list[AnyModelEvent] = [
        ModelCallStarted(0, "call_1", name),
        ModelCallArgumentsDelta(0, arguments),
        ModelTurnEnded("calls"),
    ]
    content = capture_content(turn(events))
    check_against_schemas(content, "option2")
    (part,) = [part for each in content[OUTPUT_MESSAGES] for part in each["parts"]]
    kind = name if name != "f" else "function"
    assert part["tool_call"] == {"type": kind, **payload}


def test_calls_of_the_gateway_have_the_times_that_it_has_measured() -> None:
    record = run()
    record.call_timings = {"ci_1": (1_768_213_845_500_000_000, 250_000_000)}
    (part,) = [
        part
        for each in capture_content(record, "option3-alternative")[OUTPUT_MESSAGES]
        for part in each["parts"]
    ]
    assert part["execution_metadata"] == {
        "status": "completed",
        "duration_ms": 250,
        "timestamp": "2026-01-12T10:30:45.500000Z",
    }


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"status": "failed"}, "error"),
        ({"incomplete_details": IncompleteDetails(reason="max_output_tokens")}, "length"),
        ({"incomplete_details": IncompleteDetails(reason="content_filter")}, "content_filter"),
    ],
)
def test_the_finish_reason_of_a_response_is_recorded(changes: dict[str, Any], reason: str) -> None:
    record = run()
    assert record.response is not None
    record.response = msgspec.structs.replace(record.response, **changes)
    assert capture_content(record)[OUTPUT_MESSAGES][0]["finish_reason"] == reason


def test_a_call_is_recorded_as_the_model_wrote_and_read_it() -> None:
    call = ToolCallRecord(name="f", call_id="c", arguments='{"code": "x"}', output="long" * 10_000)
    content = capture_content(call, max_bytes=10_000, redact=redact_word("x"))
    assert content["gen_ai.tool.call.arguments"] == '{"code": "…"}'
    assert len(content["gen_ai.tool.call.result"]) <= 5_000
    assert capture_content(ToolCallRecord(name="f", call_id="c")) == {}


def test_all_captured_content_is_redacted() -> None:
    events: list[AnyModelEvent] = [ModelTextDelta("A secret."), ModelTurnEnded("stop")]
    record = turn(events, entry(message("user", "My secret.")))
    assert record.request is not None
    record.request = msgspec.structs.replace(record.request, instructions="Keep the secret.")
    content = capture_content(record, redact=redact_word("secret"))
    check_against_schemas(content, "option2")
    assert "secret" not in json.dumps(content)
    assert json.dumps(content, ensure_ascii=False).count("…") == 3
    assert content[TOOL_DEFINITIONS] == [
        {"type": "function", "name": "f"},
        {"type": "web_search", "name": "web_search"},
    ]


@given(
    st.lists(
        st.tuples(st.sampled_from(["user", "assistant", "call", "f"]), st.integers(0, 3000)), max_size=60
    ),
    st.sampled_from(NAMES),
    st.integers(10_000, 40_000),
)
def test_captured_content_is_bounded_and_valid(
    inputs: list[tuple[str, int]], profile: ProfileName, max_bytes: int
) -> None:
    entries: list[ConversationEntry] = []
    for number, (kind, size) in enumerate(inputs):
        if kind == "call":
            item = msgspec.structs.replace(CALL, id=f"ci_{number}", code="c" * size)
            entries.append(entry(msgspec.json.decode(msgspec.json.encode(item))))
        elif kind == "f":
            shared = {"call_id": f"call_{number}"}
            entries += [
                entry({"type": "function_call", "name": "f", "arguments": "{}", **shared}),
                entry({"type": "function_call_output", "output": "o" * size, **shared}),
            ]
        else:
            entries.append(entry(message(kind, "ü" * size)))
    events: list[AnyModelEvent] = [ModelTextDelta("x" * 30_000), ModelTurnEnded("stop")]
    content = capture_content(turn(events, *entries), profile, max_bytes=max_bytes)
    check_against_schemas(content, profile)
    assert len(json.dumps(content)) <= max_bytes
    part_count = sum(len(each["parts"]) for each in content[INPUT_MESSAGES])
    assert part_count or not entries


@pytest.mark.parametrize("input_items", ["x" * 50_000, [message("user", "x" * 50_000), message("user", "y")]])
def test_content_too_large_to_read_is_marked_as_missing(input_items: Any) -> None:
    content = capture_content(run(input=input_items), max_bytes=10_000)
    check_against_schemas(content, "option2")
    cut, *rest = [part for each in content[INPUT_MESSAGES] for part in each["parts"]]
    assert cut == {"type": "fumehood:cut", "parts": 1}
    assert [part["content"] for part in rest] == ([] if isinstance(input_items, str) else ["y"])


def test_no_content_is_captured_for_an_unsampled_span() -> None:
    record = run()
    ContentRecorder().on_end(record)
    assert record.content == {}
