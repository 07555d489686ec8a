"""Observers: context managers around the steps of an evaluation.

Events report what has happened. An observer is entered when a step starts and left when it ends, with the exception
that ended it, if any.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, Self

from fumehood.client.budget import TokenUsage


@dataclass(frozen=True, kw_only=True)
class EvaluationStarted:
    """An evaluation starts; nothing has been validated yet."""

    prompt_name: str
    adapter: str
    model: str
    session_id: str | None


@dataclass(frozen=True, kw_only=True)
class ModelRequestStarted:
    """A request is about to be sent to `base_url`, with retries.

    operation: "chat", or "compact" for the compaction of a conversation.
    memory_limit: of the code interpreter's container, if known.
    """

    operation: str
    adapter: str
    base_url: str
    request: Mapping[str, Any]
    memory_limit: str | None = None


@dataclass(frozen=True, kw_only=True)
class ModelResponseReceived:
    """A request has been answered. finish_reason: "stop", or why the response ended otherwise."""

    id: str
    model: str
    request_id: str | None
    finish_reason: str
    usage: TokenUsage | None
    output: Sequence[Mapping[str, Any]]
    container_ids: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class ToolCallStarted:
    """The model has called a function. exists: whether the prompt has a function of that name."""

    name: str
    call_id: str | None
    exists: bool


class RequestObserver(Protocol):
    """A request in progress."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers to add to the request."""
        ...

    def on_response(self, answer: ModelResponseReceived, /) -> None: ...


class EvaluationObserver(Protocol):
    """Observes the evaluations of an adapter, in the evaluating thread. What it raises ends the evaluation."""

    def observe_evaluation(self, evaluation: EvaluationStarted, /) -> AbstractContextManager[object]: ...

    def observe_request(
        self, question: ModelRequestStarted, /
    ) -> AbstractContextManager[RequestObserver]: ...

    def observe_tool_call(self, call: ToolCallStarted, /) -> AbstractContextManager[object]:
        """A function of the prompt runs; its ToolInvoked is published within. Not called for tools of the provider."""
        ...

    def publish(self, event: object, /) -> None:
        """Called with every event of the evaluation."""
        ...


class _NoopObserver:
    """Ignores everything. It is its own context manager and observation for every step."""

    headers: Mapping[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def ignore(self, *_: object) -> None:
        """Do nothing."""

    def ignore_step(self, *_: object) -> Self:
        return self

    __exit__ = on_response = publish = ignore
    observe_evaluation = observe_request = observe_tool_call = ignore_step


NOOP_OBSERVER: EvaluationObserver = _NoopObserver()
