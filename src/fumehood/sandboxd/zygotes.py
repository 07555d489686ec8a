"""Starts a zygote in its outer jail and talks to it; imports only the standard library and siblings."""

import asyncio
import base64
import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from fumehood.sandboxd.cgroups import Cgroup
from fumehood.sandboxd.errors import IsolationUnavailable
from fumehood.sandboxd.inside import layout
from fumehood.sandboxd.packets import Packets
from fumehood.sandboxd.runtime import Bubblewrap, Runtime

_HERE = Path(__file__).parent
_ROOT_NAMES = ("/lib", "/lib32", "/lib64", "/libx32", "/bin", "/sbin")
_UIDS_PER_BLOCK = 4096
_BLOCKS = 64
_LOG_BYTES = 64 * 1024
_ADVICE = "Run `fumehood doctor` to see what this machine lacks."


@dataclass(slots=True)
class UserRange:
    """Kernel users for one zygote and its sandboxes, reserved against other supervisors on this host."""

    first: int
    count: int
    lock: IO[bytes] | None = None
    own: int | None = None  # maps user 0 of the zygote's namespace; None: the first of the range

    @property
    def zygote(self) -> int:
        return self.first if self.own is None else self.own

    def lines(self, kind: str) -> list[tuple[int, int, int]]:
        """(inside, outside, count) rows of the `uid` or `gid` map."""
        if self.own is None:
            return [(0, self.first, self.count)]
        return [(0, self.own if kind == "uid" else os.getgid(), 1), (1, self.first, self.count - 1)]

    def close(self) -> None:
        if self.lock is not None:
            self.lock.close()


def reserve_users(base: int) -> UserRange:
    """A block of users that no other supervisor on this host has, held by a lock for as long as we live."""
    directory = Path("/run/lock") if os.path.isdir("/run/lock") else Path("/run")
    for number in range(_BLOCKS):
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(directory / f"fumehood-users-{base}-{number}.lock", flags, 0o600)
        lock = os.fdopen(fd, "r+b")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        return UserRange(base + number * _UIDS_PER_BLOCK, _UIDS_PER_BLOCK, lock)
    raise IsolationUnavailable(
        f"All {_BLOCKS} blocks of sandbox users are taken by other supervisors on this host.",
        "Stop one, or set another uid_base.",
    )


@dataclass(slots=True)
class Started:
    """What the zygote said of itself when it was ready."""

    python: str
    problems: dict[str, str]
    threads: int
    landlock: int
    neutral: bool


@dataclass(slots=True)
class Launch:
    """Everything a zygote is started from; `bubblewrap` None means without namespaces."""

    runtime: Runtime
    bubblewrap: Bubblewrap | None
    program: bytes
    preload: tuple[str, ...]
    users: UserRange | None
    cgroup: Cgroup | None
    timeout: float
    environ: dict[str, str] = field(default_factory=dict[str, str])


