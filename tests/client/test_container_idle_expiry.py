"""Containers that our gateway expires because they are idle."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fumehood.client import (
    ContainerExpiredError,
    HostMount,
    Session,
    Tool,
    ToolContext,
    ToolResult,
)
from fumehood.client.adapters.openai import (
    ContainerConfig,
    ExistingContainerRef,
    OpenAICodeInterpreterTool,
    OpenAIContainerWorkspaceSection,
)
from fumehood.client.prompt import AnyTool, NoParams
from tests.client.conftest import GatewayServer, connect_gateway
from tests.e2e.conftest import make_settings
from tests.support import gateway_process, shifted_clock_gateway
from tests.support.client_prompts import HOSTED, listen, prompt
from tests.support.evaluation_modes import EventLoopThread
from tests.support.gateway_process import ScriptedModelServer, code_call, text_answer, tool_call, tool_calls

LOOKS = "import os; print(*sorted(os.path.join(a, f) for a, _, fs in os.walk('.') for f in fs))"


@dataclass
class LateGateway:
    """A gateway whose clock can be moved forward."""

    gateway_server: GatewayServer
    clock: Path
    passed: float = 0

    def pass_time(self, minutes: float) -> None:
        self.passed += 60 * minutes
        self.clock.write_text(str(self.passed))


@pytest.fixture(scope="module")
def late_gateway(
    tmp_path_factory: pytest.TempPathFactory, event_loop_thread: EventLoopThread
) -> Iterator[LateGateway]:
    directory = tmp_path_factory.mktemp("late_gateway")
    clock = directory / "clock"
    clock.write_text("0")
    program = (str(Path(shifted_clock_gateway.__file__)),)
    with (
        ScriptedModelServer() as model,
        gateway_process.run_gateway(
            directory, make_settings(model), {"LATE_BY": str(clock)}, program
        ) as running,
        connect_gateway(running, model, event_loop_thread) as server,
    ):
        yield LateGateway(server, clock)


@pytest.fixture
def workspace(late_gateway: LateGateway, tmp_path: Path) -> Iterator[OpenAIContainerWorkspaceSection]:
    (tmp_path / "data.csv").write_text("1,2")
    made = OpenAIContainerWorkspaceSection(
        session=Session(),
        mounts=(HostMount(str(tmp_path / "data.csv"), "in/data.csv"),),
        allowed_host_roots=(tmp_path,),
        container_config=ContainerConfig("1g"),
        client=late_gateway.gateway_server.client,
        sync_on_cleanup=True,
        sync_dir=tmp_path / "back",
    )
    yield made
    made.cleanup()


def evaluate(
    late_gateway: LateGateway, workspace: OpenAIContainerWorkspaceSection, *tools: AnyTool
) -> list[str]:
    """What its code has printed."""
    session, events = listen()
    adapter = late_gateway.gateway_server.adapter(hosted_tools=HOSTED)
    adapter.evaluate(prompt(*tools, sections=(workspace,)), session=session)
    return [event.result.message.strip() for event in events if event.name == "code_interpreter"]


def test_a_workspace_outlives_its_idle_container(
    late_gateway: LateGateway, workspace: OpenAIContainerWorkspaceSection, tmp_path: Path
) -> None:
    model, client = late_gateway.gateway_server.model, late_gateway.gateway_server.client
    workspace.filesystem.write_text("notes.txt", "mine")
    model.script(code_call(f"open('made.txt', 'w').write('x'); {LOOKS}"), text_answer("Done."))
    assert evaluate(late_gateway, workspace) == ["./in/data.csv ./made.txt ./notes.txt"]
    first = workspace.container_id or ""
    late_gateway.pass_time(19)
    assert workspace.filesystem.is_file("made.txt")  # looking at it is using it
    late_gateway.pass_time(19)
    assert workspace.filesystem.is_alive()
    late_gateway.pass_time(21)
    assert client.containers.retrieve(first).status == "expired"
    model.script(code_call(LOOKS), text_answer("Done."))
    assert evaluate(late_gateway, workspace) == ["./in/data.csv ./notes.txt"]  # what code has made is lost
    assert workspace.container_id not in (None, first)
    late_gateway.pass_time(21)
    assert workspace.filesystem.read_text("notes.txt") == "mine"
    late_gateway.pass_time(21)
    workspace.cleanup()
    assert (tmp_path / "back/in/data.csv").read_text() == "1,2"
    assert (tmp_path / "back/notes.txt").read_text() == "mine"


def test_an_idle_container_is_replaced_in_the_middle_of_an_evaluation(
    late_gateway: LateGateway, workspace: OpenAIContainerWorkspaceSection
) -> None:
    def think(params: NoParams, *, context: ToolContext) -> ToolResult[NoParams]:
        _ = context
        late_gateway.pass_time(21)
        return ToolResult.ok(params)

    tool = Tool[NoParams, NoParams](name="think", description="Think for long.", handler=think)
    late_gateway.gateway_server.model.script(
        code_call("print(open('in/data.csv').read())"),
        tool_calls(tool_call("think", {}, call_id="call_2")),
        tool_calls(
            tool_call("code_interpreter", {"code": "print(open('in/data.csv').read())"}, call_id="call_3")
        ),
        text_answer("Done."),
    )
    assert evaluate(late_gateway, workspace, tool) == ["1,2", "1,2"]


def test_an_expired_container_that_is_only_named_is_not_replaced(late_gateway: LateGateway) -> None:
    container = late_gateway.gateway_server.client.containers.create(name="mine", memory_limit="1g").id
    late_gateway.pass_time(21)
    python = OpenAICodeInterpreterTool(container=ExistingContainerRef(container))
    late_gateway.gateway_server.model.script()
    with pytest.raises(ContainerExpiredError, match=container):
        late_gateway.gateway_server.adapter().evaluate(prompt(python))
    assert not late_gateway.gateway_server.model.requests
