"""A model server that answers from what it is shown, and nothing else."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tests.support.raw_model_server import DONE, ReceivedRequest, chunk, data, stream

_FACT = re.compile(r"code word is (\w+)")


def extract_texts(messages: list[dict[str, Any]]) -> list[str]:
    """What the messages say, pictures and the like left out."""
    texts: list[str] = []
    for message in messages:
        content = message.get("content") or ""
        texts.append(
            content if isinstance(content, str) else " ".join(part.get("text", "") for part in content)
        )
    return texts


@dataclass
class CodeWordModel:
    """Knows a code word if it is shown one, and writes it into its summaries.

    turns, summaries: the tokens of every request for an answer, and for a summary.
    """

    turns: list[int] = field(default_factory=list[int])
    summaries: list[int] = field(default_factory=list[int])

    async def answer(self, asked: ReceivedRequest, writer: asyncio.StreamWriter) -> bool:
        body = asked.json
        texts = extract_texts(body["messages"])
        tokens = sum(len(text) // 4 + 4 for text in texts)
        words = _FACT.findall("\n".join(texts))
        if "write a summary" in texts[-1]:
            self.summaries.append(tokens)
            said = f"The code word is {words[0]}." if words else "Nothing was said."
        else:
            self.turns.append(tokens)
            asks = "Which word" in texts[-1]
            said = (words[0] if words else "I do not know.") if asks else "Noted. " + "and so on " * 30
        return await reply(
            asked, writer, said, {"prompt_tokens": tokens, "completion_tokens": len(said) // 4}
        )


async def reply(
    asked: ReceivedRequest,
    writer: asyncio.StreamWriter,
    said: str,
    usage: dict[str, int],
    calls: Sequence[bytes] = (),
) -> bool:
    """Answer as the request asks for: in one piece or as a stream. calls: pieces of a stream."""
    usage = {"completion_tokens": len(said) // 4, **usage}
    usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
    if not asked.json.get("stream") and not calls:
        return await _write_blocking(said, usage, writer)
    told = data({"choices": [], "usage": usage})
    text = [chunk({"content": said})] if said else []
    end = chunk(finish="tool_calls" if calls else "stop")
    return await stream(*text, *calls, end, told, DONE)(asked, writer)


async def _write_blocking(said: str, usage: dict[str, int], writer: asyncio.StreamWriter) -> bool:
    choice = {"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
    body = msgspec.json.encode({"choices": [choice], "usage": usage})
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    writer.write(head + body)
    await writer.drain()
    return True
