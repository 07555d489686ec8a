"""Parses server-sent events strictly."""

import asyncio
import json
from typing import Any


def parse_events(body: bytes) -> list[tuple[str, Any]]:
    """Read a stream strictly: every event has two lines and a blank one, and nothing else is there but comments."""
    blocks = body.split(b"\n\n")
    assert blocks.pop() == b""
    assert blocks.pop() == b"data: [DONE]"
    found: list[tuple[str, Any]] = []
    for block in blocks:
        if block.startswith(b":"):
            assert b"\n" not in block
            continue
        event, data = block.split(b"\n")
        assert event.startswith(b"event: ")
        assert data.startswith(b"data: ")
        value = json.loads(data[6:])
        assert value["type"] == event[7:].decode()
        found.append((value["type"], value))
    return found


def iter_chunks(raw: bytes) -> list[bytes]:
    """The writes of a chunked answer."""
    found: list[bytes] = []
    place = 0
    while place < len(raw):
        line = raw.index(b"\r\n", place)
        end = line + 2 + int(raw[place:line], 16)
        found.append(raw[line + 2 : end])
        assert raw[end : end + 2] == b"\r\n"
        place = end + 2
    assert found.pop() == b""
    return found


async def read_head(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n\r\n")


async def read_body(reader: asyncio.StreamReader) -> list[bytes]:
    """The writes of the answer."""
    return iter_chunks(await reader.readuntil(b"0\r\n\r\n"))
