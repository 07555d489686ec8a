"""The conversations that were used last, in memory; imports `protocol` and the standard library.

A turn knows the turn before it, so a conversation that goes on costs one more turn, and forks share what they have in
common. A `Segment` stays the same object for as long as anything here leads to it: whoever renders it keeps his work
on it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from fumehood.protocol.conversation import Conversation, Entry, Segment, Stretch

_STRETCH = 16  # turns


class Place(NamedTuple):
    """Where the entries of a response begin; it never means two things."""

    thread: int
    start: int


class _Turn:
    """What one response added to a conversation, with the turn before it.

    users: the responses and later turns that lead here; without any it is forgotten.
    stretches: those that the conversation has up to here; loose: how many turns come after them.
    in_stretch: whether there is a stretch with this turn, here or in a fork.
    """

    __slots__ = ("before", "in_stretch", "loose", "place", "segment", "stretches", "users", "weight")

    def __init__(self, place: Place, segment: Segment, before: "_Turn | None") -> None:
        self.place = place
        self.segment = segment
        self.before = before
        self.users = 0
        self.weight = segment.weight
        self.stretches: tuple[Stretch, ...] = () if before is None else before.stretches
        self.loose = 1 if before is None else before.loose + 1
        self.in_stretch = False
        if self.loose == _STRETCH:
            self._stretch()

    @property
    def end(self) -> int:
        return self.place.start + len(self.segment.entries)

    def path(self) -> Conversation:
        return Conversation((*self.stretches, *[turn.segment for turn in self._newest()]))

    def _stretch(self) -> None:
        """Lay the loose ones together. What is kept of a stretch goes with its turns, but each fork keeps its own of
        those that it shares.
        """
        turns = self._newest()
        stretch = Stretch(tuple([turn.segment for turn in turns]))
        self.stretches, self.loose = (*self.stretches, stretch), 0
        for turn in turns:
            if turn.in_stretch and stretch.in_one:
                self.weight += turn.segment.size
            turn.in_stretch = True

    def _newest(self) -> "list[_Turn]":
        """The loose ones."""
        turn: _Turn | None = self
        turns: list[_Turn] = []
        while turn is not None and len(turns) < self.loose:
            turns.append(turn)
            turn = turn.before
        return turns[::-1]


class CachedConversations:
    """Ended responses and what they stand on, up to `limit` bytes; the least recently used go first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.weight = 0
        self._tips: dict[str, tuple[str, _Turn]] = {}
        self._turns: dict[Place, _Turn] = {}

    def find(self, tenant: str, response_id: str) -> Conversation | None:
        found = self._tips.get(response_id)
        if found is None or found[0] != tenant:
            return None
        self._tips[response_id] = self._tips.pop(response_id)  # now the last to go
        return found[1].path()

    def append(
        self, tenant: str, response_id: str, previous: str | None, place: Place, entries: Sequence[Entry]
    ) -> None:
        """A response that just ended. It is not kept if what it stands on is not here."""
        if place.start == 0:
            self._keep(tenant, response_id, self._turn(place, entries, None))
            return
        found = self._tips.get(previous) if previous is not None else None
        if found is not None and found[0] == tenant and found[1].end == place.start:
            self._keep(tenant, response_id, self._turn(place, entries, found[1]))

    def load(
        self, tenant: str, response_id: str, turns: Sequence[tuple[Place, Sequence[Entry]]]
    ) -> Sequence[Segment]:
        """A conversation from the database, by what of it is here already."""
        known = next((n for n in reversed(range(len(turns))) if turns[n][0] in self._turns), -1)
        tip = self._turns[turns[known][0]] if known >= 0 else None
        for place, entries in turns[known + 1 :]:
            tip = self._turn(place, entries, tip)
        if tip is None:
            return ()
        path = tip.path()
        self._keep(tenant, response_id, tip)
        return path

    def drop(self, response_id: str) -> None:
        found = self._tips.pop(response_id, None)
        if found is not None:
            self._release(found[1])

    def _turn(self, place: Place, entries: Sequence[Entry], before: _Turn | None) -> _Turn:
        turn = self._turns.get(place)
        if turn is None:
            turn = self._turns[place] = _Turn(place, Segment(tuple(entries)), before)
            self.weight += turn.weight
            if before is not None:
                before.users += 1
        return turn

    def _keep(self, tenant: str, response_id: str, turn: _Turn) -> None:
        turn.users += 1
        self.drop(response_id)
        self._tips[response_id] = (tenant, turn)
        while self.weight > self._limit and self._tips:
            self.drop(next(iter(self._tips)))

    def _release(self, turn: _Turn | None) -> None:
        while turn is not None:
            turn.users -= 1
            if turn.users:
                return
            del self._turns[turn.place]
            self.weight -= turn.weight
            turn = turn.before
