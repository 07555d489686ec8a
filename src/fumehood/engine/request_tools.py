"""The tools of a request: the function that the model sees for each, who answers its calls, and what is not served.

Hosted tools run here, functions and the other client tools at the client. A tool of another type is the model server's
if that takes it; otherwise it is not served, and the client is told so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
from msgspec import Raw

from fumehood.engine.turn_output_assembler import Toolbox
from fumehood.interfaces import ConfiguredTool
from fumehood.protocol.model_turns import ModelProfile
from fumehood.protocol.name_sanitizing import sanitize_name
from fumehood.protocol.openai.api_errors import InvalidRequest
from fumehood.protocol.openai.client_tools_as_functions import describe_client_tool, is_client_tool
from fumehood.protocol.openai.responses import CreateResponse
from fumehood.protocol.openai.tool_specs import (
    CustomTool,
    FunctionTool,
    ModelToolDefinition,
    ToolChoice,
    ToolSpec,
    check_tool_name,
    is_cached_search,
    parse_tool,
)

type ModelToolChoice = Literal["none", "auto", "required"] | ModelToolDefinition | ToolSpec

_NO_PARAMETERS = Raw(b'{"type":"object","properties":{}}')
_CUSTOM_PARAMETERS = Raw(
    b'{"type":"object","properties":{"input":{"type":"string"}},"required":["input"],"additionalProperties":false}'
)
_NAMED_TOOLS = frozenset({"function", "custom"})
_MAX_TOOLS = 512
_MAX_WARNINGS = 16
_MAX_SHOWN_TYPE = 64


def read_tools(request: CreateResponse) -> list[ToolSpec]:
    """Read type and name of each tool. Raises InvalidRequest."""
    raws = request.tools or []
    if len(raws) > _MAX_TOOLS:
        raise InvalidRequest(f"At most {_MAX_TOOLS} tools can be given.", param="tools")
    specs = [parse_tool(raw, f"tools[{number}]") for number, raw in enumerate(raws)]
    for number, spec in enumerate(specs):
        if spec.type in _NAMED_TOOLS:
            check_tool_name(spec, f"tools[{number}]")
    return specs


def decode_function(spec: ToolSpec, where: str) -> FunctionTool:
    """Raises InvalidRequest."""
    try:
        return msgspec.json.decode(spec.raw, type=FunctionTool)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{where} holds a function that cannot be read: {error}", param=where) from None


@dataclass(frozen=True, slots=True)
class ChosenTools:
    """What `tool_choice` leaves of the tools of a request: those that the model sees, and what it has to call."""

    functions: list[ModelToolDefinition]
    server_tools: list[ToolSpec]
    choice: ModelToolChoice


@dataclass(frozen=True, slots=True)
class RequestTools:
    """The tools of a request.

    functions: what the model sees of hosted tools and client tools, by function name.
    types_by_name: type and name in the request, by function name.
    hosted_tools: by function name.
    server_tools: those that the model server takes as they are.
    unserved: the others, by their number in the request.
    """

    functions: Mapping[str, ModelToolDefinition]
    types_by_name: Mapping[str, tuple[str, str | None]]
    hosted_tools: Mapping[str, ConfiguredTool]
    server_tools: Sequence[ToolSpec]
    unserved: Mapping[int, ToolSpec]

    @classmethod
    def collect(
        cls,
        specs: Sequence[ToolSpec],
        offered: Sequence[tuple[ToolSpec, ConfiguredTool]],
        profile: ModelProfile,
    ) -> "RequestTools":
        """Collect the tools of a request. `offered`: the hosted ones. Raises InvalidRequest."""
        functions: dict[str, ModelToolDefinition] = {}
        types: dict[str, tuple[str, str | None]] = {}
        server_tools: list[ToolSpec] = []
        unserved: dict[int, ToolSpec] = {}

        def add(function: ModelToolDefinition, tool_type: str, name: str | None) -> None:
            if function.name in functions:
                raise InvalidRequest(f"Two tools are named {function.name!r}.", param="tools")
            functions[function.name] = function
            types[function.name] = (tool_type, name)

        for spec, tool in offered:
            add(tool.function, spec.type, None)
        hosted = {id(spec) for spec, _ in offered}
        for number, spec in enumerate(specs):
            where = f"tools[{number}]"
            if id(spec) in hosted:
                continue
            if spec.type == "function":
                add(_to_function_spec(decode_function(spec, where)), spec.type, spec.name)
            elif spec.type == "custom":
                add(_to_custom_tool_spec(spec, where), spec.type, spec.name)
            elif profile.passes_tool(spec.type):
                server_tools.append(spec)
            elif is_client_tool(spec):
                add(describe_client_tool(spec, where), spec.type, None)
            else:
                unserved[number] = spec
        hosted_tools = {tool.function.name: tool for _, tool in offered}
        return cls(functions, types, hosted_tools, server_tools, unserved)

    def check_only_tool(self, count: int) -> None:
        """Raise InvalidRequest if the only tool of the request is not served. count: its number of tools."""
        for number, spec in self.unserved.items():
            if count == 1 and not is_cached_search(spec):
                raise InvalidRequest(
                    f"{_describe_unserved(number, spec)} on this server, and it is the only tool of the request. "
                    "Leave it out, or name a tool that the server has.",
                    param=f"tools[{number}]",
                    code="unsupported_tool",
                )

    @property
    def warnings(self) -> list[str]:
        """One sentence for each tool that the model is not offered."""
        sentences = [_describe_unserved(number, spec) for number, spec in self.unserved.items()]
        more = len(sentences) - _MAX_WARNINGS
        if more > 0:
            sentences[_MAX_WARNINGS:] = [f"{more} more tools are not configured"]
        return sentences

    def choose(self, choice: ToolChoice) -> ChosenTools:
        """Apply `tool_choice`. Raises InvalidRequest for an unknown tool, and if a call is required of none."""
        functions, server_tools = list(self.functions.values()), list(self.server_tools)
        if choice.allowed is None:
            if choice.mode == "required" and not functions and not server_tools:
                reason = (
                    f"A call is required, but {', '.join(self.warnings)}."
                    if self.unserved
                    else "Tool choice 'required' must be specified with 'tools' parameter."
                )
                raise InvalidRequest(reason, param="tool_choice")
            return ChosenTools(functions, server_tools, choice.mode)
        names = [name for wanted in choice.allowed for name in self._find_functions(wanted)]
        allowed_functions = [self.functions[name] for name in dict.fromkeys(names)]
        allowed_tools = [spec for spec in server_tools if _is_named(spec, choice.allowed)]
        allowed = [*allowed_functions, *allowed_tools]
        if choice.mode != "required":
            return ChosenTools(allowed_functions, allowed_tools, choice.mode)
        if not allowed:
            raise InvalidRequest(
                "A call is required, but tool_choice names no tool that this server serves: "
                f"{_join_types(choice.allowed)}.",
                param="tool_choice",
            )
        if len(choice.allowed) == 1 and len(allowed) == 1:
            # The others stay visible: leaving them out would invalidate the model server's prompt cache.
            return ChosenTools(functions, server_tools, allowed[0])
        return ChosenTools(allowed_functions, allowed_tools, allowed[0] if len(allowed) == 1 else choice.mode)

    def _find_functions(self, wanted: tuple[str, str | None]) -> list[str]:
        tool_type, name = wanted
        found = [
            function
            for function, (its_type, its_name) in self.types_by_name.items()
            if its_type == tool_type and (name is None or name == its_name)
        ]
        others = (*self.server_tools, *self.unserved.values())
        if not found and all(spec.type != tool_type for spec in others):
            raise InvalidRequest(
                f"Tool choice '{name or tool_type}' not found in 'tools' parameter.", param="tool_choice"
            )
        return found

    def build_toolbox(self, functions: Sequence[ModelToolDefinition]) -> Toolbox:
        """The tools behind these functions."""
        names = [function.name for function in functions]
        return Toolbox(
            hosted_tools={name: self.hosted_tools[name] for name in names if name in self.hosted_tools},
            client_tools={
                name: self.types_by_name[name][0] for name in names if name not in self.hosted_tools
            },
        )


NO_TOOLS = RequestTools.collect([], [], ModelProfile())


# --- tools that are not served ------------------------------------------------------------------------


def _describe_unserved(number: int, spec: ToolSpec) -> str:
    return f"tools[{number}] {_sanitize_type(spec.type)} is not configured"


def _sanitize_type(tool_type: str) -> str:
    """The type on one line of ASCII without commas, since it goes into a header that separates sentences by them."""
    return sanitize_name(tool_type, _MAX_SHOWN_TYPE).encode("ascii", "replace").decode().replace(",", "?")


def _join_types(allowed: Sequence[tuple[str, str | None]]) -> str:
    shown = [_sanitize_type(tool_type) for tool_type, _ in allowed[:_MAX_WARNINGS]]
    return f"{', '.join(shown)} is not configured" if len(shown) == 1 else ", ".join(shown) or "none is named"


def _is_named(spec: ToolSpec, allowed: Sequence[tuple[str, str | None]]) -> bool:
    return any(tool_type == spec.type and name in (None, spec.name) for tool_type, name in allowed)


# --- functions ----------------------------------------------------------------------------------------


def _to_function_spec(function: FunctionTool) -> ModelToolDefinition:
    return ModelToolDefinition(
        name=function.name,
        description=function.description or "",
        parameters=Raw(msgspec.json.encode(function.parameters)) if function.parameters else _NO_PARAMETERS,
        strict=bool(function.strict),
    )


class _Grammar(msgspec.Struct):
    type: str = "text"
    syntax: str | None = None
    definition: str | None = None


def _to_custom_tool_spec(spec: ToolSpec, where: str) -> ModelToolDefinition:
    """Describe a custom tool as a function with one string, which every model can call."""
    try:
        tool = msgspec.json.decode(spec.raw, type=CustomTool)
        grammar = msgspec.json.decode(msgspec.json.encode(tool.format or {}), type=_Grammar)
    except msgspec.ValidationError as error:
        raise InvalidRequest(
            f"{where} holds a custom tool that cannot be read: {error}", param=where
        ) from None
    grammar_note = (
        f"\n\nThe input must follow this {grammar.syntax} grammar:\n{grammar.definition}"
        if grammar.definition
        else ""
    )
    return ModelToolDefinition(
        name=tool.name,
        description=(tool.description or "") + grammar_note,
        parameters=_CUSTOM_PARAMETERS,
        strict=True,
        custom=spec.raw,
    )
