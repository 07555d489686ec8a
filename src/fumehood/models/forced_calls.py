"""A forced call that the model wrote as a block of code; imports msgspec and `protocol`.

Small models asked to call a function often write its argument between fences instead. As a rule that is an answer like
any other. Where the request forces that very function there is nothing else it can mean.
"""

import re
from collections.abc import Sequence

import msgspec

from fumehood.protocol.ids import new_id
from fumehood.protocol.models import (
    AnyModelEvent,
    CallArguments,
    CallStarted,
    Cited,
    MessageStarted,
    ModelRequest,
    Text,
    TurnEnded,
)
from fumehood.protocol.tools import FunctionSpec

_FENCED = re.compile(r"^(`{3,}|~{3,})[^\n`]*\n(.*?)^\1[ \t]*$", re.MULTILINE | re.DOTALL)


class _Property(msgspec.Struct):
    type: str | list[str] | None = None


class _Schema(msgspec.Struct):
    properties: dict[str, _Property] = {}
    required: list[str] = []


class ForcedCall:
    """Holds text back until it is clear whether a call comes; without one, the only block in it is the call."""

    def __init__(self, function: FunctionSpec, field: str) -> None:
        self._name = function.name
        self._field = field
        self._held: list[AnyModelEvent] = []
        self._called = False

    @classmethod
    def of(cls, request: ModelRequest) -> "ForcedCall | None":
        """None unless one function is forced, and one string is all that it needs."""
        function = request.choice
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

    def sift(self, events: Sequence[AnyModelEvent]) -> list[AnyModelEvent]:
        sifted: list[AnyModelEvent] = []
        for event in events:
            match event:
                case Text() | MessageStarted() | Cited() if not self._called:
                    self._held.append(event)
                case TurnEnded() if not self._called:
                    sifted += self._ended(event)
                case CallStarted():
                    self._called = True
                    sifted += [*self._held, event]
                    self._held.clear()
                case _:
                    sifted.append(event)
        return sifted

    def _ended(self, end: TurnEnded) -> list[AnyModelEvent]:
        text = "".join(event.delta for event in self._held if isinstance(event, Text))
        blocks = _FENCED.findall(text)
        if end.reason != "stop" or len(blocks) != 1:
            return [*self._held, end]
        arguments = msgspec.json.encode({self._field: blocks[0][1]}).decode()
        return [
            CallStarted(0, new_id("call"), self._name),
            CallArguments(0, arguments),
            TurnEnded("calls", end.usage),
        ]
