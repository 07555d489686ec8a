"""Who sees an evaluation from within, beginnings and failures too.

Events tell what has happened. An observer is there while it happens: each step is entered when it begins and left when
it is over, with the exception that ended it, if one did.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, Self

from fumehood.client.budget import TokenUsage


@dataclass(frozen=True, kw_only=True)
class EvaluationStarted:
    """Somebody wants a prompt evaluated; nothing of it has been looked at."""

    prompt_name: str
    adapter: str
    model: str
    session_id: str | None


@dataclass(frozen=True, kw_only=True)
class ModelRequestStarted:
    """A request is about to be sent to `base_url`, and repeated if it has to be.

    operation: "chat", or "compact" for a conversation that is made shorter.
    memory_limit: of the code interpreter's container, where it is known.
    """

    operation: str
    adapter: str
    base_url: str
    request: Mapping[str, Any]
    memory_limit: str | None = None


@dataclass(frozen=True, kw_only=True)
class ModelResponseReceived:
    """A request has been answered; `end` is "stop", or why the answer ended otherwise."""

    id: str
    model: str
    request_id: str | None
    finish_reason: str
    usage: TokenUsage | None
    output: Sequence[Mapping[str, Any]]
    container_ids: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class ToolCallStarted:
    """The model has called a function; `exists`: there is one of that name."""

    name: str
    call_id: str | None
    exists: bool


class RequestObservation(Protocol):
    """A request that is under way."""

    @property
    def headers(self) -> Mapping[str, str]:
        """What is to be sent along with the request."""
        ...

    def on_response(self, answer: ModelResponseReceived, /) -> None: ...


class EvaluationObserver(Protocol):
    """Sees the evaluations of an adapter, in the thread that evaluates. What it raises ends the evaluation."""

    def observe_evaluation(self, evaluation: EvaluationStarted, /) -> AbstractContextManager[object]: ...

    def observe_request(
        self, question: ModelRequestStarted, /
    ) -> AbstractContextManager[RequestObservation]: ...

    def observe_tool_call(self, call: ToolCallStarted, /) -> AbstractContextManager[object]:
        """A function of the prompt's; its ToolInvoked is published within. What the provider runs is not told here."""
        ...

    def publish(self, event: object, /) -> None:
        """Every event of the evaluation."""
        ...


class _NoopObservation:
    """A step that nobody watches."""

    headers: Mapping[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def on_response(self, *_: object) -> None:
        pass


class _NoopObserver:
    """Sees nothing."""

    _step = _NoopObservation()

    def observe_evaluation(self, *_: object) -> _NoopObservation:
        return self._step

    def observe_request(self, *_: object) -> _NoopObservation:
        return self._step

    def observe_tool_call(self, *_: object) -> _NoopObservation:
        return self._step

    def publish(self, *_: object) -> None:
        pass


NOOP_OBSERVER: EvaluationObserver = _NoopObserver()
