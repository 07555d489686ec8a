"""What all backends that ask a model server over HTTP have in common."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from fumehood.interfaces import AcceptBatch
from fumehood.models.model_settings import ModelSettings, Secret
from fumehood.models.upstream.fenced_calls import FencedCallDetector
from fumehood.models.upstream.http1_client import UpstreamAddress, UpstreamTimeouts, encode_headers
from fumehood.models.upstream.stream_parser import TurnParser, split_large_deltas
from fumehood.models.upstream.upstream_client import UpstreamClient
from fumehood.models.upstream.upstream_errors import UpstreamErrorFactory
from fumehood.protocol.model_turns import AnyModelEvent, ModelCard, ModelProfile, ModelRequest
from fumehood.worker_threads import WORKER_THRESHOLD_BYTES, run_in_worker

_USAGE_TIMEOUT = 5.0  # how long to wait for the usage and the end once the model has stopped
_BYTES_PER_TOKEN = 4
_MAX_MODEL_LIST_BYTES = 1 << 20
_MAX_COUNT_BYTES = 32 << 20
_MAX_MODELS = 1000
_MIN_SECRET_LENGTH = 8  # of a header's value; what is shorter is found in any sentence
_HEADERS = {"Content-Type": "application/json", "Accept-Encoding": "identity", "User-Agent": "fumehood"}


class _ModelEntry(msgspec.Struct):
    id: str
    created: int | None = None
    owned_by: str | None = None


class _ModelList(msgspec.Struct):
    data: list[_ModelEntry]


class _TokenCount(msgspec.Struct):
    """Of `/v1/responses/input_tokens`, or of vLLM's answer, which has the tokens themselves too."""

    input_tokens: Annotated[int, Meta(ge=0)] | None = None
    count: Annotated[int, Meta(ge=0)] | None = None


class _UpstreamTurn:
    """One turn as it is read.

    events: what the last piece brought, unless it was taken. begun: whether any were given on.
    unread: a piece that ends a long line or document.
    """

    __slots__ = ("_accept_batch", "_fenced_calls", "events", "has_started", "parser", "unparsed_chunk")

    def __init__(
        self, parser: TurnParser, fenced_calls: FencedCallDetector | None, accept_batch: AcceptBatch | None
    ) -> None:
        self.parser = parser
        self.events: Sequence[AnyModelEvent] = ()
        self.has_started = False
        self.unparsed_chunk: bytes | None = None
        self._fenced_calls = fenced_calls
        self._accept_batch = accept_batch

    def feed(self, chunk: bytes) -> bool:
        """Read a piece, nothing for the end; whether nobody needs to look at it."""
        parser = self.parser
        if parser.buffered_bytes >= WORKER_THRESHOLD_BYTES and (not chunk or b"\n" in chunk):
            self.unparsed_chunk, self.events = chunk, ()
            return False
        events = self._parse(chunk)
        if events and self.has_started and self._accept_batch is not None and self._accept_batch(events):
            events = ()
        self.events = events
        return not events and not parser.is_over and not parser.awaits_usage

    async def parse_in_worker(self) -> None:
        """What was too much to be read on the event loop."""
        piece, self.unparsed_chunk = self.unparsed_chunk or b"", None
        self.events = await run_in_worker(self.parser.buffered_bytes, self._parse, piece)

    def _parse(self, chunk: bytes) -> list[AnyModelEvent]:
        events = self.parser.feed(chunk) if chunk else self.parser.finish()
        return events if self._fenced_calls is None else self._fenced_calls.filter_events(events)


