"""What a response stands on: the conversation before it and the items of its request; imports `interfaces`."""

from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta, Raw

from fumehood.aside import ITEM, LARGE, aside
from fumehood.interfaces import Caller, HostedTool, Store, TakeRoom
from fumehood.protocol.conversation import COMPACTION, Entry, Segment, size_of
from fumehood.protocol.errors import InvalidRequest, PreviousNotFound
from fumehood.protocol.ids import new_id, new_item_id
from fumehood.protocol.items import Item, peek
from fumehood.protocol.responses import CreateResponse

_MOST_ITEMS = 10_000
_MOST_BYTES = 128 << 20  # of a conversation; a body is small, but what it refers to may be large, and often
_CALLS = {"function_call": "function_call_output", "custom_tool_call": "custom_tool_call_output"}
_OUTPUTS = frozenset(_CALLS.values())
_LOOKED_UP = frozenset({"item_reference", "reasoning"})


class _CallTag(msgspec.Struct):
    call_id: Annotated[str, Meta(min_length=1, max_length=256)]
    status: str | None = None


_call_tags = msgspec.json.Decoder(_CallTag)


class History:
    """Finds what a request stands on: its conversation and its items.

    `tools`: the hosted ones, each under every type of item that it makes.
    """

    def __init__(self, store: Store, tools: Mapping[str, HostedTool]) -> None:
        self._store = store
        self._tools = tools

    async def past(self, request: CreateResponse, caller: Caller) -> Sequence[Segment]:
        """The conversation that the request continues; raises PreviousNotFound."""
        previous = request.previous_response_id
        if previous is None:
            return ()
        segments = await self._store.conversation(caller.tenant, previous)
        if segments is None:
            raise PreviousNotFound(
                f"Previous response with id '{previous}' not found.", param="previous_response_id"
            )
        return segments

    async def input(
        self,
        request: CreateResponse,
        caller: Caller,
        past: Sequence[Segment],
        take: TakeRoom | None = None,
    ) -> tuple[Entry, ...]:
        """The items of the request, references resolved; raises InvalidRequest, and what `take` raises, which is told
        of those that are referred to.
        """
        if request.input is None and not past and request.generate is not False:
            raise InvalidRequest(
                "Missing required parameter: 'input'.", param="input", code="missing_required_parameter"
            )
        if isinstance(request.input, str):
            message = await aside(len(request.input), _user_message, request.input)
            check_size((message,), past)
            return (message,)
        raws = request.input or []
        if len(raws) > _MOST_ITEMS:
            raise InvalidRequest(f"At most {_MOST_ITEMS} items can be given.", param="input")
        size = sum([ITEM + len(raw) for raw in raws])
        items = await aside(size, _peeked, raws)
        kept = await self._kept(items, caller)
        take_large(take, sum([entry.size for entry in kept.values()]))
        return await aside(size, self._entries, items, kept, past)

    async def _kept(self, items: Sequence[Item], caller: Caller) -> Mapping[str, Entry]:
        """What the store knows of items that are referred to, or whose results the client may have left out."""
        ids = [item.id for item in items if item.id and (item.type in _LOOKED_UP or item.type in self._tools)]
        return await self._store.entries(caller.tenant, ids) if ids else {}

    def _entries(
        self, items: Sequence[Item], kept: Mapping[str, Entry], past: Sequence[Segment]
    ) -> tuple[Entry, ...]:
        entries = tuple([self._entry(item, kept, f"input[{number}]") for number, item in enumerate(items)])
        check_size(entries, past)
        cut = max((n for n, entry in enumerate(entries, 1) if entry.type == COMPACTION), default=0)
        _check_calls(entries, () if cut else past, cut)
        return entries

    def _entry(self, item: Item, kept: Mapping[str, Entry], where: str) -> Entry:
        known = kept.get(item.id) if item.id else None
        if item.type == "item_reference":
            if item.id is None:
                raise InvalidRequest(f"{where}: an item_reference needs an id.", param=where)
            if known is None:
                raise InvalidRequest(f"Item with id '{item.id}' not found.", param=where)
            return msgspec.structs.replace(known, turn=0)
        if item.type == "reasoning" and known is not None and known.type == item.type:
            # With what was sealed, which clients seldom ask for.
            return msgspec.structs.replace(known, turn=0)
        identity = item.id or new_item_id(item.type)
        entry = Entry(type=item.type, id=identity, turn=0, raw=item.raw)
        tool = self._tools.get(item.type)
        if tool is None:
            return entry
        exchange = known.exchange if known is not None and known.exchange else tool.recall(entry)
        return msgspec.structs.replace(entry, exchange=exchange)


