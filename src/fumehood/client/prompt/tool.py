"""Tools that the model can call: functions of this process, and tools of the provider."""

import inspect
import re
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Never, Protocol, TypeVar, cast, overload

from fumehood.client.dbc import require
from fumehood.client.prompt._types import NoParams, RuntimeGeneric
from fumehood.client.type_validation import check_arguments

if TYPE_CHECKING:
    from fumehood.client import serde
    from fumehood.client.adapters.provider_adapter import ProviderAdapter
    from fumehood.client.budget import BudgetTracker
    from fumehood.client.deadlines import Deadline
    from fumehood.client.filesystem import Filesystem
    from fumehood.client.prompt.prompt import Prompt, RenderedPrompt
    from fumehood.client.resources import ResourceRegistry
    from fumehood.client.runtime.events import EventBus
    from fumehood.client.runtime.session import SessionProtocol

P_contra = TypeVar("P_contra", contravariant=True)
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

_NAME = re.compile(r"[a-z0-9_-]{1,64}\Z")
MAX_DESCRIPTION = 1024
_SIGNATURE = "a function (params, *, context)"


# --- results ------------------------------------------------------------------------------------------


class _SuccessConstructor:
    """`ToolResult.success(value)`."""

    def __call__[T](self, value: T, message: str = "") -> "ToolResult[T]":
        return ToolResult(message, value)


class _SuccessDescriptor:
    """A constructor on the class, a bool on an instance."""

    @overload
    def __get__(self, instance: None, owner: type[Any]) -> _SuccessConstructor: ...
    @overload
    def __get__(self, instance: "ToolResult[Any]", owner: type[Any]) -> bool: ...
    def __get__(self, instance: "ToolResult[Any] | None", owner: type[Any]) -> _SuccessConstructor | bool:
        return _SuccessConstructor() if instance is None else not instance.failed


class ToolResult(Generic[R_co]):  # noqa: UP046 - covariant, though its attributes can be set
    """The result of a tool: a message for the model, and a value for subscribers.

    `ToolResult.success(value)` and `ToolResult.ok(value)` create a successful result, `ToolResult.error(message)` a
    failed one. On an instance, `success` says which.
    """

    __slots__ = ("exclude_value_from_context", "failed", "message", "value")

    success = _SuccessDescriptor()

    def __init__(
        self,
        message: str,
        value: R_co | None = None,
        success: bool = True,
        *,
        exclude_value_from_context: bool = False,
    ) -> None:
        """exclude_value_from_context: show only the message to the model."""
        self.message = message
        self.value: R_co | None = value
        self.failed = not success
        self.exclude_value_from_context = exclude_value_from_context

    @staticmethod
    def ok[T](value: T, message: str = "") -> "ToolResult[T]":
        return ToolResult(message, value)

    @staticmethod
    def error(message: str) -> "ToolResult[Never]":
        return ToolResult(message, None, success=False)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ToolResult):
            return NotImplemented
        theirs = cast(ToolResult[object], other)
        return (self.message, self.value, self.failed) == (theirs.message, theirs.value, theirs.failed)

    __hash__ = None  # pyright: ignore[reportAssignmentType] - values may be anything

    def __repr__(self) -> str:
        return f"ToolResult(message={self.message!r}, value={self.value!r}, success={self.success})"


@dataclass(frozen=True)
class ToolContext:
    """What a handler can use besides its parameters."""

    prompt: "Prompt[Any]"
    rendered_prompt: "RenderedPrompt[Any]"
    adapter: "ProviderAdapter"
    session: "SessionProtocol"
    event_bus: "EventBus"
    resources: "ResourceRegistry"
    deadline: "Deadline | None" = None
    budget_tracker: "BudgetTracker | None" = None
    filesystem: "Filesystem | None" = None


# --- tools --------------------------------------------------------------------------------------------


class ToolHandler(Protocol[P_contra, R_co]):
    """A handler may be asynchronous if prompts with its tool are evaluated by `aevaluate` and `astream`."""

    def __call__(
        self, params: P_contra, /, *, context: ToolContext
    ) -> ToolResult[R_co] | Awaitable[ToolResult[R_co]]: ...


@dataclass(frozen=True)
class ProviderToolCallData:
    """A call that the provider has run, as it reports it; `raw` is the item itself.

    annotations: of messages after the call.
    """

    type: str
    name: str
    id: str | None = None
    call_id: str | None = None
    arguments: str | None = None
    code: str | None = None
    container_id: str | None = None
    outputs: tuple[Mapping[str, Any], ...] = ()
    status: str | None = None
    annotations: tuple[Mapping[str, Any], ...] = ()
    raw: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)


class ProviderOutputHandler(Protocol[R]):
    """Converts the provider's report of a call to a result; `result_type` is the tool's."""

    def __call__(
        self, data: ProviderToolCallData, context: ToolContext, result_type: type[R], /
    ) -> ToolResult[R] | Awaitable[ToolResult[R]]: ...


