"""The backend for servers of the Responses API, over a real socket."""

import json
from functools import partial
from typing import Any

import msgspec
import pytest
from inline_snapshot import snapshot
from msgspec import Raw

from fumehood.models.responses_api.responses_backend import ResponsesApiBackend
from fumehood.protocol.attachments import Attachment
from fumehood.protocol.conversation import ConversationEntry, ConversationSegment
from fumehood.protocol.model_turns import (
    AnyModelEvent,
    GenerationParameters,
    ModelMessageStarted,
    ModelReasoningEnded,
    ModelRequest,
    ModelTextDelta,
    ModelTurnEnded,
)
from fumehood.protocol.openai.api_errors import InvalidRequest, ModelError
from fumehood.protocol.openai.responses import ReasoningConfig, TextConfig, TextFormat
from fumehood.protocol.openai.tool_specs import ModelToolDefinition, ToolSpec
from tests.support.conversations import (
    call,
    entry,
    hosted_call,
    message,
    output,
    reasoning,
    segment,
    shell_call,
    shell_output,
)
from tests.support.raw_model_server import UPSTREAM_KEY, document, error, open_backend, stream
from tests.support.responses_events import done, ended, response, says

REQUEST = ModelRequest(model="small", segments=[segment(message("hi"))])
FUNCTION = ModelToolDefinition(name="f", description="Does f.", parameters=Raw(b'{"type":"object"}'))
CUSTOM = ModelToolDefinition(
    name="sql",
    description="Runs it.",
    parameters=Raw(b"{}"),
    strict=True,
    custom=b'{"type":"custom","name":"sql","format":{"type":"grammar"}}',
)
OTHERS = [ToolSpec(kind, None, json.dumps({"type": kind}).encode()) for kind in ("web_search", "namespace")]


upstream = partial(open_backend, ResponsesApiBackend, backend="responses")


async def turn(backend: ResponsesApiBackend, request: ModelRequest = REQUEST) -> list[AnyModelEvent]:
    return [event async for batch in backend.stream(request) for event in batch]


async def render_sent_input(*segments: ConversationSegment, **settings: Any) -> list[Any]:
    """The input that a server gets."""
    async with upstream(stream(says("a")), **settings) as (backend, server):
        await turn(backend, ModelRequest(model="small", segments=segments))
    return server.requests[0].json["input"]


# --- what is sent -------------------------------------------------------------------------------------


async def test_minimal_request() -> None:
    async with upstream(stream(says("a"))) as (backend, server):
        assert await turn(backend) == [
            ModelMessageStarted(),
            ModelTextDelta("a"),
            ModelTurnEnded("stop", response_id="resp_theirs"),
        ]
    (received,) = server.requests
    assert (received.method, received.path) == ("POST", "/v1/responses")
    assert received.headers["authorization"] == f"Bearer {UPSTREAM_KEY}"
    assert received.json == {
        "input": [{"type": "message", "role": "user", "content": "hi"}],
        "model": "small",
        "stream": True,
        "store": False,
        "include": ["reasoning.encrypted_content"],
    }


async def test_request_with_all_fields() -> None:
    schema = {"type": Raw(b'"object"')}
    request = ModelRequest(
        model="small",
        instructions="Be brief.",
        segments=[segment(message("hi"))],
        function_tools=[FUNCTION, CUSTOM],
        server_tools=OTHERS[:1],
        tool_choice=FUNCTION,
        parallel_calls=False,
        streamed=False,
        sampling=GenerationParameters(
            temperature=0.5,
            top_p=0.9,
            presence_penalty=0.1,
            frequency_penalty=0.2,
            logprobs=True,
            top_logprobs=3,
            max_output_tokens=100,
            text=TextConfig(
                format=TextFormat(type="json_schema", name="out", schema=schema, strict=True), verbosity="low"
            ),
            reasoning=ReasoningConfig(effort="high", summary="auto"),
            service_tier="flex",
            prompt_cache_key="k",
            safety_identifier="s",
            user="u",
        ),
    )
    extra = {"service_tier": None, "temperature": 0.7}
    whole = document(msgspec.json.encode(response()))
    async with upstream(whole, name="org/small", extra_body=extra, pass_tools=["web_search"]) as (
        backend,
        server,
    ):
        assert await turn(backend, request) == [ModelTurnEnded("stop", response_id="resp_theirs")]
    assert server.requests[0].json == snapshot(
        {
            "input": [{"type": "message", "role": "user", "content": "hi"}],
            "model": "org/small",
            "stream": False,
            "store": False,
            "instructions": "Be brief.",
            "tools": [
                {
                    "type": "function",
                    "name": "f",
                    "description": "Does f.",
                    "parameters": {"type": "object"},
                    "strict": False,
                },
                {
                    "type": "function",
                    "name": "sql",
                    "description": "Runs it.",
                    "parameters": {},
                    "strict": True,
                },
                {"type": "web_search"},
            ],
            "tool_choice": {"type": "function", "name": "f"},
            "parallel_tool_calls": False,
            "temperature": 0.7,
            "top_p": 0.9,
            "presence_penalty": 0.1,
            "frequency_penalty": 0.2,
            "top_logprobs": 3,
            "max_output_tokens": 100,
            "prompt_cache_key": "k",
            "safety_identifier": "s",
            "user": "u",
            "text": {
                "format": {
                    "type": "json_schema",
                    "name": "out",
                    "schema": {"type": "object"},
                    "strict": True,
                },
                "verbosity": "low",
            },
            "reasoning": {"effort": "high", "summary": "auto"},
            "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
        }
    )


