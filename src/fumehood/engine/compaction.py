"""Makes a long conversation short, and opens what it was made into; imports `interfaces`, siblings and msgspec.

A compaction is an item that stands for everything before it: a summary by the model, the user's latest messages and all
instructions word for word, and what hosted tools must not forget. It is sealed, since clients carry it. A model never
sees the item; it is shown what the item stands for, as ordinary messages.
"""

import contextlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from fumehood.aside import aside
from fumehood.engine.tokens import BYTES_A_TOKEN, Tokens, effort, estimate, tokens_of_all
from fumehood.engine.truncation import fitted, is_instruction, role_of
from fumehood.interfaces import Caller, HostedTool, ModelBackend, Sealer, Unsealable
from fumehood.protocol.attachments import Attachment
from fumehood.protocol.conversation import COMPACTION, Entry, Segment, followed, last_compacted
from fumehood.protocol.errors import InvalidRequest, ModelError
from fumehood.protocol.ids import new_id
from fumehood.protocol.items import Compaction, peek
from fumehood.protocol.models import ModelRequest, Sampling, Text, Thought, TurnEnded
from fumehood.protocol.responses import Usage

USUAL_LIMIT = 128_000  # tokens of a context window that nobody has told
_SHARE = 4  # of the limit, for the kept messages together, and for the summary
_MOST_KEPT_TOKENS = 20_000
_LONGEST_SUMMARY = 4096  # tokens
_SHORTEST_SUMMARY = 250
_THINKING = 2048  # tokens that a model may need before it begins to write
_LARGEST_STATE = 10 << 20  # bytes; sealed and in base64 it is a third more
_MOST_KEPT_BYTES = 7 << 19  # of messages that are answered
_NEW_SHARE = 8  # of the limit: with less that is new, a compaction gains nothing
_MOST_OPENED = 16 << 20  # bytes of opened ones that are kept

_ASK = (
    "Stop here and write a summary of this conversation for yourself. It will take the place of everything above; of "
    "that you will see nothing more but the system's instructions and the user's latest messages.\n"
    "Tell everything that is needed to go on as if nothing had happened: what the user wants and likes, facts and "
    "figures that were named, decisions, what was done and with which results, what code has left in variables and "
    "files, what is open and what comes next. If there is a summary of earlier parts above, take over all of it that "
    "still matters. Do not answer the user, call no tools. Write only the summary, in at most {words} words."
)
_HEADING = "Summary of the conversation so far, of which only the messages above were kept:"
_GO_ON = "Go on from where your summary ends."


class _State(msgspec.Struct, kw_only=True):
    """What is sealed.

    messages: instructions and what the user said, as it came, oldest first.
    tools: items that hosted tools find in place of their calls; notes: what the model is told of them.
    open: messages that are not answered yet.
    attached: what the files of messages are, by the place of the message among `messages` and `open`.
    """

    version: Literal[1] = 1
    messages: list[Raw]
    summary: str
    tools: list[Raw] = []
    notes: list[str] = []
    open: list[Raw] = []
    attached: dict[int, tuple[Attachment, ...]] = {}


class _Item(msgspec.Struct):
    encrypted_content: str


class _Text(msgspec.Struct, tag_field="type"):
    text: str


class _Written(_Text, tag="output_text"):
    pass


class _Asked(_Text, tag="input_text"):
    pass


class _Message(msgspec.Struct, tag_field="type", tag="message"):
    role: str
    content: list[_Written | _Asked]


class _Content(msgspec.Struct):
    content: Raw = Raw(b"null")


_states = msgspec.json.Decoder(_State)
_items = msgspec.json.Decoder(_Item)
_contents = msgspec.json.Decoder(_Content)
_encode = msgspec.json.Encoder().encode
_GO_ON_RAW = _encode(_Message("user", [_Asked(_GO_ON)]))
_NOTHING = Segment(())
_NO_FILES: Mapping[int, tuple[Attachment, ...]] = {}


