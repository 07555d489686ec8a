"""A conversation as it is kept and as a model is shown it; imports msgspec and siblings."""

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from fumehood.protocol.attachments import Attachment

_ENTRY_OVERHEAD = 512
COMPACTION = "compaction"
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


class Entry(msgspec.Struct, frozen=True, kw_only=True):
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
        """Of all that it says, about in bytes."""
        seen = self.exchange
        shown = len(seen.arguments) + len(seen.output) + sum(map(len, seen.images)) if seen is not None else 0
        return len(self.raw) + shown + sum([one.size for one in self.attachments])

    @property
    def weight(self) -> int:
        """About how many bytes it takes in memory, with a rendering of it; a guess, for those who bound them."""
        return _ENTRY_OVERHEAD + 2 * self.size


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """What one response added to a conversation: its input, then its output. Never changed once it is made.

    renderings: the same in a model server's own words, kept by whoever speaks that dialect, under its name.
    compacted: the place of its last compaction, -1 if it has none.
    size: that of its entries. Both are looked up once, since every later request asks.
    """

    entries: tuple[Entry, ...]
    renderings: dict[str, bytes] = field(default_factory=dict[str, bytes])
    compacted: int = field(init=False, default=-1)
    size: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        size = 0
        for place, entry in enumerate(self.entries):
            size += entry.size
            if entry.type == COMPACTION:
                object.__setattr__(self, "compacted", place)
        object.__setattr__(self, "size", size)

    @property
    def weight(self) -> int:
        return _ENTRY_OVERHEAD * len(self.entries) + 2 * self.size
