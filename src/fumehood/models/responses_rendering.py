"""A conversation as input of the Responses API, each segment rendered once; imports msgspec, siblings and `protocol`.

Nothing is sent with an id but reasoning, which its server will not take back without: ids are promised to clients, and
a server that keeps nothing cannot know them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import UNSET, Raw, UnsetType

from fumehood.models.chat_content import FilePart, TextPart, file_part
from fumehood.models.foreign_items import Call, Result
from fumehood.models.foreign_items import read as read_foreign
from fumehood.models.item_content import Content, Part, shown_arguments, spoken
from fumehood.models.kept_renderings import render_all
from fumehood.models.sealed import Origin
from fumehood.protocol.attachments import Attachment, is_file, note
from fumehood.protocol.conversation import Entry, Segment, ToolExchange
from fumehood.protocol.errors import InvalidRequest
from fumehood.protocol.names import clean_name

VERSION = 2  # of these rules: what an earlier one rendered is not used
_NO_ID = "rs_0"  # where some servers want one and none of them looks
_CUT_OFF = ("in_progress", "incomplete")


# --- items as clients and we wrote them ---------------------------------------------------------------


class _Role(msgspec.Struct):
    role: str = "user"


class _Said(msgspec.Struct):
    content: Content = None
    phase: str | None = None


class _Asked(msgspec.Struct):
    content: str | list[Raw] | None = None


class _Part(msgspec.Struct):
    type: str = ""
    file_id: str | None = None
    file_data: str | None = None


class _Call(msgspec.Struct):
    call_id: str
    name: str
    arguments: str = ""
    input: str = ""
    status: str | None = None
    namespace: str | None = None
    caller: dict[str, Raw] | None = None


class _Answer(msgspec.Struct):
    """The result of a call of any type; that of a local shell has the call's id as its own."""

    call_id: str | None = None
    id: str | None = None


class _Output(msgspec.Struct):
    call_id: str
    output: str | list[Raw] | None = None


class _Thinking(msgspec.Struct):
    text: str = ""


class _Reasoning(msgspec.Struct):
    content: list[_Thinking] | None = None
    summary: list[Raw] | None = None
    encrypted_content: str | None = None


# --- items as they are sent ---------------------------------------------------------------------------


class _InputMessage(msgspec.Struct, tag_field="type", tag="message"):
    """What the model said is a string: of a list some servers want ids and more, of a string none."""

    role: str
    content: str | list[Raw]
    phase: str | UnsetType = UNSET


class _FunctionCall(msgspec.Struct, tag_field="type", tag="function_call"):
    call_id: str
    name: str
    arguments: str


class _FunctionOutput(msgspec.Struct, tag_field="type", tag="function_call_output"):
    call_id: str
    output: str | list[Raw]


class _CustomCall(msgspec.Struct, tag_field="type", tag="custom_tool_call"):
    call_id: str
    name: str
    input: str


class _CustomOutput(msgspec.Struct, tag_field="type", tag="custom_tool_call_output"):
    call_id: str
    output: str | list[Raw]


class _ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    text: str


class _SentReasoning(msgspec.Struct, tag_field="type", tag="reasoning", omit_defaults=True):
    summary: list[Raw]
    id: str = ""
    content: list[_ReasoningText] = []
    encrypted_content: str = ""


class _InputText(msgspec.Struct, tag_field="type", tag="input_text"):
    text: str


class _InputImage(msgspec.Struct, tag_field="type", tag="input_image"):
    image_url: str


class _InputFile(msgspec.Struct, tag_field="type", tag="input_file"):
    filename: str
    file_data: str


_encode = msgspec.json.Encoder().encode
_roles = msgspec.json.Decoder(_Role)
_parts = msgspec.json.Decoder(_Part)
_files = msgspec.json.Decoder(Part)
_objects = msgspec.json.Decoder(dict[str, Raw])


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """What models differ in. `customs`: they know custom tools; `foreign`: their server knows items of other tools,
    which others are told of as of functions.
    """

    takes_images: bool = False
    developer_role: bool = False
    replay_reasoning: bool = False
    customs: bool = False
    foreign: bool = False
    takes_files: bool = True

    @property
    def name(self) -> str:
        flags = (
            self.takes_images,
            self.developer_role,
            self.replay_reasoning,
            self.customs,
            self.foreign,
            self.takes_files,
        )
        return f"responses/{VERSION}/" + "".join("y" if flag else "n" for flag in flags)


