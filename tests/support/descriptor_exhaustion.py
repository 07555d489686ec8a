"""Exhausts the file descriptors of a server."""

import contextlib
import os
import resource
import socket
from collections.abc import Generator
from pathlib import Path


@contextlib.contextmanager
def exhaust_descriptors(pid: int, spare: int) -> Generator[None]:
    """That process has so many left, until the block is left."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    limit = len(os.listdir(Path("/proc") / str(pid) / "fd")) + spare
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def ask(sock: socket.socket, path: bytes) -> bytes:
    """The head of the answer to a request; nothing if the connection was closed instead."""
    answer = b""
    with contextlib.suppress(ConnectionError):
        sock.sendall(b"GET %b HTTP/1.1\r\nhost: localhost\r\n\r\n" % path)
        while b"\r\n\r\n" not in answer and (piece := sock.recv(4096)):
            answer += piece
    return answer
