"""A turn is asked for again only before it has begun; imports pytest and fumehood."""

from collections.abc import Sequence

import pytest

from fumehood.figures import TurnFigures
from fumehood.models.chat_completions import ChatCompletions
from fumehood.models.retrying import Retrying
from fumehood.models.settings import ModelSettings
from fumehood.models.upstream import Upstream
from fumehood.protocol.errors import (
    ModelError,
    ModelRateLimited,
    ModelRefused,
    ModelTimeout,
    ModelUnreachable,
)
from fumehood.protocol.models import AnyModelEvent, ModelProfile, ModelRequest, Text, TurnEnded
from fumehood.testing import ScriptedModel, Turn, says
from tests.support import chat_server
from tests.support.chat_server import stream
from tests.support.clocks import Waits
from tests.support.conversations import message, segment

REQUEST = ModelRequest(model="m", segments=[segment(message("hi"))])
DOWN = ModelUnreachable("down")
ANSWER = [[Text("a")], [TurnEnded("stop")]]


async def turn(backend: Retrying) -> list[Sequence[AnyModelEvent]]:
    return [batch async for batch in backend.stream(REQUEST)]


async def waits(*turns: Turn, retries: int = 3, spread: float = 1.0) -> list[float]:
    """How long was waited until the answer came."""
    clock = Waits()
    async with ScriptedModel(*turns, says("a")) as model:
        assert await turn(Retrying(model, retries, clock, spread=lambda: spread)) == ANSWER
        assert model.requests == [REQUEST] * (len(turns) + 1)
    return clock.slept


async def gives_up(*turns: Turn, retries: int = 3) -> tuple[ModelError, list[float]]:
    clock = Waits()
    async with ScriptedModel(*turns) as model:
        with pytest.raises(ModelError) as caught:
            await turn(Retrying(model, retries, clock))
    return caught.value, clock.slept


async def test_the_waits_double_and_are_spread() -> None:
    assert await waits() == []
    assert await waits(DOWN, DOWN, DOWN) == [0.25, 0.5, 1.0]
    assert await waits(DOWN, DOWN, spread=0.0) == [0.125, 0.25]


async def test_a_server_that_says_when_is_believed() -> None:
    assert await waits(ModelRateLimited("busy", retry_after=7.0)) == [7.0]
    assert await waits(ModelUnreachable("restarting", retry_after=0.0)) == [0.25]
    assert await waits(ModelRateLimited("busy")) == [0.25]


async def test_but_not_for_ever() -> None:
    busy = ModelRateLimited("busy", retry_after=3600.0)
    assert await gives_up(busy) == (busy, [])


async def test_it_gives_up_after_so_many() -> None:
    error, slept = await gives_up(DOWN, DOWN, DOWN, retries=2)
    assert error is DOWN
    assert len(slept) == 2
    assert await gives_up(DOWN, retries=0) == (DOWN, [])


@pytest.mark.parametrize(
    "error",
    [
        ModelRefused("too long"),
        ModelTimeout("silent"),
        ModelError("failed"),
        ModelRateLimited("no credit", code="insufficient_quota"),
    ],
)
async def test_what_would_be_no_use_is_not_tried(error: ModelError) -> None:
    assert await gives_up(error) == (error, [])


async def test_never_once_it_has_begun() -> None:
    clock = Waits()
    async with ScriptedModel([*says("a", pieces=1), DOWN]) as model:
        seen: list[Sequence[AnyModelEvent]] = []
        with pytest.raises(ModelUnreachable):
            seen += [batch async for batch in Retrying(model, 3, clock).stream(REQUEST)]
        assert len(model.requests) == 1
    assert clock.slept == []


async def test_leaving_ends_the_turn_behind_it() -> None:
    model = ScriptedModel(says("one two three"))
    stream = Retrying(model, 3, Waits()).stream(REQUEST)
    await anext(stream)
    await stream.aclose()
    assert model.aborted == [REQUEST]


async def test_the_rest_is_passed_on() -> None:
    model = ScriptedModel(profile=ModelProfile(context_window=5))
    backend = Retrying(model, 1, Waits())
    backend.check(REQUEST)
    assert await backend.count(REQUEST) == await model.count(REQUEST)
    assert backend.profile("m").context_window == 5
    await backend.close()


async def test_over_a_socket() -> None:
    answers = [
        chat_server.hang_up(),
        chat_server.error("503 Service Unavailable", {}),
        chat_server.error("429 Too Many Requests", {}, headers={"Retry-After": "2"}),
        stream(chat_server.says("a")),
    ]
    clock, connections = Waits(), Upstream()
    async with chat_server.chat_server(*answers) as server:
        backend = ChatCompletions(ModelSettings(base_url=server.url), connections)
        assert await turn(Retrying(backend, 3, clock, spread=lambda: 1.0)) == [[Text("a"), TurnEnded("stop")]]
        await connections.close()
    assert clock.slept == [0.25, 0.5, 2.0]
    assert len({asked.body for asked in server.asked}) == 1


# --- what is counted ----------------------------------------------------------------------------------


async def counted(*turns: Turn, leave: bool = False) -> TurnFigures:
    figures = TurnFigures()
    backend = Retrying(ScriptedModel(*turns), 2, Waits(), spread=lambda: 1.0, figures=figures)
    stream = backend.stream(REQUEST)
    try:
        async for _ in stream:
            assert figures.running == 1
            if leave:
                break
    except ModelError:
        pass
    finally:
        await stream.aclose()
    assert figures.running == 0
    assert figures.seconds.number == 1
    return figures


@pytest.mark.parametrize(
    ("turns", "outcome", "errors", "retries", "pieces"),
    [
        ([says("a")], "ended", {}, 0, 1),
        ([DOWN, says("a")], "ended", {"unreachable": 1}, 1, 1),
        ([DOWN, ModelRateLimited("busy"), DOWN], "unreachable", {"unreachable": 2, "rate_limited": 1}, 2, 0),
        ([ModelRefused("no")], "refused", {"refused": 1}, 0, 0),
        ([ModelTimeout("slow")], "timeout", {"timeout": 1}, 0, 0),
        ([ModelError("odd")], "failed", {"failed": 1}, 0, 0),
        ([[Text("a"), DOWN]], "unreachable", {"unreachable": 1}, 0, 1),
    ],
)
async def test_turns_are_counted_by_outcome(
    turns: Sequence[Turn], outcome: str, errors: dict[str, int], retries: int, pieces: int
) -> None:
    figures = await counted(*turns)
    assert (figures.ended, figures.errors, figures.retries) == ({outcome: 1}, errors, retries)
    assert figures.first_piece.number == pieces


async def test_a_turn_that_somebody_left_is_no_error() -> None:
    figures = await counted(says("one two three"), leave=True)
    assert (figures.ended, figures.errors) == ({"cancelled": 1}, {})
