"""Reads the answer of a chat completions server, whatever its habits; imports msgspec, siblings and `protocol`."""

from collections.abc import Callable, Iterable
from functools import partial

import msgspec
from msgspec import Raw

from fumehood.models.answers import LONGEST_ANSWER, LONGEST_LINE, AnswerParser, tokens
from fumehood.models.chat_calls import CallDelta, CallReader, FunctionDelta, StrangeCall
from fumehood.models.repeated_lines import RepeatedLines
from fumehood.models.think_tags import ThinkTags
from fumehood.models.upstream_errors import UpstreamErrors
from fumehood.protocol.ids import new_id
from fumehood.protocol.models import AnyModelEvent, CallArguments, Refused, Text, Thought, TurnEnd, TurnEnded
from fumehood.protocol.responses import InputTokensDetails, OutputTokensDetails, Usage

_ENDS: dict[str, TurnEnd] = {
    "length": "length",
    "max_tokens": "length",
    "model_length": "length",
    "content_filter": "content_filter",
}
_UNLIKELY = -9999.0  # where a server says minus infinity, which JSON does not know
_TRIALS = 8  # how often in a row to look for repetition before giving it up


class _Part(msgspec.Struct):
    type: str = ""
    text: str = ""
    thinking: "str | list[_Part]" = ""


class _Delta(msgspec.Struct):
    content: str | list[_Part] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[CallDelta] | None = None
    function_call: FunctionDelta | None = None


class _TopLogprob(msgspec.Struct):
    """`bytes` is missing or null where a server does not tell; clients expect it."""

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


class _PromptDetails(msgspec.Struct):
    cached_tokens: float | None = None
    cache_write_tokens: float | None = None


class _CompletionDetails(msgspec.Struct):
    reasoning_tokens: float | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: float | None = None
    completion_tokens: float | None = None
    total_tokens: float | None = None
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _CompletionDetails | None = None


