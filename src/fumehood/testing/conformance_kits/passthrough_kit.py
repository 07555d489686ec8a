"""Conformance tests of `PassthroughProvider`.

`PassthroughKit` needs a fixture `subject` of type `PassthroughSubject`.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
import pytest

from fumehood.interfaces import PassthroughProvider, PassthroughRequest
from fumehood.protocol.openai.api_errors import InvalidRequest, ModelError

_SECONDS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class PassthroughSubject:
    """The implementation under test, with requests for the cases.

    document_request: gets a JSON object, with a usage.
    stream_request: gets a stream of events, with a usage.
    unknown_request: names a model that does not exist.
    serverless_request: names a model without a server.
    failing_request: is rejected by the server.
    breaking_request: gets a stream that breaks after its first event.
    hanging_request: gets a stream that does not go on after its first event.
    wait_until_released: waits until the provider has closed the request that hangs.
    """

    provider: PassthroughProvider
    document_request: PassthroughRequest
    stream_request: PassthroughRequest
    unknown_request: PassthroughRequest
    serverless_request: PassthroughRequest
    failing_request: PassthroughRequest
    breaking_request: PassthroughRequest
    hanging_request: PassthroughRequest
    wait_until_released: Callable[[], Awaitable[object]]


async def read_body(provider: PassthroughProvider, request: PassthroughRequest) -> list[bytes]:
    """All pieces of the response to a request, none of them empty."""
    async with asyncio.timeout(_SECONDS), provider.open_passthrough(request) as response:
        async with aclosing(response.iter_body()) as body:
            pieces = [piece async for piece in body]
        assert response.usage is not None
        assert response.usage.input_tokens > 0
    assert pieces
    assert all(pieces), "an empty piece"
    return pieces


class PassthroughKit:
    async def test_a_small_document_is_one_piece_of_known_length(self, subject: PassthroughSubject) -> None:
        (document,) = await read_body(subject.provider, subject.document_request)
        assert isinstance(msgspec.json.decode(document), dict)

    async def test_a_stream_comes_in_whole_events_and_ends_with_done(
        self, subject: PassthroughSubject
    ) -> None:
        pieces = await read_body(subject.provider, subject.stream_request)
        assert all(piece.endswith(b"\n\n") for piece in pieces), "an event is split"
        events = b"".join(pieces).decode().strip().split("\n\n")
        assert len(events) > 1
        assert events[-1] == "data: [DONE]"
        assert all(msgspec.json.decode(event.removeprefix("data:")) for event in events[:-1])

    async def test_two_streams_at_once_do_not_mix(self, subject: PassthroughSubject) -> None:
        first, second = await asyncio.gather(
            read_body(subject.provider, subject.stream_request),
            read_body(subject.provider, subject.stream_request),
        )
        assert b"".join(first) == b"".join(second)

    async def test_models_that_cannot_be_asked_are_invalid_requests(
        self, subject: PassthroughSubject
    ) -> None:
        for request, code in (
            (subject.unknown_request, "model_not_found"),
            (subject.serverless_request, "unsupported_model"),
        ):
            with pytest.raises(InvalidRequest) as raised:
                async with subject.provider.open_passthrough(request):
                    pass
            assert (raised.value.wire_code, raised.value.param) == (code, "model")

    async def test_a_rejected_request_is_a_model_error_before_the_body(
        self, subject: PassthroughSubject
    ) -> None:
        with pytest.raises(ModelError):
            async with subject.provider.open_passthrough(subject.failing_request):
                pass
        assert await read_body(subject.provider, subject.document_request)

    async def test_a_failure_in_the_middle_is_raised_after_what_came(
        self, subject: PassthroughSubject
    ) -> None:
        pieces: list[bytes] = []

        async def read() -> None:
            async with (
                subject.provider.open_passthrough(subject.breaking_request) as response,
                aclosing(response.iter_body()) as body,
            ):
                async for piece in body:
                    pieces.append(piece)  # noqa: PERF401 - what came before the error counts

        async with asyncio.timeout(_SECONDS):
            with pytest.raises(ModelError):
                await read()
        assert len(pieces) == 1
        assert pieces[0].endswith(b"\n\n")

    async def test_leaving_the_block_aborts_the_request(self, subject: PassthroughSubject) -> None:
        async with asyncio.timeout(_SECONDS):
            async with subject.provider.open_passthrough(subject.hanging_request) as response:
                assert await anext(response.iter_body())
            await subject.wait_until_released()

    async def test_cancelling_the_reader_aborts_the_request(self, subject: PassthroughSubject) -> None:
        first = asyncio.Event()

        async def read() -> None:
            async with (
                subject.provider.open_passthrough(subject.hanging_request) as response,
                aclosing(response.iter_body()) as body,
            ):
                async for _ in body:
                    first.set()

        async with asyncio.timeout(_SECONDS):
            task = asyncio.ensure_future(read())
            await first.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await subject.wait_until_released()
