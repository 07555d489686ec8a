"""How many tokens a request has.

There is one way to know: the model server counts, where it can. Else the last usage that it told for this conversation
is taken, and what came since is estimated; with no usage to stand on, all of it is.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from fumehood.interfaces import Caller, ModelBackend
from fumehood.protocol.conversation import ConversationEntry, ConversationPiece, ConversationSegment
from fumehood.protocol.model_turns import ModelRequest
from fumehood.protocol.openai.api_errors import ModelError
from fumehood.protocol.openai.responses import Usage
from fumehood.worker_threads import ITEM_COST_BYTES, run_in_worker

logger = logging.getLogger(__name__)

BYTES_PER_TOKEN = 4
_TOKENS_PER_MESSAGE = 4  # the marks around it
_TOKENS_PER_IMAGE = 800
_RENDERING_KEY = "tokens/1"  # under which a segment keeps its estimate
_MAX_USAGE_RECORDS = 10_000
_COUNT_TIMEOUT_SECONDS = 10.0  # an estimate is better than waiting longer


@dataclass(frozen=True, slots=True)
class TokenCount:
    """How many tokens a request has; exact if the model's server has counted them."""

    tokens: int
    exact: bool


# --- estimates ----------------------------------------------------------------------------------------


class _Part(msgspec.Struct):
    type: str = ""
    text: str | None = None
    refusal: str | None = None
    file_data: str | None = None


class _ItemText(msgspec.Struct):
    """What of an item a model is shown, whatever its type."""

    content: str | list[_Part] | None = None
    output: str | list[_Part] | None = None
    arguments: str = ""
    input: str = ""
    name: str = ""


_item_text_decoder = msgspec.json.Decoder(_ItemText)


def estimate_segment(segment: ConversationSegment) -> int:
    """An estimate for the segment, made once."""
    kept = segment.renderings.get(_RENDERING_KEY)
    if kept is None:
        kept = segment.renderings[_RENDERING_KEY] = sum(map(estimate_entry, segment.entries)).to_bytes(8)
    return int.from_bytes(kept)


async def estimate_segments(segments: Sequence[ConversationSegment]) -> int:
    """The estimates together; those that have yet to be made are made beside the loop if that takes long."""
    unseen = [segment for segment in segments if _RENDERING_KEY not in segment.renderings]
    await run_in_worker(estimate_cost(unseen), _estimate_each, unseen)
    return sum(map(estimate_segment, segments))


def _estimate_each(segments: Sequence[ConversationSegment]) -> None:
    for segment in segments:
        estimate_segment(segment)


def estimate_cost(segments: Sequence[ConversationSegment]) -> int:
    """What it takes to look at all that they hold, for `aside`."""
    return sum([ITEM_COST_BYTES * len(segment.entries) + segment.size for segment in segments])


def is_rendered(piece: ConversationPiece) -> bool:
    """Whether a model server was told of it, so that there is more than an estimate."""
    return len(piece.renderings) > (_RENDERING_KEY in piece.renderings)


