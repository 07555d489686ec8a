"""Vendors' streams, assembled into the document that the vendor would have sent without streaming."""

from collections.abc import Callable
from typing import Protocol

from fumehood.message_parts.canonical_parts import Json, JsonObject
from fumehood.message_parts.streaming.anthropic_bedrock_streams import AnthropicStream, BedrockConverseStream
from fumehood.message_parts.streaming.gemini_streams import GeminiInteractionsStream, GeminiStream
from fumehood.message_parts.streaming.mistral_azure_streams import (
    AzureRunStepStream,
    BedrockAgentsStream,
    MistralConversationStream,
)
from fumehood.message_parts.streaming.openai_responses_stream import OpenAIResponseStream
from fumehood.message_parts.streaming.partial_items import PartialItems
from fumehood.message_parts.streaming.xai_stream import XaiStream


class VendorStream(Protocol):
    """Collects the events of one stream. `partial_items` knows which items have not ended, where the vendor says so."""

    @property
    def partial_items(self) -> PartialItems: ...

    def feed(self, event: JsonObject) -> None: ...

    def build_document(self) -> Json: ...


VENDOR_STREAMS: dict[str, Callable[[], VendorStream]] = {
    "openai": OpenAIResponseStream,
    "anthropic": AnthropicStream,
    "gemini": GeminiStream,
    "gemini-interactions": GeminiInteractionsStream,
    "azure": AzureRunStepStream,
    "bedrock": BedrockConverseStream,
    "bedrock-agents": BedrockAgentsStream,
    "mistral": MistralConversationStream,
    "xai": XaiStream,
}
