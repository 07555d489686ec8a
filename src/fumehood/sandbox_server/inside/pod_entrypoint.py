"""The main program of the code container in mode `pod`: the zygote behind a Unix socket.

    python -m fumehood.sandbox_server.inside.pod_entrypoint /run/fumehood/guest.sock

It serves one supervisor over one connection and exits with it; Kubernetes then restarts the container. It removes the
socket once the supervisor is connected, so that code in this container cannot pose as the supervisor.
"""

import contextlib
import os
import socket
import sys
import tempfile
from typing import NoReturn

from fumehood.sandbox_server.inside import layout
from fumehood.sandbox_server.inside.processes import zygote_without_namespaces

_SOCKET_MODE = 0o660  # supervisor and code share a group, not a user


def _clear_environment() -> None:
    """Replace the container's environment: what the pod's author put there is not for the code."""
    inherited = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    own = {"HOME": layout.DATA_DIRECTORY, "MPLCONFIGDIR": tempfile.mkdtemp(prefix="matplotlib-")}
    os.environ.clear()
    os.environ.update({**layout.ENVIRON, **own, **inherited})


def main(path: str) -> NoReturn:
    """Listen on the socket `path` and serve the supervisor that connects."""
    if os.getuid() == 0 or os.geteuid() == 0:
        sys.exit("code never runs as root; set runAsUser in the pod's security context")
    if not os.access(layout.DATA_DIRECTORY, os.W_OK):
        sys.exit(f"{layout.DATA_DIRECTORY} must exist and be writable for uid {os.getuid()}")
    _clear_environment()
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
