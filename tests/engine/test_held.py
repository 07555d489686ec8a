"""Conversations that the caller holds and the store does not; imports `fumehood.testing` and the support."""

from collections.abc import Sequence
from typing import Any

import msgspec

from fumehood.engine.runs import EngineRun
from fumehood.interfaces import Caller
from fumehood.protocol.conversation import Segment
from fumehood.protocol.responses import CreateResponse
from fumehood.testing import ScriptedModel, says
from tests.support.engines import Engine

LONG = "so much to say " * 2000


async def ended(engine: Engine, past: Sequence[Segment] | None, **body: Any) -> EngineRun:
    fields = {"model": "scripted", "input": "Hi", "store": False, **body}
    request = msgspec.json.decode(msgspec.json.encode(fields), type=CreateResponse)
    run = await engine.runs.start(request, Caller(), past=past)
    assert (await run.wait()).status == "completed"
    return run


async def test_a_conversation_is_given_back_and_taken_again() -> None:
    async with ScriptedModel(says("one"), says("two")) as model:
        engine = Engine(model)
        first = await ended(engine, None)
        held = first.conversation()
        second = await ended(engine, held, previous_response_id=first.id)
    assert [len(segment.entries) for segment in second.conversation()] == [2, 2]
    # The very same, with what was rendered of it.
    assert second.conversation()[0] is model.requests[1].segments[0] is held[0]
    assert engine.store.commits == 0


async def test_what_is_kept_on_top_of_it_has_all_of_it() -> None:
    async with ScriptedModel(says("one"), says("two")) as model:
        engine = Engine(model)
        first = await ended(engine, None)
        second = await ended(engine, first.conversation(), previous_response_id=first.id, store=True)
    kept = await engine.store.conversation("", second.id)
    assert kept is not None
    assert [[entry.turn for entry in segment.entries] for segment in kept] == [[0, 0, 0, 1]]


async def test_what_comes_before_a_compaction_is_not_held() -> None:
    async with ScriptedModel(says("one"), says("In short."), says("two"), says("three")) as model:
        engine = Engine(model)
        first = await ended(engine, None, input=LONG)
        limit = [{"type": "compaction", "compact_threshold": 5000}]
        second = await ended(
            engine, first.conversation(), previous_response_id=first.id, context_management=limit
        )
        [held] = second.conversation()
        assert held.weight < len(LONG)
        third = await ended(engine, second.conversation(), previous_response_id=second.id)
    assert len(third.conversation()) == 2
    assert LONG not in str(model.requests[-1].segments)
