"""What an independent suite asks of every Responses server, one case each and all at once.

A case is an async function of a `Wire`; `@case` puts it into the table. The model tells what it was shown, so that a
case also sees what the gateway passed on.
"""

import asyncio
import base64
import importlib.util
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio
from pydantic import ValidationError

from tests.e2e.conftest import RunningGateway
from tests.support.compliance_client import (
    DOCUMENT,
    ComplianceClient,
    check_compaction,
    check_event,
    check_response,
    check_stream,
    connect,
    get_text,
    mirror,
)

type Case = Callable[[ComplianceClient], Awaitable[None]]

PATIENCE = 30
PICTURE = "data:image/png;base64,iVBORw0KGgo="
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather at a place.",
    "parameters": {
        "type": "object",
        "properties": {"location": {"type": "string", "description": "City and state"}},
        "required": ["location"],
        "additionalProperties": False,
    },
    "strict": True,
}

CASES: dict[str, Case] = {}


def case(name: str) -> Callable[[Case], Case]:
    def add(function: Case) -> Case:
        assert name not in CASES
        CASES[name] = function
        return function

    return add


def socket_case(name: str) -> Callable[[Case], Case]:
    served = importlib.util.find_spec("fumehood.gateway.routes.websocket_routes") is not None
    return case(f"WebSocket: {name}") if served else lambda function: function


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content, **more}


def inline(name: str, kind: str, content: bytes) -> dict[str, Any]:
    data = f"data:{kind};base64,{base64.b64encode(content).decode()}"
    return {"type": "input_file", "filename": name, "file_data": data}


# --- text ---------------------------------------------------------------------------------------------


@case("basic")
async def basic(wire: ComplianceClient) -> None:
    response = await wire.create(input=[said("user", "Say hello.")])
    assert response["status"] == "completed"
    assert get_text(response) == "user: Say hello."


@case("streaming")
async def streaming(wire: ComplianceClient) -> None:
    events = await wire.stream(input=[said("user", "Count from 1 to 5.")])
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert len(deltas) == 3
    assert list(dict.fromkeys(kinds)) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert "".join(deltas) == get_text(events[-1]["response"]) == "user: Count from 1 to 5."


@case("system prompt")
async def system_prompt(wire: ComplianceClient) -> None:
    response = await wire.create(
        instructions="Be brief.",
        input=[said("system", "Talk like a pirate."), said("developer", "No swearing."), said("user", "Hi.")],
    )
    assert get_text(response) == (
        "system: Be brief. | system: Talk like a pirate. | system: No swearing. | user: Hi."
    )
    assert response["instructions"] == "Be brief."


@case("multi-turn")
async def multi_turn(wire: ComplianceClient) -> None:
    response = await wire.create(
        input=[
            said("user", "My name is Alice."),
            said("assistant", "Hello Alice!"),
            said("assistant", [{"type": "output_text", "text": "How are you?", "annotations": []}]),
            said("user", [{"type": "input_text", "text": "What is my name?"}]),
        ]
    )
    assert get_text(response) == (
        "user: My name is Alice. | assistant: Hello Alice! | assistant: How are you? | user: What is my name?"
    )


# --- tools --------------------------------------------------------------------------------------------


def check_call(response: Any) -> Any:
    (found,) = response["output"]
    assert (found["type"], found["name"], found["status"]) == ("function_call", "get_weather", "completed")
    assert found["arguments"] == '{"location":"San Francisco, CA"}'
    assert response["tools"] == [WEATHER]
    return found


@case("tool calling")
async def tool_calling(wire: ComplianceClient) -> None:
    check_call(await wire.create(input=[said("user", "The weather?")], tools=[WEATHER]))


