"""Adapters to providers, and what they have in common."""

from fumehood.client.adapters.provider_adapter import CitedFile, PromptResponse, ProviderAdapter, ToolChoice

__all__ = ["CitedFile", "PromptResponse", "ProviderAdapter", "ToolChoice"]
