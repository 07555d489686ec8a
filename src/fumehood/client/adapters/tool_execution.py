"""Tool execution that all adapters share."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from fumehood.client import serde
from fumehood.client.errors import (
    BudgetExceededError,
    DeadlineExceededError,
    PromptEvaluationError,
    PromptValidationError,
)
from fumehood.client.prompt.tool import (
    AnyTool,
    ProviderTool,
    Tool,
    ToolContext,
    ToolPolicy,
    ToolResult,
    is_async_function,
)
from fumehood.client.runtime.evaluation_observer import NOOP_OBSERVER, EvaluationObserver, ToolCallStarted
from fumehood.client.runtime.events import ToolInvoked
from fumehood.client.runtime.operations import CallFunction, Steps, perform
from fumehood.client.runtime.session import undo_changes

_log = logging.getLogger(__name__)


def tool_to_spec(tool: AnyTool) -> dict[str, Any]:
    """Describe a tool for a provider: `{"type": "function", "function": {name, description, parameters, …}}`."""
    if isinstance(tool, ProviderTool):
        raise PromptValidationError(
            f"The tool {tool.name!r} is the provider's own; it has no function specification."
        )
    schema = tool.parameters
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": schema.body,
            "strict": schema.strict,
        },
    }


def parse_tool_arguments[P](tool: Tool[P, Any], arguments: str | None) -> P:
    """Parse the arguments that a model wrote into the tool's parameters. Raises PromptEvaluationError(phase="tool")."""
    try:
        return serde.decode(arguments or "{}", tool.params_type)
    except serde.DecodeError as error:
        raise PromptEvaluationError(
            f"The arguments of {tool.name!r} do not fit: {error}", phase="tool", provider_payload=arguments
        ) from error


def serialize_tool_message(result: ToolResult[Any]) -> str:
    """Render a result for the model. A value that is not JSON-serialisable is shown by its `repr`."""
    rendered: dict[str, object] = {"success": result.success}
    if result.message:
        rendered["message"] = _replace_surrogates(result.message)
    if result.value is None or result.exclude_value_from_context:
        return serde.encode(rendered)
    try:
        return serde.encode({**rendered, "payload": result.value})
    except (TypeError, ValueError, RecursionError):
        return serde.encode({**rendered, "payload": _replace_surrogates(repr(result.value))})


def _replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which JSON cannot encode."""
    return text.encode(errors="replace").decode()


@dataclass(frozen=True)
class ToolExecutor:
    """Runs handlers of tools and publishes ToolInvoked.

    A handler that raises leaves the session as it was before. One ToolInvoked is published in any case; only a passed
    deadline and an exhausted budget end the evaluation, any other error becomes a result.
    """

    context: ToolContext
    policies: tuple[ToolPolicy, ...] = ()
    observer: EvaluationObserver = NOOP_OBSERVER

    def run(
        self, tool: AnyTool | None, name: str, arguments: str | None, call_id: str | None
    ) -> Steps[ToolInvoked]:
        """Run a called function; the model reads the `rendered_output`. tool: None if there is no such tool."""

        def read() -> object:
            if tool is None:
                raise PromptEvaluationError(f"There is no tool {name!r}.", phase="tool")
            return parse_tool_arguments(tool, arguments)

        def act(params: object) -> Steps[object]:
            for policy in self.policies:
                check = partial(policy, cast(AnyTool, tool), params, self.context)
                if reason := (yield from perform(CallFunction(check))):
                    return ToolResult.error(f"{name!r} may not be called now: {reason}")
            return (yield from self.call_handler(cast(AnyTool, tool), params))

        with self.observer.observe_tool_call(
            ToolCallStarted(name=name, call_id=call_id, exists=tool is not None)
        ):
            return (
                yield from self.execute_and_publish(
                    name, call_id, arguments, read, act, serialize_tool_message
                )
            )

    def call_handler(self, tool: AnyTool, params: object) -> Steps[object]:
        if tool.handler is None:
            return ToolResult.error(f"{tool.name!r} has no handler.")
        call = partial(tool.handler, params, context=self.context)
        return (yield from perform(CallFunction[object](call, is_async_function(tool.handler))))

    def execute_and_publish(
        self,
        name: str,
        call_id: str | None,
        raw: object,
        parse: Callable[[], object],
        execute: Callable[[Any], Steps[object]],
        render: Callable[[ToolResult[Any]], str],
    ) -> Steps[ToolInvoked]:
        """Call `execute` with the parsed parameters, and publish its result with what `render` makes of it."""
        params = raw
        snapshot = self.context.session.snapshot()
        limit: PromptEvaluationError | None = None
        try:
            params = parse()
            result = check_result(name, (yield from execute(params)))
            rendered = render(result)
        except Exception as error:
            undo_changes(self.context.session, snapshot)
            result = ToolResult[Any].error(_format_tool_error(name, error))
            rendered = render(result)
            if isinstance(error, DeadlineExceededError | BudgetExceededError):
                limit = error
        except BaseException:  # cancelled
            undo_changes(self.context.session, snapshot)
            raise
        event = ToolInvoked(
            prompt_name=self.context.prompt.name,
            adapter=self.context.adapter.provider,
            name=name,
            params=params,
            result=result,
            session_id=self.context.session.session_id,
            call_id=call_id,
            rendered_output=rendered,
        )
        self.context.event_bus.publish(event)
        if limit is not None:
            raise limit
        return event


def check_result(name: str, result: object) -> ToolResult[Any]:
    """Return a handler's result if it is a ToolResult; else raise."""
    if not isinstance(result, ToolResult):
        raise TypeError(f"the handler of {name!r} returned {type(result).__name__}, not a ToolResult")
    found = cast(ToolResult[Any], result)
    if not isinstance(cast(object, found.message), str):
        raise TypeError(f"the handler of {name!r} returned a message that is no text: {found.message!r}")
    return found


def _format_tool_error(name: str, error: Exception) -> str:
    """Describe an error for the model."""
    if isinstance(error, PromptEvaluationError) and error.phase == "tool":
        return error.message
    _log.warning("The tool %s failed.", name, exc_info=error)
    return f"The tool {name!r} failed: {type(error).__name__}: {error}"
