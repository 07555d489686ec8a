"""A forced call that the model wrote as a block of code.

Small models asked to call a function often write its argument between fences instead. As a rule that is an answer like
any other. Where the request forces that very function there is nothing else it can mean.
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
from fumehood.protocol.openai.tool_specs import FunctionSpec

_FENCED = re.compile(r"^(`{3,}|~{3,})[^\n`]*\n(.*?)^\1[ \t]*$", re.MULTILINE | re.DOTALL)


class _Property(msgspec.Struct):
    type: str | list[str] | None = None


class _Schema(msgspec.Struct):
    properties: dict[str, _Property] = {}
    required: list[str] = []


class FencedCallDetector:
    """Holds text back until it is clear whether a call comes; without one, the only block in it is the call."""

    def __init__(self, function: FunctionSpec, argument_name: str) -> None:
        self._function_name = function.name
        self._argument_name = argument_name
        self._buffered: list[AnyModelEvent] = []
        self._has_call = False

    @classmethod
    def for_request(cls, request: ModelRequest) -> "FencedCallDetector | None":
        """None unless one function is forced, and one string is all that it needs."""
        function = request.tool_choice
        if not isinstance(function, FunctionSpec):
            return None
        try:
            schema = msgspec.json.decode(function.parameters, type=_Schema)
        except msgspec.DecodeError:
            return None
        needed = [name for name in schema.required if name in schema.properties]
        if len(needed) != 1 or schema.properties[needed[0]].type != "string":
            return None
        return cls(function, needed[0])

    def filter_events(self, events: Sequence[AnyModelEvent]) -> list[AnyModelEvent]:
        sifted: list[AnyModelEvent] = []
        for event in events:
            match event:
                case ModelTextDelta() | ModelMessageStarted() | ModelCitation() if not self._has_call:
                    self._buffered.append(event)
                case ModelTurnEnded() if not self._has_call:
                    sifted += self._finish_turn(event)
                case ModelCallStarted():
                    self._has_call = True
                    sifted += [*self._buffered, event]
                    self._buffered.clear()
                case _:
                    sifted.append(event)
        return sifted

    def _finish_turn(self, end: ModelTurnEnded) -> list[AnyModelEvent]:
        text = "".join(event.delta for event in self._buffered if isinstance(event, ModelTextDelta))
        blocks = _FENCED.findall(text)
        if end.reason != "stop" or len(blocks) != 1:
            return [*self._buffered, end]
        arguments = msgspec.json.encode({self._argument_name: blocks[0][1]}).decode()
        return [
            ModelCallStarted(0, new_id("call"), self._function_name),
            ModelCallArgumentsDelta(0, arguments),
            ModelTurnEnded("calls", end.usage),
        ]
