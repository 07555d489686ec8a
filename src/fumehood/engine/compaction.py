"""Makes a long conversation short, and opens what it was made into; imports `interfaces`, siblings and msgspec.

A compaction is an item that stands for everything before it: a summary by the model, the leading instructions and the
user's latest messages word for word, and what hosted tools must not forget. It is sealed, since clients carry it. A
model never sees the item; it is shown what the item stands for, as ordinary messages.
"""

import contextlib
import hashlib
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from fumehood.aside import aside
from fumehood.engine.compaction_budget import (
    LEAST_THRESHOLD,
    Budget,
    Plan,
    content_of,
    cut_text,
    longest_thinking,
    make_plan,
    scale_of,
    shorten_text,
)
from fumehood.engine.tokens import BYTES_A_TOKEN, Tokens, effort, fixed_tokens, tokens_of_all
from fumehood.engine.truncation import fitted, is_instruction, leading_instructions, role_of
from fumehood.interfaces import Caller, HostedTool, ModelBackend, Sealer, Unsealable
from fumehood.protocol.attachments import Attachment
from fumehood.protocol.conversation import COMPACTION, Entry, Segment, followed, last_compacted
from fumehood.protocol.errors import InvalidRequest, ModelError
from fumehood.protocol.ids import new_id
from fumehood.protocol.items import Compaction, peek
from fumehood.protocol.models import ModelRequest, Sampling, Text, Thought, TurnEnded
from fumehood.protocol.responses import Usage

logger = logging.getLogger(__name__)

USUAL_LIMIT = 128_000  # tokens of a context window that nobody has told
_LARGEST_STATE = 10 << 20  # bytes; sealed and in base64 it is a third more
_SUMMARY_STEPS = 64  # of the room, by which its oldest is left out of a summary
_MOST_DIGESTS = 256  # of instructions that are not kept word for word
_MOST_OPENED = 16 << 20  # bytes of opened ones that are kept

_ASK = (
    "Stop here and write a summary of this conversation for yourself. It will take the place of everything above; of "
    "that you will see nothing more but the first of the system's instructions and the user's latest messages.\n"
    "Tell everything that is needed to go on as if nothing had happened: what the user wants and likes, facts and "
    "figures that were named, decisions, what was done and with which results, what code has left in variables and "
    "files, instructions that were given on the way or are long, what is open and what comes next. If there is a "
    "summary of earlier parts above, take over all of it that still matters. Do not answer the user, call no tools. "
    "Write only the summary, in at most {words} words."
)
_HEADING = "Summary of the conversation so far, of which only the messages above were kept:"
_GO_ON = "Go on from where your summary ends."


class _State(msgspec.Struct, kw_only=True):
    """What is sealed.

    messages: instructions and what the user said, as it came, oldest first.
    tools: items that hosted tools find in place of their calls; notes: what the model is told of them.
    open: messages that are not answered yet.
    attached: what the files of messages are, by the place of the message among `messages` and `open`.
    digests: of leading instructions that are not in `messages` as they were, for clients that send them each time.
    """

    version: Literal[1] = 1
    messages: list[Raw]
    summary: str
    tools: list[Raw] = []
    notes: list[str] = []
    open: list[Raw] = []
    attached: dict[int, tuple[Attachment, ...]] = {}
    digests: list[str] = []


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


_states = msgspec.json.Decoder(_State)
_items = msgspec.json.Decoder(_Item)
_encode = msgspec.json.Encoder().encode
_GO_ON_RAW = _encode(_Message("user", [_Asked(_GO_ON)]))
_NOTHING = Segment(())
_NO_FILES: Mapping[int, tuple[Attachment, ...]] = {}


@dataclass(frozen=True, slots=True)
class Opened:
    """A compaction that is open.

    shown: what the model sees of it; remembered: what hosted tools see.
    digests: of the instructions that it stands for; a client that sends them again says nothing new.
    """

    shown: Segment
    remembered: Segment
    digests: frozenset[str]
    weight: int


