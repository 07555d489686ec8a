"""A conversation as it is kept and as a model is shown it."""

from collections.abc import Iterator, Sequence
from typing import Final, Literal, overload

import msgspec

from fumehood.protocol.attachments import Attachment

_ENTRY_OVERHEAD = 512
_MAX_COMBINED_BYTES = 1 << 20  # bytes, at most
COMPACTION_TYPE = "compaction"
"""The type of an item that stands for everything before it."""


class ToolExchange(msgspec.Struct, frozen=True, kw_only=True):
    """A hosted call and its result exactly as the model wrote and read them, so that replay is byte-stable.

    tells: where the call is one item and its result another, which half this is; the other half's text is empty.
    images: data: URLs, for models that take images.
    """

    call_id: str
    name: str
    arguments: str
    output: str
    tells: Literal["both", "call", "result"] = "both"
    images: tuple[str, ...] = ()


class ConversationEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One item of a conversation.

    turn: 0 for what came in with the request, then the number of the model's turn within its response; what one
        turn made is one message of the model's.
    raw: the canonical item, as JSON.
    exchange: what the model saw of a hosted call.
    attachments: what its files and pictures are, one for each, in their order.
    """

    type: str
    id: str | None
    turn: int
    raw: bytes
    exchange: ToolExchange | None = None
    attachments: tuple[Attachment, ...] = ()

    @property
    def size(self) -> int:
        """About how many bytes it says, all in all."""
        seen = self.exchange
        shown = len(seen.arguments) + len(seen.output) + sum(map(len, seen.images)) if seen is not None else 0
        return len(self.raw) + shown + sum([one.size for one in self.attachments])

    @property
    def memory_bytes(self) -> int:
        """About how many bytes it takes in memory, with a rendering of it; a guess, for those who bound them."""
        return _ENTRY_OVERHEAD + 2 * self.size


class ConversationSegment:
    """What one response added to a conversation: its input, then its output. Never changed once it is made.

    renderings: the same in a model server's own words, kept by whoever speaks that dialect, under its name.
    compacted: the place of its last compaction, -1 if it has none.
    size: that of its entries. Both are looked up once, since every later request asks.
    """

    __slots__ = ("compacted", "entries", "renderings", "size")

    def __init__(self, entries: tuple[ConversationEntry, ...]) -> None:
        compacted, size = -1, 0
        for place, entry in enumerate(entries):
            size += entry.size
            if entry.type == COMPACTION_TYPE:
                compacted = place
        self.entries: Final = entries
        self.renderings: Final = dict[str, bytes]()
        self.compacted: Final = compacted
        self.size: Final = size

    @property
    def segments(self) -> "tuple[ConversationSegment]":
        return (self,)

    @property
    def memory_bytes(self) -> int:
        return _ENTRY_OVERHEAD * len(self.entries) + 2 * self.size


class SegmentRun:
    """Segments that follow each other, as one thing to look at. Never changed once it is made.

    renderings: as those of a segment, each with what it leaves to the next piece.
    compacted: the place of its last segment with a compaction, -1 if it has none.
    size: that of all of them.
    in_one: whether it is rendered in one piece, of which it keeps a copy.
    """

    __slots__ = ("compacted", "in_one", "renderings", "segments", "size")

    def __init__(self, segments: tuple[ConversationSegment, ...]) -> None:
        places = [place for place, segment in enumerate(segments) if segment.compacted >= 0]
        self.segments: Final = segments
        self.renderings: Final = dict[str, tuple[bytes, bytes]]()
        self.compacted: Final = places[-1] if places else -1
        self.size: Final = sum([segment.size for segment in segments])
        self.in_one: Final = self.size <= _MAX_COMBINED_BYTES


type ConversationPiece = ConversationSegment | SegmentRun


class Conversation(Sequence[ConversationSegment]):
    """Segments in pieces. The turns of a long conversation are all over the memory, and to touch them takes longer than
    what is done with them; so whoever can takes a stretch as a whole.
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


def conversation_pieces(segments: Sequence[ConversationSegment]) -> Sequence[ConversationPiece]:
    return segments.pieces if isinstance(segments, Conversation) else segments


def append_segments(
    segments: Sequence[ConversationSegment], more: Sequence[ConversationSegment]
) -> Sequence[ConversationSegment]:
    """The segments and then more."""
    return Conversation((*conversation_pieces(segments), *more)) if more else segments


def conversation_size(segments: Sequence[ConversationSegment]) -> int:
    return sum([piece.size for piece in conversation_pieces(segments)])


def last_compaction_index(segments: Sequence[ConversationSegment]) -> int:
    """The place of the last segment with a compaction, -1 if there is none."""
    if max([piece.compacted for piece in conversation_pieces(segments)], default=-1) < 0:
        return -1
    return max(place for place, segment in enumerate(segments) if segment.compacted >= 0)
