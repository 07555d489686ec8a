"""Sections for native tools of the provider."""

from fumehood.client.adapters.openai.native_tools.code_interpreter_section import OpenAICodeInterpreterSection
from fumehood.client.adapters.openai.native_tools.file_search_section import OpenAIFileSearchSection
from fumehood.client.adapters.openai.native_tools.web_search_section import OpenAIWebSearchSection

__all__ = ["OpenAICodeInterpreterSection", "OpenAIFileSearchSection", "OpenAIWebSearchSection"]
