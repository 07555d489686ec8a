"""A WebSocket client of the gateway, as raw as the library allows."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

from fumehood.protocol.openai.responses import Response
from fumehood.protocol.openai.stream_events import StreamEvent
from tests.support.scripted_gateway import ScriptedGateway, text_events

TIMEOUT = 30
TERMINAL_TYPES = ("response.completed", "response.incomplete", "response.failed")


@dataclass(frozen=True)
class WebSocketClient:
    """One connection."""

    raw: ClientConnection

    async def send(self, **message: Any) -> None:
        await self.raw.send(json.dumps(message))

    async def ask(self, **request: Any) -> None:
        """Send a request for a response that is not stored, unless it says otherwise."""
        await self.send(
            **{"type": "response.create", "model": "scripted", "input": "hi", "store": False, **request}
        )

    async def read_event(self) -> Any:
        async with asyncio.timeout(TIMEOUT):
            received = await self.raw.recv()
        assert isinstance(received, str)
        return json.loads(received)

    async def read_response(self) -> list[Any]:
        """All messages up to the end of a response, or the error that came instead."""
        events = [await self.read_event()]
        while events[-1]["type"] not in TERMINAL_TYPES and "status" not in events[-1]:
            events.append(await self.read_event())
        return events

    async def create_and_read(self, **request: Any) -> Any:
        """The response that a request made; nothing else came before its end."""
        await self.ask(**request)
        events = await self.read_response()
        assert [event["sequence_number"] for event in events] == [*range(len(events))]
        assert events[0]["type"] == "response.created"
        assert events[-1]["response"]["id"] == events[0]["response"]["id"]
        return events[-1]["response"]

    async def read_error(self, **request: Any) -> tuple[int, str, str | None]:
        """Status, code and parameter of the error that a request got."""
        await self.ask(**request)
        return error_of(await self.read_event())


def error_of(event: Any) -> tuple[int, str, str | None]:
    assert event["type"] == "error"
    assert set(event["error"]) == {"message", "type", "code", "param"}
    return event["status"], event["error"]["code"], event["error"]["param"]


@asynccontextmanager
async def connect_websocket(port: int, **options: Any) -> AsyncGenerator[WebSocketClient]:
    """Until the block is left; `options` are those of the library's `connect`."""
    async with connect(f"ws://127.0.0.1:{port}/v1/responses", max_size=None, **options) as raw:
        yield WebSocketClient(raw)


@asynccontextmanager
async def open_socket(gateway: ScriptedGateway, **options: Any) -> AsyncGenerator[WebSocketClient]:
    async with connect_websocket(gateway.port, **options) as socket:
        yield socket


def first_events(response: Response) -> list[list[StreamEvent]]:
    """A run that says nothing more by itself."""
    return [text_events(response)[:2]]


async def wait_until_running(gateway: ScriptedGateway, number: int = 1) -> None:
    async with asyncio.timeout(TIMEOUT):
        while len(gateway.runs.runs) < number:
            await asyncio.sleep(0.001)
