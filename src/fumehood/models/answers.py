"""Reads the body of an answer, be it a stream of events or one document; imports msgspec, siblings and `protocol`.

What the events mean is said by the parsers of the two kinds of servers, which inherit from this one.
"""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec
from msgspec.structs import replace

from fumehood.aside import LARGE
from fumehood.models.think_tags import ThinkTags
from fumehood.models.upstream_errors import UpstreamErrors
from fumehood.protocol.errors import ModelError
from fumehood.protocol.json_limits import MOST_VALUES, has_too_many_values
from fumehood.protocol.models import AnyModelEvent, CallArguments, Text, Thought

LONGEST_LINE = 1 << 25  # and the longest answer that is not streamed
LONGEST_ANSWER = 1 << 29  # in all, whatever it says or does not say
MOST_TOKENS = 1 << 48  # that are believed
# What may come in a row without saying anything: comments, blank lines and fields that are no data; and events of which
# nobody here knows what to do with them, which may be pictures.
SILENT_BYTES = 1 << 20
IGNORED_BYTES = 1 << 26

_LARGEST_PIECE = 1 << 16  # characters
_LONGEST_ODD = 1 << 20  # bytes that are worth the slow way of reading what is not quite JSON
_EVENT_COST = 1 << 10  # of one more event, in bytes of a long one
_LINE_COST = 1 << 6  # of one more line of an event
_BOM = b"\xef\xbb\xbf"


class TurnReader(Protocol):
    """One turn. Give it what each read brought, then `finish` at the end of the body; take the events.

    failure: set once the answer cannot go on; the events before it were given. ended: `TurnEnded` was given; over: one
    of the two. closing: the model has said why it stopped, and at most the usage is still to come. held: the bytes that
    have yet to be read, since their line or document is not complete.
    """

    @property
    def failure(self) -> ModelError | None: ...

    @property
    def ended(self) -> bool: ...

    @property
    def over(self) -> bool: ...

    @property
    def closing(self) -> bool: ...

    @property
    def held(self) -> int: ...

    def feed(self, piece: bytes) -> list[AnyModelEvent]: ...

    def finish(self) -> list[AnyModelEvent]: ...


