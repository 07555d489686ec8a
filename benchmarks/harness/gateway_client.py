"""Requests of a client of responses, and what it checks of every answer.

N chunks of the model are N deltas to the client, events are numbered without gaps, and what is folded from the deltas
is the text of the response at the end. An answer of which that is not so is an error, not a sample.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from benchmarks.harness.model_server import FUNCTION, TEXT_AFTER_TOOL, make_code, make_query, make_text
from benchmarks.harness.raw_http_client import RawHttpClient
from benchmarks.harness.raw_websocket_client import RawWebSocketClient

TEXT = "response.output_text.delta"
CODE = "response.code_interpreter_call_code.delta"
ARGUMENTS = "response.function_call_arguments.delta"
QUESTION = "What is there to be said about the matter?"
LOOKUP: dict[str, Any] = {
    "type": "function",
    "name": FUNCTION,
    "description": "Look something up.",
    "parameters": {
        "type": "object",
        "properties": {"query": {"type": "string"}},
        "required": ["query"],
        "additionalProperties": False,
    },
    "strict": True,
}
_DELTAS = (TEXT, CODE, ARGUMENTS)
_DONE = b"data: [DONE]"


class UnexpectedAnswer(Exception):
    """A server said something else than it was to say."""


class _Part(msgspec.Struct):
    type: str
    text: str = ""


class Item(msgspec.Struct):
    """What is looked at of an item of a response."""

    type: str
    content: list[_Part] | None = None
    code: str | None = None
    container_id: str | None = None
    call_id: str | None = None
    arguments: str | None = None
    status: str | None = None


class Response(msgspec.Struct):
    id: str
    status: str
    output: list[Item]

    def text(self) -> str:
        parts = (part for item in self.output if item.type == "message" for part in item.content or ())
        return "".join(part.text for part in parts if part.type == "output_text")

    def item(self, kind: str) -> Item:
        for item in self.output:
            if item.type == kind:
                return item
        raise UnexpectedAnswer(f"there is no {kind} in {self}")


class _Event(msgspec.Struct):
    type: str
    sequence_number: int
    delta: str = ""
    response: msgspec.Raw = msgspec.Raw()


_decode_event = msgspec.json.Decoder(_Event).decode
_decode_response = msgspec.json.Decoder(Response).decode
_encode = msgspec.json.Encoder().encode


@dataclass
class TimedAnswer:
    """A response, the deltas it came in (none, where it came at once), and the milliseconds it took."""

    response: Response
    first_delta: float
    whole: float
    deltas: dict[str, list[str]] = field(default_factory=dict[str, list[str]])

    def expect(self, kind: str, pieces: Sequence[str], folded: str | None) -> None:
        """The pieces came one by one, and together they are what is in the response."""
        came = self.deltas.get(kind, [])
        if len(came) != len(pieces):
            raise UnexpectedAnswer(f"{len(pieces)} chunks became {len(came)} events {kind}")
        if came != list(pieces) or folded != "".join(pieces):
            raise UnexpectedAnswer(
                f"the events {kind} are not what the model said, or not what the response says"
            )


@dataclass(frozen=True)
class BenchmarkTarget:
    """A server of responses: where it is, and the process whose CPU time counts."""

    name: str
    pid: int
    client: RawHttpClient | RawWebSocketClient
    path: str = "/v1/responses"

    async def ask(self, model: str, *, stream: bool, asked: Any = QUESTION, **more: Any) -> TimedAnswer:
        """One request to its end."""
        body = _encode({"model": model, "input": asked, "stream": stream, **more})
        first = 0.0

        def arrived(piece: bytes) -> None:
            nonlocal first
            if not first and b".delta\n" in piece:
                first = time.perf_counter()

        began = time.perf_counter()
        response = await self.client.request("POST", self.path, body, arrived if stream else None)
        whole = time.perf_counter() - began
        if response.status != 200:
            told = bytes(response.body[:2000]).decode(errors="replace")
            raise UnexpectedAnswer(f"{self.name} answered {response.status}: {told}")
        if not stream:
            return TimedAnswer(_check_completed(_decode_response(response.body)), whole * 1000, whole * 1000)
        final, deltas = read_events(bytes(response.body))
        return TimedAnswer(final, (first - began) * 1000, whole * 1000, deltas)

    async def ask_for_text(self, model: str, *, stream: bool, **more: Any) -> TimedAnswer:
        """A text of as many chunks as the model's name says."""
        answer = await self.ask(model, stream=stream, **more)
        expected = make_text(_parse_count(model))
        if stream:
            answer.expect(TEXT, expected, answer.response.text())
        elif (said := answer.response.text()) != "".join(expected):
            raise UnexpectedAnswer(f"the response has {said[:200]!r} … instead of what the model said")
        return answer

    async def ask_with_code(self, fragments: int, container: str | None = None) -> TimedAnswer:
        """Code that the model writes in so many fragments, its execution, and what the model then says."""
        tool = {"type": "code_interpreter", "container": container or {"type": "auto"}}
        answer = await self.ask(f"code-{fragments}", stream=True, tools=[tool])
        call = answer.response.item("code_interpreter_call")
        if call.status != "completed":
            raise UnexpectedAnswer(f"the code was not run: {call}")
        answer.expect(CODE, make_code(fragments), call.code)
        answer.expect(TEXT, make_text(TEXT_AFTER_TOOL), answer.response.text())
        return answer

    async def ask_with_function(self, fragments: int) -> TimedAnswer:
        """A function that the client runs: two requests."""
        model = f"function-{fragments}"
        answer = await self.ask(model, stream=True, tools=[LOOKUP])
        call = answer.response.item("function_call")
        pieces = make_query(fragments)
        arguments = "".join(answer.deltas.get(ARGUMENTS, []))
        if arguments != call.arguments or msgspec.json.decode(arguments) != {"query": "".join(pieces)}:
            raise UnexpectedAnswer("the arguments of the function are not what the model said")
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "1"}
        answer = await self.ask(
            model, stream=True, asked=[output], tools=[LOOKUP], previous_response_id=answer.response.id
        )
        answer.expect(TEXT, make_text(TEXT_AFTER_TOOL), answer.response.text())
        return answer


