"""Loads the conversation before a request, and turns the items of the request into entries."""

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta, Raw

from fumehood.cpu_worker import ITEM_COST_BYTES, WORKER_THRESHOLD_BYTES, run_in_worker
from fumehood.engine.reasoning_sealer import ReasoningSealer, read_encrypted_content
from fumehood.interfaces import Caller, ConversationStore, HostedTool, ReserveMemory
from fumehood.protocol.conversation import (
    COMPACTION_TYPE,
    CallIdIndex,
    ConversationEntry,
    ConversationSegment,
    conversation_size,
    read_call_id,
)
from fumehood.protocol.openai.api_errors import InvalidRequest, PreviousResponseNotFound
from fumehood.protocol.openai.client_tools_as_functions import (
    CLIENT_TOOL_BY_ITEM,
    complete_call_ids,
    read_client_call,
)
from fumehood.protocol.openai.ids import new_id, new_item_id
from fumehood.protocol.openai.items import InputItem, InputText, peek_item
from fumehood.protocol.openai.responses import CreateResponse

_MAX_ITEMS = 10_000
_MAX_BYTES = 128 << 20  # of a conversation; a small body can reference large items, and repeatedly
_OUTPUT_TYPE_BY_CALL = {
    "function_call": "function_call_output",
    "custom_tool_call": "custom_tool_call_output",
}
_OUTPUT_TYPES = frozenset(_OUTPUT_TYPE_BY_CALL.values())
_MAX_CALL_ID_STEM = 48  # characters of an id that are kept when a number is added
_STORED_TYPES = frozenset({"item_reference", "reasoning"})


class _CallTag(msgspec.Struct):
    call_id: Annotated[str, Meta(min_length=1, max_length=256)]
    status: str | None = None


_call_tag_decoder = msgspec.json.Decoder(_CallTag)
_fields_decoder = msgspec.json.Decoder(dict[str, Raw])


class ConversationLoader:
    """Loads conversations and input items.

    tools: hosted tools by each item type that they make.
    """

    def __init__(
        self, store: ConversationStore, tools: Mapping[str, HostedTool], reasoning_sealer: ReasoningSealer
    ) -> None:
        self._store = store
        self._tools = tools
        self._reasoning_sealer = reasoning_sealer

    async def load_past(self, request: CreateResponse, caller: Caller) -> Sequence[ConversationSegment]:
        """Load the conversation that the request continues. Raises PreviousResponseNotFound."""
        previous = request.previous_response_id
        if previous is None:
            return ()
        segments = await self._store.get_conversation(caller.tenant, previous)
        if segments is None:
            raise PreviousResponseNotFound(
                f"Previous response with id '{previous}' not found.", param="previous_response_id"
            )
        return segments

    async def load_input(
        self,
        request: CreateResponse,
        caller: Caller,
        past: Sequence[ConversationSegment],
        reserve_memory: ReserveMemory | None = None,
    ) -> tuple[ConversationEntry, ...]:
        """Load the items of the request with their references resolved.

        Raises InvalidRequest, and what `reserve_memory` raises for the referenced items.
        """
        if request.input is None and not past and request.generate is not False:
            raise InvalidRequest(
                "Missing required parameter: 'input'.", param="input", code="missing_required_parameter"
            )
        if isinstance(request.input, str):
            message = await run_in_worker(len(request.input), _make_user_message, request.input)
            check_size((message,), past)
            return (message,)
        raws = request.input or []
        if len(raws) > _MAX_ITEMS:
            raise InvalidRequest(f"At most {_MAX_ITEMS} items can be given.", param="input")
        size = sum([ITEM_COST_BYTES + len(raw) for raw in raws])
        items = await run_in_worker(size, _peek_items, raws)
        stored = await self._load_referenced(items, caller)
        reserve_if_large(reserve_memory, sum([entry.size for entry in stored.values()]))
        return await run_in_worker(size, self._build_entries, items, stored, past, caller)

    async def _load_referenced(
        self, items: Sequence[InputItem], caller: Caller
    ) -> Mapping[str, ConversationEntry]:
        """Load the stored form of referenced items, reasoning, and hosted calls, whose results a client may omit."""
        ids = [
            item.id for item in items if item.id and (item.type in _STORED_TYPES or item.type in self._tools)
        ]
        return await self._store.find_items(caller.tenant, ids) if ids else {}

    def _build_entries(
        self,
        items: Sequence[InputItem],
        stored: Mapping[str, ConversationEntry],
        past: Sequence[ConversationSegment],
        caller: Caller,
    ) -> tuple[ConversationEntry, ...]:
        items = complete_call_ids(items, past[-1].entries if past else ())
        entries = tuple(
            [self._build_entry(item, stored, caller, f"input[{number}]") for number, item in enumerate(items)]
        )
        entries = _rename_repeated_calls(entries, past)
        check_size(entries, past)
        compacted = max((n for n, entry in enumerate(entries, 1) if entry.type == COMPACTION_TYPE), default=0)
        _check_call_outputs(entries, () if compacted else past, compacted)
        return entries

    def _build_entry(
        self, item: InputItem, stored: Mapping[str, ConversationEntry], caller: Caller, where: str
    ) -> ConversationEntry:
        known = stored.get(item.id) if item.id else None
        if item.type == "item_reference":
            if item.id is None:
                raise InvalidRequest(f"{where}: an item_reference needs an id.", param=where)
            if known is None:
                raise InvalidRequest(f"Item with id '{item.id}' not found.", param=where)
            return msgspec.structs.replace(known, turn=0)
        identity = item.id or new_item_id(item.type)
        entry = ConversationEntry(type=item.type, id=identity, turn=0, raw=item.raw)
        if item.type == "reasoning":
            return self._build_reasoning_entry(entry, known, caller, where)
        tool = self._tools.get(item.type)
        if tool is None:
            return entry
        exchange = known.exchange if known is not None and known.exchange else tool.rebuild_exchange(entry)
        return msgspec.structs.replace(entry, exchange=exchange)

    def _build_reasoning_entry(
        self, entry: ConversationEntry, known: ConversationEntry | None, caller: Caller, where: str
    ) -> ConversationEntry:
        """Prefer the stored item: it has the text and the encrypted content, which clients seldom send back."""
        if known is not None and known.type == entry.type:
            with contextlib.suppress(msgspec.ValidationError):
                if read_encrypted_content(entry) in (None, "", read_encrypted_content(known)):
                    return msgspec.structs.replace(known, turn=0)
        return self._reasoning_sealer.open_entry(caller.tenant, entry, where)


