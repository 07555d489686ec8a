"""Drops the oldest part of a conversation that exceeds the context window.

The cut depends on the conversation alone and moves in steps of a quarter of the window: it stays in place for many
turns, so that the model server's prompt cache stays valid.
"""

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from fumehood.cpu_worker import run_in_worker
from fumehood.engine.token_counter import (
    TokenCounter,
    estimate_cost,
    estimate_entry,
    estimate_segment,
    estimate_segments,
)
from fumehood.interfaces import Caller, ModelBackend
from fumehood.protocol.conversation import ConversationEntry, ConversationSegment
from fumehood.protocol.model_turns import ModelRequest
from fumehood.protocol.openai.api_errors import InvalidRequest

_STEPS_PER_WINDOW = 4  # tokens are dropped in steps of this fraction of the input limit
# Roles that begin a turn; some clients send every turn as a system message.
_TURN_ROLES = ("user", "system", "developer")
_MIN_OUTPUT_TOKENS = 1024  # reserved for the answer if the client sets no maximum


class _RoleTag(msgspec.Struct):
    role: str | None = None
    call_id: str | None = None


_role_tag_decoder = msgspec.json.Decoder(_RoleTag)


def read_role(entry: ConversationEntry) -> str | None:
    """The role of a message; None for any other item."""
    if entry.type != "message":
        return None
    try:
        return _role_tag_decoder.decode(entry.raw).role
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def is_instruction(entry: ConversationEntry) -> bool:
    # The byte search spares decoding: most entries are no instructions.
    return (b"system" in entry.raw or b"developer" in entry.raw) and read_role(entry) in (
        "system",
        "developer",
    )


def leading_instructions(entries: Sequence[ConversationEntry]) -> Sequence[ConversationEntry]:
    """The system and developer messages at the beginning. Later ones are treated like other messages."""
    first = next((index for index, entry in enumerate(entries) if not is_instruction(entry)), len(entries))
    return entries[:first]


