"""Adapters to providers, and what they have in common; imports `core`."""

from fumehood.client.adapters.core import FileCitation, PromptResponse, ProviderAdapter, ToolChoice

__all__ = ["FileCitation", "PromptResponse", "ProviderAdapter", "ToolChoice"]
