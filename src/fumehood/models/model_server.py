"""What all backends that ask a model server over HTTP have in common; imports `interfaces`, `protocol` and siblings."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from fumehood.aside import LARGE, aside
from fumehood.interfaces import Take
from fumehood.models.answers import TurnReader, in_pieces
from fumehood.models.forced_calls import ForcedCall
from fumehood.models.http_client import Address, Patience, header_lines
from fumehood.models.settings import ModelSettings, Secret
from fumehood.models.upstream import Upstream
from fumehood.models.upstream_errors import UpstreamErrors
from fumehood.protocol.models import AnyModelEvent, ModelCard, ModelProfile, ModelRequest

_USAGE_SECONDS = 5.0  # how long to wait for the usage and the end once the model has stopped
_BYTES_A_TOKEN = 4
_LONGEST_LIST = 1 << 20
_LONGEST_COUNT = 32 << 20
_MOST_CARDS = 1000
_SHORTEST_SECRET = 8  # of a header's value; what is shorter is found in any sentence
_HEADERS = {"Content-Type": "application/json", "Accept-Encoding": "identity", "User-Agent": "fumehood"}


class _Card(msgspec.Struct):
    id: str
    created: int | None = None
    owned_by: str | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


class _Count(msgspec.Struct):
    """Of `/v1/responses/input_tokens`, or of vLLM's answer, which has the tokens themselves too."""

    input_tokens: Annotated[int, Meta(ge=0)] | None = None
    count: Annotated[int, Meta(ge=0)] | None = None


class _Turn:
    """One turn as it is read.

    events: what the last piece brought, unless it was taken. begun: whether any were given on.
    unread: a piece that ends a long line or document.
    """

    __slots__ = ("_forced", "_take", "begun", "events", "parser", "unread")

    def __init__(self, parser: TurnReader, forced: ForcedCall | None, take: Take | None) -> None:
        self.parser = parser
        self.events: Sequence[AnyModelEvent] = ()
        self.begun = False
        self.unread: bytes | None = None
        self._forced = forced
        self._take = take

    def hear(self, piece: bytes) -> bool:
        """Read a piece, nothing for the end; whether nobody needs to look at it."""
        parser = self.parser
        if parser.held >= LARGE and (not piece or b"\n" in piece):
            self.unread, self.events = piece, ()
            return False
        events = self._read(piece)
        if events and self.begun and self._take is not None and self._take(events):
            events = ()
        self.events = events
        return not events and not parser.over and not parser.closing

    async def read_aside(self) -> None:
        """What was too much to be read on the event loop."""
        piece, self.unread = self.unread or b"", None
        self.events = await aside(self.parser.held, self._read, piece)

    def _read(self, piece: bytes) -> list[AnyModelEvent]:
        events = self.parser.feed(piece) if piece else self.parser.finish()
        return events if self._forced is None else self._forced.sift(events)


