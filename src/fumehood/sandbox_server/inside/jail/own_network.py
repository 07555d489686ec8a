"""A network namespace of its own for the code in a pod, where the pod lets it: in gVisor, or with user namespaces.

The pod's network is out of its reach then, whatever the cluster's policies say, and it has a loopback interface for
itself. Where this is not possible, the seccomp filter leaves it no sockets but unix ones.
"""

import contextlib
import fcntl
import os
import socket
import struct

from fumehood.sandbox_server.inside import syscalls

_SIOCSIFFLAGS = 0x8914
_IFF_UP_RUNNING = 0x1 | 0x40


def is_possible() -> bool:
    """Whether a child of this process can enter one and use its loopback interface."""
    pid = os.fork()
    if pid == 0:
        try:
            enter()
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) == 0


def enter() -> None:
    """Enter a new network namespace, in a new user namespace that maps this user only. Raises OSError.

    All capabilities are this process's there, until it drops them.
    """
    uid, gid = os.getuid(), os.getgid()
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)  # else /proc/self belongs to root
    os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNET)
    for name, line in (("setgroups", "deny"), ("gid_map", f"{gid} {gid} 1"), ("uid_map", f"{uid} {uid} 1")):
        if name != "setgroups" or os.path.exists("/proc/self/setgroups"):  # gVisor has no such file
            _write(f"/proc/self/{name}", line)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    names = [name for _, name in socket.if_nameindex()]
    if names != ["lo"]:
        raise OSError(f"a new network namespace has {names}, not just lo")
    # gVisor does not know the request; there it is up from the start, which the next lines check.
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP_RUNNING))
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()):
        pass


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    os.write(fd, text.encode())
    os.close(fd)