@pytest.mark.parametrize(
    ("choice", "raised"),
    [
        ("auto", None),
        ("none", "none"),
        ("required", "required"),
        (FUNCTION, {"type": "function", "name": "f"}),
        (CUSTOM, {"type": "custom", "name": "sql"}),
    ],
)
async def test_choices_and_tools_that_are_passed_on(choice: Any, raised: object) -> None:
    request = ModelRequest(
        model="m",
        segments=REQUEST.segments,
        function_tools=[FUNCTION, CUSTOM],
        server_tools=OTHERS,
        tool_choice=choice,
    )
    async with upstream(stream(says("a")), pass_tools=["*"], encrypted_reasoning=False) as (backend, server):
        await turn(backend, request)
    received = server.requests[0].json
    assert received.get("tool_choice") == raised
    assert [tool["type"] for tool in received["tools"]] == ["function", "custom", "web_search", "namespace"]
    assert "include" not in received


async def test_tool_fields_are_omitted_without_tools() -> None:
    request = ModelRequest(model="m", segments=REQUEST.segments, tool_choice="none", parallel_calls=False)
    async with upstream(stream(says("a"))) as (backend, server):
        await turn(backend, request)
    assert not server.requests[0].json.keys() & {"tools", "tool_choice", "parallel_tool_calls"}


async def test_the_conversation_without_ids() -> None:
    """All calls of a turn come before their results; what was cut off, and what followed from nothing, is left out."""
    picture = "data:image/png;base64,AA=="
    said: dict[str, object] = {
        "type": "message",
        "id": "msg_ours",
        "role": "assistant",
        "status": "completed",
        "phase": "final_answer",
        "content": [{"type": "output_text", "text": "so"}, {"type": "refusal", "refusal": "!"}],
    }
    first = segment(
        message("sum?", role="developer"),
        hosted_call("c1", "one", turn=1),
        hosted_call("c2", "two", turn=1, images=[picture], arguments="no json"),
        message([], "assistant", 2),
        entry(said, 2),
        call("c3", turn=2, id="fc_ours", status="completed"),
        call("cut", '{"x', turn=2, status="incomplete"),
    )
    parts = [
        {"type": "input_text", "text": "see"},
        {"type": "input_image", "image_url": picture, "detail": "low"},
    ]
    second = segment(output("c3", parts), message(parts))
    for takes_images in (False, True):
        received = await render_sent_input(first, second, takes_images=takes_images)
        assert [item for item in received if item.get("call_id") == "c2"][-1]["output"] == (
            [{"type": "input_text", "text": "two"}, {"type": "input_image", "image_url": picture}]
            if takes_images
            else "two"
        )
    received = await render_sent_input(first, second, developer_role=True)
    assert received == snapshot(
        [
            {"type": "message", "role": "developer", "content": "sum?"},
            {
                "type": "function_call",
                "call_id": "c1",
                "name": "code_interpreter",
                "arguments": '{"code":"1"}',
            },
            {
                "type": "function_call",
                "call_id": "c2",
                "name": "code_interpreter",
                "arguments": '{"invalid_json":"no json"}',
            },
            {"type": "function_call_output", "call_id": "c1", "output": "one"},
            {"type": "function_call_output", "call_id": "c2", "output": "two"},
            {"type": "message", "role": "assistant", "content": "so!", "phase": "final_answer"},
            {"type": "function_call", "call_id": "c3", "name": "f", "arguments": "{}"},
            {
                "type": "function_call_output",
                "call_id": "c3",
                "output": [
                    {"type": "input_text", "text": "see"},
                    {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "low"},
                ],
            },
            {
                "type": "message",
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "see"},
                    {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "low"},
                ],
            },
        ]
    )