class ModelServer(ABC):
    """A `ModelBackend`. It shares its connections with others and does not close them.

    api: what the server speaks, in words; path: where it is asked for a turn.
    """

    api: ClassVar[str]
    path: ClassVar[str]

    def __init__(self, settings: ModelSettings, upstream: Upstream, key: Secret | None = None) -> None:
        self._settings = settings
        self._upstream = upstream
        self._patience = Patience(settings.connect_timeout, settings.read_timeout)
        self._address = Address.of(settings.base_url or "")
        self._counter = None if settings.tokenize_url is None else Address.of(settings.tokenize_url)
        self._profile = ModelProfile(
            context_window=settings.context_window,
            takes_images=settings.takes_images,
            takes_files=settings.shows_files,
            counts=self._counter is not None,
            server=(self._address.host, self._address.port),
        )
        headers = {**settings.headers, **_HEADERS}
        self._secrets = [value for value in settings.headers.values() if len(value) >= _SHORTEST_SECRET]
        if key is not None:
            value = key.reveal()
            bearer = settings.api_key_header.lower() == "authorization"
            headers[settings.api_key_header] = f"Bearer {value}" if bearer else value
            self._secrets.append(value)
        self._headers = header_lines(headers)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._address.name}{self._address.path}>"

    # ---- what the servers differ in ---------------------------------------------------------------------------

    @abstractmethod
    def _body(self, request: ModelRequest) -> list[bytes]:
        """What is sent, in pieces; raises InvalidRequest."""

    @abstractmethod
    def _counted(self, request: ModelRequest) -> list[bytes]:
        """What is sent to have its tokens counted, in pieces; raises InvalidRequest."""

    @abstractmethod
    def _reader(self, request: ModelRequest, errors: UpstreamErrors) -> TurnReader:
        """What the answer is read by."""

    @abstractmethod
    def check(self, request: ModelRequest) -> None:
        """Raises InvalidRequest."""

    # ---- ModelBackend -----------------------------------------------------------------------------------------

    async def stream(
        self, request: ModelRequest, take: Take | None = None
    ) -> AsyncGenerator[Sequence[AnyModelEvent]]:
        errors = self._errors(request.model)
        body = self._body(request)
        turn = _Turn(self._reader(request, errors), ForcedCall.of(request), take)
        async with self._upstream.request(
            self._address, self.path, self._headers_of(request), self._patience, errors, body=body
        ) as answer:
            del body
            parser = turn.parser
            while not parser.over:
                if parser.closing:
                    turn.hear(await answer.read_rest(_USAGE_SECONDS))
                elif await answer.tell(turn.hear):
                    turn.hear(b"")
                large = turn.unread is not None
                if large:
                    await turn.read_aside()
                answer.response.complete = parser.ended
                turn.begun = turn.begun or bool(turn.events)
                if not large and turn.events:
                    yield turn.events
                elif large:
                    for batch in in_pieces(turn.events):
                        yield batch
                        await asyncio.sleep(0)  # others have their turns
            if parser.failure is not None:
                raise parser.failure

    async def count(self, request: ModelRequest) -> tuple[int, bool]:
        """What the server counts, if it can; raises ModelError, and InvalidRequest for what it cannot be shown."""
        if self._counter is None:
            return sum(map(len, self._body(request))) // _BYTES_A_TOKEN, False
        errors = self._errors(request.model)
        body = self._counted(request)
        async with self._upstream.request(
            self._counter, "", self._headers, self._patience, errors, body=body
        ) as answer:
            content = await answer.read_all(_LONGEST_COUNT)
        try:
            told = msgspec.json.decode(content, type=_Count)
        except (ValueError, RecursionError) as error:
            raise errors.unreadable(f"its count of tokens cannot be read: {error}") from None
        tokens = told.count if told.input_tokens is None else told.input_tokens
        if tokens is None:
            raise errors.unreadable("it was asked for a count of tokens, and told none")
        return tokens, True

    def profile(self, model: str) -> ModelProfile:  # noqa: ARG002 - it is the same for all names
        return self._profile

    async def cards(self) -> Sequence[ModelCard]:
        """The models that the server says it has, as far as one can read it; raises ModelError."""
        errors = self._errors(self._settings.match)
        async with self._upstream.request(
            self._address, "/models", self._headers, self._patience, errors
        ) as answer:
            content = await answer.read_all(_LONGEST_LIST)
        try:
            cards = msgspec.json.decode(content, type=_Cards, strict=False).data
        except (ValueError, RecursionError) as error:
            raise errors.unreadable(f"its list of models cannot be read: {error}") from None
        return [
            ModelCard(id=card.id, created=card.created or 0, owned_by=(card.owned_by or "upstream")[:64])
            for card in cards[:_MOST_CARDS]
        ]

    async def close(self) -> None:  # noqa: B027 - there is nothing to close: the connections are everybody's
        pass

    def _headers_of(self, request: ModelRequest) -> bytes:
        trace = request.trace
        if trace is None or not self._settings.trace_context:
            return self._headers
        told = {"traceparent": trace.traceparent}
        if trace.tracestate:
            told["tracestate"] = trace.tracestate
        return self._headers + header_lines(told)

    def _errors(self, model: str) -> UpstreamErrors:
        return UpstreamErrors(model, self._secrets, api=self.api)
