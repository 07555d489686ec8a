"""One gateway with real sandboxes before a scripted model, for all tests that do not kill it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from openai import OpenAI

from tests.support import gateway_process
from tests.support.gateway_process import GatewayProcess, ScriptedModelServer
from tests.support.sandbox_runs import has_cgroups

INTERPRETER: Any = {"type": "code_interpreter", "container": {"type": "auto"}}
OUTPUTS: Any = ["code_interpreter_call.outputs"]


@dataclass(frozen=True)
class RunningGateway:
    """strict: a client that refuses whatever its own types do not know; client: one as most people have.

    The model is `scripted`, or `scripted-reasoning` as one whose server takes reasoning back. `far` is another gateway,
    which has no code interpreter and asks the same scripted model; its models are `far` and `far-direct` here, and
    `far-native`, which gets the client's tools as they are.
    """

    process: GatewayProcess
    model: ScriptedModelServer
    strict: OpenAI
    client: OpenAI
    far: GatewayProcess


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    directory, elsewhere = tmp_path_factory.mktemp("gateway"), tmp_path_factory.mktemp("far")
    with (
        ScriptedModelServer() as model,
        gateway_process.run_gateway(elsewhere, make_settings_without_code(model)) as far,
        gateway_process.run_gateway(directory, make_chained_settings(far, model), loaded=True) as running,
        make_client(running, strict=True) as strict,
        make_client(running) as client,
    ):
        yield RunningGateway(running, model, strict, client, far)


def make_client(running: GatewayProcess, *, strict: bool = False) -> OpenAI:
    return OpenAI(
        base_url=running.url,
        api_key="none",
        max_retries=0,
        timeout=60,
        _strict_response_validation=strict,
    )


def make_settings(model: ScriptedModelServer, **interpreter: object) -> dict[str, object]:
    limits = "enforced" if has_cgroups() else "best-effort"
    return {
        "models": make_model_routes(model),
        "providers": {"code_interpreter": {"settings": {"sandbox_limits": limits, **interpreter}}},
    }


def make_model_routes(model: ScriptedModelServer) -> list[dict[str, object]]:
    return [
        {"match": "scripted-reasoning", "base_url": model.url, "replay_reasoning": True},
        {"match": "scripted*", "base_url": model.url},
        {"match": "direct", "backend": "direct"},
    ]


def make_chained_settings(far: GatewayProcess, model: ScriptedModelServer) -> dict[str, object]:
    """With the models of another gateway too."""
    behind = {"backend": "responses", "base_url": far.url}
    further: list[dict[str, object]] = [
        {"match": "far", "name": "scripted", **behind},
        {"match": "far-direct", "name": "direct", **behind},
        {"match": "far-native", "name": "scripted", "pass_tools": ["*"], **behind},
    ]
    return {**make_settings(model), "models": [*make_model_routes(model), *further]}


def make_settings_without_code(model: ScriptedModelServer) -> dict[str, object]:
    """For what needs no sandboxes: the gateway starts much faster."""
    return {**make_settings(model), "providers": {"code_interpreter": {"enabled": False}}}


def find_call(response: Any) -> Any:
    """The one call of the code interpreter in a response."""
    (call,) = [item for item in response.output if item.type == "code_interpreter_call"]
    return call


def read_logs(response: Any) -> str:
    """What that call printed."""
    return "".join(output.logs for output in find_call(response).outputs if output.type == "logs")
