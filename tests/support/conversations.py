"""Conversations for tests of models, written short."""

from collections.abc import Mapping, Sequence

import msgspec

from fumehood.protocol.conversation import ConversationEntry, ConversationSegment, ToolExchange


def entry(item: Mapping[str, object], turn: int = 0) -> ConversationEntry:
    """An item as it is kept."""
    kind = item.get("type", "message")
    return ConversationEntry(type=str(kind), id=None, turn=turn, raw=msgspec.json.encode(item))


def message(text: object, role: str = "user", turn: int = 0) -> ConversationEntry:
    return entry({"type": "message", "role": role, "content": text}, turn)


def call(
    call_id: str, arguments: str = "{}", *, turn: int = 0, name: str = "f", **more: object
) -> ConversationEntry:
    """A call of the client's."""
    item = {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments, **more}
    return entry(item, turn)


def output(call_id: str, text: object) -> ConversationEntry:
    """The client's answer to it."""
    return entry({"type": "function_call_output", "call_id": call_id, "output": text})


def hosted_call(
    call_id: str, result: str, *, turn: int = 0, arguments: str = '{"code":"1"}', images: Sequence[str] = ()
) -> ConversationEntry:
    """A call of the code interpreter, with its result."""
    exchange = ToolExchange(
        call_id=call_id, name="code_interpreter", arguments=arguments, output=result, images=tuple(images)
    )
    return ConversationEntry(type="code_interpreter_call", id=None, turn=turn, raw=b"{}", exchange=exchange)


def shell_call(call_id: str, *, turn: int = 0) -> ConversationEntry:
    """A call of the shell; its result is another item."""
    exchange = ToolExchange(
        call_id=call_id, name="shell", arguments='{"commands":["ls"]}', output="", half="call"
    )
    raw = msgspec.json.encode({"type": "shell_call", "call_id": call_id})
    return ConversationEntry(type="shell_call", id=None, turn=turn, raw=raw, exchange=exchange)


def shell_output(call_id: str, text: str, *, turn: int = 0, images: Sequence[str] = ()) -> ConversationEntry:
    """What came of it."""
    exchange = ToolExchange(
        call_id=call_id, name="shell", arguments="", output=text, half="result", images=tuple(images)
    )
    raw = msgspec.json.encode({"type": "shell_call_output", "call_id": call_id, "output": []})
    return ConversationEntry(type="shell_call_output", id=None, turn=turn, raw=raw, exchange=exchange)


def reasoning(text: str, turn: int = 0) -> ConversationEntry:
    return entry(
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}, turn
    )


def segment(*entries: ConversationEntry) -> ConversationSegment:
    return ConversationSegment(entries)