@dataclass(frozen=True, slots=True)
class Window:
    """What a response stands on, as the model is shown it.

    segments: the conversation from its last compaction on.
    opened: how many of the segments are that compaction.
    remembered: what hosted tools know from before it.
    digests: of the instructions that it stands for.
    """

    segments: Sequence[Segment]
    opened: int = 0
    remembered: Segment = _NOTHING
    digests: frozenset[str] = frozenset()


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
        leading = leading_instructions(added.entries[: added.compacted])
        fresh = tuple([entry for entry in leading if _digest(entry) not in opened.digests])
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

    async def plan(
        self,
        caller: Caller,
        request: ModelRequest,
        counted: int,
        limit: int,
        context_window: int | None = None,
    ) -> Plan:
        """What a compaction of this request would keep, and whether it would gain anything.

        counted: how many tokens the request has.
        limit: tokens that the conversation should stay below. Where the client has said none, it is
            `context_window`, and the conversation is to become a good deal shorter than it is.
        """
        segments, fixed = request.segments, self._tokens.fixed(caller, request)
        scale = scale_of(counted, fixed_tokens(request) + await tokens_of_all(segments))
        if context_window is None:
            budget = Budget.of(limit, fixed=fixed, scale=scale)
        else:
            size = min(limit, max(LEAST_THRESHOLD, counted))
            budget = Budget.of(size, fixed=fixed, scale=scale, instructions=context_window // 4)
        return await aside(effort(segments), make_plan, segments, budget, _GO_ON_RAW)

    async def compact(
        self,
        backend: ModelBackend,
        caller: Caller,
        request: ModelRequest,
        window: Window,
        plan: Plan,
        *,
        goes_on: bool,
    ) -> Compacted:
        """What the request shows, made short by its model; raises ApiError.

        window: with what the request's conversation begins.
        plan: what is kept of it.
        goes_on: whether the model is asked to go on at once.
        """
        if self._sealer is None:
            raise InvalidRequest("This server does not compact.", code="unsupported_parameter")
        summary, usage = await self._summarise(backend, caller, request, window.opened, plan.budget.summary)
        kept = [*plan.kept, *plan.unanswered]
        state = _State(messages=[Raw(entry.raw) for entry in plan.kept], summary=summary)
        state.attached = {place: entry.attachments for place, entry in enumerate(kept) if entry.attachments}
        size = sum([entry.size for entry in plan.leading])
        state.digests = await aside(size, _new_digests, window, plan)
        notes: list[str] = []
        for tool in self._tools:
            memory = await tool.remember(caller, (window.remembered, *request.segments), kept)
            if memory is not None:
                state.tools += [Raw(item) for item in memory.items]
                notes.append(memory.note)
        if notes:
            state.notes = [shorten_text("\n\n".join(notes), plan.budget.notes)]
        state.open = [Raw(entry.raw) for entry in plan.unanswered]
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
        self, backend: ModelBackend, caller: Caller, request: ModelRequest, opened: int, longest: int
    ) -> tuple[str, Usage | None]:
        thinking = longest_thinking(backend.profile(request.model).context_window)
        asked = _message("user", _Asked(_ASK.format(words=longest // 2)))
        request = replace(
            request,
            segments=(*request.segments, Segment((asked,))),
            choice="none",
            sampling=_writing(request.sampling, longest + thinking),
            streamed=True,
        )
        # Nobody asks for the same summary again, so no cache is helped by large steps.
        segments, left_out = await fitted(
            self._tokens, backend, caller, request, opened, parts=_SUMMARY_STEPS
        )
        if left_out:
            logger.warning(
                "a conversation is summarised without about %d tokens of its oldest part: "
                "with the summary it does not fit into the context window of %r",
                left_out,
                request.model,
            )
        text, usage = await _written(backend, replace(request, segments=segments), longest, thinking)
        if not text:
            raise ModelError("The model was asked for a summary of the conversation, and wrote none.")
        return text, usage


async def _written(
    backend: ModelBackend, request: ModelRequest, longest: int, thinking: int
) -> tuple[str, Usage | None]:
    """What the model writes, up to so many tokens; one that writes without end is not listened to for long."""
    pieces: list[str] = []
    usage: Usage | None = None
    left = (longest + thinking) * 4 * BYTES_A_TOKEN
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
    return cut_text("".join(pieces).strip(), longest), usage


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
        frozenset([*state.digests, *(_digest(entry) for entry in messages if is_instruction(entry))]),
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


def _digest(entry: Entry) -> str:
    return hashlib.sha256(content_of(entry)).hexdigest()[:32]


def _new_digests(window: Window, plan: Plan) -> list[str]:
    """Of the instructions that the next compaction stands for, and does not have word for word; the latest last."""
    kept = {_digest(entry) for entry in plan.instructions}
    known = dict.fromkeys([*sorted(window.digests), *map(_digest, plan.leading)])
    return [digest for digest in known if digest not in kept][-_MOST_DIGESTS:]


def _window(opened: Opened, before: Sequence[Segment], after: Sequence[Segment]) -> Window:
    segments = (*before, opened.shown, *after)
    if not any(segment.entries for segment in after) and role_of(opened.shown.entries[-1]) == "assistant":
        segments = (*segments, Segment((_message("user", _Asked(_GO_ON)),)))
    return Window(segments, len(before) + 1, opened.remembered, opened.digests)
