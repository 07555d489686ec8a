"""Tools as requests name them, and what a model is told of them; imports msgspec and siblings.

A tool of a request is kept as its bytes with its type peeked at: newer clients send types and fields that nobody
here knows. What is hosted, and how it is configured, is the affair of whoever serves it.
"""

from typing import Literal

import msgspec
from msgspec import Raw

from fumehood.protocol.errors import InvalidRequest


class FunctionTool(msgspec.Struct, kw_only=True, tag_field="type", tag="function"):
    """A function of the client's, as it comes back in the response."""

    name: str
    description: str | None = None
    parameters: dict[str, Raw] | None = None
    strict: bool | None = True


class CustomTool(msgspec.Struct, kw_only=True, tag_field="type", tag="custom"):
    name: str
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


type ChoiceMode = Literal["none", "auto", "required"]


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """`tool_choice` in one shape.

    mode: whether the model may or must call.
    only: types and names of the tools it may choose from; None means all. Exactly one of them with `required`
        is a forced tool.
    raw: what the request said, given back in the response.
    """

    mode: ChoiceMode = "auto"
    only: tuple[tuple[str, str | None], ...] | None = None
    raw: Raw = Raw(b'"auto"')


class _ToolTag(msgspec.Struct):
    type: str
    name: str | None = None


class _ChoiceShape(msgspec.Struct):
    type: str
    name: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: list[_ToolTag] = []


_tool_tags = msgspec.json.Decoder(_ToolTag)
_choices: msgspec.json.Decoder[ChoiceMode | _ChoiceShape] = msgspec.json.Decoder(ChoiceMode | _ChoiceShape)


def read_tool(raw: Raw, where: str) -> ToolSpec:
    """Raises InvalidRequest, naming `where`. `{"type": "built_in", "name": X}` is another way to say X."""
    try:
        tag = _tool_tags.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise InvalidRequest(f"{where} is not a tool: {error}", param=where) from None
    if tag.type == "built_in" and tag.name:
        fields: dict[str, Raw] = msgspec.json.decode(raw, type=dict[str, Raw])
        fields["type"] = Raw(msgspec.json.encode(tag.name))
        del fields["name"]
        return ToolSpec(tag.name, None, msgspec.json.encode(fields))
    return ToolSpec(tag.type, tag.name, bytes(raw))


def read_choice(value: str | dict[str, Raw]) -> ToolChoice:
    """Raises InvalidRequest for what is no `tool_choice` at all; whether the tool is there is checked elsewhere."""
    raw = Raw(msgspec.json.encode(value))
    try:
        choice = _choices.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise InvalidRequest(
            f"tool_choice must be none, auto, required or an object with a type: {error}", param="tool_choice"
        ) from None
    if not isinstance(choice, _ChoiceShape):
        return ToolChoice(mode=choice, raw=raw)
    if choice.type == "allowed_tools":
        only = tuple((tool.type, tool.name) for tool in choice.tools)
        return ToolChoice(mode=choice.mode, only=only, raw=raw)
    kind, name = (
        (choice.name, None) if choice.type == "built_in" and choice.name else (choice.type, choice.name)
    )
    return ToolChoice(mode="required", only=((kind, name),), raw=raw)
