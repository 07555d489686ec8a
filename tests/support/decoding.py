"""Items and events out of their JSON.

For tests of streams that others wrote: an item of ours becomes a Struct, any other stays its
bytes, and so does one that only looks like ours.
"""

import msgspec
from msgspec import Raw

from fumehood.protocol.openai import stream_events
from fumehood.protocol.openai.items import (
    AuthoredItem,
    CodeInterpreterCall,
    CustomToolCall,
    FunctionCall,
    OutputItem,
    OutputMessage,
    ReasoningItem,
    ShellCall,
    ShellCallOutput,
)
from fumehood.protocol.openai.responses import Response
from fumehood.protocol.openai.stream_events import OutputItemEvent, ResponseEvent, StreamEvent


class _Tag(msgspec.Struct):
    type: str


class _Item(msgspec.Struct):
    item: Raw
    output_index: int
    sequence_number: int = -1


class _Response(msgspec.Struct):
    response: Raw
    sequence_number: int = -1


class _Output(msgspec.Struct):
    output: list[Raw] = []


_AUTHORED: tuple[type[AuthoredItem], ...] = (
    OutputMessage,
    ReasoningItem,
    FunctionCall,
    CustomToolCall,
    CodeInterpreterCall,
    ShellCall,
    ShellCallOutput,
)
_tags = msgspec.json.Decoder(_Tag)
_item_decoders = {str(kind.__struct_config__.tag): msgspec.json.Decoder(kind) for kind in _AUTHORED}
_heads = msgspec.json.Decoder(Response)
_EVENTS: dict[str, type[StreamEvent]] = {
    str(kind.__struct_config__.tag): kind
    for kind in vars(stream_events).values()
    if isinstance(kind, type) and issubclass(kind, StreamEvent)
}


def read_item(raw: bytes | Raw) -> OutputItem:
    decoder = _item_decoders.get(_tags.decode(raw).type)
    if decoder is None:
        return Raw(bytes(raw))
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError:
        return Raw(bytes(raw))


def read_response(raw: bytes | Raw) -> Response:
    """Raises msgspec.ValidationError."""
    output = msgspec.json.decode(raw, type=_Output).output
    fields = msgspec.json.decode(raw, type=dict[str, Raw])
    fields["output"] = Raw(b"[]")
    response = _heads.decode(msgspec.json.encode(fields))
    response.output = [read_item(item) for item in output]
    return response


def read_event(raw: bytes) -> StreamEvent | None:
    """None for an event that nobody here makes; raises msgspec.ValidationError."""
    kind = _EVENTS.get(_tags.decode(raw).type)
    if kind is None:
        return None
    if issubclass(kind, OutputItemEvent):
        fields = msgspec.json.decode(raw, type=_Item)
        return kind(
            sequence_number=fields.sequence_number,
            output_index=fields.output_index,
            item=read_item(fields.item),
        )
    if issubclass(kind, ResponseEvent):
        told = msgspec.json.decode(raw, type=_Response)
        return kind(sequence_number=told.sequence_number, response=read_response(told.response))
    return msgspec.json.decode(raw, type=kind)
