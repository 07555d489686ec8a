"""The conformance kit of models on every backend; imports pytest and fumehood."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import override

import pytest
from msgspec import Raw

from fumehood.models.chat_completions import ChatCompletions
from fumehood.models.direct import DirectModel
from fumehood.models.responses_api import ResponsesApi
from fumehood.models.retrying import Retrying
from fumehood.models.settings import ModelSettings
from fumehood.models.upstream import Upstream
from fumehood.protocol.conversation import Segment
from fumehood.protocol.errors import ModelUnreachable
from fumehood.protocol.models import ModelRequest
from fumehood.protocol.tools import FunctionSpec
from fumehood.telemetry.observing import ObservedModels
from fumehood.telemetry.seen import Listener, Observer, Seen
from fumehood.testing import Beat, ScriptedModel, ScriptedModels, calls, says
from fumehood.testing.clock import FakeClock
from fumehood.testing.model_kit import ModelKit, Subject
from tests.support import chat_server, responses_server
from tests.support.chat_server import CUT, Answer, ChatServer, chunk, stream
from tests.support.conversations import message, segment

INTERPRETER = FunctionSpec(name="code_interpreter", description="", parameters=Raw(b"{}"))


def request(model: str, *segments: Segment) -> ModelRequest:
    return ModelRequest(
        model=model, segments=segments or (segment(message("hello")),), functions=[INTERPRETER]
    )


class _ByModel(deque[Answer]):
    """Answers as the model's name asks, however often."""

    def __init__(self, answers: dict[str, Answer]) -> None:
        super().__init__()
        self._answers = answers

    def popleft(self) -> Answer:
        async def answer(asked: chat_server.Asked, writer: asyncio.StreamWriter) -> bool:
            return await self._answers[asked.json["model"]](asked, writer)

        return answer


def _fragment(arguments: str, **fields: object) -> bytes:
    return chunk({"tool_calls": [{"index": 0, **fields, "function": {"arguments": arguments}}]})


def answers() -> dict[str, Answer]:
    return {
        "answers": stream(chunk({"content": "Hel"}), chat_server.says("lo")),
        "calls": stream(
            chunk(
                {
                    "tool_calls": [
                        {"index": 0, "id": "c", "function": {"name": "code_interpreter", "arguments": ""}}
                    ]
                }
            ),
            _fragment('{"code"'),
            _fragment(':"1"}'),
            chunk(finish="tool_calls"),
            chat_server.DONE,
        ),
        "fails": chat_server.error("503 Service Unavailable", {"error": {"message": "busy"}}),
        "breaks": stream(chunk({"content": "Hel"}), CUT),
        "waits": stream(chunk({"content": "Hel"}), asyncio.Event()),
    }


class TestChatCompletions(ModelKit):
    @pytest.fixture
    async def subject(self) -> AsyncGenerator[Subject]:
        async with chat_server.chat_server() as server:
            server.answers = _ByModel(answers())
            upstream = Upstream()
            backend = ChatCompletions(ModelSettings(base_url=server.url), upstream)
            refused = segment(message([{"type": "input_hologram"}]))
            yield served_subject(Retrying(backend, 0, FakeClock()), server, refused=refused)
            await upstream.close()


def served_subject(backend: Retrying, server: ChatServer, refused: Segment) -> Subject:
    return Subject(
        backend=backend,
        answers=request("answers"),
        calls=request("calls"),
        refused=request("answers", refused),
        fails=request("fails"),
        breaks=request("breaks"),
        waits=request("waits"),
        left=server.left.wait,
    )


def responses_answers() -> dict[str, Answer]:
    begun = responses_server.created() + responses_server.message("Hel")
    return {
        "answers": stream(begun, responses_server.message("lo", index=1), responses_server.ended()),
        "calls": stream(
            responses_server.created(),
            responses_server.call("code_interpreter", '{"code"', ':"1"}'),
            responses_server.ended(),
        ),
        "fails": chat_server.error("503 Service Unavailable", {"error": {"message": "busy"}}),
        "breaks": stream(begun, CUT),
        "waits": stream(begun, asyncio.Event()),
    }


class TestResponsesApi(ModelKit):
    @pytest.fixture
    async def subject(self) -> AsyncGenerator[Subject]:
        async with chat_server.chat_server() as server:
            server.answers = _ByModel(responses_answers())
            upstream = Upstream()
            backend = ResponsesApi(ModelSettings(base_url=server.url, backend="responses"), upstream)
            parts = [{"type": "input_file", "file_id": "file-1"}]
            yield served_subject(Retrying(backend, 0, FakeClock()), server, refused=segment(message(parts)))
            await upstream.close()


class TestDirectModel(ModelKit):
    @pytest.fixture
    async def subject(self) -> Subject:
        return Subject(
            backend=DirectModel(),
            answers=request("direct"),
            calls=request("direct", segment(message("```python\nprint(1)\n```"))),
        )


def scripted_subject() -> Subject:
    never = asyncio.Event()
    model = ScriptedModel()

    def turn(request: ModelRequest) -> Sequence[Beat] | Exception:
        model.expect(turn)
        turns: dict[str, Sequence[Beat] | Exception] = {
            "answers": says("hello"),
            "calls": [*calls("f", {"x": 1}), *calls("g", {})],
            "fails": ModelUnreachable("down"),
            "breaks": [*says("a"), ModelUnreachable("broke")],
            "waits": [*says("a", pieces=1), never],
        }
        return turns[request.model]

    async def left() -> None:
        assert [request.model for request in model.aborted] == ["waits"]

    model.expect(turn)
    return Subject(
        backend=model,
        answers=request("answers"),
        calls=request("calls"),
        fails=request("fails"),
        breaks=request("breaks"),
        waits=request("waits"),
        left=left,
    )


class TestScriptedModel(ModelKit):
    @pytest.fixture
    async def subject(self) -> Subject:
        return scripted_subject()


class _Ended(Listener):
    """Counts what began and has not ended."""

    def __init__(self) -> None:
        self.open: list[Seen] = []

    def began(self, seen: Seen) -> None:
        self.open.append(seen)

    @override
    def ended(self, seen: Seen) -> None:
        self.open.remove(seen)


class TestObservedModel(ModelKit):
    """As telemetry puts it around every model. Every turn is seen to end, once, however it does."""

    @pytest.fixture
    async def subject(self) -> AsyncGenerator[Subject]:
        subject, turns = scripted_subject(), _Ended()
        observer = Observer([turns], begins=turns.began)
        assert isinstance(subject.backend, ScriptedModel)
        models = ObservedModels(ScriptedModels(subject.backend), observer)
        yield replace(subject, backend=models.backend("scripted"))
        observer.tell()
        assert turns.open == []