def _peeked(raws: Sequence[Raw]) -> list[Item]:
    return [peek(raw, f"input[{number}]") for number, raw in enumerate(raws)]


class _InputText(msgspec.Struct, tag_field="type", tag="input_text"):
    text: str


class _UserMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: str = "user"
    status: str = "completed"
    content: list[_InputText]


def _user_message(text: str) -> Entry:
    message = _UserMessage(id=new_id("msg"), content=[_InputText(text)])
    return Entry(type="message", id=message.id, turn=0, raw=msgspec.json.encode(message))


def take_large(take: TakeRoom | None, size: int) -> None:
    """Tell of what the store was read for. What is small takes no more than any request may."""
    if take is not None and size >= LARGE:
        take(size)


def check_size(entries: Sequence[Entry], past: Sequence[Segment]) -> None:
    """Raises InvalidRequest. An item counts as often as it is referred to: the model is shown it as often."""
    size = sum([entry.size for entry in entries]) + size_of(past)
    if size > _MOST_BYTES:
        raise InvalidRequest(
            f"The input, with the items that it refers to and the conversation before it, is {size:,} bytes;"
            f" at most {_MOST_BYTES:,} can be served. Refer to less, or begin a new conversation.",
            param="input",
        )


def _check_calls(entries: Sequence[Entry], past: Sequence[Segment], cut: int = 0) -> None:
    """Every result belongs to a call, and every call of the last turn has its result.

    cut: how many of the entries a compaction stands for.
    """
    newest = past[-1].entries if past else ()
    shown = list(enumerate(entries))[cut:]
    results = {_call_id(entry, number) for number, entry in shown if entry.type in _OUTPUTS}
    calls = {_call_id(entry, number) for number, entry in shown if entry.type in _CALLS}
    # One that was cut off is no call: nobody can answer it, and the model is not shown it.
    cut_off = {_call_id(entry) for entry in newest if entry.type in _CALLS and _is_cut_off(entry)}
    calls |= {_call_id(entry) for entry in newest if entry.type in _CALLS and not _is_cut_off(entry)}
    answered = {_call_id(entry) for entry in newest if entry.type in _OUTPUTS}
    missing = calls - results - answered
    if missing:
        raise InvalidRequest(f"No tool output found for function call {min(missing)}.", param="input")
    strangers = results - calls
    if vain := strangers & cut_off:
        raise InvalidRequest(
            f"Function call {min(vain)} was cut off, so it cannot be answered: leave its output out.",
            param="input",
        )
    if strangers:
        strangers -= {
            _call_id(entry) for segment in past for entry in segment.entries if entry.type in _CALLS
        }
    if strangers:
        raise InvalidRequest(
            f"No tool call found for function call output with call_id {min(strangers)}.", param="input"
        )


def _is_cut_off(entry: Entry) -> bool:
    return _call_tags.decode(entry.raw).status == "incomplete"


def _call_id(entry: Entry, number: int | None = None) -> str:
    try:
        return _call_tags.decode(entry.raw).call_id
    except msgspec.ValidationError as error:
        where = "input" if number is None else f"input[{number}]"
        raise InvalidRequest(f"{where}: {error}", param=where) from None
