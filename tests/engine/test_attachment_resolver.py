"""Files and pictures of inputs, found before a response begins and kept with it."""

import base64
from typing import Any

import msgspec
import pytest

from fumehood.engine.token_counter import estimate_entry
from fumehood.files import InputSettings
from fumehood.files.input_file_loader import InputFileLoader
from fumehood.interfaces import Caller
from fumehood.models.chat_completions.chat_renderer import render_messages
from fumehood.models.rendering.server_features import ServerFeatures
from fumehood.models.responses_api.reasoning_origin import ReasoningOrigin
from fumehood.models.responses_api.responses_renderer import render_input
from fumehood.protocol.attachments import Attachment
from fumehood.protocol.conversation import ConversationEntry
from fumehood.protocol.model_turns import ModelProfile, ModelRequest
from fumehood.protocol.openai.api_errors import InvalidRequest
from fumehood.protocol.openai.responses import CreateResponse
from fumehood.testing import ScriptedModel, says
from tests.support.echo_tool import EchoTool
from tests.support.engine_harness import EngineHarness
from tests.support.memory_uploads import InMemoryUploads

PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 20
PDF = b"%PDF-1.7\n"
ANSWER = says("Seen.")


class AttachmentHarness(EngineHarness):
    """An engine that loads the files of inputs from uploads."""

    def __init__(
        self,
        *turns: Any,
        uploads: InMemoryUploads | None = None,
        takes_files: bool | None = False,
        finds_files: bool = False,
    ) -> None:
        self.uploads = uploads or InMemoryUploads()
        super().__init__(
            ScriptedModel(*turns, profile=ModelProfile(takes_files=takes_files)),
            [EchoTool(finds_files=finds_files)],
            attachments=InputFileLoader(self.uploads),
        )


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*parts]}


def file(file_id: str, **more: Any) -> dict[str, Any]:
    return {"type": "input_file", "file_id": file_id, **more}


def inline(name: str, content: bytes) -> dict[str, Any]:
    return {"type": "input_file", "filename": name, "file_data": base64.b64encode(content).decode()}


def shown(request: ModelRequest) -> list[Any]:
    """What a chat server would be sent."""
    return msgspec.json.decode(b"[%b]" % b",".join(render_messages(ServerFeatures(), None, request.segments)))


def attached(request: ModelRequest) -> list[Attachment]:
    return [one for segment in request.segments for entry in segment.entries for one in entry.attachments]


async def test_what_an_id_stood_for_stays_when_the_upload_is_deleted() -> None:
    harness = AttachmentHarness(ANSWER, ANSWER)
    text, picture = harness.uploads.add("t.csv", b"a,b\n"), harness.uploads.add("p.png", PNG)
    first = await harness.create(input=[user(file(text), {"type": "input_image", "file_id": picture})])
    harness.uploads.records.clear()
    await harness.create(previous_response_id=first.id)
    before, after = (shown(request) for request in harness.model.requests)
    assert before[0]["content"] == [
        {"type": "text", "text": "The file t.csv:\na,b\n"},
        {
            "type": "image_url",
            "image_url": {"url": f"data:image/png;base64,{base64.b64encode(PNG).decode()}"},
        },
    ]
    assert after[0] == before[0]
    assert len(harness.uploads.reads) == 2


