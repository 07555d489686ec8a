"""Streams of each vendor, put together to what it would have sent in one piece; imports its modules."""

from collections.abc import Callable
from typing import Protocol

from fumehood.parts.canonical import Json, JsonObject
from fumehood.parts.streams.blocks import ConverseStream, MessageStream
from fumehood.parts.streams.entries import ConversationStream, ItemStream, RunStepStream
from fumehood.parts.streams.google import ChunkStream, StepStream
from fumehood.parts.streams.grok import GrokStream
from fumehood.parts.streams.openai import ResponseStream
from fumehood.parts.streams.pieces import Pieces


class Stream(Protocol):
    """What came of a stream so far. `pieces` knows which items have not ended, where the vendor tells."""

    @property
    def pieces(self) -> Pieces: ...

    def feed(self, event: JsonObject) -> None: ...

    def document(self) -> Json: ...


STREAMS: dict[str, Callable[[], Stream]] = {
    "openai": ResponseStream,
    "anthropic": MessageStream,
    "gemini": ChunkStream,
    "gemini-interactions": StepStream,
    "azure": RunStepStream,
    "bedrock": ConverseStream,
    "bedrock-agents": ItemStream,
    "mistral": ConversationStream,
    "xai": GrokStream,
}
