"""Plans a compaction: what it keeps verbatim, and the token budget of each part.

All numbers are estimated tokens. The parts, the tools and the `instructions` of the request together use at most three
quarters of the threshold; a quarter stays free for the next turns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace

from fumehood.engine.context_truncation import is_instruction, leading_instructions, read_role
from fumehood.engine.token_counter import BYTES_PER_TOKEN, estimate_entry
from fumehood.protocol.conversation import ConversationEntry, ConversationSegment

MIN_THRESHOLD = 1000
_MAX_SUMMARY_TOKENS = 4096
_MIN_SUMMARY_TOKENS = 250
_MAX_MESSAGE_TOKENS = 20_000
_MIN_NOTE_TOKENS = 64
_MAX_NOTE_TOKENS = 2000
_MAX_SCALE = 4
_MIN_SHORTENED_TOKENS = 48
_MAX_KEPT_BYTES = 7 << 19  # of answered messages
_SUMMARY_PROMPT_TOKENS = 300  # approximate size of the summary prompt
_MAX_THINKING_TOKENS = 2048  # reserved for reasoning before the summary
_OMISSION_MARK = (
    "\n[… about {tokens} tokens of this message are left out here; the summary has what matters of them …]\n"
)


@dataclass(frozen=True, slots=True)
class CompactionBudget:
    """Token budgets of the parts of a compaction.

    limit: the threshold. pool: all parts together.
    """

    limit: int
    pool: int
    instructions: int
    summary: int
    notes: int

    @classmethod
    def for_limit(
        cls, limit: int, *, fixed: int = 0, scale: float = 1.0, instructions: int | None = None
    ) -> "CompactionBudget":
        """The budget of a conversation that should stay below `limit` tokens of the model.

        fixed: tokens before the conversation, which cannot be compacted.
        scale: tokens of the model per estimated token.
        instructions: a larger budget for the leading instructions, independent of the limit.
        """
        limit = round(limit / scale)
        pool = max(limit * 3 // 4 - fixed, limit // 4)
        return cls(
            limit=limit,
            pool=pool,
            instructions=pool // 3 if instructions is None else max(pool // 3, round(instructions / scale)),
            summary=min(_MAX_SUMMARY_TOKENS, max(round(_MIN_SUMMARY_TOKENS / scale), pool // 3)),
            notes=min(_MAX_NOTE_TOKENS, max(round(_MIN_NOTE_TOKENS / scale), pool // 12)),
        )

    def compute_message_tokens(self, instructions: int) -> int:
        """The budget for user messages, given the tokens of the kept instructions."""
        left = self.pool - self.summary - self.notes - instructions
        return min(_MAX_MESSAGE_TOKENS, self.limit // 4, max(left, self.limit // 8))

    @property
    def min_gain(self) -> int:
        """The minimum reduction that is worth the cost of a summary."""
        return self.limit // 4


def compute_token_scale(counted: int, estimated: int) -> float:
    """Tokens of the model per estimated token: at least 1, and rounded up to eighths, so that plans stay stable."""
    ratio = counted / max(1, estimated)
    return min(_MAX_SCALE, max(1.0, -(-ratio * 8 // 1) / 8))


def compute_max_thinking_tokens(context_window: int | None) -> int:
    return _MAX_THINKING_TOKENS if context_window is None else min(_MAX_THINKING_TOKENS, context_window // 8)


def compute_max_threshold(context_window: int) -> int:
    """The largest threshold at which the conversation plus one turn can still be summarised as a whole."""
    room = context_window * 15 // 16 - compute_max_thinking_tokens(context_window) - _SUMMARY_PROMPT_TOKENS
    return max(room * 4 // 5, room - _MAX_SUMMARY_TOKENS, context_window // 2)


@dataclass(frozen=True, slots=True)
class CompactionPlan:
    """The contents of a compaction except its summary.

    instructions, messages: entries that are kept, `shortened` of them not complete.
    leading: all leading instructions of the conversation, kept or not.
    unanswered: messages at the end that the model still has to answer.
    gain: the minimum number of tokens saved.
    """

    budget: CompactionBudget
    instructions: Sequence[ConversationEntry]
    messages: Sequence[ConversationEntry]
    unanswered: Sequence[ConversationEntry]
    leading: Sequence[ConversationEntry]
    gain: int
    shortened: int

    @property
    def kept_entries(self) -> list[ConversationEntry]:
        return [*self.instructions, *self.messages]

    @property
    def is_worthwhile(self) -> bool:
        return self.gain >= self.budget.min_gain


def make_plan(
    segments: Sequence[ConversationSegment], budget: CompactionBudget, ignored_message: bytes
) -> CompactionPlan:
    """ignored_message: the raw prompt of an earlier compaction, which looks like a user message."""
    entries = [entry for segment in segments for entry in segment.entries]
    leading = leading_instructions(entries)
    unanswered = find_unanswered_messages(entries, len(leading), min(_MAX_MESSAGE_TOKENS, budget.limit // 4))
    if unanswered and len(leading) == len(entries):
        leading = leading[: -len(unanswered)]
    instructions = _fit_instructions(leading, budget.instructions)
    used = sum(map(estimate_entry, instructions))
    waiting = sum(map(estimate_entry, unanswered))
    answered = entries[len(leading) : len(entries) - len(unanswered)]
    messages = _fit_messages(answered, budget.compute_message_tokens(used) - waiting, ignored_message)
    after = used + waiting + sum(map(estimate_entry, messages)) + budget.summary + budget.notes
    originals = {id(entry) for entry in entries}
    return CompactionPlan(
        budget=budget,
        instructions=instructions,
        messages=messages,
        unanswered=unanswered,
        leading=leading,
        gain=sum(map(estimate_entry, entries)) - after,
        shortened=sum(id(entry) not in originals for entry in (*instructions, *messages)),
    )


def find_unanswered_messages(
    entries: Sequence[ConversationEntry], leading: int, room: int
) -> Sequence[ConversationEntry]:
    """The unanswered messages at the end, oldest first: the last one, and those before it that fit into `room`.

    Some clients send a turn as a system message, so a single system message counts as a turn.
    leading: the number of leading instructions, which are never unanswered messages.
    """
    if leading == len(entries):
        return entries[-1:]
    first = len(entries)
    while first > leading and (is_instruction(entries[first - 1]) or read_role(entries[first - 1]) == "user"):
        room -= estimate_entry(entries[first - 1])
        if room < 0 and first < len(entries):
            break
        first -= 1
    return entries[first:]


def estimate_last_turn(segments: Sequence[ConversationSegment]) -> int:
    """Estimate what came after the model's last output: messages and results of calls."""
    tokens = 0
    for segment in reversed(segments):
        for entry in reversed(segment.entries):
            if entry.exchange is not None or read_role(entry) == "assistant":
                return tokens
            tokens += estimate_entry(entry)
    return tokens


