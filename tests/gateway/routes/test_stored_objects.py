"""Stored responses, items, models and files over HTTP."""

import json
import re
from typing import Any

import pytest
from inline_snapshot import snapshot

from fumehood.models.model_settings import ModelSettings
from fumehood.models.registry import open_model_registry
from fumehood.protocol.attachments import Attachment
from fumehood.protocol.conversation import ConversationEntry
from fumehood.protocol.openai.responses import Response
from fumehood.testing import FakeClock
from tests.support.scripted_gateway import ScriptedGateway, raw_items, run_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

# --- responses that are kept --------------------------------------------------------------------------


async def keep(gateway: ScriptedGateway, *inputs: dict[str, Any]) -> None:
    """resp_1, which has ended, and what it was asked."""
    response = Response(id="resp_1", created_at=1, model="m", status="completed")
    await gateway.store.delete_response("", "resp_1")
    await gateway.store.commit_response(None, "", response, raw_items(*inputs))


async def test_a_response_is_read_and_deleted(gateway: ScriptedGateway) -> None:
    await keep(gateway)
    answer = await gateway.request("GET", "/v1/responses/resp_1")
    assert (answer.status, answer.json["id"]) == (200, "resp_1")
    answer = await gateway.request("DELETE", "/v1/responses/resp_1")
    assert answer.json == {"id": "resp_1", "object": "response", "deleted": True}
    for method in ("GET", "DELETE"):
        assert (await gateway.request(method, "/v1/responses/resp_1")).error == (404, None, "response_id")


async def test_include_of_a_query(gateway: ScriptedGateway) -> None:
    await keep(gateway)
    path = "/v1/responses/resp_1?include[]=code_interpreter_call.outputs&include=fumehood:execution"
    assert (await gateway.request("GET", path)).status == 200
    assert (await gateway.request("GET", "/v1/responses/resp_1?include=x")).error == (
        400,
        "invalid_value",
        "include[0]",
    )


async def test_a_foreground_response_can_be_neither_streamed_again_nor_cancelled(
    gateway: ScriptedGateway,
) -> None:
    await keep(gateway)
    assert (await gateway.request("GET", "/v1/responses/resp_1?stream=true")).error == (400, None, "stream")
    answer = await gateway.request("POST", "/v1/responses/resp_1/cancel")
    assert answer.status == 400
    assert "Cannot cancel a synchronous response" in answer.json["error"]["message"]
    assert (await gateway.request("POST", "/v1/responses/resp_2/cancel")).status == 404


async def test_input_items_in_pages(gateway: ScriptedGateway) -> None:
    await keep(gateway, *({"type": "message", "id": f"msg_{number}", "role": "user"} for number in range(5)))
    path = "/v1/responses/resp_1/input_items"
    newest = (await gateway.request("GET", f"{path}?limit=2")).json
    assert [item["id"] for item in newest["data"]] == ["msg_4", "msg_3"]
    assert {key: newest[key] for key in ("object", "first_id", "last_id", "has_more")} == {
        "object": "list",
        "first_id": "msg_4",
        "last_id": "msg_3",
        "has_more": True,
    }
    rest = (await gateway.request("GET", f"{path}?after=msg_3")).json
    assert [item["id"] for item in rest["data"]] == ["msg_2", "msg_1", "msg_0"]
    assert not rest["has_more"]
    oldest = (await gateway.request("GET", f"{path}?order=asc&after=msg_1&before=msg_4")).json
    assert [item["id"] for item in oldest["data"]] == ["msg_2", "msg_3"]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=x", "limit"),
        ("limit=%C2%B2", "limit"),
        ("order=up", "order"),
        ("after=msg_9", "after"),
        ("include=x", "include[0]"),
    ],
)
async def test_a_bad_page_is_refused(gateway: ScriptedGateway, query: str, param: str) -> None:
    await keep(gateway)
    answer = await gateway.request("GET", f"/v1/responses/resp_1/input_items?{query}")
    assert answer.error == (400, "invalid_value", param)


