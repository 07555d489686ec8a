"""Conversations that the caller holds and the store does not."""

from collections.abc import Sequence
from typing import Any

import msgspec

from fumehood.engine.run_service import EngineRun
from fumehood.interfaces import Caller
from fumehood.protocol.conversation import ConversationSegment
from fumehood.protocol.openai.items import FunctionCall
from fumehood.protocol.openai.responses import CreateResponse
from fumehood.testing import ScriptedModel, calls, says
from tests.support.engine_harness import FUNCTION, EngineHarness

LONG = "so much to say " * 2000


async def ended(engine: EngineHarness, past: Sequence[ConversationSegment] | None, **body: Any) -> EngineRun:
    fields = {"model": "scripted", "input": "Hi", "store": False, **body}
    request = msgspec.json.decode(msgspec.json.encode(fields), type=CreateResponse)
    run = await engine.runs.start(request, Caller(), past=past)
    assert (await run.wait()).status == "completed"
    return run


async def test_a_conversation_is_given_back_and_taken_again() -> None:
    async with ScriptedModel(says("one"), says("two")) as model:
        engine = EngineHarness(model)
        first = await ended(engine, None)
        held = first.get_conversation()
        second = await ended(engine, held, previous_response_id=first.id)
    assert [len(segment.entries) for segment in second.get_conversation()] == [2, 2]
    # The very same, with what was rendered of it.
    assert second.get_conversation()[0] is model.requests[1].segments[0] is held[0]
    assert engine.store.commit_count == 0


async def test_calls_of_a_held_conversation_keep_their_ids_to_themselves() -> None:
    again = calls("f", {}, call_id="call_0")
    async with ScriptedModel(again, again) as model:
        engine = EngineHarness(model)
        first = await ended(engine, None, tools=[FUNCTION])
        result = {"type": "function_call_output", "call_id": "call_0", "output": "1"}
        second = await ended(
            engine,
            first.get_conversation(),
            previous_response_id=first.id,
            tools=[FUNCTION],
            input=[result],
        )
    (made,) = (await second.wait()).output
    assert isinstance(made, FunctionCall)
    assert made.call_id != "call_0"


async def test_what_is_kept_on_top_of_it_has_all_of_it() -> None:
    async with ScriptedModel(says("one"), says("two")) as model:
        engine = EngineHarness(model)
        first = await ended(engine, None)
        second = await ended(engine, first.get_conversation(), previous_response_id=first.id, store=True)
    kept = await engine.store.get_conversation("", second.id)
    assert kept is not None
    assert [[entry.turn for entry in segment.entries] for segment in kept] == [[0, 0, 0, 1]]


async def test_what_comes_before_a_compaction_is_not_held() -> None:
    async with ScriptedModel(says("one"), says("In short."), says("two"), says("three")) as model:
        engine = EngineHarness(model)
        first = await ended(engine, None, input=LONG)
        limit = [{"type": "compaction", "compact_threshold": 5000}]
        second = await ended(
            engine, first.get_conversation(), previous_response_id=first.id, context_management=limit
        )
        [held] = second.get_conversation()
        assert held.memory_bytes < len(LONG)
        third = await ended(engine, second.get_conversation(), previous_response_id=second.id)
    assert len(third.get_conversation()) == 2
    assert LONG not in str(model.requests[-1].segments)