def _fit_instructions(leading: Sequence[ConversationEntry], room: int) -> list[ConversationEntry]:
    """The first instructions that fit, the last of them shortened."""
    kept: list[ConversationEntry] = []
    for entry in leading:
        tokens = estimate_entry(entry)
        if tokens > room:
            shorter = shorten_message(entry, room)
            return kept if shorter is None else [*kept, shorter]
        kept.append(entry)
        room -= tokens
    return kept


def _fit_messages(
    answered: Sequence[ConversationEntry], room: int, ignored_message: bytes
) -> list[ConversationEntry]:
    """The latest user messages that fit; one that needs more than half of the room is shortened."""
    max_tokens = room // 2
    bytes_left = _MAX_KEPT_BYTES
    kept: list[ConversationEntry] = []
    for entry in reversed(answered):
        if (
            read_role(entry) != "user"
            or entry.raw == ignored_message
            or (kept and _has_same_content(kept[-1], entry))
        ):
            continue
        shorter = (
            entry
            if estimate_entry(entry) <= max(max_tokens, _MIN_SHORTENED_TOKENS)
            else shorten_message(entry, max_tokens)
        )
        if shorter is None or shorter.size > bytes_left:
            continue
        room -= estimate_entry(shorter)
        if room < 0:
            break
        bytes_left -= shorter.size
        kept.append(shorter)
    return kept[::-1]


class _RawContent(msgspec.Struct):
    content: msgspec.Raw = msgspec.Raw(b"null")


class _TextPart(msgspec.Struct):
    text: str


class _TextMessage(msgspec.Struct):
    content: str | list[_TextPart]


_raw_content_decoder = msgspec.json.Decoder(_RawContent)
_text_decoder = msgspec.json.Decoder(_TextMessage)
_object_decoder = msgspec.json.Decoder(dict[str, Any])


def read_content(entry: ConversationEntry) -> bytes:
    """The content of a message as raw JSON."""
    return bytes(_raw_content_decoder.decode(entry.raw).content)


def _has_same_content(one: ConversationEntry, other: ConversationEntry) -> bool:
    """Whether a message was sent again, as clients do when a long turn is compacted."""
    return read_content(one) == read_content(other)


def shorten_message(entry: ConversationEntry, tokens: int) -> ConversationEntry | None:
    """The message without its middle; None if it has other content than text, or `tokens` is too small."""
    if tokens < _MIN_SHORTENED_TOKENS or entry.attachments:
        return None
    text = _read_text(entry)
    if text is None:
        return None
    message = _object_decoder.decode(entry.raw)
    message["content"] = omit_middle(text, tokens - 8, _OMISSION_MARK)
    return replace(entry, raw=msgspec.json.encode(message))


def _read_text(entry: ConversationEntry) -> str | None:
    """The text of a message; None if it has other content."""
    try:
        content = _text_decoder.decode(entry.raw).content
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def omit_middle(text: str, tokens: int, mark: str = " […] ") -> str:
    """The beginning and end of a text, with a mark for the omitted middle."""
    encoded = text.encode(errors="replace")
    room = tokens * BYTES_PER_TOKEN
    if len(encoded) <= room:
        return text
    missing = mark.format(tokens=(len(encoded) - room) // BYTES_PER_TOKEN + 1)
    room = max(0, room - len(missing.encode()))
    tail = room // 3
    head = encoded[: room - tail].decode(errors="ignore")
    return head + missing + (encoded[-tail:].decode(errors="ignore") if tail else "")


def truncate_text(text: str, tokens: int) -> str:
    """The beginning of a text, at most `tokens` long."""
    encoded = text.encode(errors="replace")
    room = tokens * BYTES_PER_TOKEN
    return text if len(encoded) <= room else encoded[:room].decode(errors="ignore")
