"""A file that a client uploads is read by code, transformed, cited and downloaded, with every client.

Real sandboxes, over a real socket: what is downloaded at the end is compared byte for byte.
"""

import base64
import contextlib
import pickle
from collections.abc import AsyncGenerator
from typing import Any

import openai
import pytest
import pytest_asyncio
from agents import Agent, CodeInterpreterTool, OpenAIResponsesModel, RunConfig, Runner
from openai import AsyncOpenAI
from openai.types.responses import Response, ResponseOutputMessage
from openai.types.responses.response_output_text import AnnotationContainerFileCitation
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai import CodeExecutionTool, TextPart, UploadedFile
from pydantic_ai.capabilities import NativeTool
from pydantic_ai.models.openai import OpenAIResponsesModel as PydanticModel
from pydantic_ai.models.openai import OpenAIResponsesModelSettings
from pydantic_ai.providers.openai import OpenAIProvider

from tests.e2e.conftest import RunningGateway
from tests.support.gateway_process import ScriptedModelServer, code_call, text_answer

# Every byte, and names that are easily got wrong.
CONTENT = pickle.dumps(bytes(range(256)) * 100)
NAME = "Zahlen (1) für Ärger.pkl"
RESULT = "ümgedreht (2).bin"
CODE = f"""
content = open('/mnt/data/{NAME}', 'rb').read()
open('/mnt/data/{RESULT}', 'wb').write(content[::-1])
print(len(content))
"""
LINK = "sandbox:/mnt/data/%C3%BCmgedreht%20(2).bin"
TEXT = f"🧪 Ready: [reversed]({LINK})."
PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 20
QUIET = RunConfig(tracing_disabled=True)


@pytest_asyncio.fixture
async def file_id(client: AsyncOpenAI) -> AsyncGenerator[str]:
    file = await client.files.create(file=(NAME, CONTENT), purpose="user_data")
    yield file.id
    with contextlib.suppress(openai.NotFoundError):
        await client.files.delete(file.id)


def script(model: ScriptedModelServer) -> None:
    model.script(code_call(CODE), text_answer(TEXT))


def created(gateway: RunningGateway, **request: Any) -> Response:
    create: Any = gateway.strict.responses.create
    response: Response = create(**request)
    return response


def containers(response: Response) -> set[str]:
    return {item.container_id for item in response.output if item.type == "code_interpreter_call"}


def tool(file_id: str) -> Any:
    return {"type": "code_interpreter", "container": {"type": "auto", "file_ids": [file_id]}}


async def check(gateway: RunningGateway, client: AsyncOpenAI, output: Any) -> None:
    """The file is cited where its link stands, and what it leads to is the whole of it, backwards."""
    check_told(gateway)
    message = output[-1]
    assert isinstance(message, ResponseOutputMessage)
    part = message.content[0]
    assert part.type == "output_text"
    (cited,) = part.annotations
    assert isinstance(cited, AnnotationContainerFileCitation)
    assert cited.filename == RESULT
    assert part.text[cited.start_index : cited.end_index] == LINK
    await check_files(client, cited.container_id, cited.file_id)


def check_told(gateway: RunningGateway) -> None:
    """The model knew of the file before its first call, and of the other one after it."""
    assert gateway.model.unused_answers == 0
    assert gateway.model.requests[1].json["messages"][-1]["content"].splitlines() == [
        f"Files of the user: /mnt/data/{NAME}.",
        str(len(CONTENT)),
        f"Files: /mnt/data/{RESULT}",
    ]
    described = gateway.model.requests[0].json["tools"][0]["function"]["description"]
    assert f"Files of the user are there: {NAME}." in described


async def check_files(client: AsyncOpenAI, container_id: str, made: str) -> None:
    content = await client.containers.files.content.retrieve(made, container_id=container_id)
    assert content.read() == CONTENT[::-1]
    there = {file.path: file async for file in client.containers.files.list(container_id)}
    assert {path: file.source for path, file in there.items()} == {
        f"/mnt/data/{NAME}": "user",
        f"/mnt/data/{RESULT}": "assistant",
    }
    given = there[f"/mnt/data/{NAME}"]
    content = await client.containers.files.content.retrieve(given.id, container_id=container_id)
    assert content.read() == CONTENT


@pytest.mark.parametrize("streaming", [False, True], ids=["blocking", "streaming"])
async def test_openai(gateway: RunningGateway, client: AsyncOpenAI, file_id: str, streaming: bool) -> None:
    script(gateway.model)
    request: Any = {"model": "scripted", "input": "Turn it round", "tools": [tool(file_id)]}
    if streaming:
        with gateway.strict.responses.stream(**request) as stream:
            cited = [event for event in stream if event.type == "response.output_text.annotation.added"]
            response: Response = stream.get_final_response()
        assert len(cited) == 1
    else:
        response = created(gateway, **request)
    await check(gateway, client, response.output)
    await check(gateway, client, gateway.strict.responses.retrieve(response.id).output)


