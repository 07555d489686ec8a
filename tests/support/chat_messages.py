"""Conversations as a chat completions server is shown them, for tests."""

from typing import Any

import msgspec
import pytest

from fumehood.models.chat_completions.chat_renderer import render_messages
from fumehood.models.rendering.server_features import ServerFeatures
from fumehood.protocol.conversation import Conversation, ConversationSegment
from fumehood.protocol.openai.api_errors import InvalidRequest

IMAGE_URL = "data:image/png;base64,AAAA"


def render(
    *segments: ConversationSegment, instructions: str | None = None, features: ServerFeatures | None = None
) -> list[Any]:
    messages = render_messages(features or ServerFeatures(), instructions, segments)
    return msgspec.json.decode(b"[%b]" % b",".join(messages))


def render_conversation(conversation: Conversation, features: ServerFeatures) -> list[Any]:
    return msgspec.json.decode(b"[%b]" % b",".join(render_messages(features, None, conversation)))


def summarize_messages(messages: list[Any]) -> list[str]:
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


def render_refused(*segments: ConversationSegment) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        render(*segments)
    return caught.value
