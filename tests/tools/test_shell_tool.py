"""The hosted shell on scripted sandboxes."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec
import pytest
from inline_snapshot import snapshot
from msgspec import UNSET, Raw

from fumehood.containers.container_settings import ContainerSettings
from fumehood.interfaces import AdditionalItem, Caller, ConfiguredTool
from fumehood.protocol.conversation import ConversationEntry, ConversationSegment, ToolExchange
from fumehood.protocol.openai.api_errors import InvalidRequest, NotFound
from fumehood.protocol.openai.items import (
    ContainerReference,
    ExecutionDetails,
    ShellCall,
    ShellCallOutput,
    ShellCallOutputContent,
    ShellExit,
    ShellTimeout,
)
from fumehood.protocol.openai.response_projection import INCLUDE_EXECUTION, project_item
from fumehood.protocol.openai.stream_events import ShellCallOutputDelta, StreamEvent
from fumehood.protocol.openai.tool_specs import ToolSpec, parse_tool
from fumehood.protocol.sandbox.sandbox_messages import ExecutionEnd, NetworkAllowlist, Stderr, Stdout
from fumehood.testing import (
    DeleteFile,
    ScriptedExecution,
    ScriptedSandbox,
    ScriptedSandboxProvider,
    WriteFile,
)
from fumehood.testing.conformance_kits.hosted_tool_kit import run_call
from fumehood.tools.call_output_collector import OutputLimits
from fumehood.tools.shell_call import ShellToolSettings
from fumehood.tools.shell_tool import ConfiguredShell, ShellTool
from tests.support.interpreter_harness import (
    SOMEBODY,
    InterpreterHarness,
    make_entry,
    make_readable,
    make_tool_spec,
)

AUTO = {"type": "container_auto"}


def shell_spec(environment: object = AUTO) -> ToolSpec:
    fields = {"type": "shell", **({} if environment is None else {"environment": environment})}
    return parse_tool(Raw(msgspec.json.encode(fields)), "tools[0]")


@dataclass
class ShellCallRecord:
    events: list[StreamEvent]
    call: ShellCall
    further: AdditionalItem
    exchange: ToolExchange
    files: Sequence[str]

    @property
    def container_id(self) -> str:
        assert isinstance(self.call.environment, ContainerReference)
        return self.call.environment.container_id

    @property
    def output(self) -> ShellCallOutput:
        assert isinstance(self.further.item, ShellCallOutput)
        return self.further.item

    @property
    def model_text(self) -> str:
        return self.further.exchange.output


@dataclass
class ShellHarness:
    """A shell and a code interpreter over the same containers, along one conversation."""

    interpreter: InterpreterHarness
    shell: ShellTool
    provider: ScriptedSandboxProvider

    async def configure(
        self,
        environment: object = AUTO,
        segments: Sequence[ConversationSegment] | None = None,
        other_tools: Sequence[ConfiguredTool] = (),
    ) -> ConfiguredShell:
        past = self.interpreter.segments if segments is None else segments
        configured = await self.shell.configure(shell_spec(environment), SOMEBODY, past, other_tools)
        assert configured is not None
        return configured

    async def run(
        self,
        *commands: str,
        environment: object = AUTO,
        seconds: float = 600,
        fragment: int = 7,
        **more: object,
    ) -> ShellCallRecord:
        offered = await self.configure(environment)
        text = msgspec.json.encode({"commands": commands, **more}).decode()
        session = offered.start_call(self.interpreter.make_context(0, seconds, takes_images=True))
        events, result = await run_call(session, text, fragment)
        (further,) = result.additional_items
        self.interpreter.segments.append(
            ConversationSegment((make_entry(result.item), make_entry(further.item)))
        )
        assert isinstance(result.item, ShellCall)
        return ShellCallRecord(
            events, result.item, further, result.exchange, [file.path for file in result.files]
        )


@asynccontextmanager
async def shell_harness(
    *steps: ScriptedExecution,
    settings: ShellToolSettings | None = None,
    containers: ContainerSettings | None = None,
) -> AsyncGenerator[ShellHarness]:
    async with ScriptedSandboxProvider(*steps) as provider:
        interpreter = InterpreterHarness(provider, containers_settings=containers or ContainerSettings())
        yield ShellHarness(
            interpreter, ShellTool(interpreter.containers, interpreter.clock, settings), provider
        )


def ended(code: int, status: str = "error", *, kept: bool = True, reason: str = "") -> ExecutionEnd:
    return ExecutionEnd(status=status, exit_code=code, duration_ms=1, state_kept=kept, reason=reason)  # type: ignore[arg-type]


async def test_the_events_of_a_call() -> None:
    steps = (ScriptedExecution("ls", [Stdout("a\n"), Stderr("b\n")]), ScriptedExecution("false", [ended(1)]))
    async with shell_harness(*steps) as harness:
        ran = await harness.run("ls", "false", fragment=9)
        assert make_readable(ran.events) == snapshot(
            [
                {
                    "type": "response.output_item.added",
                    "output_index": 0,
                    "item": {
                        "type": "shell_call",
                        "id": "sh_1",
                        "call_id": "call_0",
                        "action": {"commands": [], "timeout_ms": None, "max_output_length": None},
                        "environment": {"type": "container_reference", "container_id": "cntr_1"},
                        "status": "in_progress",
                    },
                },
                {
                    "type": "response.shell_call_command.added",
                    "output_index": 0,
                    "command_index": 0,
                    "command": "",
                },
                {
                    "type": "response.shell_call_command.delta",
                    "output_index": 0,
                    "command_index": 0,
                    "delta": "ls",
                },
                {
                    "type": "response.shell_call_command.done",
                    "output_index": 0,
                    "command_index": 0,
                    "command": "ls",
                },
                {
                    "type": "response.shell_call_command.added",
                    "output_index": 0,
                    "command_index": 1,
                    "command": "",
                },
                {
                    "type": "response.shell_call_command.delta",
                    "output_index": 0,
                    "command_index": 1,
                    "delta": "false",
                },
                {
                    "type": "response.shell_call_command.done",
                    "output_index": 0,
                    "command_index": 1,
                    "command": "false",
                },
                {
                    "type": "response.output_item.done",
                    "output_index": 0,
                    "item": {
                        "type": "shell_call",
                        "id": "sh_1",
                        "call_id": "call_0",
                        "action": {
                            "commands": ["ls", "false"],
                            "timeout_ms": None,
                            "max_output_length": None,
                        },
                        "environment": {"type": "container_reference", "container_id": "cntr_1"},
                        "status": "completed",
                    },
                },
                {
                    "type": "response.output_item.added",
                    "output_index": 1,
                    "item": {
                        "type": "shell_call_output",
                        "id": "sho_1",
                        "call_id": "call_0",
                        "output": [],
                        "max_output_length": None,
                        "status": "in_progress",
                    },
                },
                {
                    "type": "response.shell_call_output_content.delta",
                    "item_id": "sho_1",
                    "output_index": 1,
                    "command_index": 0,
                    "delta": {"stdout": "a\n"},
                },
                {
                    "type": "response.shell_call_output_content.delta",
                    "item_id": "sho_1",
                    "output_index": 1,
                    "command_index": 0,
                    "delta": {"stderr": "b\n"},
                },
                {
                    "type": "response.shell_call_output_content.done",
                    "item_id": "sho_1",
                    "output_index": 1,
                    "command_index": 0,
                    "output": [
                        {"stdout": "a\n", "stderr": "b\n", "outcome": {"type": "exit", "exit_code": 0}}
                    ],
                },
                {
                    "type": "response.shell_call_output_content.done",
                    "item_id": "sho_1",
                    "output_index": 1,
                    "command_index": 1,
                    "output": [{"stdout": "", "stderr": "", "outcome": {"type": "exit", "exit_code": 1}}],
                },
                {
                    "type": "response.output_item.done",
                    "output_index": 1,
                    "item": {
                        "type": "shell_call_output",
                        "id": "sho_1",
                        "call_id": "call_0",
                        "output": [
                            {"stdout": "a\n", "stderr": "b\n", "outcome": {"type": "exit", "exit_code": 0}},
                            {"stdout": "", "stderr": "", "outcome": {"type": "exit", "exit_code": 1}},
                        ],
                        "max_output_length": None,
                        "status": "completed",
                        "fumehood:execution": {
                            "stdout": "a\n",
                            "stderr": "b\n",
                            "exit_code": 1,
                            "duration_ms": 1,
                            "files": [],
                            "files_complete": True,
                            "missing_files": [],
                            "truncated": False,
                        },
                    },
                },
            ]
        )


async def test_what_the_model_reads() -> None:
    steps = (
        ScriptedExecution("ls", [Stdout("a\n"), Stderr("b\n"), WriteFile("new.csv", b"1")]),
        ScriptedExecution("false\ntrue", [ended(3)]),
    )
    async with shell_harness(*steps) as harness:
        ran = await harness.run("ls", "false\ntrue")
        assert ran.model_text == snapshot("""\
