"""Conformance tests of `ModelBackend`.

`ModelBackendKit` needs a fixture `subject` of type `ModelSubject`; docs/testing.md has an example.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
import pytest

from fumehood.interfaces import ModelBackend
from fumehood.protocol.model_turns import (
    AnyModelEvent,
    ModelCallArgumentsDelta,
    ModelCallStarted,
    ModelRequest,
    ModelTextDelta,
    ModelTurnEnded,
)
from fumehood.protocol.openai.api_errors import InvalidRequest, ModelError

_SECONDS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSubject:
    """The implementation under test, with requests for the cases. Tests of missing requests are skipped.

    text_request: gets text and no call, in more than one batch.
    call_request: gets at least one call.
    invalid_request: cannot be rendered for its model.
    failing_request: its turn fails before the first batch.
    breaking_request: its turn fails after the first batch.
    hanging_request: its turn does not end after the first batch.
    wait_until_released: waits until the backend has closed the request that hangs.
    """

    backend: ModelBackend
    text_request: ModelRequest
    call_request: ModelRequest | None = None
    invalid_request: ModelRequest | None = None
    failing_request: ModelRequest | None = None
    breaking_request: ModelRequest | None = None
    hanging_request: ModelRequest | None = None
    wait_until_released: Callable[[], Awaitable[object]] | None = None


async def run_turn(backend: ModelBackend, request: ModelRequest) -> list[Sequence[AnyModelEvent]]:
    """Return all batches of a turn. Fails unless none is empty and `ModelTurnEnded` comes last, once."""
    async with asyncio.timeout(_SECONDS), aclosing(backend.stream(request)) as stream:
        batches = [batch async for batch in stream]
    assert all(batches), "an empty batch"
    events = flatten_batches(batches)
    assert [isinstance(event, ModelTurnEnded) for event in events] == [False] * (len(events) - 1) + [True], (
        events
    )
    return batches


def flatten_batches(batches: Sequence[Sequence[AnyModelEvent]]) -> list[AnyModelEvent]:
    return [event for batch in batches for event in batch]


def _list_call_ids(batches: Sequence[Sequence[AnyModelEvent]]) -> frozenset[str]:
    return frozenset(
        event.call_id for event in flatten_batches(batches) if isinstance(event, ModelCallStarted)
    )


def _skip_if_missing[T](value: T | None) -> T:
    if value is None:
        pytest.skip("the subject has no such request")
    return value


class ModelBackendKit:
    async def test_an_answer_ends_once_and_has_text(self, subject: ModelSubject) -> None:
        events = flatten_batches(await run_turn(subject.backend, subject.text_request))
        end = events[-1]
        assert isinstance(end, ModelTurnEnded)
        assert end.reason in ("stop", "length", "content_filter")
        text = [event.delta for event in events if isinstance(event, ModelTextDelta)]
        assert "".join(text)
        assert all(text), "an empty delta"

    async def test_two_turns_at_once_do_not_mix(self, subject: ModelSubject) -> None:
        first, second = await asyncio.gather(
            run_turn(subject.backend, subject.text_request), run_turn(subject.backend, subject.text_request)
        )
        assert flatten_batches(first)[-1] == flatten_batches(second)[-1]
        assert _join_text(first) == _join_text(second)

    async def test_calls_are_announced_and_complete(self, subject: ModelSubject) -> None:
        events = flatten_batches(await run_turn(subject.backend, _skip_if_missing(subject.call_request)))
        end = events[-1]
        assert isinstance(end, ModelTurnEnded)
        assert end.reason == "calls"
        announced: dict[int, ModelCallStarted] = {}
        written: dict[int, str] = {}
        for event in events:
            if isinstance(event, ModelCallStarted):
                assert event.key not in announced
                announced[event.key] = event
            elif isinstance(event, ModelCallArgumentsDelta):
                assert event.key in announced, "arguments before their call"
                assert event.delta
                written[event.key] = written.get(event.key, "") + event.delta
        assert announced
        assert written.keys() == announced.keys(), "a call without arguments has {}"
        ids = [event.call_id for event in announced.values()]
        assert all(0 < len(call_id) <= 64 for call_id in ids)
        assert len(set(ids)) == len(ids)
        assert all(event.name for event in announced.values())

    async def test_a_call_id_of_the_conversation_is_not_used_again(self, subject: ModelSubject) -> None:
        request = _skip_if_missing(subject.call_request)
        first = _list_call_ids(await run_turn(subject.backend, request))
        request = msgspec.structs.replace(request, used_call_ids=first)
        second = _list_call_ids(await run_turn(subject.backend, request))
        assert first
        assert len(first) == len(second)
        assert first.isdisjoint(second)

    async def test_usage_adds_up_where_it_is_given(self, subject: ModelSubject) -> None:
        end = flatten_batches(await run_turn(subject.backend, subject.text_request))[-1]
        assert isinstance(end, ModelTurnEnded)
        if end.usage is not None:
            assert end.usage.total_tokens >= end.usage.input_tokens + end.usage.output_tokens > 0

    async def test_invalid_requests_are_refused_before_anything_happens(self, subject: ModelSubject) -> None:
        request = _skip_if_missing(subject.invalid_request)
        with pytest.raises(InvalidRequest):
            subject.backend.validate_request(request)
        with pytest.raises(InvalidRequest):
            await anext(subject.backend.stream(request))

    async def test_valid_requests_pass_validation(self, subject: ModelSubject) -> None:
        assert subject.backend.validate_request(subject.text_request) is None

    async def test_a_failure_before_the_first_batch_leaves_nothing(self, subject: ModelSubject) -> None:
        request = _skip_if_missing(subject.failing_request)
        stream = subject.backend.stream(request)
        with pytest.raises(ModelError):
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        assert flatten_batches(await run_turn(subject.backend, subject.text_request))

    async def test_a_failure_in_the_middle_is_raised_after_what_came(self, subject: ModelSubject) -> None:
        request = _skip_if_missing(subject.breaking_request)
        stream = subject.backend.stream(request)
        assert await anext(stream)

        async def read_on() -> None:
            async for batch in stream:
                assert not any(isinstance(event, ModelTurnEnded) for event in batch)

        with pytest.raises(ModelError):
            await read_on()

    async def test_closing_the_generator_aborts_the_request(self, subject: ModelSubject) -> None:
        request, wait_until_released = (
            _skip_if_missing(subject.hanging_request),
            _skip_if_missing(subject.wait_until_released),
        )
        async with asyncio.timeout(_SECONDS):
            stream = subject.backend.stream(request)
            assert await anext(stream)
            await stream.aclose()
            await wait_until_released()

    async def test_cancelling_the_reader_aborts_the_request(self, subject: ModelSubject) -> None:
        request, wait_until_released = (
            _skip_if_missing(subject.hanging_request),
            _skip_if_missing(subject.wait_until_released),
        )
        first = asyncio.Event()

        async def read() -> None:
            async with aclosing(subject.backend.stream(request)) as stream:
                async for _ in stream:
                    first.set()

        async with asyncio.timeout(_SECONDS):
            task = asyncio.ensure_future(read())
            await first.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await wait_until_released()

    async def test_a_count_is_positive_and_grows(self, subject: ModelSubject) -> None:
        tokens, _ = await subject.backend.count_tokens(subject.text_request)
        assert tokens >= 0
        longer = ModelRequest(
            model=subject.text_request.model, instructions="x" * 4000, segments=subject.text_request.segments
        )
        more, _ = await subject.backend.count_tokens(longer)
        assert more > tokens

    async def test_closing_twice_is_no_error(self, subject: ModelSubject) -> None:
        await subject.backend.close()
        await subject.backend.close()
        assert subject.backend.get_profile(subject.text_request.model) is not None


def _join_text(batches: Sequence[Sequence[AnyModelEvent]]) -> str:
    return "".join(event.delta for event in flatten_batches(batches) if isinstance(event, ModelTextDelta))