def _peek_items(raws: Sequence[Raw]) -> list[InputItem]:
    return [peek_item(raw, f"input[{number}]") for number, raw in enumerate(raws)]


class _UserMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: str = "user"
    status: str = "completed"
    content: list[InputText]


def _make_user_message(text: str) -> ConversationEntry:
    message = _UserMessage(id=new_id("msg"), content=[InputText(text)])
    return ConversationEntry(type="message", id=message.id, turn=0, raw=msgspec.json.encode(message))


def reserve_if_large(reserve_memory: ReserveMemory | None, size: int) -> None:
    """Reserve memory for stored content; small amounts are covered by the request's own reservation."""
    if reserve_memory is not None and size >= WORKER_THRESHOLD_BYTES:
        reserve_memory(size)


def check_size(entries: Sequence[ConversationEntry], past: Sequence[ConversationSegment]) -> None:
    """Raises InvalidRequest if the conversation is too large. Each reference to an item counts: the model sees each."""
    size = sum([entry.size for entry in entries]) + conversation_size(past)
    if size > _MAX_BYTES:
        raise InvalidRequest(
            f"The input, with the items that it refers to and the conversation before it, is {size:,} bytes;"
            f" at most {_MAX_BYTES:,} can be served. Refer to less, or begin a new conversation.",
            param="input",
        )