$ ls
a
b
$ false …
Exit code: 3
Files: /mnt/data/new.csv\
""")
        assert ran.files == ["/mnt/data/new.csv"]
        assert (ran.exchange.half, ran.exchange.arguments) == ("call", '{"commands":["ls","false\\ntrue"]}')
        assert ran.further.exchange.half == "result"


async def test_one_command_is_told_without_its_name() -> None:
    async with shell_harness(ScriptedExecution("ls", [Stdout("a\n")]), ScriptedExecution("true")) as harness:
        assert (await harness.run("ls")).model_text == "a"
        assert (await harness.run("true")).model_text == "(no output)"


async def test_limits_of_the_model() -> None:
    async with shell_harness(
        ScriptedExecution(None, [Stdout("x" * 500)]), settings=ShellToolSettings(execution_timeout=5)
    ) as harness:
        ran = await harness.run("yes", timeout_ms=1500, max_output_length=100)
        assert harness.provider.requests[0][1].timeout_seconds == 1.5
        assert ran.call.action.timeout_ms == 1500
        assert (ran.output.max_output_length, len(ran.output.output[0].stdout) < 200) == (100, True)
        assert "left out" in ran.model_text


async def test_limits_of_the_operator_cannot_be_raised() -> None:
    settings = ShellToolSettings(
        execution_timeout=5, output=OutputLimits(model_output_characters=100, stored_output_characters=100)
    )
    steps = [ScriptedExecution(None, [Stdout("x" * 90), Stderr("y" * 90)])] * 2
    async with shell_harness(*steps, settings=settings) as harness:
        ran = await harness.run("a", "b", timeout_ms=10**400, max_output_length=10**400)
        assert {request.timeout_seconds for _, request in harness.provider.requests} == {5}
        for said in ran.output.output:
            assert "left out" in said.stdout
            assert "left out" in said.stderr
        deltas = [event for event in ran.events if isinstance(event, ShellCallOutputDelta)]
        assert len(deltas) == 2  # each command's first: what is not kept is not sent


async def test_a_time_out_is_told_and_the_rest_runs() -> None:
    steps = (
        ScriptedExecution("sleep 9", [ended(-1, "timeout", reason="It ran longer.")]),
        ScriptedExecution("ls", [Stdout("a\n")]),
    )
    async with shell_harness(*steps) as harness:
        ran = await harness.run("sleep 9", "ls")
        assert ran.output.output == [
            ShellCallOutputContent(
                stdout="", stderr="It ran longer. Variables and files are kept.", outcome=ShellTimeout()
            ),
            ShellCallOutputContent(stdout="a\n", stderr="", outcome=ShellExit(exit_code=0)),
        ]
        assert ran.output.status == "completed"
        assert ran.model_text == snapshot("""\
