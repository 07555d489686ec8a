"""Every provider that passes requests through to model servers passes its kit."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator

import msgspec
import pytest
from msgspec import Raw

from fumehood.interfaces import PassthroughRequest
from fumehood.models.model_settings import ModelSettings
from fumehood.models.registry import open_model_registry
from fumehood.testing.conformance_kits.passthrough_kit import PassthroughKit, PassthroughSubject
from fumehood.testing.fakes.fake_clock import FakeClock
from tests.support import raw_model_server
from tests.support.raw_model_server import BREAK_CONNECTION, ReceivedRequest, Responder, chunk, stream

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
ANSWERS: dict[str, Responder] = {
    "document": raw_model_server.document(msgspec.json.encode({"choices": [], "usage": USAGE})),
    "stream": stream(
        chunk({"content": "Hel"}),
        chunk({"content": "lo"})[:20],
        chunk({"content": "lo"})[20:],
        chunk(finish="stop", usage=USAGE),
        raw_model_server.DONE,
    ),
    "fails": raw_model_server.error("400 Bad Request", {"error": {"message": "no"}}),
    "breaks": stream(chunk({"content": "Hel"}), BREAK_CONNECTION),
}


class ByModel(deque[Responder]):
    """Selects the answer by the name of the model, any number of times."""

    def popleft(self) -> Responder:
        async def answer(asked: ReceivedRequest, writer: asyncio.StreamWriter) -> bool:
            model = asked.json["model"]
            waits = stream(chunk({"content": "Hel"}), asyncio.Event())
            return await (waits if model == "waits" else ANSWERS[model])(asked, writer)

        return answer


def request(model: str, *, is_streamed: bool = True) -> PassthroughRequest:
    fields = {"model": Raw(msgspec.json.encode(model)), "messages": Raw(b"[]")}
    return PassthroughRequest("chat/completions", model, fields, is_streamed)


@pytest.mark.parametrize("backend", ["chat_completions", "responses"])
class TestModelRegistry(PassthroughKit):
    @pytest.fixture
    async def subject(self, backend: str) -> AsyncGenerator[PassthroughSubject]:
        async with raw_model_server.open_raw_model_server() as server:
            server.responders = ByModel()
            settings = [
                ModelSettings(match="none", backend="direct"),
                *(
                    msgspec.convert(
                        {"match": name, "backend": backend, "base_url": server.url}, ModelSettings
                    )
                    for name in (*ANSWERS, "waits")
                ),
            ]
            registry = open_model_registry(settings, FakeClock(), {})
            yield PassthroughSubject(
                provider=registry,
                document_request=request("document", is_streamed=False),
                stream_request=request("stream"),
                unknown_request=request("unknown"),
                serverless_request=request("none"),
                failing_request=request("fails"),
                breaking_request=request("breaks"),
                hanging_request=request("waits"),
                wait_until_released=server.client_disconnected.wait,
            )
            await registry.close()
