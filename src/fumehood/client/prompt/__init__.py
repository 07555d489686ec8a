"""Prompts, sections, tools and typed answers; imports its own modules."""

from fumehood.client.prompt._types import NoParams, SupportsDataclass
from fumehood.client.prompt.prompt import Prompt, PromptTemplate, RenderedPrompt, ToolChoice
from fumehood.client.prompt.section import MarkdownSection, PromptSection, Section
from fumehood.client.prompt.structured_output import parse_structured_output
from fumehood.client.prompt.tool import AnyTool, ProviderTool, Tool, ToolContext, ToolPolicy, ToolResult
from fumehood.client.prompt.vfs import VfsToolsSection

__all__ = [
    "AnyTool",
    "MarkdownSection",
    "NoParams",
    "Prompt",
    "PromptSection",
    "PromptTemplate",
    "ProviderTool",
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
