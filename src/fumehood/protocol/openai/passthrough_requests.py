"""Requests that are passed through to a model server: the fields that the gateway reads of them."""

import msgspec
from msgspec import Raw


class CreateChatCompletion(msgspec.Struct):
    """A request for a chat completion. Fields that are not named here are passed on, too."""

    model: str
    messages: list[Raw]
    stream: bool | None = None


class CreateEmbeddings(msgspec.Struct):
    """A request for embeddings. Fields that are not named here are passed on, too."""

    model: str
    input: Raw
    messages: list[Raw] = []
