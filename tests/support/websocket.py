"""A client of the gateway's WebSocket, as raw as the library allows; imports websockets and a sibling."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

from fumehood.protocol.events import StreamEvent
from fumehood.protocol.responses import Response
from tests.support.gateway import Served, text_events

PATIENCE = 30
ENDS = ("response.completed", "response.incomplete", "response.failed")


@dataclass(frozen=True)
class Socket:
    """One connection."""

    raw: ClientConnection

    async def send(self, **message: Any) -> None:
        await self.raw.send(json.dumps(message))

    async def ask(self, **request: Any) -> None:
        """Send a request for a response that is not stored, unless it says otherwise."""
        await self.send(
            **{"type": "response.create", "model": "scripted", "input": "hi", "store": False, **request}
        )

    async def next(self) -> Any:
        async with asyncio.timeout(PATIENCE):
            received = await self.raw.recv()
        assert isinstance(received, str)
        return json.loads(received)

    async def answer(self) -> list[Any]:
        """All messages up to the end of a response, or the error that came instead."""
        events = [await self.next()]
        while events[-1]["type"] not in ENDS and "status" not in events[-1]:
            events.append(await self.next())
        return events

    async def turn(self, **request: Any) -> Any:
        """The response that a request made; nothing else came before its end."""
        await self.ask(**request)
        events = await self.answer()
        assert [event["sequence_number"] for event in events] == [*range(len(events))]
        assert events[0]["type"] == "response.created"
        assert events[-1]["response"]["id"] == events[0]["response"]["id"]
        return events[-1]["response"]

    async def refusal(self, **request: Any) -> tuple[int, str, str | None]:
        """Status, code and parameter of the error that a request got."""
        await self.ask(**request)
        return refused(await self.next())


def refused(event: Any) -> tuple[int, str, str | None]:
    assert event["type"] == "error"
    assert set(event["error"]) == {"message", "type", "code", "param"}
    return event["status"], event["error"]["code"], event["error"]["param"]


@asynccontextmanager
async def connected(port: int, **options: Any) -> AsyncGenerator[Socket]:
    """Until the block is left; `options` are those of the library's `connect`."""
    async with connect(f"ws://127.0.0.1:{port}/v1/responses", max_size=None, **options) as raw:
        yield Socket(raw)


@asynccontextmanager
async def opened(gateway: Served, **options: Any) -> AsyncGenerator[Socket]:
    async with connected(gateway.port, **options) as socket:
        yield socket


def beginning(response: Response) -> list[list[StreamEvent]]:
    """A run that says nothing more by itself."""
    return [text_events(response)[:2]]


async def until_running(gateway: Served, number: int = 1) -> None:
    async with asyncio.timeout(PATIENCE):
        while len(gateway.runs.runs) < number:
            await asyncio.sleep(0.001)