@case("tool calling, streamed")
async def tool_calling_streamed(wire: ComplianceClient) -> None:
    events = await wire.stream(input=[said("user", "The weather?")], tools=[WEATHER], tool_choice="required")
    found = check_call(events[-1]["response"])
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert list(dict.fromkeys(kinds)) == [
        "created",
        "in_progress",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    deltas = [event["delta"] for event in events if event["type"].endswith("arguments.delta")]
    assert "".join(deltas) == found["arguments"]
    added = next(event["item"] for event in events if event["type"] == "response.output_item.added")
    assert (added["arguments"], added["status"]) == ("", "in_progress")


@case("tool calling, round trip")
async def round_trip(wire: ComplianceClient) -> None:
    question = said("user", "The weather?")
    first = await wire.create(input=[question], tools=[WEATHER])
    found = check_call(first)
    result = {"type": "function_call_output", "call_id": found["call_id"], "output": '{"sky": "clear"}'}
    expected = 'user: The weather? | assistant: None | tool: {"sky": "clear"}'
    replayed = await wire.create(input=[question, found, result], tools=[WEATHER])
    assert get_text(replayed) == expected
    continued = await wire.create(input=[result], tools=[WEATHER], previous_response_id=first["id"])
    assert get_text(continued) == expected


# --- what is not text ---------------------------------------------------------------------------------


@case("image input")
async def image_input(wire: ComplianceClient) -> None:
    parts = [{"type": "input_text", "text": "What is it?"}, {"type": "input_image", "image_url": PICTURE}]
    response = await wire.create(input=[said("user", parts)])
    assert get_text(response) == f'user: What is it? + {{"url": "{PICTURE}"}}'


@case("file input")
async def file_input(wire: ComplianceClient) -> None:
    """What is text is shown as text; anything else is the model server's affair."""
    table = inline("table.csv", "text/csv", b"a,b\n1,2\n")
    response = await wire.create(input=[said("user", [table, {"type": "input_text", "text": "Add."}])])
    assert get_text(response) == "user: The file table.csv:\na,b\n1,2\n\nAdd."
    paper = inline("paper.pdf", "application/pdf", b"%PDF-1.4 ...")
    response = await wire.create(input=[said("user", [paper])])
    assert get_text(response) == f'user: {{"filename": "paper.pdf", "file_data": "{paper["file_data"]}"}}'
    status, error = await wire.refused(
        input=[said("user", [{"type": "input_file", "filename": "x", "file_id": "file-1"}])]
    )
    assert (status, error["param"]) == (400, "input[0].content[0].file_id")
    assert error["code"] == "file_not_found"


# --- state --------------------------------------------------------------------------------------------


@case("assistant phase")
async def assistant_phase(wire: ComplianceClient) -> None:
    thinking = said("assistant", "Let me see.", phase="commentary")
    parts: Any = [{"type": "output_text", "text": "42", "annotations": []}]
    final = said("assistant", parts, phase="final_answer", status="completed", id="msg_phase")
    response = await wire.create(input=[said("user", "6 * 7?"), thinking, final, said("user", "Sure?")])
    assert get_text(response) == "user: 6 * 7? | assistant: Let me see. | assistant: 42 | user: Sure?"
    status, listed = await wire.ask("GET", f"/responses/{response['id']}/input_items?order=asc")
    assert status == 200
    assert [item.get("phase") for item in listed["data"]] == [None, "commentary", "final_answer", None]


@case("previous_response_id")
async def previous_response_id(wire: ComplianceClient) -> None:
    first = await wire.create(input=[said("user", "My name is Alice.")], instructions="Be kind.")
    second = await wire.create(input="And mine is Bob.", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    assert get_text(second) == (
        f"user: My name is Alice. | assistant: {get_text(first)} | user: And mine is Bob."
    )


@case("previous_response_id of nothing")
async def unknown_previous_response_id(wire: ComplianceClient) -> None:
    for stream in (False, True):
        check_not_found(await wire.refused(input="x", previous_response_id="resp_nothing", stream=stream))


def check_not_found(refused: tuple[int, Any]) -> None:
    status, error = refused
    assert status in (400, 404)
    assert (error["code"], error["param"]) == ("previous_response_not_found", "previous_response_id")


# --- compaction ---------------------------------------------------------------------------------------


@case("compact")
async def compact(wire: ComplianceClient) -> None:
    past = [said("user", "My name is Alice."), said("assistant", "Hello Alice!")]
    status, body = await wire.ask("POST", "/responses/compact", {"model": "scripted", "input": past})
    assert status == 200, body
    compacted = check_compaction(body)
    assert compacted["object"] == "response.compaction"
    assert compacted["output"][-1]["type"] == "compaction"
    response = await wire.create(input=[*compacted["output"], said("user", "What is my name?")])
    assert "Alice" in get_text(response)
    assert get_text(response).endswith("user: What is my name?")


@case("compact without a model")
async def compact_without_model(wire: ComplianceClient) -> None:
    status, body = await wire.ask("POST", "/responses/compact", {"input": "x"})
    assert status in (400, 422)
    assert body["error"]["param"] == "model"


# --- WebSocket ----------------------------------------------------------------------------------------


@socket_case("response")
async def socket_response(wire: ComplianceClient) -> None:
    async with wire.socket() as socket:
        response = await socket.create(input=[said("user", "Say hello.")])
    assert response["status"] == "completed"
    assert get_text(response) == "user: Say hello."


@socket_case("several in sequence")
async def socket_sequence(wire: ComplianceClient) -> None:
    async with wire.socket() as socket:
        for text in ("One.", "Two.", "Three."):
            assert get_text(await socket.create(input=text, store=False)) == f"user: {text}"


@socket_case("continuation")
async def socket_continuation(wire: ComplianceClient) -> None:
    async with wire.socket() as socket:
        first = await socket.create(input="My name is Alice.", store=False)
        second = await socket.create(input="And mine?", store=False, previous_response_id=first["id"])
    assert get_text(second) == f"user: My name is Alice. | assistant: {get_text(first)} | user: And mine?"


@socket_case("reconnect with store: false")
async def socket_reconnect(wire: ComplianceClient) -> None:
    async with wire.socket() as socket:
        first = await socket.create(input="My name is Alice.", store=False)
    async with wire.socket() as socket:
        check_not_found(await socket.refused(input="And?", store=False, previous_response_id=first["id"]))
        again = [said("user", "My name is Alice."), *first["output"], said("user", "And?")]
        assert get_text(await socket.create(input=again, store=False)).endswith("user: And?")


@socket_case("unknown previous id")
async def socket_unknown_previous(wire: ComplianceClient) -> None:
    async with wire.socket() as socket:
        check_not_found(await socket.refused(input="x", previous_response_id="resp_nothing"))
        assert get_text(await socket.create(input="Still here?")) == "user: Still here?"


@socket_case("failed continuation evicts")
async def socket_eviction(wire: ComplianceClient) -> None:
    stray = {"type": "function_call_output", "call_id": "call_nobody", "output": "x"}
    async with wire.socket() as socket:
        first = await socket.create(input="My name is Alice.", store=False)
        status, _ = await socket.refused(input=[stray], store=False, previous_response_id=first["id"])
        assert status == 400
        check_not_found(await socket.refused(input="And?", store=False, previous_response_id=first["id"]))


@socket_case("compaction starts a new chain")
async def socket_compaction(wire: ComplianceClient) -> None:
    async with wire.socket() as socket:
        first = await socket.create(input="My name is Alice.", store=False)
        past = [said("user", "My name is Alice."), *first["output"]]
        _, compacted = await wire.ask("POST", "/responses/compact", {"model": "scripted", "input": past})
        window = [*compacted["output"], said("user", "What is my name?")]
        second = await socket.create(input=window, store=False)
        assert second["previous_response_id"] is None
        third = await socket.create(input="Sure?", store=False, previous_response_id=second["id"])
        assert "Alice" in get_text(third)
        assert get_text(third).endswith(f"assistant: {get_text(second)} | user: Sure?")


# --- running them -------------------------------------------------------------------------------------


@pytest_asyncio.fixture
async def wire(gateway: RunningGateway) -> AsyncGenerator[ComplianceClient]:
    gateway.model.script(*[mirror] * 100)
    async with connect(gateway.process.url) as wire:
        yield wire


@pytest.mark.parametrize("name", CASES)
async def test_case(wire: ComplianceClient, name: str) -> None:
    async with asyncio.timeout(PATIENCE):
        await CASES[name](wire)


async def test_the_checks_have_teeth(wire: ComplianceClient) -> None:
    events = await wire.stream(input="x")
    response = events[-1]["response"]
    with pytest.raises(ValidationError):
        check_response({**response, "usage": {"input_tokens": 1}})
    with pytest.raises(ValidationError):
        check_event({**events[4], "item_id": None})
    with pytest.raises(AssertionError):
        check_stream(events[:3] + events[4:])
    if DOCUMENT.exists():
        with pytest.raises(AssertionError, match="ResponseResource"):
            check_response({name: value for name, value in response.items() if name != "store"})


async def test_all_cases_at_once(wire: ComplianceClient) -> None:
    async def run(name: str) -> str:
        async with asyncio.timeout(PATIENCE):
            await CASES[name](wire)
        return name

    assert await asyncio.gather(*map(run, CASES)) == list(CASES)
