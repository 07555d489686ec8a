"""The commands of a shell call, wherever they run: the arguments, and the events while a model writes them."""

from collections.abc import Sequence

import msgspec
from msgspec import Raw

from fumehood.protocol.openai.stream_events import (
    ShellCallCommandAdded,
    ShellCallCommandDelta,
    ShellCallCommandDone,
    StreamEvent,
)
from fumehood.protocol.streaming_json import StringArrayPiece, StringArrayScanner

MAX_SHELL_COMMANDS = 64
"""Commands of one call."""

SHELL_PARAMETERS = Raw(
    msgspec.json.encode(
        {
            "type": "object",
            "properties": {
                "commands": {
                    "type": "array",
                    "items": {"type": "string"},
                    "minItems": 1,
                    "maxItems": MAX_SHELL_COMMANDS,
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
"""The JSON schema of the arguments of a call."""


class ShellCommandStream:
    """The commands of one call, as they arrive in fragments of the arguments."""

    def __init__(self) -> None:
        self._scanner = StringArrayScanner("commands")
        self._announced = 0  # commands with an added event

    @property
    def arguments(self) -> str:
        """All fragments so far."""
        return self._scanner.text

    @property
    def commands(self) -> list[str]:
        """The commands so far; the last one may be incomplete."""
        return self._scanner.values

    @property
    def announced_commands(self) -> list[str]:
        """The commands with events; the last one may be incomplete."""
        return self.commands[: self._announced]

    @property
    def complete_commands(self) -> list[str]:
        """The commands that have ended."""
        return [text for number, text in enumerate(self.commands) if self._scanner.is_string_complete(number)]

    def feed(self, fragments: Sequence[str]) -> list[StringArrayPiece]:
        """What fragments add to the commands."""
        return [piece for fragment in fragments for piece in self._scanner.feed(fragment)]

    def make_events(self, pieces: Sequence[StringArrayPiece], output_index: int) -> list[StreamEvent]:
        """The events of what `feed` has returned."""
        events: list[StreamEvent] = []
        for piece in pieces:
            number = piece.position
            if number == self._announced:
                self._announced += 1
                events.append(ShellCallCommandAdded(output_index=output_index, command_index=number))
            if piece.text:
                events.append(
                    ShellCallCommandDelta(output_index=output_index, command_index=number, delta=piece.text)
                )
            if piece.is_complete:
                command = self._scanner.values[number]
                events.append(
                    ShellCallCommandDone(output_index=output_index, command_index=number, command=command)
                )
        return events


def make_command_events(commands: Sequence[str], output_index: int) -> list[StreamEvent]:
    """The events of commands that are complete."""
    events: list[StreamEvent] = []
    for number, command in enumerate(commands):
        events += [
            ShellCallCommandAdded(output_index=output_index, command_index=number),
            ShellCallCommandDelta(output_index=output_index, command_index=number, delta=command),
            ShellCallCommandDone(output_index=output_index, command_index=number, command=command),
        ]
    return events
