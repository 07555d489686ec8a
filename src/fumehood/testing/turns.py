"""A store under test, and responses to put into it; imports msgspec, `interfaces`, `protocol`."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from fumehood.interfaces import Lease, Store
from fumehood.protocol.conversation import Entry, Segment, ToolExchange
from fumehood.protocol.ids import new_id
from fumehood.protocol.items import Message, OutputItem, OutputText
from fumehood.protocol.responses import Response


def said(text: str) -> Entry:
    """A message of a user's."""
    raw = msgspec.json.encode({"type": "message", "role": "user", "content": text})
    return Entry(type="message", id=new_id("msg"), turn=0, raw=raw)


def made(item: OutputItem, turn: int = 1, exchange: ToolExchange | None = None) -> Entry:
    """An item of the model's."""
    raw = msgspec.json.encode(item)
    tag = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    kind, item_id = (msgspec.json.decode(tag[name], type=str) for name in ("type", "id"))
    return Entry(type=kind, id=item_id, turn=turn, raw=raw, exchange=exchange)


def answered(text: str) -> Message:
    return Message(id=new_id("msg"), status="completed", content=[OutputText(text=text)])


@dataclass(slots=True)
class Turn:
    """A response with its entries, on its way into a store."""

    store: Store
    tenant: str
    response: Response
    entries: list[Entry] = field(default_factory=list[Entry])

    async def begin(self) -> Lease:
        return await self.store.begin(self.tenant, self.response)

    async def end(self, lease: Lease) -> Response:
        self.response.status = "completed"
        self.response.completed_at = self.response.created_at + 1
        await self.store.commit(lease, self.tenant, self.response, self.entries)
        return self.response


def turn(
    store: Store,
    text: str = "hello",
    *,
    after: Response | None = None,
    tenant: str = "tenant",
    output: Sequence[OutputItem] | None = None,
) -> Turn:
    """One that says the text and is answered with the same in capitals, or with these items."""
    items: list[OutputItem] = [answered(text.upper())] if output is None else list(output)
    response = Response(
        id=new_id("resp"),
        created_at=1_700_000_000,
        model="kit",
        previous_response_id=after.id if after else None,
        output=items,
    )
    return Turn(store, tenant, response, [said(text), *(made(item) for item in items)])


async def stored(
    store: Store,
    text: str = "hello",
    *,
    after: Response | None = None,
    tenant: str = "tenant",
    output: Sequence[OutputItem] | None = None,
) -> Response:
    """The same, done."""
    one = turn(store, text, after=after, tenant=tenant, output=output)
    return await one.end(await one.begin())


# --- what a test asks ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoreSubject:
    """The implementation under test, empty at first.

    lapse: lets all leases that were given until now run out.
    another: the same data as another process sees them, where there may be one.
    """

    store: Store
    lapse: Callable[[], Awaitable[None]]
    another: Store | None = None


async def segments(store: Store, response: Response) -> list[Segment]:
    found = await store.conversation("tenant", response.id)
    assert found is not None
    return list(found)


def texts(conversation: Sequence[Segment] | None) -> list[str] | None:
    """What was said, one for each segment."""
    if conversation is None:
        return None
    said: list[str] = []
    for segment in conversation:
        assert segment.entries, "an empty segment"
        said.append(msgspec.json.decode(segment.entries[0].raw)["content"])
    return said


def same(one: Response | None, other: Response) -> None:
    assert one is not None
    assert msgspec.json.encode(one) == msgspec.json.encode(other)


async def kept(store: Store, entries: Sequence[Entry]) -> list[Entry]:
    """Those of them that can still be found."""
    found = await store.entries("tenant", [entry.id for entry in entries if entry.id])
    return [found[entry.id] for entry in entries if entry.id in found]
