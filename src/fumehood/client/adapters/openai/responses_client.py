"""Requests to the Responses API: retries, error mapping, and detection of the fumehood gateway."""

import logging
import time
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4
from weakref import WeakKeyDictionary

import msgspec

from fumehood.client.adapters.openai.container_errors import ContainerGoneError, read_gone_error
from fumehood.client.adapters.openai.response_stream import (
    ResponseStreamReader,
    StreamBrokenError,
    StreamedError,
)
from fumehood.client.adapters.openai.wire import WireResponse, build_response_event
from fumehood.client.deadlines import Deadline
from fumehood.client.errors import DeadlineExceededError, PromptEvaluationError
from fumehood.client.runtime.blocking_shell import BlockingShell
from fumehood.client.runtime.evaluation_observer import NOOP_OBSERVER, EvaluationObserver, ModelRequestStarted
from fumehood.client.runtime.operations import (
    CallFunction,
    OpenStream,
    ProbeServer,
    SendRequest,
    ServerReply,
    Steps,
    perform,
)
from fumehood.client.throttle import ThrottlePolicy, TransientFailure, retry_steps

if TYPE_CHECKING:
    from openai import APIStatusError, AsyncOpenAI, OpenAI

_log = logging.getLogger(__name__)

VERSION_HEADER = "fumehood-version"
_RETRYABLE_STATUSES = (408, 429)
_PROBE_SECONDS = 10
_MIN_COMPACT_THRESHOLD = 1000  # tokens, the minimum that the API accepts
_known_gateways: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
_announced_tools: WeakKeyDictionary[Any, dict[str, frozenset[str] | None]] = WeakKeyDictionary()


def send_steps[T](
    send: Callable[[float | None], Steps[T]],
    policy: ThrottlePolicy,
    *,
    deadline: Deadline | None = None,
    prompt_name: str = "",
) -> Steps[T]:
    """Send a request, with retries. send: called with the timeout in seconds.

    Raises PromptEvaluationError and ContainerGoneError.
    """

    def attempt() -> Steps[T | TransientFailure]:
        timeout = None if deadline is None else max(deadline.remaining().total_seconds(), 0.001)
        started = time.monotonic()
        try:
            return (yield from send(timeout))
        except Exception as error:
            if deadline is not None and not deadline.remaining():
                raise DeadlineExceededError(
                    f"The deadline passed during a request of {time.monotonic() - started:.1f} s.",
                    prompt_name=prompt_name,
                    phase="deadline",
                ) from error
            return _classify_error(error, prompt_name)

    return (yield from retry_steps(attempt, policy, deadline=deadline, prompt_name=prompt_name))


def send_with_retry[T](
    send: Callable[[dict[str, Any]], T],
    policy: ThrottlePolicy,
    *,
    deadline: Deadline | None = None,
    prompt_name: str = "",
    sleep: Callable[[float], object] = time.sleep,
) -> T:
    """As `send_steps`, for a blocking call. send: called with the SDK options to add."""

    def send_once(timeout: float | None) -> Steps[T]:
        options = {} if timeout is None else {"timeout": timeout}
        return perform(CallFunction(lambda: send(options)))

    steps = send_steps(send_once, policy, deadline=deadline, prompt_name=prompt_name)
    return BlockingShell(sleep=sleep).run(steps)


class _TokenCount(msgspec.Struct):
    input_tokens: int


class _ModelCard(msgspec.Struct):
    tools: list[str] | None = msgspec.field(default=None, name="fumehood:tools")