def _check_call_outputs(
    entries: Sequence[ConversationEntry], past: Sequence[ConversationSegment], compacted_count: int = 0
) -> None:
    """Check that every output belongs to a call, and that every call of the last turn has its output.

    compacted_count: the number of entries that a compaction replaces. Raises InvalidRequest.
    """
    newest = past[-1].entries if past else ()
    visible = list(enumerate(entries))[compacted_count:]
    outputs = {_read_call_id(entry, number) for number, entry in visible if entry.type in _OUTPUT_TYPES}
    calls = {_read_call_id(entry, number) for number, entry in visible if entry.type in _OUTPUT_TYPE_BY_CALL}
    # An incomplete call cannot be answered, and the model does not see it.
    incomplete = {
        _read_call_id(entry)
        for entry in newest
        if entry.type in _OUTPUT_TYPE_BY_CALL and _is_incomplete(entry)
    }
    calls |= {
        _read_call_id(entry)
        for entry in newest
        if entry.type in _OUTPUT_TYPE_BY_CALL and not _is_incomplete(entry)
    }
    answered = {_read_call_id(entry) for entry in newest if entry.type in _OUTPUT_TYPES}
    missing = calls - outputs - answered | _find_unanswered_client_calls(newest, visible)
    if missing:
        raise InvalidRequest(f"No tool output found for function call {min(missing)}.", param="input")
    unmatched = outputs - calls
    if rejected := unmatched & incomplete:
        raise InvalidRequest(
            f"Function call {min(rejected)} was cut off, so it cannot be answered: leave its output out.",
            param="input",
        )
    if unmatched:
        unmatched -= {
            _read_call_id(entry)
            for segment in past
            for entry in segment.entries
            if entry.type in _OUTPUT_TYPE_BY_CALL
        }
    if unmatched:
        raise InvalidRequest(
            f"No tool call found for function call output with call_id {min(unmatched)}.", param="input"
        )


def _find_unanswered_client_calls(
    newest: Sequence[ConversationEntry], visible: Sequence[tuple[int, ConversationEntry]]
) -> set[str]:
    """The calls of the last response that the client runs as a shell or patch, and that the input does not answer."""
    awaited: set[str] = set()
    for entry in newest:
        if entry.turn and entry.exchange is None and entry.type in CLIENT_TOOL_BY_ITEM:
            call = read_client_call(entry.type, entry.raw)
            if call is not None and call.is_awaited:
                awaited.add(call.call_id)
    return awaited and awaited - {
        read_call_id(entry) for _, entry in visible if entry.type.endswith("_call_output")
    }


def _rename_repeated_calls(
    entries: tuple[ConversationEntry, ...], past: Sequence[ConversationSegment]
) -> tuple[ConversationEntry, ...]:
    """Give every call an id of its own, and its output the same one.

    Some servers number the calls of each turn anew, and their clients send all turns back. An output belongs to the
    first call of its id that has none yet. The new ids depend on the conversation alone, so that the model server's
    prompt cache stays valid.
    """
    if not any(entry.exchange is not None or entry.type.endswith("_call") for entry in entries):
        return entries
    used, past_ids = set[str](), CallIdIndex(past)
    counts = dict[str, int]()
    unanswered = dict[str, deque[str]]()
    renamed: list[ConversationEntry] = []
    for entry in entries:
        call_id = unique_id = read_call_id(entry)
        if call_id is not None and unique_id is not None:
            if _is_call_output(entry):
                unique_id = unanswered[call_id].popleft() if unanswered.get(call_id) else call_id
            else:
                while unique_id in used or unique_id in past_ids:
                    counts[call_id] = counts.get(call_id, 1) + 1
                    unique_id = f"{call_id[:_MAX_CALL_ID_STEM]}_{counts[call_id]}"
                used.add(unique_id)
                unanswered.setdefault(call_id, deque()).append(unique_id)
            if unique_id != call_id:
                entry = _replace_call_id(entry, unique_id)
        renamed.append(entry)
    return tuple(renamed)


def _is_call_output(entry: ConversationEntry) -> bool:
    return entry.type.endswith("_output") if entry.exchange is None else entry.exchange.half == "result"


def _replace_call_id(entry: ConversationEntry, call_id: str) -> ConversationEntry:
    fields = _fields_decoder.decode(entry.raw)
    if "call_id" in fields:
        fields["call_id"] = Raw(msgspec.json.encode(call_id))
    exchange = entry.exchange and msgspec.structs.replace(entry.exchange, call_id=call_id)
    return msgspec.structs.replace(entry, raw=msgspec.json.encode(fields), exchange=exchange)


def _is_incomplete(entry: ConversationEntry) -> bool:
    return _call_tag_decoder.decode(entry.raw).status == "incomplete"


def _read_call_id(entry: ConversationEntry, number: int | None = None) -> str:
    try:
        return _call_tag_decoder.decode(entry.raw).call_id
    except msgspec.ValidationError as error:
        where = "input" if number is None else f"input[{number}]"
        raise InvalidRequest(f"{where}: {error}", param=where) from None