async def test_items_that_are_given_back_need_not_be_there_any_more() -> None:
    """Once the model has answered them; what is new has to be."""
    harness = AttachmentHarness(ANSWER)
    answered = {"role": "assistant", "content": "Seen."}
    given = user(file("file-gone", filename="t.csv"), inline("t.csv", b"1"))
    await harness.create(input=[given, answered, {"role": "user", "content": "Hi"}])
    (request,) = harness.model.requests
    assert shown(request)[0]["content"] == "The file t.csv is not there any more.\nThe file t-2.csv:\n1"


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([user(file("file-x"))], "input[0].content[0].file_id"),
        (
            [user({"type": "input_text", "text": "x"}, {"type": "input_image", "file_id": "x"})],
            "input[0].content[1].file_id",
        ),
        (
            [
                user({"type": "input_text", "text": "x"}),
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": [file("file-x")]},
            ],
            "input[2].output[0].file_id",
        ),
        (
            [
                user({"type": "input_text", "text": "x"}),
                {"role": "assistant", "content": "a"},
                user(file("file-x")),
            ],
            "input[2].content[0].file_id",
        ),
        ([user({"type": "input_file", "file_data": "***"})], "input[0].content[0].file_data"),
        ([user({"type": "input_file"})], "input[0].content[0].file_id"),
        ([user(*[file("file-x")] * 201)], "input"),
    ],
)
async def test_what_cannot_be_had_is_refused_before_anything_begins(items: Any, param: str) -> None:
    harness = AttachmentHarness()
    harness.uploads.add("x.txt", b"secret", "another tenant")
    for method in (harness.create, harness.stream):
        with pytest.raises(InvalidRequest) as refused:
            await method(input=items)
        assert refused.value.param == param
    with pytest.raises(InvalidRequest) as refused:
        await harness.create(input=[user(file("file-1"))])
    assert refused.value.wire_code == "file_not_found"
    assert harness.store.commit_count == 0
    assert harness.model.requests == []


async def test_an_inline_file_that_is_too_large_for_models_is_there_for_code() -> None:
    attachments = InputFileLoader(InMemoryUploads(), settings=InputSettings(file_bytes=len(PDF) - 1))
    model = ScriptedModel(ANSWER, profile=ModelProfile(takes_files=True))
    harness = EngineHarness(model, [EchoTool(finds_files=True)], attachments=attachments)
    request: Any = {"input": [user(inline("x.pdf", PDF))]}
    with pytest.raises(InvalidRequest) as refused:
        await harness.create(**request)
    assert refused.value.wire_code == "unsupported_file"
    await harness.create(**request, tools=[{"type": "echo"}])
    (asked,) = model.requests
    for features in (ServerFeatures(takes_files=True), ServerFeatures()):
        for rendered in (
            b"".join(render_messages(features, None, asked.segments)),
            b"".join(render_input(features, asked.segments, ReasoningOrigin("here"))),
        ):
            assert b"finds it as /mnt/data/x.pdf" in rendered
            assert b"file_data" not in rendered


async def test_a_short_request_cannot_name_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fumehood.engine.attachment_resolver._MAX_BYTES", 1000)
    harness = AttachmentHarness(ANSWER)
    text = harness.uploads.add("t.csv", b"x" * 300)
    await harness.create(input=[user(*[file(text)] * 3)])
    with pytest.raises(InvalidRequest, match="more than 1,000 bytes") as refused:
        await harness.create(input=[user(*[file(text)] * 100)])
    assert refused.value.param == "input"
    assert len(harness.uploads.reads) == 3 + 4


async def test_results_of_functions_hold_files_and_pictures() -> None:
    harness = AttachmentHarness(ANSWER)
    text, picture = harness.uploads.add("t.csv", b"a,b"), harness.uploads.add("p.png", PNG)
    output = [file(text), {"type": "input_image", "file_id": picture, "detail": "high"}]
    await harness.create(
        input=[
            {"role": "user", "content": "Fetch it."},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": output},
        ]
    )
    *_, result, shown_after = shown(harness.model.requests[0])
    assert result == {"role": "tool", "tool_call_id": "c", "content": "The file t.csv:\na,b"}
    assert shown_after["content"][1]["image_url"] == {
        "url": f"data:image/png;base64,{base64.b64encode(PNG).decode()}",
        "detail": "high",
    }


async def test_names_differ_along_a_conversation_and_an_upload_keeps_its_own() -> None:
    harness = AttachmentHarness(ANSWER, ANSWER)
    one, other = harness.uploads.add("t.csv", b"1"), harness.uploads.add("t.csv", b"2")
    first = await harness.create(input=[user(file(one), inline("t.csv", b"3")), user(file(one))])
    await harness.create(
        previous_response_id=first.id, input=[user(file(other), file(one), inline("t.csv", b"4"))]
    )
    assert [found.name for found in attached(harness.model.requests[1])] == [
        *("t.csv", "t-2.csv", "t.csv"),
        *("t-3.csv", "t.csv", "t-4.csv"),
    ]


