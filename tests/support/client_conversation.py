"""The conversation that every client has with the gateway, with code, a file and its past.

First the model squares, writes a file and links it; then it adds, which works only in the container of the first turn.
"""

from collections.abc import Sequence

from tests.support.gateway_process import USAGE, ScriptedModelServer, tool_call, tool_calls
from tests.support.raw_model_server import BREAK_CONNECTION, DONE, ReceivedRequest, Responder, chunk, stream

SQUARE = "rows = [1, 4, 9]\nopen('squares.csv', 'w').write('1,4,9')\nprint('kept', len(rows))"
ADD = "print(sum(rows), open('squares.csv').read())"
LINK = "Here: [squares](sandbox:/mnt/data/squares.csv)."
SUM = "It is 14."
FILE = b"1,4,9"
LOST = "The sandbox is gone."

SQUARED = "kept 3\nFiles: /mnt/data/squares.csv"
ADDED = "14 1,4,9"
# What the model is told of a call that nobody kept and whose outputs the client left out.
FORGOTTEN = "(the output was not kept)"


def turns(additions: int) -> list[Responder]:
    """One turn that squares, and as many as that which add. The model thinks aloud, as many do."""
    return [*_turn(SQUARE, LINK), *_turn(ADD, SUM) * additions]


def _turn(code: str, text: str) -> list[Responder]:
    thought = chunk({"reasoning_content": "Hm."})
    middle = len(text) // 2
    said = [chunk({"content": text[:middle]}), chunk({"content": text[middle:]})]
    return [
        tool_calls([thought], tool_call("code_interpreter", {"code": code})),
        stream(thought, *said, chunk(finish="stop"), USAGE, DONE),
    ]


def lost_sandbox() -> list[Responder]:
    """A turn whose call fails, which the model is told; then it speaks. Its event is one that OpenAI has not."""
    return _turn("import os\nos.kill(os.getpid(), 9)", LOST)


def broken_connection() -> list[Responder]:
    return [stream(chunk({"content": "I am"}), BREAK_CONNECTION)]


def script(model: ScriptedModelServer, additions: int) -> None:
    model.script(*turns(additions))


def check(model: ScriptedModelServer, pasts: Sequence[str]) -> None:
    """Everything was asked for. pasts: for each turn that added, what it was shown as the result of the first call."""
    assert model.unused_answers == 0
    check_asked(model.requests, pasts)


def check_asked(asked: Sequence[ReceivedRequest], pasts: Sequence[str]) -> None:
    first, *rest = [one.json["messages"] for one in asked]
    assert [message["role"] for message in first if message["role"] != "system"] == ["user"]
    assert rest.pop(0)[-1]["content"] == SQUARED
    for past, before, after in zip(pasts, rest[::2], rest[1::2], strict=True):
        spoken = [message for message in before if message["role"] != "system"]
        assert [message["role"] for message in spoken[:4]] == ["user", "assistant", "tool", "assistant"]
        assert spoken[2]["content"] == past
        assert spoken[3]["content"] == LINK
        assert spoken[-1]["role"] == "user"
        called = [call["id"] for message in after for call in message.get("tool_calls", ())]
        assert len(set(called)) == len(called)  # the model says `call_1` every time
        assert after[-1] == {"role": "tool", "tool_call_id": called[-1], "content": ADDED}
