"""Conversations as they are stored and rendered for a model."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Literal, overload

import msgspec

from fumehood.protocol.attachments import Attachment

_ENTRY_OVERHEAD = 512
_MAX_COMBINED_BYTES = 1 << 20
COMPACTION_TYPE = "compaction"
"""The type of an item that replaces everything before it."""


class ToolExchange(msgspec.Struct, frozen=True, kw_only=True):
    """A hosted call and its result exactly as the model wrote and read them, so that later requests repeat the bytes.

    half: which half this is, if call and result are separate items; the other half's text is empty.
    images: data: URLs, for models that accept images.
    """

    call_id: str
    name: str
    arguments: str
    output: str
    half: Literal["both", "call", "result"] = "both"
    images: tuple[str, ...] = ()


class ConversationEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One item of a conversation.

    turn: 0 for input, otherwise the number of the model's turn within its response.
    raw: the canonical item, as JSON.
    exchange: a hosted call as the model saw it.
    attachments: one for each file or picture of the item, in order.
    """

    type: str
    id: str | None
    turn: int
    raw: bytes
    exchange: ToolExchange | None = None
    attachments: tuple[Attachment, ...] = ()

    @property
    def size(self) -> int:
        """Approximate bytes of content."""
        size = len(self.raw) + sum([attachment.size for attachment in self.attachments])
        if (exchange := self.exchange) is not None:
            size += len(exchange.arguments) + len(exchange.output) + sum(map(len, exchange.images))
        return size


class _CallTag(msgspec.Struct):
    call_id: str | None = None


_call_tag_decoder = msgspec.json.Decoder(_CallTag)
_NO_CALL_IDS: frozenset[str] = frozenset()


def read_call_id(entry: ConversationEntry) -> str | None:
    """The id of a call, or of the call that an output belongs to; None for any other item."""
    if entry.exchange is not None:
        return entry.exchange.call_id
    if not entry.type.endswith(("_call", "_output")):
        return None
    try:
        return _call_tag_decoder.decode(entry.raw).call_id
    except msgspec.ValidationError:
        return None  # an item of another server whose call_id is no string


type Rendering = tuple[bytes, bytes]
"""A piece of a conversation as a model server gets it, and what it leaves to the next piece."""


class ConversationSegment:
    """What one response added to a conversation: its input, then its output. Immutable.

    renderings: cached, by what they depend on. estimated_tokens: cached, too; None if it was not needed yet.
    compacted: index of its last compaction, -1 if it has none.
    size: bytes of its entries. Both are computed once, since every later request reads them.
    """

    __slots__ = ("_call_ids", "compacted", "entries", "estimated_tokens", "renderings", "size")

    def __init__(self, entries: tuple[ConversationEntry, ...]) -> None:
        compacted, size = -1, 0
        for index, entry in enumerate(entries):
            size += entry.size
            if entry.type == COMPACTION_TYPE:
                compacted = index
        self.entries: Final = entries
        self.renderings: Final = dict[str, Rendering]()
        self.estimated_tokens: int | None = None
        self.compacted: Final = compacted
        self.size: Final = size
        self._call_ids: frozenset[str] | None = None

    @property
    def has_read_call_ids(self) -> bool:
        return self._call_ids is not None

    @property
    def call_ids(self) -> frozenset[str]:
        """The ids of its calls as the model sees them; read once."""
        if self._call_ids is None:
            ids = [call_id for entry in self.entries if (call_id := read_call_id(entry)) is not None]
            self._call_ids = frozenset(ids) if ids else _NO_CALL_IDS
        return self._call_ids

    @property
    def segments(self) -> "tuple[ConversationSegment]":
        return (self,)

    @property
    def memory_bytes(self) -> int:
        """Estimated bytes in memory, with one rendering."""
        return _ENTRY_OVERHEAD * len(self.entries) + 2 * self.size


class SegmentGroup:
    """Consecutive segments handled as one. Immutable.

    renderings: like those of a segment.
    compacted: index of its last segment with a compaction, -1 if it has none.
    size: bytes of all segments.
    is_combined: whether it is rendered, and cached, as one piece.
    """

    __slots__ = ("compacted", "is_combined", "renderings", "segments", "size")

    def __init__(self, segments: tuple[ConversationSegment, ...]) -> None:
        compacted = [index for index, segment in enumerate(segments) if segment.compacted >= 0]
        self.segments: Final = segments
        self.renderings: Final = dict[str, Rendering]()
        self.compacted: Final = compacted[-1] if compacted else -1
        self.size: Final = sum([segment.size for segment in segments])
        self.is_combined: Final = self.size <= _MAX_COMBINED_BYTES


type ConversationPiece = ConversationSegment | SegmentGroup


class Conversation(Sequence[ConversationSegment]):
    """Segments, grouped into pieces. Touching every segment of a long conversation costs more than the work on it, so
    segment groups are handled as a whole where possible.
    """

    __slots__ = ("pieces",)

    def __init__(self, pieces: tuple[ConversationPiece, ...]) -> None:
        self.pieces = pieces

    def __len__(self) -> int:
        return sum([len(piece.segments) for piece in self.pieces])

    def __iter__(self) -> Iterator[ConversationSegment]:
        for piece in self.pieces:
            yield from piece.segments

    def __reversed__(self) -> Iterator[ConversationSegment]:
        for piece in reversed(self.pieces):
            yield from reversed(piece.segments)

    @overload
    def __getitem__(self, index: int) -> ConversationSegment: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[ConversationSegment, ...]: ...
    def __getitem__(self, index: int | slice) -> ConversationSegment | tuple[ConversationSegment, ...]:
        if index == -1 and self.pieces:
            return self.pieces[-1].segments[-1]
        return tuple(self)[index]


class CallIdIndex:
    """The ids of all calls of a conversation, as a container; they are read when the first one is looked up.

    segments: the conversation so far. `update` adds calls that are not in them.
    """

    __slots__ = ("_added", "_segments")

    def __init__(self, segments: Sequence[ConversationSegment] = ()) -> None:
        self._segments = segments
        self._added = set[str]()

    def __contains__(self, call_id: object) -> bool:
        return call_id in self._added or any(call_id in segment.call_ids for segment in self._segments)

    def update(self, call_ids: Iterable[str]) -> None:
        self._added.update(call_ids)

    def read_new_segments(self) -> None:
        """Read the ids of the segments since the last one whose ids are known, so that looking one up is quick."""
        for segment in reversed(self._segments):
            if segment.has_read_call_ids:
                break
            _ = segment.call_ids


def conversation_pieces(segments: Sequence[ConversationSegment]) -> Sequence[ConversationPiece]:
    return segments.pieces if isinstance(segments, Conversation) else segments


def append_segments(
    segments: Sequence[ConversationSegment], more: Sequence[ConversationSegment]
) -> Sequence[ConversationSegment]:
    """Return the segments followed by more."""
    return Conversation((*conversation_pieces(segments), *more)) if more else segments


def conversation_size(segments: Sequence[ConversationSegment]) -> int:
    return sum([piece.size for piece in conversation_pieces(segments)])


def last_compaction_index(segments: Sequence[ConversationSegment]) -> int:
    """Return the index of the last segment with a compaction, -1 if there is none."""
    if max([piece.compacted for piece in conversation_pieces(segments)], default=-1) < 0:
        return -1
    return max(index for index, segment in enumerate(segments) if segment.compacted >= 0)
