"""A gateway with real sandboxes, and a stand-in for OpenAI, for the client's tests."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, override

import pytest
from openai import AsyncOpenAI, OpenAI

from fumehood.client import Deadline, HostMount, Prompt, PromptResponse, Session
from fumehood.client.adapters.openai import OpenAIContainerWorkspaceSection
from tests.e2e.conftest import make_client, make_settings, make_settings_without_code
from tests.support import gateway_process, openai_server
from tests.support.evaluation_modes import MODES, EventLoopThread, ModalAdapter, run_event_loop_thread
from tests.support.gateway_process import GatewayProcess, Responder, ScriptedModelServer
from tests.support.openai_server import OpenAIServer, Script


class _Server(ABC):
    """A server with scripted replies, and the SDK's client of it."""

    client: OpenAI
    async_client: AsyncOpenAI
    loop: EventLoopThread
    mode: str
    model_name: str

    @abstractmethod
    def script(self, *replies: Any) -> None: ...

    def adapter(self, **settings: Any) -> ModalAdapter:
        """An adapter that evaluates in the test's mode."""
        clients = {"client": self.client, "async_client": self.async_client}
        chosen: dict[str, Any] = {"model": self.model_name, **clients, **settings}
        return ModalAdapter(mode=self.mode, loop=self.loop, **chosen)

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
    async_client: AsyncOpenAI
    loop: EventLoopThread
    mode: str = "evaluate"
    model_name = "scripted"

    @override
    def script(self, *replies: Responder) -> None:
        self.model.script(*replies)


@pytest.fixture(scope="session")
def event_loop_thread() -> Iterator[EventLoopThread]:
    with run_event_loop_thread() as loop:
        yield loop


@pytest.fixture(scope="session")
def evaluation_mode() -> str:
    """How prompts are evaluated. A module whose ALL_MODES is True, or a set of tests, does so in all four ways."""
    return "evaluate"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    chosen: Any = getattr(cast("Any", metafunc).module, "ALL_MODES", ())
    is_chosen = chosen is True or metafunc.function.__name__ in chosen
    if is_chosen and "evaluation_mode" in metafunc.fixturenames:
        metafunc.parametrize("evaluation_mode", MODES)


@pytest.fixture(scope="session")
def shared_gateway(
    tmp_path_factory: pytest.TempPathFactory, event_loop_thread: EventLoopThread
) -> Iterator[GatewayServer]:
    with ScriptedModelServer() as model:
        directory = tmp_path_factory.mktemp("gateway")
        yield from _run_gateway(directory, model, make_settings(model), event_loop_thread)


@pytest.fixture
def gateway_server(shared_gateway: GatewayServer, evaluation_mode: str) -> GatewayServer:
    return replace(shared_gateway, mode=evaluation_mode)


@pytest.fixture(scope="session")
def gateway_without_code(
    tmp_path_factory: pytest.TempPathFactory, event_loop_thread: EventLoopThread
) -> Iterator[GatewayServer]:
    """Starts much faster."""
    with ScriptedModelServer() as model:
        directory = tmp_path_factory.mktemp("gateway")
        yield from _run_gateway(directory, model, make_settings_without_code(model), event_loop_thread)


def _run_gateway(
    directory: Path, model: ScriptedModelServer, settings: dict[str, object], loop: EventLoopThread
) -> Iterator[GatewayServer]:
    settings["models"] = [
        {"match": "named", "base_url": model.url},
        {"match": "reasoning", "base_url": model.url, "replay_reasoning": True},
        {"match": "*", "base_url": model.url},
    ]
    with (
        gateway_process.run_gateway(directory, settings) as running,
        connect_gateway(running, model, loop) as server,
    ):
        yield server


@contextmanager
def connect_gateway(
    running: GatewayProcess, model: ScriptedModelServer, loop: EventLoopThread
) -> Generator[GatewayServer]:
    """Yield a gateway with the SDK's clients of it."""
    async_client = AsyncOpenAI(base_url=running.url, api_key="none", max_retries=0, timeout=60)
    with make_client(running) as client:
        yield GatewayServer(running, model, client, async_client, loop)
    loop.run(async_client.close())


@dataclass(frozen=True)
class OpenAIStandIn(_Server):
    """A server that is not ours, as OpenAI's would be, and the SDK in front of it."""

    server: OpenAIServer
    client: OpenAI
    async_client: AsyncOpenAI
    loop: EventLoopThread
    mode: str = "evaluate"
    model_name = "gpt-4.1"

    @override
    def script(self, *replies: Script) -> None:
        self.server.script(*replies)


@pytest.fixture(scope="session")
def shared_stand_in(event_loop_thread: EventLoopThread) -> Iterator[OpenAIStandIn]:
    with openai_server.run_openai_server() as server, openai_server.make_client(server) as client:
        async_client = openai_server.make_async_client(server)
        yield OpenAIStandIn(server, client, async_client, event_loop_thread)
        event_loop_thread.run(async_client.close())


@pytest.fixture
def openai_stand_in(shared_stand_in: OpenAIStandIn, evaluation_mode: str) -> OpenAIStandIn:
    shared_stand_in.server.script()
    shared_stand_in.server.no_more_containers = False
    shared_stand_in.server.broken = None
    return replace(shared_stand_in, mode=evaluation_mode)


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
