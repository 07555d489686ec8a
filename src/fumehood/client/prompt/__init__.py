"""Prompts, sections, tools and structured output."""

from fumehood.client.prompt._types import NoParams, SupportsDataclass
from fumehood.client.prompt.attachments import Attachment, InputFile, InputImage
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

__all__ = [
    "AnyTool",
    "Attachment",
    "InputFile",
    "InputImage",
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
    "parse_structured_output",
]
