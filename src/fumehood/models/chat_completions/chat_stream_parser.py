"""Parses responses of Chat Completions servers, with the quirks of many of them."""

from collections.abc import Callable, Container, Iterable
from functools import partial
from typing import override

import msgspec
from msgspec import Raw

from fumehood.models.chat_completions.batch_chunk_decoder import BatchChunkDecoder
from fumehood.models.chat_completions.think_tags import ThinkTagFilter
from fumehood.models.chat_completions.tool_call_deltas import (
    FunctionDelta,
    ToolCallDelta,
    ToolCallDeltaParser,
)
from fumehood.models.upstream.stream_parser import (
    MAX_LINE_BYTES,
    MAX_RESPONSE_BYTES,
    CallIdChooser,
    InputTokenDetails,
    OutputTokenDetails,
    UpstreamStreamParser,
    decode_short_text,
    make_usage,
)
from fumehood.models.upstream.upstream_errors import UpstreamErrorFactory
from fumehood.protocol.model_turns import (
    AnyModelEvent,
    ModelCallArgumentsDelta,
    ModelReasoningDelta,
    ModelRefusalDelta,
    ModelTextDelta,
    ModelTurnEnded,
    TurnEndReason,
)
from fumehood.protocol.openai.ids import new_id
from fumehood.protocol.openai.responses import Usage

_FINISH_REASONS: dict[str, TurnEndReason] = {
    "length": "length",
    "max_tokens": "length",
    "model_length": "length",
    "content_filter": "content_filter",
}
_MIN_LOGPROB = -9999.0  # for minus infinity, which JSON cannot express
_MAX_ATTEMPTS = 8  # to learn a repetition
_NO_TEXT = Raw(b"null")


class _Part(msgspec.Struct):
    type: str = ""
    text: str = ""
    thinking: "str | list[_Part]" = ""


class _Delta(msgspec.Struct):
    content: str | list[_Part] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCallDelta] | None = None
    function_call: FunctionDelta | None = None


class _TopLogprob(msgspec.Struct):
    """`bytes` may be missing or null; clients expect it."""

    token: str = ""
    bytes: list[int] | None = None
    logprob: float | None = None


class _Logprob(_TopLogprob):
    top_logprobs: list[_TopLogprob] | None = None


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


class _Choice(msgspec.Struct):
    index: int | None = None
    delta: _Delta | None = None
    message: _Delta | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: float | None = None
    completion_tokens: float | None = None
    total_tokens: float | None = None
    prompt_tokens_details: InputTokenDetails | None = None
    completion_tokens_details: OutputTokenDetails | None = None


class _Chunk(msgspec.Struct):
    """A stream chunk, a whole response, or an error; some servers send errors without the field `error`."""

    id: Raw = _NO_TEXT
    model: Raw = _NO_TEXT
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: str | dict[str, Raw] | None = None
    object: str | None = None
    message: str | None = None
    code: str | int | None = None


_chunk_decoder = msgspec.json.Decoder(_Chunk)


