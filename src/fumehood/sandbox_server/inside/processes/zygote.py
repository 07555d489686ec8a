"""The warm interpreter from which those of all sandboxes are forked.

It holds no secret, no path of the host, no channel to any sandbox and nothing about one but its number: what
it knows, every later fork could read. What it reports (ended and how) it has seen itself through the kernel.
"""

import os
import random
import socket
import sys
from typing import Any, NoReturn

from fumehood.sandbox_server.inside import layout, syscalls
from fumehood.sandbox_server.inside.jail import jail_builder, seccomp_filter
from fumehood.sandbox_server.inside.processes import fork_server, interpreter
from fumehood.sandbox_server.inside.runner import code_runner
from fumehood.sandbox_server.inside.warm_start import file_backed_heap, memory_mappings, preload
from fumehood.sandbox_server.inside.warm_start import preload as rehearsal

_MT19937_WORDS = 624


class InterpreterForkServer(fork_server.ForkServer):
    """Forks an interpreter into each jail that the spawner announces; the supervisor may have it interrupted."""

    def __init__(
        self,
        control: socket.socket,
        spawner_socket: socket.socket,
        seccomp_program: bytes,
        common_plan: jail_builder.JailPlan,
        warm_runner: code_runner.CodeRunner,
    ) -> None:
        super().__init__(control)
        self._seccomp_program = seccomp_program
        self._common_plan = common_plan
        self._runner = warm_runner
        self._namespace_forker = fork_server.NamespaceForker()
        self.add_source(control, self._handle_request)
        self.add_source(spawner_socket, self._fork_interpreter)

    def _handle_request(self, request: dict[str, Any], _fds: list[int]) -> None:
        match request["op"]:
            case "signal":
                self.signal_group(request["number"], request["signal"])
            case unknown:
                raise ValueError(f"unknown request {unknown!r}")

    def _fork_interpreter(self, request: dict[str, Any], fds: list[int]) -> None:
        channel, first, done, *cgroups = fds
        try:
            pid = self._namespace_forker.fork(first)
        except ProcessLookupError:
            return  # its first process is gone already, which the spawner tells
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
            interpreter.enter_jail(
                self._common_plan, self._seccomp_program, supervisor, (first, done), cgroups, self._runner
            )
        self.watch_child(request["number"], pid)
        reseed_generators()  # the next one gets others; here it costs nobody's time

    def on_child_exit(self, number: int, code: int) -> None:
        self.send_event({"event": "ended", "number": number, "code": code})


def describe_zygote(problems: dict[str, str]) -> dict[str, Any]:
    """What the supervisor is told once, when everything is warm."""
    return {
        "event": "started",
        "python": sys.version.split()[0],
        "problems": problems,
        "threads": preload.count_threads(),
        "landlock": syscalls.landlock_abi(),
    }


def reseed_generators() -> None:
    """What all forks would share otherwise; each in the place of the last one, of which nothing is left."""
    random.seed()
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and "numpy.random" in sys.modules:
        # As numpy.random.seed() does, in a fraction of the time: the state is nothing but random numbers.
        key = numpy.frombuffer(os.urandom(4 * _MT19937_WORDS), dtype=numpy.uint32)
        numpy.random.set_state(("MT19937", key, _MT19937_WORDS))


def run_zygote(
    control: socket.socket, spawner_socket: socket.socket, seccomp_program: bytes, request: dict[str, Any]
) -> NoReturn:
    """The zygote's whole life, in a fresh fork of the spawner."""
    thorough: bool = request["thorough"]
    memory = file_backed_heap.FileBackedHeap() if request["preload"] and thorough else None
    problems = preload.preload(request["preload"])
    _adopt_sandbox_environment()
    prepared = code_runner.CodeRunner()
    if thorough:
        prepared.warm_up(rehearsal.warm_up_programs())
        rehearsal.clear_type_cache()
        prepared.warm_up(rehearsal.simple_warm_up_programs())
    zygote = InterpreterForkServer(
        control, spawner_socket, seccomp_program, jail_builder.JailPlan(**request["common"]), prepared
    )
    reseed_generators()
    interpreter.list_cached_files()
    seccomp_filter.prepare_program(seccomp_program)
    preload.freeze_objects(many_forks=thorough)
    if memory is not None:
        memory.make_private()
        memory_mappings.merge_code_mappings()
    _make_root_read_only()
    zygote.send_event(describe_zygote(problems))
    zygote.serve()


def _adopt_sandbox_environment() -> None:
    """What every interpreter has to find otherwise than the zygote, which is done with it."""
    os.environ["MPLCONFIGDIR"] = layout.MATPLOTLIB_CONFIG
    sys.executable = f"{layout.VIRTUALENV}/bin/python"
    remove_guest_from_path()


def remove_guest_from_path() -> None:
    """Take this package off the path, unless it is installed among the packages that programs need."""
    if set(os.listdir(layout.IMPORT_ROOT)) <= {"fumehood", "__pycache__"}:
        sys.path[:] = [entry for entry in dict.fromkeys(sys.path) if entry != layout.IMPORT_ROOT]
    elif (
        sys.path[0] == layout.IMPORT_ROOT
    ):  # put there for the zygote; as a directory of packages it comes again
        del sys.path[0]


def _make_root_read_only() -> None:
    """From here on nothing outside a sandbox's own files can be written, by anybody."""
    flags = (
        syscalls.MS_REMOUNT | syscalls.MS_BIND | syscalls.MS_RDONLY | syscalls.MS_NOSUID | syscalls.MS_NODEV
    )
    syscalls.mount("sandbox", "/", None, flags)
