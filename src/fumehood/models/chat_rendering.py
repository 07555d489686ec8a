"""A conversation as messages of chat completions, each segment rendered once; imports msgspec, siblings and `protocol`.

One turn of the model is one assistant message with all its calls, followed by their results in the order of the calls.
Where a client still has to answer a call, the results from that call on are carried into the next segment, and come
first there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET, UnsetType

from fumehood.models.chat_content import ChatPart, Results, TextPart, pictures, render, split
from fumehood.models.foreign_items import Call, Result
from fumehood.models.foreign_items import read as read_foreign
from fumehood.models.item_content import Content, shown_arguments, spoken
from fumehood.models.kept_renderings import NOTHING, render_all
from fumehood.protocol.conversation import Entry, Segment, ToolExchange
from fumehood.protocol.errors import InvalidRequest
from fumehood.protocol.names import clean_name

VERSION = 3  # of these rules: what an earlier one rendered is not used


# --- items as clients and we wrote them ---------------------------------------------------------------


class _Message(msgspec.Struct):
    role: str = "user"
    content: Content = None


class _Call(msgspec.Struct):
    call_id: str
    name: str
    arguments: str = ""
    input: str = ""
    status: str | None = None


class _Output(msgspec.Struct):
    call_id: str
    output: Content = None


class _Thinking(msgspec.Struct):
    text: str = ""


class _Reasoning(msgspec.Struct):
    content: list[_Thinking] | None = None
    summary: list[_Thinking] | None = None


# --- messages as chat completions knows them ----------------------------------------------------------


class _ChatMessage(msgspec.Struct):
    role: str
    content: str | list[ChatPart]


class _ChatFunction(msgspec.Struct):
    name: str
    arguments: str


class _ChatCall(msgspec.Struct, tag_field="type", tag="function"):
    id: str
    function: _ChatFunction


class _ChatTurn(msgspec.Struct, tag_field="role", tag="assistant"):
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[_ChatCall] | UnsetType = UNSET


class _ChatResult(msgspec.Struct, tag_field="role", tag="tool"):
    tool_call_id: str
    content: str


class _Pending(msgspec.Struct):
    """A result that comes after the segment's end; None if it is the client's to give."""

    call_id: str
    content: str | None


class _Carry(msgspec.Struct):
    """What a segment leaves to the next one: results, and pictures that are shown after them."""

    results: list[_Pending] = []
    shown: list[ChatPart] = []


_encode = msgspec.json.Encoder().encode
_carries = msgspec.json.Decoder(_Carry)
# How messages of these roles begin. Such bytes are nowhere else: within a string of JSON the quotes are escaped.
_USER, _SYSTEM, _DEVELOPER = (b'{"role":"%b",' % role for role in (b"user", b"system", b"developer"))
_PICTURES = _encode(_ChatMessage("user", [TextPart(Results.PICTURES)])).removesuffix(b"]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """What models differ in."""

    takes_images: bool = False
    developer_role: bool = False
    replay_reasoning: bool = False
    takes_files: bool = False

    @property
    def name(self) -> str:
        flags = (self.takes_images, self.developer_role, self.replay_reasoning, self.takes_files)
        return f"chat/{VERSION}/" + "".join("y" if flag else "n" for flag in flags)


class ChatRenderer:
    """Writes conversations as messages of chat completions, in one dialect."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._name = dialect.name

    def messages(self, instructions: str | None, segments: Sequence[Segment]) -> list[bytes]:
        """The inside of `messages`, in pieces that a comma goes between; raises InvalidRequest for what cannot be shown
        to such a server.
        """
        parts, carry = render_all(segments, self._name, self._render)
        if carry:
            raise _unanswered(_carries.decode(carry))
        if instructions:
            parts.insert(0, _encode(_ChatMessage("system", instructions)))
        return parts if _has_user(parts) else _with_user(parts)

    def _render(self, entries: Sequence[Entry], carry: bytes) -> tuple[bytes, bytes]:
        return _Rendering(self._dialect, _carries.decode(carry) if carry else _Carry()).render(entries)


def _has_user(parts: Sequence[bytes]) -> bool:
    """Whether the user says anything; pictures that a tool returned are not the user's words."""
    for part in parts:
        place = part.find(_USER)
        while place >= 0:
            if not part.startswith(_PICTURES, place):
                return True
            place = part.find(_USER, place + 1)
    return False


