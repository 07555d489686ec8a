"""The input items of a prompt: its text, and the files and pictures for the model."""

from collections.abc import Sequence
from typing import Any

from fumehood.client.prompt.attachments import Attachment

type Item = dict[str, Any]


def build_prompt_items(
    text: str, attachments: Sequence[Attachment], *, starts_conversation: bool
) -> list[Item]:
    """Return the items of a prompt; the first one has its text.

    At the start of a conversation the text is a system message. Files and pictures are always in a user message, since
    providers accept them in no other.
    """
    parts = [attachment.build_part() for attachment in attachments]
    if starts_conversation:
        files: list[Item] = [{"role": "user", "content": parts}] if parts else []
        return [{"role": "system", "content": text}, *files]
    return [{"role": "user", "content": [{"type": "input_text", "text": text}, *parts] if parts else text}]


def replace_prompt_text(item: Item, text: str) -> None:
    """Set the text of a prompt's first item."""
    if isinstance(item["content"], str):
        item["content"] = text
    else:
        item["content"][0]["text"] = text
