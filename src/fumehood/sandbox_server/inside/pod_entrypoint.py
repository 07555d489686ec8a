"""The main program of the container `code` of a pod: the zygote behind a unix socket.

    python -m fumehood.sandbox_server.inside.pod_entrypoint /run/fumehood/code/guest.sock

It serves one supervisor over one connection and ends with it. It removes the socket once the supervisor is connected,
so that code in this container cannot pose as the supervisor.
"""

import contextlib
import os
import signal
import socket
import sys
import tempfile
from typing import NoReturn

from fumehood.sandbox_server.inside import layout
from fumehood.sandbox_server.inside.processes import zygote_without_namespaces

_SOCKET_MODE = 0o660  # supervisor and code share a group, not a user
_OVERLAY = os.path.join(os.path.dirname(__file__), "pod_overlay")  # its sitecustomize finds attached packages
_PIP_OVERLAY = os.path.join(os.path.dirname(__file__), "site_overlay")
_PROGRAMS = f"{layout.HOME}/.local/bin"
_PIP_SCRIPT = "#!{python}\nimport sys\n\nfrom pip import main\n\nsys.exit(main())\n"


def _set_environment() -> None:
    """Replace the container's environment: what the pod's author put there is not for the code."""
    inherited = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    programs = (_PROGRAMS, os.path.dirname(sys.executable), f"{layout.ATTACHED_PACKAGES}/bin")
    own = {
        "PATH": ":".join([*programs, os.environ.get("PATH", "/usr/local/bin:/usr/bin:/bin")]),
        "PYTHONPATH": f"{_OVERLAY}:{_PIP_OVERLAY}",
        "MPLCONFIGDIR": tempfile.mkdtemp(prefix="matplotlib-"),
    }
    os.environ.clear()
    os.environ.update({**layout.ENVIRON, **own, **inherited})


def _install_pip() -> None:
    """Put a `pip` on the path that asks the supervisor for packages, for this process and for programs."""
    os.makedirs(_PROGRAMS, exist_ok=True)
    for name in ("pip", "pip3"):
        path = f"{_PROGRAMS}/{name}"
        with open(path, "w", encoding="utf-8") as script:
            script.write(_PIP_SCRIPT.format(python=sys.executable))
        os.chmod(path, 0o755)  # noqa: S103 - a program
    if sys.path[0] == os.getcwd():  # of `python -m`
        del sys.path[0]
    sys.path[:0] = [_OVERLAY, _PIP_OVERLAY]
    with contextlib.suppress(KeyError):
        del sys.modules["sitecustomize"]  # the image's
    __import__("sitecustomize")


def _check_user() -> None:
    if os.getuid() == 0 or os.geteuid() == 0:
        sys.exit("code never runs as root; set runAsUser in the pod's security context")
    for path in layout.WRITABLE:
        if not os.access(path, os.W_OK):
            sys.exit(f"{path} must exist and be writable for uid {os.getuid()}; mount an emptyDir there")


def _end(_number: int, _frame: object) -> NoReturn:
    """End the container: as PID 1 this process gets no signal that it does not handle."""
    os._exit(0)


def main(path: str) -> NoReturn:
    """Listen on the socket `path` and serve the supervisor that connects."""
    _check_user()
    signal.signal(signal.SIGTERM, _end)
    _set_environment()
    _install_pip()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as listener:
        unready = f"{path}.new"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unready)  # left by an earlier run in this container
        listener.bind(unready)
        os.chmod(unready, _SOCKET_MODE)
        listener.listen(1)
        os.rename(unready, path)  # from now on a client that finds it can connect
        control, _ = listener.accept()
        os.unlink(path)
    zygote_without_namespaces.main(control.detach())


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m fumehood.sandbox_server.inside.pod_entrypoint SOCKET")
    main(sys.argv[1])
