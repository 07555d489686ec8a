"""Detects a forced function call that the model wrote as a fenced code block.

Small models often write the argument between fences instead of calling the function. If the request forces that
function, the block can only be the call.
"""

import re
from collections.abc import Sequence

import msgspec

from fumehood.protocol.model_turns import (
    AnyModelEvent,
    ModelCallArgumentsDelta,
    ModelCallStarted,
    ModelCitation,
    ModelMessageStarted,
    ModelRequest,
    ModelTextDelta,
    ModelTurnEnded,
)
from fumehood.protocol.openai.ids import new_id
from fumehood.protocol.openai.tool_specs import ModelToolDefinition

_FENCED = re.compile(r"^(`{3,}|~{3,})[^\n`]*\n(.*?)^\1[ \t]*$", re.MULTILINE | re.DOTALL)


class _Property(msgspec.Struct):
    type: str | list[str] | None = None


class _Schema(msgspec.Struct):
    properties: dict[str, _Property] = {}
    required: list[str] = []


class FencedCallDetector:
    """Buffers text until the turn ends; without a call, a text with exactly one fenced block becomes the call."""

    def __init__(self, function: ModelToolDefinition, argument_name: str) -> None:
        self._function_name = function.name
        self._argument_name = argument_name
        self._buffered: list[AnyModelEvent] = []
        self._has_call = False

    @classmethod
    def for_request(cls, request: ModelRequest) -> "FencedCallDetector | None":
        """None unless the request forces a function that requires exactly one string."""
        function = request.tool_choice
        if not isinstance(function, ModelToolDefinition):
            return None
        try:
            schema = msgspec.json.decode(function.parameters, type=_Schema)
        except msgspec.DecodeError:
            return None
        required = [name for name in schema.required if name in schema.properties]
        if len(required) != 1 or schema.properties[required[0]].type != "string":
            return None
        return cls(function, required[0])

    def filter_events(self, events: Sequence[AnyModelEvent]) -> list[AnyModelEvent]:
        filtered: list[AnyModelEvent] = []
        for event in events:
            match event:
                case ModelTextDelta() | ModelMessageStarted() | ModelCitation() if not self._has_call:
                    self._buffered.append(event)
                case ModelTurnEnded() if not self._has_call:
                    filtered += self._finish_turn(event)
                case ModelCallStarted():
                    self._has_call = True
                    filtered += [*self._buffered, event]
                    self._buffered.clear()
                case _:
                    filtered.append(event)
        return filtered

    def _finish_turn(self, end: ModelTurnEnded) -> list[AnyModelEvent]:
        text = "".join(event.delta for event in self._buffered if isinstance(event, ModelTextDelta))
        blocks = _FENCED.findall(text)
        if end.reason != "stop" or len(blocks) != 1:
            return [*self._buffered, end]
        arguments = msgspec.json.encode({self._argument_name: blocks[0][1]}).decode()
        return [
            ModelCallStarted(0, new_id("call"), self._function_name),
            ModelCallArgumentsDelta(0, arguments),
            msgspec.structs.replace(end, reason="calls"),
        ]
