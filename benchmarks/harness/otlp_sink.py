"""A receiver of telemetry that throws everything away.

`python -m benchmarks.harness.otlp_sink` prints its address and serves until it is ended.
"""

import asyncio
import contextlib
import socket

_ACCEPTED = b"HTTP/1.1 200 OK\r\ncontent-type: application/x-protobuf\r\ncontent-length: 0\r\n\r\n"


async def _discard_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError), contextlib.closing(writer):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = head.lower().partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0]
            await reader.readexactly(int(length))
            writer.write(_ACCEPTED)


async def _serve() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    server = await asyncio.start_server(_discard_request, sock=listening)
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    await server.serve_forever()


def main() -> None:
    import uvloop

    uvloop.run(_serve())


if __name__ == "__main__":
    main()