class ResponsesClient:
    """The endpoints that the adapter uses, with one retry policy. Its methods are steps for a shell.

    client: the SDK's, blocking or asynchronous; the shell sends the requests with it.
    """

    def __init__(
        self,
        client: "OpenAI | AsyncOpenAI",
        policy: ThrottlePolicy | None = None,
        observer: EvaluationObserver | None = None,
    ) -> None:
        self.client = client
        self._policy = policy or ThrottlePolicy()
        self._observer = observer or NOOP_OBSERVER

    def create(
        self,
        request: Mapping[str, Any],
        *,
        prompt_name: str = "",
        deadline: Deadline | None = None,
        memory_limit: str | None = None,
        streamed_turn: int | None = None,
    ) -> Steps[WireResponse]:
        """Create a response. Raises PromptEvaluationError and ContainerGoneError.

        memory_limit: for observers. streamed_turn: the number of the turn, if its events are to be emitted.
        """
        event = self._request_event("chat", request, memory_limit)
        # One key for all attempts: code does not run twice because a response was lost.
        headers = {"idempotency-key": str(uuid4())}
        # As a raw body, because servers accept more than the SDK's parameters.
        arguments: dict[str, Any] = {"extra_body": request}
        reader = None
        if streamed_turn is not None:
            arguments["extra_body"] = {**request, "stream": True}
            reader = ResponseStreamReader(streamed_turn, prompt_name, deadline)
        return self._send_observed(
            event, "responses.create", arguments, headers, prompt_name, deadline, reader
        )

    def compact(
        self,
        request: Mapping[str, Any],
        *,
        threshold: int | None = None,
        deadline: Deadline | None = None,
    ) -> Steps[WireResponse]:
        """Compact a conversation. threshold: its size limit, which only the fumehood gateway accepts."""
        extra: dict[str, Any] = {}
        if threshold is not None and (yield from detect_gateway(self.client, deadline=deadline)):
            managed = {"type": "compaction", "compact_threshold": max(_MIN_COMPACT_THRESHOLD, threshold)}
            extra["context_management"] = [managed]
        event = self._request_event("compact", request)
        arguments = {**request, "extra_body": extra}
        return (yield from self._send_observed(event, "responses.compact", arguments, {}, "", deadline))

    def count_tokens(
        self, request: Mapping[str, Any], *, deadline: Deadline | None = None
    ) -> Steps[int | None]:
        """Return the number of input tokens; None if the provider does not count them."""

        def send(timeout: float | None) -> Steps[ServerReply]:
            return perform(SendRequest("responses.input_tokens.count", {"extra_body": request}, timeout))

        try:
            reply = yield from send_steps(send, ThrottlePolicy(max_attempts=1), deadline=deadline)
            return msgspec.json.decode(reply.content, type=_TokenCount).input_tokens
        except (PromptEvaluationError, ContainerGoneError, msgspec.DecodeError) as error:
            _log.debug("the provider counts no tokens: %s", error)
            return None

    def container_status(
        self, container_id: str, *, prompt_name: str = "", deadline: Deadline | None = None
    ) -> Steps[str]:
        """Return "running", "expired", … Raises ContainerGoneError if there is no such container."""
        operation = partial(SendRequest, "containers.retrieve", {"container_id": container_id})
        response = yield from self._send(lambda timeout: perform(operation(timeout)), prompt_name, deadline)
        return response.status or "running"

    def _request_event(
        self, operation: str, request: Mapping[str, Any], memory_limit: str | None = None
    ) -> ModelRequestStarted:
        return ModelRequestStarted(
            operation=operation,
            adapter="openai",
            base_url=str(self.client.base_url),
            request=request,
            memory_limit=memory_limit,
        )

    def _send_observed(
        self,
        event: ModelRequestStarted,
        method: str,
        arguments: Mapping[str, Any],
        headers: Mapping[str, str],
        prompt_name: str,
        deadline: Deadline | None,
        reader: ResponseStreamReader | None = None,
    ) -> Steps[WireResponse]:
        """reader: reads the response from a stream of events."""
        with self._observer.observe_request(event) as observation:
            all_arguments = {**arguments, "extra_headers": {**headers, **observation.headers}}

            def send(timeout: float | None) -> Steps[ServerReply]:
                if reader is None:
                    return perform(SendRequest(method, all_arguments, timeout))
                return reader.read_response(OpenStream(method, all_arguments, timeout))

            response = yield from self._send(send, prompt_name, deadline)
            observation.on_response(build_response_event(response))
        return response

    def _send(
        self,
        send: Callable[[float | None], Steps[ServerReply]],
        prompt_name: str,
        deadline: Deadline | None,
    ) -> Steps[WireResponse]:
        started = time.monotonic()
        reply = yield from send_steps(send, self._policy, deadline=deadline, prompt_name=prompt_name)
        _known_gateways[self.client] = VERSION_HEADER in reply.headers
        response = _decode_response(reply.content, prompt_name)
        _log.debug("request %s took %.2f s", reply.request_id, time.monotonic() - started)
        response.request_id = reply.request_id
        return response


def _decode_response(content: bytes, prompt_name: str) -> WireResponse:
    try:
        return msgspec.json.decode(content, type=WireResponse)
    except msgspec.DecodeError as error:
        raise PromptEvaluationError(
            f"What the provider sent is no response of the Responses API: {error}",
            prompt_name=prompt_name,
            phase="response",
            provider_payload=content[:1000].decode(errors="replace"),
        ) from error


def detect_gateway(client: "OpenAI | AsyncOpenAI", *, deadline: Deadline | None = None) -> Steps[bool]:
    """Find out whether the server is a fumehood gateway. OpenAI is never asked; others are, once."""
    if client not in _known_gateways:
        if (client.base_url.host or "").endswith("openai.com"):
            _known_gateways[client] = False
        else:
            import openai

            try:
                # The body does not matter.
                yield from perform(ProbeServer("/fumehood", _find_probe_timeout(deadline)))
                _known_gateways[client] = False
            except openai.APIStatusError as error:  # not a fumehood gateway
                _known_gateways[client] = VERSION_HEADER in error.response.headers
            except openai.OpenAIError:
                return False  # unreachable; the next caller tries again
    return _known_gateways[client]


