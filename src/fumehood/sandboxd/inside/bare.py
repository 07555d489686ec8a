"""The zygote of modes without namespaces, warm interpreter and warden in one; imports only siblings."""

import os
import socket
from typing import Any, NoReturn

from fumehood.sandboxd.inside import children, preload, processes, runner, syscalls, zygote
from fumehood.sandboxd.inside.warden import Warden, decoded_programs


class BareZygote(Warden):
    """Each sandbox is a tree of processes below a first one of its own, which adopts, reaps and hands signals on."""

    def __init__(self, control: socket.socket, programs: tuple[bytes, bytes], *, single: bool) -> None:
        super().__init__(control, programs)
        self._single = single
        self._runner = runner.Runner()

    def spawn(self, number: int, fds: list[int]) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            self.report({"event": "refused", "number": number, "error": f"fork: {error}"})
            return
        if pid == 0:
            children.only_these_fds(fds)
            processes.run(self.program, socket.socket(fileno=fds[0]), fds[1:], self._runner)
        self.report({"event": "spawned", "number": number}, [self.watch(number, pid)])
        zygote.renew_secrets()

    def ended(self, number: int, code: int) -> None:
        helper = number in self._helpers
        super().ended(number, code)
        if self._single and not helper:
            os._exit(0)  # a pod is never used twice: its container ends with its one sandbox


def main(control_fd: int) -> NoReturn:
    children.no_stdin()
    control = socket.socket(fileno=control_fd)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)  # code of the same user may see this process
    request: dict[str, Any]
    request, _ = children.receive(control)
    problems = preload.preload(request["preload"])
    zygote.forget_guest()
    bare = BareZygote(control, decoded_programs(request), single=request.get("single", False))
    preload.freeze(for_many=not request.get("single", False))
    bare.report(zygote.about(problems))
    bare.serve()
