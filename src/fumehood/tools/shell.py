"""The hosted tool `shell`: commands in containers, for any model; imports `interfaces`, `protocol` and siblings.

A shell whose environment is the client's own machine is not served here: it stays the client's to run. docs/shell.md
tells what the model is offered and what clients see.
"""

from collections.abc import Sequence

import msgspec
from msgspec import Raw

from fumehood.interfaces import CallContext, Caller, Clock, Containers, Files, Memory, OfferedTool
from fumehood.protocol.conversation import Entry, Segment, ToolExchange
from fumehood.protocol.errors import InvalidRequest
from fumehood.protocol.tools import FunctionSpec, ToolSpec
from fumehood.tools.container_config import echoed_shell, read_environment
from fumehood.tools.running import NOTHING
from fumehood.tools.shell_session import MOST_COMMANDS, NAME, ShellSession, ShellSettings
from fumehood.tools.workplace import OfferedInContainer, container_of, find_workplace

_CALL = "shell_call"
_OUTPUT = "shell_call_output"
_PARAMETERS = Raw(
    msgspec.json.encode(
        {
            "type": "object",
            "properties": {
                "commands": {
                    "type": "array",
                    "items": {"type": "string"},
                    "minItems": 1,
                    "maxItems": MOST_COMMANDS,
                    "description": 'The commands to run, one after another, e.g. ["ls -l", "wc -l *.csv | tail -1"].',
                },
                "timeout_ms": {
                    "type": "integer",
                    "minimum": 1,
                    "description": "Milliseconds that each command may take, if fewer than usual.",
                },
                "max_output_length": {
                    "type": "integer",
                    "minimum": 1,
                    "description": "Characters to return of each command, if fewer than usual.",
                },
            },
            "required": ["commands"],
            "additionalProperties": False,
        }
    )
)


class _Action(msgspec.Struct, omit_defaults=True):
    commands: list[str] = []
    timeout_ms: int | None = None
    max_output_length: int | None = None


class _Outcome(msgspec.Struct):
    type: str = "exit"
    exit_code: int | None = None


class _Said(msgspec.Struct):
    stdout: str | None = None
    stderr: str | None = None
    outcome: _Outcome | None = None


class _Replayed(msgspec.Struct):
    """An item that a client gives back, a call or its result, with whatever it has left of it."""

    call_id: str
    action: _Action | None = None
    output: list[_Said] | None = None


_replayed = msgspec.json.Decoder(_Replayed)


class Shell:
    """A `HostedTool`. One that is not enabled still knows which shells are none of its business."""

    types = frozenset({NAME})
    item_types = frozenset({_CALL, _OUTPUT})
    finds_files = True

    def __init__(
        self,
        containers: Containers,
        clock: Clock,
        settings: ShellSettings | None = None,
        uploads: Files | None = None,
        *,
        enabled: bool = True,
    ) -> None:
        self._containers = containers
        self._clock = clock
        self._settings = settings or ShellSettings()
        self._uploads = uploads
        self._enabled = enabled

    async def offer(
        self, spec: ToolSpec, caller: Caller, past: Sequence[Segment], beside: Sequence[OfferedTool] = ()
    ) -> "OfferedShell | None":
        choice = read_environment(spec)
        if choice is None:
            return None
        if not self._enabled:
            raise InvalidRequest(f"{NAME} is not enabled on this server.", param="tools")
        place = await find_workplace(self._containers, self._uploads, caller, choice, past, beside)
        return OfferedShell(place, self._settings, self._clock)

    def echo(self, spec: ToolSpec) -> bytes:
        return echoed_shell(spec)

    def recall(self, entry: Entry) -> ToolExchange | None:
        """For a call in a container, and for any result: whoever shows it knows whether its call was shown."""
        try:
            item = _replayed.decode(entry.raw)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return None
        if entry.type == _OUTPUT:
            told = _as_text(item.output or ())
            return ToolExchange(call_id=item.call_id, name=NAME, arguments="", output=told, tells="result")
        if container_of(entry) is None:
            return None
        arguments = msgspec.json.encode(item.action or _Action()).decode()
        return ToolExchange(call_id=item.call_id, name=NAME, arguments=arguments, output="", tells="call")

    async def remember(
        self, caller: Caller, past: Sequence[Segment], kept: Sequence[Entry] = ()
    ) -> Memory | None:
        """Nothing of its own: the code interpreter remembers the containers of both."""
        del caller, past, kept
        return None


class OfferedShell(OfferedInContainer[ShellSettings]):
    """An `OfferedTool`."""

    @property
    def function(self) -> FunctionSpec:
        return FunctionSpec(name=NAME, description=self._describe(), parameters=_PARAMETERS)

    def begin(self, context: CallContext) -> ShellSession:
        return ShellSession(self.place, self._settings, self._clock, context)

    def _describe(self) -> str:
        kept = (
            "Files, and what runs in the background, are kept from call to call."
            if self._settings.keeps_processes
            else "Files are kept from call to call; nothing goes on running in the background."
        )
        directory, network = self.place.describe()
        return (
            "Runs commands in a shell in an isolated Linux container and returns what they write to stdout and stderr, "
            "their exit codes if these are not 0, and the names of the files they wrote.\n"
            "- Commands run one after another, whether or not those before them failed; each in a shell of its own, so "
            "that `cd` and variables do not outlast it: join what belongs together with &&.\n"
            f"- {kept} They are shared with the code interpreter, if you have one.\n"
            f"- {directory}\n"
            "- `python` is there; `pip install` installs packages. There is no keyboard: nothing can ask you back.\n"
            f"- {network}\n"
            f"- A command may run for {self._settings.execution_timeout:g} seconds."
        )


def _as_text(output: Sequence[_Said]) -> str:
    lines: list[str] = []
    for said in output:
        lines += [(said.stdout or "").rstrip("\n"), (said.stderr or "").rstrip("\n")]
        outcome = said.outcome or _Outcome()
        if outcome.type == "timeout":
            lines.append("It ran too long and was stopped.")
        elif outcome.exit_code:
            lines.append(f"Exit code: {outcome.exit_code}")
    return "\n".join(line for line in lines if line) or NOTHING
