"""A gateway whose disk is full, before and while a response is made."""

import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.conftest import make_client, make_settings_without_code
from tests.support import gateway_process
from tests.support.gateway_process import GatewayProcess, ScriptedModelServer, text_answer
from tests.support.raw_model_server import chunk, stream
from tests.support.small_disk import fill_disk, free_disk, mount_small_disk
from tests.support.waiting import becomes_true

pytestmark = pytest.mark.root
LONG = "x" * 200_000  # more than the log has room for


@pytest.fixture
def disk(tmp_path: Path) -> Generator[Path]:
    with mount_small_disk(tmp_path / "disk", "8m") as path:
        yield path


@pytest.fixture
def model() -> Generator[ScriptedModelServer]:
    with ScriptedModelServer() as scripted:
        yield scripted


@pytest.fixture
def running(disk: Path, model: ScriptedModelServer) -> Generator[GatewayProcess]:
    with gateway_process.run_gateway(disk, make_settings_without_code(model)) as gateway:
        yield gateway


@contextmanager
def filling_when_asked(disk: Path, model: ScriptedModelServer) -> Generator[None]:
    """The model writes more than fits; the disk is full before it ends."""
    gate, let_go = model.event()
    model.script(stream(chunk({"content": LONG}), gate, chunk(finish="stop"), b"data: [DONE]\n\n"))

    def fill_and_let_go() -> None:
        if becomes_true(lambda: model.requests):
            fill_disk(disk)
            let_go()

    thread = threading.Thread(target=fill_and_let_go)
    thread.start()
    yield
    thread.join()


def create(running: GatewayProcess, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
    body = {"model": "scripted", "input": "?", **more}
    return httpx.post(f"{running.url}/responses", json=body, headers=headers, timeout=60)


def test_a_request_is_refused_before_anything_is_made(
    running: GatewayProcess, model: ScriptedModelServer, disk: Path
) -> None:
    fill_disk(disk)
    model.script(text_answer("never"))
    for streamed in (False, True):
        refused = create(running, stream=streamed)
        assert refused.status_code == 503
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("server_error", "storage_unavailable")
        assert int(refused.headers["retry-after"]) >= 1
        assert model.requests == []
    # What is not to be stored needs no disk.
    assert create(running, store=False).json()["status"] == "completed"
    free_disk(disk)
    model.script(text_answer("again"))
    made = create(running)
    assert made.json()["status"] == "completed"
    assert httpx.get(f"{running.url}/responses/{made.json()['id']}").status_code == 200


def test_a_response_that_cannot_be_stored_is_no_success(
    running: GatewayProcess, model: ScriptedModelServer, disk: Path
) -> None:
    key = {"Idempotency-Key": "one"}
    with filling_when_asked(disk, model):
        refused = create(running, key)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "storage_unavailable"
    assert "could not be stored" in refused.json()["error"]["message"]
    assert "retry-after" in refused.headers
    assert refused.headers["x-should-retry"] == "false"  # code may have run for it
    assert "resp_" not in refused.text
    free_disk(disk)
    model.script(text_answer("again"))
    again = create(running, key)
    assert again.status_code == 409
    assert again.json()["error"]["code"] == "idempotency_response_gone"
    assert create(running).json()["status"] == "completed"


def test_a_stream_that_cannot_be_stored_ends_as_failed(
    running: GatewayProcess, model: ScriptedModelServer, disk: Path
) -> None:
    gate, let_go = model.event()
    model.script(stream(chunk({"content": LONG}), gate, chunk(finish="stop"), b"data: [DONE]\n\n"))
    seen: list[Any] = []
    with (
        make_client(running) as client,
        client.responses.create(model="scripted", input="?", stream=True) as events,
    ):
        for event in events:
            seen.append(event)
            if event.type == "response.output_text.delta":
                assert client.responses.retrieve(seen[0].response.id).status == "in_progress"
                fill_disk(disk)
                let_go()
                break
        with pytest.raises(openai.APIError, match="could not be stored") as caught:  # by an `error` event
            seen.extend(events)
        assert caught.value.code == "storage_unavailable"
        assert "response.completed" not in {event.type for event in seen}
        free_disk(disk)
        # Its beginning is on the disk; its lease will run out.
        assert client.responses.retrieve(seen[0].response.id).status in ("in_progress", "failed")
        model.script(text_answer("again"))
        assert create(running).json()["status"] == "completed"


def test_the_events_of_a_stream_that_cannot_be_stored(
    running: GatewayProcess, model: ScriptedModelServer, disk: Path
) -> None:
    with filling_when_asked(disk, model):
        lines = create(running, stream=True).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    error, failed = events[-2:]
    assert (error["type"], error["error"]["code"]) == ("error", "storage_unavailable")
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    # The codes that OpenAI's SDK knows here are few, and none of them says it.
    assert failed["response"]["error"]["code"] == "server_error"
    assert "could not be stored" in failed["response"]["error"]["message"]
