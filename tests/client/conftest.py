"""One gateway with real sandboxes, and one server that is not ours, for the client's tests."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from openai import OpenAI

from fumehood.client.adapters.openai import OpenAIAdapter
from tests.e2e.conftest import make_client, make_settings, make_settings_without_code
from tests.support import gateway_process, openai_server
from tests.support.gateway_process import GatewayProcess, ScriptedModelServer
from tests.support.openai_server import OpenAIServer


@dataclass(frozen=True)
class GatewayServer:
    """A gateway, the model behind it, and the SDK in front of it."""

    process: GatewayProcess
    model: ScriptedModelServer
    client: OpenAI

    def adapter(self, **settings: object) -> OpenAIAdapter:
        made: dict[str, object] = {"model": "scripted", "client": self.client, **settings}
        return OpenAIAdapter(**made)  # pyright: ignore[reportArgumentType] - tests say what they want


@pytest.fixture(scope="session")
def gateway_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayServer]:
    with ScriptedModelServer() as model:
        yield from _run_gateway(tmp_path_factory.mktemp("gateway"), model, make_settings(model))


@pytest.fixture(scope="session")
def gateway_without_code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayServer]:
    """Starts much faster."""
    with ScriptedModelServer() as model:
        yield from _run_gateway(tmp_path_factory.mktemp("gateway"), model, make_settings_without_code(model))


def _run_gateway(
    directory: Path, model: ScriptedModelServer, settings: dict[str, object]
) -> Iterator[GatewayServer]:
    settings["models"] = [{"match": "*", "base_url": model.url}]
    with gateway_process.run_gateway(directory, settings) as running, make_client(running) as client:
        yield GatewayServer(running, model, client)


@dataclass(frozen=True)
class OpenAIStandIn:
    """A server that is not ours, as OpenAI's would be, and the SDK in front of it."""

    server: OpenAIServer
    client: OpenAI

    def adapter(self, **settings: object) -> OpenAIAdapter:
        made: dict[str, object] = {"model": "gpt-4.1", "client": self.client, **settings}
        return OpenAIAdapter(**made)  # pyright: ignore[reportArgumentType] - tests say what they want


@pytest.fixture(scope="session")
def shared_stand_in() -> Iterator[OpenAIStandIn]:
    with openai_server.run_openai_server() as server, openai_server.make_client(server) as client:
        yield OpenAIStandIn(server, client)


@pytest.fixture
def openai_stand_in(shared_stand_in: OpenAIStandIn) -> OpenAIStandIn:
    shared_stand_in.server.script()
    shared_stand_in.server.no_more_containers = False
    shared_stand_in.server.broken = None
    return shared_stand_in