class ChatStreamParser(UpstreamStreamParser[_Chunk]):
    """Parses one turn of Chat Completions.

    functions: names of the functions that the request offers.
    used_call_ids: as in the request.
    decode_repeats: decode repeated chunks together; affects speed only.
    """

    def __init__(
        self,
        errors: UpstreamErrorFactory,
        functions: Iterable[str] = (),
        used_call_ids: Container[str] = frozenset[str](),
        *,
        make_id: Callable[[str], str] = new_id,
        max_line_bytes: int = MAX_LINE_BYTES,
        max_bytes: int = MAX_RESPONSE_BYTES,
        decode_repeats: bool = True,
    ) -> None:
        super().__init__(errors, _chunk_decoder, max_line_bytes=max_line_bytes, max_bytes=max_bytes)
        self._tool_calls = ToolCallDeltaParser(functions, CallIdChooser(used_call_ids, make_id))
        self._finish_reason: str | None = None
        self._usage: Usage | None = None
        self._response_id = self._response_model = b"null"
        self._repeated_chunks: BatchChunkDecoder | None = None
        self._has_several_chunks = False
        self._make_repeated_event: Callable[[str], AnyModelEvent] = ModelTextDelta
        self._repeated_call: int | None = None  # the key of the call that repeated chunks belong to
        self._attempts_left = _MAX_ATTEMPTS if decode_repeats else 0
        self._think_tags = ThinkTagFilter()

    @property
    def awaits_usage(self) -> bool:
        return self._finish_reason is not None

    @property
    def _is_turn_complete(self) -> bool:
        return self._finish_reason is not None or (self._is_document and self._has_event)

    @override
    def feed(self, chunk: bytes) -> list[AnyModelEvent]:
        return self._think_tags.filter_events(super().feed(chunk))

    @override
    def finish(self) -> list[AnyModelEvent]:
        return self._think_tags.filter_events(super().finish())

    def _parse_block(self, block: bytes, events: list[AnyModelEvent]) -> None:
        """Complete lines: those that repeat in runs, the others one by one."""
        while block:
            if self._repeated_chunks is not None and not self._data_lines:
                run = self._repeated_chunks.decode_run(block)
                if run is not None:
                    strings, taken = run
                    self._attempts_left = _MAX_ATTEMPTS
                    make = self._make_repeated_event
                    events += [make(string) for string in strings if string]
                    if self._repeated_call is not None:
                        self._tool_calls.note_arguments(self._repeated_call, strings)
                    if taken == len(block):
                        return
                    block = block[taken:]
            block = self._parse_lines(block, events)

    # ---- what they say ----------------------------------------------------------------------------------------

    def _handle_event(self, event: _Chunk, payload: bytes, events: list[AnyModelEvent]) -> bool:
        chunk, known = event, self._repeated_chunks
        if not self._has_event:
            self._response_id, self._response_model = bytes(chunk.id), bytes(chunk.model)
        self._has_event = True
        if chunk.usage is not None:
            usage = chunk.usage
            self._usage = make_usage(
                usage.prompt_tokens,
                usage.completion_tokens,
                usage.total_tokens,
                usage.prompt_tokens_details,
                usage.completion_tokens_details,
            )
        if chunk.error is not None or chunk.object == "error":
            error = chunk.error or {"message": chunk.message, "code": chunk.code}
            self.failure = self._errors.from_event(msgspec.json.encode(error))
            return False
        for choice in chunk.choices or ():
            if choice.index:
                continue  # the request asks for one choice
            self._handle_choice(choice, chunk, payload, events)
        return self._repeated_chunks is not known and self._repeated_chunks is not None and not self.is_over

    def _handle_choice(
        self, choice: _Choice, chunk: _Chunk, payload: bytes, events: list[AnyModelEvent]
    ) -> None:
        told = len(events)
        delta = choice.delta or choice.message
        if delta is not None:
            if reasoning := delta.reasoning_content or delta.reasoning:
                events.append(ModelReasoningDelta(reasoning))
            if content := delta.content:
                self._handle_content(content, choice, events)
            if delta.refusal:
                events.append(ModelRefusalDelta(delta.refusal))
            if delta.tool_calls or delta.function_call:
                self._repeated_chunks = None  # the same bytes may belong to another call now
                for call in delta.tool_calls or [ToolCallDelta(index=0, function=delta.function_call)]:
                    self._tool_calls.add(call, events)
        if choice.finish_reason:
            if choice.finish_reason == "error":
                self.failure = self._errors.invalid_response("it ended the turn with an unspecified error")
            self._finish_reason = choice.finish_reason
        elif payload and self._attempts_left and len(events) == told + 1:
            self._learn_repetition(chunk, payload, events[-1])

    def _handle_content(
        self, content: str | list[_Part], choice: _Choice, events: list[AnyModelEvent]
    ) -> None:
        if isinstance(content, str):
            logprobs = None if choice.logprobs is None else choice.logprobs.content
            events.append(
                ModelTextDelta(content, [*map(_convert_logprob, logprobs)])
                if logprobs
                else ModelTextDelta(content)
            )
            return
        for part in content:
            if part.type == "thinking":
                if reasoning := _join_thinking(part.thinking):
                    events.append(ModelReasoningDelta(reasoning))
            elif part.text:
                events.append(ModelTextDelta(part.text))

    def _finish_turn(self, events: list[AnyModelEvent]) -> None:
        self._tool_calls.finish(events)
        reason = _FINISH_REASONS.get(self._finish_reason or "")
        events.append(
            ModelTurnEnded(
                reason or ("calls" if self._tool_calls.has_calls else "stop"),
                self._usage,
                decode_short_text(Raw(self._response_id)),
                decode_short_text(Raw(self._response_model)),
            )
        )
        self.has_ended = True

    # ---- repeated chunks --------------------------------------------------------------------------------------

    def _learn_repetition(self, chunk: _Chunk, payload: bytes, event: AnyModelEvent) -> None:
        """Expect more chunks like this one, if it contains nothing but one string."""
        self._repeated_chunks = None
        if not self._has_several_chunks:  # many responses have only one
            self._has_several_chunks = True
            return
        self._attempts_left -= 1
        name, holder = _find_only_string(chunk)
        if holder is None:
            return

        def same(other: bytes, string: str) -> bool:
            setattr(holder, name, string)
            try:
                return _chunk_decoder.decode(other) == chunk
            except ValueError:
                return False

        match event:
            case ModelCallArgumentsDelta():
                self._make_repeated_event = partial(ModelCallArgumentsDelta, event.key)
                self._repeated_call = event.key
            case ModelTextDelta() | ModelReasoningDelta() | ModelRefusalDelta():
                self._make_repeated_event = type(event)
                self._repeated_call = None
            case _:
                return
        self._repeated_chunks = BatchChunkDecoder.learn(payload, name.encode(), same)


def _find_only_string(chunk: _Chunk) -> tuple[str, _Delta | FunctionDelta | None]:
    """The name of the only string in a chunk, and the struct that has it; None if there is no such string."""
    choice = chunk.choices[0] if chunk.choices and len(chunk.choices) == 1 else _Choice()
    delta = choice.delta
    if delta is None or choice.logprobs is not None or chunk.usage is not None:
        return "", None
    used_fields = [name for name in _Delta.__struct_fields__ if getattr(delta, name)]
    if used_fields == ["tool_calls"] and delta.tool_calls and len(delta.tool_calls) == 1:
        function = delta.tool_calls[0].function
        is_string = function is not None and not function.name and isinstance(function.arguments, str)
        return "arguments", function if is_string else None
    is_string = len(used_fields) == 1 and isinstance(getattr(delta, used_fields[0]), str)
    return (used_fields[0], delta) if is_string else ("", None)


def _convert_logprob(found: _Logprob) -> Raw:
    """A logprob in the format of the Responses API, with all fields."""
    found.top_logprobs = found.top_logprobs or []
    for one in (found, *found.top_logprobs):
        if one.bytes is None:
            one.bytes = list(one.token.encode())
        if one.logprob is None:
            one.logprob = _MIN_LOGPROB
    return Raw(msgspec.json.encode(found))


def _join_thinking(thinking: str | list[_Part]) -> str:
    return thinking if isinstance(thinking, str) else "".join(part.text for part in thinking)