async def test_input_items_in_short_forms_are_shown_in_long_ones(gateway: ScriptedGateway) -> None:
    """A client finds the next page by the id of the last item, and the SDK's types want the rest."""
    forms: list[dict[str, Any]] = [
        {"role": "user", "content": "easy"},
        {"role": "assistant", "content": "yes", "id": None, "status": None},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "no"}]},
        {"role": "developer", "content": [{"type": "input_image", "image_url": "data:,"}, 5]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "status": None},
        {"type": "function_call_output", "call_id": "c", "output": "1", "unknown": {"a": [1e9]}},
        {"type": "reasoning"},
        {"type": "code_interpreter_call", "code": "1", "outputs": None},
    ]
    entries = [
        ConversationEntry(
            type=form.get("type", "message"), id=f"item_{number}", turn=0, raw=json.dumps(form).encode()
        )
        for number, form in enumerate(forms)
    ]
    await gateway.store.delete_response("", "resp_1")
    response = Response(id="resp_1", created_at=1, model="m", status="completed")
    await gateway.store.commit_response(None, "", response, [*entries, entries[0]])
    listed = (await gateway.request("GET", "/v1/responses/resp_1/input_items?order=asc")).json["data"]
    assert [item.pop("id") for item in listed] == [f"item_{number}" for number in range(8)]
    assert listed == snapshot(
        [
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": "easy"}],
                "status": "completed",
            },
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "yes", "annotations": []}],
                "status": "completed",
            },
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "no", "annotations": []}],
                "status": "completed",
            },
            {
                "type": "message",
                "role": "developer",
                "content": [{"type": "input_image", "image_url": None, "detail": "auto"}, 5],
                "status": "completed",
            },
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "status": "completed"},
            {
                "type": "function_call_output",
                "call_id": "c",
                "output": "1",
                "unknown": {"a": [1000000000.0]},
                "status": "completed",
            },
            {"type": "reasoning", "summary": []},
            {
                "type": "code_interpreter_call",
                "code": "1",
                "outputs": None,
                "status": "completed",
                "container_id": "",
            },
        ]
    )


async def test_pictures_are_listed_for_those_who_ask(gateway: ScriptedGateway) -> None:
    parts = [
        {"type": "input_file", "file_id": "file-1"},
        {"type": "input_image", "file_id": "file-2", "detail": "low"},
        {"type": "input_image", "image_url": "data:,x"},
    ]
    attached = (Attachment(name="t.csv", text="a"), Attachment(name="p.png", data="data:,p"), Attachment())
    raw = json.dumps({"role": "user", "content": parts}).encode()
    entry = ConversationEntry(type="message", id="msg_1", turn=0, raw=raw, attachments=attached)
    await gateway.store.delete_response("", "resp_1")
    await gateway.store.commit_response(
        None, "", Response(id="resp_1", created_at=1, model="m", status="completed"), [entry]
    )

    async def listed(query: str) -> list[Any]:
        answer = await gateway.request("GET", f"/v1/responses/resp_1/input_items{query}")
        return answer.json["data"][0]["content"][1:]

    assert await listed("") == [
        {"type": "input_image", "file_id": "file-2", "detail": "low", "image_url": None},
        {"type": "input_image", "image_url": None, "detail": "auto"},
    ]
    assert await listed("?include=message.input_image.image_url") == [
        {"type": "input_image", "file_id": "file-2", "detail": "low", "image_url": "data:,p"},
        {"type": "input_image", "image_url": "data:,x", "detail": "auto"},
    ]


async def test_input_items_of_nothing(gateway: ScriptedGateway) -> None:
    assert (await gateway.request("GET", "/v1/responses/resp_2/input_items")).status == 404
    await keep(gateway)
    assert (await gateway.request("GET", "/v1/responses/resp_1/input_items")).json == {
        "object": "list",
        "data": [],
        "first_id": None,
        "last_id": None,
        "has_more": False,
    }


async def test_input_items_show_outputs_to_those_who_ask(gateway: ScriptedGateway) -> None:
    call = {
        "type": "code_interpreter_call",
        "id": "ci_1",
        "status": "completed",
        "code": "1",
        "container_id": "cntr_1",
        "outputs": [{"type": "logs", "logs": "1"}],
        "fumehood:execution": {"exit_code": 0},
        "unknown": [1],
    }
    await keep(gateway, call)
    path = "/v1/responses/resp_1/input_items"
    hidden = {key: value for key, value in call.items() if key != "fumehood:execution"} | {"outputs": None}
    assert (await gateway.request("GET", path)).json["data"] == [hidden]
    asked = f"{path}?include[]=code_interpreter_call.outputs&include[]=fumehood:execution"
    assert (await gateway.request("GET", asked)).json["data"] == [call]


# --- models -------------------------------------------------------------------------------------------


async def test_models(gateway: ScriptedGateway) -> None:
    listed = (await gateway.request("GET", "/v1/models")).json
    assert [card["id"] for card in listed["data"]] == ["small", "org/large"]
    assert listed["object"] == "list"
    for path in ("org/large", "org%2Flarge"):
        assert (await gateway.request("GET", f"/v1/models/{path}")).json == {
            "id": "org/large",
            "created": 1,
            "owned_by": "tests",
            "object": "model",
            "fumehood:tools": [],
        }
    assert (await gateway.request("GET", "/v1/models/none")).error == (404, "model_not_found", "model")