class AnswerParser[Told](ABC):
    """A `TurnReader`, but for what the events mean; `decoder` reads one."""

    def __init__(
        self,
        errors: UpstreamErrors,
        decoder: msgspec.json.Decoder[Told],
        *,
        longest: int = LONGEST_LINE,
        most: int = LONGEST_ANSWER,
    ) -> None:
        self.failure: ModelError | None = None
        self.ended = False
        self._errors = errors
        self._decoder = decoder
        self._longest = longest
        self._left = most
        self._held: list[bytes] = []  # an unfinished line, or an answer that is not a stream
        self._held_bytes = 0
        self._begun = False
        self._is_document = False
        self._data: list[bytes] = []  # lines of an event that goes on over several
        self._data_bytes = 0
        self._silent_bytes = 0  # since the last event that said something
        self._ignored_bytes = 0
        self._heard = False
        self._is_over = False
        self._tags: ThinkTags | None = None  # where reasoning may be part of the text, until that is known

    @property
    def closing(self) -> bool:
        return False

    @property
    def over(self) -> bool:
        return self.ended or self.failure is not None

    @property
    def held(self) -> int:
        return self._held_bytes + self._data_bytes

    # ---- what the servers differ in ---------------------------------------------------------------------------

    @abstractmethod
    def _take(self, told: Told, payload: bytes, events: list[AnyModelEvent]) -> bool:
        """Add the events; whether the lines after it are to be read in another way."""

    @abstractmethod
    def _end(self, events: list[AnyModelEvent]) -> None:
        """The server says that it is done, or has said enough and is gone."""

    @property
    @abstractmethod
    def _may_end(self) -> bool:
        """Whether a body that is over is a whole turn, as far as one can know."""

    def _is_irrelevant(self, payload: bytes) -> bool:  # noqa: ARG002 - some servers tell many things
        """Whether what cannot be read need not be."""
        return False

    # ---- bytes ------------------------------------------------------------------------------------------------

    def feed(self, piece: bytes) -> list[AnyModelEvent]:
        """What one read brought, as far as its lines are complete."""
        events: list[AnyModelEvent] = []
        if self.over:
            return events
        self._left -= len(piece)
        if self._left < 0:
            self.failure = self._errors.endless()
            return events
        if not self._begun:
            piece = self._begin(piece)
        cut = 0 if self._is_document else piece.rfind(b"\n") + 1
        if not cut:
            self._hold(piece)
            return events
        block = piece[:cut] if cut < len(piece) else piece
        if self._held:
            block = b"".join([*self._held, block])
            self._held.clear()
            self._held_bytes = 0
        if cut < len(piece):
            self._hold(piece[cut:])
        self._read(block, events)
        if events:
            self._silent_bytes = self._ignored_bytes = 0
        elif not self.over:
            self._count_silent(block)
        return events if self._tags is None else self._sifted(events)

    def finish(self) -> list[AnyModelEvent]:
        """The body is over: the rest, and the end of the turn if it may be one."""
        events: list[AnyModelEvent] = []
        if self.over:
            return events
        self._is_over = True
        rest = b"".join(self._held)
        if self._is_document:
            self._take_slowly(rest, events)
        else:
            self._read_lines(rest + b"\n\n", events)
        if not self.over:
            if self._may_end:
                self._end(events)
            elif self._heard:
                self.failure = self._errors.broke()
            else:
                self.failure = self._errors.unreadable("its answer is empty, or not an answer to this")
        return self._sifted(events)

    def _sifted(self, events: list[AnyModelEvent]) -> list[AnyModelEvent]:
        if self._tags is None:
            return events
        events = self._tags.sift(events)
        if self._tags.over:
            self._tags = None
        return events

    def _begin(self, piece: bytes) -> bytes:
        """The very first bytes tell a stream from an answer in one piece."""
        start = b"".join([*self._held, piece])
        self._held.clear()
        self._held_bytes = 0
        if _BOM.startswith(start) and start != _BOM:
            return start
        size = len(start)
        start = start.removeprefix(_BOM).lstrip()
        if start:
            self._begun = True
            self._is_document = start.startswith(b"{")
        else:
            self._add_silent(size)
        return start

    def _hold(self, piece: bytes) -> None:
        if not piece:
            return
        self._held.append(piece)
        self._held_bytes += len(piece)
        if self._held_bytes > self._longest:
            self._held.clear()
            self.failure = self._errors.unreadable(f"it sent a line of more than {self._longest} bytes")

    def _count_silent(self, block: bytes) -> None:
        """Bound what says nothing: a server may send it for as long as it likes, and a stream of it times out never."""
        if self._is_document:
            return
        payloads = [line for line in block.split(b"\n") if line.startswith(b"data:")]
        size = sum(map(len, payloads))
        self._ignored_bytes += size + _EVENT_COST * len(payloads)
        if self._ignored_bytes > IGNORED_BYTES:
            self.failure = self._errors.barren("too many events that say nothing")
        else:
            self._add_silent(len(block) - size)

    def _add_silent(self, size: int) -> None:
        self._silent_bytes += size
        if self._silent_bytes > SILENT_BYTES:
            self.failure = self._errors.barren(f"more than {SILENT_BYTES} bytes without an event")

    # ---- lines ------------------------------------------------------------------------------------------------

    def _read(self, block: bytes, events: list[AnyModelEvent]) -> None:
        """Complete lines."""
        while block and not self.over:
            block = self._read_lines(block, events)

    def _read_lines(self, block: bytes, events: list[AnyModelEvent]) -> bytes:
        """Read until the end, or until the rest is to be read in another way; that rest."""
        lines = block.split(b"\n")
        for number, line in enumerate(lines):
            if line.startswith(b"data:"):
                if self._read_data(line[5:], events):
                    return b"\n".join(lines[number + 1 :]).lstrip(b"\n")
                if self.over:
                    break
            elif self._data and not line.strip() and number + 1 < len(lines):
                data, self._data, self._data_bytes = b"\n".join(self._data), [], 0
                self._take_slowly(data, events)
        return b""

    def _read_data(self, payload: bytes, events: list[AnyModelEvent]) -> bool:
        if self._data:
            self._add_data(payload)
            return False
        if len(payload) >= LARGE and self._is_too_much(payload):
            return False
        try:
            told = self._decoder.decode(payload)
        except (ValueError, RecursionError):  # also every error of msgspec
            if payload.strip() == b"[DONE]" and self._heard:
                self._end(events)
            else:
                self._add_data(payload)  # more of it may be on the next line
            return False
        return self._take(told, payload, events)

    def _add_data(self, payload: bytes) -> None:
        self._data.append(payload)
        self._data_bytes += len(payload) + _LINE_COST
        if self._data_bytes > self._longest:
            self._data, self._data_bytes = [], 0
            self.failure = self._errors.unreadable(f"it sent an event of more than {self._longest} bytes")

    def _is_too_much(self, payload: bytes) -> bool:
        if not has_too_many_values(payload):
            return False
        self.failure = self._errors.unreadable(f"it sent more than {MOST_VALUES} values at once")
        return True

    def _take_slowly(self, payload: bytes, events: list[AnyModelEvent]) -> None:
        """A payload that was not easy to read: odd types, bytes that are not UTF-8, halves of surrogate pairs."""
        if len(payload) >= LARGE and self._is_too_much(payload):
            return
        try:
            try:
                told = self._decoder.decode(payload)
            except (ValueError, RecursionError):
                told = _loosely(payload, self._decoder)
        except (ValueError, RecursionError) as error:
            if not self._is_over and not self._is_irrelevant(payload):  # it may also have been cut off
                self.failure = self._errors.unreadable(str(error))
            return
        self._take(told, b"", events)


