"""Responses of the gateway, parsed by the OpenAI SDK in strict mode."""

from collections.abc import AsyncGenerator

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from fumehood.protocol.openai.api_errors import ModelRateLimited, PreviousResponseNotFound
from fumehood.protocol.openai.responses import Response
from tests.support.scripted_gateway import ScriptedGateway, code_events, raw_items

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def client(gateway: ScriptedGateway) -> AsyncGenerator[AsyncOpenAI]:
    async with AsyncOpenAI(
        base_url=f"{gateway.base}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


async def test_blocking(client: AsyncOpenAI) -> None:
    response = await client.responses.create(model="small", input="hi")
    assert response.output_text == "Hello, world"
    assert response.usage is not None
    assert response.usage.output_tokens == 3


async def test_streaming(client: AsyncOpenAI) -> None:
    events = [event async for event in await client.responses.create(model="small", input="hi", stream=True)]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "Hello, world"
    assert [event.sequence_number for event in events] == list(range(11))
    assert events[-1].type == "response.completed"


async def test_the_helper_for_streams(client: AsyncOpenAI) -> None:
    async with client.responses.stream(model="small", input="hi") as events:
        kinds = [event.type async for event in events]
        final = await events.get_final_response()
    assert kinds[-1] == "response.completed"
    assert final.output_text == "Hello, world"


async def test_code_with_its_outputs(client: AsyncOpenAI, gateway: ScriptedGateway) -> None:
    gateway.runs.script = lambda response: [code_events(response)]
    code = ""
    async for event in await client.responses.create(
        model="small",
        input="hi",
        stream=True,
        tools=[{"type": "code_interpreter", "container": {"type": "auto"}}],
        include=["code_interpreter_call.outputs"],
    ):
        if event.type == "response.code_interpreter_call_code.delta":
            code += event.delta
        if event.type == "response.completed":
            call = event.response.output[0]
            assert call.type == "code_interpreter_call"
            assert call.outputs is not None
            assert [output.type for output in call.outputs] == ["logs"]
    assert code == "print(6 * 7)"


async def test_responses_that_are_kept(client: AsyncOpenAI, gateway: ScriptedGateway) -> None:
    message = {
        "type": "message",
        "id": "msg_1",
        "role": "user",
        "status": "completed",
        "content": [{"type": "input_text", "text": "hi"}],
    }
    response = Response(id="resp_sdk", created_at=1, model="small", status="completed")
    await gateway.store.commit_response(None, "", response, raw_items(message))
    assert (
        await client.responses.retrieve("resp_sdk", include=["code_interpreter_call.outputs"])
    ).id == "resp_sdk"
    items = [item async for item in client.responses.input_items.list("resp_sdk", limit=1, order="asc")]
    assert [item.id for item in items] == ["msg_1"]
    with pytest.raises(openai.BadRequestError, match="synchronous"):
        await client.responses.cancel("resp_sdk")
    await client.responses.delete("resp_sdk")
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve("resp_sdk")


async def test_models(client: AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["small", "org/large"]
    assert (await client.models.retrieve("org/large")).id == "org/large"


async def test_files_of_containers(client: AsyncOpenAI, gateway: ScriptedGateway) -> None:
    gateway.files.add("cfile_1", "plot.png", b"\x89PNG", b"rest")
    listed = [file async for file in client.containers.files.list("cntr_1")]
    assert [(file.id, file.path, file.bytes) for file in listed] == [("cfile_1", "/mnt/data/plot.png", 8)]
    assert (await client.containers.files.retrieve("cfile_1", container_id="cntr_1")).source == "assistant"
    content = await client.containers.files.content.retrieve("cfile_1", container_id="cntr_1")
    assert content.read() == b"\x89PNGrest"


async def test_refusals_are_the_sdks_own_exceptions(client: AsyncOpenAI, gateway: ScriptedGateway) -> None:
    gateway.runs.rejection = PreviousResponseNotFound(
        "There is no such response.", param="previous_response_id"
    )
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model="small", input="hi", previous_response_id="resp_x")
    assert (refused.value.code, refused.value.param) == (
        "previous_response_not_found",
        "previous_response_id",
    )
    assert refused.value.request_id is not None
    gateway.runs.rejection = ModelRateLimited("busy")
    with pytest.raises(openai.RateLimitError):
        await client.responses.create(model="small", input="hi", stream=True)
    gateway.runs.rejection = RuntimeError("a fault of ours")
    with pytest.raises(openai.InternalServerError):
        await client.responses.create(model="small", input="hi")
