"""The benchmark's HTTP client, with responses split anywhere."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import pytest

from benchmarks.harness.raw_http_client import RawHttpClient

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\nc\r\n, twelve mor\r\n0\r\n\r\n"
PLAIN = b"HTTP/1.1 201 Created\r\nContent-Length: 4\r\n\r\nbody"
EMPTY = b"HTTP/1.1 204 No Content\r\n\r\n"


@asynccontextmanager
async def _serving(answers: list[list[bytes]]) -> AsyncGenerator[tuple[RawHttpClient, list[bytes]]]:
    """Answers requests in order, each answer in the pieces given; what was asked ends up in the list."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while answers:
            try:
                asked.append(await reader.readuntil(b"\r\n\r\n"))
            except asyncio.IncompleteReadError:
                break
            for piece in answers.pop(0):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = RawHttpClient(port=server.sockets[0].getsockname()[1], token="t0ken")
    async with server:
        try:
            yield client, asked
        finally:
            client.close()


def _bytewise(answer: bytes) -> list[bytes]:
    return [bytes([byte]) for byte in answer]


def _whole(answer: bytes) -> list[bytes]:
    return [answer]


@pytest.mark.parametrize("cut", [_whole, _bytewise])
async def test_answers_of_every_form_on_one_connection(cut: Callable[[bytes], list[bytes]]) -> None:
    async with _serving([cut(CHUNKED), cut(EMPTY), cut(PLAIN)]) as (client, asked):
        pieces: list[bytes] = []
        streamed = await client.request("POST", "/a", b"", pieces.append)
        empty = await client.request("DELETE", "/b")
        plain = await client.request("PUT", "/c")
    assert (streamed.status, bytes(streamed.body)) == (200, b"hello, twelve mor")
    assert pieces == [b"hello", b", twelve mor"]
    assert (empty.status, bytes(empty.body)) == (204, b"")
    assert (plain.status, bytes(plain.body)) == (201, b"body")
    assert [request.split(b"\r\n")[0] for request in asked] == [
        b"POST /a HTTP/1.1",
        b"DELETE /b HTTP/1.1",
        b"PUT /c HTTP/1.1",
    ]
    assert all(b"authorization: Bearer t0ken\r\n" in request for request in asked)


async def test_a_connection_that_closes_in_the_middle_is_an_error() -> None:
    async with _serving([[PLAIN[:-2]]]) as (client, _):
        with pytest.raises(ConnectionResetError):
            await client.request("GET", "/")
