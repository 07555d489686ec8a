"""Conversations as a chat completions server is shown them, for tests; imports pytest and fumehood."""

from typing import Any

import msgspec
import pytest

from fumehood.models.chat_rendering import ChatRenderer, Dialect
from fumehood.protocol.conversation import Conversation, Segment
from fumehood.protocol.errors import InvalidRequest

PICTURE = "data:image/png;base64,AAAA"


def render(*segments: Segment, instructions: str | None = None, dialect: Dialect | None = None) -> list[Any]:
    renderer = ChatRenderer(dialect or Dialect())
    return msgspec.json.decode(b"[%b]" % b",".join(renderer.messages(instructions, segments)))


def rendered(conversation: Conversation, dialect: Dialect) -> list[Any]:
    return msgspec.json.decode(b"[%b]" % b",".join(ChatRenderer(dialect).messages(None, conversation)))


def shape(messages: list[Any]) -> list[str]:
    """Each message in a few words: its role, its text, its calls or the call it answers."""
    return [
        " ".join(
            filter(
                None,
                [
                    message["role"],
                    message["content"] if isinstance(message["content"], str) else None,
                    *(call["id"] for call in message.get("tool_calls", [])),
                    message.get("tool_call_id") and f"-> {message['tool_call_id']}",
                ],
            )
        )
        for message in messages
    ]


def refused(*segments: Segment) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        render(*segments)
    return caught.value
