"""A turn is asked for again only before it has begun."""

from collections.abc import Sequence

import pytest

from fumehood.gateway_stats import ModelStats
from fumehood.models.chat_completions.chat_backend import ChatCompletionsBackend
from fumehood.models.model_settings import ModelSettings
from fumehood.models.retrying_backend import RetryingBackend
from fumehood.models.upstream.http1_client import PooledHttpClient
from fumehood.protocol.model_turns import (
    AnyModelEvent,
    ModelProfile,
    ModelRequest,
    ModelTextDelta,
    ModelTurnEnded,
)
from fumehood.protocol.openai.api_errors import (
    ModelError,
    ModelRateLimited,
    ModelRejectedRequest,
    ModelTimeout,
    ModelUnreachable,
)
from fumehood.testing import ScriptedModel, ScriptedTurn, says
from tests.support import raw_model_server
from tests.support.conversations import message, segment
from tests.support.raw_model_server import stream
from tests.support.recording_clock import RecordingClock

REQUEST = ModelRequest(model="m", segments=[segment(message("hi"))])
DOWN = ModelUnreachable("down")
ANSWER = [[ModelTextDelta("a")], [ModelTurnEnded("stop")]]


async def turn(backend: RetryingBackend) -> list[Sequence[AnyModelEvent]]:
    return [batch async for batch in backend.stream(REQUEST)]


async def collect_backoffs(*turns: ScriptedTurn, retries: int = 3, jitter: float = 1.0) -> list[float]:
    """How long was waited until the answer came."""
    clock = RecordingClock()
    async with ScriptedModel(*turns, says("a")) as model:
        assert await turn(RetryingBackend(model, retries, clock, jitter=lambda: jitter)) == ANSWER
        assert model.requests == [REQUEST] * (len(turns) + 1)
    return clock.sleeps


async def collect_failure(*turns: ScriptedTurn, retries: int = 3) -> tuple[ModelError, list[float]]:
    clock = RecordingClock()
    async with ScriptedModel(*turns) as model:
        with pytest.raises(ModelError) as caught:
            await turn(RetryingBackend(model, retries, clock))
    return caught.value, clock.sleeps


async def test_exponential_backoff_with_jitter() -> None:
    assert await collect_backoffs() == []
    assert await collect_backoffs(DOWN, DOWN, DOWN) == [0.25, 0.5, 1.0]
    assert await collect_backoffs(DOWN, DOWN, jitter=0.0) == [0.125, 0.25]


async def test_retry_after_is_followed() -> None:
    assert await collect_backoffs(ModelRateLimited("busy", retry_after=7.0)) == [7.0]
    assert await collect_backoffs(ModelUnreachable("restarting", retry_after=0.0)) == [0.25]
    assert await collect_backoffs(ModelRateLimited("busy")) == [0.25]


async def test_a_long_retry_after_is_not_followed() -> None:
    busy = ModelRateLimited("busy", retry_after=3600.0)
    assert await collect_failure(busy) == (busy, [])


async def test_retries_are_limited() -> None:
    error, slept = await collect_failure(DOWN, DOWN, DOWN, retries=2)
    assert error is DOWN
    assert len(slept) == 2
    assert await collect_failure(DOWN, retries=0) == (DOWN, [])


@pytest.mark.parametrize(
    "error",
    [
        ModelRejectedRequest("too long"),
        ModelTimeout("silent"),
        ModelError("failed"),
        ModelRateLimited("no credit", code="insufficient_quota"),
    ],
)
async def test_errors_that_are_not_retried(error: ModelError) -> None:
    assert await collect_failure(error) == (error, [])


async def test_a_turn_that_has_started_is_not_retried() -> None:
    clock = RecordingClock()
    async with ScriptedModel([*says("a", deltas=1), DOWN]) as model:
        seen: list[Sequence[AnyModelEvent]] = []
        with pytest.raises(ModelUnreachable):
            seen += [batch async for batch in RetryingBackend(model, 3, clock).stream(REQUEST)]
        assert len(model.requests) == 1
    assert clock.sleeps == []


async def test_closing_the_stream_aborts_the_request() -> None:
    model = ScriptedModel(says("one two three"))
    stream = RetryingBackend(model, 3, RecordingClock()).stream(REQUEST)
    await anext(stream)
    await stream.aclose()
    assert model.aborted_requests == [REQUEST]


async def test_other_methods_are_forwarded() -> None:
    model = ScriptedModel(profile=ModelProfile(context_window=5))
    backend = RetryingBackend(model, 1, RecordingClock())
    backend.validate_request(REQUEST)
    assert await backend.count_tokens(REQUEST) == await model.count_tokens(REQUEST)
    assert backend.get_profile("m").context_window == 5
    await backend.close()


async def test_over_a_socket() -> None:
    answers = [
        raw_model_server.disconnect(),
        raw_model_server.error("503 Service Unavailable", {}),
        raw_model_server.error("429 Too Many Requests", {}, headers={"Retry-After": "2"}),
        stream(raw_model_server.says("a")),
    ]
    clock, connections = RecordingClock(), PooledHttpClient()
    async with raw_model_server.open_raw_model_server(*answers) as server:
        backend = ChatCompletionsBackend(ModelSettings(base_url=server.url), connections)
        assert await turn(RetryingBackend(backend, 3, clock, jitter=lambda: 1.0)) == [
            [ModelTextDelta("a"), ModelTurnEnded("stop")]
        ]
        await connections.close()
    assert clock.sleeps == [0.25, 0.5, 2.0]
    assert len({received.body for received in server.requests}) == 1


# --- what is counted ----------------------------------------------------------------------------------


async def run_and_count(*turns: ScriptedTurn, leave: bool = False) -> ModelStats:
    stats = ModelStats()
    backend = RetryingBackend(ScriptedModel(*turns), 2, RecordingClock(), jitter=lambda: 1.0, stats=stats)
    stream = backend.stream(REQUEST)
    try:
        async for _ in stream:
            assert stats.running_turns == 1
            if leave:
                break
    except ModelError:
        pass
    finally:
        await stream.aclose()
    assert stats.running_turns == 0
    assert stats.turn_seconds.count == 1
    return stats


@pytest.mark.parametrize(
    ("turns", "outcome", "errors", "retries", "chunks"),
    [
        ([says("a")], "ended", {}, 0, 1),
        ([DOWN, says("a")], "ended", {"unreachable": 1}, 1, 1),
        ([DOWN, ModelRateLimited("busy"), DOWN], "unreachable", {"unreachable": 2, "rate_limited": 1}, 2, 0),
        ([ModelRejectedRequest("no")], "refused", {"refused": 1}, 0, 0),
        ([ModelTimeout("slow")], "timeout", {"timeout": 1}, 0, 0),
        ([ModelError("odd")], "failed", {"failed": 1}, 0, 0),
        ([[ModelTextDelta("a"), DOWN]], "unreachable", {"unreachable": 1}, 0, 1),
    ],
)
async def test_turns_are_counted_by_outcome(
    turns: Sequence[ScriptedTurn], outcome: str, errors: dict[str, int], retries: int, chunks: int
) -> None:
    stats = await run_and_count(*turns)
    assert (stats.ended_turns, stats.errors, stats.retries) == ({outcome: 1}, errors, retries)
    assert stats.first_event_seconds.count == chunks


async def test_a_cancelled_turn_is_no_error() -> None:
    stats = await run_and_count(says("one two three"), leave=True)
    assert (stats.ended_turns, stats.errors) == ({"cancelled": 1}, {})
