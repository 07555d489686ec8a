"""Creates listening TCP and Unix sockets."""

import contextlib
import errno
import fcntl
import ipaddress
import os
import secrets
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

_BACKLOG = 2048
_TCP_USER_TIMEOUT_MS = 300_000  # without an acknowledgement for this long, the peer is gone


class ListenError(Exception):
    """The server cannot listen at this address; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """Host and port, or the `path` of a Unix socket."""

    host: str = "127.0.0.1"
    port: int = 8080
    path: Path | None = None

    @classmethod
    def parse(cls, text: str) -> "ListenAddress":
        """Parse HOST:PORT, with an IPv6 address in brackets. Raises ValueError."""
        host, colon, port = text.rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            raise ValueError("write an IPv6 address in brackets: [::1]:8080")
        if not colon or not host or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
            raise ValueError("give HOST:PORT, as in 127.0.0.1:8080")
        return cls(host, int(port))

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        if self.path is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # a name may resolve to anything
            return False


class ListeningSocket:
    """A listening socket; `close` also removes the file of a Unix socket."""

    def __init__(self, sock: socket.socket, path: Path | None = None) -> None:
        self.sock = sock
        self._path = path
        self._inode = None if path is None else path.stat().st_ino

    @property
    def url(self) -> str:
        """The URL to connect to."""
        if self._path is not None:
            return f"unix:{self._path}"
        host, port = self.sock.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def close(self) -> None:
        if self._path is not None:
            with contextlib.suppress(OSError):
                if self._path.lstat().st_ino == self._inode:  # another server may have replaced it
                    self._path.unlink()
        self.sock.close()


def listen(address: ListenAddress) -> ListeningSocket:
    """Raises ListenError."""
    if address.path is not None:
        return _listen_unix(address.path)
    try:
        family, kind, protocol, _, socket_address = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ListenError(f"Cannot listen on {address.host}:{address.port}: {error.strerror}.") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit both.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _TCP_USER_TIMEOUT_MS)
        sock.bind(socket_address)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        advice = " Choose another port, or 0 for any." if error.errno == errno.EADDRINUSE else ""
        raise ListenError(
            f"Cannot listen on {address.host}:{address.port}: {error.strerror}.{advice}"
        ) from error
    return ListeningSocket(sock)


def _listen_unix(path: Path) -> ListeningSocket:
    """A socket for this user only, at a path that is free or left by a dead server."""
    path = path.absolute()
    temporary = path.with_name(f".{secrets.token_hex(6)}")
    if len(os.fsencode(path)) > 107 or len(os.fsencode(temporary)) > 107:
        raise ListenError(f"The socket path {path} is too long: more than 107 bytes.")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        sock.close()
        raise ListenError(f"Cannot create a socket in {path.parent}: {error.strerror}.") from error
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)  # two servers that start at once exclude each other
        _check_path_available(path)
        sock.bind(str(temporary))
        temporary.chmod(0o600)  # before anybody can connect
        sock.listen(_BACKLOG)
        temporary.rename(path)
        return ListeningSocket(sock, path)
    except BaseException as error:
        sock.close()
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            raise ListenError(f"Cannot listen on {path}: {error.strerror}.") from error
        raise
    finally:
        os.close(directory)


def _check_path_available(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ListenError(f"{path} exists and is not a socket; choose another path.")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(2)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return  # its server is dead
        except TimeoutError:
            pass
    raise ListenError(f"Another server listens on {path}; stop it first, or choose another path.")
