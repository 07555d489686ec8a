"""The typed client: prompts made of sections, tools, sessions and workspaces.

The adapter for OpenAI and for the fumehood gateway is `fumehood.client.adapters.openai`. Names of files and streams are
imported on first use, because they take as long to import as all the rest.
"""

from typing import TYPE_CHECKING

from fumehood.client.adapters import PromptResponse, ProviderAdapter, ToolChoice
from fumehood.client.budget import Budget, BudgetTracker, TokenUsage
from fumehood.client.deadlines import Deadline
from fumehood.client.errors import (
    BudgetExceededError,
    CompactionError,
    ContainerExpiredError,
    ContainerNotFoundError,
    DeadlineExceededError,
    FilteredOutputError,
    FumehoodError,
    InvariantError,
    OutputParseError,
    PromptEvaluationError,
    PromptValidationError,
    ResourceError,
    ThrottleError,
    WinkError,
    WorkspaceBudgetError,
    WorkspaceSecurityError,
)
from fumehood.client.prompt import (
    InputFile,
    InputImage,
    MarkdownSection,
    Prompt,
    PromptSection,
    PromptTemplate,
    ProviderTool,
    RenderedPrompt,
    Section,
    Tool,
    ToolContext,
    ToolResult,
    parse_structured_output,
)
from fumehood.client.resources import ResourceRegistry
from fumehood.client.runtime import (
    InProcessDispatcher,
    InProcessEventBus,
    NullEventBus,
    PromptExecuted,
    PromptRendered,
    Session,
    SessionProtocol,
    ToolInvoked,
)
from fumehood.client.throttle import ThrottlePolicy

if TYPE_CHECKING:
    from fumehood.client.adapters.evaluation_stream import AsyncEvaluationStream, EvaluationStream
    from fumehood.client.adapters.stream_events import (
        CitationAdded,
        CodeDelta,
        CodeImage,
        CodeOutputDelta,
        EvaluationEvent,
        EvaluationFinished,
        FileProduced,
        FunctionArguments,
        FunctionCallFinished,
        FunctionCallStarted,
        HostedCallFinished,
        HostedCallStarted,
        ReasoningDelta,
        RefusalText,
        TextDelta,
        TurnFinished,
        TurnRestarted,
    )
    from fumehood.client.filesystem import Filesystem, HostFilesystem, InMemoryFilesystem
    from fumehood.client.mounts import HostMount, HostMountPreview
    from fumehood.client.prompt.filesystem_tools import VfsToolsSection
    from fumehood.client.workspace_section import HostWorkspaceSection
else:

    def __getattr__(name: str) -> object:
        from importlib import import_module

        for path, names in _LATER.items():
            if name in names:
                return getattr(import_module(path), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_LATER = {
    "fumehood.client.adapters.evaluation_stream": ("AsyncEvaluationStream", "EvaluationStream"),
    "fumehood.client.adapters.stream_events": (
        "CitationAdded",
        "CodeDelta",
        "CodeImage",
        "CodeOutputDelta",
        "EvaluationEvent",
        "EvaluationFinished",
        "FileProduced",
        "FunctionArguments",
        "FunctionCallFinished",
        "FunctionCallStarted",
        "HostedCallFinished",
        "HostedCallStarted",
        "ReasoningDelta",
        "RefusalText",
        "TextDelta",
        "TurnFinished",
        "TurnRestarted",
    ),
    "fumehood.client.filesystem": ("Filesystem", "HostFilesystem", "InMemoryFilesystem"),
    "fumehood.client.mounts": ("HostMount", "HostMountPreview"),
    "fumehood.client.prompt.filesystem_tools": ("VfsToolsSection",),
    "fumehood.client.workspace_section": ("HostWorkspaceSection",),
}

__all__ = [
    "AsyncEvaluationStream",
    "Budget",
    "BudgetExceededError",
    "BudgetTracker",
    "CitationAdded",
    "CodeDelta",
    "CodeImage",
    "CodeOutputDelta",
    "CompactionError",
    "ContainerExpiredError",
    "ContainerNotFoundError",
    "Deadline",
    "DeadlineExceededError",
    "EvaluationEvent",
    "EvaluationFinished",
    "EvaluationStream",
    "FileProduced",
    "Filesystem",
    "FilteredOutputError",
    "FumehoodError",
    "FunctionArguments",
    "FunctionCallFinished",
    "FunctionCallStarted",
    "HostFilesystem",
    "HostMount",
    "HostMountPreview",
    "HostWorkspaceSection",
    "HostedCallFinished",
    "HostedCallStarted",
    "InMemoryFilesystem",
    "InProcessDispatcher",
    "InProcessEventBus",
    "InputFile",
    "InputImage",
    "InvariantError",
    "MarkdownSection",
    "NullEventBus",
    "OutputParseError",
    "Prompt",
    "PromptEvaluationError",
    "PromptExecuted",
    "PromptRendered",
    "PromptResponse",
    "PromptSection",
    "PromptTemplate",
    "PromptValidationError",
    "ProviderAdapter",
    "ProviderTool",
    "ReasoningDelta",
    "RefusalText",
    "RenderedPrompt",
    "ResourceError",
    "ResourceRegistry",
    "Section",
    "Session",
    "SessionProtocol",
    "TextDelta",
    "ThrottleError",
    "ThrottlePolicy",
    "TokenUsage",
    "Tool",
    "ToolChoice",
    "ToolContext",
    "ToolInvoked",
    "ToolResult",
    "TurnFinished",
    "TurnRestarted",
    "VfsToolsSection",
    "WinkError",
    "WorkspaceBudgetError",
    "WorkspaceSecurityError",
    "parse_structured_output",
]
