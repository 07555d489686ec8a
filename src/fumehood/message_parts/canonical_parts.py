"""Canonical parts: tool calls, their responses and other content in a form that is the same for every vendor.

A vendor codec turns an item into one or more parts, a representation turns parts into what OpenTelemetry records, and
both can be reversed. What a part has no field for stays in `VendorRoundTripData.item`: the vendor's item without the
values that were extracted into the part.
"""

from collections.abc import Iterator
from typing import Literal

import msgspec

type Json = bool | int | float | str | list[Json] | dict[str, Json] | None
type JsonObject = dict[str, Json]
type JsonPath = tuple[str | int, ...]

type Execution = Literal["server", "client"]
type Status = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
type Provenance = Literal["observed", "synthesized"]


class FieldOrigin(msgspec.Struct, frozen=True, array_like=True):
    """Where one value of a vendor's item went: the field of the part, its path in the item, and the codec.

    It is restored by this record and not by the tables of a codec, because parts outlive the version that made them.
    """

    field: str
    path: JsonPath
    codec: str = ""


class ResponseEnvelope(msgspec.Struct, frozen=True, kw_only=True):
    """The document that held the items, with null at `item_list_paths` in place of the item lists.

    An empty path stands for the document itself: a single item that was not in a list.
    """

    document: Json
    item_list_paths: list[JsonPath]


class VendorRoundTripData(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is needed to restore the vendor's document.

    item: the rest of the vendor's item; unset if the item is not kept.
    is_continuation: this is a further part of the previous part's item.
    list_index: which of the envelope's lists held the item.
    envelope: only on the first part of a document.
    """

    vendor: str
    item: Json | msgspec.UnsetType = msgspec.UNSET
    is_continuation: bool = False
    extracted_fields: list[FieldOrigin] = []
    list_index: int = 0
    envelope: ResponseEnvelope | None = None


class _BasePart(msgspec.Struct, kw_only=True):
    """`extra` holds further fields: what the part shows beside its own, and unknown ones of parts from elsewhere."""

    source: VendorRoundTripData | None = None
    extra: JsonObject = {}


class ToolPart(_BasePart, kw_only=True):
    """A tool call or its response.

    kind: what sort of tool, a key of `TOOL_KINDS` or any other name; it decides what `payload` may hold.
    id, call_id: the id of the item, and the id that call and response share; vendors have one, both or none.
    execution: who runs it. The vendor's type does not say: a shell may run on the server or at the client.
    provenance: a synthesized part was not in the items; it was derived from its effects.
    """

    kind: str
    payload: JsonObject
    id: str | None = None
    call_id: str | None = None
    vendor_type: str = ""
    execution: Execution = "server"
    status: Status | None = None
    provenance: Provenance = "observed"


class ToolCallPart(ToolPart, kw_only=True):
    """What the model asked a tool to do. name: the tool's own where it has one (functions, MCP), else the kind."""

    name: str


class ToolCallResponsePart(ToolPart, kw_only=True):
    """The response to a call; `call_id` names the call."""


class TextPart(_BasePart, kw_only=True):
    content: str
    role: str = "assistant"


class ReasoningPart(_BasePart, kw_only=True):
    content: str


class BlobPart(_BasePart, kw_only=True):
    """Inline data, as base64."""

    content: str
    modality: str
    mime_type: str | None = None


class FilePart(_BasePart, kw_only=True):
    file_id: str
    modality: str
    mime_type: str | None = None


class UriPart(_BasePart, kw_only=True):
    uri: str
    modality: str
    mime_type: str | None = None


class GenericPart(_BasePart, kw_only=True):
    """Any other content: a vendor's item (`type` is its own type) or a part of unknown type."""

    type: str


type Part = ToolPart | TextPart | ReasoningPart | BlobPart | FilePart | UriPart | GenericPart


def pair_calls(parts: list[Part]) -> Iterator[tuple[int | None, int | None]]:
    """Yield positions of calls with those of their responses; each call and response once, in order of their start.

    A response belongs to the call of the same id and kind. Where the vendor gives no id, it belongs to the oldest call
    of its kind that has neither an id nor a response.
    """
    found: dict[int, int | None] = {}
    waiting: dict[tuple[str | None, str], list[int]] = {}
    for position, part in enumerate(parts):
        if isinstance(part, ToolCallPart):
            found[position] = None
            waiting.setdefault((part.call_id, part.kind), []).append(position)
        elif isinstance(part, ToolCallResponsePart):
            calls = waiting.get((part.call_id, part.kind))
            found[calls.pop(0) if calls else -position - 1] = position
    for call, result in found.items():
        yield (call if call >= 0 else None), result
