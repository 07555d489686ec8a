"""Every model backend passes its kit."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import override

import pytest
from msgspec import Raw

from fumehood.models.chat_completions.chat_backend import ChatCompletionsBackend
from fumehood.models.direct_execution import DirectExecutionBackend
from fumehood.models.model_settings import ModelSettings
from fumehood.models.responses_api.responses_backend import ResponsesApiBackend
from fumehood.models.retrying_backend import RetryingBackend
from fumehood.models.upstream.http1_client import PooledHttpClient
from fumehood.protocol.conversation import ConversationSegment
from fumehood.protocol.model_turns import ModelRequest
from fumehood.protocol.openai.api_errors import ModelUnreachable
from fumehood.protocol.openai.tool_specs import ModelToolDefinition
from fumehood.telemetry.instrumentation import InstrumentedModelProvider
from fumehood.telemetry.operation_records import RecordDispatcher, RecordListener, SpanRecord
from fumehood.testing import ScriptedModel, SingleBackendProvider, TurnStep, calls, says
from fumehood.testing.conformance_kits.model_backend_kit import ModelBackendKit, ModelSubject
from fumehood.testing.fakes.fake_clock import FakeClock
from tests.support import raw_model_server, responses_events
from tests.support.conversations import message, segment
from tests.support.raw_model_server import BREAK_CONNECTION, RawModelServer, Responder, chunk, stream

INTERPRETER = ModelToolDefinition(name="code_interpreter", description="", parameters=Raw(b"{}"))


def request(model: str, *segments: ConversationSegment) -> ModelRequest:
    return ModelRequest(
        model=model, segments=segments or (segment(message("hello")),), function_tools=[INTERPRETER]
    )


class _ByModel(deque[Responder]):
    """Selects the answer by the name of the model, any number of times."""

    def __init__(self, answers: dict[str, Responder]) -> None:
        super().__init__()
        self._answers = answers

    def popleft(self) -> Responder:
        async def answer(asked: raw_model_server.ReceivedRequest, writer: asyncio.StreamWriter) -> bool:
            return await self._answers[asked.json["model"]](asked, writer)

        return answer


def _fragment(arguments: str, **fields: object) -> bytes:
    return chunk({"tool_calls": [{"index": 0, **fields, "function": {"arguments": arguments}}]})


def answers() -> dict[str, Responder]:
    return {
        "answers": stream(chunk({"content": "Hel"}), raw_model_server.says("lo")),
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
            raw_model_server.DONE,
        ),
        "fails": raw_model_server.error("503 Service Unavailable", {"error": {"message": "busy"}}),
        "breaks": stream(chunk({"content": "Hel"}), BREAK_CONNECTION),
        "waits": stream(chunk({"content": "Hel"}), asyncio.Event()),
    }


class TestChatCompletions(ModelBackendKit):
    @pytest.fixture
    async def subject(self) -> AsyncGenerator[ModelSubject]:
        async with raw_model_server.open_raw_model_server() as server:
            server.responders = _ByModel(answers())
            upstream = PooledHttpClient()
            backend = ChatCompletionsBackend(ModelSettings(base_url=server.url), upstream)
            refused = segment(message([{"type": "input_hologram"}]))
            yield make_server_subject(RetryingBackend(backend, 0, FakeClock()), server, refused=refused)
            await upstream.close()


def make_server_subject(
    backend: RetryingBackend, server: RawModelServer, refused: ConversationSegment
) -> ModelSubject:
    return ModelSubject(
        backend=backend,
        text_request=request("answers"),
        call_request=request("calls"),
        invalid_request=request("answers", refused),
        failing_request=request("fails"),
        breaking_request=request("breaks"),
        hanging_request=request("waits"),
        wait_until_released=server.client_disconnected.wait,
    )


def responses_answers() -> dict[str, Responder]:
    begun = responses_events.created() + responses_events.message("Hel")
    return {
        "answers": stream(begun, responses_events.message("lo", index=1), responses_events.ended()),
        "calls": stream(
            responses_events.created(),
            responses_events.call("code_interpreter", '{"code"', ':"1"}'),
            responses_events.ended(),
        ),
        "fails": raw_model_server.error("503 Service Unavailable", {"error": {"message": "busy"}}),
        "breaks": stream(begun, BREAK_CONNECTION),
        "waits": stream(begun, asyncio.Event()),
    }


class TestResponsesApi(ModelBackendKit):
    @pytest.fixture
    async def subject(self) -> AsyncGenerator[ModelSubject]:
        async with raw_model_server.open_raw_model_server() as server:
            server.responders = _ByModel(responses_answers())
            upstream = PooledHttpClient()
            backend = ResponsesApiBackend(ModelSettings(base_url=server.url, backend="responses"), upstream)
            parts = [{"type": "input_file", "file_id": "file-1"}]
            yield make_server_subject(
                RetryingBackend(backend, 0, FakeClock()), server, refused=segment(message(parts))
            )
            await upstream.close()


class TestDirectModel(ModelBackendKit):
    @pytest.fixture
    async def subject(self) -> ModelSubject:
        return ModelSubject(
            backend=DirectExecutionBackend(),
            text_request=request("direct"),
            call_request=request("direct", segment(message("```python\nprint(1)\n```"))),
        )


def make_scripted_subject() -> ModelSubject:
    never = asyncio.Event()
    model = ScriptedModel()

    def turn(request: ModelRequest) -> Sequence[TurnStep] | Exception:
        model.expect(turn)
        turns: dict[str, Sequence[TurnStep] | Exception] = {
            "answers": says("hello"),
            "calls": [*calls("f", {"x": 1}), *calls("g", {})],
            "fails": ModelUnreachable("down"),
            "breaks": [*says("a"), ModelUnreachable("broke")],
            "waits": [*says("a", deltas=1), never],
        }
        return turns[request.model]

    async def left() -> None:
        assert [request.model for request in model.aborted_requests] == ["waits"]

    model.expect(turn)
    return ModelSubject(
        backend=model,
        text_request=request("answers"),
        call_request=request("calls"),
        failing_request=request("fails"),
        breaking_request=request("breaks"),
        hanging_request=request("waits"),
        wait_until_released=left,
    )


class TestScriptedModel(ModelBackendKit):
    @pytest.fixture
    async def subject(self) -> ModelSubject:
        return make_scripted_subject()


class _OpenSpans(RecordListener):
    """Counts spans that have not ended."""

    def __init__(self) -> None:
        self.open: list[SpanRecord] = []

    def on_start(self, record: SpanRecord) -> None:
        self.open.append(record)

    @override
    def on_end(self, record: SpanRecord) -> None:
        self.open.remove(record)


class TestObservedModel(ModelBackendKit):
    """With telemetry around the model. The span of every turn ends once."""

    @pytest.fixture
    async def subject(self) -> AsyncGenerator[ModelSubject]:
        subject, turns = make_scripted_subject(), _OpenSpans()
        observer = RecordDispatcher([turns], on_start=turns.on_start)
        assert isinstance(subject.backend, ScriptedModel)
        models = InstrumentedModelProvider(SingleBackendProvider(subject.backend), observer)
        yield replace(subject, backend=models.get_backend("scripted"))
        observer.flush()
        assert turns.open == []