async def test_models_announce_their_tools() -> None:
    """Those that the gateway hosts, then those that their server hosts."""
    settings = [
        ModelSettings(match="plain", backend="direct"),
        ModelSettings(
            match="searches",
            backend="responses",
            base_url="http://127.0.0.1:9/v1",
            pass_tools=["web_search", "custom", "shell"],
        ),
        ModelSettings(match="all", backend="responses", base_url="http://127.0.0.1:9/v1", pass_tools=["*"]),
    ]
    models = open_model_registry(settings, FakeClock(), {})
    async with run_gateway(models=models, hosted_tools=["code_interpreter", "shell"]) as gateway:
        listed = (await gateway.request("GET", "/v1/models")).json["data"]
        single = (await gateway.request("GET", "/v1/models/searches")).json
    await models.close()
    assert {card["id"]: card["fumehood:tools"] for card in listed} == {
        "plain": ["code_interpreter", "shell"],
        "searches": ["code_interpreter", "shell", "web_search"],
        "all": ["code_interpreter", "shell", "*"],
    }
    assert single == listed[1]


# --- files of containers ------------------------------------------------------------------------------


async def test_a_file_is_described_listed_and_fetched(gateway: ScriptedGateway) -> None:
    gateway.files.add("cfile_1", "plots/a.png", b"\x89PNG", b"...")
    gateway.files.add("cfile_2", "b.csv", b"a,b\n")
    described = {
        "id": "cfile_1",
        "object": "container.file",
        "bytes": 7,
        "container_id": "cntr_1",
        "created_at": 1,
        "path": "/mnt/data/plots/a.png",
        "source": "assistant",
    }
    base = "/v1/containers/cntr_1/files"
    assert (await gateway.request("GET", f"{base}/cfile_1")).json == described
    listed = (await gateway.request("GET", base)).json
    assert [file["id"] for file in listed["data"]] == ["cfile_2", "cfile_1"]
    assert listed["data"][1] == described
    content = await gateway.request("GET", f"{base}/cfile_1/content")
    assert (content.status, content.body) == (200, b"\x89PNG...")
    assert content.headers["content-type"] == "image/png"
    assert content.headers["content-disposition"] == 'attachment; filename="a.png"'
    assert content.headers["x-content-type-options"] == "nosniff"
    small = await gateway.request("GET", f"{base}/cfile_2/content")
    assert small.headers["content-type"] == "text/csv; charset=utf-8"
    assert (small.headers["content-length"], small.body) == ("4", b"a,b\n")


async def test_an_empty_file(gateway: ScriptedGateway) -> None:
    gateway.files.add("cfile_1", "empty")
    content = await gateway.request("GET", "/v1/containers/cntr_1/files/cfile_1/content")
    assert (content.status, content.body) == (200, b"")
    assert content.headers["content-type"] == "application/octet-stream"


@pytest.mark.parametrize("suffix", ["", "/content"])
async def test_a_file_that_is_not_there(gateway: ScriptedGateway, suffix: str) -> None:
    for container, file in (("cntr_1", "cfile_9"), ("cntr_9", "cfile_1")):
        assert (
            await gateway.request("GET", f"/v1/containers/{container}/files/{file}{suffix}")
        ).status == 404


@pytest.mark.parametrize(
    ("path", "disposition"),
    [
        ("a b (1).txt", 'attachment; filename="a b (1).txt"'),
        ('q"uote\\.txt', "attachment; filename=\"q_uote_.txt\"; filename*=UTF-8''q%22uote%5C.txt"),
        ("größe.csv", "attachment; filename=\"gr__e.csv\"; filename*=UTF-8''gr%C3%B6%C3%9Fe.csv"),
        (
            "a\r\nset-cookie: x",
            "attachment; filename=\"a__set-cookie_ x\"; filename*=UTF-8''a%EF%BF%BD%EF%BF%BDset-cookie%3A%20x",
        ),
        ("\u202egnp.exe", "attachment; filename=\"_gnp.exe\"; filename*=UTF-8''%EF%BF%BDgnp.exe"),
        ("directory/", 'attachment; filename="file"'),
    ],
)
async def test_a_name_that_code_has_chosen_cannot_break_a_header(
    gateway: ScriptedGateway, path: str, disposition: str
) -> None:
    gateway.files.add("cfile_1", path, b"x")
    content = await gateway.request("GET", "/v1/containers/cntr_1/files/cfile_1/content")
    assert content.status == 200
    assert content.headers["content-disposition"] == disposition
    assert "set-cookie" not in content.headers


async def test_a_long_name_keeps_its_ending(gateway: ScriptedGateway) -> None:
    gateway.files.add("cfile_1", "ä" * 250 + ".html", b"<script>")
    content = await gateway.request("GET", "/v1/containers/cntr_1/files/cfile_1/content")
    name = re.search(r'filename="([^"]*)"', content.headers["content-disposition"])
    assert name is not None
    assert len(name[1]) == 200
    assert name[1].endswith(".html")
    assert content.headers["content-security-policy"].startswith("sandbox")
