"""In-memory cache of recently used conversations.

Each turn links to the previous one, so a continuation adds one turn, and forks share their common prefix. A
`ConversationSegment` stays the same object while it is cached, so that renderings can be attached to it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from fumehood.protocol.conversation import Conversation, ConversationEntry, ConversationSegment, SegmentGroup

_TURNS_PER_SEGMENT_GROUP = 16


class ThreadPosition(NamedTuple):
    """Where the entries of a response begin. Positions are never reused."""

    thread: int
    start: int


class _CachedTurn:
    """What one response added to a conversation, and the previous turn.

    ref_count: responses and later turns that refer to it; at zero it is removed.
    segment_groups: all groups of turns up to here; ungrouped: number of turns after them.
    is_grouped: whether a segment group contains this turn, here or in a fork.
    """

    __slots__ = (
        "is_grouped",
        "memory_bytes",
        "position",
        "previous",
        "ref_count",
        "segment",
        "segment_groups",
        "ungrouped",
    )

    def __init__(
        self, position: ThreadPosition, segment: ConversationSegment, previous: "_CachedTurn | None"
    ) -> None:
        self.position = position
        self.segment = segment
        self.previous = previous
        self.ref_count = 0
        self.memory_bytes = segment.memory_bytes
        self.segment_groups: tuple[SegmentGroup, ...] = () if previous is None else previous.segment_groups
        self.ungrouped = 1 if previous is None else previous.ungrouped + 1
        self.is_grouped = False
        if self.ungrouped == _TURNS_PER_SEGMENT_GROUP:
            self._group_turns()

    @property
    def end(self) -> int:
        return self.position.start + len(self.segment.entries)

    def to_conversation(self) -> Conversation:
        return Conversation((*self.segment_groups, *[turn.segment for turn in self._list_ungrouped()]))

    def _group_turns(self) -> None:
        """Join the ungrouped turns. Forks that share turns have groups of their own, which count."""
        turns = self._list_ungrouped()
        group = SegmentGroup(tuple([turn.segment for turn in turns]))
        self.segment_groups, self.ungrouped = (*self.segment_groups, group), 0
        for turn in turns:
            if turn.is_grouped and group.is_combined:
                self.memory_bytes += turn.segment.size
            turn.is_grouped = True

    def _list_ungrouped(self) -> "list[_CachedTurn]":
        turn: _CachedTurn | None = self
        turns: list[_CachedTurn] = []
        while turn is not None and len(turns) < self.ungrouped:
            turns.append(turn)
            turn = turn.previous
        return turns[::-1]


class ConversationCache:
    """Finished responses and their conversations, up to `max_bytes`, with LRU eviction."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.memory_bytes = 0
        self._turn_by_response: dict[str, tuple[str, _CachedTurn]] = {}
        self._turns: dict[ThreadPosition, _CachedTurn] = {}

    def get(self, tenant: str, response_id: str) -> Conversation | None:
        found = self._turn_by_response.get(response_id)
        if found is None or found[0] != tenant:
            return None
        self._turn_by_response[response_id] = self._turn_by_response.pop(response_id)  # most recently used
        return found[1].to_conversation()

    def append(
        self,
        tenant: str,
        response_id: str,
        previous: str | None,
        position: ThreadPosition,
        entries: Sequence[ConversationEntry],
    ) -> None:
        """Add a response that has just ended, if the conversation before it is cached."""
        if position.start == 0:
            self._insert(tenant, response_id, self._get_or_add_turn(position, entries, None))
            return
        found = self._turn_by_response.get(previous) if previous is not None else None
        if found is not None and found[0] == tenant and found[1].end == position.start:
            self._insert(tenant, response_id, self._get_or_add_turn(position, entries, found[1]))

    def load(
        self,
        tenant: str,
        response_id: str,
        turns: Sequence[tuple[ThreadPosition, Sequence[ConversationEntry]]],
    ) -> Sequence[ConversationSegment]:
        """Add a conversation from the database, sharing the turns that are cached already, and return it."""
        known = next((n for n in reversed(range(len(turns))) if turns[n][0] in self._turns), -1)
        tip = self._turns[turns[known][0]] if known >= 0 else None
        for position, entries in turns[known + 1 :]:
            tip = self._get_or_add_turn(position, entries, tip)
        if tip is None:
            return ()
        conversation = tip.to_conversation()
        self._insert(tenant, response_id, tip)
        return conversation

    def remove(self, response_id: str) -> None:
        found = self._turn_by_response.pop(response_id, None)
        if found is not None:
            self._release(found[1])

    def _get_or_add_turn(
        self, position: ThreadPosition, entries: Sequence[ConversationEntry], previous: _CachedTurn | None
    ) -> _CachedTurn:
        turn = self._turns.get(position)
        if turn is None:
            turn = self._turns[position] = _CachedTurn(
                position, ConversationSegment(tuple(entries)), previous
            )
            self.memory_bytes += turn.memory_bytes
            if previous is not None:
                previous.ref_count += 1
        return turn

    def _insert(self, tenant: str, response_id: str, turn: _CachedTurn) -> None:
        turn.ref_count += 1
        self.remove(response_id)
        self._turn_by_response[response_id] = (tenant, turn)
        while self.memory_bytes > self._max_bytes and self._turn_by_response:
            self.remove(next(iter(self._turn_by_response)))

    def _release(self, turn: _CachedTurn | None) -> None:
        while turn is not None:
            turn.ref_count -= 1
            if turn.ref_count:
                return
            del self._turns[turn.position]
            self.memory_bytes -= turn.memory_bytes
            turn = turn.previous
