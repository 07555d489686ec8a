"""Requests that the gateway passes through to a model server unchanged."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

from msgspec import Raw

from fumehood.protocol.openai.responses import Usage

type PassthroughEndpoint = Literal["chat/completions", "embeddings"]


@dataclass(frozen=True, slots=True)
class PassthroughRequest:
    """A request of a client to an endpoint of a model server.

    model: the name that the client sent.
    fields: all fields of the body, as the client wrote them.
    is_streamed: whether the client asks for server-sent events.
    """

    endpoint: PassthroughEndpoint
    model: str
    fields: Mapping[str, Raw]
    is_streamed: bool = False


class PassthroughResponse(Protocol):
    """The response of a model server with the status 200. It has started; its body has not been read."""

    @property
    def usage(self) -> Usage | None:
        """The tokens that the server has reported so far; known once the body has been read."""
        ...

    @property
    def content_length(self) -> int | None:
        """The size of the body, if it is known. None for a stream."""
        ...

    def iter_body(self) -> AsyncGenerator[bytes]:
        """Yield the body: of a stream, whole events as they arrive; of a document, its pieces.

        A document of at most 1 MiB is one piece. Raises ModelError if the server fails or sends something else than
        the request asked for; what was yielded before is valid.
        """
        ...


class PassthroughProvider(Protocol):
    """Passes requests through to the server of their model."""

    def open_passthrough(
        self, request: PassthroughRequest
    ) -> AbstractAsyncContextManager[PassthroughResponse]:
        """Send a request with the gateway's own credentials, and wait for the start of the response.

        request: what the client asks for. The server gets its own name of the model.

        Raises InvalidRequest if there is no such model (`model_not_found`) or it has no server
        (`unsupported_model`), ModelError if the server cannot be reached or rejects the request. Leaving the block
        before the end of the body aborts the request.
        """
        ...
