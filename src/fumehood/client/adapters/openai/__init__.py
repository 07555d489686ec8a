"""The adapter for OpenAI's Responses API, and for the fumehood gateway."""

from fumehood.client.adapters.openai.adapter import OpenAIAdapter
from fumehood.client.adapters.openai.code_interpreter_tool import (
    AutoContainerConfig,
    CodeInterpreterConfig,
    CodeInterpreterFile,
    CodeInterpreterResult,
    ExistingContainerRef,
    OpenAICodeInterpreterTool,
    build_code_interpreter_result,
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
from fumehood.client.adapters.openai.native_tool_result import build_provider_result
from fumehood.client.adapters.openai.native_tools import (
    OpenAICodeInterpreterSection,
    OpenAIFileSearchSection,
    OpenAIWebSearchSection,
)
from fumehood.client.adapters.openai.workspace import OpenAIContainerWorkspaceSection
from fumehood.client.adapters.provider_adapter import CitedFile
from fumehood.client.prompt.tool import ProviderOutputHandler, ProviderToolCallData

__all__ = [
    "AutoContainerConfig",
    "CitedFile",
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
    "ProviderOutputHandler",
    "ProviderToolCallData",
    "build_code_interpreter_result",
    "build_provider_result",
]
