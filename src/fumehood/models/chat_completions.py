"""Models behind any server of /v1/chat/completions; imports siblings and `protocol`."""

from collections.abc import AsyncGenerator, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from fumehood.models.chat_parsing import ChatParser
from fumehood.models.chat_request import RequestWriter
from fumehood.models.http_client import Address, Patience, header_lines
from fumehood.models.settings import ModelSettings, Secret
from fumehood.models.upstream import Upstream
from fumehood.models.upstream_errors import UpstreamErrors
from fumehood.protocol.models import AnyModelEvent, ModelCard, ModelProfile, ModelRequest

_USAGE_SECONDS = 5.0  # how long to wait for the usage and the end once the model has stopped
_WHOLE_SECONDS = 3600.0  # how long a server may be silent that answers in one piece
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
    """Of vLLM's answer, which has the tokens themselves too."""

    count: Annotated[int, Meta(ge=0)]


class ChatCompletions:
    """A `ModelBackend`. It shares its connections with others and does not close them."""

    def __init__(self, settings: ModelSettings, upstream: Upstream, key: Secret | None = None) -> None:
        self._settings = settings
        self._upstream = upstream
        self._writer = RequestWriter(settings)
        self._patience = Patience(settings.connect_timeout, settings.read_timeout)
        self._long_patience = Patience(settings.connect_timeout, max(settings.read_timeout, _WHOLE_SECONDS))
        self._address = Address.of(settings.base_url or "")
        self._counter = None if settings.tokenize_url is None else Address.of(settings.tokenize_url)
        headers = {**settings.headers, **_HEADERS}
        self._secrets = [value for value in settings.headers.values() if len(value) >= _SHORTEST_SECRET]
        if key is not None:
            value = key.reveal()
            bearer = settings.api_key_header.lower() == "authorization"
            headers[settings.api_key_header] = f"Bearer {value}" if bearer else value
            self._secrets.append(value)
        self._headers = header_lines(headers)

    def __repr__(self) -> str:
        return f"<ChatCompletions {self._address.name}{self._address.path}>"

    async def stream(self, request: ModelRequest) -> AsyncGenerator[Sequence[AnyModelEvent]]:
        errors = UpstreamErrors(request.model, self._secrets)
        body = self._writer.body(request)
        parser = ChatParser(errors, [spec.name for spec in request.functions])
        patience = self._patience if request.streamed else self._long_patience
        async with self._upstream.request(
            self._address, "/chat/completions", self._headers, patience, errors, body=body
        ) as answer:
            del body
            while not parser.over:
                piece = await (answer.read_rest(_USAGE_SECONDS) if parser.closing else answer.read())
                events = parser.feed(piece) if piece else parser.finish()
                answer.response.complete = parser.ended
                if events:
                    yield events
            if parser.failure is not None:
                raise parser.failure

    def check(self, request: ModelRequest) -> None:
        self._writer.messages(request)

    async def count(self, request: ModelRequest) -> tuple[int, bool]:
        """What the server counts, if it can; raises ModelError, and InvalidRequest for what it cannot be shown."""
        if self._counter is None:
            return len(self._writer.body(request)) // _BYTES_A_TOKEN, False
        errors = UpstreamErrors(request.model, self._secrets)
        body = self._writer.tokenization(request)
        async with self._upstream.request(
            self._counter, "", self._headers, self._patience, errors, body=body
        ) as answer:
            content = await answer.read_all(_LONGEST_COUNT)
        try:
            return msgspec.json.decode(content, type=_Count).count, True
        except (ValueError, RecursionError) as error:
            raise errors.unreadable(f"its count of tokens cannot be read: {error}") from None

    def profile(self, model: str) -> ModelProfile:  # noqa: ARG002 - it is the same for all names
        return ModelProfile(
            context_window=self._settings.context_window,
            takes_images=self._settings.takes_images,
            counts=self._counter is not None,
        )

    async def cards(self) -> Sequence[ModelCard]:
        """The models that the server says it has, as far as one can read it; raises ModelError."""
        errors = UpstreamErrors(self._settings.match, self._secrets)
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

    async def close(self) -> None:
        pass
