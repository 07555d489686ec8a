"""Tools and `tool_choice` of a request, and the functions that a model sees.

A tool is kept as its bytes, of which only type and name are read: newer clients send types and fields that are unknown
here. Each hosted tool parses its own configuration.
"""

import re
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Raw

from fumehood.protocol.openai.api_errors import InvalidRequest

type ToolName = Annotated[str, Meta(min_length=1, max_length=128)]

_NAME_PATTERN = re.compile("^[a-zA-Z0-9_-]{1,64}$")  # OpenAI's


class FunctionTool(msgspec.Struct, kw_only=True, tag_field="type", tag="function"):
    """A function of the client, as the response repeats it."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Raw] | None = None
    strict: bool | None = True


class CustomTool(msgspec.Struct, kw_only=True, tag_field="type", tag="custom"):
    name: ToolName
    description: str | None = None
    format: dict[str, Raw] | None = None


class ToolSpec(msgspec.Struct, frozen=True):
    """One entry of `tools`: its type, its name if it has one, and its bytes."""

    type: str
    name: str | None
    raw: bytes


class ModelToolDefinition(msgspec.Struct, frozen=True, kw_only=True):
    """A tool as a model sees it. `parameters` is a JSON schema, kept as bytes.

    custom: the whole tool, if it is a custom one; models without custom tools see a function.
    """

    name: str
    description: str
    parameters: Raw
    strict: bool = False
    custom: bytes = b""


type ToolChoiceMode = Literal["none", "auto", "required"]


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A normalized `tool_choice`.

    mode: whether the model may or must call a tool.
    allowed: types and names of the tools to choose from; None means all. One tool with `required` is forced.
    raw: the request's own, repeated in the response.
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
    """Parse one tool. `{"type": "built_in", "name": X}` means X. Raises InvalidRequest, which names `where`."""
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


class _SearchAccess(msgspec.Struct):
    external_web_access: object = None


def is_cached_search(spec: ToolSpec) -> bool:
    """Whether it is a web search that may not reach the web, as Codex sends it with every request."""
    if not spec.type.startswith("web_search"):
        return False
    return msgspec.json.decode(spec.raw, type=_SearchAccess).external_web_access is False


def check_tool_name(spec: ToolSpec, where: str) -> None:
    """Raise InvalidRequest if the name of a function or custom tool is missing or does not match OpenAI's pattern."""
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
    """Parse `tool_choice`; whether the tool exists is checked elsewhere. Raises InvalidRequest."""
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
        echoed: dict[str, Raw] = msgspec.json.decode(raw, type=dict[str, Raw])
        echoed["mode"] = Raw(msgspec.json.encode(choice.mode))
        allowed = tuple(_check_named_choice(tool.type, tool.name) for tool in choice.tools)
        return ToolChoice(mode=choice.mode, allowed=allowed, raw=Raw(msgspec.json.encode(echoed)))
    if choice.type == "built_in" and choice.name:
        return ToolChoice(mode="required", allowed=((choice.name, None),), raw=raw)
    return ToolChoice(mode="required", allowed=(_check_named_choice(choice.type, choice.name),), raw=raw)


def _check_named_choice(kind: str, name: str | None) -> tuple[str, str | None]:
    """Raise InvalidRequest for a function or custom tool without a name."""
    if kind in ("function", "custom") and name is None:
        raise _missing_parameter_error("name")
    return kind, name


def _missing_parameter_error(field: str) -> InvalidRequest:
    return InvalidRequest(
        f"Missing required parameter: 'tool_choice.{field}'.",
        param="tool_choice",
        code="missing_required_parameter",
    )