class Zygote:
    """A running zygote; `on_event` gets what it reports about sandboxes, `on_death` its end, once."""

    def __init__(self, process: subprocess.Popen[bytes] | None) -> None:
        self._process = process
        self._packets: Packets | None = None
        self._started: asyncio.Future[Started] = asyncio.get_running_loop().create_future()
        self._log = bytearray()
        self.on_event: Callable[[dict[str, Any], list[int]], None] = lambda event, fds: None
        self.on_death: Callable[[], None] = lambda: None
        self.alive = False
        self.about: Started | None = None

    @classmethod
    async def launch(cls, launch: Launch) -> "Zygote":
        """Start one behind bubblewrap (or bare); raises IsolationUnavailable with what it said."""
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        gate = os.pipe()
        info = os.pipe() if launch.users is not None and launch.bubblewrap is not None else None
        block = os.pipe() if info is not None else None
        child_fds = [theirs.fileno(), gate[0], *([info[1], block[0]] if info and block else [])]
        config = _config(launch, theirs.fileno(), gate[0], info and info[1], block and block[0])
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_HERE / "launch.py"), json.dumps(config)],
            env={},
            cwd="/",
            pass_fds=child_fds,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        for fd in child_fds[1:]:
            os.close(fd)
        theirs.close()
        zygote = cls(process)
        try:
            if launch.cgroup is not None:
                launch.cgroup.add(process.pid)
            os.write(gate[1], b"1")
            zygote._connect(mine, launch)
            if info is not None and block is not None and launch.users is not None:
                await _map_users(info[0], block[1], launch.users, launch.timeout)
            zygote.about = await asyncio.wait_for(zygote._started, launch.timeout)
        except (TimeoutError, OSError, ValueError, EOFError, subprocess.SubprocessError) as error:
            await zygote.close()
            said = zygote.log_tail() or f"{type(error).__name__}: {error}"
            raise IsolationUnavailable(f"The zygote did not start: {said}", _ADVICE) from error
        except BaseException:
            await zygote.close()
            raise
        finally:
            os.close(gate[1])
            for fd in (info[0], block[1]) if info and block else ():
                os.close(fd)
        if zygote.about.threads != 1:
            # A fork copies one thread only: the locks of the others would stay locked in every sandbox.
            await zygote.close()
            raise IsolationUnavailable(
                f"The zygote runs {zygote.about.threads} threads after its preload.", "Preload fewer packages."
            )
        return zygote

    @classmethod
    async def connect(cls, path: Path, program: bytes, preload: tuple[str, ...], timeout: float) -> "Zygote":
        """Mode `pod`: the zygote runs in the neighbouring container and listens on a socket."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            sock.connect(str(path))
        except OSError as error:
            sock.close()
            raise IsolationUnavailable(
                f"Nothing listens for code on {path}: {error.strerror}.",
                "Start the code container first: `python -m fumehood.sandboxd.inside.guest PATH`.",
            ) from error
        zygote = cls(None)
        zygote._attach(sock, program, preload, nested=False, single=True)
        try:
            zygote.about = await asyncio.wait_for(zygote._started, timeout)
        except (TimeoutError, EOFError) as error:
            await zygote.close()
            raise IsolationUnavailable(f"The code container behind {path} did not start.", _ADVICE) from error
        return zygote

    def _connect(self, sock: socket.socket, launch: Launch) -> None:
        assert self._process is not None and self._process.stderr is not None
        os.set_blocking(self._process.stderr.fileno(), False)
        asyncio.get_running_loop().add_reader(self._process.stderr.fileno(), self._read_log)
        nested = launch.bubblewrap is not None
        self._attach(sock, launch.program, launch.preload, nested=nested, single=False)

    def _attach(
        self, sock: socket.socket, program: bytes, preload: tuple[str, ...], *, nested: bool, single: bool
    ) -> None:
        self.alive = True
        self._packets = Packets(sock, on_packet=self._arrived, on_close=self._ended, accept_fds=True)
        configure = {
            "program": base64.b64encode(program).decode(),
            "preload": list(preload),
            "nested": nested,
            "single": single,
        }
        self._packets.send(json.dumps(configure).encode())

    def request(self, body: dict[str, Any], fds: list[int] | None = None) -> None:
        if self._packets is not None:
            self._packets.send(json.dumps(body).encode(), fds)

    def _arrived(self, body: bytes, fds: list[int]) -> None:
        event: dict[str, Any] = json.loads(body)
        if event.pop("event") == "started" and "python" in event:
            if not self._started.done():
                self._started.set_result(Started(**event))
            return
        self.on_event(json.loads(body), fds)

    def _ended(self) -> None:
        self.alive = False
        if not self._started.done():
            self._started.set_exception(EOFError("it ended while starting"))
            self._started.exception()  # the mapping of users may have failed first
        self.on_death()

    def _read_log(self) -> None:
        assert self._process is not None and self._process.stderr is not None
        chunk = None
        with contextlib.suppress(BlockingIOError):
            chunk = os.read(self._process.stderr.fileno(), 4096)
            self._log += chunk
            del self._log[:-_LOG_BYTES]
        if chunk == b"":
            asyncio.get_running_loop().remove_reader(self._process.stderr.fileno())

    def log_tail(self) -> str:
        """The last thing the zygote or bubblewrap said, one line."""
        lines = self._log.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def close(self) -> None:
        """End the zygote and with it every sandbox it made."""
        self.alive = False
        self.on_death = lambda: None
        if self._packets is not None:
            self._packets.close()
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            # The outer bubblewrap process; the namespace's own init follows it (--die-with-parent).
            self._process.send_signal(signal.SIGKILL)
        while self._process.poll() is None:
            await asyncio.sleep(0.002)
        if self._process.stderr is not None:
            self._read_rest()
            self._process.stderr.close()

    def _read_rest(self) -> None:
        assert self._process is not None and self._process.stderr is not None
        with contextlib.suppress(ValueError, OSError):
            asyncio.get_running_loop().remove_reader(self._process.stderr.fileno())
            os.set_blocking(self._process.stderr.fileno(), False)
            self._log += os.read(self._process.stderr.fileno(), _LOG_BYTES)


async def _map_users(info: int, block: int, users: UserRange, timeout: float) -> None:
    """Write the user and group maps that bubblewrap waits for."""
    os.set_blocking(info, False)
    text = b""
    async with asyncio.timeout(timeout):
        while b"}" not in text:
            try:
                chunk = os.read(info, 4096)
            except BlockingIOError:
                await asyncio.sleep(0.001)
                continue
            if not chunk:
                raise EOFError("bubblewrap ended before its namespaces were made")
            text += chunk
    pid = json.loads(text)["child-pid"]
    for kind in ("uid", "gid"):
        rows = users.lines(kind)
        if users.own is None:
            Path(f"/proc/{pid}/{kind}_map").write_text("\n".join(" ".join(map(str, row)) for row in rows) + "\n")
        else:
            arguments = [str(number) for row in rows for number in row]
            subprocess.run([f"new{kind}map", str(pid), *arguments], check=True, capture_output=True, timeout=10)
    os.write(block, b"1")


def root_entries() -> dict[str, str | None]:
    """How this host spells /lib, /bin and the like: a link into /usr, or a directory of its own."""
    return {
        name: os.readlink(name) if os.path.islink(name) else None
        for name in _ROOT_NAMES
        if os.path.lexists(name)
    }


def _config(launch: Launch, control: int, gate: int, info: int | None, block: int | None) -> dict[str, Any]:
    runtime = launch.runtime
    places = {"site": str(runtime.site), "guest": str(_HERE / "inside")}
    binds = {"site": "/site", "guest": "/guest/fumehood/sandboxd/inside"}
    environ = {**layout.ENVIRON, **launch.environ}
    executable = str(runtime.executable)
    if runtime.prefix is not None:
        places["python"], binds["python"] = str(runtime.prefix), layout.PYTHON
        executable = f"{layout.PYTHON}/bin/{runtime.executable.name}"
        if runtime.library_path is not None:
            environ["LD_LIBRARY_PATH"] = f"{layout.PYTHON}/{runtime.library_path}"
    if os.path.isdir("/etc/alternatives"):
        places["alternatives"], binds["alternatives"] = "/etc/alternatives", "/alternatives"
    if runtime.certificates is not None:
        places["certificates"] = os.path.realpath(runtime.certificates)
        binds["certificates"] = "/certificates.crt"
    program = None
    if launch.bubblewrap is None:
        # The guest's parent is what goes on the path there; the jail puts it together from binds instead.
        places["guest"] = str(_HERE.parent.parent)
    else:
        places["bubblewrap"], program = _bubblewrap_place(launch.bubblewrap, runtime)
    return {
        "gate": gate,
        "control": control,
        "info": info,
        "block": block,
        "drop_to": launch.users.zygote if launch.users is not None and os.geteuid() == 0 else None,
        "bubblewrap": program,
        "places": places,
        "binds": binds,
        "environ": environ,
        "executable": executable if launch.bubblewrap is not None else str(runtime.executable),
        "trees": {
            "version": runtime.version,
            "executable": runtime.executable.name,
            "python": None if runtime.prefix is None else layout.PYTHON,
            "site": "/site",
            "site_keep": sorted(runtime.site_keep),
            "roots": root_entries(),
            "certificates": "/certificates.crt" if runtime.certificates is not None else None,
        },
    }


def _bubblewrap_place(bubblewrap: Bubblewrap, runtime: Runtime) -> tuple[str, str]:
    """The directory to stage and the program's name in it; a wheel's needs its libraries beside it."""
    if bubblewrap.path.is_relative_to(runtime.site):
        return str(runtime.site), f"/{bubblewrap.path.relative_to(runtime.site)}"
    return str(bubblewrap.path.parent), f"/{bubblewrap.path.name}"