def fetch_announced_tools(
    client: "OpenAI | AsyncOpenAI", model: str, *, deadline: Deadline | None = None
) -> Steps[frozenset[str] | None]:
    """Return the types of hosted tools that a fumehood gateway announces for a model, `*` for all; None if it, or
    another server, announces none. It is asked once for each model.
    """
    if not (yield from detect_gateway(client, deadline=deadline)):
        return None
    known = _announced_tools.setdefault(client, {})
    if model not in known:
        import openai

        request = SendRequest("models.retrieve", {"model": model}, _find_probe_timeout(deadline))
        try:
            reply = yield from perform(request)
            tools = msgspec.json.decode(reply.content, type=_ModelCard).tools
            known[model] = None if tools is None else frozenset(tools)
        except (
            openai.APIStatusError,
            msgspec.DecodeError,
        ):  # a model of a pattern, or a key without the scope
            known[model] = None
        except (openai.OpenAIError, TimeoutError):
            return None  # unreachable; the next caller tries again
    return known[model]


def _find_probe_timeout(deadline: Deadline | None) -> float:
    seconds = _PROBE_SECONDS if deadline is None else deadline.remaining().total_seconds()
    return min(_PROBE_SECONDS, max(seconds, 0.001))


def is_fumehood_gateway(client: "OpenAI", *, deadline: Deadline | None = None) -> bool:
    """As `detect_gateway`, for a blocking client."""
    return BlockingShell(lambda: client).run(detect_gateway(client, deadline=deadline))


def _classify_error(error: Exception, prompt_name: str) -> TransientFailure:
    """Return a TransientFailure for an error that may be retried; raise others as errors of the client."""
    import openai

    # The SDK does not translate errors while a body is read, and the HTTP library may change.
    broke_off = any(kind.__name__ == "TransportError" for kind in type(error).__mro__)
    if isinstance(error, openai.APIConnectionError | TimeoutError) or broke_off:
        return TransientFailure(error, message=f"{error} ({_error_origin(error)})")
    if isinstance(error, StreamBrokenError):
        return TransientFailure(error)
    if isinstance(error, StreamedError):
        return _classify_streamed_error(error, prompt_name)
    if not isinstance(error, openai.APIStatusError):
        if isinstance(error, openai.OpenAIError):
            raise PromptEvaluationError(str(error), prompt_name=prompt_name, phase="request") from error
        raise error
    passes = error.status_code >= 500 or (
        error.status_code in _RETRYABLE_STATUSES and error.code != "insufficient_quota"
    )
    if passes and error.response.headers.get("x-should-retry") != "false":
        return TransientFailure(error, _parse_retry_after(error.response.headers), _error_message(error))
    if (gone := read_gone_error(error)) is not None:
        raise gone from error
    raise PromptEvaluationError(
        f"The provider refused the request ({error.status_code}): {_error_message(error)}",
        prompt_name=prompt_name,
        phase="request",
        provider_payload=error.body,
    ) from error


def _classify_streamed_error(error: StreamedError, prompt_name: str) -> TransientFailure:
    if error.is_transient:
        return TransientFailure(error)
    if error.code == "container_expired":
        raise ContainerGoneError(error.message, is_expired=True, body=error.body) from error
    raise PromptEvaluationError(
        f"The provider refused the request: {error.message}",
        prompt_name=prompt_name,
        phase="request",
        provider_payload=error.body,
    ) from error


def _error_origin(error: Any) -> str:
    """Return the URL of the request, without credentials."""
    try:
        url = error.request.url
    except (AttributeError, RuntimeError):
        return type(error).__name__
    return f"{url.scheme}://{url.host}" + (f":{url.port}" if url.port else "")


def _error_message(error: "APIStatusError") -> str:
    """Return the server's message, without the SDK's prefix."""
    body: object = error.body
    message = cast(Mapping[str, object], body).get("message") if isinstance(body, Mapping) else None
    return str(message or error.message)


def _parse_retry_after(headers: Mapping[str, str]) -> float | None:
    if (value := headers.get("retry-after-ms")) is not None:
        return _parse_number(value, 1000)
    value = headers.get("retry-after")
    if value is None:
        return None
    seconds = _parse_number(value, 1)
    if seconds is None:
        try:
            seconds = max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
        except ValueError:
            return None
    return seconds


def _parse_number(value: str, divisor: int) -> float | None:
    try:
        return max(0.0, float(value) / divisor)
    except ValueError:
        return None
