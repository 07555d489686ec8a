"""The warm interpreter from which those of all sandboxes are forked; imports only the standard library and siblings.

It holds no secret, no path of the host, no channel to any sandbox and nothing about one but its number: what
it knows, every later fork could read. What it reports (ended and how) it has seen itself through the kernel.
"""

import os
import random
import socket
import sys
from typing import Any, NoReturn

from fumehood.sandboxd.inside import (
    children,
    filters,
    interpreter,
    jail,
    layout,
    mappings,
    preload,
    rehearsal,
    runner,
    sharing,
    syscalls,
)

_MT19937_WORDS = 624
_GUEST = os.path.dirname(__file__).removesuffix("/fumehood/sandboxd/inside")


class Zygote(children.Parent):
    """Forks an interpreter into each jail that the warden announces; the supervisor may have it interrupted."""

    def __init__(
        self,
        control: socket.socket,
        link: socket.socket,
        program: bytes,
        common: jail.Plan,
        prepared: runner.Runner,
    ) -> None:
        super().__init__(control)
        self._program = program
        self._common = common
        self._runner = prepared
        self._elsewhere = children.ForkElsewhere()
        self.listen(control, self._request)
        self.listen(link, self._fork)

    def _request(self, request: dict[str, Any], _fds: list[int]) -> None:
        match request["op"]:
            case "signal":
                self.signal_group(request["number"], request["signal"])
            case unknown:
                raise ValueError(f"unknown request {unknown!r}")

    def _fork(self, request: dict[str, Any], fds: list[int]) -> None:
        channel, first, done, *cgroups = fds
        try:
            pid = self._elsewhere.fork(first)
        except ProcessLookupError:
            return  # its first process is gone already, which the warden tells
        except OSError as error:
            self.report({"event": "unborn", "number": request["number"], "error": children.no_room(error)})
            return
        if pid == 0:
            children.only_these_fds(fds)
            supervisor = socket.socket(fileno=channel)
            interpreter.enter_jail(
                self._common, self._program, supervisor, (first, done), cgroups, self._runner
            )
        self.watch(request["number"], pid)
        renew_secrets()  # the next one gets others; here it costs nobody's time

    def ended(self, number: int, code: int) -> None:
        self.report({"event": "ended", "number": number, "code": code})


def about(problems: dict[str, str]) -> dict[str, Any]:
    """What the supervisor is told once, when everything is warm."""
    return {
        "event": "started",
        "python": sys.version.split()[0],
        "problems": problems,
        "threads": preload.threads(),
        "landlock": syscalls.landlock_abi(),
    }


def renew_secrets() -> None:
    """What all forks would share otherwise; each in the place of the last one, of which nothing is left."""
    random.seed()
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and "numpy.random" in sys.modules:
        # As numpy.random.seed() does, in a fraction of the time: the state is nothing but random numbers.
        key = numpy.frombuffer(os.urandom(4 * _MT19937_WORDS), dtype=numpy.uint32)
        numpy.random.set_state(("MT19937", key, _MT19937_WORDS))


def run(control: socket.socket, link: socket.socket, program: bytes, request: dict[str, Any]) -> NoReturn:
    """The zygote's whole life, in a fresh fork of the warden."""
    thorough: bool = request["thorough"]
    memory = sharing.SharedMemory() if request["preload"] and thorough else None
    problems = preload.preload(request["preload"])
    _look_like_a_sandbox()
    prepared = runner.Runner()
    if thorough:
        prepared.rehearse(rehearsal.programs())
        rehearsal.forget_lookups()
        prepared.rehearse(rehearsal.simplest_programs())
    zygote = Zygote(control, link, program, jail.Plan(**request["common"]), prepared)
    renew_secrets()
    interpreter.cached()
    filters.prepared(program)
    preload.freeze(for_many=thorough)
    if memory is not None:
        memory.settle()
        mappings.join_code()
    _make_root_read_only()
    zygote.report(about(problems))
    zygote.serve()


def _look_like_a_sandbox() -> None:
    """What every interpreter has to find otherwise than the zygote, which is done with it."""
    os.environ["MPLCONFIGDIR"] = layout.MATPLOTLIB
    sys.executable = f"{layout.ENVIRONMENT}/bin/python"
    forget_guest()


def forget_guest() -> None:
    """Take this package off the path, unless it is installed among the packages that programs need."""
    if set(os.listdir(_GUEST)) <= {"fumehood", "__pycache__"}:
        sys.path[:] = [entry for entry in dict.fromkeys(sys.path) if entry != _GUEST]
    elif sys.path[0] == _GUEST:  # put there for the zygote; as a directory of packages it comes again
        del sys.path[0]


def _make_root_read_only() -> None:
    """From here on nothing outside a sandbox's own files can be written, by anybody."""
    flags = (
        syscalls.MS_REMOUNT | syscalls.MS_BIND | syscalls.MS_RDONLY | syscalls.MS_NOSUID | syscalls.MS_NODEV
    )
    syscalls.mount("sandbox", "/", None, flags)
