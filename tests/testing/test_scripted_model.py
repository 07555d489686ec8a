"""`ScriptedModel` follows its script and reports deviations."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing

import pytest

from fumehood.protocol.model_turns import (
    AnyModelEvent,
    ModelCallArgumentsDelta,
    ModelCallStarted,
    ModelReasoningDelta,
    ModelRequest,
    ModelTextDelta,
    ModelTurnEnded,
)
from fumehood.protocol.openai.api_errors import InvalidRequest, ModelUnreachable
from fumehood.protocol.openai.responses import Usage
from fumehood.testing import ScriptedModel, SingleBackendProvider, TurnStep, calls, says, thinks

REQUEST = ModelRequest(model="m")


async def run_turn(model: ScriptedModel, request: ModelRequest = REQUEST) -> list[Sequence[AnyModelEvent]]:
    return [list(batch) async for batch in model.stream(request)]


async def test_a_turn_of_everything() -> None:
    usage = Usage(input_tokens=1, output_tokens=2, total_tokens=3)
    script = [
        *thinks("Hm", deltas=1),
        *says("I compute."),
        *calls("f", {"x": 1}),
        *calls("g", "{", call_id="own"),
    ]
    async with ScriptedModel(script, says("4"), usage=usage) as model:
        assert await run_turn(model) == [
            [ModelReasoningDelta("Hm")],
            [ModelTextDelta("I c")],
            [ModelTextDelta("omp")],
            [ModelTextDelta("ute.")],
            [ModelCallStarted(0, "call_1", "f")],
            [ModelCallArgumentsDelta(0, '{"')],
            [ModelCallArgumentsDelta(0, 'x"')],
            [ModelCallArgumentsDelta(0, ":1}")],
            [ModelCallStarted(1, "own", "g")],
            [ModelCallArgumentsDelta(1, "{")],
            [ModelTurnEnded("calls", usage)],
        ]
        assert await run_turn(model) == [[ModelTextDelta("4")], [ModelTurnEnded("stop", usage)]]
        assert model.requests == [REQUEST, REQUEST]
        assert model.aborted_requests == []


async def test_batches_and_an_end_of_ones_own() -> None:
    call = calls("f", "{}", deltas=1)
    async with ScriptedModel(
        [[*says("a"), *call, ModelTurnEnded("length")], ModelTextDelta("never sent")]
    ) as model:
        assert await run_turn(model) == [
            [
                ModelTextDelta("a"),
                ModelCallStarted(0, "call_1", "f"),
                ModelCallArgumentsDelta(0, "{}"),
                ModelTurnEnded("length"),
            ]
        ]


async def test_it_waits_between_batches() -> None:
    go = asyncio.Event()
    async with (
        ScriptedModel([ModelTextDelta("a"), go, ModelTextDelta("b")]) as model,
        aclosing(model.stream(REQUEST)) as events,
    ):
        assert await anext(events) == [ModelTextDelta("a")]
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        assert not waiting.done()
        go.set()
        assert await waiting == [ModelTextDelta("b")]
        assert await anext(events) == [ModelTurnEnded("stop")]
    assert model.aborted_requests == []


async def test_a_turn_that_is_left_is_noted() -> None:
    model = ScriptedModel(says("one two three"))
    async with aclosing(model.stream(REQUEST)) as events:
        await anext(events)
    assert model.aborted_requests == [REQUEST]
    model.assert_consumed()


async def test_a_function_of_the_request() -> None:
    def answer(request: ModelRequest) -> Sequence[TurnStep]:
        return says(request.model, deltas=1)

    async with ScriptedModel(answer) as model:
        assert await run_turn(model, ModelRequest(model="other")) == [
            [ModelTextDelta("other")],
            [ModelTurnEnded("stop")],
        ]


async def test_errors_before_and_within_a_turn() -> None:
    async with ScriptedModel(
        ModelUnreachable("down"), [ModelTextDelta("a"), ModelUnreachable("broke")]
    ) as model:
        with pytest.raises(ModelUnreachable, match="down"):
            await run_turn(model)
        async with aclosing(model.stream(REQUEST)) as events:
            assert await anext(events) == [ModelTextDelta("a")]
            with pytest.raises(ModelUnreachable, match="broke"):
                await anext(events)


async def test_what_is_beyond_the_script_fails_there_and_at_the_end() -> None:
    model = ScriptedModel()
    with pytest.raises(AssertionError, match="The model was sent request 1; expected nothing more"):
        await run_turn(model)
    with pytest.raises(AssertionError, match="expected nothing more"):
        model.assert_consumed()


async def test_unused_turns_fail_at_the_end() -> None:
    with pytest.raises(AssertionError, match="Not used: "):
        async with ScriptedModel(says("a")):
            pass


async def test_names() -> None:
    model = ScriptedModel()
    models = SingleBackendProvider(model, "a", "b")
    assert models.get_backend("b") is model
    assert [card.id for card in await models.list_models()] == ["a", "b"]
    with pytest.raises(InvalidRequest) as caught:
        models.get_backend("c")
    assert (caught.value.wire_code, caught.value.param) == ("model_not_found", "model")
    assert SingleBackendProvider(model).get_backend("anything") is model
    await models.close()
