"""A gateway whose model server is down, wrong, or back again."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIStatusError, OpenAI

from tests.support import gateway_process
from tests.support.gateway_process import GatewayProcess
from tests.support.small_model_server import KEY, SmallModelServer, run_small_model_server
from tests.support.waiting import becomes_true

REASON = "The server of the model 'small-*' cannot be reached: Connection refused."


def run_gateway(directory: Path, url: str, log_format: str = "json") -> Any:
    settings = {
        "models": [{"match": "small-*", "base_url": url, "api_key_env": "SMALL_KEY", "retries": 0}],
        "providers": {"code_interpreter": {"enabled": False}},
        "telemetry": {"log_format": log_format},
    }
    return gateway_process.run_gateway(directory, settings, {"SMALL_KEY": KEY})


def read_readiness(running: GatewayProcess) -> dict[str, Any]:
    answer = httpx.get(running.url.replace("/v1", "/readyz"), timeout=30)
    assert answer.status_code == 200
    return answer.json()


def test_a_dead_server_is_told_at_the_start_and_by_readyz_until_it_is_back(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port: int = reserved.getsockname()[1]
    url = f"http://127.0.0.1:{port}/v1"
    with run_gateway(tmp_path, url) as running:
        assert becomes_true(lambda: any("model_server_degraded" in line for line in running.output))
        (logged,) = [json.loads(line) for line in running.output if "model_server_degraded" in line]
        assert (logged["level"], logged["base_url"], logged["reason"]) == ("warning", url, REASON)
        assert read_readiness(running) == {
            "status": "degraded",
            "degraded": [{"models": ["small-*"], "reason": REASON}],
        }
        with run_small_model_server(port):
            assert becomes_true(lambda: read_readiness(running) == {"status": "ready"})
        assert becomes_true(lambda: any("model_server_recovered" in line for line in running.output))
        assert all(KEY not in line for line in running.output)


def test_a_dead_server_is_in_the_banner(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        url = f"http://127.0.0.1:{reserved.getsockname()[1]}/v1"
    with run_gateway(tmp_path, url, log_format="text") as running:
        expected = f"{REASON} `fumehood doctor --upstream URL` says more."
        assert becomes_true(lambda: any(line.strip().endswith(expected) for line in running.output))


@pytest.fixture(scope="module")
def server() -> Iterator[SmallModelServer]:
    with run_small_model_server() as server:
        yield server


def test_a_url_without_v1_is_told_to_operator_and_client(tmp_path: Path, server: SmallModelServer) -> None:
    with run_gateway(tmp_path, server.url.removesuffix("/v1")) as running:
        assert becomes_true(lambda: "degraded" in read_readiness(running))
        (degraded,) = read_readiness(running)["degraded"]
        assert "base_url, which most servers expect to end in /v1" in degraded["reason"]
        client = OpenAI(base_url=running.url, api_key="none", max_retries=0)
        with pytest.raises(APIStatusError, match="expect to end in /v1") as blocking:
            client.responses.create(model="small-chat", input="hi")
        with pytest.raises(APIStatusError, match="expect to end in /v1") as passed:
            client.embeddings.create(model="small-embed", input="hi")
        assert (blocking.value.status_code, passed.value.status_code) == (502, 502)


def test_a_good_server_is_not_mentioned(tmp_path: Path, server: SmallModelServer) -> None:
    with run_gateway(tmp_path, server.url) as running:
        assert read_readiness(running) == {"status": "ready"}
        assert (
            OpenAI(base_url=running.url, api_key="none")
            .responses.create(model="small-chat", input="hi")
            .output_text.startswith("You said")
        )
    assert all("degraded" not in line for line in running.output)