async def test_a_file_that_nobody_could_look_at_is_refused() -> None:
    uploads = InMemoryUploads()
    pdf = uploads.add("x.pdf", PDF)
    items = [user(file(pdf))]
    blind = AttachmentHarness(uploads=uploads)
    with pytest.raises(InvalidRequest, match=r"x\.pdf cannot be shown to this model") as refused:
        await blind.create(input=items, tools=[{"type": "echo"}])
    assert (refused.value.param, refused.value.wire_code) == ("input[0].content[0]", "unsupported_file")
    with pytest.raises(InvalidRequest, match=r"y\.pdf"):
        await blind.create(input=[user(inline("y.pdf", PDF))])

    coding = AttachmentHarness(ANSWER, uploads=uploads, finds_files=True)
    await coding.create(input=items, tools=[{"type": "echo"}])
    assert (
        "If there is a code interpreter, it finds it as /mnt/data/x.pdf."
        in shown(coding.model.requests[0])[0]["content"]
    )

    seeing = AttachmentHarness(ANSWER, uploads=uploads, takes_files=True)
    await seeing.create(input=items)
    (found,) = attached(seeing.model.requests[0])
    assert found.data == f"data:application/pdf;base64,{base64.b64encode(PDF).decode()}"


async def test_where_nobody_has_said_what_a_model_takes_files_go_to_whoever_may_open_them() -> None:
    harness = AttachmentHarness(
        ANSWER, ANSWER, ANSWER, says("A summary."), takes_files=None, finds_files=True
    )
    pdf = harness.uploads.add("x.pdf", PDF)
    items = [user(file(pdf), inline("y.pdf", PDF))]
    first = await harness.create(input=items)
    await harness.create(previous_response_id=first.id, tools=[{"type": "echo"}])
    await harness.create(input=items, tools=[{"type": "echo"}])
    body = msgspec.json.encode({"model": "scripted", "input": items})
    await harness.runs.compact(msgspec.json.decode(body, type=CreateResponse), Caller())
    alone, continued, beside_code, compacted = (
        shown(request)[0]["content"] for request in harness.model.requests
    )
    data = f"data:application/pdf;base64,{base64.b64encode(PDF).decode()}"
    assert alone == [
        {"type": "file", "file": {"filename": name, "file_data": data}} for name in ("x.pdf", "y.pdf")
    ]
    assert continued == alone
    assert "If there is a code interpreter, it finds it as /mnt/data/x.pdf." in beside_code
    assert compacted == beside_code


async def test_references_to_items_bring_their_files() -> None:
    harness = AttachmentHarness(ANSWER, ANSWER)
    text = harness.uploads.add("t.csv", b"a,b\n")
    await harness.create(input=[{"id": "msg_mine", **user(file(text))}])
    harness.uploads.records.clear()
    await harness.create(input=[{"type": "item_reference", "id": "msg_mine"}])
    before, after = (shown(request) for request in harness.model.requests)
    assert before == after


async def test_files_count_as_tokens_and_as_bytes() -> None:
    harness = AttachmentHarness()
    text = harness.uploads.add("t.csv", b"abcd" * 1000)
    body = msgspec.json.encode({"model": "scripted", "input": [user(file(text))]})
    counted = await harness.runs.count_tokens(msgspec.json.decode(body, type=CreateResponse), Caller())
    assert counted.input_tokens >= 1000
    entry = ConversationEntry(
        type="message", id=None, turn=0, raw=b"{}", attachments=(Attachment(data="x" * 4000),)
    )
    assert estimate_entry(entry) >= 750
    assert entry.size == 4002


async def test_compaction_keeps_the_files_of_the_messages_that_it_keeps() -> None:
    harness = AttachmentHarness(ANSWER, says("A summary."), ANSWER)
    text = harness.uploads.add("t.csv", b"a,b\n")
    first = await harness.create(input=[user(file(text))])
    compacted = await harness.runs.compact(
        CreateResponse(model="scripted", previous_response_id=first.id), Caller()
    )
    harness.uploads.records.clear()
    await harness.create(
        input=[msgspec.to_builtins(compacted.output[0]), {"role": "user", "content": "Go on."}]
    )
    assert shown(harness.model.requests[-1])[0]["content"] == "The file t.csv:\na,b\n"
