"""A gateway's spans as arize-phoenix understands them."""

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import INTERPRETER, make_client, make_settings
from tests.support import gateway_process
from tests.support.gateway_process import ScriptedModelServer, code_call, text_answer

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".phoenix" / "bin" / "python"
START = ROOT / "tests" / "support" / "phoenix_server.py"
PATIENCE = 240.0
ALONE = {
    "PHOENIX_HOST": "127.0.0.1",
    "PHOENIX_TELEMETRY_ENABLED": "false",
    "PHOENIX_ALLOW_EXTERNAL_RESOURCES": "false",
    "PHOENIX_AGENTS_DISABLE_WEB_ACCESS": "true",
    "PHOENIX_AGENTS_DISABLE_BASH": "true",
    "PHOENIX_AGENTS_DISABLE_GITHUB": "true",
    "PHOENIX_DISABLE_AGENT_ASSISTANT": "true",
    "PHOENIX_ENABLE_MCP_SERVER": "false",
}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


def fetch_json(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=PATIENCE) as answered:
        return json.load(answered)


@contextmanager
def phoenix(directory: Path) -> Generator[str]:
    """Its address, once it answers."""
    directory.mkdir()
    port, log = free_port(), directory / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [PYTHON, START, "serve", "--no-internet"],
            stdout=output,
            stderr=output,
            cwd=directory,
            env={
                **os.environ,
                **ALONE,
                "PHOENIX_PORT": str(port),
                "PHOENIX_GRPC_PORT": str(free_port()),
                "PHOENIX_WORKING_DIR": str(directory),
            },
        )
    try:
        until = time.monotonic() + PATIENCE
        while True:
            try:
                fetch_json(f"http://127.0.0.1:{port}/v1/projects")
                break
            except (urllib.error.URLError, ConnectionError):
                assert process.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < until, log.read_text()[-3000:]
                time.sleep(0.2)  # there is nothing to wait for: it tells nobody that it is ready
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def wait_for_spans(address: str, number: int) -> list[Any]:
    """What Phoenix has made of the spans; it takes them in by the batch."""
    until = time.monotonic() + PATIENCE
    while True:
        found: list[Any] = fetch_json(f"{address}/v1/projects/default/spans?limit=100")["data"]
        if len(found) >= number:
            return found
        assert time.monotonic() < until, found
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not PYTHON.exists(), reason="arize-phoenix is not here: `make test-phoenix` installs it")
def test_a_streamed_turn_with_code_is_seen_in_phoenix(tmp_path: Path) -> None:
    (tmp_path / "gateway").mkdir()
    told = {"OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "true"}
    told |= {"OTEL_METRICS_EXPORTER": "none", "OTEL_LOGS_EXPORTER": "none"}
    with phoenix(tmp_path / "phoenix") as address, ScriptedModelServer() as model:
        settings = make_settings(model) | {
            "telemetry": {"otlp": address, "log_format": "json", "profile": "phoenix"}
        }
        with (
            gateway_process.run_gateway(tmp_path / "gateway", settings, told) as running,
            make_client(running) as client,
        ):
            model.script(code_call("print(6 * 7)"), text_answer("It is 42."))
            asked: Any = client.responses.create(
                model="scripted",
                instructions="Use code.",
                input="What is 6 * 7?",
                tools=[INTERPRETER],
                stream=True,
            )
            assert [event.type for event in asked][-1] == "response.completed"
            assert running.stop() == 0
        spans = wait_for_spans(address, 9)
    kinds = {span["name"]: span["span_kind"] for span in spans}
    assert kinds == {
        "POST /v1/responses": "UNKNOWN",
        "invoke_agent": "AGENT",
        "chat scripted": "LLM",
        "execute_tool code_interpreter": "TOOL",
        **dict.fromkeys(("sandbox acquire", "sandbox files", "sandbox run"), "UNKNOWN"),
    }
    _is_a_tree(spans)
    _is_understood(spans)


def _is_a_tree(spans: list[Any]) -> None:
    names = {span["context"]["span_id"]: span["name"] for span in spans}
    parents = sorted((span["name"], names.get(span["parent_id"])) for span in spans)
    assert [each for each in parents if not each[0].startswith("sandbox")] == [
        ("POST /v1/responses", None),
        ("chat scripted", "invoke_agent"),
        ("chat scripted", "invoke_agent"),
        ("execute_tool code_interpreter", "invoke_agent"),
        ("invoke_agent", "POST /v1/responses"),
    ]
    assert {parent for name, parent in parents if name.startswith("sandbox")} == {
        "execute_tool code_interpreter"
    }
    assert len({span["context"]["trace_id"] for span in spans}) == 1


def _is_understood(spans: list[Any]) -> None:
    """What Phoenix shows are attributes of its own, which it has made of ours."""
    seen = {span["name"]: span["attributes"] for span in sorted(spans, key=lambda span: span["start_time"])}
    run, last, call = (
        seen[name] for name in ("invoke_agent", "chat scripted", "execute_tool code_interpreter")
    )
    first = "llm.output_messages.0.message"
    assert run["llm.input_messages.0.message.role"] == "system"
    assert run["llm.input_messages.1.message.content"] == "What is 6 * 7?"
    assert run[f"{first}.tool_calls.0.tool_call.function.name"] == "code_interpreter"
    assert "print(6 * 7)" in run[f"{first}.tool_calls.0.tool_call.function.arguments"]
    assert run["llm.output_messages.1.message.role"] == "tool"
    assert run["llm.output_messages.1.message.tool_call_id"] == run[f"{first}.tool_calls.0.tool_call.id"]
    assert "42\\n" in run["llm.output_messages.1.message.content"]
    assert run["llm.output_messages.2.message.content"] == "It is 42."
    assert run["llm.token_count.total"] == 36
    assert last["llm.output_messages.0.message.content"] == "It is 42."
    assert last["llm.finish_reason"] == "stop"
    assert (call["tool.name"], call["tool.id"], call["output.value"]) == ("code_interpreter", "call_1", "42")
    assert call["tool.parameters.code"] == "print(6 * 7)"