async def test_uploaded_files_are_sent_inline_or_as_text() -> None:
    picture = "data:image/png;base64,AA=="
    pdf = "data:application/pdf;base64,JVBERi0="
    parts = [
        {"type": "input_image", "file_id": "file-1", "detail": "low"},
        {"type": "input_file", "file_id": "file-2"},
        {"type": "input_file", "file_id": "file-3"},
        {"type": "input_file", "filename": "inline.pdf", "file_data": pdf, "file_id": None},
        {"type": "input_file", "file_id": "file-4"},
        {"type": "input_image", "file_id": "file-5"},
        {"type": "input_file", "file_url": "https://example.org/x.pdf"},
    ]
    found = (
        Attachment(name="a.png", kind="picture", data=picture),
        Attachment(name="b.csv", kind="text", text="1,2"),
        Attachment(name="c.pdf", media_type="application/pdf", bytes=5, data=pdf),
        Attachment(name="inline.pdf", media_type="application/pdf", bytes=5),
        Attachment(name="d.zip", media_type="application/zip", bytes=7),
        Attachment(name="e.png", kind="picture", gone=True),
        Attachment(),
    )
    items = segment(msgspec.structs.replace(message(parts), attachments=found))
    cannot = "cannot be shown here. If there is a code interpreter, it finds it as /mnt/data/"
    found_items = [
        {"type": "input_image", "detail": "low", "image_url": picture},
        {"type": "input_text", "text": "The file b.csv:\n1,2"},
        {"type": "input_file", "filename": "c.pdf", "file_data": pdf},
        {"type": "input_file", "filename": "inline.pdf", "file_data": pdf},
        {"type": "input_text", "text": f"The file d.zip (application/zip, 7 bytes) {cannot}d.zip."},
        {"type": "input_text", "text": "The picture e.png is not there any more."},
        {"type": "input_file", "file_url": "https://example.org/x.pdf"},
    ]
    ((received,), (without,)) = (
        await render_sent_input(items),
        await render_sent_input(items, takes_files=False),
    )
    assert received["content"] == found_items
    for index, name in ((2, "c.pdf"), (3, "inline.pdf")):
        found_items[index] = {
            "type": "input_text",
            "text": f"The file {name} (application/pdf, 5 bytes) {cannot}{name}.",
        }
    assert without["content"] == found_items


async def test_custom_calls_are_functions_unless_the_server_knows_them() -> None:
    past = segment(
        entry({"type": "custom_tool_call", "call_id": "c", "name": "sql", "input": "SELECT"}),
        entry({"type": "custom_tool_call_output", "call_id": "c", "output": "1"}),
    )
    assert await render_sent_input(past) == [
        {"type": "function_call", "call_id": "c", "name": "sql", "arguments": '{"input":"SELECT"}'},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
    ]
    assert await render_sent_input(past, pass_tools=["custom"]) == [
        {"type": "custom_tool_call", "call_id": "c", "name": "sql", "input": "SELECT"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "1"},
    ]


async def test_items_of_other_tools_are_functions_unless_the_server_may_know_them() -> None:
    items: list[dict[str, object]] = [
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "shell_call", "id": "sh_1", "call_id": "c", "action": {"commands": ["ls"]}},
        {"type": "shell_call_output", "call_id": "c", "output": "a.txt"},
        {"type": "apply_patch_call", "id": "apc_1", "call_id": "unanswered"},
        {"type": "mcp_call", "id": "mcp_1", "name": "f", "arguments": "{}", "output": "done"},
    ]
    past = segment(*map(entry, items))
    assert await render_sent_input(past) == [
        {
            "type": "function_call",
            "call_id": "c",
            "name": "shell",
            "arguments": '{"commands":["ls"]}',
        },
        {"type": "function_call_output", "call_id": "c", "output": "a.txt"},
        {"type": "function_call", "call_id": "f", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "f", "output": "done"},
    ]
    native = [item for item in items if item["type"] != "apply_patch_call"]
    assert await render_sent_input(past, pass_tools=["shell"]) == native
    assert await render_sent_input(past, pass_tools=["*"]) == items


