"""Conversations over WebSocket, with the real engine and the OpenAI SDK."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from openai.types.responses import ResponsesServerEvent

from fumehood.protocol.conversation import ConversationEntry, ConversationSegment, ToolExchange
from fumehood.protocol.openai.api_errors import ModelUnreachable
from fumehood.testing import (
    MemoryStore,
    ScriptedModel,
    calls,
    says,
)
from tests.support.echo_tool import EchoTool
from tests.support.engine_harness import EngineHarness
from tests.support.scripted_gateway import ScriptedGateway, run_gateway
from tests.support.websocket_client import WebSocketClient, connect_websocket, error_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

NOT_FOUND = (400, "previous_response_not_found", "previous_response_id")


@dataclass
class ConversationGateway:
    gateway: ScriptedGateway
    model: ScriptedModel
    store: MemoryStore

    @asynccontextmanager
    async def socket(self) -> AsyncGenerator[WebSocketClient]:
        async with connect_websocket(self.gateway.port) as socket:
            yield socket

    def model_inputs(self) -> list[list[str]]:
        """What the model was shown last: the types of items, response by response."""
        return [[entry.type for entry in segment.entries] for segment in self.model.requests[-1].segments]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[ConversationGateway]:
    engine = EngineHarness(ScriptedModel(), [EchoTool()])
    async with run_gateway(runs=engine.runs, store=engine.store, body_bytes=1 << 20) as gateway:
        yield ConversationGateway(gateway, engine.model, engine.store)


@pytest_asyncio.fixture(loop_scope="module")
async def conversation_gateway(running: ConversationGateway) -> AsyncIterator[ConversationGateway]:
    yield running
    running.model.assert_consumed()


# --- the cases of the compliance table ----------------------------------------------------------------


async def test_a_response(conversation_gateway: ConversationGateway) -> None:
    conversation_gateway.model.expect(says("Hello."))
    async with conversation_gateway.socket() as socket:
        response = await socket.create_and_read(input="Say hello.")
    assert response["status"] == "completed"
    assert response["store"] is False
    assert response["output"][0]["content"][0]["text"] == "Hello."


async def test_several_in_sequence_are_strangers_to_each_other(
    conversation_gateway: ConversationGateway,
) -> None:
    conversation_gateway.model.expect(says("one"), says("two"))
    async with conversation_gateway.socket() as socket:
        for word in ("one", "two"):
            response = await socket.create_and_read(input=word)
            assert response["output"][0]["content"][0]["text"] == word
            assert response["previous_response_id"] is None
            assert conversation_gateway.model_inputs() == [["message"]]


async def test_a_continuation_of_what_is_not_stored(conversation_gateway: ConversationGateway) -> None:
    before = conversation_gateway.store.commit_count
    conversation_gateway.model.expect(says("one"), says("two"), says("three"))
    async with conversation_gateway.socket() as socket:
        last = None
        for _ in range(3):
            last = (await socket.create_and_read(previous_response_id=last))["id"]
        assert conversation_gateway.model_inputs() == [
            ["message", "message"],
            ["message", "message"],
            ["message"],
        ]
    assert conversation_gateway.store.commit_count == before
    answer = await conversation_gateway.gateway.request("GET", f"/v1/responses/{last}")
    assert answer.status == 404


async def test_a_function_is_called_and_its_result_given(conversation_gateway: ConversationGateway) -> None:
    tools = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]
    conversation_gateway.model.expect(calls("weather", {}, call_id="call_1"), says("It rains."))
    async with conversation_gateway.socket() as socket:
        asked = await socket.create_and_read(tools=tools)
        assert asked["output"][0]["type"] == "function_call"
        output = {"type": "function_call_output", "call_id": "call_1", "output": "rain"}
        response = await socket.create_and_read(tools=tools, input=[output], previous_response_id=asked["id"])
    assert response["output"][0]["content"][0]["text"] == "It rains."
    assert conversation_gateway.model_inputs() == [["message", "function_call"], ["function_call_output"]]


async def test_after_a_reconnect_what_was_not_stored_is_gone(
    conversation_gateway: ConversationGateway,
) -> None:
    conversation_gateway.model.expect(says("one"))
    async with conversation_gateway.socket() as socket:
        first = await socket.create_and_read()
    async with conversation_gateway.socket() as socket:
        assert await socket.read_error(previous_response_id=first["id"]) == NOT_FOUND
        conversation_gateway.model.expect(says("two"))
        assert (await socket.create_and_read())["status"] == "completed"


async def test_after_a_reconnect_what_was_stored_goes_on(conversation_gateway: ConversationGateway) -> None:
    conversation_gateway.model.expect(says("one"), says("two"), says("three"))
    async with conversation_gateway.socket() as socket:
        first = await socket.create_and_read(store=True)
    async with conversation_gateway.socket() as socket:
        second = await socket.create_and_read(store=True, previous_response_id=first["id"])
    answer = await conversation_gateway.gateway.create_response(
        model="scripted", previous_response_id=second["id"]
    )
    assert answer.status == 200
    assert conversation_gateway.model_inputs() == [
        ["message", "message"],
        ["message", "message"],
        ["message"],
    ]


async def test_an_unknown_previous_response(conversation_gateway: ConversationGateway) -> None:
    conversation_gateway.model.expect(says("one"), says("two"))
    async with conversation_gateway.socket() as socket:
        first = await socket.create_and_read()
        assert await socket.read_error(previous_response_id="resp_unknown") == NOT_FOUND
        # Somebody else's id costs nothing of one's own.
        assert (await socket.create_and_read(previous_response_id=first["id"]))["status"] == "completed"


@pytest.mark.parametrize(
    "bad",
    [
        {"input": [{"type": "function_call_output", "call_id": "call_x", "output": "?"}]},
        {"input": 5},
        {"model": ""},
        {"include": ["x"]},
    ],
)
async def test_a_continuation_that_is_refused_evicts(
    conversation_gateway: ConversationGateway, bad: Any
) -> None:
    conversation_gateway.model.expect(says("one"))
    async with conversation_gateway.socket() as socket:
        first = await socket.create_and_read()
        status, code, _ = await socket.read_error(previous_response_id=first["id"], **bad)
        assert (status, code) != NOT_FOUND[:2]
        assert await socket.read_error(previous_response_id=first["id"]) == NOT_FOUND


async def test_a_continuation_that_fails_evicts(conversation_gateway: ConversationGateway) -> None:
    conversation_gateway.model.expect(says("one"), ModelUnreachable("The model server is gone."))
    async with conversation_gateway.socket() as socket:
        first = await socket.create_and_read()
        assert (await socket.create_and_read(previous_response_id=first["id"]))["status"] == "failed"
        assert await socket.read_error(previous_response_id=first["id"]) == NOT_FOUND


async def test_what_is_stored_is_not_evicted(conversation_gateway: ConversationGateway) -> None:
    conversation_gateway.model.expect(says("one"), ModelUnreachable("The model server is gone."), says("two"))
    async with conversation_gateway.socket() as socket:
        first = await socket.create_and_read(store=True)
        assert (await socket.create_and_read(previous_response_id=first["id"]))["status"] == "failed"
        assert (await socket.create_and_read(previous_response_id=first["id"]))["status"] == "completed"


async def test_a_compacted_window_begins_a_new_chain(conversation_gateway: ConversationGateway) -> None:
    """Whoever compacts sends all that is left as input, and continues from there."""
    conversation_gateway.model.expect(says("one"), says("two"), says("three"))
    window = [
        {"type": "message", "role": "user", "content": "What matters"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "is this"}]},
        {"type": "message", "role": "user", "content": "Go on."},
    ]
    async with conversation_gateway.socket() as socket:
        old = await socket.create_and_read()
        new = await socket.create_and_read(input=window)
        assert conversation_gateway.model_inputs() == [["message"] * 3]
        assert await socket.read_error(previous_response_id=old["id"]) == NOT_FOUND
        await socket.create_and_read(previous_response_id=new["id"])
        assert conversation_gateway.model_inputs() == [["message"] * 4, ["message"]]


async def test_a_sealed_compaction_begins_a_new_chain(conversation_gateway: ConversationGateway) -> None:
    conversation_gateway.model.expect(says("one"), says("In short: one."), says("two"), says("three"))
    question = {"type": "message", "role": "user", "content": "Remember one."}
    async with conversation_gateway.socket() as socket:
        old = await socket.create_and_read(input=[question])
        compacted = await conversation_gateway.gateway.request(
            "POST", "/v1/responses/compact", {"model": "scripted", "input": [question, *old["output"]]}
        )
        assert compacted.json["object"] == "response.compaction"
        window = [*compacted.json["output"], {"type": "message", "role": "user", "content": "Go on."}]
        new = await socket.create_and_read(input=window)
        assert new["previous_response_id"] is None
        assert await socket.read_error(previous_response_id=old["id"]) == NOT_FOUND
        assert (await socket.create_and_read(previous_response_id=new["id"]))["status"] == "completed"
    assert any("In short: one." in str(entry.raw) for entry in entries(conversation_gateway))


async def test_what_was_compacted_on_the_way_is_held_no_longer(
    conversation_gateway: ConversationGateway,
) -> None:
    long = "so much to say " * 2000
    conversation_gateway.model.expect(
        says("one"), says("In short."), says("two"), says("three"), says("four")
    )
    async with conversation_gateway.socket() as socket:
        first = await socket.create_and_read(input=long)
        second = await socket.create_and_read(
            previous_response_id=first["id"],
            context_management=[{"type": "compaction", "compact_threshold": 5000}],
        )
        assert [item["type"] for item in second["output"]] == ["compaction", "message"]
        third = await socket.create_and_read(previous_response_id=second["id"])
        assert third["output"][0]["content"][0]["text"] == "three"
        assert (await socket.create_and_read(previous_response_id=third["id"]))["status"] == "completed"


def entries(conversation_gateway: ConversationGateway) -> list[ConversationEntry]:
    """All that the model was shown last."""
    return [
        entry for segment in conversation_gateway.model.requests[-1].segments for entry in segment.entries
    ]


# --- lanes and forks ----------------------------------------------------------------------------------


async def test_a_fork_into_another_lane(conversation_gateway: ConversationGateway) -> None:
    conversation_gateway.model.expect(says("plan"), says("critic"), says("planner"), says("both"))
    async with conversation_gateway.socket() as socket:
        plan = await socket.create_and_read(stream_id="planner")
        fork = await socket.create_and_read(stream_id="critic", previous_response_id=plan["id"])
        again = await socket.create_and_read(stream_id="planner", previous_response_id=plan["id"])
        await socket.create_and_read(stream_id="planner", previous_response_id=fork["id"])
        assert conversation_gateway.model_inputs() == [
            ["message", "message"],
            ["message", "message"],
            ["message"],
        ]
        # The planner's lane went on: what it said before cannot be continued any more.
        assert await socket.read_error(stream_id="critic", previous_response_id=again["id"]) == NOT_FOUND


async def test_a_failed_fork_leaves_its_parent_alone(conversation_gateway: ConversationGateway) -> None:
    conversation_gateway.model.expect(says("plan"), says("planner"))
    async with conversation_gateway.socket() as socket:
        plan = await socket.create_and_read(stream_id="planner")
        await socket.read_error(stream_id="critic", previous_response_id=plan["id"], include=["x"])
        response = await socket.create_and_read(stream_id="planner", previous_response_id=plan["id"])
        assert response["status"] == "completed"


# --- prewarming ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [{}, {"input": []}, {"input": None}])
async def test_a_response_that_is_only_prepared(
    conversation_gateway: ConversationGateway, given: dict[str, Any]
) -> None:
    asked = len(conversation_gateway.model.requests)
    async with conversation_gateway.socket() as socket:
        await socket.ask(generate=False, instructions="Be brief.", **given)
        events = await socket.read_response()
        assert [event["type"] for event in events] == [
            "response.created",
            "response.in_progress",
            "response.completed",
        ]
        warm = events[-1]["response"]
        assert (warm["output"], warm["usage"]["total_tokens"]) == ([], 0)
        assert len(conversation_gateway.model.requests) == asked
        conversation_gateway.model.expect(says("Yes."))
        response = await socket.create_and_read(previous_response_id=warm["id"], input="Ready?")
    assert response["output"][0]["content"][0]["text"] == "Yes."
    assert conversation_gateway.model_inputs() == [["message"] if not given else [], ["message"]]


async def test_preparing_checks_the_request(conversation_gateway: ConversationGateway) -> None:
    async with conversation_gateway.socket() as socket:
        assert await socket.read_error(generate=False, previous_response_id="resp_unknown") == NOT_FOUND
        assert (await socket.read_error(generate=False, tool_choice="required"))[2] == "tool_choice"


async def test_preparing_works_without_a_socket_too(conversation_gateway: ConversationGateway) -> None:
    answer = await conversation_gateway.gateway.create_response(
        model="scripted", generate=False, input="Remember: 7."
    )
    assert (answer.status, answer.json["output"]) == (200, [])
    conversation_gateway.model.expect(says("7"))
    await conversation_gateway.gateway.create_response(
        model="scripted", previous_response_id=answer.json["id"]
    )
    assert conversation_gateway.model_inputs() == [["message"], ["message"]]


# --- what is held, and what is kept -------------------------------------------------------------------


async def test_what_is_stored_at_last_has_everything_before_it(
    conversation_gateway: ConversationGateway,
) -> None:
    conversation_gateway.model.expect(
        says("stored"),
        calls("echo", {"text": "x"}),
        says("not stored"),
        says("stored again"),
        says("read back"),
    )
    tools = [{"type": "echo"}]
    async with conversation_gateway.socket() as socket:
        one = await socket.create_and_read(store=True)
        two = await socket.create_and_read(previous_response_id=one["id"], tools=tools)
        three = await socket.create_and_read(store=True, previous_response_id=two["id"], tools=tools)
    await conversation_gateway.gateway.create_response(model="scripted", previous_response_id=three["id"])
    assert conversation_gateway.model_inputs() == [
        [*["message"] * 3, "code_interpreter_call", *["message"] * 3],
        ["message"],
    ]
    shown = conversation_gateway.model.requests[-1].segments[0].entries[3].exchange
    assert shown is not None  # the model sees what the call gave, as it did then
    assert shown.output == conversation_gateway.model.requests[-2].segments[1].entries[1].exchange.output  # pyright: ignore[reportOptionalMemberAccess]
    items = await conversation_gateway.gateway.request(
        "GET", f"/v1/responses/{three['id']}/input_items?limit=100"
    )
    assert len(items.json["data"]) == 6
    response = await conversation_gateway.gateway.request("GET", f"/v1/responses/{three['id']}")
    assert len(response.json["output"]) == 1


async def test_what_is_held_is_bounded(
    conversation_gateway: ConversationGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation_gateway.gateway.app.websockets.unstored, "max_tenant_bytes", 100_000)
    conversation_gateway.model.expect(*[says("ok")] * 5)
    async with conversation_gateway.socket() as socket:
        small = await socket.create_and_read(stream_id="a", input="x" * 10_000)
        other = await socket.create_and_read(stream_id="b", input="x" * 30_000)
        small = await socket.create_and_read(
            stream_id="a", input="y" * 5_000, previous_response_id=small["id"]
        )
        # Now the oldest has to go, and only that.
        large = await socket.create_and_read(stream_id="c", input="x" * 15_000)
        assert await socket.read_error(stream_id="b", previous_response_id=other["id"]) == NOT_FOUND
        await socket.create_and_read(stream_id="c", previous_response_id=large["id"])
        conversation_gateway.model.expect(says("ok"), says("ok"))
        await socket.create_and_read(stream_id="a", previous_response_id=small["id"])
        # What is too heavy by itself is not held at all.
        heavy = await socket.create_and_read(input="x" * 60_000)
        assert await socket.read_error(previous_response_id=heavy["id"]) == NOT_FOUND


async def test_what_all_hold_is_bounded_and_whoever_holds_most_gives_way(
    conversation_gateway: ConversationGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation_gateway.gateway.app.websockets.unstored, "max_bytes", 100_000)
    conversation_gateway.model.expect(*[says("ok")] * 6)
    async with conversation_gateway.socket() as one, conversation_gateway.socket() as two:
        oldest = await one.create_and_read(stream_id="a", input="x" * 20_000)
        latest = await one.create_and_read(stream_id="b", input="x" * 20_000)
        other = await two.create_and_read(input="x" * 15_000)
        assert await one.read_error(stream_id="a", previous_response_id=oldest["id"]) == NOT_FOUND
        await one.create_and_read(stream_id="b", previous_response_id=latest["id"])
        await two.create_and_read(previous_response_id=other["id"])
    async with conversation_gateway.socket() as three:  # all that the others held is given back
        third = await three.create_and_read(input="x" * 40_000)
        conversation_gateway.model.expect(says("ok"))
        await three.create_and_read(previous_response_id=third["id"])


async def test_entries_weigh_what_they_hold() -> None:
    seen = ToolExchange(call_id="c", name="n", arguments="a" * 10, output="b" * 20, images=("i" * 30,))
    entries = (
        ConversationEntry(type="x", id="1", turn=0, raw=b"r" * 40),
        ConversationEntry(type="x", id="2", turn=0, raw=b"", exchange=seen),
    )
    assert ConversationSegment(entries).memory_bytes == 2 * 512 + 2 * 40 + 2 * 60


# --- the SDK ------------------------------------------------------------------------------------------


@pytest_asyncio.fixture(loop_scope="module")
async def client(conversation_gateway: ConversationGateway) -> AsyncGenerator[AsyncOpenAI]:
    async with AsyncOpenAI(
        base_url=f"{conversation_gateway.gateway.base}/v1",
        api_key="none",
        max_retries=0,
        _strict_response_validation=True,
    ) as client:
        yield client


async def test_a_conversation_with_the_sdk(
    client: AsyncOpenAI, conversation_gateway: ConversationGateway
) -> None:
    conversation_gateway.model.expect(says("Hello."), says("Again."))
    async with client.responses.connect() as connection:
        last: str | None = None
        for expected in ("Hello.", "Again."):
            await connection.response.create(
                model="scripted", input="Hi", store=False, previous_response_id=last, stream_id="main"
            )
            text = ""
            async for event in connection:
                assert lane_of(event) == "main"
                if event.type == "response.output_text.delta":
                    text += event.delta
                elif event.type == "response.completed":
                    last = event.response.id
                    break
            assert text == expected
    assert conversation_gateway.model_inputs() == [["message", "message"], ["message"]]


def lane_of(event: ResponsesServerEvent) -> str | None:
    return event.stream_id


async def test_an_error_with_the_sdk(client: AsyncOpenAI) -> None:
    async with client.responses.connect() as connection:
        await connection.response.create(model="scripted", input="Hi", previous_response_id="resp_unknown")
        event = await connection.recv()
        assert event.type == "error"
        assert (event.status, event.error.code) == (400, "previous_response_not_found")


async def test_the_blocking_sdk(conversation_gateway: ConversationGateway) -> None:
    conversation_gateway.model.expect(says("Hello."))

    def talk() -> str:
        with (
            openai.OpenAI(base_url=f"{conversation_gateway.gateway.base}/v1", api_key="none") as client,
            client.responses.connect() as connection,
        ):
            connection.response.create(model="scripted", input="Hi", store=False)
            for event in connection:
                if event.type == "response.completed":
                    return event.response.output_text
        raise AssertionError("it did not end")

    assert await asyncio.to_thread(talk) == "Hello."


async def test_all_cases_at_once(conversation_gateway: ConversationGateway) -> None:
    """Thirty connections that continue what they alone know."""
    conversation_gateway.model.expect(*[says("ok")] * 90)

    async def talk() -> None:
        async with conversation_gateway.socket() as socket:
            last = None
            for _ in range(3):
                last = (await socket.create_and_read(previous_response_id=last))["id"]
            await socket.ask(previous_response_id="resp_unknown")
            assert error_of(await socket.read_event()) == NOT_FOUND

    await asyncio.gather(*(talk() for _ in range(30)))
