"""The adapter for OpenAI's Responses API, and for the fumehood gateway."""

from fumehood.client.adapters.openai.adapter import OpenAIAdapter
from fumehood.client.adapters.openai.code_interpreter_tool import (
    AutoContainerConfig,
    CodeInterpreterConfig,
    CodeInterpreterFile,
    CodeInterpreterResult,
    ExistingContainerRef,
    OpenAICodeInterpreterTool,
)
from fumehood.client.adapters.openai.compaction import CompactionManager, CompactionState
from fumehood.client.adapters.openai.config import (
    CompactionConfig,
    ContainerConfig,
    FileSearchConfig,
    OpenAIClientConfig,
    OpenAIHostedToolsConfig,
    OpenAIModelConfig,
)
from fumehood.client.adapters.openai.container import ContainerManager
from fumehood.client.adapters.openai.container_fs import ContainerFilesystem
from fumehood.client.adapters.openai.native_tools import (
    OpenAICodeInterpreterSection,
    OpenAIFileSearchSection,
    OpenAIWebSearchSection,
)
from fumehood.client.adapters.openai.workspace import OpenAIContainerWorkspaceSection
from fumehood.client.prompt.tool import ProviderToolCallData

__all__ = [
    "AutoContainerConfig",
    "CodeInterpreterConfig",
    "CodeInterpreterFile",
    "CodeInterpreterResult",
    "CompactionConfig",
    "CompactionManager",
    "CompactionState",
    "ContainerConfig",
    "ContainerFilesystem",
    "ContainerManager",
    "ExistingContainerRef",
    "FileSearchConfig",
    "OpenAIAdapter",
    "OpenAIClientConfig",
    "OpenAICodeInterpreterSection",
    "OpenAICodeInterpreterTool",
    "OpenAIContainerWorkspaceSection",
    "OpenAIFileSearchSection",
    "OpenAIHostedToolsConfig",
    "OpenAIModelConfig",
    "OpenAIWebSearchSection",
    "ProviderToolCallData",
]