@pytest.mark.parametrize("streaming", [False, True], ids=["blocking", "streaming"])
async def test_agents(gateway: RunningGateway, client: AsyncOpenAI, file_id: str, streaming: bool) -> None:
    script(gateway.model)
    agent = Agent(
        name="Turner",
        model=OpenAIResponsesModel("scripted", client),
        tools=[CodeInterpreterTool(tool(file_id))],
    )
    if streaming:
        run = Runner.run_streamed(agent, "Turn it round", run_config=QUIET)
        async for _ in run.stream_events():
            pass
        done: Any = run
    else:
        done = await Runner.run(agent, "Turn it round", run_config=QUIET)
    assert done.final_output == TEXT
    await check(gateway, client, done.raw_responses[-1].output)


@pytest.mark.parametrize("streaming", [False, True], ids=["blocking", "streaming"])
async def test_pydantic_ai(
    gateway: RunningGateway, client: AsyncOpenAI, file_id: str, streaming: bool
) -> None:
    script(gateway.model)
    given = CodeExecutionTool(files=[UploadedFile(file_id=file_id, provider_name="openai")])
    agent = PydanticAgent(
        PydanticModel("scripted", provider=OpenAIProvider(openai_client=client)),
        capabilities=[NativeTool(given)],
        model_settings=OpenAIResponsesModelSettings(openai_include_raw_annotations=True),
    )
    if streaming:
        async with agent.run_stream("Turn it round") as run:
            assert await run.get_output() == TEXT
        response = run.response
    else:
        done = await agent.run("Turn it round")
        assert done.output == TEXT
        response = done.response
    (said,) = [part for part in response.parts if isinstance(part, TextPart)]
    check_told(gateway)
    (cited,) = (said.provider_details or {})["annotations"]
    assert (cited["type"], cited["filename"]) == ("container_file_citation", RESULT)
    assert said.content[cited["start_index"] : cited["end_index"]] == LINK
    await check_files(client, cited["container_id"], cited["file_id"])


async def test_files_of_messages_of_every_kind(
    gateway: RunningGateway, client: AsyncOpenAI, file_id: str
) -> None:
    """By id and inline, text and not, a picture: the model sees what it can, and code finds them all."""
    picture = "data:image/png;base64," + base64.b64encode(PNG).decode()
    table = base64.b64encode(b"a,b\n1,2\n").decode()
    content = [
        {"type": "input_file", "file_id": file_id},
        {"type": "input_file", "filename": "t.csv", "file_data": f"data:text/csv;base64,{table}"},
        {"type": "input_image", "image_url": picture, "detail": "low"},
    ]
    listing = "import os\nprint({name: os.path.getsize(name) for name in sorted(os.listdir())})"
    gateway.model.script(
        code_call(listing),
        text_answer("Yes."),
        text_answer("Still."),
        code_call(listing),
        text_answer("Yes."),
    )
    request: Any = {
        "model": "scripted",
        "tools": [{"type": "code_interpreter", "container": {"type": "auto"}}],
    }
    said: Any = {"role": "user", "content": content}
    first = created(gateway, input=[said], **request)
    created(gateway, input="Sure?", previous_response_id=first.id, **request)
    await client.files.delete(file_id)
    again: Any = [said, *first.output, {"role": "user", "content": "And now?"}]
    replayed = created(gateway, input=again, **request)

    found = f"{{'{NAME}': {len(CONTENT)}, 'image.png': {len(PNG)}, 't.csv': 8}}"
    asked = [one.json["messages"] for one in gateway.model.requests]
    assert asked[0][0]["content"] == [
        {
            "type": "text",
            "text": f"The file {NAME} (of unknown type, {len(CONTENT):,} bytes) cannot be shown here. "
            f"If there is a code interpreter, it finds it as /mnt/data/{NAME}.",
        },
        {"type": "text", "text": "The file t.csv:\na,b\n1,2\n"},
        {"type": "image_url", "image_url": {"url": picture, "detail": "low"}},
    ]
    assert asked[1][-1]["content"].splitlines() == [
        f"Files of the user: /mnt/data/{NAME}, /mnt/data/t.csv, /mnt/data/image.png.",
        found,
    ]
    assert asked[2][:3] == asked[1]  # byte for byte what it was
    assert asked[3][0]["content"][1:] == asked[0][0]["content"][1:]
    assert asked[4][-1]["content"] == found  # nothing was put there a second time
    assert containers(replayed) == containers(first)


def test_what_is_not_there_is_refused_before_anything_begins(gateway: RunningGateway) -> None:
    gateway.model.script()
    parts: Any = [{"type": "input_file", "file_id": "file-nobody"}]
    with pytest.raises(openai.BadRequestError) as refused:
        gateway.strict.responses.create(
            model="scripted", input=[{"role": "user", "content": parts}], stream=True
        )
    assert (refused.value.param, refused.value.code) == ("input[0].content[0].file_id", "file_not_found")
    with pytest.raises(openai.BadRequestError, match="file-nobody") as refused:
        gateway.strict.responses.create(
            model="scripted", input="Hi", tools=[tool("file-nobody")], stream=True
        )
    assert refused.value.param == "tools"
