"""Counts the tokens of a request.

The model server counts where it can. Otherwise the last usage that it reported for the conversation is the base, and
only what came since is estimated; without such a report, everything is.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from fumehood.cpu_worker import ITEM_COST_BYTES, run_in_worker
from fumehood.interfaces import Caller, ModelBackend
from fumehood.protocol.conversation import ConversationEntry, ConversationSegment
from fumehood.protocol.model_turns import ModelRequest
from fumehood.protocol.openai.api_errors import ModelError
from fumehood.protocol.openai.responses import Usage

logger = logging.getLogger(__name__)

BYTES_PER_TOKEN = 4
_TOKENS_PER_MESSAGE = 4  # the delimiters around it
_TOKENS_PER_IMAGE = 800
_MAX_USAGE_RECORDS = 10_000
_COUNT_TIMEOUT_SECONDS = 10.0  # then the estimate is used


@dataclass(frozen=True, slots=True)
class TokenCount:
    """The number of tokens of a request; exact if the model server counted them."""

    tokens: int
    exact: bool


# --- estimates ----------------------------------------------------------------------------------------


class _Part(msgspec.Struct):
    type: str = ""
    text: str | None = None
    refusal: str | None = None
    file_data: str | None = None


class _ItemText(msgspec.Struct):
    """The text fields of an item that a model sees, for every item type."""

    content: str | list[_Part] | None = None
    output: str | list[_Part] | None = None
    arguments: str = ""
    input: str = ""
    name: str = ""


_item_text_decoder = msgspec.json.Decoder(_ItemText)


def estimate_segment(segment: ConversationSegment) -> int:
    """Estimate the tokens of a segment; the result is cached in it."""
    if segment.estimated_tokens is None:
        segment.estimated_tokens = sum(map(estimate_entry, segment.entries))
    return segment.estimated_tokens


async def estimate_segments(segments: Sequence[ConversationSegment]) -> int:
    """Estimate the tokens of all segments; new estimates are made in the worker thread if they take long."""
    missing = [segment for segment in segments if segment.estimated_tokens is None]
    await run_in_worker(estimate_cost(missing), _estimate_each, missing)
    return sum(map(estimate_segment, segments))


def _estimate_each(segments: Sequence[ConversationSegment]) -> None:
    for segment in segments:
        estimate_segment(segment)


def estimate_cost(segments: Sequence[ConversationSegment]) -> int:
    """The cost of reading all segments, for `run_in_worker`."""
    return sum([ITEM_COST_BYTES * len(segment.entries) + segment.size for segment in segments])


def estimate_entry(entry: ConversationEntry) -> int:
    exchange = entry.exchange
    if exchange is not None:
        size = len(exchange.name) + _count_utf8_bytes(exchange.arguments) + _count_utf8_bytes(exchange.output)
        return 2 * _TOKENS_PER_MESSAGE + _TOKENS_PER_IMAGE * len(exchange.images) + size // BYTES_PER_TOKEN
    if entry.type == "reasoning":  # few models see it again, and their usage reports include it
        return 0
    try:
        item = _item_text_decoder.decode(entry.raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return len(entry.raw) // BYTES_PER_TOKEN
    size = len(item.name) + _count_utf8_bytes(item.arguments) + _count_utf8_bytes(item.input)
    images = 0
    for content in (item.content, item.output):
        if isinstance(content, str):
            size += _count_utf8_bytes(content)
            continue
        for part in content or ():
            size += (
                _count_utf8_bytes(part.text or "")
                + _count_utf8_bytes(part.refusal or "")
                + len(part.file_data or "") * 3 // 4
            )
            images += part.type == "input_image"
    size += sum([len(file.text or "") for file in entry.attachments])
    size += sum([len(file.data or "") * 3 // 4 for file in entry.attachments if file.kind != "picture"])
    if not size and entry.type != "message":  # an item type with other text fields
        size = len(entry.raw)
    return _TOKENS_PER_MESSAGE + _TOKENS_PER_IMAGE * images + -(-size // BYTES_PER_TOKEN)


def _count_utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode(errors="replace"))


def estimate_fixed(request: ModelRequest) -> int:
    """Estimate what precedes the conversation: instructions and tools."""
    size = _count_utf8_bytes(request.instructions or "")
    for spec in request.function_tools:
        size += len(spec.name) + len(spec.description) + len(spec.parameters)
    size += sum(len(spec.raw) for spec in request.server_tools)
    return size // BYTES_PER_TOKEN


# --- counting -----------------------------------------------------------------------------------------


class _UsageRecord(NamedTuple):
    """The reported tokens of a conversation up to an item, `fixed` of them before the conversation."""

    tenant: str
    model: str
    tokens: int
    fixed: int


class TokenCounter:
    """Counts tokens, based on the usage that model servers report.

    Usage is recorded under the id of the last item of a turn, so that it is found again when the conversation
    continues or the client sends the item back.
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
        """Record the usage of a turn that made these entries.

        omitted_tokens: estimated tokens that truncation left out of the request.
        """
        if not entries or entries[-1].id is None or usage.input_tokens <= 0:  # some servers report zeros
            return
        tokens = usage.input_tokens + max(
            0, usage.output_tokens - usage.output_tokens_details.reasoning_tokens
        )
        for entry in entries:
            if entry.exchange is not None:  # its result is not part of this usage
                tokens += _count_utf8_bytes(entry.exchange.output) // BYTES_PER_TOKEN
        if len(self._usage_records) >= _MAX_USAGE_RECORDS:
            del self._usage_records[next(iter(self._usage_records))]
        self._usage_records[entries[-1].id] = _UsageRecord(
            caller.tenant, request.model, tokens + omitted_tokens, estimate_fixed(request)
        )

    async def estimate(self, caller: Caller, request: ModelRequest) -> int:
        """The last recorded usage plus an estimate of what came since."""
        fixed = estimate_fixed(request)
        record, since = self._find_last_usage(caller, request)
        if record is None:
            return fixed + await estimate_segments(since)
        return max(0, record.tokens + fixed - record.fixed) + await estimate_segments(since)

    def count_fixed(self, caller: Caller, request: ModelRequest) -> int:
        """Tokens before the conversation, now or in its last turn: a request for compaction may omit the tools."""
        record, _ = self._find_last_usage(caller, request)
        return max(estimate_fixed(request), 0 if record is None else record.fixed)

    def _find_last_usage(
        self, caller: Caller, request: ModelRequest
    ) -> tuple[_UsageRecord | None, list[ConversationSegment]]:
        """The last usage record of this conversation, and the segments since, newest first."""
        owner = (caller.tenant, request.model)
        since: list[ConversationSegment] = []
        for segment in reversed(request.segments):
            for index in range(len(segment.entries) - 1, -1, -1):
                record = self._usage_records.get(segment.entries[index].id or "")
                if record is not None and record[:2] == owner:
                    since.append(ConversationSegment(segment.entries[index + 1 :]))
                    return record, since
            since.append(segment)
        return None, since

    async def count(
        self, backend: ModelBackend, caller: Caller, request: ModelRequest, *, threshold: int = 0
    ) -> TokenCount:
        """Count the tokens of a request. Raises InvalidRequest if the backend cannot render it.

        threshold: the number of interest; far below it, the estimate suffices and the server is not asked.
        """
        estimated = await self.estimate(caller, request)
        if backend.get_profile(request.model).counts_tokens and estimated >= threshold // 2:
            try:
                async with asyncio.timeout(_COUNT_TIMEOUT_SECONDS):
                    tokens, exact = await backend.count_tokens(request)
            except (ModelError, TimeoutError) as error:
                logger.warning(
                    "model %r did not count tokens, using an estimate: %s", request.model, error or "timeout"
                )
            else:
                if exact:
                    return TokenCount(tokens, exact=True)
        return TokenCount(estimated, exact=False)
