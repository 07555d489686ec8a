"""Sessions of many turns, and a model that knows only what a request shows."""

import asyncio
import itertools
import re
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fumehood.engine.token_counter import estimate_entry
from fumehood.protocol.conversation import ConversationEntry
from tests.support.code_word_model_server import extract_texts, reply
from tests.support.gateway_process import tool_call
from tests.support.raw_model_server import ReceivedRequest

FACT = "The code word is heliotrope."
QUESTION = "Which word did I tell you first?"
KNOWN = "heliotrope"
WRITE = "RUN:x = 41; open('first.txt', 'w').write('basalt'):END"
READ = "RUN:print(x + 1, open('first.txt').read()):END"
PRINTED = "42 basalt\n"
_FACT = re.compile(r"code word is (\w+)")
_CODE = re.compile(r"RUN:(.*?):END")
_WORDS = re.compile(r"at most (\d+) words")
_TOKEN = re.compile(r"\w{1,3}|[^\w\s]")
_FILLER = "something else entirely "


def count_tokens(text: str) -> int:
    """The tokens of a text by the model's own tokenizer: about a third more than the gateway estimates."""
    return len(_TOKEN.findall(text))


def make_text(tokens: int, said: str = "") -> str:
    """A text of so many tokens, which begins with what is said."""
    left = tokens - count_tokens(said)
    return f"{said} " + _FILLER * max(0, left // count_tokens(_FILLER))


@dataclass
class Analyst:
    """Knows a code word if it is shown one, writes it into its summaries, and runs the code that it is told to run.

    turns, summaries: the tokens of every request for an answer, and for a summary, by the model's tokenizer.
    estimates: the tokens of the requests for an answer as the gateway counts them.
    wordy: how many times as long as allowed a summary is.
    """

    wordy: int = 3
    turns: list[int] = field(default_factory=list[int])
    estimates: list[int] = field(default_factory=list[int])
    summaries: list[int] = field(default_factory=list[int])
    without_user: int = 0

    async def answer(self, asked: ReceivedRequest, writer: asyncio.StreamWriter) -> bool:
        body = asked.json
        messages = body["messages"]
        texts = extract_texts(messages)
        tokens = _tokens(body, texts)
        self.without_user += all(message["role"] != "user" for message in messages)
        usage = {"prompt_tokens": tokens}
        facts = list(dict.fromkeys(_FACT.findall("\n".join(texts))))
        if limit := _WORDS.search(texts[-1]):
            self.summaries.append(tokens)
            said = "".join(f"The code word is {fact}. " for fact in facts) + _FILLER * (
                self.wordy * int(limit[1]) // 3
            )
            return await reply(asked, writer, said, usage)
        self.turns.append(tokens)
        self.estimates.append(_estimate_tokens(body))
        if messages[-1]["role"] == "tool":
            return await reply(asked, writer, "It printed " + texts[-1][:80], usage)
        if code := _CODE.search(texts[-1]):
            written = tool_call("code_interpreter", {"code": code[1]}, call_id=f"call_{len(self.turns)}")
            return await reply(asked, writer, "", usage, calls=written)
        asks = QUESTION in texts[-1]
        return await reply(asked, writer, ((facts or ["I do not know."])[0]) if asks else "Noted.", usage)


def _tokens(body: dict[str, Any], texts: list[str]) -> int:
    """Of everything that the request holds: messages, calls, tools."""
    calls = [message["tool_calls"] for message in body["messages"] if message.get("tool_calls")]
    others = msgspec.json.encode([calls, body.get("tools", [])]).decode()
    return sum(count_tokens(text) + 4 for text in texts) + count_tokens(others)


def _estimate_tokens(body: dict[str, Any]) -> int:
    """The same by the gateway's own counter."""
    entries = [
        ConversationEntry(
            type="message", id=None, turn=0, raw=msgspec.json.encode({"content": message.get("content")})
        )
        for message in body["messages"]
    ]
    calls = [message["tool_calls"] for message in body["messages"] if message.get("tool_calls")]
    others = msgspec.json.encode([calls, body.get("tools", [])])
    return sum(map(estimate_entry, entries)) + len(others) // 4


@dataclass
class ConversationRecord:
    """What a session came to.

    compactions: the number of the turn after or before which each of them was made.
    """

    threshold: int
    turn: int
    compactions: list[int] = field(default_factory=list[int])
    sealed: list[int] = field(default_factory=list[int])

    def check(self, analyst: Analyst, turns: int) -> None:
        """The window stays below the threshold plus one turn, and it is compacted once in five turns at most."""
        print(self.format_summary(analyst))  # with -s: what the documentation says of them
        assert max(analyst.turns) <= self.threshold + self.turn
        assert max(analyst.estimates) <= self.threshold + self.turn
        assert len(self.compactions) == len(analyst.summaries) >= 2
        assert len(self.compactions) <= turns // 5
        assert all(after - before >= 5 for before, after in itertools.pairwise(self.compactions))
        # A compaction of a compaction is no longer than the one before it: nothing piles up.
        assert max(self.sealed) <= 8 * self.threshold
        assert max(self.sealed) <= 1.25 * max(self.sealed[:2])
        assert analyst.without_user == 0

    def format_summary(self, analyst: Analyst) -> str:
        return (
            f"threshold {self.threshold}, turn {self.turn}: {len(self.compactions)} compactions, "
            f"window at most {max(analyst.turns)} (estimated {max(analyst.estimates)}), "
            f"summaries asked with at most {max(analyst.summaries, default=0)}, "
            f"sealed at most {max(self.sealed, default=0)} characters"
        )
