"""Structured output: answers with a type."""

import re
import typing
from dataclasses import dataclass
from typing import Any, cast

from fumehood.client.dbc import require
from fumehood.client.errors import OutputParseError

if typing.TYPE_CHECKING:
    from fumehood.client import serde
    from fumehood.client.prompt.prompt import RenderedPrompt

# Providers accept only objects at the root, so a list is wrapped in one.
_LIST_FIELD = "items"


@dataclass(frozen=True)
class StructuredOutput:
    """The output type: a dataclass, or a list of them (then `item_type` is the dataclass)."""

    kind: Any
    item_type: type[Any]
    is_list: bool
    schema: "serde.JsonSchema"

    @property
    def name(self) -> str:
        """Return a name that providers accept: 1 to 64 letters, digits, _ and -."""
        return re.sub(r"[^a-z0-9_-]", "_", self.item_type.__name__.lower())[:64]


def describe_output_type(kind: Any) -> StructuredOutput | None:
    """Return None for a prompt that asks for text: no type, `None` or `str`."""
    if kind in (None, type(None), str):
        return None
    is_list = typing.get_origin(kind) is list
    item: Any = typing.get_args(kind)[0] if is_list else kind
    require(
        isinstance(item, type) and hasattr(item, "__dataclass_fields__"),
        f"The output type {kind!r} is neither a dataclass nor a list of one.",
    )
    from fumehood.client import serde

    schema = serde.build_schema(kind)
    if is_list:
        definitions = schema.body.pop("$defs", None)
        body = {
            "type": "object",
            "properties": {_LIST_FIELD: schema.body},
            "required": [_LIST_FIELD],
            "additionalProperties": False,
        }
        schema = serde.JsonSchema({**body, "$defs": definitions} if definitions else body, schema.strict)
    return StructuredOutput(kind, item, is_list, schema)


def parse_structured_output[T](text: str, rendered: "RenderedPrompt[T]") -> T:
    """Parse the answer as the prompt's output type. Raises OutputParseError."""
    output_type = rendered.output
    if output_type is None:
        return cast(T, text if rendered.output_type is str else None)
    from fumehood.client import serde

    try:
        if not output_type.is_list:
            return serde.decode(_strip_code_fence(text), output_type.kind)
        found: Any = serde.decode(_strip_code_fence(text), object)
        if isinstance(found, dict):
            found = cast(dict[str, Any], found).get(_LIST_FIELD)
        return serde.convert(found, output_type.kind)
    except serde.DecodeError as error:
        raise OutputParseError(
            f"The answer is no {output_type.item_type.__name__}: {error}. It begins with {text[:200]!r}.",
            prompt_name=rendered.prompt_name,
            phase="response",
            provider_payload=text,
        ) from error


def _strip_code_fence(text: str) -> str:
    """Strip a Markdown code fence, which models without schema enforcement often add."""
    lines = text.strip().splitlines()
    fenced = len(lines) > 2 and lines[0].startswith("```") and lines[-1] == "```"
    return "\n".join(lines[1:-1]) if fenced else text