def _with_user(parts: list[bytes]) -> list[bytes]:
    """The last system message as one of the user: many chat templates refuse a conversation without any. The kept
    renderings stay as they are, since the next request may bring a message of the user.
    """
    for number in range(len(parts) - 1, -1, -1):
        part = parts[number]
        place = max(part.rfind(_SYSTEM), part.rfind(_DEVELOPER))
        if place >= 0:
            role = _SYSTEM if part.startswith(_SYSTEM, place) else _DEVELOPER
            parts[number] = part[:place] + _USER + part[place + len(role) :]
            break
    return parts


@dataclass(slots=True, eq=False)
class _Turn:
    """One message of the model's and what its calls gave back."""

    number: int
    texts: list[str] = field(default_factory=list[str])
    thoughts: list[str] = field(default_factory=list[str])
    calls: dict[str, _ChatFunction] = field(default_factory=dict[str, _ChatFunction])
    results: dict[str, str] = field(default_factory=dict[str, str])
    shown: list[ChatPart] = field(default_factory=list[ChatPart])
    optional: set[str] = field(default_factory=set[str])  # calls that are shown only with a result
    answered: bool = False


class _Rendering:
    """The rendering of one segment."""

    def __init__(self, dialect: Dialect, carry: _Carry) -> None:
        self._dialect = dialect
        self._carry = carry
        self._pieces: list[_Turn | _ChatMessage] = []
        self._callers: dict[str, _Turn] = {}
        self._pending = {result.call_id: result for result in carry.results}

    def render(self, entries: Sequence[Entry]) -> tuple[bytes, bytes]:
        """The messages, and what is left to the next segment; raises InvalidRequest."""
        for entry in entries:
            try:
                self._take(entry)
            except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
                raise InvalidRequest(
                    f"An item of type {entry.type!r} cannot be read: {error}", param="input"
                ) from None
        messages: list[bytes] = []
        if entries and (self._carry.results or self._carry.shown):
            if any(result.content is None for result in self._carry.results):
                raise _unanswered(self._carry)
            messages += [
                _encode(_ChatResult(result.call_id, result.content or "")) for result in self._carry.results
            ]
            messages += _shown(self._carry.shown)
            self._carry = _Carry()
        left = self._carry
        for number, piece in enumerate(self._pieces):
            if isinstance(piece, _ChatMessage):
                messages.append(_encode(piece))
                continue
            left = _finish(piece, self._dialect.replay_reasoning, messages)
            if left.results and number + 1 < len(self._pieces):
                raise _unanswered(left)
        return b",".join(messages), _encode(left) if left.results else NOTHING

    # ---- items ------------------------------------------------------------------------------------------------

    def _take(self, entry: Entry) -> None:
        if entry.exchange is not None:
            self._take_exchange(entry, entry.exchange)
            return
        match entry.type:
            case "message":
                self._take_message(entry)
            case "function_call" | "custom_tool_call":
                self._take_call(entry)
            case "function_call_output" | "custom_tool_call_output":
                self._take_output(entry)
            case "reasoning":
                self._take_reasoning(entry)
            case "compaction":
                raise InvalidRequest(
                    "An item of type 'compaction' cannot be shown to this model.", param="input"
                )
            case _:
                self._take_foreign(entry)

    def _take_message(self, entry: Entry) -> None:
        message = msgspec.json.decode(entry.raw, type=_Message)
        match message.role:
            case "assistant":
                turn = self._turn(entry.turn)
                if entry.turn == 0 and (turn.texts or turn.calls):
                    turn = self._begin(0)
                turn.texts.append(spoken(message.content))
            case "user" | "system":
                self._pieces.append(_ChatMessage(message.role, self._said(message, entry)))
            case "developer":
                role = "developer" if self._dialect.developer_role else "system"
                self._pieces.append(_ChatMessage(role, self._said(message, entry)))
            case other:
                raise InvalidRequest(f"A message cannot have the role {clean_name(other)!r}.", param="input")

    def _said(self, message: _Message, entry: Entry) -> str | list[ChatPart]:
        return render(message.content, entry.attachments, takes_files=self._dialect.takes_files)

    def _take_reasoning(self, entry: Entry) -> None:
        reasoning = msgspec.json.decode(entry.raw, type=_Reasoning)
        turn = self._turn(entry.turn)
        if entry.turn == 0 and (turn.texts or turn.calls):
            turn = self._begin(0)
        turn.thoughts += [part.text for part in reasoning.content or reasoning.summary or ()]

    def _take_call(self, entry: Entry) -> None:
        call = msgspec.json.decode(entry.raw, type=_Call)
        if entry.type == "custom_tool_call":
            arguments = _encode({"input": call.input}).decode()
        else:
            arguments = shown_arguments(call.arguments)
        turn = self._turn(entry.turn)
        turn.calls[call.call_id] = _ChatFunction(call.name, arguments)
        self._callers[call.call_id] = turn
        if call.status in ("in_progress", "incomplete"):
            turn.optional.add(call.call_id)

    def _take_output(self, entry: Entry) -> None:
        """The result of a call of this segment, wherever between them it stands, or of one that was left open."""
        output = msgspec.json.decode(entry.raw, type=_Output)
        text, shown = split(output.output, entry.attachments, takes_files=self._dialect.takes_files)
        if self._answer(output.call_id, text, shown):
            return
        result = self._pending.get(output.call_id)
        if result is not None:
            result.content = text
            self._carry.shown += shown
            return
        raise InvalidRequest(
            f"No tool call found for function call output with call_id {clean_name(output.call_id)}.",
            param="input",
        )

    def _answer(self, call_id: str, text: str, shown: Sequence[ChatPart] = ()) -> bool:
        turn = self._callers.get(call_id)
        if turn is None:
            return False
        turn.results[call_id] = text
        turn.shown += shown
        turn.answered = True
        return True

    def _take_foreign(self, entry: Entry) -> None:
        match read_foreign(entry):
            case Call() as call:
                turn = self._turn(entry.turn)
                turn.calls[call.call_id] = _ChatFunction(call.name, shown_arguments(call.arguments))
                self._callers[call.call_id] = turn
                turn.optional.add(call.call_id)
            case Result() as result:
                self._answer(result.call_id, result.text)
            case ToolExchange() as exchange:
                self._take_exchange(entry, exchange)
            case None:
                pass

    def _take_exchange(self, entry: Entry, exchange: ToolExchange) -> None:
        shown = pictures(exchange.images) if self._dialect.takes_images else []
        if exchange.tells == "result":
            self._answer(exchange.call_id, exchange.output, shown)
            return
        turn = self._turn(entry.turn)
        turn.calls[exchange.call_id] = _ChatFunction(exchange.name, shown_arguments(exchange.arguments))
        self._callers[exchange.call_id] = turn
        if exchange.tells == "call":
            turn.optional.add(exchange.call_id)
            return
        turn.results[exchange.call_id] = exchange.output
        turn.shown += shown

    # ---- turns ------------------------------------------------------------------------------------------------

    def _turn(self, number: int) -> _Turn:
        """The turn that an item of that number belongs to. What clients give back without one goes together as far
        as no result stands between.
        """
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, _Turn) and last.number == number and not (number == 0 and last.answered):
            return last
        return self._begin(number)

    def _begin(self, number: int) -> _Turn:
        turn = _Turn(number)
        self._pieces.append(turn)
        return turn