class HttpModelBackend(ABC):
    """A `ModelBackend`. It shares its connections with others and does not close them.

    api: what the server speaks, in words; path: where it is asked for a turn.
    """

    api_name: ClassVar[str]
    endpoint: ClassVar[str]

    def __init__(
        self, settings: ModelSettings, upstream: UpstreamClient, api_key: Secret | None = None
    ) -> None:
        self._settings = settings
        self._upstream = upstream
        self._timeouts = UpstreamTimeouts(settings.connect_timeout, settings.read_timeout)
        self._address = UpstreamAddress.parse(settings.base_url or "")
        self._tokenize_address = (
            None if settings.tokenize_url is None else UpstreamAddress.parse(settings.tokenize_url)
        )
        self._profile = ModelProfile(
            context_window=settings.context_window,
            takes_images=settings.takes_images,
            takes_files=settings.sends_files,
            counts_tokens=self._tokenize_address is not None,
            server=(self._address.host, self._address.port),
        )
        headers = {**settings.headers, **_HEADERS}
        self._secrets = [value for value in settings.headers.values() if len(value) >= _MIN_SECRET_LENGTH]
        if api_key is not None:
            value = api_key.reveal()
            bearer = settings.api_key_header.lower() == "authorization"
            headers[settings.api_key_header] = f"Bearer {value}" if bearer else value
            self._secrets.append(value)
        self._headers = encode_headers(headers)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._address.host_header}{self._address.path}>"

    # ---- what the servers differ in ---------------------------------------------------------------------------

    @abstractmethod
    def _build_body(self, request: ModelRequest) -> list[bytes]:
        """What is sent, in pieces; raises InvalidRequest."""

    @abstractmethod
    def _build_count_body(self, request: ModelRequest) -> list[bytes]:
        """What is sent to have its tokens counted, in pieces; raises InvalidRequest."""

    @abstractmethod
    def _create_parser(self, request: ModelRequest, errors: UpstreamErrorFactory) -> TurnParser:
        """What the answer is read by."""

    @abstractmethod
    def validate_request(self, request: ModelRequest) -> None:
        """Raises InvalidRequest."""

    # ---- ModelBackend -----------------------------------------------------------------------------------------

    async def stream(
        self, request: ModelRequest, accept_batch: AcceptBatch | None = None
    ) -> AsyncGenerator[Sequence[AnyModelEvent]]:
        errors = self._create_error_factory(request.model)
        body = self._build_body(request)
        turn = _UpstreamTurn(
            self._create_parser(request, errors), FencedCallDetector.for_request(request), accept_batch
        )
        async with self._upstream.request(
            self._address, self.endpoint, self._build_headers(request), self._timeouts, errors, body=body
        ) as answer:
            del body
            parser = turn.parser
            while not parser.is_over:
                if parser.awaits_usage:
                    turn.feed(await answer.read_trailing(_USAGE_TIMEOUT))
                elif await answer.stream_to(turn.feed):
                    turn.feed(b"")
                large = turn.unparsed_chunk is not None
                if large:
                    await turn.parse_in_worker()
                answer.http_response.reuse_connection = parser.has_ended
                turn.has_started = turn.has_started or bool(turn.events)
                if not large and turn.events:
                    yield turn.events
                elif large:
                    for batch in split_large_deltas(turn.events):
                        yield batch
                        await asyncio.sleep(0)  # others have their turns
            if parser.failure is not None:
                raise parser.failure

    async def count_tokens(self, request: ModelRequest) -> tuple[int, bool]:
        """What the server counts, if it can; raises ModelError, and InvalidRequest for what it cannot be shown."""
        if self._tokenize_address is None:
            return sum(map(len, self._build_body(request))) // _BYTES_PER_TOKEN, False
        errors = self._create_error_factory(request.model)
        body = self._build_count_body(request)
        async with self._upstream.request(
            self._tokenize_address, "", self._headers, self._timeouts, errors, body=body
        ) as answer:
            content = await answer.read_all(_MAX_COUNT_BYTES)
        try:
            told = msgspec.json.decode(content, type=_TokenCount)
        except (ValueError, RecursionError) as error:
            raise errors.invalid_response(f"its count of tokens cannot be read: {error}") from None
        tokens = told.count if told.input_tokens is None else told.input_tokens
        if tokens is None:
            raise errors.invalid_response("it was asked for a count of tokens, and told none")
        return tokens, True

    def get_profile(self, model: str) -> ModelProfile:  # noqa: ARG002 - it is the same for all names
        return self._profile

    async def list_models(self) -> Sequence[ModelCard]:
        """The models that the server says it has, as far as one can read it; raises ModelError."""
        errors = self._create_error_factory(self._settings.match)
        async with self._upstream.request(
            self._address, "/models", self._headers, self._timeouts, errors
        ) as answer:
            content = await answer.read_all(_MAX_MODEL_LIST_BYTES)
        try:
            cards = msgspec.json.decode(content, type=_ModelList, strict=False).data
        except (ValueError, RecursionError) as error:
            raise errors.invalid_response(f"its list of models cannot be read: {error}") from None
        return [
            ModelCard(id=card.id, created=card.created or 0, owned_by=(card.owned_by or "upstream")[:64])
            for card in cards[:_MAX_MODELS]
        ]

    async def close(self) -> None:  # noqa: B027 - there is nothing to close: the connections are everybody's
        pass

    def _build_headers(self, request: ModelRequest) -> bytes:
        trace = request.trace
        if trace is None or not self._settings.trace_context:
            return self._headers
        told = {"traceparent": trace.traceparent}
        if trace.tracestate:
            told["tracestate"] = trace.tracestate
        return self._headers + encode_headers(told)

    def _create_error_factory(self, model: str) -> UpstreamErrorFactory:
        return UpstreamErrorFactory(model, self._secrets, api_name=self.api_name)
