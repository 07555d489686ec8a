"""Starts the outer jail that a zygote runs in."""

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

from fumehood.sandbox_server.host.cgroups import Cgroup
from fumehood.sandbox_server.host.python_runtime import PythonRuntime
from fumehood.sandbox_server.host.uid_ranges import UidRange
from fumehood.sandbox_server.inside import layout

_SERVER_PACKAGE = Path(__file__).parents[1]
_ROOT_NAMES = ("/lib", "/lib32", "/lib64", "/libx32", "/bin", "/sbin")
_LOG_BYTES = 64 * 1024


@dataclass(slots=True, kw_only=True)
class ZygoteLaunchConfig:
    """How to start a zygote."""

    runtime: PythonRuntime
    namespaces: bool
    seccomp_program: bytes  # for the code
    helper_seccomp_program: bytes  # for helper processes
    preload: tuple[str, ...]
    optimizes_forks: bool  # spend time at start that every fork saves later
    uid_range: UidRange | None
    cgroup: Cgroup | None
    timeout: float
    environ: dict[str, str] = field(default_factory=dict[str, str])
    layers_directory: Path | None = None  # the store of package layers for running sandboxes
    bytecode: Path | None = None  # for packages installed without bytecode

    @property
    def needs_id_maps(self) -> bool:
        """Whether the supervisor has to write the jail's uid and gid maps."""
        return self.uid_range is not None and self.namespaces


