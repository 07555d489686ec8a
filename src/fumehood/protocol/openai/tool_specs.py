"""Tools as requests name them, and what a model is told of them.

A tool of a request is kept as its bytes with its type peeked at: newer clients send types and fields that nobody
here knows. What is hosted, and how it is configured, is the affair of whoever serves it.
"""

import re
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Raw

from fumehood.protocol.openai.api_errors import InvalidRequest

type ToolName = Annotated[str, Meta(min_length=1, max_length=128)]

_NAME_PATTERN = re.compile("^[a-zA-Z0-9_-]{1,64}$")  # as OpenAI has it


class FunctionTool(msgspec.Struct, kw_only=True, tag_field="type", tag="function"):
    """A function of the client's, as it comes back in the response."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Raw] | None = None
    strict: bool | None = True


class CustomTool(msgspec.Struct, kw_only=True, tag_field="type", tag="custom"):
    name: ToolName
    description: str | None = None
    format: dict[str, Raw] | None = None


class ToolSpec(msgspec.Struct, frozen=True):
    """One entry of `tools`: its type, its name where it has one, and its bytes."""

    type: str
    name: str | None
    raw: bytes


class FunctionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a model is told of a tool. `parameters` is a JSON schema, as bytes that are never decoded again.

    custom: the whole tool, if it is a custom one; models that do not know such tools take it for a function.
    """

    name: str
    description: str
    parameters: Raw
    strict: bool = False
    custom: bytes = b""


type ToolChoiceMode = Literal["none", "auto", "required"]


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """`tool_choice` in one shape.

    mode: whether the model may or must call.
    only: types and names of the tools it may choose from; None means all. Exactly one of them with `required`
        is a forced tool.
    raw: what the request said, given back in the response.
    """

    mode: ToolChoiceMode = "auto"
    allowed: tuple[tuple[str, str | None], ...] | None = None
    raw: Raw = Raw(b'"auto"')


class _ToolTag(msgspec.Struct):
    type: str
    name: str | None = None


class _ToolChoiceObject(msgspec.Struct):
    type: str
    name: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: list[_ToolTag] | None = None


_tool_tag_decoder = msgspec.json.Decoder(_ToolTag)
_choice_decoder: msgspec.json.Decoder[ToolChoiceMode | _ToolChoiceObject] = msgspec.json.Decoder(
    ToolChoiceMode | _ToolChoiceObject
)


def parse_tool(raw: Raw, where: str) -> ToolSpec:
    """Raises InvalidRequest, naming `where`. `{"type": "built_in", "name": X}` is another way to say X."""
    try:
        tag = _tool_tag_decoder.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise InvalidRequest(f"{where} is not a tool: {error}", param=where) from None
    if tag.type == "built_in" and tag.name:
        fields: dict[str, Raw] = msgspec.json.decode(raw, type=dict[str, Raw])
        fields["type"] = Raw(msgspec.json.encode(tag.name))
        del fields["name"]
        return ToolSpec(tag.name, None, msgspec.json.encode(fields))
    return ToolSpec(tag.type, tag.name, bytes(raw))


def check_tool_name(spec: ToolSpec, where: str) -> None:
    """Raises InvalidRequest for a function or a custom tool whose name OpenAI would not take, either."""
    param = f"{where}.name"
    if spec.name is None:
        nested = "function" in msgspec.json.decode(spec.raw, type=dict[str, Raw])
        advice = " It stands beside 'type' here, not in 'function' as in chat completions." if nested else ""
        raise InvalidRequest(
            f"Missing required parameter: '{param}'.{advice}", param=param, code="missing_required_parameter"
        )
    if _NAME_PATTERN.fullmatch(spec.name) is None:
        raise InvalidRequest(
            f"Invalid '{param}': {spec.name[:100]!r} does not match the pattern '{_NAME_PATTERN.pattern}'.",
            param=param,
            code="invalid_value",
        )


def parse_tool_choice(value: str | dict[str, Raw]) -> ToolChoice:
    """Raises InvalidRequest for what is no `tool_choice` at all; whether the tool is there is checked elsewhere."""
    raw = Raw(msgspec.json.encode(value))
    try:
        choice = _choice_decoder.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise InvalidRequest(
            f"tool_choice must be none, auto, required or an object with a type: {error}", param="tool_choice"
        ) from None
    if not isinstance(choice, _ToolChoiceObject):
        return ToolChoice(mode=choice, raw=raw)
    if choice.type == "allowed_tools":
        if choice.tools is None:
            raise _missing_parameter_error("tools")
        shown: dict[str, Raw] = msgspec.json.decode(raw, type=dict[str, Raw])
        shown["mode"] = Raw(msgspec.json.encode(choice.mode))
        only = tuple(_check_named_choice(tool.type, tool.name) for tool in choice.tools)
        return ToolChoice(mode=choice.mode, allowed=only, raw=Raw(msgspec.json.encode(shown)))
    if choice.type == "built_in" and choice.name:
        return ToolChoice(mode="required", allowed=((choice.name, None),), raw=raw)
    return ToolChoice(mode="required", allowed=(_check_named_choice(choice.type, choice.name),), raw=raw)


def _check_named_choice(kind: str, name: str | None) -> tuple[str, str | None]:
    """Raises InvalidRequest for a function or a custom tool without a name: of those there may be several."""
    if kind in ("function", "custom") and name is None:
        raise _missing_parameter_error("name")
    return kind, name


def _missing_parameter_error(field: str) -> InvalidRequest:
    return InvalidRequest(
        f"Missing required parameter: 'tool_choice.{field}'.",
        param="tool_choice",
        code="missing_required_parameter",
    )