class ResponsesRenderer:
    """Writes conversations as items of the Responses API."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._name = dialect.name

    def input(self, segments: Sequence[Segment], origin: Origin) -> list[bytes]:
        """The inside of `input`, in pieces that a comma goes between; raises InvalidRequest for what cannot be shown to
        such a server.
        """

        def render(entries: Sequence[Entry], left: bytes) -> tuple[bytes, bytes]:
            return _Rendering(self._dialect, origin).render(entries), left

        return render_all(segments, f"{self._name}/{origin.mark}", render)[0]


class _Rendering:
    """The rendering of one segment."""

    def __init__(self, dialect: Dialect, origin: Origin) -> None:
        self._dialect = dialect
        self._origin = origin
        self._items: list[bytes] = []
        self._reasoning: list[bytes] = []  # is sent with what follows from it, or not at all
        self._results: list[bytes] = []  # of hosted calls, to follow all calls of their turn
        self._foreign: set[str] = set()  # calls of other tools that were told of
        self._hosted: set[str] = set()  # and of hosted ones
        self._turn = 0

    def render(self, entries: Sequence[Entry]) -> bytes:
        """Raises InvalidRequest."""
        try:
            answered = {_answered(entry) for entry in entries if entry.type.endswith("_output")}
            for entry in entries:
                self._take(entry, answered)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise InvalidRequest(f"An item cannot be read: {error}", param="input") from None
        self._end_turn()
        return b",".join(self._items)

    def _take(self, entry: Entry, answered: set[str | None]) -> None:
        if entry.turn != self._turn or entry.turn == 0:
            self._end_turn(keep_reasoning=entry.turn == self._turn)
            self._turn = entry.turn
        if entry.exchange is not None and self._is_told(entry.exchange):
            self._take_exchange(entry.exchange, answered)
            return
        match entry.type:
            case "message":
                self._take_message(entry)
            case "reasoning":
                self._take_reasoning(entry)
            case "function_call" | "custom_tool_call":
                self._take_call(entry, answered)
            case "function_call_output" | "custom_tool_call_output":
                self._take_output(entry)
            case "compaction":
                raise InvalidRequest(
                    "An item of type 'compaction' cannot be shown to this model.", param="input"
                )
            case _ if self._dialect.foreign:
                self._add(entry.raw)
            case _:
                self._take_foreign(entry, answered)

    def _add(self, item: bytes) -> None:
        """What the model made, or a client's; the reasoning before it goes with it."""
        self._items += self._reasoning
        self._reasoning.clear()
        self._items.append(item)

    def _end_turn(self, *, keep_reasoning: bool = False) -> None:
        self._items += self._results
        self._results.clear()
        if not keep_reasoning:
            self._reasoning.clear()

    # ---- items ------------------------------------------------------------------------------------------------

    def _take_message(self, entry: Entry) -> None:
        role = _roles.decode(entry.raw).role
        match role:
            case "assistant":
                said = msgspec.json.decode(entry.raw, type=_Said)
                text = spoken(said.content)
                if text:
                    self._add(_encode(_InputMessage("assistant", text, said.phase or UNSET)))
                return
            case "user" | "system":
                pass
            case "developer":
                role = "developer" if self._dialect.developer_role else "system"
            case other:
                raise InvalidRequest(f"A message cannot have the role {clean_name(other)!r}.", param="input")
        content = msgspec.json.decode(entry.raw, type=_Asked).content
        self._reasoning.clear()
        self._items.append(_encode(_InputMessage(role, self._shown(content, entry))))

    def _take_reasoning(self, entry: Entry) -> None:
        """Under seal to the model that made it; as text where the operator says so; else it is not sent."""
        reasoning = msgspec.json.decode(entry.raw, type=_Reasoning)
        summary = reasoning.summary or []
        opened = self._origin.open(reasoning.encrypted_content or "")
        texts = [part.text for part in reasoning.content or () if part.text]
        if opened is not None:
            their_id, sealed = opened
            self._reasoning.append(_encode(_SentReasoning(summary, id=their_id, encrypted_content=sealed)))
        elif texts and self._dialect.replay_reasoning:
            content = [_ReasoningText(text) for text in texts]
            self._reasoning.append(_encode(_SentReasoning(summary, id=entry.id or _NO_ID, content=content)))

    def _take_call(self, entry: Entry, answered: set[str | None]) -> None:
        call = msgspec.json.decode(entry.raw, type=_Call)
        if call.status in _CUT_OFF and call.call_id not in answered:
            self._reasoning.clear()
            return
        if (call.namespace or call.caller) and self._dialect.foreign:
            self._add(entry.raw)
        elif entry.type == "function_call":
            self._add(_encode(_FunctionCall(call.call_id, call.name, shown_arguments(call.arguments))))
        elif self._dialect.customs:
            self._add(_encode(_CustomCall(call.call_id, call.name, call.input)))
        else:
            arguments = _encode({"input": call.input}).decode()
            self._add(_encode(_FunctionCall(call.call_id, call.name, arguments)))

    def _take_output(self, entry: Entry) -> None:
        told = msgspec.json.decode(entry.raw, type=_Output)
        custom = entry.type == "custom_tool_call_output" and self._dialect.customs
        kind = _CustomOutput if custom else _FunctionOutput
        self._items.append(_encode(kind(told.call_id, self._shown(told.output, entry))))

    def _take_foreign(self, entry: Entry, answered: set[str | None]) -> None:
        match read_foreign(entry):
            case Call() as call if call.call_id in answered:
                self._foreign.add(call.call_id)
                arguments = shown_arguments(call.arguments)
                self._add(_encode(_FunctionCall(call.call_id, call.name, arguments)))
            case Result() as result if result.call_id in self._foreign:
                self._items.append(_encode(_FunctionOutput(result.call_id, result.text)))
            case ToolExchange() as exchange:
                self._take_exchange(exchange, answered)
            case _:
                pass

    def _shown(self, content: str | list[Raw] | None, entry: Entry) -> str | list[Raw]:
        """The parts as they are, but for files that are known here; raises InvalidRequest."""
        if content is None or isinstance(content, str):
            return content or ""
        files = iter(entry.attachments)
        return [self._part(raw, files) for raw in content]

    def _part(self, raw: Raw, files: Iterator[Attachment]) -> Raw:
        part = _parts.decode(raw)
        found = next(files, None) if is_file(part.type) else None
        if found is None or not found.name:
            return _checked(raw, part)
        if found.gone:
            return Raw(_encode(_InputText(note(found))))
        if part.type == "input_image":
            return _without_id(raw) if found.data is None else _without_id(raw, image_url=found.data)
        takes_files = (self._dialect.takes_files or found.given) and not found.too_large
        if part.file_data and takes_files:
            return _without_id(raw)
        match file_part(_files.decode(raw), found, takes_files=takes_files):
            case TextPart(text):
                return Raw(_encode(_InputText(text)))
            case FilePart(file):
                return Raw(_encode(_InputFile(file.filename, file.file_data)))
            case _:
                return raw

    def _is_told(self, exchange: ToolExchange) -> bool:
        """A result alone is told if its call was: as a function, that is, and not as its server's own."""
        return exchange.tells != "result" or exchange.call_id in self._hosted

    def _take_exchange(self, exchange: ToolExchange, answered: set[str | None]) -> None:
        if exchange.tells == "call" and exchange.call_id not in answered:
            return  # nobody can answer it any more
        if exchange.tells != "result":
            self._hosted.add(exchange.call_id)
            arguments = shown_arguments(exchange.arguments)
            self._add(_encode(_FunctionCall(exchange.call_id, exchange.name, arguments)))
        if exchange.tells == "call":
            return
        output: str | list[Raw] = exchange.output
        if exchange.images and self._dialect.takes_images:
            images = [Raw(_encode(_InputImage(url))) for url in exchange.images]
            output = [Raw(_encode(_InputText(exchange.output))), *images]
        self._results.append(_encode(_FunctionOutput(exchange.call_id, output)))


def _answered(entry: Entry) -> str | None:
    answer = msgspec.json.decode(entry.raw, type=_Answer)
    return answer.call_id or answer.id


def _checked(raw: Raw, part: _Part) -> Raw:
    """The part as it is; raises InvalidRequest for a file that only this server could know."""
    if part.file_id:
        raise InvalidRequest(
            f"The {clean_name(part.type)} with the file_id {clean_name(part.file_id)!r} cannot be shown to this "
            "model: its server takes files inline or by their address.",
            param="input",
        )
    return raw


def _without_id(raw: Raw, **instead: str) -> Raw:
    """The part with its content in place of an id that the server could not know."""
    fields = {name: value for name, value in _objects.decode(raw).items() if name != "file_id"}
    return Raw(_encode(fields | instead))
