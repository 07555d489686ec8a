"""Leaves out the oldest of a conversation that is too long for its model.

What is left out is a matter of the conversation alone, in steps of a quarter of the room: the cut stays where it is for
many turns, so that the model server's cache of the prompt holds.
"""

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

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
from fumehood.worker_threads import run_in_worker

_STEPS_PER_WINDOW = 4  # a step is this part of the room
_TURN_ROLES = (
    "user",
    "system",
    "developer",
)  # who begins a turn; some clients send every turn as a system message
_MIN_OUTPUT_TOKENS = 1024  # tokens that are kept free where the client says no number


class _RoleTag(msgspec.Struct):
    role: str | None = None
    call_id: str | None = None


_role_tag_decoder = msgspec.json.Decoder(_RoleTag)


def read_role(entry: ConversationEntry) -> str | None:
    """Whose message it is; None for an item that is no message."""
    if entry.type != "message":
        return None
    try:
        return _role_tag_decoder.decode(entry.raw).role
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def is_instruction(entry: ConversationEntry) -> bool:
    # Most are not, and to see that takes no decoding.
    return (b"system" in entry.raw or b"developer" in entry.raw) and read_role(entry) in (
        "system",
        "developer",
    )


def leading_instructions(entries: Sequence[ConversationEntry]) -> Sequence[ConversationEntry]:
    """The messages of the system and of developers that a conversation begins with. Those that come later are part of
    what was said, like others.
    """
    first = next((place for place, entry in enumerate(entries) if not is_instruction(entry)), len(entries))
    return entries[:first]


def compute_input_token_limit(context_window: int, max_output_tokens: int | None) -> int:
    answer = min(_MIN_OUTPUT_TOKENS, context_window // 8) if max_output_tokens is None else max_output_tokens
    return max(0, context_window - answer)


async def check_length(
    token_counter: TokenCounter, backend: ModelBackend, caller: Caller, request: ModelRequest
) -> None:
    """Raises InvalidRequest for a request that is known to be too long. Where nobody can count, the server says so."""
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
    """So much of the conversation as the model has room for, and the estimated tokens of the rest.

    staying: how many of the first segments are not left out.
    parts: how many steps the room has; what is left out is so many steps.
    """
    context_window = backend.get_profile(request.model).context_window
    if context_window is None:
        return request.segments, 0
    room = compute_input_token_limit(context_window, request.sampling.max_output_tokens)
    count = await token_counter.count(backend, caller, request, threshold=room)
    if count.tokens <= room:
        return request.segments, 0
    first, rest = request.segments[:pinned_segments], request.segments[pinned_segments:]
    estimated = await estimate_segments(rest)
    # What is left out is measured by estimates. Where the server's tokens are others, roughly so many of ours are one
    # of its: roughly, since a cut must not move with every digit.
    ratio = max(1, round(8 * estimated / count.tokens)) / 8 if count.exact else 1.0
    step = max(1, room // steps_per_window)
    steps = -(-(count.tokens - room) // step)
    segments = request.segments
    while count.tokens > room:
        drop = round(steps * step * ratio)
        segments = (*first, *await run_in_worker(estimate_cost(rest), drop_oldest, rest, drop))
        if not count.exact or drop >= estimated:
            break
        count = await token_counter.count(
            backend, caller, replace(request, segments=segments), threshold=room
        )
        steps += 1
    return segments, estimated - await estimate_segments(segments[pinned_segments:])


def drop_oldest(segments: Sequence[ConversationSegment], tokens: int) -> Sequence[ConversationSegment]:
    """The conversation without so many tokens of its oldest, or a little more. A call goes with its result;
    the leading instructions stay, and so do the user's last message and the last turn.
    """
    first, gone = 0, 0
    while first < len(segments) - 1 and gone + estimate_segment(segments[first]) <= tokens:
        gone += estimate_segment(segments[first])
        first += 1
    rest, splits = _list_entries_from(segments, first)
    while first and not any(splits):  # all that is left are results of calls that would be gone
        first -= 1
        gone -= estimate_segment(segments[first])
        rest, splits = _list_entries_from(segments, first)
    place = _find_cut([entry for _, entry in rest], splits, tokens - gone)
    dropped = [entry for segment in segments[:first] for entry in segment.entries]
    dropped += [entry for _, entry in rest[:place]]
    if not dropped:
        return segments
    pinned = _find_pinned(dropped, [entry for _, entry in rest[place:]])
    # Segments that stay whole stay the same, with what is rendered of them.
    broken = rest[place][0]
    left = tuple(entry for number, entry in rest[place:] if number == broken)
    whole = len(left) == len(segments[broken].entries)
    return [*pinned, segments[broken] if whole else ConversationSegment(left), *segments[broken + 1 :]]


def _list_entries_from(
    segments: Sequence[ConversationSegment], first: int
) -> tuple[list[tuple[int, ConversationEntry]], list[bool]]:
    """The entries from a segment on, each with the number of its own, and where they may be split."""
    rest = [(number, entry) for number in range(first, len(segments)) for entry in segments[number].entries]
    return rest, _find_split_points(rest)


def _find_pinned(
    dropped: Sequence[ConversationEntry], kept: Sequence[ConversationEntry]
) -> list[ConversationSegment]:
    """What stays of the dropped: the leading instructions, and the user's last message if there is no other."""
    leading = leading_instructions(dropped)
    pinned = [*leading]
    if not any(read_role(entry) == "user" for entry in kept):
        said = [entry for entry in dropped[len(leading) :] if read_role(entry) == "user"]
        pinned += said[-1:]
    return [ConversationSegment(tuple(pinned))] if pinned else []


def _find_cut(entries: Sequence[ConversationEntry], splits: Sequence[bool], tokens: int) -> int:
    """The first place that leaves out so much, or better one where a turn begins, if there is one soon."""
    latest = max((place for place, split in enumerate(splits) if split), default=0)
    gone = 0
    found: int | None = None
    for place in range(latest + 1):
        if splits[place] and gone >= tokens:
            if read_role(entries[place]) in _TURN_ROLES:
                return place
            if found is None:
                found = place
            elif gone > tokens + tokens // 2:
                return found
        gone += estimate_entry(entries[place])
    return latest if found is None else found


def _find_split_points(entries: Sequence[tuple[int, ConversationEntry]]) -> list[bool]:
    """For every entry, whether the conversation may begin with it: nothing of what one turn made, and no result of a
    call, is torn from what it belongs to.
    """
    splits = [True] * len(entries)
    needs = list(range(len(entries)))  # for every entry, the first place that has to stay if it does
    calls: dict[str, int] = {}
    before: tuple[int, ConversationEntry] | None = None
    for place, (number, entry) in enumerate(entries):
        if before is not None:
            same_turn = entry.turn > 0 and (before[0], before[1].turn) == (number, entry.turn)
            splits[place] = not same_turn and before[1].type != "reasoning"
        before = (number, entry)
        call_id = _read_call_id(entry)
        if entry.type.endswith("_output"):
            # Its call is here, or is left out already, and then the result goes too.
            needs[place] = calls.get(call_id or entry.id or "", -1)
        elif call_id:
            calls[call_id] = place
    needed = len(entries)
    for place in range(len(entries) - 1, -1, -1):
        needed = min(needed, needs[place])
        splits[place] = splits[place] and needed >= place
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
