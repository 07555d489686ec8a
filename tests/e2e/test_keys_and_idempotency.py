"""Keys and requests that are sent twice, with the OpenAI SDK before real processes."""

import concurrent.futures
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from typer.testing import CliRunner

from fumehood.cli import app
from tests.support import gateway_process
from tests.support.gateway_process import GatewayProcess, ScriptedModelServer, text_answer
from tests.support.raw_model_server import chunk, stream
from tests.support.waiting import becomes_true

KEY = {"Idempotency-Key": "one request"}
STREAM_KEY = {"Idempotency-Key": "another"}
LOST_KEY = {"Idempotency-Key": "cut off"}


def make_settings(model: ScriptedModelServer) -> dict[str, Any]:
    return {
        "models": [{"match": "*", "base_url": model.url, "retries": 0}],
        "providers": {"code_interpreter": {"enabled": False}},
    }


def create_key(directory: Path, settings: dict[str, Any], *options: str) -> str:
    storage = {"url": f"sqlite:///{directory}/gateway.db"}
    (directory / "keys.json").write_text(json.dumps({**settings, "storage": storage}))
    done = CliRunner().invoke(app, ["keys", "create", "--config", str(directory / "keys.json"), *options])
    assert done.exit_code == 0
    return done.stdout.strip()


def make_client(running: GatewayProcess, key: str) -> OpenAI:
    return OpenAI(base_url=running.url, api_key=key, max_retries=2, timeout=60)


def test_keys_limits_and_repeated_requests_across_a_kill(tmp_path: Path) -> None:
    """One story, since processes take long to start. Other machines could reach this gateway, and have no keys."""
    with ScriptedModelServer() as model, concurrent.futures.ThreadPoolExecutor(1) as pool:
        settings = {**make_settings(model), "server": {"host": "0.0.0.0"}}
        key, few = (
            create_key(tmp_path, settings),
            create_key(tmp_path, settings, "--requests-per-minute", "1"),
        )
        running = gateway_process.start_gateway(tmp_path, settings)
        gate, let_go = model.event()
        model.script(
            text_answer("1"), text_answer("2"), text_answer("3"), stream(chunk({"content": "x"}), gate)
        )
        first = _first(running, key)
        _strangers(running, few, first.id)
        events = _streamed(running, key)
        with make_client(running, key).with_options(max_retries=0) as client:
            lost = pool.submit(client.responses.create, model="m", input="?", extra_headers=LOST_KEY)
            assert becomes_true(lambda: len(model.requests) == 4, 60)
            running.kill()
            with pytest.raises(openai.APIConnectionError):
                lost.result()
        let_go()
        with gateway_process.run_gateway(tmp_path, settings) as running:
            assert _first(running, key) == first
            assert _streamed(running, key)[-1].response == events[-1].response
            with make_client(running, key) as client:
                with pytest.raises(openai.ConflictError) as reused:
                    client.responses.create(model="m", input="other", extra_headers=KEY)
                with pytest.raises(openai.ConflictError) as gone:
                    client.responses.create(model="m", input="?", extra_headers=LOST_KEY)
        assert reused.value.code == "idempotency_key_reused"
        assert gone.value.code == "idempotency_response_gone"
        assert len(model.requests) == 4
    refusals = [line for line in running.output if '"status":409' in line]
    assert len(refusals) == 2  # the SDK does not repeat them


def _first(running: GatewayProcess, key: str) -> Any:
    with make_client(running, key) as client:
        return client.responses.create(model="m", input="?", extra_headers=KEY)


def _streamed(running: GatewayProcess, key: str) -> list[Any]:
    with make_client(running, key) as client:
        events = [*client.responses.create(model="m", input="?", stream=True, extra_headers=STREAM_KEY)]
    assert events[-1].type == "response.completed"
    return events


def _strangers(running: GatewayProcess, few: str, response_id: str) -> None:
    """Somebody without a key, and another tenant, who may ask once."""
    with make_client(running, "fh-wrong") as stranger, pytest.raises(openai.AuthenticationError) as no:
        stranger.responses.retrieve(response_id)
    assert no.value.code == "invalid_api_key"
    with make_client(running, few).with_options(max_retries=0) as client:
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response_id)
        assert client.responses.create(model="m", input="?").output_text == "2"
        with pytest.raises(openai.RateLimitError) as limited:
            client.responses.create(model="m", input="?")
    assert limited.value.code == "rate_limit_exceeded"
    assert limited.value.response.headers["x-ratelimit-remaining-requests"] == "0"
