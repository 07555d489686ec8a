"""Files and pictures in prompts: how they are written, what is sent, what the model and its code get."""

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fumehood.client import (
    InputFile,
    InputImage,
    MarkdownSection,
    Prompt,
    PromptEvaluationError,
    PromptValidationError,
    Session,
)
from fumehood.client.adapters.openai import CompactionConfig, OpenAICodeInterpreterTool
from fumehood.client.adapters.openai.compaction import estimate_tokens
from tests.client.conftest import CreateWorkspace, GatewayServer, OpenAIStandIn
from tests.support.client_prompts import HOSTED, function_call, prompt, query_tool
from tests.support.gateway_process import code_call, text_answer
from tests.support.openai_server import error, message, response

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
PICTURE = {
    "type": "input_image",
    "detail": "auto",
    "image_url": "data:image/png;base64," + base64.b64encode(PNG).decode(),
}
TABLE = {"type": "input_file", "filename": "sales.csv", "file_data": "data:text/csv;base64,MQoyCg=="}


@dataclass(frozen=True)
class Question:
    text: str
    chart: InputImage
    tables: tuple[InputFile, ...] = ()


@pytest.fixture
def sales(tmp_path: Path) -> Path:
    path = tmp_path / "sales.csv"
    path.write_text("1\n2\n")
    return path


def test_each_source_has_its_form(sales: Path) -> None:
    assert InputFile(sales).build_part() == InputFile(path=str(sales)).build_part() == TABLE
    assert InputFile(content=b"1\n2\n", filename="sales.csv").build_part() == TABLE
    assert InputFile(file_id="file-1").build_part() == {"type": "input_file", "file_id": "file-1"}
    assert InputFile(url="https://x.org/a.pdf").build_part() == {
        "type": "input_file",
        "file_url": "https://x.org/a.pdf",
    }
    assert (
        InputFile(content=b"?", filename="a.unknown")
        .build_part()["file_data"]
        .startswith("data:application/octet-stream;base64,")
    )
    assert InputImage(content=PNG).build_part() == PICTURE
    assert InputImage(file_id="file-1", detail="low").build_part() == {
        "type": "input_image",
        "detail": "low",
        "file_id": "file-1",
    }
    assert InputImage(url="https://x.org/a.png").build_part()["image_url"] == "https://x.org/a.png"


@pytest.mark.parametrize(
    ("content", "media_type"),
    [
        (PNG, "image/png"),
        (b"\xff\xd8\xff\xe0", "image/jpeg"),
        (b"GIF89a", "image/gif"),
        (b"RIFF\0\0\0\0WEBP", "image/webp"),
    ],
)
def test_a_picture_is_known_by_its_content(content: bytes, media_type: str) -> None:
    assert InputImage(content=content).build_part()["image_url"].startswith(f"data:{media_type};base64,")


