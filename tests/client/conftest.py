"""A gateway with real sandboxes, and a stand-in for OpenAI, for the client's tests."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, override

import pytest
from openai import OpenAI

from fumehood.client import Deadline, HostMount, Prompt, PromptResponse, Session
from fumehood.client.adapters.openai import OpenAIAdapter, OpenAIContainerWorkspaceSection
from tests.e2e.conftest import make_client, make_settings, make_settings_without_code
from tests.support import gateway_process, openai_server
from tests.support.gateway_process import GatewayProcess, Responder, ScriptedModelServer
from tests.support.openai_server import OpenAIServer, Script


class _Server(ABC):
    """A server with scripted replies, and the SDK's client of it."""

    client: OpenAI
    model_name: str

    @abstractmethod
    def script(self, *replies: Any) -> None: ...

    def adapter(self, **settings: Any) -> OpenAIAdapter:
        chosen: dict[str, Any] = {"model": self.model_name, "client": self.client, **settings}
        return OpenAIAdapter(**chosen)

    def evaluate[Out](
        self,
        prompt: Prompt[Out],
        *replies: Any,
        session: Session | None = None,
        deadline: Deadline | None = None,
        **settings: Any,
    ) -> PromptResponse[Out]:
        """Evaluate a prompt while the server, or the model behind it, replies so. settings: of the adapter."""
        self.script(*replies)
        return self.adapter(**settings).evaluate(prompt, session=session, deadline=deadline)


@dataclass(frozen=True)
class GatewayServer(_Server):
    """A gateway, the model behind it, and the SDK in front of it."""

    process: GatewayProcess
    model: ScriptedModelServer
    client: OpenAI
    model_name = "scripted"

    @override
    def script(self, *replies: Responder) -> None:
        self.model.script(*replies)


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
    settings["models"] = [
        {"match": "named", "base_url": model.url},
        {"match": "reasoning", "base_url": model.url, "replay_reasoning": True},
        {"match": "*", "base_url": model.url},
    ]
    with gateway_process.run_gateway(directory, settings) as running, make_client(running) as client:
        yield GatewayServer(running, model, client)


@dataclass(frozen=True)
class OpenAIStandIn(_Server):
    """A server that is not ours, as OpenAI's would be, and the SDK in front of it."""

    server: OpenAIServer
    client: OpenAI
    model_name = "gpt-4.1"

    @override
    def script(self, *replies: Script) -> None:
        self.server.script(*replies)


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


@pytest.fixture
def openai_environment(openai_stand_in: OpenAIStandIn, monkeypatch: pytest.MonkeyPatch) -> OpenAIStandIn:
    """The stand-in, to which `OpenAI()` connects."""
    monkeypatch.setenv("OPENAI_BASE_URL", openai_stand_in.server.url)
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    return openai_stand_in


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    for name, content in {"README.md": "# Hi", "src/main.py": "print(1)", "tool.exe": "MZ"}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


type CreateWorkspace = Callable[..., OpenAIContainerWorkspaceSection]


@pytest.fixture
def create_workspace(project: Path) -> Iterator[CreateWorkspace]:
    """Creates workspaces with the project mounted, and cleans them up."""
    created: list[OpenAIContainerWorkspaceSection] = []

    def create(**settings: Any) -> OpenAIContainerWorkspaceSection:
        mounts = (HostMount(str(project), "project"),)
        chosen: dict[str, Any] = {
            "session": Session(),
            "mounts": mounts,
            "allowed_host_roots": (project,),
            **settings,
        }
        created.append(OpenAIContainerWorkspaceSection(**chosen))
        return created[-1]

    yield create
    for workspace in created:
        workspace.sync_on_cleanup = False
        workspace.cleanup()
