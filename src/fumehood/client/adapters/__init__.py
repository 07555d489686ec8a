"""Adapters for providers."""

from fumehood.client.adapters.provider_adapter import CitedFile, PromptResponse, ProviderAdapter, ToolChoice

__all__ = ["CitedFile", "PromptResponse", "ProviderAdapter", "ToolChoice"]