def _loosely[Told](payload: bytes, decoder: msgspec.json.Decoder[Told]) -> Told:
    """What can be read of it; raises ValueError."""
    if len(payload) > _LONGEST_ODD:
        raise ValueError("it is too long for something that is not quite JSON")
    value = json.loads(
        payload.decode(errors="replace"), parse_float=_finite, parse_int=_finite, parse_constant=_nothing
    )
    whole = json.dumps(value, ensure_ascii=False).encode(errors="replace")
    return msgspec.json.decode(whole, type=decoder.type, strict=False)


def _finite(digits: str) -> float | None:
    number = float(digits) if len(digits) > 18 or not digits.lstrip("-").isdigit() else int(digits)
    return number if math.isfinite(number) else None


def _nothing(_: str) -> None:
    return None


def in_pieces(events: Sequence[AnyModelEvent]) -> Iterator[Sequence[AnyModelEvent]]:
    """The same events in batches of which none is long: what came at once is told bit by bit."""
    for event in events:
        if isinstance(event, Text | Thought | CallArguments) and len(event.delta) > _LARGEST_PIECE:
            logprobs = event.logprobs if isinstance(event, Text) else []
            for start in range(0, len(event.delta), _LARGEST_PIECE):
                piece = replace(event, delta=event.delta[start : start + _LARGEST_PIECE])
                yield [piece if not start or not logprobs else replace(piece, logprobs=[])]
        else:
            yield [event]


def tokens(told: float | None) -> int:
    """A number of tokens as it was told, if it can be one."""
    return min(max(0, int(told)), MOST_TOKENS) if told is not None and math.isfinite(told) else 0


def arguments_of(told: str | dict[str, object] | None) -> str:
    """The arguments of a call, which some servers give as an object."""
    return msgspec.json.encode(told).decode() if isinstance(told, dict) else told or ""
