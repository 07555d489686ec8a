"""One end of a SOCK_SEQPACKET pair on the event loop; imports only the standard library."""

import array
import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable

_PACKET_BYTES = 256 * 1024
_PACKETS_PER_WAKE = 32  # a peer that floods gets its turn, not the loop
_PACKETS_AT_THE_END = 10_000


class Packets:
    """Sends in order without blocking the loop; hands what arrives to `on_packet`, the end to `on_close`.

    Descriptors are taken only while `accept_fds` is set. Otherwise the kernel throws them away on arrival, so a
    peer can neither exhaust nor confuse the descriptors of this process.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        on_packet: Callable[[bytes, list[int]], None],
        on_close: Callable[[], None],
        accept_fds: bool = False,
    ) -> None:
        self._sock = sock
        self._on_packet = on_packet
        self._on_close = on_close
        self.accept_fds = accept_fds
        self._waiting: deque[tuple[bytes, list[int]]] = deque()
        self._loop = asyncio.get_running_loop()
        self._closed = False
        sock.setblocking(False)
        self._loop.add_reader(sock.fileno(), self._readable)

    def send(self, body: bytes, fds: list[int] | None = None) -> None:
        """Queue one packet; `fds` are duplicated, so that the caller may close its own at once."""
        if self._closed:
            return
        if not self._waiting and self._send_now(body, fds or []):
            return
        if not self._waiting:
            self._loop.add_writer(self._sock.fileno(), self._writable)
        self._waiting.append((body, [os.dup(fd) for fd in fds or []]))

    @property
    def waiting(self) -> int:
        """How many packets the peer has not had room for yet."""
        return len(self._waiting)

    def _send_now(self, body: bytes, fds: list[int]) -> bool:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self._sock.sendmsg([body], ancillary, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError:
            return True  # the peer is gone: reading tells
        return True

    def _writable(self) -> None:
        while self._waiting:
            body, fds = self._waiting[0]
            if not self._send_now(body, fds):
                return
            self._waiting.popleft()
            for fd in fds:
                os.close(fd)
        self._loop.remove_writer(self._sock.fileno())

    @property
    def ended(self) -> bool:
        """Whether the peer is gone, also if nobody has been told yet."""
        try:
            return self._closed or self._sock.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def drain(self) -> None:
        """Take what a peer that has ended sent last; there is no more than the socket held."""
        self._read(_PACKETS_AT_THE_END)

    def _readable(self) -> None:
        self._read(_PACKETS_PER_WAKE)

    def _read(self, most: int) -> None:
        for _ in range(most):
            if self._closed:
                return
            fds: list[int] = []
            try:
                if self.accept_fds:
                    body, fds, _, _ = socket.recv_fds(self._sock, _PACKET_BYTES, 16)
                else:
                    body = self._sock.recv(_PACKET_BYTES)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # told once, of a peer that ended without reading everything; what it said comes after
            except OSError:
                body = b""
            if not body:
                for fd in fds:
                    os.close(fd)
                self.close()
                self._on_close()
                return
            self._on_packet(body, fds)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(ValueError, OSError):
            self._loop.remove_reader(self._sock.fileno())
            self._loop.remove_writer(self._sock.fileno())
        for _, fds in self._waiting:
            for fd in fds:
                os.close(fd)
        self._waiting.clear()
        self._sock.close()