class _Chunk(msgspec.Struct):
    """An event, a whole answer, or an error, which some servers send without a field `error`."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: str | dict[str, Raw] | None = None
    object: str | None = None
    message: str | None = None
    code: str | int | None = None


_chunks = msgspec.json.Decoder(_Chunk)


def _new_call_id() -> str:
    return new_id("call")


class ChatParser(AnswerParser[_Chunk]):
    """Reads one answer of chat completions.

    in_runs: whether to look for what repeats; it makes no difference but to the time.
    """

    def __init__(
        self,
        errors: UpstreamErrors,
        functions: Iterable[str] = (),
        *,
        new_call_id: Callable[[], str] = _new_call_id,
        longest: int = LONGEST_LINE,
        most: int = LONGEST_ANSWER,
        in_runs: bool = True,
    ) -> None:
        super().__init__(errors, _chunks, longest=longest, most=most)
        self._calls = CallReader(functions, new_call_id)
        self._reason: str | None = None
        self._usage: Usage | None = None
        self._repeats: RepeatedLines | None = None
        self._is_going = False
        self._repeated: Callable[[str], AnyModelEvent] = Text
        self._trials = _TRIALS if in_runs else 0
        self._tags = ThinkTags()

    @property
    def closing(self) -> bool:
        return self._reason is not None

    @property
    def _may_end(self) -> bool:
        return self._reason is not None or (self._is_document and self._heard)

    def _read(self, block: bytes, events: list[AnyModelEvent]) -> None:
        """Complete lines: those that repeat in runs, the others one by one."""
        while block:
            if self._repeats is not None and not self._data:
                run = self._repeats.read(block)
                if run is not None:
                    strings, taken = run
                    self._trials = _TRIALS
                    make = self._repeated
                    events += [make(string) for string in strings if string]
                    if taken == len(block):
                        return
                    block = block[taken:]
            block = self._read_lines(block, events)

    # ---- what they say ----------------------------------------------------------------------------------------

    def _take(self, told: _Chunk, payload: bytes, events: list[AnyModelEvent]) -> bool:
        chunk, known = told, self._repeats
        self._heard = True
        if chunk.usage is not None:
            self._usage = _usage_of(chunk.usage)
        if chunk.error is not None or chunk.object == "error":
            error = chunk.error or {"message": chunk.message, "code": chunk.code}
            self.failure = self._errors.from_event(msgspec.json.encode(error))
            return False
        for choice in chunk.choices or ():
            if choice.index:
                continue  # one answer was asked for
            try:
                self._take_choice(choice, chunk, payload, events)
            except StrangeCall as error:
                self.failure = self._errors.unreadable(str(error))
        return self._repeats is not known and self._repeats is not None and not self.over

    def _take_choice(
        self, choice: _Choice, chunk: _Chunk, payload: bytes, events: list[AnyModelEvent]
    ) -> None:
        told = len(events)
        delta = choice.delta or choice.message
        if delta is not None:
            if thought := delta.reasoning_content or delta.reasoning:
                events.append(Thought(thought))
            if content := delta.content:
                self._take_content(content, choice, events)
            if delta.refusal:
                events.append(Refused(delta.refusal))
            if delta.tool_calls or delta.function_call:
                self._repeats = None  # whose arguments the same bytes are may change now
                for call in delta.tool_calls or [CallDelta(index=0, function=delta.function_call)]:
                    self._calls.add(call, events)
        if choice.finish_reason:
            if choice.finish_reason == "error":
                self.failure = self._errors.unreadable(
                    "it ended the turn with an error that it does not name"
                )
            self._reason = choice.finish_reason
        elif payload and self._trials and len(events) == told + 1:
            self._learn(chunk, payload, events[-1])

    def _take_content(self, content: str | list[_Part], choice: _Choice, events: list[AnyModelEvent]) -> None:
        if isinstance(content, str):
            logprobs = None if choice.logprobs is None else choice.logprobs.content
            events.append(Text(content, [*map(_logprob, logprobs)]) if logprobs else Text(content))
            return
        for part in content:
            if part.type == "thinking":
                if thought := _plain(part.thinking):
                    events.append(Thought(thought))
            elif part.text:
                events.append(Text(part.text))

    def _end(self, events: list[AnyModelEvent]) -> None:
        try:
            self._calls.end(events)
        except StrangeCall as error:
            self.failure = self._errors.unreadable(str(error))
            return
        reason = _ENDS.get(self._reason or "")
        events.append(TurnEnded(reason or ("calls" if self._calls.any else "stop"), self._usage))
        self.ended = True

    # ---- what repeats -----------------------------------------------------------------------------------------

    def _learn(self, chunk: _Chunk, payload: bytes, event: AnyModelEvent) -> None:
        """Expect more events like this one, if it says nothing but one string."""
        self._repeats = None
        if not self._is_going:  # many answers are one chunk long
            self._is_going = True
            return
        self._trials -= 1
        name, holder = _only_string(chunk)
        if holder is None:
            return

        def same(other: bytes, string: str) -> bool:
            setattr(holder, name, string)
            try:
                return _chunks.decode(other) == chunk
            except ValueError:
                return False

        match event:
            case CallArguments():
                self._repeated = partial(CallArguments, event.key)
            case Text() | Thought() | Refused():
                self._repeated = type(event)
            case _:
                return
        self._repeats = RepeatedLines.learn(payload, name.encode(), same)


def _only_string(chunk: _Chunk) -> tuple[str, _Delta | FunctionDelta | None]:
    """The one field that a chunk consists of, and what it is a field of."""
    choice = chunk.choices[0] if chunk.choices and len(chunk.choices) == 1 else _Choice()
    delta = choice.delta
    if delta is None or choice.logprobs is not None or chunk.usage is not None:
        return "", None
    said = [name for name in _Delta.__struct_fields__ if getattr(delta, name)]
    if said == ["tool_calls"] and delta.tool_calls and len(delta.tool_calls) == 1:
        function = delta.tool_calls[0].function
        plain = function is not None and not function.name and isinstance(function.arguments, str)
        return "arguments", function if plain else None
    plain = len(said) == 1 and isinstance(getattr(delta, said[0]), str)
    return (said[0], delta) if plain else ("", None)


def _logprob(found: _Logprob) -> Raw:
    """In the words of the Responses API, with nothing left out."""
    found.top_logprobs = found.top_logprobs or []
    for one in (found, *found.top_logprobs):
        if one.bytes is None:
            one.bytes = list(one.token.encode())
        if one.logprob is None:
            one.logprob = _UNLIKELY
    return Raw(msgspec.json.encode(found))


def _plain(thinking: str | list[_Part]) -> str:
    return thinking if isinstance(thinking, str) else "".join(part.text for part in thinking)


def _usage_of(usage: _Usage) -> Usage:
    prompt, completion = tokens(usage.prompt_tokens), tokens(usage.completion_tokens)
    read = usage.prompt_tokens_details or _PromptDetails()
    written = usage.completion_tokens_details or _CompletionDetails()
    return Usage(
        input_tokens=prompt,
        input_tokens_details=InputTokensDetails(
            cached_tokens=tokens(read.cached_tokens), cache_write_tokens=tokens(read.cache_write_tokens)
        ),
        output_tokens=completion,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=tokens(written.reasoning_tokens)),
        total_tokens=max(tokens(usage.total_tokens), prompt + completion),
    )
