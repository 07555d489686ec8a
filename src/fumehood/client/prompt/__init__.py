"""Prompts, sections, tools and structured output."""

from typing import TYPE_CHECKING

from fumehood.client.prompt._types import NoParams, SupportsDataclass
from fumehood.client.prompt.prompt import Prompt, PromptTemplate, RenderedPrompt, ToolChoice
from fumehood.client.prompt.section import MarkdownSection, PromptSection, Section
from fumehood.client.prompt.structured_output import parse_structured_output
from fumehood.client.prompt.tool import (
    AnyTool,
    ProviderTool,
    ProviderToolCallData,
    Tool,
    ToolContext,
    ToolPolicy,
    ToolResult,
)

if TYPE_CHECKING:
    from fumehood.client.prompt.vfs import VfsToolsSection
else:

    def __getattr__(name: str) -> object:
        if name == "VfsToolsSection":
            from fumehood.client.prompt.vfs import VfsToolsSection

            return VfsToolsSection
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AnyTool",
    "MarkdownSection",
    "NoParams",
    "Prompt",
    "PromptSection",
    "PromptTemplate",
    "ProviderTool",
    "ProviderToolCallData",
    "RenderedPrompt",
    "Section",
    "SupportsDataclass",
    "Tool",
    "ToolChoice",
    "ToolContext",
    "ToolPolicy",
    "ToolResult",
    "VfsToolsSection",
    "parse_structured_output",
]
