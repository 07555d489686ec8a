"""Compacts long conversations, and opens compaction items again.

A compaction item replaces everything before it. It holds a summary by the model, the leading instructions and latest
user messages verbatim, and a state snapshot of each hosted tool. It is sealed, because clients carry it. The model sees
its contents as ordinary messages.
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

from fumehood.cpu_worker import run_in_worker
from fumehood.engine.compaction_plan import (
    MIN_THRESHOLD,
    CompactionBudget,
    CompactionPlan,
    compute_max_thinking_tokens,
    compute_token_scale,
    make_plan,
    omit_middle,
    read_content,
    truncate_text,
)
from fumehood.engine.context_truncation import (
    is_instruction,
    leading_instructions,
    read_role,
    truncate_to_fit,
)
from fumehood.engine.token_counter import (
    BYTES_PER_TOKEN,
    TokenCounter,
    estimate_cost,
    estimate_fixed,
    estimate_segments,
)
from fumehood.interfaces import MAX_SEALED_BYTES, Caller, HostedTool, InvalidSeal, ModelBackend, Sealer
from fumehood.protocol.attachments import Attachment
from fumehood.protocol.conversation import (
    COMPACTION_TYPE,
    ConversationEntry,
    ConversationSegment,
    append_segments,
    last_compaction_index,
)
from fumehood.protocol.model_turns import (
    GenerationParameters,
    ModelReasoningDelta,
    ModelRequest,
    ModelTextDelta,
    ModelTurnEnded,
)
from fumehood.protocol.openai.api_errors import InvalidRequest, ModelError
from fumehood.protocol.openai.ids import new_id
from fumehood.protocol.openai.items import CompactionItem, InputText, peek_item
from fumehood.protocol.openai.responses import Usage

logger = logging.getLogger(__name__)

DEFAULT_CONTEXT_WINDOW = 128_000  # tokens, if the model has none configured
_SUMMARY_STEPS = 64  # steps per window in which the oldest part is left out of a summary
_MAX_DIGESTS = 256  # of instructions that are not kept verbatim
_OPENED_CACHE_BYTES = 16 << 20  # of opened compactions

_SUMMARY_PROMPT = (
    "Stop here and write a summary of this conversation for yourself. It will take the place of everything above; of "
    "that you will see nothing more but the first of the system's instructions and the user's latest messages.\n"
    "Tell everything that is needed to go on as if nothing had happened: what the user wants and likes, facts and "
    "figures that were named, decisions, what was done and with which results, what code has left in variables and "
    "files, instructions that were given on the way or are long, what is open and what comes next. If there is a "
    "summary of earlier parts above, take over all of it that still matters. Do not answer the user, call no tools. "
    "Write only the summary, in at most {words} words."
)
_SUMMARY_HEADING = "Summary of the conversation so far, of which only the messages above were kept:"
_CONTINUE_PROMPT = "Go on from where your summary ends."


class _CompactionState(msgspec.Struct, kw_only=True):
    """The sealed contents.

    messages: raw instructions and user messages, oldest first.
    tools: snapshot items of hosted tools; notes: their description for the model.
    open: messages that are not answered yet.
    attached: attachments of messages, by index in `messages` followed by `open`.
    digests: of leading instructions that are not in `messages` unchanged, for clients that send them every time.
    """

    version: Literal[1] = 1
    messages: list[Raw]
    summary: str
    tools: list[Raw] = []
    notes: list[str] = []
    open: list[Raw] = []
    attached: dict[int, tuple[Attachment, ...]] = {}
    digests: list[str] = []


class _SealedItem(msgspec.Struct):
    encrypted_content: str


class _OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    text: str


class _Message(msgspec.Struct, tag_field="type", tag="message"):
    role: str
    content: list[_OutputText | InputText]


_state_decoder = msgspec.json.Decoder(_CompactionState)
_item_decoder = msgspec.json.Decoder(_SealedItem)
_encode = msgspec.json.Encoder().encode
_CONTINUE_MESSAGE = _encode(_Message("user", [InputText(_CONTINUE_PROMPT)]))
_EMPTY_SEGMENT = ConversationSegment(())
_NO_FILES: Mapping[int, tuple[Attachment, ...]] = {}


@dataclass(frozen=True, slots=True)
class OpenedCompaction:
    """An unsealed compaction.

    model_segment: what the model sees of it; tool_state: what hosted tools see.
    digests: of the instructions that it replaces; a client that sends them again adds nothing new.
    """

    model_segment: ConversationSegment
    tool_state: ConversationSegment
    digests: frozenset[str]
    size: int


@dataclass(frozen=True, slots=True)
class ConversationWindow:
    """The conversation as the model sees it.

    segments: from the last compaction on; the first `compacted_segments` of them are that compaction.
    tool_state: snapshots of hosted tools from before it.
    digests: of the instructions that the compaction replaces.
    """

    segments: Sequence[ConversationSegment]
    compacted_segments: int = 0
    tool_state: ConversationSegment = _EMPTY_SEGMENT
    digests: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class CompactionResult:
    """A new compaction item, and the window that begins with it."""

    item: CompactionItem
    window: ConversationWindow
    usage: Usage | None

    def to_entry(self, turn: int) -> ConversationEntry:
        return ConversationEntry(type=COMPACTION_TYPE, id=self.item.id, turn=turn, raw=_encode(self.item))


class Compactor:
    """Compacts conversations and opens compaction items.

    sealer: None disables compaction.
    """

    def __init__(
        self, sealer: Sealer | None, tools: Sequence[HostedTool], token_counter: TokenCounter
    ) -> None:
        self._sealer = sealer
        self._tools = tools
        self._token_counter = token_counter
        self._opened_cache: dict[tuple[str, str], OpenedCompaction] = {}
        self._cache_size = 0
        self._cache_lock = threading.Lock()  # large items are opened in the worker thread

    @property
    def is_enabled(self) -> bool:
        return self._sealer is not None

    # --- opening ---

    def build_window(
        self, caller: Caller, past: Sequence[ConversationSegment], added: ConversationSegment
    ) -> ConversationWindow:
        """The conversation from its last compaction on. Raises InvalidRequest if that cannot be unsealed."""
        if added.compacted >= 0:
            return self._open_input_window(caller, added)
        index = last_compaction_index(past)
        if index < 0:
            return ConversationWindow(append_segments(past, (added,)))
        opened, after = self._open_last(caller, past[index], "previous_response_id")
        return _make_window(opened, (), (*after, *past[index + 1 :], added))

    def _open_input_window(self, caller: Caller, added: ConversationSegment) -> ConversationWindow:
        for number, entry in enumerate(added.entries[: added.compacted]):
            if entry.type == COMPACTION_TYPE:  # not needed, but an invalid one must not go unnoticed
                self._open_entry(caller, entry, f"input[{number}].encrypted_content")
        opened, after = self._open_last(caller, added, f"input[{added.compacted}].encrypted_content")
        # Clients send their instructions first, every time.
        leading = leading_instructions(added.entries[: added.compacted])
        fresh = tuple([entry for entry in leading if _hash_content(entry) not in opened.digests])
        return _make_window(opened, (ConversationSegment(fresh),) if fresh else (), after)

    def _open_last(
        self, caller: Caller, segment: ConversationSegment, where: str
    ) -> tuple[OpenedCompaction, Sequence[ConversationSegment]]:
        """Open the last compaction of a segment; return it and what follows it."""
        opened = self._open_entry(caller, segment.entries[segment.compacted], where)
        after = segment.entries[segment.compacted + 1 :]
        return opened, (ConversationSegment(after),) if after else ()

    def _open_entry(self, caller: Caller, entry: ConversationEntry, where: str) -> OpenedCompaction:
        try:
            sealed = _item_decoder.decode(entry.raw).encrypted_content
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"The compaction item cannot be read: {error}.", param=where) from None
        known = self._opened_cache.get((caller.tenant, sealed))
        if known is not None:
            return known
        try:
            if self._sealer is None:
                raise InvalidSeal("compaction is disabled on this server")
            state = _state_decoder.decode(self._sealer.unseal(caller.tenant, sealed))
            opened = _open_state(state, len(sealed))
        except InvalidSeal as error:
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
        self._cache_opened((caller.tenant, sealed), opened)
        return opened

    def _cache_opened(self, key: tuple[str, str], opened: OpenedCompaction) -> None:
        """Cache it, so that the next turn finds its renderings."""
        with self._cache_lock:
            if key in self._opened_cache:
                return
            self._opened_cache[key] = opened
            self._cache_size += opened.size
            while self._cache_size > _OPENED_CACHE_BYTES:
                self._cache_size -= self._opened_cache.pop(next(iter(self._opened_cache))).size

    # --- compacting ---

    async def plan(
        self,
        caller: Caller,
        request: ModelRequest,
        counted: int,
        limit: int,
        context_window: int | None = None,
    ) -> CompactionPlan:
        """Plan a compaction of this request.

        counted: the tokens of the request.
        limit: tokens that the conversation should stay below.
        context_window: given if the client set no threshold; then the plan is for the conversation's present size.
        """
        segments, fixed = request.segments, self._token_counter.count_fixed(caller, request)
        scale = compute_token_scale(counted, estimate_fixed(request) + await estimate_segments(segments))
        if context_window is None:
            budget = CompactionBudget.for_limit(limit, fixed=fixed, scale=scale)
        else:
            size = min(limit, max(MIN_THRESHOLD, counted))
            budget = CompactionBudget.for_limit(
                size, fixed=fixed, scale=scale, instructions=context_window // 4
            )
        return await run_in_worker(estimate_cost(segments), make_plan, segments, budget, _CONTINUE_MESSAGE)

    async def compact(
        self,
        backend: ModelBackend,
        caller: Caller,
        request: ModelRequest,
        window: ConversationWindow,
        plan: CompactionPlan,
        *,
        continues: bool,
    ) -> CompactionResult:
        """Summarise the conversation of the request and seal the result. Raises ApiError.

        window: the beginning of the request's conversation. plan: what is kept of it.
        continues: whether the model is to continue immediately.
        """
        if self._sealer is None:
            raise InvalidRequest("This server does not compact.", code="unsupported_parameter")
        summary, usage = await self._summarise(
            backend, caller, request, window.compacted_segments, plan.budget.summary
        )
        kept = [*plan.kept_entries, *plan.unanswered]
        state = _CompactionState(messages=[Raw(entry.raw) for entry in plan.kept_entries], summary=summary)
        state.attached = {index: entry.attachments for index, entry in enumerate(kept) if entry.attachments}
        size = sum([entry.size for entry in plan.leading])
        state.digests = await run_in_worker(size, _collect_digests, window, plan)
        notes: list[str] = []
        for tool in self._tools:
            snapshot = await tool.snapshot_state(caller, (window.tool_state, *request.segments), kept)
            if snapshot is not None:
                state.tools += [Raw(item) for item in snapshot.items]
                notes.append(snapshot.note)
        if notes:
            state.notes = [omit_middle("\n\n".join(notes), plan.budget.notes)]
        state.open = [Raw(entry.raw) for entry in plan.unanswered]
        if continues and not state.open:
            state.open = [Raw(_CONTINUE_MESSAGE)]
        content = _encode(state)
        if len(content) > MAX_SEALED_BYTES:
            raise InvalidRequest(
                "The instructions and the last message alone are too large to be compacted; make them shorter.",
                param="input",
            )
        sealed = self._sealer.seal(caller.tenant, content)
        opened = _open_state(_state_decoder.decode(content), len(sealed))
        self._cache_opened((caller.tenant, sealed), opened)
        item = CompactionItem(id=new_id("cmp"), encrypted_content=sealed)
        return CompactionResult(item, _make_window(opened, (), ()), usage)

    async def _summarise(
        self,
        backend: ModelBackend,
        caller: Caller,
        request: ModelRequest,
        pinned_segments: int,
        max_tokens: int,
    ) -> tuple[str, Usage | None]:
        thinking = compute_max_thinking_tokens(backend.get_profile(request.model).context_window)
        prompt = _make_message("user", InputText(_SUMMARY_PROMPT.format(words=max_tokens // 2)))
        request = replace(
            request,
            segments=(*request.segments, ConversationSegment((prompt,))),
            tool_choice="none",
            sampling=_make_summary_sampling(request.sampling, max_tokens + thinking),
            streamed=True,
        )
        # Small steps: a summary request is never repeated, so there is no prompt cache to keep valid.
        segments, omitted_tokens = await truncate_to_fit(
            self._token_counter, backend, caller, request, pinned_segments, steps_per_window=_SUMMARY_STEPS
        )
        if omitted_tokens:
            logger.warning(
                "a conversation is summarised without about %d tokens of its oldest part: "
                "with the summary it does not fit into the context window of %r",
                omitted_tokens,
                request.model,
            )
        text, usage = await _stream_summary(
            backend, replace(request, segments=segments), max_tokens, thinking
        )
        if not text:
            raise ModelError("The model was asked for a summary of the conversation, and wrote none.")
        return text, usage


async def _stream_summary(
    backend: ModelBackend, request: ModelRequest, max_tokens: int, thinking_tokens: int
) -> tuple[str, Usage | None]:
    """Stream the summary, truncated to `max_tokens`; stop reading a model that writes far more."""
    deltas: list[str] = []
    usage: Usage | None = None
    left = (max_tokens + thinking_tokens) * 4 * BYTES_PER_TOKEN
    async with contextlib.aclosing(backend.stream(request)) as batches:
        async for batch in batches:
            for event in batch:
                if isinstance(event, ModelTextDelta):
                    deltas.append(event.delta)
                if isinstance(event, ModelTextDelta | ModelReasoningDelta):
                    left -= len(event.delta)
                elif isinstance(event, ModelTurnEnded):
                    usage = event.usage
            left -= len(batch)
            if left < 0:
                break
    return truncate_text("".join(deltas).strip(), max_tokens), usage


def _make_summary_sampling(sampling: GenerationParameters, max_tokens: int) -> GenerationParameters:
    return GenerationParameters(
        max_output_tokens=max_tokens,
        service_tier=sampling.service_tier,
        prompt_cache_key=sampling.prompt_cache_key,
        safety_identifier=sampling.safety_identifier,
        user=sampling.user,
    )


# --- states -------------------------------------------------------------------------------------------


def _make_message(role: str, part: _OutputText | InputText) -> ConversationEntry:
    return ConversationEntry(type="message", id=None, turn=0, raw=_encode(_Message(role, [part])))


def _open_state(state: _CompactionState, size: int) -> OpenedCompaction:
    """Raises InvalidRequest for an invalid item."""
    attached = state.attached
    messages, unanswered = (
        _decode_entries(state.messages, attached),
        _decode_entries(state.open, attached, len(state.messages)),
    )
    summary = "\n\n".join([_SUMMARY_HEADING, state.summary, *state.notes])
    return OpenedCompaction(
        ConversationSegment((*messages, _make_message("assistant", _OutputText(summary)), *unanswered)),
        ConversationSegment(_decode_entries(state.tools)),
        frozenset([*state.digests, *(_hash_content(entry) for entry in messages if is_instruction(entry))]),
        size,
    )


def _decode_entries(
    raws: Sequence[Raw], attached: Mapping[int, tuple[Attachment, ...]] = _NO_FILES, first: int = 0
) -> tuple[ConversationEntry, ...]:
    items = [peek_item(raw, "compaction") for raw in raws]
    return tuple(
        ConversationEntry(
            type=item.type, id=item.id, turn=0, raw=item.raw, attachments=attached.get(index, ())
        )
        for index, item in enumerate(items, first)
    )


def _hash_content(entry: ConversationEntry) -> str:
    return hashlib.sha256(read_content(entry)).hexdigest()[:32]


def _collect_digests(window: ConversationWindow, plan: CompactionPlan) -> list[str]:
    """Digests of the instructions that the compaction replaces without keeping them verbatim, latest last."""
    kept = {_hash_content(entry) for entry in plan.instructions}
    known = dict.fromkeys([*sorted(window.digests), *map(_hash_content, plan.leading)])
    return [digest for digest in known if digest not in kept][-_MAX_DIGESTS:]


def _make_window(
    opened: OpenedCompaction, before: Sequence[ConversationSegment], after: Sequence[ConversationSegment]
) -> ConversationWindow:
    segments = (*before, opened.model_segment, *after)
    if (
        not any(segment.entries for segment in after)
        and read_role(opened.model_segment.entries[-1]) == "assistant"
    ):
        segments = (*segments, ConversationSegment((_make_message("user", InputText(_CONTINUE_PROMPT)),)))
    return ConversationWindow(segments, len(before) + 1, opened.tool_state, opened.digests)
