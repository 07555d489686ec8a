"""What a compaction keeps word for word, and how many tokens each part of it may have; imports siblings and msgspec.

All numbers are tokens as `estimate` counts them. Together the parts have at most three quarters of the threshold, with
the tools and `instructions` of the request: a quarter of it is free for what comes next.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace

from fumehood.engine.tokens import BYTES_A_TOKEN, estimate
from fumehood.engine.truncation import is_instruction, leading_instructions, role_of
from fumehood.protocol.conversation import Entry, Segment

LEAST_THRESHOLD = 1000
_LONGEST_SUMMARY = 4096
_SHORTEST_SUMMARY = 250
_MOST_MESSAGES = 20_000
_LEAST_NOTES = 64
_MOST_NOTES = 2000
_LARGEST_SCALE = 4
_LEAST_SHORTENED = 48
_MOST_KEPT_BYTES = 7 << 19  # of messages that are answered
_QUESTION = 300  # tokens of the request for a summary, more or less
_LONGEST_THINKING = 2048  # tokens that a model may need before it begins to write
_CUT = (
    "\n[… about {tokens} tokens of this message are left out here; the summary has what matters of them …]\n"
)


@dataclass(frozen=True, slots=True)
class Budget:
    """How many tokens each part of a compaction may have.

    limit: the threshold.
    pool: all parts together.
    """

    limit: int
    pool: int
    instructions: int
    summary: int
    notes: int

    @classmethod
    def of(
        cls, limit: int, *, fixed: int = 0, scale: float = 1.0, instructions: int | None = None
    ) -> "Budget":
        """The budget of a conversation that should stay below `limit` tokens.

        fixed: tokens that stand before the conversation and cannot be compacted.
        scale: how many tokens of the model's one of ours is.
        instructions: for the leading instructions, where that is no matter of the limit.
        """
        limit = round(limit / scale)
        pool = max(limit * 3 // 4 - fixed, limit // 4)
        return cls(
            limit=limit,
            pool=pool,
            instructions=pool // 3 if instructions is None else max(pool // 3, round(instructions / scale)),
            summary=min(_LONGEST_SUMMARY, max(round(_SHORTEST_SUMMARY / scale), pool // 3)),
            notes=min(_MOST_NOTES, max(round(_LEAST_NOTES / scale), pool // 12)),
        )

    def messages(self, instructions: int) -> int:
        """For the user's messages, besides instructions of so many tokens."""
        left = self.pool - self.summary - self.notes - instructions
        return min(_MOST_MESSAGES, self.limit // 4, max(left, self.limit // 8))

    @property
    def least_gain(self) -> int:
        """With less, a compaction is not worth its summary."""
        return self.limit // 4


def scale_of(counted: int, estimated: int) -> float:
    """How many tokens of the model's one estimated token is: at least one, and in steps, so that what is kept does not
    change with every digit.
    """
    ratio = counted / max(1, estimated)
    return min(_LARGEST_SCALE, max(1.0, -(-ratio * 8 // 1) / 8))


def longest_thinking(context_window: int | None) -> int:
    return _LONGEST_THINKING if context_window is None else min(_LONGEST_THINKING, context_window // 8)


def largest_threshold(context_window: int) -> int:
    """A conversation of so many tokens, and a turn more, can still be summarised as a whole."""
    room = context_window * 15 // 16 - longest_thinking(context_window) - _QUESTION
    return max(room * 4 // 5, room - _LONGEST_SUMMARY, context_window // 2)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a compaction will consist of, but for its summary.

    instructions, messages: what is kept; `shortened` of them are not whole.
    leading: the instructions that the conversation begins with, whether or not there is room for all of them.
    unanswered: the messages at the end, which the model still has to answer.
    gain: by how many tokens the conversation will be shorter, at least.
    """

    budget: Budget
    instructions: Sequence[Entry]
    messages: Sequence[Entry]
    unanswered: Sequence[Entry]
    leading: Sequence[Entry]
    gain: int
    shortened: int

    @property
    def kept(self) -> list[Entry]:
        return [*self.instructions, *self.messages]

    @property
    def is_worthwhile(self) -> bool:
        return self.gain >= self.budget.least_gain


def make_plan(segments: Sequence[Segment], budget: Budget, hidden: bytes) -> Plan:
    """hidden: a message that is not the user's, though it looks like one."""
    entries = [entry for segment in segments for entry in segment.entries]
    leading = leading_instructions(entries)
    unanswered = unanswered_messages(entries, len(leading), min(_MOST_MESSAGES, budget.limit // 4))
    if unanswered and len(leading) == len(entries):
        leading = leading[: -len(unanswered)]
    instructions = _fit_instructions(leading, budget.instructions)
    used = sum(map(estimate, instructions))
    waiting = sum(map(estimate, unanswered))
    answered = entries[len(leading) : len(entries) - len(unanswered)]
    messages = _fit_messages(answered, budget.messages(used) - waiting, hidden)
    after = used + waiting + sum(map(estimate, messages)) + budget.summary + budget.notes
    whole = {id(entry) for entry in entries}
    return Plan(
        budget=budget,
        instructions=instructions,
        messages=messages,
        unanswered=unanswered,
        leading=leading,
        gain=sum(map(estimate, entries)) - after,
        shortened=sum(id(entry) not in whole for entry in (*instructions, *messages)),
    )


def unanswered_messages(entries: Sequence[Entry], leading: int, room: int) -> Sequence[Entry]:
    """The messages at the end that nobody has answered, oldest first: the last one, and those before it that there is
    room for. Some clients send a turn as a system message; one that is alone is a turn, too.

    leading: how many instructions come first; they are none of these.
    """
    if leading == len(entries):
        return entries[-1:]
    first = len(entries)
    while first > leading and (is_instruction(entries[first - 1]) or role_of(entries[first - 1]) == "user"):
        room -= estimate(entries[first - 1])
        if room < 0 and first < len(entries):
            break
        first -= 1
    return entries[first:]


def tokens_of_turn(segments: Sequence[Segment]) -> int:
    """What came since the model has last said something: messages, and results of calls."""
    tokens = 0
    for segment in reversed(segments):
        for entry in reversed(segment.entries):
            if entry.exchange is not None or role_of(entry) == "assistant":
                return tokens
            tokens += estimate(entry)
    return tokens


def _fit_instructions(leading: Sequence[Entry], room: int) -> list[Entry]:
    """As many of the first as there is room for, the last of them shortened."""
    kept: list[Entry] = []
    for entry in leading:
        tokens = estimate(entry)
        if tokens > room:
            shorter = shorten(entry, room)
            return kept if shorter is None else [*kept, shorter]
        kept.append(entry)
        room -= tokens
    return kept


def _fit_messages(answered: Sequence[Entry], room: int, hidden: bytes) -> list[Entry]:
    """The user's latest messages; one that would take more than half of the room is shortened."""
    most = room // 2
    bytes_left = _MOST_KEPT_BYTES
    kept: list[Entry] = []
    for entry in reversed(answered):
        if role_of(entry) != "user" or entry.raw == hidden or (kept and _same(kept[-1], entry)):
            continue
        shorter = entry if estimate(entry) <= max(most, _LEAST_SHORTENED) else shorten(entry, most)
        if shorter is None or shorter.size > bytes_left:
            continue
        room -= estimate(shorter)
        if room < 0:
            break
        bytes_left -= shorter.size
        kept.append(shorter)
    return kept[::-1]


class _Said(msgspec.Struct):
    content: msgspec.Raw = msgspec.Raw(b"null")


class _Part(msgspec.Struct):
    text: str


class _Text(msgspec.Struct):
    content: str | list[_Part]


_said = msgspec.json.Decoder(_Said)
_texts = msgspec.json.Decoder(_Text)
_objects = msgspec.json.Decoder(dict[str, Any])


def content_of(entry: Entry) -> bytes:
    """What a message says, as it was written."""
    return bytes(_said.decode(entry.raw).content)


def _same(one: Entry, other: Entry) -> bool:
    """Whether a message was only sent again: clients do so when a long turn is compacted."""
    return content_of(one) == content_of(other)


def shorten(entry: Entry, tokens: int) -> Entry | None:
    """The message with its beginning and its end only; None if it has more than text, or if there is no room."""
    if tokens < _LEAST_SHORTENED or entry.attachments:
        return None
    text = _text_of(entry)
    if text is None:
        return None
    message = _objects.decode(entry.raw)
    message["content"] = shorten_text(text, tokens - 8, _CUT)
    return replace(entry, raw=msgspec.json.encode(message))


def _text_of(entry: Entry) -> str | None:
    """What a message says; None if it says more than text."""
    try:
        content = _texts.decode(entry.raw).content
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def shorten_text(text: str, tokens: int, mark: str = " […] ") -> str:
    """The beginning and the end of a text, with a mark where something is missing."""
    encoded = text.encode(errors="replace")
    room = tokens * BYTES_A_TOKEN
    if len(encoded) <= room:
        return text
    missing = mark.format(tokens=(len(encoded) - room) // BYTES_A_TOKEN + 1)
    room = max(0, room - len(missing.encode()))
    tail = room // 3
    head = encoded[: room - tail].decode(errors="ignore")
    return head + missing + (encoded[-tail:].decode(errors="ignore") if tail else "")


def cut_text(text: str, tokens: int) -> str:
    """The beginning of a text."""
    encoded = text.encode(errors="replace")
    room = tokens * BYTES_A_TOKEN
    return text if len(encoded) <= room else encoded[:room].decode(errors="ignore")