async def test_calls_of_client_tools_are_answered_by_the_next_segment() -> None:
    operation = {"type": "delete_file", "path": "a"}
    called = [
        {"type": "shell_call", "call_id": "s", "action": {"commands": ["ls"]}, "status": "completed"},
        {"type": "apply_patch_call", "call_id": "p", "operation": operation, "status": "completed"},
        {"type": "local_shell_call", "call_id": "l", "action": {"command": ["ls"]}, "status": "completed"},
    ]
    patched = {"type": "apply_patch_call_output", "call_id": "p", "status": "completed", "output": "ok"}
    listed = {"type": "local_shell_call_output", "call_id": "l", "output": "a.txt"}
    past = (
        segment(message("go"), *(entry(item, 1) for item in called)),
        segment(entry(patched), shell_output("s", "a.txt"), entry(listed)),
    )
    received = await render_sent_input(*past)
    assert received[1:] == [
        {"type": "function_call", "call_id": "s", "name": "shell", "arguments": '{"commands":["ls"]}'},
        {
            "type": "function_call",
            "call_id": "p",
            "name": "apply_patch",
            "arguments": '{"type":"delete_file","path":"a"}',
        },
        {"type": "function_call", "call_id": "l", "name": "local_shell", "arguments": '{"command":["ls"]}'},
        {"type": "function_call_output", "call_id": "p", "output": "ok"},
        {"type": "function_call_output", "call_id": "s", "output": "a.txt"},
        {"type": "function_call_output", "call_id": "l", "output": "a.txt"},
    ]
    passed = await render_sent_input(*past, pass_tools=["shell", "apply_patch", "local_shell"])
    assert [item["type"] for item in passed[1:]] == [
        "shell_call",
        "apply_patch_call",
        "local_shell_call",
        "apply_patch_call_output",
        "shell_call_output",
        "local_shell_call_output",
    ]


async def test_a_tool_of_the_server_can_be_forced() -> None:
    search = ToolSpec("web_search", None, b'{"type":"web_search"}')
    wiki = ToolSpec("mcp", None, b'{"type":"mcp","server_label":"wiki","server_url":"https://wiki.example"}')
    for forced, choice in (
        (search, {"type": "web_search"}),
        (wiki, {"type": "mcp", "server_label": "wiki"}),
    ):
        async with upstream(stream(says("a")), pass_tools=["*"]) as (backend, server):
            asked = ModelRequest(model="m", server_tools=[search, wiki], tool_choice=forced)
            await turn(backend, asked)
        assert server.requests[0].json["tool_choice"] == choice
        assert [tool["type"] for tool in server.requests[0].json["tools"]] == ["web_search", "mcp"]


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({"type": "compaction", "encrypted_content": "x"}, "compaction"),
        ({"type": "message", "role": "king", "content": "x"}, "king"),
        (
            {"type": "message", "role": "user", "content": [{"type": "input_file", "file_id": "file-1"}]},
            "file-1",
        ),
        (
            {
                "type": "function_call_output",
                "call_id": "c",
                "output": [{"type": "input_image", "file_id": "f"}],
            },
            "'f'",
        ),
        ({"type": "function_call", "name": "f"}, "call_id"),
    ],
)
async def test_items_that_cannot_be_rendered(item: dict[str, object], words: str) -> None:
    async with upstream() as (backend, server):
        with pytest.raises(InvalidRequest, match=words) as refused:
            backend.validate_request(ModelRequest(model="m", segments=[segment(entry(item))]))
    assert refused.value.param == "input"
    assert server.requests == []


# --- sealed reasoning ---------------------------------------------------------------------------------


async def replay_reasoning(model: str = "small", **settings: Any) -> tuple[str, list[Any]]:
    """What a model sealed, and the input of the turn after it at the same server, asked as `model`."""
    first = done(0, type="reasoning", id="rs_theirs", summary=[], encrypted_content="gAAA")
    async with upstream(stream(first, says("a")), stream(says("b")), **settings) as (backend, server):
        encrypted = next(
            event.encrypted_content for event in await turn(backend) if isinstance(event, ModelReasoningEnded)
        )
        assert encrypted is not None
        thoughts: dict[str, object] = {
            "type": "reasoning",
            "id": "rs_ours",
            "summary": [],
            "encrypted_content": encrypted,
        }
        past = segment(message("hi"), entry(thoughts, 1), message("a", "assistant", 1))
        await turn(backend, ModelRequest(model=model, segments=[past, segment(message("on"))]))
    return encrypted, server.requests[1].json["input"]