$ sleep 9
It ran longer. Variables and files are kept.
Exit code: -1
$ ls
a\
""")


async def test_what_openai_has_no_place_for_is_of_all_commands_together() -> None:
    steps = (
        ScriptedExecution("a", [Stdout("1"), WriteFile("x.csv", b"1"), ended(3)]),
        ScriptedExecution("b", [Stdout("2\n"), ended(-1, "timeout", reason="It ran longer.")]),
        ScriptedExecution("c", [Stdout("3\n"), Stderr("oops\n")]),
    )
    async with shell_harness(*steps) as harness:
        ran = await harness.run("a", "b", "c")
        execution = ran.output.execution
        assert isinstance(execution, ExecutionDetails)
        assert (execution.stdout, execution.stderr) == (
            "1\n2\n3\n",
            "It ran longer. Variables and files are kept.\noops\n",
        )
        assert (execution.exit_code, execution.truncated) == (0, False)
        assert [file.path for file in execution.files] == ["/mnt/data/x.csv"]
        hidden = project_item(ran.output, ())
        assert isinstance(hidden, ShellCallOutput)
        assert (hidden.execution, hidden.output) == (UNSET, ran.output.output)
        assert project_item(ran.output, {INCLUDE_EXECUTION}) is ran.output


async def test_a_lost_sandbox_ends_the_call() -> None:
    async with shell_harness(
        ScriptedExecution("boom", [ended(-1, "lost", kept=False, reason="It was lost.")])
    ) as harness:
        ran = await harness.run("boom", "ls", "pwd")
        assert [output.outcome for output in ran.output.output] == [ShellExit(exit_code=-1)] * 3
        assert "did not run" in ran.output.output[2].stderr
        assert (ran.call.status, ran.output.status) == ("completed", "incomplete")


async def test_the_time_of_the_response_is_the_time_of_all_commands() -> None:
    async with shell_harness() as harness:
        ran = await harness.run("ls", "pwd", seconds=0)
        assert [output.outcome for output in ran.output.output] == [ShellTimeout()] * 2
        assert "was over before the command began" in ran.model_text


async def test_a_container_that_is_not_to_be_had() -> None:
    async with shell_harness(containers=ContainerSettings(containers_per_tenant=0)) as harness:
        ran = await harness.run("ls")
        assert ran.output.status == "incomplete"
        assert ran.model_text.startswith("The command did not run: ")


async def test_a_call_that_is_cut_off_keeps_what_was_said() -> None:
    async with shell_harness(
        ScriptedExecution("ls", [Stdout("a\n")]), ScriptedExecution("sleep", [Stdout("b\n"), asyncio.Event()])
    ) as harness:
        offered = await harness.configure()
        session = offered.start_call(harness.interpreter.make_context())
        session.open()
        session.feed(['{"commands":["ls","sleep","pwd"]}'])
        steps = session.run()
        async for step in steps:
            if isinstance(step, Sequence) and any(
                isinstance(event, ShellCallOutputDelta) and event.delta.stdout == "b\n" for event in step
            ):
                break
        await steps.aclose()
        result = session.abort("the response was cancelled")
        (further,) = result.additional_items
        assert isinstance(further.item, ShellCallOutput)
        assert [output.stdout for output in further.item.output] == ["a\n", "b\n", ""]
        assert further.item.status == "incomplete"
        assert "the response was cancelled" in further.exchange.output


# ---- files -----------------------------------------------------------------------------------------------------


async def test_files_of_all_commands_each_once_and_none_that_is_gone() -> None:
    steps = (
        ScriptedExecution("a", [WriteFile("a", b"1"), WriteFile("tmp", b"1")]),
        ScriptedExecution("b", [WriteFile("a", b"22"), WriteFile("b", b"1"), DeleteFile("tmp")]),
    )
    async with shell_harness(*steps) as harness:
        assert (await harness.run("a", "b")).files == ["/mnt/data/a", "/mnt/data/b"]


async def test_pictures_are_shown_to_models_that_see() -> None:
    picture = b"\x89PNG\r\n\x1a\n" + bytes(16)
    async with shell_harness(ScriptedExecution("plot", [WriteFile("p.png", picture)])) as harness:
        ran = await harness.run("plot")
        assert [url[:22] for url in ran.further.exchange.images] == ["data:image/png;base64,"]


# ---- containers ------------------------------------------------------------------------------------------------


async def test_code_and_commands_share_a_container_along_a_conversation() -> None:
    steps = (
        ScriptedExecution("print(1)"),
        ScriptedExecution("ls"),
        ScriptedExecution("print(2)"),
        ScriptedExecution("pwd"),
    )
    async with shell_harness(*steps) as harness:
        first = await harness.interpreter.run("print(1)")
        second = await harness.run("ls")
        third = await harness.interpreter.run("print(2)")
        fourth = await harness.run("pwd")
        used = {first.item.container_id, third.item.container_id}
        used |= {ran.container_id for ran in (second, fourth)}
        assert len(used) == 1
        assert len({name for name, _ in harness.provider.requests}) == 1
        assert [request.language for _, request in harness.provider.requests] == ["python", "shell"] * 2


async def test_a_sandbox_for_every_command_where_calls_are_kept_apart() -> None:
    async def look(sandbox: ScriptedSandbox) -> Stdout:
        return Stdout(" ".join(file.path for file in sandbox.files.list_files().files))

    steps = (ScriptedExecution("touch a", [WriteFile("a", b"1")]), ScriptedExecution("ls", [look]))
    containers = ContainerSettings(isolation="execution")
    async with shell_harness(*steps, containers=containers) as harness:
        ran = await harness.run("touch a", "ls")
        assert ran.output.output[1].stdout == "a"
        assert ran.files == ["/mnt/data/a"]
        assert len({name for name, _ in harness.provider.requests}) == 2
        assert await harness.provider.list_sandboxes() == []


@pytest.mark.parametrize("shell_first", [True, False])
async def test_tools_of_one_request_share_a_container_that_is_new(shell_first: bool) -> None:
    async with shell_harness() as harness:
        tools = [
            (harness.shell, shell_spec()),
            (harness.interpreter.tool, make_tool_spec({"type": "auto", "memory_limit": "4g"})),
        ]
        (one, one_spec), (other, other_spec) = tools if shell_first else tools[::-1]
        first = await one.configure(one_spec, SOMEBODY, [])
        assert first is not None
        second = await other.configure(other_spec, SOMEBODY, [], [first])
        assert second is not None
        assert first.binding is second.binding
        assert first.binding.spec.memory == "4g"


async def test_a_named_container_is_shared_too() -> None:
    async with shell_harness(ScriptedExecution("print(1)")) as harness:
        named = (await harness.interpreter.run("print(1)")).item.container_id
        first = await harness.interpreter.configure(named, [])
        second = await harness.configure(segments=[], other_tools=[first])
        reference = {"type": "container_reference", "container_id": named}
        third = await harness.configure(reference, segments=[])
        assert second.binding.container_id == third.binding.container_id == named
        with pytest.raises(NotFound) as refused:
            await harness.shell.configure(shell_spec(reference), Caller("stranger"), [])
        assert refused.value.param == "tools"


async def test_what_cannot_be_shared_is_refused() -> None:
    async with shell_harness() as harness:
        first = await harness.interpreter.configure({"type": "auto", "memory_limit": "4g"})
        with pytest.raises(InvalidRequest, match="a different memory"):
            await harness.configure({**AUTO, "memory_limit": "16g"}, other_tools=[first])


# ---- configuration ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("environment", [None, {"type": "local"}, {"type": "local", "skills": []}])
@pytest.mark.parametrize("enabled", [True, False])
async def test_a_local_shell_is_the_clients(environment: object, enabled: bool) -> None:
    async with shell_harness() as harness:
        shell = ShellTool(harness.interpreter.containers, harness.interpreter.clock, enabled=enabled)
        chosen = shell_spec(environment)
        assert await shell.configure(chosen, SOMEBODY, []) is None
        assert msgspec.json.decode(shell.echo_spec(chosen)) == msgspec.json.decode(chosen.raw)


async def test_one_that_is_not_enabled_is_refused() -> None:
    async with shell_harness() as harness:
        shell = ShellTool(harness.interpreter.containers, harness.interpreter.clock, enabled=False)
        with pytest.raises(InvalidRequest, match="shell is not enabled on this server"):
            await shell.configure(shell_spec(), SOMEBODY, [])


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"type": "container_auto", "memory_limit": "8g"}, "environment.memory_limit must be one of"),
        ({"type": "container_auto", "skills": [{"type": "inline"}]}, "environment.skills is not supported"),
        ({"type": "container_auto", "network_policy": {"type": "open"}}, "environment.network_policy"),
        (
            {
                "type": "container_auto",
                "network_policy": {"type": "allowlist", "allowed_domains": ["a.example"]},
            },
            "environment.network_policy",
        ),
        ({"type": "container_reference"}, "environment.container_id is missing"),
        ({"type": "cloud"}, "environment.type must be"),
        ("container_auto", "shell: "),
    ],
)
async def test_environments_that_are_refused(environment: object, message: str) -> None:
    async with shell_harness() as harness:
        with pytest.raises(InvalidRequest) as refused:
            await harness.configure(environment)
        assert refused.value.param == "tools"
        assert message in refused.value.message


async def test_secrets_do_not_come_back() -> None:
    secrets = [{"domain": "a.example", "name": "KEY", "value": "hidden"}]
    policy = {"type": "allowlist", "allowed_domains": ["a.example"], "domain_secrets": secrets}
    async with shell_harness(
        containers=ContainerSettings(allowed_domains=frozenset({"a.example"}))
    ) as harness:
        chosen = shell_spec({**AUTO, "network_policy": policy})
        offered = await harness.configure({**AUTO, "network_policy": policy})
        assert isinstance(offered.binding.spec.network, NetworkAllowlist)
        assert "HTTP and HTTPS to a.example" in offered.function.description
        assert "hidden" not in harness.shell.echo_spec(chosen).decode() + offered.function.description


# ---- replay ----------------------------------------------------------------------------------------------------


def given_back(item: Mapping[str, object]) -> ConversationEntry:
    return ConversationEntry(type=str(item["type"]), id=None, turn=0, raw=msgspec.json.encode(item))


async def test_items_that_come_back() -> None:
    async with shell_harness() as harness:
        environment = {"type": "container_reference", "container_id": "cntr_1"}
        action = {"commands": ["ls"], "timeout_ms": None, "max_output_length": 5}
        called = {"type": "shell_call", "call_id": "c", "action": action, "environment": environment}
        assert harness.shell.rebuild_exchange(given_back(called)) == ToolExchange(
            call_id="c",
            name="shell",
            arguments='{"commands":["ls"],"max_output_length":5}',
            output="",
            half="call",
        )
        assert (
            harness.shell.rebuild_exchange(given_back({**called, "environment": {"type": "local"}})) is None
        )
        assert harness.shell.rebuild_exchange(given_back({**called, "environment": None})) is None
        assert harness.shell.rebuild_exchange(given_back({"type": "shell_call"})) is None
        output = [
            {"stdout": "a\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 2}},
            {"stdout": None, "outcome": {"type": "timeout"}},
        ]
        answered = {"type": "shell_call_output", "call_id": "c", "output": output}
        recalled = harness.shell.rebuild_exchange(given_back(answered))
        assert recalled is not None
        assert recalled.output == "a\nExit code: 2\nIt ran too long and was stopped."
        assert recalled.half == "result"


async def test_the_code_interpreter_remembers_for_both() -> None:
    async with shell_harness(ScriptedExecution("ls", [WriteFile("kept.csv", b"1")])) as harness:
        ran = await harness.run("ls")
        memory = await harness.interpreter.tool.snapshot_state(SOMEBODY, harness.interpreter.segments)
        assert memory is not None
        assert "/mnt/data/kept.csv" in memory.note
        assert await harness.shell.snapshot_state(SOMEBODY, harness.interpreter.segments) is None
        remembered = [given_back(msgspec.json.decode(raw)) for raw in memory.items]
        offered = await harness.configure(segments=[ConversationSegment(tuple(remembered))])
        assert offered.binding.container_id == ran.container_id
