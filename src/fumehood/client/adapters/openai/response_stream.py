"""Reads a response from its event stream, and emits its events while they arrive."""

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import msgspec

from fumehood.client.adapters.openai.wire import (
    EXECUTION_FIELD,
    FILE_CITATION_TYPE,
    Item,
    ProviderToolCallData,
    find_cited_files,
    find_provider_calls,
    only_objects,
)
from fumehood.client.adapters.stream_events import (
    CitationAdded,
    CodeDelta,
    CodeImage,
    CodeOutputDelta,
    EvaluationEvent,
    FileProduced,
    FunctionArguments,
    FunctionCallStarted,
    HostedCallFinished,
    HostedCallStarted,
    ReasoningDelta,
    RefusalText,
    TextDelta,
    TurnRestarted,
)
from fumehood.client.deadlines import Deadline
from fumehood.client.errors import PromptEvaluationError
from fumehood.client.runtime.operations import (
    CloseStream,
    EmitEvent,
    OpenedStream,
    OpenStream,
    ReadStream,
    ServerReply,
    Steps,
    perform,
)

_LAST_EVENTS = ("response.completed", "response.incomplete", "response.failed")
_REST_SECONDS = 1.0
_END_MARK = b"[DONE]"
_TRANSIENT = frozenset({"server_error", "rate_limit_exceeded", "rate_limit_error", "too_many_requests"})


class StreamedError(Exception):
    """An error event of a stream: what would have been an error status before the first byte.

    Never leaves the adapter. body: the error as the provider sent it.
    """

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.body = body
        self.code = body.get("code")
        self.message = str(body.get("message") or self.code or "the stream reports an error")
        super().__init__(self.message)

    @property
    def status_code(self) -> str:
        """What it is called instead of a status."""
        return str(self.code or self.body.get("type") or "an error")

    @property
    def is_transient(self) -> bool:
        return self.code in _TRANSIENT or (self.code is None and self.body.get("type") in _TRANSIENT)


class StreamBrokenError(Exception):
    """A stream ended before its response did. Never leaves the adapter."""


class WireEvent(msgspec.Struct):
    """The members of an event that are used. What is untrusted is checked when it is read."""

    type: str = ""
    item_id: Any = None
    delta: Any = None
    item: Any = None
    annotation: Any = None
    error: Any = None
    code: Any = None
    message: Any = None
    response: msgspec.Raw = msgspec.Raw(b"")


