"""Tool calls, their results and what stands between them, the same for every vendor.

A vendor's item becomes one part or several (`vendors`), parts become what OpenTelemetry records (`views`), and both
ways lead back. What a part has no field for stays where it was: in `Source.item`, the vendor's own item without the
values that were moved into the part.
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


class ExtractedField(msgspec.Struct, frozen=True, array_like=True):
    """One value that was taken out of a vendor's item: what the part calls it, where it stood, how it was written.

    It goes back by what is said here, not by a table: parts outlive the version that made them.
    """

    field: str
    path: JsonPath
    codec: str = ""


class ResponseEnvelope(msgspec.Struct, frozen=True, kw_only=True):
    """The document that the items stood in, with null at `places` where their lists were.

    A place that is the document itself, the empty path, is an item that was given alone.
    """

    document: Json
    item_list_paths: list[JsonPath]


class VendorSource(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is needed to go back to the vendor.

    item: what is left of the vendor's item; unset where the way back is not kept.
    follows: this is a further part of the item of the part before.
    place: which of the envelope's lists the item stood in.
    envelope: on the first part of a document only.
    """

    vendor: str
    item: Json | msgspec.UnsetType = msgspec.UNSET
    is_continuation: bool = False
    extracted_fields: list[ExtractedField] = []
    list_index: int = 0
    envelope: ResponseEnvelope | None = None


class _BasePart(msgspec.Struct, kw_only=True):
    """`extra` holds fields that somebody else's part had beside those known here."""

    source: VendorSource | None = None
    extra: JsonObject = {}


class ToolCallPart(_BasePart, kw_only=True):
    """What the model asked a tool to do.

    kind: what sort of tool it is, one of `payloads.KINDS` or any other name; it says what `payload` may hold.
    name: the tool's own name where it has one (functions, MCP), else the kind.
    id, call_id: the item's, and the one that call and result share; vendors may have one, both or none.
    execution: who runs it. The vendor's type does not tell: a shell may be the server's or the client's.
    provenance: synthesized calls were never seen as such, only what they left behind.
    """

    kind: str
    name: str
    payload: JsonObject
    id: str | None = None
    call_id: str | None = None
    vendor_type: str = ""
    execution: Execution = "server"
    status: Status | None = None
    provenance: Provenance = "observed"


class ToolCallResponsePart(_BasePart, kw_only=True):
    """What came of a call; `call_id` says of which."""

    kind: str
    payload: JsonObject
    id: str | None = None
    call_id: str | None = None
    vendor_type: str = ""
    execution: Execution = "server"
    status: Status | None = None
    provenance: Provenance = "observed"


class TextPart(_BasePart, kw_only=True):
    content: str
    role: str = "assistant"


class ReasoningPart(_BasePart, kw_only=True):
    content: str


class BlobPart(_BasePart, kw_only=True):
    """Data in line, as base64."""

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
    """Whatever is none of these: a vendor's item (then `type` is its own), or somebody else's part."""

    type: str


type Part = (
    ToolCallPart
    | ToolCallResponsePart
    | TextPart
    | ReasoningPart
    | BlobPart
    | FilePart
    | UriPart
    | GenericPart
)


def pair_calls(parts: list[Part]) -> Iterator[tuple[int | None, int | None]]:
    """Positions of calls with those of their results; each call and each result once, in the order they begin.

    The same id and the same kind belong together. Where the vendor gives no id, a result belongs to the oldest call of
    its kind that has neither id nor result.
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
