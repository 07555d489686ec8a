"""The store under test, and responses to store."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import pytest

from fumehood.interfaces import ResponseLease, Store
from fumehood.protocol.conversation import ConversationEntry, ConversationSegment, ToolExchange
from fumehood.protocol.openai.container_objects import ContainerRecord
from fumehood.protocol.openai.file_objects import UploadedFileRecord
from fumehood.protocol.openai.ids import new_id
from fumehood.protocol.openai.items import OutputItem, OutputMessage, OutputText
from fumehood.protocol.openai.pagination import PageQuery
from fumehood.protocol.openai.responses import Response


def make_user_item(text: str) -> ConversationEntry:
    """Return a user message as an entry."""
    raw = msgspec.json.encode({"type": "message", "role": "user", "content": text})
    return ConversationEntry(type="message", id=new_id("msg"), turn=0, raw=raw)


def make_model_item(
    item: OutputItem, turn: int = 1, exchange: ToolExchange | None = None
) -> ConversationEntry:
    """Return an output item as an entry."""
    raw = msgspec.json.encode(item)
    tag = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    kind, item_id = (msgspec.json.decode(tag[name], type=str) for name in ("type", "id"))
    return ConversationEntry(type=kind, id=item_id, turn=turn, raw=raw, exchange=exchange)


def make_assistant_message(text: str) -> OutputMessage:
    return OutputMessage(id=new_id("msg"), status="completed", content=[OutputText(text=text)])


@dataclass(slots=True)
class UnstoredResponse:
    """A response with its entries, to be stored."""

    store: Store
    tenant: str
    response: Response
    entries: list[ConversationEntry] = field(default_factory=list[ConversationEntry])

    async def begin(self) -> ResponseLease:
        return await self.store.begin_response(self.tenant, self.response)

    async def complete(self, lease: ResponseLease) -> Response:
        self.response.status = "completed"
        self.response.completed_at = self.response.created_at + 1
        await self.store.commit_response(lease, self.tenant, self.response, self.entries)
        return self.response


def make_response(
    store: Store,
    text: str = "hello",
    *,
    after: Response | None = None,
    tenant: str = "tenant",
    output: Sequence[OutputItem] | None = None,
) -> UnstoredResponse:
    """Return a response to the text. Its output is the text in capitals, or the given items."""
    items: list[OutputItem] = [make_assistant_message(text.upper())] if output is None else list(output)
    response = Response(
        id=new_id("resp"),
        created_at=1_700_000_000,
        model="kit",
        previous_response_id=after.id if after else None,
        output=items,
    )
    return UnstoredResponse(
        store, tenant, response, [make_user_item(text), *(make_model_item(item) for item in items)]
    )


async def store_response(
    store: Store,
    text: str = "hello",
    *,
    after: Response | None = None,
    tenant: str = "tenant",
    output: Sequence[OutputItem] | None = None,
) -> Response:
    """Store what `make_response` returns."""
    pending = make_response(store, text, after=after, tenant=tenant, output=output)
    return await pending.complete(await pending.begin())


# --- helpers of tests ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoreSubject:
    """The implementation under test, empty at first.

    expire_leases: makes all leases expire.
    second_store: the same data as a second process sees them, if processes may share the store.
    """

    store: Store
    expire_leases: Callable[[], Awaitable[None]]
    second_store: Store | None = None


class StoreFixture:
    """Gives the tests of a kit the store of its `subject`."""

    @pytest.fixture
    def store(self, subject: StoreSubject) -> Store:
        return subject.store


async def load_response(store: Store, response_id: str) -> Response:
    found = await store.get_response("tenant", response_id)
    assert found is not None
    return found


async def load_pages[Record: (UploadedFileRecord, ContainerRecord)](
    load_page: Callable[[PageQuery], Awaitable[Sequence[Record]]], *, newest_first: bool
) -> list[Record]:
    """Return all records of a list, page by page. Fails if a page has more than its limit and one."""
    limit = 3
    found: list[Record] = []
    while True:
        after = found[-1].id if found else None
        page = await load_page(PageQuery(limit=limit, after=after, newest_first=newest_first))
        assert len(page) <= limit + 1
        found += page[:limit]
        if len(page) <= limit:
            return found


async def load_segments(store: Store, response: Response) -> list[ConversationSegment]:
    found = await store.get_conversation("tenant", response.id)
    assert found is not None
    return list(found)


def list_user_texts(conversation: Sequence[ConversationSegment] | None) -> list[str] | None:
    """Return the first user text of each segment."""
    if conversation is None:
        return None
    texts: list[str] = []
    for segment in conversation:
        assert segment.entries, "an empty segment"
        texts.append(msgspec.json.decode(segment.entries[0].raw)["content"])
    return texts


def assert_same_response(found: Response | None, expected: Response) -> None:
    assert msgspec.json.encode(found) == msgspec.json.encode(expected)


async def find_stored_items(store: Store, entries: Sequence[ConversationEntry]) -> list[ConversationEntry]:
    """Return those entries that the store still finds by id."""
    found = await store.find_items("tenant", [entry.id for entry in entries if entry.id])
    return [found[entry.id] for entry in entries if entry.id in found]
