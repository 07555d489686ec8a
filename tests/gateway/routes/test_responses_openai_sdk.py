"""Responses of the gateway, parsed by the OpenAI SDK in strict mode; turns are in tests/e2e/test_openai_sdk.py."""

from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import openai
import pytest
import pytest_asyncio
from msgspec import Raw
from openai import AsyncOpenAI
from openai.types.responses import ResponseOutputMessage

from fumehood.protocol.openai.api_errors import ModelRateLimited, PreviousResponseNotFound
from fumehood.protocol.openai.responses import Response
from fumehood.protocol.openai.stream_events import (
    OutputItemAdded,
    OutputItemDone,
    ResponseCompleted,
    ResponseCreated,
    StreamEvent,
)
from tests.support.scripted_gateway import ScriptedGateway, number_events, raw_items

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def client(gateway: ScriptedGateway) -> AsyncGenerator[AsyncOpenAI]:
    async with AsyncOpenAI(
        base_url=f"{gateway.base}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


def make_dice_events(response: Response) -> list[StreamEvent]:
    """A stream with one item of a type that OpenAI does not have."""
    item = Raw(b'{"type":"fumehood:dice_call","id":"fh_1","status":"completed","output":"1 2 3"}')
    ended = msgspec.structs.replace(response, status="completed", output=[item])
    return number_events(
        [
            ResponseCreated(response=response),
            OutputItemAdded(output_index=0, item=item),
            OutputItemDone(output_index=0, item=item),
            ResponseCompleted(response=ended),
        ]
    )


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning")  # of the stream helper
async def test_items_of_other_types(client: AsyncOpenAI, gateway: ScriptedGateway) -> None:
    """As docs/clients.md says: an item with the right type and fields in an object of the wrong class."""
    gateway.runs.script = lambda response: [make_dice_events(response)]
    with pytest.raises(openai.APIResponseValidationError):
        await client.responses.create(model="small", input="hi")
    async with AsyncOpenAI(base_url=f"{gateway.base}/v1", api_key="none", max_retries=0) as lenient:
        items: list[Any] = [*(await lenient.responses.create(model="small", input="hi")).output]
        async with lenient.responses.stream(model="small", input="hi") as events:
            items += [event.item async for event in events if event.type == "response.output_item.done"]
            items += (await events.get_final_response()).output
    assert len(items) == 3
    for item in items:
        assert isinstance(item, ResponseOutputMessage)
        assert (item.to_dict()["type"], item.to_dict()["output"]) == ("fumehood:dice_call", "1 2 3")
        assert item.content is None


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