@dataclass(frozen=True, slots=True)
class Opened:
    """A compaction that is open.

    shown: what the model sees of it; remembered: what hosted tools see.
    said: the contents of the instructions in it, word for word.
    """

    shown: Segment
    remembered: Segment
    said: frozenset[bytes]
    weight: int


@dataclass(frozen=True, slots=True)
class Window:
    """What a response stands on, as the model is shown it.

    segments: the conversation from its last compaction on.
    opened: how many of the segments are that compaction.
    remembered: what hosted tools know from before it.
    """

    segments: Sequence[Segment]
    opened: int = 0
    remembered: Segment = _NOTHING


@dataclass(frozen=True, slots=True)
class Compacted:
    """A compaction that was made, and what the conversation begins with from now on."""

    item: Compaction
    window: Window
    usage: Usage | None

    def entry(self, turn: int) -> Entry:
        return Entry(type=COMPACTION, id=self.item.id, turn=turn, raw=_encode(self.item))


class Compactor:
    """Makes conversations short, and opens again what it made.

    `sealer`: None where nothing can be sealed; then nothing is compacted.
    """

    def __init__(self, sealer: Sealer | None, tools: Sequence[HostedTool], tokens: Tokens) -> None:
        self._sealer = sealer
        self._tools = tools
        self._tokens = tokens
        self._opened: dict[tuple[str, str], Opened] = {}
        self._weight = 0
        self._keeping = threading.Lock()  # large ones are opened beside the loop

    @property
    def able(self) -> bool:
        return self._sealer is not None

    # --- what the model is shown ---

    def window(self, caller: Caller, past: Sequence[Segment], added: Segment) -> Window:
        """The conversation from its last compaction on; raises InvalidRequest for one that is not ours."""
        if added.compacted >= 0:
            return self._within(caller, added)
        place = last_compacted(past)
        if place < 0:
            return Window(followed(past, (added,)))
        opened, after = self._from(caller, past[place], "previous_response_id")
        return _window(opened, (), (*after, *past[place + 1 :], added))

    def _within(self, caller: Caller, added: Segment) -> Window:
        for number, entry in enumerate(added.entries[: added.compacted]):
            if entry.type == COMPACTION:  # it is not needed, but nobody should get used to giving wrong ones
                self._open(caller, entry, f"input[{number}].encrypted_content")
        opened, after = self._from(caller, added, f"input[{added.compacted}].encrypted_content")
        # Clients put their instructions before everything, each time anew.
        fresh = tuple(
            entry
            for entry in added.entries[: added.compacted]
            if is_instruction(entry) and _said(entry) not in opened.said
        )
        return _window(opened, (Segment(fresh),) if fresh else (), after)

    def _from(self, caller: Caller, segment: Segment, where: str) -> tuple[Opened, Sequence[Segment]]:
        """The last compaction of a segment, and what comes after it."""
        opened = self._open(caller, segment.entries[segment.compacted], where)
        after = segment.entries[segment.compacted + 1 :]
        return opened, (Segment(after),) if after else ()

    def _open(self, caller: Caller, entry: Entry, where: str) -> Opened:
        try:
            sealed = _items.decode(entry.raw).encrypted_content
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"The compaction item cannot be read: {error}.", param=where) from None
        known = self._opened.get((caller.tenant, sealed))
        if known is not None:
            return known
        try:
            if self._sealer is None:
                raise Unsealable("this server seals nothing")
            state = _states.decode(self._sealer.open(caller.tenant, sealed))
            opened = _opened(state, len(sealed))
        except Unsealable as error:
            raise InvalidRequest(
                f"The compaction item cannot be opened: {error}.",
                param=where,
                code="invalid_encrypted_content",
            ) from None
        except (msgspec.DecodeError, UnicodeError, RecursionError, InvalidRequest):
            raise InvalidRequest(
                "The compaction item holds what this release cannot read.",
                param=where,
                code="invalid_encrypted_content",
            ) from None
        self._keep((caller.tenant, sealed), opened)
        return opened

    def _keep(self, key: tuple[str, str], opened: Opened) -> None:
        """So that the next turn finds what this one has rendered."""
        with self._keeping:
            if key in self._opened:
                return
            self._opened[key] = opened
            self._weight += opened.weight
            while self._weight > _MOST_OPENED:
                self._weight -= self._opened.pop(next(iter(self._opened))).weight

    # --- making one ---

    async def worth(self, window: Window, turns: Sequence[Segment], limit: int) -> bool:
        """Whether there is enough since the last compaction for another one to gain anything."""
        new = await tokens_of_all([*window.segments[window.opened :], *turns])
        segments = [*window.segments, *turns]
        unanswered = await aside(effort(segments[-1:]), _unanswered, segments, limit)
        return new - await tokens_of_all([Segment(tuple(unanswered))]) >= limit // _NEW_SHARE

    async def compact(
        self,
        backend: ModelBackend,
        caller: Caller,
        request: ModelRequest,
        window: Window,
        limit: int,
        *,
        goes_on: bool,
    ) -> Compacted:
        """What the request shows, made short by its model; raises ApiError.

        window: with what the request's conversation begins.
        limit: tokens that the conversation should stay well below.
        goes_on: whether the model is asked to go on at once.
        """
        if self._sealer is None:
            raise InvalidRequest("This server does not compact.", code="unsupported_parameter")
        segments = request.segments
        open_messages = await aside(effort(segments[-1:]), _unanswered, segments, limit)
        summary, usage = await self._summarise(backend, caller, request, window.opened, limit)
        kept = await aside(effort(segments), _kept, segments, len(open_messages), limit)
        state = _State(messages=[Raw(entry.raw) for entry in kept], summary=summary)
        state.attached = {
            place: entry.attachments
            for place, entry in enumerate([*kept, *open_messages])
            if entry.attachments
        }
        for tool in self._tools:
            memory = await tool.remember(caller, (window.remembered, *segments), [*kept, *open_messages])
            if memory is not None:
                state.tools += [Raw(item) for item in memory.items]
                state.notes.append(memory.note)
        state.open = [Raw(entry.raw) for entry in open_messages]
        if goes_on and not state.open:
            state.open = [Raw(_GO_ON_RAW)]
        content = _encode(state)
        if len(content) > _LARGEST_STATE:
            raise InvalidRequest(
                "The instructions and the last message alone are too large to be compacted; make them shorter.",
                param="input",
            )
        sealed = self._sealer.seal(caller.tenant, content)
        opened = _opened(_states.decode(content), len(sealed))
        self._keep((caller.tenant, sealed), opened)
        item = Compaction(id=new_id("cmp"), encrypted_content=sealed)
        return Compacted(item, _window(opened, (), ()), usage)

    async def _summarise(
        self, backend: ModelBackend, caller: Caller, request: ModelRequest, opened: int, limit: int
    ) -> tuple[str, Usage | None]:
        longest = min(_LONGEST_SUMMARY, max(_SHORTEST_SUMMARY, limit // _SHARE))
        asked = _message("user", _Asked(_ASK.format(words=longest // 2)))
        request = replace(
            request,
            segments=(*request.segments, Segment((asked,))),
            choice="none",
            sampling=_writing(request.sampling, longest + _THINKING),
            streamed=True,
        )
        segments, _ = await fitted(self._tokens, backend, caller, request, opened)
        text, usage = await _written(backend, replace(request, segments=segments), longest)
        if not text:
            raise ModelError("The model was asked for a summary of the conversation, and wrote none.")
        return text, usage


async def _written(backend: ModelBackend, request: ModelRequest, longest: int) -> tuple[str, Usage | None]:
    """What the model writes, up to so many tokens; one that writes without end is not listened to for long."""
    pieces: list[str] = []
    usage: Usage | None = None
    left = (longest + _THINKING) * 4 * BYTES_A_TOKEN
    async with contextlib.aclosing(backend.stream(request)) as batches:
        async for batch in batches:
            for event in batch:
                if isinstance(event, Text):
                    pieces.append(event.delta)
                if isinstance(event, Text | Thought):
                    left -= len(event.delta)
                elif isinstance(event, TurnEnded):
                    usage = event.usage
            left -= len(batch)
            if left < 0:
                break
    return "".join(pieces)[: longest * BYTES_A_TOKEN].strip(), usage


def _writing(sampling: Sampling, most: int) -> Sampling:
    return Sampling(
        max_output_tokens=most,
        service_tier=sampling.service_tier,
        prompt_cache_key=sampling.prompt_cache_key,
        safety_identifier=sampling.safety_identifier,
        user=sampling.user,
    )


# --- states -------------------------------------------------------------------------------------------


def _message(role: str, part: _Written | _Asked) -> Entry:
    return Entry(type="message", id=None, turn=0, raw=_encode(_Message(role, [part])))


def _opened(state: _State, weight: int) -> Opened:
    """Raises InvalidRequest for what is no item."""
    attached = state.attached
    messages, unanswered = (
        _entries(state.messages, attached),
        _entries(state.open, attached, len(state.messages)),
    )
    summary = "\n\n".join([_HEADING, state.summary, *state.notes])
    return Opened(
        Segment((*messages, _message("assistant", _Written(summary)), *unanswered)),
        Segment(_entries(state.tools)),
        frozenset(_said(entry) for entry in messages if is_instruction(entry)),
        weight,
    )


def _entries(
    raws: Sequence[Raw], attached: Mapping[int, tuple[Attachment, ...]] = _NO_FILES, first: int = 0
) -> tuple[Entry, ...]:
    items = [peek(raw, "compaction") for raw in raws]
    return tuple(
        Entry(type=item.type, id=item.id, turn=0, raw=item.raw, attachments=attached.get(place, ()))
        for place, item in enumerate(items, first)
    )


def _said(entry: Entry) -> bytes:
    return bytes(_contents.decode(entry.raw).content)


def _window(opened: Opened, before: Sequence[Segment], after: Sequence[Segment]) -> Window:
    segments = (*before, opened.shown, *after)
    if not any(segment.entries for segment in after) and role_of(opened.shown.entries[-1]) == "assistant":
        segments = (*segments, Segment((_message("user", _Asked(_GO_ON)),)))
    return Window(segments, len(before) + 1, opened.remembered)


def _unanswered(segments: Sequence[Segment], limit: int) -> list[Entry]:
    """The user's messages at the end, oldest first: the last one, and those before it that there is room for."""
    room = _room(limit)
    found: list[Entry] = []
    for segment in reversed(segments):
        for entry in reversed(segment.entries):
            room -= estimate(entry)
            if role_of(entry) != "user" or (found and room < 0):
                return found[::-1]
            found.append(entry)
    return found[::-1]


def _room(limit: int) -> int:
    """Tokens of what the user said that may be kept."""
    return min(_MOST_KEPT_TOKENS, limit // _SHARE)


def _kept(segments: Sequence[Segment], unanswered: int, limit: int) -> list[Entry]:
    """All instructions, and of the user's messages the latest that there is room for; without those at the end."""
    entries = [entry for segment in segments for entry in segment.entries]
    answered = entries[: len(entries) - unanswered]
    room = _room(limit) - sum(map(estimate, entries[len(answered) :]))
    bytes_left = _MOST_KEPT_BYTES
    kept: list[Entry] = []
    for entry in reversed(answered):
        if is_instruction(entry):
            kept.append(entry)
        elif role_of(entry) == "user" and entry.raw != _GO_ON_RAW:
            room -= estimate(entry)
            bytes_left -= entry.size
            if room >= 0 and bytes_left >= 0:
                kept.append(entry)
    return kept[::-1]
