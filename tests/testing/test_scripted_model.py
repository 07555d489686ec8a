"""The scripted model keeps to its script, and says so when others do not; imports pytest and fumehood."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing

import pytest

from fumehood.protocol.errors import InvalidRequest, ModelUnreachable
from fumehood.protocol.models import (
    AnyModelEvent,
    CallArguments,
    CallStarted,
    ModelRequest,
    Text,
    Thought,
    TurnEnded,
)
from fumehood.protocol.responses import Usage
from fumehood.testing import Beat, ScriptedModel, ScriptedModels, calls, says, thinks

REQUEST = ModelRequest(model="m")


async def turn(model: ScriptedModel, request: ModelRequest = REQUEST) -> list[Sequence[AnyModelEvent]]:
    return [list(batch) async for batch in model.stream(request)]


async def test_a_turn_of_everything() -> None:
    usage = Usage(input_tokens=1, output_tokens=2, total_tokens=3)
    script = [
        *thinks("Hm", pieces=1),
        *says("I compute."),
        *calls("f", {"x": 1}),
        *calls("g", "{", call_id="own"),
    ]
    async with ScriptedModel(script, says("4"), usage=usage) as model:
        assert await turn(model) == [
            [Thought("Hm")],
            [Text("I c")],
            [Text("omp")],
            [Text("ute.")],
            [CallStarted(0, "call_1", "f")],
            [CallArguments(0, '{"')],
            [CallArguments(0, 'x"')],
            [CallArguments(0, ":1}")],
            [CallStarted(1, "own", "g")],
            [CallArguments(1, "{")],
            [TurnEnded("calls", usage)],
        ]
        assert await turn(model) == [[Text("4")], [TurnEnded("stop", usage)]]
        assert model.requests == [REQUEST, REQUEST]
        assert model.aborted == []


async def test_batches_and_an_end_of_ones_own() -> None:
    call = calls("f", "{}", pieces=1)
    async with ScriptedModel([[*says("a"), *call, TurnEnded("length")], Text("never told")]) as model:
        assert await turn(model) == [
            [Text("a"), CallStarted(0, "call_1", "f"), CallArguments(0, "{}"), TurnEnded("length")]
        ]


async def test_it_waits_between_batches() -> None:
    go = asyncio.Event()
    async with ScriptedModel([Text("a"), go, Text("b")]) as model, aclosing(model.stream(REQUEST)) as events:
        assert await anext(events) == [Text("a")]
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        assert not waiting.done()
        go.set()
        assert await waiting == [Text("b")]
        assert await anext(events) == [TurnEnded("stop")]
    assert model.aborted == []


async def test_a_turn_that_is_left_is_noted() -> None:
    model = ScriptedModel(says("one two three"))
    async with aclosing(model.stream(REQUEST)) as events:
        await anext(events)
    assert model.aborted == [REQUEST]
    model.assert_consumed()


async def test_a_function_of_the_request() -> None:
    def answer(request: ModelRequest) -> Sequence[Beat]:
        return says(request.model, pieces=1)

    async with ScriptedModel(answer) as model:
        assert await turn(model, ModelRequest(model="other")) == [[Text("other")], [TurnEnded("stop")]]


async def test_errors_before_and_within_a_turn() -> None:
    async with ScriptedModel(ModelUnreachable("down"), [Text("a"), ModelUnreachable("broke")]) as model:
        with pytest.raises(ModelUnreachable, match="down"):
            await turn(model)
        async with aclosing(model.stream(REQUEST)) as events:
            assert await anext(events) == [Text("a")]
            with pytest.raises(ModelUnreachable, match="broke"):
                await anext(events)


async def test_what_is_beyond_the_script_fails_there_and_at_the_end() -> None:
    model = ScriptedModel()
    with pytest.raises(AssertionError, match="Request 1 to the model is beyond its script"):
        await turn(model)
    with pytest.raises(AssertionError, match="beyond its script"):
        model.assert_consumed()


async def test_turns_that_nobody_asked_for_fail_at_the_end() -> None:
    with pytest.raises(AssertionError, match="Nobody asked for the turn"):
        async with ScriptedModel(says("a")):
            pass


async def test_names() -> None:
    model = ScriptedModel()
    models = ScriptedModels(model, "a", "b")
    assert models.backend("b") is model
    assert [card.id for card in await models.cards()] == ["a", "b"]
    with pytest.raises(InvalidRequest) as caught:
        models.backend("c")
    assert (caught.value.wire_code, caught.value.param) == ("model_not_found", "model")
    assert ScriptedModels(model).backend("anything") is model
    await models.close()