def compute_input_token_limit(context_window: int, max_output_tokens: int | None) -> int:
    answer = min(_MIN_OUTPUT_TOKENS, context_window // 8) if max_output_tokens is None else max_output_tokens
    return max(0, context_window - answer)


async def check_length(
    token_counter: TokenCounter, backend: ModelBackend, caller: Caller, request: ModelRequest
) -> None:
    """Raises InvalidRequest if the server counts more tokens than its context window has."""
    profile = backend.get_profile(request.model)
    if profile.context_window is None:
        return
    count = await token_counter.count(backend, caller, request, threshold=profile.context_window)
    if count.exact and count.tokens > profile.context_window:
        raise InvalidRequest(
            f"Your input has {count.tokens} tokens, and the context window of this model {profile.context_window}. "
            "Shorten it, or ask for `truncation: auto` or for compaction.",
            param="input",
            code="context_length_exceeded",
        )


async def truncate_to_fit(
    token_counter: TokenCounter,
    backend: ModelBackend,
    caller: Caller,
    request: ModelRequest,
    pinned_segments: int = 0,
    *,
    steps_per_window: int = _STEPS_PER_WINDOW,
) -> tuple[Sequence[ConversationSegment], int]:
    """Return the segments that fit the context window, and the estimated tokens of what was dropped.

    pinned_segments: the number of first segments that are never dropped.
    steps_per_window: the granularity of the cut.
    """
    context_window = backend.get_profile(request.model).context_window
    if context_window is None:
        return request.segments, 0
    limit = compute_input_token_limit(context_window, request.sampling.max_output_tokens)
    count = await token_counter.count(backend, caller, request, threshold=limit)
    if count.tokens <= limit:
        return request.segments, 0
    first, rest = request.segments[:pinned_segments], request.segments[pinned_segments:]
    estimated = await estimate_segments(rest)
    # The cut is measured in estimated tokens. The ratio converts the server's tokens to them; it is coarse, so that the
    # cut does not move with every turn.
    ratio = max(1, round(8 * estimated / count.tokens)) / 8 if count.exact else 1.0
    step = max(1, limit // steps_per_window)
    steps = -(-(count.tokens - limit) // step)
    segments = request.segments
    while count.tokens > limit:
        drop = round(steps * step * ratio)
        segments = (*first, *await run_in_worker(estimate_cost(rest), drop_oldest, rest, drop))
        if not count.exact or drop >= estimated:
            break
        count = await token_counter.count(
            backend, caller, replace(request, segments=segments), threshold=limit
        )
        steps += 1
    return segments, estimated - await estimate_segments(segments[pinned_segments:])


def drop_oldest(segments: Sequence[ConversationSegment], tokens: int) -> Sequence[ConversationSegment]:
    """Drop at least `tokens` of the oldest entries. A call is dropped together with its result.

    The leading instructions, the user's last message and the last turn stay.
    """
    first, dropped_tokens = 0, 0
    while first < len(segments) - 1 and dropped_tokens + estimate_segment(segments[first]) <= tokens:
        dropped_tokens += estimate_segment(segments[first])
        first += 1
    rest, splits = _list_entries_from(segments, first)
    while first and not any(splits):  # only results of dropped calls are left
        first -= 1
        dropped_tokens -= estimate_segment(segments[first])
        rest, splits = _list_entries_from(segments, first)
    cut = _find_cut([entry for _, entry in rest], splits, tokens - dropped_tokens)
    dropped = [entry for segment in segments[:first] for entry in segment.entries]
    dropped += [entry for _, entry in rest[:cut]]
    if not dropped:
        return segments
    pinned = _find_pinned(dropped, [entry for _, entry in rest[cut:]])
    # Complete segments are reused, because they cache their renderings.
    split = rest[cut][0]
    left = tuple(entry for number, entry in rest[cut:] if number == split)
    is_complete = len(left) == len(segments[split].entries)
    return [*pinned, segments[split] if is_complete else ConversationSegment(left), *segments[split + 1 :]]


def _list_entries_from(
    segments: Sequence[ConversationSegment], first: int
) -> tuple[list[tuple[int, ConversationEntry]], list[bool]]:
    """The entries from segment `first` on, each with its segment number, and where they may be split."""
    rest = [(number, entry) for number in range(first, len(segments)) for entry in segments[number].entries]
    return rest, _find_split_points(rest)


def _find_pinned(
    dropped: Sequence[ConversationEntry], kept: Sequence[ConversationEntry]
) -> list[ConversationSegment]:
    """What stays of the dropped entries: the leading instructions, and the user's last message if none is kept."""
    leading = leading_instructions(dropped)
    pinned = [*leading]
    if not any(read_role(entry) == "user" for entry in kept):
        messages = [entry for entry in dropped[len(leading) :] if read_role(entry) == "user"]
        pinned += messages[-1:]
    return [ConversationSegment(tuple(pinned))] if pinned else []


def _find_cut(entries: Sequence[ConversationEntry], splits: Sequence[bool], tokens: int) -> int:
    """The first index that drops enough tokens, or a later one where a turn begins, if that is near."""
    latest = max((index for index, split in enumerate(splits) if split), default=0)
    dropped = 0
    found: int | None = None
    for index in range(latest + 1):
        if splits[index] and dropped >= tokens:
            if read_role(entries[index]) in _TURN_ROLES:
                return index
            if found is None:
                found = index
            elif dropped > tokens + tokens // 2:
                return found
        dropped += estimate_entry(entries[index])
    return latest if found is None else found


def _find_split_points(entries: Sequence[tuple[int, ConversationEntry]]) -> list[bool]:
    """For every entry, whether the conversation may begin with it.

    A turn is not split, and a result is not separated from its call.
    """
    splits = [True] * len(entries)
    needs = list(range(len(entries)))  # for every entry, the first index that has to stay if it stays
    calls: dict[str, int] = {}
    previous: tuple[int, ConversationEntry] | None = None
    for index, (number, entry) in enumerate(entries):
        if previous is not None:
            same_turn = entry.turn > 0 and (previous[0], previous[1].turn) == (number, entry.turn)
            splits[index] = not same_turn and previous[1].type != "reasoning"
        previous = (number, entry)
        call_id = _read_call_id(entry)
        if entry.type.endswith("_output"):
            # -1 if its call is dropped already: then the result is dropped too.
            needs[index] = calls.get(call_id or entry.id or "", -1)
        elif call_id:
            calls[call_id] = index
    needed = len(entries)
    for index in range(len(entries) - 1, -1, -1):
        needed = min(needed, needs[index])
        splits[index] = splits[index] and needed >= index
    return splits


def _read_call_id(entry: ConversationEntry) -> str | None:
    if entry.type == "message":
        return None
    if entry.exchange is not None:
        return entry.exchange.call_id
    try:
        return _role_tag_decoder.decode(entry.raw).call_id
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