async def time_completion(client: RawHttpClient, model: str) -> tuple[float, float]:
    """Milliseconds to the first text and to the end of a completion, asked of the model server itself."""
    messages = [{"role": "user", "content": QUESTION}]
    options = {"include_usage": True}
    body = _encode({"model": model, "messages": messages, "stream": True, "stream_options": options})
    first = 0.0

    def arrived(piece: bytes) -> None:
        nonlocal first
        if not first and b'"content":"' in piece and b'"role"' not in piece:
            first = time.perf_counter()

    began = time.perf_counter()
    response = await client.request("POST", "/v1/chat/completions", body, arrived)
    ended = time.perf_counter()
    if response.status != 200 or not response.body.endswith(_DONE + b"\n\n"):
        raise UnexpectedAnswer(f"the model server answered {response.status} and did not end its answer")
    return (first - began) * 1000, (ended - began) * 1000


def read_events(body: bytes) -> tuple[Response, dict[str, list[str]]]:
    """The response at the end of a stream, and its deltas by their kinds."""
    *events, rest = body.split(b"\n\n")
    if rest or not events or events[-1] != _DONE:
        raise UnexpectedAnswer(f"the stream did not end with [DONE] but with {body[-200:]!r}")
    deltas: dict[str, list[str]] = {kind: [] for kind in _DELTAS}
    last: _Event | None = None
    number = 0
    for lines in events[:-1]:
        if lines.startswith(b":"):  # a comment, against silence
            continue
        last = _decode_event(lines.partition(b"\ndata: ")[2])
        if last.sequence_number != number:
            raise UnexpectedAnswer(f"event {number} has the number {last.sequence_number}")
        number += 1
        if last.type in deltas:
            deltas[last.type].append(last.delta)
    if last is None or last.type != "response.completed":
        raise UnexpectedAnswer(f"the stream ended with {'nothing' if last is None else last.type}")
    return _check_completed(_decode_response(last.response)), deltas


def _check_completed(response: Response) -> Response:
    if response.status != "completed":
        raise UnexpectedAnswer(f"the response is {response.status}")
    return response


def _parse_count(model: str) -> int:
    return int(model.partition("-")[2])