async def test_encrypted_reasoning_is_sent_back_to_its_model() -> None:
    encrypted, received = await replay_reasoning()
    assert encrypted.endswith(":rs_theirs:gAAA")
    assert received[1] == {"type": "reasoning", "id": "rs_theirs", "summary": [], "encrypted_content": "gAAA"}
    assert [item["type"] for item in received] == ["message", "reasoning", "message", "message"]


async def test_encrypted_reasoning_is_not_sent_to_another_model() -> None:
    _, received = await replay_reasoning("large")
    assert [item["type"] for item in received] == ["message", "message", "message"]
    _, received = await replay_reasoning("large", name="org/small")  # the same by another name
    assert "reasoning" in [item["type"] for item in received]


def encrypted_reasoning_entry(turn: int) -> ConversationEntry:
    return entry({"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"}, turn)


async def test_reasoning_that_is_not_sent() -> None:
    """Sealed by nobody knows whom, plain text unless it is wanted, and what nothing followed from."""
    past = segment(
        message("hi"), encrypted_reasoning_entry(1), reasoning("hm", 1), message("a", "assistant", 1)
    )
    assert [item["type"] for item in await render_sent_input(past)] == ["message", "message"]
    received = await render_sent_input(past, replay_reasoning=True)
    assert received[1] == {
        "type": "reasoning",
        "id": "rs_0",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "hm"}],
    }
    for last in (reasoning("cut", 1), reasoning("cut", 0)):
        left = segment(message("hi"), last)
        received = await render_sent_input(left, segment(message("on")), replay_reasoning=True)
        assert [item["type"] for item in received] == ["message", "message"]


# --- counting -----------------------------------------------------------------------------------------


async def test_the_server_counts_if_it_can() -> None:
    counted = document(b'{"object":"response.input_tokens","input_tokens":42}')
    request = ModelRequest(
        model="m",
        instructions="Be.",
        segments=REQUEST.segments,
        sampling=GenerationParameters(temperature=1.0),
    )
    answers = [counted, document(b"{}"), error("404 Not Found", {"error": {"message": "no"}})]
    async with upstream(*answers, tokenize_path="/responses/input_tokens") as (backend, server):
        assert backend.get_profile("m").counts_tokens
        assert await backend.count_tokens(request) == (42, True)
        for words in ("no token count", "refused"):
            with pytest.raises(ModelError, match=words):
                await backend.count_tokens(request)
    assert server.requests[0].path == "/v1/responses/input_tokens"
    assert server.requests[0].json == {
        "input": [{"type": "message", "role": "user", "content": "hi"}],
        "model": "m",
        "instructions": "Be.",
    }


async def test_tokens_are_estimated_without_tokenize_url() -> None:
    async with upstream() as (backend, server):
        assert (await backend.count_tokens(REQUEST))[1] is False
    assert server.requests == []


# --- what goes wrong ----------------------------------------------------------------------------------


async def test_a_server_without_the_responses_api() -> None:
    async with upstream(document(b"<html>", "404 Not Found")) as (backend, _):
        with pytest.raises(ModelError, match="has no Responses API"):
            await turn(backend)


async def test_a_turn_does_not_wait_for_the_end_of_the_body() -> None:
    """Nobody waits for more after it, not even for the end of the body."""
    async with upstream(stream(says("a"), end=False), stream(ended())) as (backend, _):
        assert (await turn(backend))[-1] == ModelTurnEnded("stop", response_id="resp_theirs")


async def test_calls_and_results_that_are_two_items() -> None:
    """Ours are functions of the client's to such a server; what is a server's own stays its own, whole."""
    ours = [
        shell_call("a", turn=1),
        shell_call("b", turn=1),
        shell_output("a", "1", turn=1),
        shell_output("b", "2", turn=1),
    ]
    local = entry({"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}})
    unanswered = shell_call("d")
    conversation = segment(message("go"), *ours, unanswered, local, shell_output("c", "3"))
    for pass_tools, rest in (
        (["shell"], ["shell_call", "shell_call_output"]),
        ([], ["function_call", "function_call_output"]),
    ):
        received = await render_sent_input(conversation, pass_tools=pass_tools)
        assert [(item["type"], item["call_id"]) for item in received[1:]] == [
            ("function_call", "a"),
            ("function_call", "b"),
            ("function_call_output", "a"),
            ("function_call_output", "b"),
            (rest[0], "c"),
            (rest[1], "c"),
        ]
