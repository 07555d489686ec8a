"""The zygote: a warm interpreter from which the interpreters of all sandboxes are forked.

It holds no secret, no path of the host, no channel to a sandbox, and nothing about a sandbox but its number: every
later fork can read its memory. What it reports (exits) it learns from the kernel.
"""

import os
import random
import socket
import sys
from typing import Any, NoReturn

from fumehood.sandbox_server.inside import layout, syscalls
from fumehood.sandbox_server.inside.processes import fork_server, interpreter_entrypoint
from fumehood.sandbox_server.inside.runner import code_runner
from fumehood.sandbox_server.inside.warm_start import file_backed_heap, preload

_MT19937_WORDS = 624


class InterpreterForkServer(fork_server.ForkServer):
    """Forks an interpreter into each jail that the spawner announces, and interrupts it for the supervisor."""

    def __init__(
        self,
        control: socket.socket,
        spawner_socket: socket.socket,
        seccomp_program: bytes,
        warm_runner: code_runner.CodeRunner,
    ) -> None:
        super().__init__(control)
        self._seccomp_program = seccomp_program
        self._runner = warm_runner
        self._namespace_forker = fork_server.PidNamespaceForker()
        self.add_source(control, self._handle_request)
        self.add_source(spawner_socket, self._fork_interpreter)

    def _handle_request(self, request: dict[str, Any], _fds: list[int]) -> None:
        match request["op"]:
            case "signal":
                self.signal_group(request["number"], request["signal"])
            case unknown:
                raise ValueError(f"unknown request {unknown!r}")

    def _fork_interpreter(self, request: dict[str, Any], fds: list[int]) -> None:
        channel, init_pidfd, ready_pipe, *cgroups = fds
        try:
            pid = self._namespace_forker.fork(init_pidfd)
        except ProcessLookupError:
            return  # its init has ended; the spawner reports that
        except OSError as error:
            self.send_event(
                {
                    "event": "fork_failed",
                    "number": request["number"],
                    "error": fork_server.describe_fork_error(error),
                }
            )
            return
        if pid == 0:
            fork_server.close_other_fds(fds)
            supervisor = socket.socket(fileno=channel)
            interpreter_entrypoint.enter_jail(
                self._seccomp_program,
                supervisor,
                (init_pidfd, ready_pipe),
                cgroups,
                self._runner,
            )
        self.watch_child(request["number"], pid)
        reseed_generators()  # for the next fork; here it delays nobody

    def on_child_exit(self, number: int, code: int) -> None:
        self.send_event({"event": "ended", "number": number, "code": code})


def describe_zygote(problems: dict[str, str]) -> dict[str, Any]:
    """Return the event `started`, sent once the zygote is warm."""
    return {
        "event": "started",
        "python": sys.version.split()[0],
        "problems": problems,
        "threads": len(os.listdir("/proc/self/task")),
        "landlock": syscalls.landlock_abi(),
    }


def reseed_generators() -> None:
    """Reseed the random generators whose state all forks would share otherwise."""
    random.seed()
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and "numpy.random" in sys.modules:
        # Not numpy.random.seed(): it leaves its seed in freed memory, where a later fork could read it.
        key = numpy.frombuffer(os.urandom(4 * _MT19937_WORDS), dtype=numpy.uint32)
        numpy.random.set_state(("MT19937", key, _MT19937_WORDS))


def run_zygote(
    control: socket.socket, spawner_socket: socket.socket, seccomp_program: bytes, request: dict[str, Any]
) -> NoReturn:
    """Preload, warm up, make memory shareable, and serve; in a fresh fork of the spawner."""
    many_forks: bool = request["optimize_forks"]
    heap = file_backed_heap.FileBackedHeap() if request["preload"] and many_forks else None
    problems = preload.preload(request["preload"])
    _adopt_sandbox_environment()
    runner = code_runner.CodeRunner()
    if many_forks:
        runner.warm_up(preload.warm_up_programs())
        preload.clear_type_cache()
        runner.warm_up(preload.simple_warm_up_programs())
    zygote = InterpreterForkServer(control, spawner_socket, seccomp_program, runner)
    reseed_generators()
    preload.freeze_objects(many_forks=many_forks)
    if heap is not None:
        heap.make_private()
    _make_root_read_only()
    zygote.send_event(describe_zygote(problems))
    zygote.serve()


def _adopt_sandbox_environment() -> None:
    """Set what must differ in sandboxes from the zygote."""
    os.environ["MPLCONFIGDIR"] = layout.MATPLOTLIB_CONFIG
    sys.executable = f"{layout.VIRTUALENV}/bin/python"
    remove_guest_from_path()


def remove_guest_from_path() -> None:
    """Remove this package from sys.path, unless it is installed among the packages of programs."""
    if set(os.listdir(layout.IMPORT_ROOT)) <= {"fumehood", "__pycache__"}:
        sys.path[:] = [entry for entry in dict.fromkeys(sys.path) if entry != layout.IMPORT_ROOT]
    elif sys.path[0] == layout.IMPORT_ROOT:  # for the zygote; as a package directory it is on the path again
        del sys.path[0]


def _make_root_read_only() -> None:
    """Remount the root read-only: from now on only the sandboxes' own files can be written."""
    flags = (
        syscalls.MS_REMOUNT | syscalls.MS_BIND | syscalls.MS_RDONLY | syscalls.MS_NOSUID | syscalls.MS_NODEV
    )
    syscalls.mount("sandbox", "/", None, flags)
