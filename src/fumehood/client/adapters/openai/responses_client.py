"""Requests to the Responses API through the SDK: retries, error mapping, and detection of the fumehood gateway."""

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
from fumehood.client.adapters.openai.wire import WireResponse, build_response_event
from fumehood.client.deadlines import Deadline
from fumehood.client.errors import DeadlineExceededError, PromptEvaluationError
from fumehood.client.runtime.evaluation_observer import NOOP_OBSERVER, EvaluationObserver, ModelRequestStarted
from fumehood.client.throttle import ThrottlePolicy, TransientFailure, retry

if TYPE_CHECKING:
    from openai import APIStatusError, OpenAI

_log = logging.getLogger(__name__)

VERSION_HEADER = "fumehood-version"
_RETRYABLE_STATUSES = (408, 429)
_PROBE_SECONDS = 10
_MIN_COMPACT_THRESHOLD = 1000  # tokens, the minimum that the API accepts
_TOOLS_FIELD = "fumehood:tools"
_known_gateways: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
_announced_tools: WeakKeyDictionary[Any, dict[str, frozenset[str] | None]] = WeakKeyDictionary()


def send_with_retry[T](
    send: Callable[[dict[str, Any]], T],
    policy: ThrottlePolicy,
    *,
    deadline: Deadline | None = None,
    prompt_name: str = "",
    sleep: Callable[[float], object] = time.sleep,
) -> T:
    """Send a request with the SDK, with retries. send: called with the SDK options to add.

    Raises PromptEvaluationError and ContainerGoneError.
    """

    def once() -> T | TransientFailure:
        more = {} if deadline is None else {"timeout": max(deadline.remaining().total_seconds(), 0.001)}
        started = time.monotonic()
        try:
            return send(more)
        except Exception as error:
            if deadline is not None and not deadline.remaining():
                raise DeadlineExceededError(
                    f"The deadline passed during a request of {time.monotonic() - started:.1f} s.",
                    prompt_name=prompt_name,
                    phase="deadline",
                ) from error
            return _classify_error(error, prompt_name)

    return retry(once, policy, deadline=deadline, prompt_name=prompt_name, sleep=sleep)


class _TokenCount(msgspec.Struct):
    input_tokens: int


class ResponsesClient:
    """The endpoints that the adapter uses, with one retry policy."""

    def __init__(
        self,
        client: "OpenAI",
        policy: ThrottlePolicy | None = None,
        observer: EvaluationObserver | None = None,
    ) -> None:
        self.client = client
        self._policy = policy or ThrottlePolicy()
        self._observer = observer or NOOP_OBSERVER
        # The SDK's own retries ignore deadlines.
        self._sdk: Any = client.with_options(max_retries=0)

    def create(
        self,
        request: Mapping[str, Any],
        *,
        prompt_name: str = "",
        deadline: Deadline | None = None,
        memory_limit: str | None = None,
    ) -> WireResponse:
        """Create a response. Raises PromptEvaluationError and ContainerGoneError. memory_limit: for observers."""
        # As a raw body, because servers accept more than the SDK's parameters.
        send = partial(self._sdk.responses.with_raw_response.create, extra_body=request)
        # One key for all attempts: code does not run twice because a response was lost.
        headers = {"idempotency-key": str(uuid4())}
        event = self._request_event("chat", request, memory_limit)
        return self._send_observed(event, send, headers, prompt_name, deadline)

    def compact(
        self,
        request: Mapping[str, Any],
        *,
        threshold: int | None = None,
        deadline: Deadline | None = None,
    ) -> WireResponse:
        """Compact a conversation. threshold: its size limit, which only the fumehood gateway accepts."""
        extra: dict[str, Any] = {}
        if threshold is not None and is_fumehood_gateway(self.client, deadline=deadline):
            managed = {"type": "compaction", "compact_threshold": max(_MIN_COMPACT_THRESHOLD, threshold)}
            extra["context_management"] = [managed]
        send = partial(self._sdk.responses.with_raw_response.compact, **request, extra_body=extra)
        return self._send_observed(self._request_event("compact", request), send, {}, "", deadline)

    def count_tokens(self, request: Mapping[str, Any], *, deadline: Deadline | None = None) -> int | None:
        """Return the number of input tokens; None if the provider does not count them."""
        send: Any = self._sdk.responses.input_tokens.with_raw_response.count
        try:
            answer = send_with_retry(
                lambda more: send(extra_body=request, **more),
                ThrottlePolicy(max_attempts=1),
                deadline=deadline,
            )
            return msgspec.json.decode(answer.content, type=_TokenCount).input_tokens
        except (PromptEvaluationError, ContainerGoneError, msgspec.DecodeError) as error:
            _log.debug("the provider counts no tokens: %s", error)
            return None

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

    def container_status(
        self, container_id: str, *, prompt_name: str = "", deadline: Deadline | None = None
    ) -> str:
        """Return "running", "expired", … Raises ContainerGoneError if there is no such container."""
        read: Any = self._sdk.containers.with_raw_response.retrieve
        answer = self._send(lambda more: read(container_id, **more), prompt_name, deadline)
        return answer.status or "running"

    def _send_observed(
        self,
        event: ModelRequestStarted,
        send: Callable[..., Any],
        headers: Mapping[str, str],
        prompt_name: str,
        deadline: Deadline | None,
    ) -> WireResponse:
        with self._observer.observe_request(event) as observation:
            all_headers = {**headers, **observation.headers}
            response = self._send(lambda more: send(extra_headers=all_headers, **more), prompt_name, deadline)
            observation.on_response(build_response_event(response))
        return response

    def _send(
        self, send: Callable[[dict[str, Any]], Any], prompt_name: str, deadline: Deadline | None
    ) -> WireResponse:
        started = time.monotonic()
        answer = send_with_retry(send, self._policy, deadline=deadline, prompt_name=prompt_name)
        _known_gateways[self.client] = VERSION_HEADER in answer.headers
        response = _decode_response(answer.content, prompt_name)
        _log.debug("request %s took %.2f s", answer.request_id, time.monotonic() - started)
        response.request_id = answer.request_id
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