def _finish(turn: _Turn, replay_reasoning: bool, messages: list[bytes]) -> _Carry:
    """Add the message and its results; what has to wait for the next segment."""
    calls = {
        call_id: call
        for call_id, call in turn.calls.items()
        if call_id in turn.results or call_id not in turn.optional
    }
    text = "".join(turn.texts)
    thoughts = "\n".join(turn.thoughts) if replay_reasoning else ""
    if text or calls or thoughts:
        said = _ChatTurn(text if text or not calls else None)
        if thoughts:
            said.reasoning_content = thoughts
        if calls:
            said.tool_calls = [_ChatCall(call_id, call) for call_id, call in calls.items()]
        messages.append(_encode(said))
    results = [_Pending(call_id, turn.results.get(call_id)) for call_id in calls]
    ready = next((number for number, result in enumerate(results) if result.content is None), len(results))
    messages += [_encode(_ChatResult(result.call_id, result.content or "")) for result in results[:ready]]
    if ready < len(results):
        return _Carry(results[ready:], turn.shown)
    messages += _shown(turn.shown)
    return _Carry()


def _shown(parts: Sequence[ChatPart]) -> list[bytes]:
    return [_encode(_ChatMessage("user", [TextPart(Results.PICTURES), *parts]))] if parts else []


def _unanswered(carry: _Carry) -> InvalidRequest:
    missing = next(result.call_id for result in carry.results if result.content is None)
    return InvalidRequest(f"No tool output found for function call {clean_name(missing)}.", param="input")
