"""One end of a SOCK_SEQPACKET socket pair on the event loop."""

import array
import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable

_MAX_PACKET_BYTES = 256 * 1024
_MAX_PACKETS_PER_WAKE = 32  # a peer that floods must not block the loop
_MAX_DRAINED_PACKETS = 10_000


class PacketChannel:
    """Sends in order without blocking the loop; calls `on_packet` for each packet and `on_close` at the end.

    Descriptors are accepted only while `accept_fds` is set. Otherwise the kernel discards them, so that a peer cannot
    exhaust the descriptors of this process.
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
        self._send_queue: deque[tuple[bytes, list[int]]] = deque()
        self._loop = asyncio.get_running_loop()
        self._closed = False
        sock.setblocking(False)
        self._loop.add_reader(sock.fileno(), self._on_readable)

    def send(self, body: bytes, fds: list[int] | None = None) -> None:
        """Queue one packet; `fds` are duplicated, so the caller may close its own at once."""
        if self._closed:
            return
        if not self._send_queue and self._try_send(body, fds or []):
            return
        if not self._send_queue:
            self._loop.add_writer(self._sock.fileno(), self._on_writable)
        self._send_queue.append((body, [os.dup(fd) for fd in fds or []]))

    @property
    def queued_packets(self) -> int:
        """Number of packets not sent yet."""
        return len(self._send_queue)

    def _try_send(self, body: bytes, fds: list[int]) -> bool:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self._sock.sendmsg([body], ancillary, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError:
            return True  # the peer is gone: reading notices it
        return True

    def _on_writable(self) -> None:
        while self._send_queue:
            body, fds = self._send_queue[0]
            if not self._try_send(body, fds):
                return
            self._send_queue.popleft()
            for fd in fds:
                os.close(fd)
        self._loop.remove_writer(self._sock.fileno())

    @property
    def has_peer_closed(self) -> bool:
        """Whether the peer is gone, also before `on_close` has been called."""
        try:
            return self._closed or self._sock.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def drain(self) -> None:
        """Read what an ended peer has left in the socket."""
        self._receive(_MAX_DRAINED_PACKETS)

    def _on_readable(self) -> None:
        self._receive(_MAX_PACKETS_PER_WAKE)

    def _receive(self, max_packets: int) -> None:
        for _ in range(max_packets):
            if self._closed:
                return
            fds: list[int] = []
            try:
                if self.accept_fds:
                    body, fds, _, _ = socket.recv_fds(self._sock, _MAX_PACKET_BYTES, 16)
                else:
                    body = self._sock.recv(_MAX_PACKET_BYTES)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # once, if the peer ended without reading everything; its packets follow
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
        for _, fds in self._send_queue:
            for fd in fds:
                os.close(fd)
        self._send_queue.clear()
        self._sock.close()
