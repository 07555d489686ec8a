"""One gateway with real sandboxes before a scripted model, for all tests that do not kill it."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from openai import OpenAI

from tests.support import gateway_process
from tests.support.gateway_process import GatewayProcess, ScriptedModelServer
from tests.support.sandbox_runs import has_cgroups


@dataclass(frozen=True)
class House:
    """strict: a client that refuses whatever its own types do not know; client: one as most people have.

    The model is `scripted`; `far` and `far-direct` are models of another gateway, which asks the same scripted one.
    """

    served: GatewayProcess
    model: ScriptedModelServer
    strict: OpenAI
    client: OpenAI


@pytest.fixture(scope="session")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    directory, elsewhere = tmp_path_factory.mktemp("gateway"), tmp_path_factory.mktemp("far")
    with (
        ScriptedModelServer() as model,
        gateway_process.run_gateway(elsewhere, settings_without_code(model)) as far,
        gateway_process.run_gateway(directory, settings_before(far, model), loaded=True) as running,
        client_of(running, strict=True) as strict,
        client_of(running) as client,
    ):
        yield House(running, model, strict, client)


def client_of(running: GatewayProcess, *, strict: bool = False) -> OpenAI:
    return OpenAI(
        base_url=running.url,
        api_key="none",
        max_retries=0,
        timeout=60,
        _strict_response_validation=strict,
    )


def settings_for(model: ScriptedModelServer, **interpreter: object) -> dict[str, object]:
    limits = "enforced" if has_cgroups() else "best-effort"
    return {
        "models": models_of(model),
        "providers": {"code_interpreter": {"settings": {"sandbox_limits": limits, **interpreter}}},
    }


def models_of(model: ScriptedModelServer) -> list[dict[str, str]]:
    return [{"match": "scripted*", "base_url": model.url}, {"match": "direct", "backend": "direct"}]


def settings_before(far: GatewayProcess, model: ScriptedModelServer) -> dict[str, object]:
    """With the models of another gateway too."""
    behind = {"backend": "responses", "base_url": far.url}
    further = [
        {"match": "far", "name": "scripted", **behind},
        {"match": "far-direct", "name": "direct", **behind},
    ]
    return {**settings_for(model), "models": [*models_of(model), *further]}


def settings_without_code(model: ScriptedModelServer) -> dict[str, object]:
    """For what needs no sandboxes: the gateway starts much faster."""
    return {**settings_for(model), "providers": {"code_interpreter": {"enabled": False}}}
