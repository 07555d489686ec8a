"""One evaluation of one prompt: ask, run what the model calls, ask again; imports siblings,
`shared` and the runtime.

Nothing of it is seen before its end but the events; the session's conversation changes only when there is an answer,
or when it is compacted on the way.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fumehood.client import serde
from fumehood.client.adapters.core import PromptResponse
from fumehood.client.adapters.openai.api import ContainerGoneError, ResponsesApi
from fumehood.client.adapters.openai.code_interpreter import CodeInterpreterResult, code_interpreter_output
from fumehood.client.adapters.openai.compaction import (
    CompactionManager,
    ModelUsed,
    Transcript,
    estimate_tokens,
)
from fumehood.client.adapters.openai.wire import (
    Item,
    ProviderToolCallData,
    WireResponse,
    annotations,
    citations,
    containers,
    function_calls,
    normalize_input_messages,
    provider_calls,
    text_of,
)
from fumehood.client.adapters.shared import ToolExecutor
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
from fumehood.client.prompt.tool import ProviderTool, ToolContext, ToolResult, by_name, provider_tools
from fumehood.client.runtime.events import PromptExecuted, PromptRendered

_log = logging.getLogger(__name__)


@dataclass
class Evaluation[Out]:
    """One evaluation of one prompt; `run` is called once.

    request: what every request of it has in common, that is, everything but the input.

    new_container: makes another container for the one that has expired, and gives its id and the prompt's text, which
    may say where in it the files are; None if it is not ours.
    memory_limit: of the workspace's container.
    manager: keeps the conversation of the session; without one, every evaluation starts afresh.
    task: the message with the prompt's text: of the system if it begins the conversation, else of the user.
    """

    api: ResponsesApi
    rendered: RenderedPrompt[Out]
    context: ToolContext
    request: dict[str, Any]
    executor: ToolExecutor
    manager: CompactionManager | None
    new_container: Callable[[str], tuple[str, str]] | None
    memory_limit: str | None
    parse_output: bool
    max_turns: int
    task: Item = field(default_factory=lambda: {"role": "system", "content": ""})
    usage: TokenUsage = field(default_factory=TokenUsage)
    transcript: list[Item] = field(default_factory=list[Item])
    history: list[Item] = field(default_factory=list[Item])  # of the session, since its last compaction
    repeated: int = 0  # how many items of the history stand before the last compaction, too

    def run(self) -> PromptResponse[Out]:
        self._publish(
            PromptRendered,
            rendered_prompt=self.rendered.text,
            tool_choice=self.request.get("tool_choice", "auto"),
        )
        past = self.context.session[Transcript].latest() if self.manager else None
        self.history = [dict(item) for item in past.items] if past else []
        self.task["content"] = self.rendered.text
        if self.manager is not None and self.manager.has_begun:
            self.task["role"] = "user"  # the first turn alone is the system's
        self._keep([self.task])
        self._warn_of_a_large_turn()
        for _ in range(self.max_turns):
            response = self._ask()
            self._check_end(response)
            self._keep(response.output)
            self._tell_provider_calls(response)
            calls = function_calls(response.output)
            if not calls:
                return self._answer(response)
            self._keep([self._run(call) for call in calls])
            self._let_choose()
            if self._compacted(response):
                self.history, self.repeated = (
                    [self.task],
                    1,
                )  # the task itself must not be a matter of summaries
        raise PromptEvaluationError(
            f"There was no answer after {self.max_turns} turns; raise max_turns, or look at what its tools say.",
            prompt_name=self.rendered.prompt_name,
            phase="response",
        )

    # ---- asking ---------------------------------------------------------------------------------------------

    def _ask(self) -> WireResponse:
        self._check_limits("the next request")
        try:
            response = self._send()
        except ContainerGoneError as gone:
            self._replace_container(gone)
            try:
                response = self._send()
            except ContainerGoneError as again:
                raise ContainerExpiredError(_container_id(self.request) or "", again) from again
        usage = response.usage.as_token_usage() if response.usage else TokenUsage()
        self.usage += usage
        if self.context.budget_tracker is not None:
            self.context.budget_tracker.record(usage)
        self._log_response(response, usage)
        return response

    def _send(self) -> WireResponse:
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
            memory_limit=self.memory_limit or _tier_of(request),
        )

    def _replace_container(self, gone: ContainerGoneError) -> None:
        known = _container_id(self.request) or "(unknown)"
        if self.new_container is None:
            raise ContainerExpiredError(
                known, gone, f"The container {known!r} has expired; make another one."
            ) from gone
        made, self.task["content"] = self.new_container(known)
        for tool in self.request["tools"]:
            if tool["type"] == "code_interpreter":
                tool["container"] = made

    def _let_choose(self) -> None:
        """A forced choice is for the first call; forced for ever, there would be no answer."""
        if self.request.get("tool_choice") not in (None, "none"):
            self.request["tool_choice"] = "auto"

    def _check_limits(self, doing: str) -> None:
        name = self.rendered.prompt_name
        if self.context.deadline is not None:
            self.context.deadline.check(doing, prompt_name=name)
        if self.context.budget_tracker is not None:
            self.context.budget_tracker.check(doing, prompt_name=name)

    def _check_end(self, response: WireResponse) -> None:
        """Raise if there will be no answer."""
        end = response.end
        if end == "stop":
            return
        required = self.rendered.output is not None or not text_of(response.output)
        if end in ("content_filter", "refusal") and required:
            raise FilteredOutputError(
                f"The provider withheld the answer ({end}).",
                **self._failure(response.incomplete_details or response.output),
            )
        if response.status not in ("completed", "incomplete", None):
            said = (response.error or {}).get("message") or f"its status is {end}"
            raise PromptEvaluationError(f"The response failed: {said}", **self._failure(response.error))
        if required and not function_calls(response.output):
            raise PromptEvaluationError(
                f"The answer was cut off ({end}) before it was whole.",
                **self._failure(response.incomplete_details),
            )
        _log.warning("The answer to %s was cut off: %s", self.rendered.prompt_name, end)

    def _failure(self, payload: object) -> dict[str, Any]:
        return {"prompt_name": self.rendered.prompt_name, "phase": "response", "provider_payload": payload}

    # ---- tools ----------------------------------------------------------------------------------------------

    def _run(self, call: Item) -> Item:
        """Run a function, and give what the model gets to read."""
        name, call_id = str(call.get("name")), call.get("call_id")
        self._check_limits(f"the tool {name!r}")
        tool = by_name(self.rendered.tools).get(name)
        output = self.executor.run(
            None if isinstance(tool, ProviderTool) else tool,
            name,
            call.get("arguments"),
            call_id if isinstance(call_id, str) else None,
        )
        return {"type": "function_call_output", "call_id": call_id, "output": output}

    def _tell_provider_calls(self, response: WireResponse) -> None:
        """One ToolInvoked for each call that the provider has run."""
        tools = {one.native_type: one for one in provider_tools(self.rendered.tools)}
        for data in provider_calls(response.output):
            tool = tools.get(data.name)
            name = tool.name if tool is not None else data.name
            self.executor.tell(
                name,
                data.call_id,
                data,
                partial(_report, tool, data),
                partial(self._result, tool),
                lambda result: result.message,
            )

    def _result(self, tool: ProviderTool[Any, Any, Any] | None, report: Any) -> object:
        """What the tool's own handlers make of a report."""
        if tool is None:
            return _plain_result(report, self.context)
        if tool.handle_provider_output is not None:
            return tool.handle_provider_output(report, self.context, tool.result_type)
        return self.executor.handled(tool, report)

    # ---- the end --------------------------------------------------------------------------------------------

    def _answer(self, response: WireResponse) -> PromptResponse[Out]:
        text = text_of(response.output)
        notes = tuple(annotations(response.output))
        answer = PromptResponse[Out](
            prompt_name=self.rendered.prompt_name,
            text=text,
            output=parse_structured_output(text, self.rendered) if self.parse_output else None,
            annotations=notes,
            files=citations([*annotations(self.transcript)]),
            usage=self.usage,
            transcript=tuple(self.transcript),
        )
        session = self.context.session
        session[ModelUsed].seed(ModelUsed(self.request["model"]))
        if self.manager is not None:
            session[Transcript].seed(Transcript(tuple(self.history)))
        self._publish(PromptExecuted, result=answer, usage=self.usage)
        try:
            self._compact(response)
        except CompactionError as error:
            if isinstance(error.original_error, DeadlineExceededError):
                # There is an answer, and in time; the next evaluation compacts.
                _log.warning("There was no time left to compact the conversation of %s.", answer.prompt_name)
                return answer
            error.response = answer
            raise
        return answer

    def _compacted(self, response: WireResponse) -> bool:
        """As `_compact`, on the way to an answer: when there is no time left for it, there is none for the answer."""
        try:
            return self._compact(response)
        except CompactionError as error:
            if isinstance(error.original_error, DeadlineExceededError):
                raise error.original_error from error
            raise

    def _compact(self, response: WireResponse) -> bool:
        """Compact if it is time to; whether it was."""
        tokens = response.usage.total_tokens if response.usage else 0
        if self.manager is None or not self.manager.should_compact(tokens):
            return False
        if provider_calls(response.output):
            tokens = self._count_window(self.manager) or tokens
            if not self.manager.should_compact(tokens):
                return False
        if not self.manager.is_worthwhile(self.history[self.repeated :]):
            self._warn_of_a_large_window(tokens)
            return False
        self.manager.compact(self.history, deadline=self.context.deadline)
        self.context.session[Transcript].clear()
        return True

    def _count_window(self, manager: CompactionManager) -> int | None:
        """The tokens of the conversation. With calls of the provider's own, a response has several turns of the model,
        and its usage is that of all of them together: many times the conversation.
        """
        window = normalize_input_messages(manager.inject_encrypted_items(self.history))
        request = {name: self.request[name] for name in ("model", "tools") if name in self.request}
        return self.api.count_tokens({**request, "input": window}, deadline=self.context.deadline)

    def _warn_of_a_large_turn(self) -> None:
        tokens = estimate_tokens([self.task])
        if self.manager is not None and tokens > self.manager.threshold // 2:
            _log.warning(
                "The prompt %s has about %d tokens, more than half of threshold_tokens (%d): the conversation can "
                "exceed it until the prompt is answered and compacted.",
                self.rendered.prompt_name,
                tokens,
                self.manager.threshold,
            )

    def _warn_of_a_large_window(self, tokens: int) -> None:
        """Once for each compaction."""
        if self.manager is not None and self.history[0] is self.task:
            _log.warning(
                "The conversation of %s has %d tokens right after its compaction, more than threshold_tokens (%d); it "
                "is compacted again when there is more to gain. Raise the threshold, or have fewer tools.",
                self.rendered.prompt_name,
                tokens,
                self.manager.threshold,
            )

    def _keep(self, items: list[Item]) -> None:
        self.transcript += items
        self.history += items

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
        """Names, ids and sizes; never contents, never keys."""
        fields = {
            "prompt": self.rendered.prompt_name,
            "request_id": response.request_id,
            "response_id": response.id,
            "model": response.model or self.request["model"],
            "max_output_tokens": self.request.get("max_output_tokens"),
            "container_ids": containers(response.output) or [_container_id(self.request)],
            "memory_limit": self.memory_limit or _tier_of(self.request),
            "input_tokens": usage.input_tokens,
            "output_tokens": usage.output_tokens,
        }
        _log.info(
            "evaluated %s",
            " ".join(f"{name}={value}" for name, value in fields.items()),
            extra={"fumehood": fields},
        )


def _report(tool: ProviderTool[Any, Any, Any] | None, data: ProviderToolCallData) -> object:
    """What the tool gets to see of a call: all of it, or, if it has an ordinary handler alone, the parameters."""
    if tool is None or tool.handle_provider_output is not None:
        return data
    said: object = serde.decode(data.arguments, object) if data.arguments else dict(data.raw)
    return serde.convert(said, tool.params_type)


def _plain_result(data: ProviderToolCallData, context: ToolContext) -> ToolResult[Any]:
    """The result of a native tool for which the prompt has no Tool."""
    if data.name == "code_interpreter":
        return code_interpreter_output(data, context, CodeInterpreterResult)
    return ToolResult(f"{data.name}: {data.status or 'completed'}", data, success=data.status != "failed")


def _container(request: Mapping[str, Any]) -> Any:
    for tool in request.get("tools", ()):
        if tool["type"] == "code_interpreter":
            return tool.get("container")
    return None


def _container_id(request: Mapping[str, Any]) -> str | None:
    found = _container(request)
    return found if isinstance(found, str) else None


def _tier_of(request: Mapping[str, Any]) -> str | None:
    found = _container(request)
    return found.get("memory_limit") if found and not isinstance(found, str) else None
