"""Events of a streamed evaluation, in the order in which they happen.

`item_id` tells which item of the response a delta belongs to; deltas of one item joined together are its whole text.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fumehood.client.adapters.provider_adapter import CitedFile, PromptResponse
from fumehood.client.budget import TokenUsage
from fumehood.client.prompt.tool import ProviderToolCallData, ToolResult


@dataclass(frozen=True)
class TextDelta:
    """The model has written more of a message."""

    item_id: str
    delta: str


@dataclass(frozen=True)
class ReasoningDelta:
    """The model has reasoned further. kind: its reasoning itself, or a summary of it."""

    item_id: str
    delta: str
    kind: Literal["text", "summary"] = "text"


@dataclass(frozen=True)
class RefusalText:
    """The model has written more of a refusal."""

    item_id: str
    delta: str


@dataclass(frozen=True)
class HostedCallStarted:
    """The model calls a tool of the provider. name: such as "code_interpreter"."""

    item_id: str
    name: str


@dataclass(frozen=True)
class CodeDelta:
    """The model has written more of the code that it runs."""

    item_id: str
    delta: str


@dataclass(frozen=True)
class CodeOutputDelta:
    """Code has printed something. Servers other than the fumehood gateway report all output as "stdout"."""

    item_id: str
    stream: Literal["stdout", "stderr"]
    delta: str


@dataclass(frozen=True)
class CodeImage:
    """Code has shown a picture. url: a data URL, or where the server has it."""

    item_id: str
    url: str = field(repr=False)


@dataclass(frozen=True)
class FileProduced:
    """Code has written a file. Only the fumehood gateway lists files that no message cites."""

    item_id: str
    file: CitedFile


@dataclass(frozen=True)
class HostedCallFinished:
    """The provider has run a call. Its ToolInvoked is published when the turn has ended, with later citations."""

    item_id: str
    name: str
    call: ProviderToolCallData


@dataclass(frozen=True)
class CitationAdded:
    """A message cites something. annotation: as the provider sent it. file: if it is a file that code has written."""

    item_id: str
    annotation: Mapping[str, Any]
    file: CitedFile | None = None


@dataclass(frozen=True)
class FunctionCallStarted:
    """The model begins to call a function of the prompt; its arguments follow."""

    item_id: str
    name: str
    call_id: str | None


@dataclass(frozen=True)
class FunctionArguments:
    """The model has written more of the arguments of a function call."""

    item_id: str
    delta: str


@dataclass(frozen=True)
class FunctionCallFinished:
    """A function of the prompt has run. output: what the model reads."""

    name: str
    call_id: str | None
    result: ToolResult[Any]
    output: str


@dataclass(frozen=True)
class TurnFinished:
    """The model has ended a turn; functions that it called run next. number: from 1. usage: of this turn."""

    number: int
    response_id: str
    usage: TokenUsage


@dataclass(frozen=True)
class TurnRestarted:
    """The connection broke, and the turn is requested again: what was streamed of it is void."""

    number: int


@dataclass(frozen=True)
class EvaluationFinished[Out]:
    """The last event: the answer, as `evaluate` would have returned it."""

    response: PromptResponse[Out]


type EvaluationEvent[Out] = (
    TextDelta
    | ReasoningDelta
    | RefusalText
    | HostedCallStarted
    | CodeDelta
    | CodeOutputDelta
    | CodeImage
    | FileProduced
    | HostedCallFinished
    | CitationAdded
    | FunctionCallStarted
    | FunctionArguments
    | FunctionCallFinished
    | TurnFinished
    | TurnRestarted
    | EvaluationFinished[Out]
)