class Tool[P, R](RuntimeGeneric):
    """A function that the model may call: name, description and handler.

    Parameter and result types come from `Tool[Query, Rows](…)`, else from the handler's annotations. Parameters are a
    dataclass.
    """

    @check_arguments
    def __init__(
        self,
        *,
        name: str,
        description: str,
        handler: ToolHandler[P, R] | None,
        accepts_overrides: bool = True,
    ) -> None:
        require(_NAME.match(name), f"The tool's name {name!r} is not 1 to 64 of a-z, 0-9, _ and -.")
        words = description.strip()
        require(
            0 < len(words) <= MAX_DESCRIPTION,
            f"The description of the tool {name!r} has {len(words)} characters, not 1 to {MAX_DESCRIPTION}.",
        )
        require(
            handler is None or _is_valid_handler(handler),
            f"The handler of the tool {name!r} is not {_SIGNATURE}.",
        )
        self.name = name
        self.description = words
        self.handler = handler
        self.accepts_overrides = accepts_overrides
        self.params_type, self.result_type = self._resolve_types()
        self._schema: serde.JsonSchema | None = None

    @property
    def parameters(self) -> "serde.JsonSchema":
        """The schema of its parameters."""
        if self._schema is None:
            from fumehood.client import serde

            self._schema = serde.build_schema(self.params_type)
        return self._schema

    def _resolve_types(self) -> tuple[type[P], type[R]]:
        params, result = self.type_argument(0), self.type_argument(1)
        if params is None or result is None:
            hinted = _handler_types(self.handler)
            params, result = params or hinted[0], result or hinted[1]
        if params is type(None) or (params is None and self.type_arguments):
            params = NoParams
        known = isinstance(params, type) and hasattr(params, "__dataclass_fields__")
        require(
            known,
            f"The parameters of the tool {self.name!r} are no dataclass; write Tool[Params, Result](…) or annotate "
            "its handler.",
        )
        return cast(Any, (params, result))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name!r})"


def _is_valid_handler(handler: Callable[..., object]) -> bool:
    """Whether it can be called as a handler."""
    try:
        inspect.signature(handler).bind(None, context=None)
    except (TypeError, ValueError):
        return False
    return True


def is_async_function(function: object) -> bool:
    """Whether calling it gives a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - an object whose class has an asynchronous one
    )


def _handler_types(handler: object) -> tuple[Any, Any]:
    """Return parameter and result types from a handler's annotations."""
    if handler is None:
        return None, None
    function = handler if hasattr(handler, "__annotations__") else getattr(handler, "__call__", handler)  # noqa: B004
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError):
        return None, None
    returned = hints.pop("return", None)
    hints.pop("context", None)
    return next(iter(hints.values()), None), next(iter(typing.get_args(returned)), None)


class ProviderTool[P, R, C](Tool[P, R]):
    """A tool that the provider runs and reports.

    provider: the provider that has it. native_type: its type there. config: its settings.
    handle_provider_output: converts the report to a result. Without it, the report is decoded into the parameters and
    the handler is called, as for any tool. Both get the same ToolContext.
    """

    @check_arguments
    def __init__(
        self,
        *,
        name: str,
        description: str,
        provider: str,
        native_type: str,
        config: C,
        handler: ToolHandler[P, R] | None = None,
        handle_provider_output: ProviderOutputHandler[R] | None = None,
        accepts_overrides: bool = True,
    ) -> None:
        super().__init__(
            name=name, description=description, handler=handler, accepts_overrides=accepts_overrides
        )
        require(
            handler is not None or handle_provider_output is not None,
            f"The tool {name!r} has neither a handler nor handle_provider_output: nobody would look at its output.",
        )
        self.provider = provider
        self.native_type = native_type
        self.config = config
        self.handle_provider_output = handle_provider_output

    def envelope(self) -> Mapping[str, object]:
        """Return its entry in `RenderedPrompt.native_tools`; validates its settings."""
        from fumehood.client import serde

        settings: Any = serde.to_builtins(self.config)
        require(
            isinstance(settings, dict),
            f"The config of the tool {self.name!r} is {self.config!r}; it has to be a dataclass or a mapping.",
        )
        return {"type": "built_in", "name": self.native_type, **settings}


type AnyTool = Tool[Any, Any]

# Returns why a tool must not be called now, or None.
type ToolPolicy = Callable[[AnyTool, Any, ToolContext], str | None]


def select_provider_tools(tools: Sequence[AnyTool]) -> list[ProviderTool[Any, Any, Any]]:
    """Return the tools that the provider runs."""
    return [cast(ProviderTool[Any, Any, Any], tool) for tool in tools if isinstance(tool, ProviderTool)]


def index_tools_by_name(tools: Sequence[AnyTool]) -> dict[str, AnyTool]:
    """Index tools by name. Raises PromptValidationError if two tools share a name, or one is not a tool."""
    found: dict[str, AnyTool] = {}
    for tool in tools:
        require(isinstance(cast(object, tool), Tool), f"{tool!r} is no tool; write Tool[Params, Result](…).")
        known = found.setdefault(tool.name, tool)
        require(known is tool, f"Two tools are called {tool.name!r}.")
    return found
