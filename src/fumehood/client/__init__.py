"""The typed client: prompts made of sections, tools, sessions, workspaces; imports its own modules, and no SDK.

The adapter for OpenAI, and for our gateway, is `fumehood.client.adapters.openai`.
"""

from fumehood.client.adapters import PromptResponse, ProviderAdapter, ToolChoice
from fumehood.client.budget import Budget, BudgetTracker, TokenUsage
from fumehood.client.deadlines import Deadline
from fumehood.client.errors import (
    CompactionError,
    ContainerExpiredError,
    FilteredOutputError,
    FumehoodError,
    PromptEvaluationError,
    WinkError,
    WorkspaceBudgetError,
    WorkspaceSecurityError,
)
from fumehood.client.filesystem import Filesystem, HostFilesystem, InMemoryFilesystem
from fumehood.client.prompt import (
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
    VfsToolsSection,
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
from fumehood.client.workspace import HostMount, HostMountPreview, HostWorkspaceSection

__all__ = [
    "Budget",
    "BudgetTracker",
    "CompactionError",
    "ContainerExpiredError",
    "Deadline",
    "Filesystem",
    "FilteredOutputError",
    "FumehoodError",
    "HostFilesystem",
    "HostMount",
    "HostMountPreview",
    "HostWorkspaceSection",
    "InMemoryFilesystem",
    "InProcessDispatcher",
    "InProcessEventBus",
    "MarkdownSection",
    "NullEventBus",
    "Prompt",
    "PromptEvaluationError",
    "PromptExecuted",
    "PromptRendered",
    "PromptResponse",
    "PromptSection",
    "PromptTemplate",
    "ProviderAdapter",
    "ProviderTool",
    "RenderedPrompt",
    "ResourceRegistry",
    "Section",
    "Session",
    "SessionProtocol",
    "ThrottlePolicy",
    "TokenUsage",
    "Tool",
    "ToolChoice",
    "ToolContext",
    "ToolInvoked",
    "ToolResult",
    "VfsToolsSection",
    "WinkError",
    "WorkspaceBudgetError",
    "WorkspaceSecurityError",
    "parse_structured_output",
]