class ZygoteJailProcess:
    """The outermost process of a zygote's jail, and its standard error."""

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
        """Its last line on standard error."""
        lines = self._log.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def clear_log(self) -> None:
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

    async def kill(self) -> None:
        """Kill it, which ends the whole jail, and reap it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        if self._process.poll() is None:
            await _wait_exited(self._process.pid)
            self._process.wait()
        if not self._stderr.closed:
            self._read()
            self._loop.remove_reader(self._stderr.fileno())
            self._stderr.close()


async def _wait_exited(pid: int) -> None:
    pidfd = os.pidfd_open(pid)
    try:
        await _wait_readable(pidfd)
    finally:
        os.close(pidfd)


async def _wait_readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(fd, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(fd)


async def launch_jail(launch: ZygoteLaunchConfig) -> tuple[ZygoteJailProcess, socket.socket]:
    """Start the process; returns it and the socket to its zygote.

    Raises OSError, EOFError, TimeoutError, ValueError or SubprocessError, with the last line of the process as a note.
    """
    with contextlib.ExitStack() as ours:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.callback(theirs.close)
        configuration, unshared, mapped = (_open_pipe(ours) for _ in range(3))
        config = _build_jail_config(launch, control=theirs.fileno(), unshared=unshared[1], mapped=mapped[0])
        ends = (configuration[0], unshared[1], mapped[0])
        # Not in a worker thread: the kernel kills the jail when the *thread* that started it ends.
        process = subprocess.Popen(  # noqa: ASYNC220
            outer_jail_command(configuration[0].fileno()),
            env={},
            cwd="/",
            pass_fds=(theirs.fileno(), *(end.fileno() for end in ends)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        if process.stderr is None:
            raise OSError("the process has no standard error")
        jail = ZygoteJailProcess(process, process.stderr)
        for end in (theirs, *ends):
            end.close()
        try:
            if launch.cgroup is not None:
                launch.cgroup.add(process.pid)
            send_jail_config(configuration[1], config)
            if launch.needs_id_maps and launch.uid_range is not None:
                async with asyncio.timeout(launch.timeout):
                    await _wait_unshared(unshared[0])
                await asyncio.to_thread(launch.uid_range.write_id_maps, process.pid)
                mapped[1].write(b"1")
        except BaseException as error:
            mine.close()
            await jail.kill()
            if jail.log_tail():
                error.add_note(jail.log_tail())
            raise
    return jail, mine


def outer_jail_command(configuration: int) -> list[str]:
    """The command that runs outer_jail.py with only this package and the standard library on its path."""
    source = (
        "import sys; sys.path.append(sys.argv[1]); from fumehood.sandbox_server.host import outer_jail; "
        "outer_jail.main(int(sys.argv[2]))"
    )
    return [sys.executable, "-I", "-S", "-c", source, str(_SERVER_PACKAGE.parents[1]), str(configuration)]


def send_jail_config(pipe: IO[bytes], config: dict[str, Any]) -> None:
    """Send the configuration that outer_jail.py waits for, and close the pipe."""
    body = memoryview(json.dumps(config).encode())
    while body:
        body = body[pipe.write(body) :]
    pipe.close()


def _open_pipe(stack: contextlib.ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    reader, writer = os.pipe()
    return (
        stack.enter_context(os.fdopen(reader, "rb", buffering=0)),
        stack.enter_context(os.fdopen(writer, "wb", buffering=0)),
    )


async def _wait_unshared(pipe: IO[bytes]) -> None:
    """Wait until the process is in its user namespace; raises EOFError if it ends before."""
    await _wait_readable(pipe.fileno())
    if not pipe.read(1):
        raise EOFError("it ended before its namespaces were made")


def read_root_links() -> dict[str, str | None]:
    """/lib, /bin and the like: the target of the link, or None for a real directory."""
    return {
        name: os.readlink(name) if os.path.islink(name) else None
        for name in _ROOT_NAMES
        if os.path.lexists(name)
    }


def _build_jail_config(
    launch: ZygoteLaunchConfig, *, control: int, unshared: IO[bytes], mapped: IO[bytes]
) -> dict[str, Any]:
    """The configuration of outer_jail.py; `mounts` are host paths by the names that `shared_rootfs` uses."""
    runtime = launch.runtime
    packages = {f"site{number}": directory for number, directory in enumerate(runtime.packages)}
    mounts = {name: str(directory.path) for name, directory in packages.items()}
    environ = {**layout.ENVIRON, **launch.environ}
    if runtime.prefix is not None:
        mounts["python"] = str(runtime.prefix)
        if runtime.has_shared_library:
            environ["LD_LIBRARY_PATH"] = f"{layout.PYTHON_PREFIX}/lib"
    if launch.namespaces:
        mounts |= {"guest": str(_SERVER_PACKAGE / "inside"), **list_system_mounts()}
        if os.path.isdir("/etc/alternatives"):
            mounts["alternatives"] = "/etc/alternatives"
        if runtime.certificates is not None:
            mounts["certificates"] = os.path.realpath(runtime.certificates)
        if launch.layers_directory is not None:
            mounts["layers"] = str(launch.layers_directory)
        if launch.bytecode is not None:
            mounts["bytecode"] = str(launch.bytecode)
    else:
        # The import path needs the directory that contains the package.
        mounts["guest"] = str(_SERVER_PACKAGE.parent.parent)
    return {
        "kind": "zygote" if launch.namespaces else "bare",
        "parent": os.getpid(),
        "control": control,
        "unshared": unshared.fileno() if launch.needs_id_maps else None,
        "mapped": mapped.fileno() if launch.needs_id_maps else None,
        "user": 0,
        "uid": launch.uid_range.zygote_uid if launch.uid_range is not None and os.geteuid() == 0 else None,
        "mounts": mounts,
        "packages": list(packages),
        "environ": environ,
        "executable": str(runtime.executable),
        "host_trees": {
            "version": runtime.version,
            "library": runtime.library,
            "executable": runtime.executable.name,
            "has_python": runtime.prefix is not None,
            "packages": [[name, sorted(directory.visible_names)] for name, directory in packages.items()],
            "roots": read_root_links(),
        },
    }


def list_system_mounts() -> dict[str, str]:
    """/usr, and those of /lib, /bin and the like that are real directories, by the names of `shared_rootfs`."""
    own = {f"root-{name[1:]}": name for name, link in read_root_links().items() if link is None}
    return {"usr": "/usr", **own}