class EventStreamDecoder:
    """Decodes server-sent events: bytes in, the data of whole events out."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        self._rest += chunk
        if b"\n" not in chunk:  # part of a long event; looking through it each time would take quadratic time
            return
        *lines, last = self._rest.replace(b"\r\n", b"\n").split(b"\n")
        self._rest = bytearray(last)
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(bytes(line[5:].removeprefix(b" ")))
            elif not line and self._data:
                data, self._data = b"\n".join(self._data), []
                yield data


class ResponseStreamReader:
    """Reads one response; a second call of `read_response` is another attempt. turn: its number, for events."""

    def __init__(self, turn: int, prompt_name: str, deadline: Deadline | None) -> None:
        self._turn = turn
        self._prompt_name = prompt_name
        self._deadline = deadline
        self._has_emitted = False

    def read_response(self, request: OpenStream) -> Steps[ServerReply]:
        """Send the request and emit the events of its stream. Returns the response as a blocking request gets it.

        Raises errors of the SDK, StreamedError and StreamBrokenError.
        """
        if self._has_emitted:
            self._has_emitted = False
            yield from perform(EmitEvent(TurnRestarted(self._turn)))
        opened = yield from perform(request)
        try:
            content = yield from self._read_content(opened)
        except Exception:
            yield from perform(CloseStream(opened))
            raise
        yield from perform(CloseStream(opened))
        return ServerReply(content, opened.headers, opened.request_id)

    def _read_content(self, opened: OpenedStream) -> Steps[bytes]:
        if not opened.headers.get("content-type", "").startswith("text/event-stream"):
            return (yield from self._read_body(opened))  # of a server that does not stream
        decoder = EventStreamDecoder()
        while chunk := (yield from self._read_chunk(opened)):
            for data in decoder.feed(chunk):
                if data == _END_MARK:
                    continue
                event = self._decode_event(data)
                if event.type in _LAST_EVENTS:
                    yield from self._read_rest(opened)
                    return bytes(event.response)
                if event.type == "error":
                    raise StreamedError(_read_error(event))
                for emitted in translate_event(event):
                    self._has_emitted = True
                    yield from perform(EmitEvent(emitted))
        raise StreamBrokenError("The stream ended before the response did.")

    def _decode_event(self, data: bytes) -> WireEvent:
        try:
            return msgspec.json.decode(data, type=WireEvent)
        except msgspec.DecodeError as error:
            raise PromptEvaluationError(
                f"What the provider sent is no event of the Responses API: {error}",
                prompt_name=self._prompt_name,
                phase="response",
                provider_payload=data[:1000].decode(errors="replace"),
            ) from error

    def _read_chunk(self, opened: OpenedStream) -> Steps[bytes]:
        timeout = None
        if self._deadline is not None:
            self._deadline.check("the end of the response")
            timeout = self._deadline.remaining().total_seconds()
        return (yield from perform(ReadStream(opened, timeout)))

    def _read_body(self, opened: OpenedStream) -> Steps[bytes]:
        body = bytearray()
        while chunk := (yield from self._read_chunk(opened)):
            body += chunk
        return bytes(body)

    def _read_rest(self, opened: OpenedStream) -> Steps[None]:
        """Read to the end, so that the connection can be used again; the response itself is there, so not for long."""
        seconds = _REST_SECONDS
        if self._deadline is not None:
            seconds = min(seconds, self._deadline.remaining().total_seconds())
        until = time.monotonic() + seconds
        try:
            while (left := until - time.monotonic()) > 0 and (yield from perform(ReadStream(opened, left))):
                pass
        except Exception:  # noqa: S110 - whatever breaks now costs nothing but the connection
            pass


def _read_error(event: WireEvent) -> Mapping[str, Any]:
    """Return the error of an error event, which OpenAI sends flat and others nested."""
    nested = only_objects([event.error])
    if nested:
        return nested[0]
    return {"message": event.message, "code": event.code}


_DELTA_EVENTS: Mapping[str, Callable[[str, str], EvaluationEvent[Any]]] = {
    "response.output_text.delta": TextDelta,
    "response.reasoning_text.delta": ReasoningDelta,
    "response.reasoning_summary_text.delta": partial(ReasoningDelta, kind="summary"),
    "response.refusal.delta": RefusalText,
    "response.code_interpreter_call_code.delta": CodeDelta,
    "response.function_call_arguments.delta": FunctionArguments,
}


def translate_event(event: WireEvent) -> Iterator[EvaluationEvent[Any]]:
    """Yield the client's events of an event of the wire; none for one that says nothing new."""
    item_id = event.item_id if isinstance(event.item_id, str) else ""
    create_delta = _DELTA_EVENTS.get(event.type)
    if create_delta is not None:
        if event.delta and isinstance(event.delta, str):
            yield create_delta(item_id, event.delta)
    elif event.type == "response.output_text.annotation.added":
        for annotation in only_objects([event.annotation]):
            file = next(iter(find_cited_files([annotation])), None)
            yield CitationAdded(item_id, annotation, file)
    elif event.type == "response.output_item.added":
        for item in only_objects([event.item]):
            yield from _translate_started_item(item)
    elif event.type == "response.output_item.done":
        for item in only_objects([event.item]):
            yield from _translate_finished_item(item)


def _translate_started_item(item: Item) -> Iterator[EvaluationEvent[Any]]:
    item_id, kind = str(item.get("id") or ""), str(item.get("type") or "")
    if kind == "function_call":
        call_id = item.get("call_id")
        yield FunctionCallStarted(
            item_id, str(item.get("name")), call_id if isinstance(call_id, str) else None
        )
    elif kind.endswith("_call"):
        yield HostedCallStarted(item_id, kind.removesuffix("_call"))


def _translate_finished_item(item: Item) -> Iterator[EvaluationEvent[Any]]:
    for call in find_provider_calls([item]):
        item_id = call.id or ""
        if call.name == "code_interpreter":
            yield from _translate_code_outputs(item_id, call)
        yield HostedCallFinished(item_id, call.name, call)


def _translate_code_outputs(item_id: str, call: ProviderToolCallData) -> Iterator[EvaluationEvent[Any]]:
    """Yield what the code printed, showed and wrote. OpenAI reports both streams as one."""
    logs = "".join(str(output.get("logs") or "") for output in call.outputs if output.get("type") == "logs")
    details = only_objects([call.raw.get(EXECUTION_FIELD)])
    execution: Mapping[str, Any] = details[0] if details else {"stdout": logs}
    if stdout := str(execution.get("stdout") or ""):
        yield CodeOutputDelta(item_id, "stdout", stdout)
    if stderr := str(execution.get("stderr") or ""):
        yield CodeOutputDelta(item_id, "stderr", stderr)
    for output in call.outputs:
        if output.get("type") == "image":
            yield CodeImage(item_id, str(output.get("url")))
    listed = [{**file, "type": FILE_CITATION_TYPE} for file in only_objects(execution.get("files"))]
    for file in find_cited_files(listed):
        yield FileProduced(item_id, file)