def is_fumehood_gateway(client: "OpenAI", *, deadline: Deadline | None = None) -> bool:
    """Whether the server is a fumehood gateway. OpenAI is never asked; others are, once, within the deadline."""
    if client not in _known_gateways:
        if (client.base_url.host or "").endswith("openai.com"):
            _known_gateways[client] = False
        else:
            import openai

            try:
                _with_probe_timeout(client, deadline).get(
                    "/fumehood", cast_to=object
                )  # its body does not matter
                _known_gateways[client] = False
            except openai.APIStatusError as error:  # not a fumehood gateway
                _known_gateways[client] = VERSION_HEADER in error.response.headers
            except openai.OpenAIError:
                return False  # unreachable; the next caller tries again
    return _known_gateways[client]


def fetch_announced_tools(
    client: "OpenAI", model: str, *, deadline: Deadline | None = None
) -> frozenset[str] | None:
    """Return the types of hosted tools that a fumehood gateway announces for a model, `*` for all; None if it, or
    another server, announces none. It is asked once for each model.
    """
    if not is_fumehood_gateway(client, deadline=deadline):
        return None
    known = _announced_tools.setdefault(client, {})
    if model not in known:
        import openai

        try:
            card = _with_probe_timeout(client, deadline).models.retrieve(model)
            tools = (card.model_extra or {}).get(_TOOLS_FIELD)
            known[model] = frozenset(map(str, cast(list[object], tools))) if isinstance(tools, list) else None
        except openai.APIStatusError:  # a model of a pattern, or a key without the scope
            known[model] = None
        except openai.OpenAIError:
            return None  # unreachable; the next caller tries again
    return known[model]


def _with_probe_timeout(client: "OpenAI", deadline: Deadline | None) -> "OpenAI":
    seconds = _PROBE_SECONDS if deadline is None else deadline.remaining().total_seconds()
    return client.with_options(max_retries=0, timeout=min(_PROBE_SECONDS, max(seconds, 0.001)))


def _classify_error(error: Exception, prompt_name: str) -> TransientFailure:
    """Return a TransientFailure for an error that may be retried; raise others as errors of the client."""
    import openai

    # The SDK does not translate errors while a body is read, and the HTTP library may change.
    broke_off = any(kind.__name__ == "TransportError" for kind in type(error).__mro__)
    if isinstance(error, openai.APIConnectionError) or broke_off:
        return TransientFailure(error, message=f"{error} ({_error_origin(error)})")
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