@pytest.mark.parametrize(
    ("make", "expected_error"),
    [
        (InputFile, "InputFile has no source"),
        (lambda: InputFile(file_id="file-1", url="https://x"), "InputFile has file_id and url"),
        (lambda: InputFile(file_id=" "), "InputFile has an empty file_id"),
        (lambda: InputFile(url="ftp://x"), "InputFile has the url 'ftp://x'"),
        (lambda: InputFile(content=b"x"), "content and no filename"),
        (lambda: InputFile(file_id="file-1", filename="x"), "has a filename, which only path and content"),
        (lambda: InputFile("/nowhere/at/all"), "'/nowhere/at/all' cannot be read: No such file"),
        (lambda: InputFile("a\0b"), "cannot be read"),
        (lambda: InputImage(content=b"plain text"), "no PNG, JPEG, GIF or WebP; include it as InputFile"),
        (lambda: InputImage(__file__), r"test_attachments\.py' is no PNG"),
        (lambda: InputImage(content=PNG, detail="huge"), "detail is 'huge'"),  # pyright: ignore[reportArgumentType]
        (lambda: InputFile(content="x", filename="x"), "content is str; it has to be bytes"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_malformed_attachments_are_rejected_at_construction(make: Any, expected_error: str) -> None:
    with pytest.raises(PromptValidationError, match=expected_error):
        make()


def test_sections_parameters_and_bind_add_attachments_in_order(sales: Path) -> None:
    section = MarkdownSection[Question](
        title="Task",
        key="task",
        template="${text} See ${chart} and ${tables}.",
        attachments=[InputFile(file_id="file-1")],
    )
    tables = (InputFile(sales), InputFile(url="https://x.org/rates.csv?day=1"))
    question = Question("Why?", InputImage(content=PNG), tables)
    bound = Prompt(ns="n", key="k", sections=[section.clone()]).bind(InputFile(file_id="file-2"))
    rendered = bound.bind(question, InputFile(file_id="file-1")).render()
    assert rendered.text.endswith("Why? See the picture and sales.csv, rates.csv.")
    assert rendered.attachments == (
        InputFile(file_id="file-1"),
        InputImage(content=PNG),
        *tables,
        InputFile(file_id="file-2"),
    )
    assert "1\n2" not in repr(rendered)
    sales.write_text("changed")
    assert rendered.attachments[2].build_part() == TABLE


def test_a_disabled_section_adds_none() -> None:
    section = MarkdownSection(
        title="T",
        key="t",
        template="x",
        attachments=[InputFile(file_id="file-1")],
        enabled=lambda params: False,
    )
    assert Prompt(ns="n", key="k", sections=[section]).render().attachments == ()


def test_the_first_turn_has_them_in_a_message_of_the_user(openai_stand_in: OpenAIStandIn) -> None:
    openai_stand_in.server.script(response(message("two lines")))
    openai_stand_in.adapter().evaluate(prompt(), InputImage(content=PNG), InputFile(file_id="file-1"))
    (request,) = openai_stand_in.server.asked
    assert request["input"] == [
        {"role": "system", "content": "## 1. Task\n\nDo it."},
        {"role": "user", "content": [PICTURE, {"type": "input_file", "file_id": "file-1"}]},
    ]


def test_a_later_turn_has_them_beside_its_text(openai_stand_in: OpenAIStandIn) -> None:
    session, adapter = Session(), openai_stand_in.adapter(compaction=CompactionConfig())
    openai_stand_in.server.script(response(message("first")), response(message("second")))
    for file_id in ("file-1", "file-2"):
        adapter.evaluate(prompt(), InputFile(file_id=file_id), session=session)
    asked = openai_stand_in.server.asked[1]["input"]
    assert asked[1] == {"role": "user", "content": [{"type": "input_file", "file_id": "file-1"}]}
    assert asked[-1] == {
        "role": "user",
        "content": [
            {"type": "input_text", "text": "## 1. Task\n\nDo it."},
            {"type": "input_file", "file_id": "file-2"},
        ],
    }


def test_a_compaction_between_turns_keeps_them(openai_stand_in: OpenAIStandIn) -> None:
    call = response(function_call("c1", '{"sql": "x"}'), usage={"input_tokens": 999, "total_tokens": 999})
    window = {"type": "compaction", "encrypted_content": "sealed"}
    openai_stand_in.server.script(call, response(window), response(message("done")))
    adapter = openai_stand_in.adapter(compaction=CompactionConfig(threshold_tokens=100))
    adapter.evaluate(prompt(query_tool), InputFile(file_id="file-1"))
    asked = openai_stand_in.server.asked[2]["input"]
    assert asked == [window, *openai_stand_in.server.asked[0]["input"]]
    assert asked[-1]["content"] == [{"type": "input_file", "file_id": "file-1"}]


def test_a_recreated_container_changes_the_text_alone(
    openai_stand_in: OpenAIStandIn, create_workspace: CreateWorkspace
) -> None:
    session = Session()
    asked = prompt(sections=(create_workspace(session=session, client=openai_stand_in.client),))
    adapter = openai_stand_in.adapter(hosted_tools=HOSTED, compaction=CompactionConfig())
    openai_stand_in.server.script(
        response(message("first")), error(404, "Container is expired."), response(message("second"))
    )
    adapter.evaluate(asked, session=session)
    adapter.evaluate(asked, InputFile(file_id="file-1"), session=session)
    before, after = (request["input"][-1]["content"] for request in openai_stand_in.server.asked[1:])
    assert before[1:] == after[1:] == [{"type": "input_file", "file_id": "file-1"}]
    assert before[0]["text"] != after[0]["text"]
    assert "workspace.tar" in after[0]["text"]


def test_code_finds_the_files_and_the_model_sees_the_picture(
    gateway_server: GatewayServer, sales: Path
) -> None:
    upload = gateway_server.client.files.create(file=("rates.csv", b"7\n"), purpose="user_data")
    gateway_server.script(
        code_call(
            "print(sorted(__import__('os').listdir()), open('sales.csv').read(), open('rates.csv').read())"
        ),
        text_answer("Read."),
    )
    response = gateway_server.adapter().evaluate(
        prompt(OpenAICodeInterpreterTool()),
        InputFile(sales),
        InputFile(file_id=upload.id),
        InputImage(content=PNG),
    )
    assert response.text == "Read."
    first, second = gateway_server.model.requests
    system, user = first.json["messages"]
    assert (system["role"], user["role"]) == ("system", "user")
    pictures = [part["image_url"]["url"] for part in user["content"] if part["type"] == "image_url"]
    assert pictures == [PICTURE["image_url"]]
    assert "1\n2" in str([part.get("text") for part in user["content"]]).replace("\\n", "\n")
    output = second.json["messages"][-1]["content"]
    assert "['image.png', 'rates.csv', 'sales.csv'] 1\n2\n 7" in output
    gateway_server.client.files.delete(upload.id)


def test_a_url_that_the_gateway_does_not_fetch_is_its_error(gateway_server: GatewayServer) -> None:
    with pytest.raises(PromptEvaluationError) as refused:
        gateway_server.adapter().evaluate(prompt(), InputImage(url="http://127.0.0.1:9/a.png"))
    assert refused.value.phase == "request"
    assert "image_url" in str(refused.value.provider_payload)


def test_a_file_counts_as_text_up_to_what_a_model_reads() -> None:
    def tokens(content: bytes) -> int:
        part = InputFile(content=content, filename="a.txt").build_part()
        return estimate_tokens([{"role": "user", "content": [part]}])

    assert 1000 <= tokens(b"x" * 4000) <= 1100
    assert tokens(b"x" * 1_000_000) <= 26_000
