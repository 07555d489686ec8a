"""The hosted tool `shell`: commands in containers, for any model. See docs/shell.md.

A shell with a local environment is a client tool and is left to the client.
"""

from collections.abc import Sequence

import msgspec

from fumehood.interfaces import (
    Caller,
    Clock,
    CompactedToolState,
    ConfiguredTool,
    ContainerService,
    FileService,
    ToolCallContext,
)
from fumehood.protocol.conversation import ConversationEntry, ConversationSegment, ToolExchange
from fumehood.protocol.openai.api_errors import InvalidRequest
from fumehood.protocol.openai.shell_command_stream import SHELL_PARAMETERS
from fumehood.protocol.openai.tool_specs import ModelToolDefinition, ToolSpec
from fumehood.tools.call_output_collector import NO_OUTPUT
from fumehood.tools.container_binding import ConfiguredContainerTool, bind_container, find_call_container
from fumehood.tools.container_config import echo_shell, read_shell_environment
from fumehood.tools.shell_call import TOOL_NAME, ShellCallSession, ShellToolSettings

_CALL_TYPE = "shell_call"
_OUTPUT_TYPE = "shell_call_output"


class _Action(msgspec.Struct, omit_defaults=True):
    commands: list[str] = []
    timeout_ms: int | None = None
    max_output_length: int | None = None


class _Outcome(msgspec.Struct):
    type: str = "exit"
    exit_code: int | None = None


class _ReplayedOutput(msgspec.Struct):
    stdout: str | None = None
    stderr: str | None = None
    outcome: _Outcome | None = None


class _ReplayedItem(msgspec.Struct):
    """A call or result that a client sends back, possibly with fields missing."""

    call_id: str
    action: _Action | None = None
    output: list[_ReplayedOutput] | None = None


_replayed_decoder = msgspec.json.Decoder(_ReplayedItem)


class ShellTool:
    """A `HostedTool`. A disabled one still leaves local shells to the client."""

    types = frozenset({TOOL_NAME})
    item_types = frozenset({_CALL_TYPE, _OUTPUT_TYPE})
    finds_files = True

    def __init__(
        self,
        containers: ContainerService,
        clock: Clock,
        settings: ShellToolSettings | None = None,
        uploads: FileService | None = None,
        *,
        enabled: bool = True,
    ) -> None:
        self._containers = containers
        self._clock = clock
        self._settings = settings or ShellToolSettings()
        self._uploads = uploads
        self._enabled = enabled

    async def configure(
        self,
        spec: ToolSpec,
        caller: Caller,
        past: Sequence[ConversationSegment],
        other_tools: Sequence[ConfiguredTool] = (),
    ) -> "ConfiguredShell | None":
        choice = read_shell_environment(spec)
        if choice is None:
            return None
        if not self._enabled:
            raise InvalidRequest(f"{TOOL_NAME} is not enabled on this server.", param="tools")
        binding = await bind_container(self._containers, self._uploads, caller, choice, past, other_tools)
        return ConfiguredShell(binding, self._settings, self._clock)

    def echo_spec(self, spec: ToolSpec) -> bytes:
        return echo_shell(spec)

    def rebuild_exchange(self, entry: ConversationEntry) -> ToolExchange | None:
        """Rebuild a call in a container, or any result; the backend drops a result without its call."""
        try:
            item = _replayed_decoder.decode(entry.raw)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return None
        if entry.type == _OUTPUT_TYPE:
            output = _format_outputs(item.output or ())
            return ToolExchange(
                call_id=item.call_id, name=TOOL_NAME, arguments="", output=output, half="result"
            )
        if find_call_container(entry) is None:
            return None
        arguments = msgspec.json.encode(item.action or _Action()).decode()
        return ToolExchange(call_id=item.call_id, name=TOOL_NAME, arguments=arguments, output="", half="call")

    async def snapshot_state(
        self,
        caller: Caller,
        past: Sequence[ConversationSegment],
        kept_items: Sequence[ConversationEntry] = (),
    ) -> CompactedToolState | None:
        """None: the code interpreter's snapshot covers the containers of both tools."""
        del caller, past, kept_items
        return None


class ConfiguredShell(ConfiguredContainerTool[ShellToolSettings]):
    """A `ConfiguredTool`."""

    @property
    def function(self) -> ModelToolDefinition:
        return ModelToolDefinition(name=TOOL_NAME, description=self._describe(), parameters=SHELL_PARAMETERS)

    def start_call(self, context: ToolCallContext) -> ShellCallSession:
        return ShellCallSession(self.binding, self._settings, self._clock, context)

    def _describe(self) -> str:
        state = (
            "Files, and what runs in the background, are kept from call to call."
            if self._settings.keeps_processes
            else "Files are kept from call to call; nothing goes on running in the background."
        )
        directory, network = self.binding.describe()
        return (
            "Runs commands in a shell in an isolated Linux container and returns what they write to stdout and stderr, "
            "their exit codes if these are not 0, and the names of the files they wrote.\n"
            "- Commands run one after another, whether or not those before them failed; each in a shell of its own, so "
            "that `cd` and variables do not outlast it: join what belongs together with &&.\n"
            f"- {state} They are shared with the code interpreter, if you have one.\n"
            f"- {directory}\n"
            "- `python` is there; `pip install` installs packages. There is no keyboard: nothing can ask you back.\n"
            f"- {network}\n"
            f"- A command may run for {self._settings.execution_timeout:g} seconds."
        )


def _format_outputs(outputs: Sequence[_ReplayedOutput]) -> str:
    lines: list[str] = []
    for output in outputs:
        lines += [(output.stdout or "").rstrip("\n"), (output.stderr or "").rstrip("\n")]
        outcome = output.outcome or _Outcome()
        if outcome.type == "timeout":
            lines.append("It ran too long and was stopped.")
        elif outcome.exit_code:
            lines.append(f"Exit code: {outcome.exit_code}")
    return "\n".join(line for line in lines if line) or NO_OUTPUT
