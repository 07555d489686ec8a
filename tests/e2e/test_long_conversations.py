"""Two hundred turns with the OpenAI SDK: the context stays bounded and nothing is forgotten."""

import itertools
import sqlite3
from contextlib import closing
from typing import Any, Literal

import pytest

from tests.e2e.conftest import INTERPRETER, RunningGateway
from tests.support.long_conversations import (
    FACT,
    KNOWN,
    PRINTED,
    QUESTION,
    READ,
    WRITE,
    Analyst,
    ConversationRecord,
    count_tokens,
    make_text,
)

type Way = Literal["previous", "replayed", "on demand"]


class Conversation:
    """A client's side of it.

    way: by `previous_response_id`; by giving everything back with `context_management`; or by giving everything back
        and calling `/responses/compact` where `/responses/input_tokens` says that it is time to.
    role: of every turn; some clients send them as system messages.
    """

    def __init__(
        self, gateway: RunningGateway, way: Way, threshold: int, *, store: bool = True, role: str = "user"
    ) -> None:
        self.record = ConversationRecord(threshold, turn=0)
        self.analyst = Analyst()
        self.stored = [read_stored_bytes(gateway)]
        self._gateway = gateway
        self._client = gateway.strict
        self._way = way
        self._store = store
        self._role = role
        self._window: list[Any] = []
        self._previous: str | None = None
        gateway.model.script(*[self.analyst.answer] * 1000)

    def say(self, number: int, text: str) -> Any:
        message = {"role": self._role, "content": text}
        settings: dict[str, Any] = {
            "model": "scripted",
            "tools": [INTERPRETER],
            "include": ["code_interpreter_call.outputs"],
            "store": self._store,
        }
        if self._way != "on demand":
            managed = {"type": "compaction", "compact_threshold": self.record.threshold}
            settings["context_management"] = [managed]
        if self._way == "previous":
            settings |= {"input": [message], "previous_response_id": self._previous}
        else:
            self._window.append(message)
            settings["input"] = self._window
        create: Any = self._client.responses.create
        response = create(**settings)
        self._previous = response.id
        items: list[Any] = [item.model_dump(exclude_none=True) for item in response.output]
        self._window += items
        self._note(number, [item for item in items if item["type"] == "compaction"])
        if self._way == "on demand" and self._counted() > self.record.threshold:
            compacted = self._client.responses.compact(model="scripted", input=self._window)
            self._window = [item.model_dump(exclude_none=True) for item in compacted.output]
            self._note(number, self._window)
        self.stored.append(read_stored_bytes(self._gateway))
        self.record.turn = max(self.record.turn, count_tokens(text) + count_tokens(response.output_text) + 8)
        return response

    def _counted(self) -> int:
        """Not the response's usage, which is that of all its turns together."""
        counted = self._client.responses.input_tokens.count(
            model="scripted", input=self._window, tools=[INTERPRETER]
        )
        return counted.input_tokens

    def _note(self, number: int, compactions: list[Any]) -> None:
        if compactions:
            self.record.compactions += [number] * len(compactions)
            self.record.sealed += [len(item["encrypted_content"]) for item in compactions]
            place = max(place for place, item in enumerate(self._window) if item.get("type") == "compaction")
            if number % 3:  # most clients drop what is not needed, some do not
                self._window = self._window[place:]


def read_stored_bytes(gateway: RunningGateway) -> int:
    """The bytes of all items in the store."""
    with closing(sqlite3.connect(f"file:{gateway.process.directory}/gateway.db?mode=ro", uri=True)) as db:
        return db.execute("SELECT coalesce(sum(length(raw)), 0) FROM items").fetchone()[0]


def check_stored(gateway: RunningGateway, conversation: Conversation, last_id: str) -> None:
    """What a turn adds to the store does not grow with the turns before it."""
    added = [after - before for before, after in itertools.pairwise(conversation.stored)]
    half = len(added) // 2
    assert max(added[half:]) <= 1.25 * max(added[:half])
    assert max(added) < 8 * conversation.record.threshold
    listed: Any = gateway.strict.responses.input_items.list(last_id, limit=100)
    assert [item.type for item in listed].count("compaction") == len(conversation.record.compactions)


def converse(
    gateway: RunningGateway, way: Way, threshold: int, turns: int, *, store: bool, role: str = "user"
) -> None:
    conversation = Conversation(gateway, way, threshold, store=store, role=role)
    conversation.say(0, make_text(threshold // 20, f"{FACT} {WRITE}"))
    for number in range(1, turns - 2):
        conversation.say(number, make_text(threshold // 20, f"{number}."))
    ran = conversation.say(turns - 2, READ)
    called = next(item for item in ran.output if item.type == "code_interpreter_call")
    assert called.outputs[0].logs == PRINTED
    last = conversation.say(turns - 1, QUESTION)
    assert last.output_text == KNOWN
    conversation.record.check(conversation.analyst, turns)
    if way == "previous":
        check_stored(gateway, conversation, last.id)


WAYS = [
    pytest.param("previous", True, "user", id="previous_response_id"),
    pytest.param("previous", True, "system", id="previous_response_id-system"),
    pytest.param("replayed", True, "user", id="replayed"),
    pytest.param("replayed", False, "user", id="replayed-unstored"),
    pytest.param("replayed", False, "system", id="replayed-unstored-system"),
    pytest.param("on demand", True, "user", id="on-demand"),
    pytest.param("on demand", False, "user", id="on-demand-unstored"),
    pytest.param("on demand", False, "system", id="on-demand-unstored-system"),
]


@pytest.mark.parametrize(("way", "store", "role"), [WAYS[1], WAYS[3], WAYS[6]])
def test_fifty_turns_stay_within_the_threshold(
    gateway: RunningGateway, way: Way, store: bool, role: str
) -> None:
    converse(gateway, way, 2000, 50, store=store, role=role)


@pytest.mark.slow
@pytest.mark.parametrize("threshold", [2000, 5000, 100_000])
@pytest.mark.parametrize(("way", "store", "role"), WAYS)
def test_two_hundred_turns_stay_within_the_threshold(
    gateway: RunningGateway, way: Way, store: bool, role: str, threshold: int
) -> None:
    converse(gateway, way, threshold, 200, store=store, role=role)
