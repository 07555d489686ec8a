"""The base class of backends that ask a model server over HTTP."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from fumehood.cpu_worker import WORKER_THRESHOLD_BYTES, run_in_worker
from fumehood.interfaces import AcceptBatch
from fumehood.models.model_settings import ModelSettings, RequestFields, Secret
from fumehood.models.rendering.rendering_cache import encode_object_with_list
from fumehood.models.rendering.server_features import ServerFeatures
from fumehood.models.upstream.fenced_calls import FencedCallDetector
from fumehood.models.upstream.http1_client import PooledHttpClient, UpstreamAddress, encode_headers
from fumehood.models.upstream.stream_parser import UpstreamStreamParser, split_large_deltas
from fumehood.models.upstream.upstream_errors import UpstreamErrorFactory
from fumehood.models.upstream.upstream_server import UpstreamServer
from fumehood.protocol.model_turns import AnyModelEvent, ModelProfile, ModelRequest
from fumehood.protocol.openai.client_tools_as_functions import CLIENT_TOOL_TYPES
from fumehood.protocol.openai.tool_specs import ModelToolDefinition, ToolSpec

_USAGE_TIMEOUT = 5.0  # seconds to wait for the usage after the model has stopped
_BYTES_PER_TOKEN = 4
_MAX_COUNT_BYTES = 32 << 20


class _TokenCount(msgspec.Struct):
    """The response of `/v1/responses/input_tokens` or of vLLM's `/tokenize`."""

    input_tokens: Annotated[int, Meta(ge=0)] | None = None
    count: Annotated[int, Meta(ge=0)] | None = None


class _UpstreamTurn:
    """Feeds the chunks of one response to the parser.

    events: those of the last chunk that `accept_batch` did not consume.
    has_started: whether events of this turn were yielded.
    unparsed_chunk: a chunk that completes a line or document too long for the event loop.
    """

    __slots__ = ("_accept_batch", "_fenced_calls", "events", "has_started", "parser", "unparsed_chunk")

    def __init__(
        self,
        parser: UpstreamStreamParser[Any],
        fenced_calls: FencedCallDetector | None,
        accept_batch: AcceptBatch | None,
    ) -> None:
        self.parser = parser
        self.events: Sequence[AnyModelEvent] = ()
        self.has_started = False
        self.unparsed_chunk: bytes | None = None
        self._fenced_calls = fenced_calls
        self._accept_batch = accept_batch

    def feed(self, chunk: bytes) -> bool:
        """Parse a chunk, empty at the end of the body. True if the turn's task need not wake up for it."""
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
        """Parse `unparsed_chunk` in a worker thread."""
        chunk, self.unparsed_chunk = self.unparsed_chunk or b"", None
        self.events = await run_in_worker(self.parser.buffered_bytes, self._parse, chunk)

    def _parse(self, chunk: bytes) -> list[AnyModelEvent]:
        events = self.parser.feed(chunk) if chunk else self.parser.finish()
        return events if self._fenced_calls is None else self._fenced_calls.filter_events(events)


