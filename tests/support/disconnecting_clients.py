"""Clients that leave at any point of what they began, by a seed.

Each is one connection: it sends something, reads some of what comes, and is gone, with a FIN or with a RST.
"""

import base64
import contextlib
import json
import os
import random
import socket
import struct
import time
from collections.abc import Callable

_MASK = b"\x01\x02\x03\x04"
_BOUNDARY = b"x" * 20
_ENDS = ("fin", "rst", "half")


class DisconnectingClient:
    """One connection to the gateway.

    models: that clients ask for; the first ones answer for as long as anybody listens.
    """

    def __init__(self, address: tuple[str, int], dice: random.Random, models: list[str]) -> None:
        self._dice = dice
        self._models = models
        self._sock = socket.create_connection(address, timeout=30)

    def run(self) -> str:
        """Do one of the things; which."""
        ways: list[Callable[[], None]] = [
            self._pipeline,
            self._pipeline,
            self._cut_stream,
            self._cut_body,
            self._cut_chunks,
            self._cut_form,
            self._cut_head,
            self._cut_socket,
            self._break_frames,
            self._send_rubbish,
        ]
        way = self._dice.choice(ways)
        with contextlib.suppress(OSError):
            way()
        self._leave()
        return way.__name__.strip("_")

    # ---- HTTP -------------------------------------------------------------------------------------------------

    def _request(self) -> bytes:
        model = self._dice.choice(self._models)
        body = json.dumps({"model": model, "input": "print(1)", "stream": self._dice.random() < 0.8}).encode()
        kinds = [self._post(body)] * 4 + [b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"]
        kinds += [b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n"]
        return self._dice.choice(kinds)

    @staticmethod
    def _post(body: bytes, headers: bytes = b"", length: int | None = None) -> bytes:
        size = len(body) if length is None else length
        return (
            b"POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n%b\r\n%b" % (size, headers, body)
        )

    def _pipeline(self) -> None:
        requests = b"".join(self._request() for _ in range(self._dice.randint(2, 6)))
        if self._dice.random() < 0.3:
            requests = requests[: self._dice.randrange(len(requests))]
        self._send(requests)
        self._read()
        if self._dice.random() < 0.3:
            self._send(self._request())
            self._read()

    def _cut_stream(self) -> None:
        body = json.dumps({"model": self._dice.choice(self._models), "input": "hi", "stream": True})
        self._send(self._post(body.encode()))
        self._read()

    def _cut_body(self) -> None:
        self._send(self._post(b'{"model":"' + b"x" * self._dice.randrange(100_000), length=200_000))
        self._read(0)

    def _cut_chunks(self) -> None:
        head = b"POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        chunk = b"5\r\nabcde\r\n" * self._dice.randrange(100)
        self._send(
            head + b"transfer-encoding: chunked\r\n\r\n" + chunk + self._dice.choice([b"", b"5\r\nab"])
        )
        self._read(0)

    def _cut_form(self) -> None:
        part = b'--%b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n' % _BOUNDARY
        self._send(
            b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n"
            b"content-type: multipart/form-data; boundary=%b\r\n\r\n%b" % (_BOUNDARY, part)
        )
        self._send(b"y" * self._dice.randrange(300_000))
        self._read(0)

    def _cut_head(self) -> None:
        head = self._post(b"{}")
        self._send(head[: self._dice.randrange(1, len(head))])
        self._read(0)

    def _send_rubbish(self) -> None:
        self._send(self._dice.randbytes(self._dice.randrange(1, 200)))
        self._read()

    # ---- WebSockets -------------------------------------------------------------------------------------------

    def _open_socket(self) -> None:
        key = base64.b64encode(os.urandom(16))
        self._send(
            b"GET /v1/responses HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
            b"sec-websocket-version: 13\r\nsec-websocket-key: %b\r\n\r\n" % key
        )
        if self._dice.random() < 0.9:
            answer = self._sock.recv(4096)
            assert b" 101 " in answer.partition(b"\r\n")[0], answer

    def _frame(self, payload: bytes, opcode: int = 1, *, final: bool = True) -> bytes:
        head = bytes([opcode | (0x80 if final else 0)])
        size = len(payload)
        head += bytes([0x80 | size]) if size < 126 else struct.pack("!BH", 0xFE, size)
        return head + _MASK + bytes(byte ^ _MASK[i % 4] for i, byte in enumerate(payload))

    def _cut_socket(self) -> None:
        self._open_socket()
        for _ in range(self._dice.randint(1, 4)):
            model = self._dice.choice(self._models)
            message = {"type": "response.create", "model": model, "input": "hi", "store": False}
            self._send(self._frame(json.dumps(message).encode()))
        self._read()

    def _break_frames(self) -> None:
        self._open_socket()
        broken = [
            self._frame(b"\xff\xfe{}"),
            self._frame(b'{"type":', final=False) + self._frame(b"\xff", 0),
            self._frame(b"\xc3", final=False) + self._frame(b"(", 0),
            self._frame(b"x", 3),
            self._frame(b"x" * 126, 9),
            self._frame(b"x", 0),
            self._frame(b"\x03"[:1], 8),
            self._frame(struct.pack("!H", 1005), 8),
            self._frame(struct.pack("!H", 1000) + b"\xff", 8),
            b"\x81\x05hello",
            self._frame(b"hello")[:-2],
            self._frame(b"", 8),
        ]
        self._send(self._dice.choice(broken))
        self._read()

    # ---- both -------------------------------------------------------------------------------------------------

    def _send(self, sent: bytes) -> None:
        """In one piece or in several."""
        cuts = sorted(self._dice.randrange(len(sent) + 1) for _ in range(self._dice.choice([0, 0, 1, 3])))
        for start, end in zip([0, *cuts], [*cuts, len(sent)], strict=True):
            self._sock.sendall(sent[start:end])

    def _read(self, most: int = 200_000) -> None:
        """Some of what comes, perhaps nothing."""
        wanted = self._dice.choice([0, 0, 1, 1000, most])
        self._sock.settimeout(0.2)
        while wanted > 0 and (piece := self._sock.recv(min(wanted, 65536))):
            wanted -= len(piece)

    def _leave(self) -> None:
        end = self._dice.choice(_ENDS)
        with contextlib.suppress(OSError):
            if end == "half":
                self._sock.shutdown(socket.SHUT_WR)
                time.sleep(self._dice.random() / 50)
            elif end == "rst":
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._sock.close()