def estimate_entry(entry: ConversationEntry) -> int:
    seen = entry.exchange
    if seen is not None:
        texts = len(seen.name) + _count_utf8_bytes(seen.arguments) + _count_utf8_bytes(seen.output)
        return 2 * _TOKENS_PER_MESSAGE + _TOKENS_PER_IMAGE * len(seen.images) + texts // BYTES_PER_TOKEN
    if entry.type == "reasoning":  # few models are shown it again, and of those the usage tells
        return 0
    try:
        said = _item_text_decoder.decode(entry.raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return len(entry.raw) // BYTES_PER_TOKEN
    size = len(said.name) + _count_utf8_bytes(said.arguments) + _count_utf8_bytes(said.input)
    pictures = 0
    for content in (said.content, said.output):
        if isinstance(content, str):
            size += _count_utf8_bytes(content)
            continue
        for part in content or ():
            size += (
                _count_utf8_bytes(part.text or "")
                + _count_utf8_bytes(part.refusal or "")
                + len(part.file_data or "") * 3 // 4
            )
            pictures += part.type == "input_image"
    size += sum([len(one.text or "") for one in entry.attachments])
    size += sum([len(one.data or "") * 3 // 4 for one in entry.attachments if one.kind != "picture"])
    if not size and entry.type != "message":  # an item of a kind that says it otherwise
        size = len(entry.raw)
    return _TOKENS_PER_MESSAGE + _TOKENS_PER_IMAGE * pictures + -(-size // BYTES_PER_TOKEN)


def _count_utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode(errors="replace"))


def estimate_fixed(request: ModelRequest) -> int:
    """What comes before the conversation."""
    size = _count_utf8_bytes(request.instructions or "")
    for spec in request.function_tools:
        size += len(spec.name) + len(spec.description) + len(spec.parameters)
    size += sum(len(spec.raw) for spec in request.other_tools)
    return size // BYTES_PER_TOKEN


# --- counting -----------------------------------------------------------------------------------------


class _UsageRecord(NamedTuple):
    """The conversation up to an item had so many tokens for that model, `fixed` of them before its beginning."""

    tenant: str
    model: str
    tokens: int
    fixed: int


class TokenCounter:
    """Counts, and remembers what model servers told. An item that one wrote is found again by its id, be it that the
    conversation is continued or that the client gives it back.
    """

    def __init__(self) -> None:
        self._usage_records: dict[str, _UsageRecord] = {}

    def record_usage(
        self,
        caller: Caller,
        request: ModelRequest,
        usage: Usage,
        entries: Sequence[ConversationEntry],
        omitted_tokens: int = 0,
    ) -> None:
        """What the server told of a turn that made these entries.

        left_out: estimated tokens of the conversation that it was not shown.
        """
        if not entries or entries[-1].id is None or usage.input_tokens <= 0:  # some servers tell zeros
            return
        told = usage.input_tokens + max(0, usage.output_tokens - usage.output_tokens_details.reasoning_tokens)
        for entry in entries:
            if entry.exchange is not None:  # its result was not written by the model, and will be read by it
                told += _count_utf8_bytes(entry.exchange.output) // BYTES_PER_TOKEN
        if len(self._usage_records) >= _MAX_USAGE_RECORDS:
            del self._usage_records[next(iter(self._usage_records))]
        self._usage_records[entries[-1].id] = _UsageRecord(
            caller.tenant, request.model, told + omitted_tokens, estimate_fixed(request)
        )

    async def estimate(self, caller: Caller, request: ModelRequest) -> int:
        """The last usage, and what came since; costs what came since."""
        fixed = estimate_fixed(request)
        note, since = self._find_last_usage(caller, request)
        if note is None:
            return fixed + await estimate_segments(since)
        return max(0, note.tokens + fixed - note.fixed) + await estimate_segments(since)

    def count_fixed(self, caller: Caller, request: ModelRequest) -> int:
        """What comes before this conversation, or came before it when the model was last asked: who has it compacted
        does not send the tools again.
        """
        note, _ = self._find_last_usage(caller, request)
        return max(estimate_fixed(request), 0 if note is None else note.fixed)

    def _find_last_usage(
        self, caller: Caller, request: ModelRequest
    ) -> tuple[_UsageRecord | None, list[ConversationSegment]]:
        """The last note of this conversation, and what came since."""
        whose = (caller.tenant, request.model)
        since: list[ConversationSegment] = []
        for segment in reversed(request.segments):
            for place in range(len(segment.entries) - 1, -1, -1):
                note = self._usage_records.get(segment.entries[place].id or "")
                if note is not None and note[:2] == whose:
                    since.append(ConversationSegment(segment.entries[place + 1 :]))
                    return note, since
            since.append(segment)
        return None, since

    async def count(
        self, backend: ModelBackend, caller: Caller, request: ModelRequest, *, threshold: int = 0
    ) -> TokenCount:
        """Raises InvalidRequest for what cannot be shown to the model.

        around: the number that is of interest; a server is not asked about what is far below it.
        """
        estimated = await self.estimate(caller, request)
        if backend.get_profile(request.model).counts_tokens and estimated >= threshold // 2:
            try:
                async with asyncio.timeout(_COUNT_TIMEOUT_SECONDS):
                    tokens, exact = await backend.count_tokens(request)
            except (ModelError, TimeoutError) as error:
                logger.warning("no count of tokens for %r: %s", request.model, error or "no answer in time")
            else:
                if exact:
                    return TokenCount(tokens, exact=True)
        return TokenCount(estimated, exact=False)
