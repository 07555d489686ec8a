"""Mode `pod`: the zygote as the main program of the container that runs the code.

    python -m fumehood.sandbox_server.inside.pod_entrypoint /run/fumehood/guest.sock

It serves one supervisor, over one connection, and ends with it: the container then starts afresh. The socket
is removed once the supervisor is connected, so that code in this container cannot pose as one.
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
    """What the pod's author put into the container's environment is not for the code."""
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    own = {"HOME": layout.DATA_DIRECTORY, "MPLCONFIGDIR": tempfile.mkdtemp(prefix="matplotlib-")}
    os.environ.clear()
    os.environ.update({**layout.ENVIRON, **own, **kept})


def main(path: str) -> NoReturn:
    if os.getuid() == 0 or os.geteuid() == 0:
        sys.exit("refused: code never runs as root; set runAsUser in the pod's security context")
    if not os.access(layout.DATA_DIRECTORY, os.W_OK):
        sys.exit(f"refused: {layout.DATA_DIRECTORY} must exist and be writable for uid {os.getuid()}")
    _clear_environment()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as listener:
        unready = f"{path}.new"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unready)  # of an earlier life of this container
        listener.bind(unready)
        os.chmod(unready, _SOCKET_MODE)
        listener.listen(1)
        os.rename(unready, path)  # whoever finds it can connect
        control, _ = listener.accept()
        os.unlink(path)
    zygote_without_namespaces.main(control.detach())


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m fumehood.sandbox_server.inside.pod_entrypoint SOCKET")
    main(sys.argv[1])
