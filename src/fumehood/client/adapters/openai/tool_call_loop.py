"""The loop of one prompt: request, run the called functions, request again.

The loop does no I/O: its steps yield operations, which a shell performs. Until its end, only events are visible; the
session's conversation changes when there is an answer.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fumehood.client import serde
from fumehood.client.adapters.openai.compaction import (
    CompactionManager,
    CompactionState,
    LastModel,
    Transcript,
    estimate_tokens,
)
from fumehood.client.adapters.openai.container_errors import ContainerGoneError, build_container_error
from fumehood.client.adapters.openai.input_items import build_prompt_items, replace_prompt_text
from fumehood.client.adapters.openai.native_tool_result import build_provider_result
from fumehood.client.adapters.openai.responses_client import ResponsesClient
from fumehood.client.adapters.openai.wire import (
    Item,
    ProviderToolCallData,
    WireResponse,
    find_cited_files,
    find_container_ids,
    find_function_calls,
    find_provider_calls,
    iter_annotations,
    normalize_input_messages,
    read_last_message,
)
from fumehood.client.adapters.provider_adapter import PromptResponse
from fumehood.client.adapters.stream_events import (
    EvaluationEvent,
    EvaluationFinished,
    FunctionCallFinished,
    TurnFinished,
)
from fumehood.client.adapters.tool_execution import ToolExecutor
from fumehood.client.budget import TokenUsage
from fumehood.client.dbc import ensure
from fumehood.client.errors import (
    CompactionError,
    ContainerExpiredError,
    DeadlineExceededError,
    FilteredOutputError,
    PromptEvaluationError,
)
from fumehood.client.prompt.prompt import RenderedPrompt
from fumehood.client.prompt.structured_output import parse_structured_output
from fumehood.client.prompt.tool import (
    ProviderTool,
    ToolContext,
    index_tools_by_name,
    is_async_function,
    select_provider_tools,
)
from fumehood.client.runtime.events import PromptExecuted, PromptRendered
from fumehood.client.runtime.operations import CallFunction, EmitEvent, Steps, perform

_log = logging.getLogger(__name__)


@dataclass
class ToolCallLoop[Out]:
    """The requests and function calls of one evaluation; `run` is called once, and its steps are run by a shell.

    request: what all its requests have in common: everything but the input.
    recreate_container: replaces an expired container and returns the new id and the prompt's text, which may name paths
    in it; None if the container is not ours.
    memory_limit: of the workspace's container.
    manager: keeps the session's conversation; without one, every evaluation starts anew.
    prompt_items: the prompt's text, then its files and pictures if they are a message of their own.
    """

    api: ResponsesClient
    rendered: RenderedPrompt[Out]
    context: ToolContext
    request: dict[str, Any]
    executor: ToolExecutor
    manager: CompactionManager | None
    recreate_container: Callable[[str], Steps[tuple[str, str]]] | None
    memory_limit: str | None
    parse_output: bool
    max_turns: int
    is_streamed: bool = False
    prompt_items: list[Item] = field(default_factory=list[Item])
    usage: TokenUsage = field(default_factory=TokenUsage)
    transcript: list[Item] = field(default_factory=list[Item])
    history: list[Item] = field(default_factory=list[Item])  # of the session, since its last compaction
    items_before_compaction: int = 0  # number of history items from before the last compaction

    def run(self) -> Steps[PromptResponse[Out]]:
        session = self.context.session
        conversation = session[Transcript].all(), session[CompactionState].all()
        try:
            response = yield from self._run_turns()
            answer = self._build_answer(response)
        except BaseException:
            if self.manager is not None:
                # Without an answer there is no turn to keep, even if the conversation was compacted meanwhile.
                session[Transcript].seed(*conversation[0])
                session[CompactionState].seed(*conversation[1])
            raise
        yield from self._finish(answer, response)
        yield from self._emit(EvaluationFinished(answer))
        return answer

    def _run_turns(self) -> Steps[WireResponse]:
        """Return the response that answers the prompt."""
        self._publish(
            PromptRendered,
            rendered_prompt=self.rendered.text,
            tool_choice=self.request.get("tool_choice", "auto"),
        )
        past = self.context.session[Transcript].latest() if self.manager else None
        self.history = [dict(item) for item in past.items] if past else []
        self.prompt_items = build_prompt_items(
            self.rendered.text,
            self.rendered.attachments,
            starts_conversation=self.manager is None or not self.manager.has_conversation,
        )
        self._append_items(self.prompt_items)
        self._warn_about_large_prompt()
        for number in range(1, self.max_turns + 1):
            response = yield from self._request_response(number)
            self._check_finish_reason(response)
            self._append_items(response.output)
            yield from self._publish_provider_calls(response)
            usage = response.usage.as_token_usage() if response.usage else TokenUsage()
            yield from self._emit(TurnFinished(number, response.id, usage))
            calls = find_function_calls(response.output)
            if not calls:
                return response
            for call in calls:
                output = yield from self._run_function(call)
                self._append_items([output])
            self._reset_tool_choice()
            if (yield from self._compact_between_turns(response)):
                # The task itself must not be summarised.
                self.history, self.items_before_compaction = [*self.prompt_items], len(self.prompt_items)
        raise PromptEvaluationError(
            f"There was no answer after {self.max_turns} turns; raise max_turns, or look at what its tools say.",
            prompt_name=self.rendered.prompt_name,
            phase="response",
        )

    # ---- requests ---------------------------------------------------------------------------------------------

    def _request_response(self, turn: int) -> Steps[WireResponse]:
        self._check_limits("the next request")
        try:
            response = yield from self._send(turn)
        except ContainerGoneError as gone:
            yield from self._replace_container(gone)
            try:
                response = yield from self._send(turn)
            except ContainerGoneError as again:
                raise ContainerExpiredError(_find_container_id(self.request) or "", again) from again
        usage = response.usage.as_token_usage() if response.usage else TokenUsage()
        self.usage += usage
        if self.context.budget_tracker is not None:
            self.context.budget_tracker.record(usage)
        self._log_response(response, usage)
        return response

    def _send(self, turn: int) -> Steps[WireResponse]:
        window = self.manager.inject_encrypted_items(self.history) if self.manager else self.history
        request = {**self.request, "input": normalize_input_messages(window)}
        ensure(
            all(
                "container" in tool for tool in request.get("tools", ()) if tool["type"] == "code_interpreter"
            ),
            "a code interpreter is sent without a container",
        )
        return self.api.create(
            request,
            prompt_name=self.rendered.prompt_name,
            deadline=self.context.deadline,
            memory_limit=self.memory_limit or _find_memory_limit(request),
            streamed_turn=turn if self.is_streamed else None,
        )

    def _replace_container(self, error: ContainerGoneError) -> Steps[None]:
        known = _find_container_id(self.request) or "(unknown)"
        if self.recreate_container is None:
            raise build_container_error(known, error, "make another one") from error
        made, text = yield from self.recreate_container(known)
        replace_prompt_text(self.prompt_items[0], text)
        for tool in self.request["tools"]:
            if tool["type"] == "code_interpreter":
                tool["container"] = made

    def _reset_tool_choice(self) -> None:
        """Reset a forced tool choice after the first call: otherwise there would never be an answer."""
        if self.request.get("tool_choice") not in (None, "none"):
            self.request["tool_choice"] = "auto"

    def _check_limits(self, next_step: str) -> None:
        name = self.rendered.prompt_name
        if self.context.deadline is not None:
            self.context.deadline.check(next_step, prompt_name=name)
        if self.context.budget_tracker is not None:
            self.context.budget_tracker.check(next_step, prompt_name=name)

    def _check_finish_reason(self, response: WireResponse) -> None:
        """Raise unless the response can lead to an answer."""
        end = response.finish_reason
        if end == "stop":
            if read_last_message(response.output) or find_function_calls(response.output):
                return
            raise PromptEvaluationError(
                "The answer is empty: the response has neither text nor a call of a function.",
                **self._error_fields(response.output),
            )
        required = self.rendered.output is not None or not read_last_message(response.output)
        if end in ("content_filter", "refusal") and required:
            raise FilteredOutputError(
                f"The provider withheld the answer ({end}).",
                **self._error_fields(response.incomplete_details or response.output),
            )
        if response.status not in ("completed", "incomplete", None):
            message = (response.error or {}).get("message") or f"its status is {end}"
            raise PromptEvaluationError(
                f"The response failed: {message}", **self._error_fields(response.error)
            )
        if required and not find_function_calls(response.output):
            raise PromptEvaluationError(
                f"The answer was cut off ({end}) before it was whole.",
                **self._error_fields(response.incomplete_details),
            )
        _log.warning("The answer to %s was cut off: %s", self.rendered.prompt_name, end)

    def _error_fields(self, payload: object) -> dict[str, Any]:
        return {"prompt_name": self.rendered.prompt_name, "phase": "response", "provider_payload": payload}

    # ---- tools ----------------------------------------------------------------------------------------------

    def _run_function(self, call: Item) -> Steps[Item]:
        """Run a function and return its output item."""
        name, call_id = str(call.get("name")), call.get("call_id")
        self._check_limits(f"the tool {name!r}")
        tool = index_tools_by_name(self.rendered.tools).get(name)
        event = yield from self.executor.run(
            None if isinstance(tool, ProviderTool) else tool,
            name,
            call.get("arguments"),
            call_id if isinstance(call_id, str) else None,
        )
        yield from self._emit(FunctionCallFinished(name, event.call_id, event.result, event.rendered_output))
        return {"type": "function_call_output", "call_id": call_id, "output": event.rendered_output}

    def _publish_provider_calls(self, response: WireResponse) -> Steps[None]:
        """Publish ToolInvoked for each call that the provider has run."""
        tools = {one.native_type: one for one in select_provider_tools(self.rendered.tools)}
        for data in find_provider_calls(response.output):
            tool = tools.get(data.name)
            name = tool.name if tool is not None else data.name
            yield from self.executor.execute_and_publish(
                name,
                data.call_id,
                data,
                partial(_handler_input, tool, data),
                partial(self._call_provider_handler, tool),
                lambda result: result.message,
            )

    def _call_provider_handler(self, tool: ProviderTool[Any, Any, Any] | None, report: Any) -> Steps[object]:
        """Call the tool's handler with the provider's report."""
        if tool is None:
            return build_provider_result(report, self.context)
        handle = tool.handle_provider_output
        if handle is None:
            return (yield from self.executor.call_handler(tool, report))
        call = partial(handle, report, self.context, tool.result_type)
        return (yield from perform(CallFunction[object](call, is_async_function(handle))))

    # ---- answer and compaction ------------------------------------------------------------

    def _build_answer(self, response: WireResponse) -> PromptResponse[Out]:
        text = read_last_message(response.output)
        notes = tuple(iter_annotations(response.output))
        return PromptResponse[Out](
            prompt_name=self.rendered.prompt_name,
            text=text,
            output=parse_structured_output(text, self.rendered) if self.parse_output else None,
            annotations=notes,
            files=find_cited_files([*iter_annotations(self.transcript)]),
            usage=self.usage,
            transcript=tuple(self.transcript),
        )

    def _finish(self, answer: PromptResponse[Out], response: WireResponse) -> Steps[None]:
        """Store the conversation, publish the answer, and compact."""
        session = self.context.session
        session[LastModel].seed(LastModel(self.request["model"]))
        if self.manager is not None:
            session[Transcript].seed(Transcript(tuple(self.history)))
        self._publish(PromptExecuted, result=answer, usage=self.usage)
        try:
            yield from self._compact_if_needed(response)
        except CompactionError as error:
            if isinstance(error.original_error, DeadlineExceededError):
                # The answer is here and in time; the next evaluation compacts.
                _log.warning("There was no time left to compact the conversation of %s.", answer.prompt_name)
                return
            error.response = answer
            raise

    def _compact_between_turns(self, response: WireResponse) -> Steps[bool]:
        """As `_compact_if_needed`, before an answer: a missed deadline ends the evaluation."""
        try:
            return (yield from self._compact_if_needed(response))
        except CompactionError as error:
            if isinstance(error.original_error, DeadlineExceededError):
                raise error.original_error from error
            raise

    def _compact_if_needed(self, response: WireResponse) -> Steps[bool]:
        """Compact if needed; return whether it was."""
        tokens = response.usage.total_tokens if response.usage else 0
        if self.manager is None or not self.manager.should_compact(tokens):
            return False
        if find_provider_calls(response.output):
            tokens = (yield from self._count_window(self.manager)) or tokens
            if not self.manager.should_compact(tokens):
                return False
        if not self.manager.is_worthwhile(self.history[self.items_before_compaction :]):
            self._warn_about_large_window(tokens)
            return False
        yield from self.manager.compact_steps(self.history, deadline=self.context.deadline)
        self.context.session[Transcript].clear()
        return True

    def _count_window(self, manager: CompactionManager) -> Steps[int | None]:
        """Count the tokens of the conversation. The usage of a response with provider calls does not say it: it sums up
        several model turns.
        """
        window = normalize_input_messages(manager.inject_encrypted_items(self.history))
        request = {name: self.request[name] for name in ("model", "tools") if name in self.request}
        return self.api.count_tokens({**request, "input": window}, deadline=self.context.deadline)

    def _warn_about_large_prompt(self) -> None:
        tokens = estimate_tokens(self.prompt_items)
        if self.manager is not None and tokens > self.manager.threshold // 2:
            _log.warning(
                "The prompt %s has about %d tokens, more than half of threshold_tokens (%d): the conversation can "
                "exceed it until the prompt is answered and compacted.",
                self.rendered.prompt_name,
                tokens,
                self.manager.threshold,
            )

    def _warn_about_large_window(self, tokens: int) -> None:
        """Warn once per compaction."""
        if self.manager is not None and self.history[0] is self.prompt_items[0]:
            _log.warning(
                "The conversation of %s has %d tokens right after its compaction, more than threshold_tokens (%d); it "
                "is compacted again when there is more to gain. Raise the threshold, or have fewer tools.",
                self.rendered.prompt_name,
                tokens,
                self.manager.threshold,
            )

    def _append_items(self, items: list[Item]) -> None:
        self.transcript += items
        self.history += items

    def _emit(self, event: EvaluationEvent[Out]) -> Steps[None]:
        """Give an event to the consumer of the stream, if there is one."""
        if self.is_streamed:
            yield from perform(EmitEvent(event))

    def _publish(self, event: Callable[..., object], **fields: object) -> None:
        self.context.event_bus.publish(
            event(
                prompt_name=self.rendered.prompt_name,
                adapter=self.context.adapter.provider,
                session_id=self.context.session.session_id,
                **fields,
            )
        )

    def _log_response(self, response: WireResponse, usage: TokenUsage) -> None:
        """Log names, ids and sizes; never content or keys."""
        fields = {
            "prompt": self.rendered.prompt_name,
            "request_id": response.request_id,
            "response_id": response.id,
            "model": response.model or self.request["model"],
            "max_output_tokens": self.request.get("max_output_tokens"),
            "container_ids": find_container_ids(response.output) or [_find_container_id(self.request)],
            "memory_limit": self.memory_limit or _find_memory_limit(self.request),
            "input_tokens": usage.input_tokens,
            "output_tokens": usage.output_tokens,
        }
        _log.info(
            "evaluated %s",
            " ".join(f"{name}={value}" for name, value in fields.items()),
            extra={"fumehood": fields},
        )


def _handler_input(tool: ProviderTool[Any, Any, Any] | None, data: ProviderToolCallData) -> object:
    """Return what a handler gets: the whole report, or the parameters for an ordinary handler."""
    if tool is None or tool.handle_provider_output is not None:
        return data
    params: object = serde.decode(data.arguments, object) if data.arguments else dict(data.raw)
    return serde.convert(params, tool.params_type)


def _find_container(request: Mapping[str, Any]) -> Any:
    for tool in request.get("tools", ()):
        if tool["type"] == "code_interpreter":
            return tool.get("container")
    return None


def _find_container_id(request: Mapping[str, Any]) -> str | None:
    found = _find_container(request)
    return found if isinstance(found, str) else None


def _find_memory_limit(request: Mapping[str, Any]) -> str | None:
    found = _find_container(request)
    return found.get("memory_limit") if found and not isinstance(found, str) else None