class HttpModelBackend(ABC):
    """A `ModelBackend` over HTTP. It does not close the client, which all backends share.

    server: the model server.
    api_name: the server's API, for error messages.
    endpoint: the path of turn requests below `base_url`.
    conversation_field: the field of a request that holds the conversation.
    """

    api_name: ClassVar[str]
    endpoint: ClassVar[str]
    conversation_field: ClassVar[str]

    def __init__(
        self, settings: ModelSettings, client: PooledHttpClient, api_key: Secret | None = None
    ) -> None:
        self._settings = settings
        self.server = UpstreamServer(settings, client, api_key)
        self._tokenize_address = (
            None if settings.tokenize_url is None else UpstreamAddress.parse(settings.tokenize_url)
        )
        self._profile = ModelProfile(
            context_window=settings.context_window,
            takes_images=settings.takes_images,
            takes_files=settings.sends_files,
            counts_tokens=self._tokenize_address is not None,
            server=(self.server.address.host, self.server.address.port),
            provider=settings.provider_name,
            replays_reasoning=settings.replay_reasoning,
            passed_tools=tuple(settings.pass_tools),
        )
        self._features = ServerFeatures(
            takes_images=settings.takes_images,
            takes_files=bool(settings.sends_files),
            developer_role=settings.developer_role,
            replay_reasoning=settings.replay_reasoning,
            custom_tools=settings.passes_tool("custom"),
            foreign_items=any(tool_type != "custom" for tool_type in settings.pass_tools),
            client_tools=tuple(
                tool_type for tool_type in CLIENT_TOOL_TYPES if settings.passes_tool(tool_type)
            ),
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.server.address.host_header}{self.server.address.path}>"

    # ---- for subclasses ---------------------------------------------------------------------------------------

    @abstractmethod
    def _render_conversation(self, request: ModelRequest) -> list[bytes]:
        """The elements of `conversation_field`, in chunks. Raises InvalidRequest."""

    @abstractmethod
    def _build_fields(self, request: ModelRequest) -> RequestFields:
        """The other fields of a request."""

    @abstractmethod
    def _build_count_fields(self, request: ModelRequest) -> RequestFields:
        """The other fields of a token-counting request."""

    @abstractmethod
    def _render_tool_choice(self, spec: ModelToolDefinition) -> object:
        """The `tool_choice` that forces this function."""

    @abstractmethod
    def _create_parser(
        self, request: ModelRequest, errors: UpstreamErrorFactory
    ) -> UpstreamStreamParser[Any]:
        """A parser for the response to this request."""

    def _add_tools(self, fields: RequestFields, request: ModelRequest, tools: Sequence[object]) -> None:
        if not tools:
            return
        fields["tools"] = tools
        choice = request.tool_choice
        if isinstance(choice, ToolSpec):
            fields["tool_choice"] = _choose_server_tool(choice)
        elif isinstance(choice, ModelToolDefinition):
            fields["tool_choice"] = self._render_tool_choice(choice)
        elif choice != "auto":  # the default; some servers reject it if it is explicit
            fields["tool_choice"] = choice
        if not request.parallel_calls:
            fields["parallel_tool_calls"] = False

    def _encode_body(self, request: ModelRequest, fields: RequestFields) -> list[bytes]:
        """The request body, in chunks. Raises InvalidRequest."""
        return encode_object_with_list(self.conversation_field, self._render_conversation(request), fields)

    # ---- ModelBackend -----------------------------------------------------------------------------------------

    def validate_request(self, request: ModelRequest) -> None:
        """Raises InvalidRequest if the conversation cannot be sent to this server."""
        self._render_conversation(request)

    async def stream(
        self, request: ModelRequest, accept_batch: AcceptBatch | None = None
    ) -> AsyncGenerator[Sequence[AnyModelEvent]]:
        errors = self._create_error_factory(request.model)
        body = self._encode_body(request, self._build_fields(request))
        turn = _UpstreamTurn(
            self._create_parser(request, errors), FencedCallDetector.for_request(request), accept_batch
        )
        headers = self._build_trace_headers(request)
        async with self.server.request(self.endpoint, errors, body, headers=headers) as response:
            del body
            parser = turn.parser
            while not parser.is_over:
                if parser.awaits_usage:
                    turn.feed(await response.read_trailing(_USAGE_TIMEOUT))
                elif await response.stream_to(turn.feed):
                    turn.feed(b"")
                is_large = turn.unparsed_chunk is not None
                if is_large:
                    await turn.parse_in_worker()
                response.reuse = parser.has_ended
                turn.has_started = turn.has_started or bool(turn.events)
                if not is_large and turn.events:
                    yield turn.events
                elif is_large:
                    for batch in split_large_deltas(turn.events):
                        yield batch
                        await asyncio.sleep(0)  # let other tasks run
            if parser.failure is not None:
                raise parser.failure

    async def count_tokens(self, request: ModelRequest) -> tuple[int, bool]:
        """Ask the server, or estimate. Raises ModelError, and InvalidRequest as `validate_request` does."""
        if self._tokenize_address is None:
            body = self._encode_body(request, self._build_fields(request))
            return sum(map(len, body)) // _BYTES_PER_TOKEN, False
        errors = self._create_error_factory(request.model)
        body = self._encode_body(request, self._build_count_fields(request))
        async with self.server.request("", errors, body, address=self._tokenize_address) as response:
            content = await response.read_all(_MAX_COUNT_BYTES)
        try:
            counted = msgspec.json.decode(content, type=_TokenCount)
        except (ValueError, RecursionError) as error:
            raise errors.invalid_response(f"its token count cannot be decoded: {error}") from None
        tokens = counted.count if counted.input_tokens is None else counted.input_tokens
        if tokens is None:
            raise errors.invalid_response("its response has no token count")
        return tokens, True

    def get_profile(self, model: str) -> ModelProfile:  # noqa: ARG002 - all names have the same profile
        return self._profile

    async def close(self) -> None:  # noqa: B027 - the registry closes the shared client
        pass

    def _build_trace_headers(self, request: ModelRequest) -> bytes:
        trace = request.trace
        if trace is None or not self._settings.trace_context:
            return b""
        headers = {"traceparent": trace.traceparent}
        if trace.tracestate:
            headers["tracestate"] = trace.tracestate
        return encode_headers(headers)

    def _create_error_factory(self, model: str) -> UpstreamErrorFactory:
        return self.server.create_error_factory(model, self.api_name)


class _ServerToolNames(msgspec.Struct):
    """The fields besides the type by which `tool_choice` names a tool."""

    name: str | UnsetType = UNSET
    server_label: str | UnsetType = UNSET


def _choose_server_tool(spec: ToolSpec) -> object:
    """The `tool_choice` that forces a tool of the server."""
    names = msgspec.json.decode(spec.raw, type=_ServerToolNames)
    return {"type": spec.type, **msgspec.to_builtins(names)}
