"""Puts layers of packages into a running sandbox, read-only; imports only the standard library and siblings.

The helper works in three mount namespaces, one after the other: the zygote's that has the store, a copy of it to
put the layers together under neutral names (mountinfo shows what an overlay was made of), and the sandbox's.
"""

import json
import os
import re
import socket
from typing import NoReturn

from fumehood.sandboxd.inside import layout, syscalls

_MAX_TASK = 64 * 1024
_LAYER = re.compile(r"[0-9a-f]{64}")
_FLAGS = syscalls.MS_NOSUID | syscalls.MS_NODEV


def help_with(supervisor: socket.socket, mounts: list[int]) -> NoReturn:
    """The helper's whole life: hear which layers, the first on top, attach them, answer, end.

    mounts: the mount namespace of the sandbox, and the one that has the store, if there is one.
    """
    answer: dict[str, str] = {}
    try:
        names: list[str] = json.loads(supervisor.recv(_MAX_TASK))["layers"]
        if len(mounts) != 2:
            raise OSError("this zygote has no store of packages")
        namespace, layers = mounts
        os.setns(layers, os.CLONE_NEWNS)
        os.unshare(os.CLONE_NEWNS)
        tree = _put_together(names)
        os.setns(namespace, os.CLONE_NEWNS)
        syscalls.attach_mount(tree, layout.PACKAGES)
    except BaseException as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    supervisor.send(json.dumps(answer).encode())
    os._exit(0)


def _put_together(names: list[str]) -> int:
    """One read-only tree of all these layers, detached."""
    stage = layout.STAGING
    syscalls.mount("stage", stage, "tmpfs", _FLAGS, "mode=0755,size=1m")
    for number, name in enumerate(names):
        if not _LAYER.fullmatch(name):
            raise ValueError(f"{name!r} is no layer")
        os.mkdir(f"{stage}/{number}")
        syscalls.mount(f"{layout.LAYERS}/{name}", f"{stage}/{number}", None, syscalls.MS_BIND)
    os.mkdir(f"{stage}/empty")  # an overlay is of two trees at least
    os.mkdir(f"{stage}/whole")
    os.chdir(stage)
    lower = ":".join([*map(str, range(len(names))), "empty"])
    syscalls.mount("packages", f"{stage}/whole", "overlay", _FLAGS | syscalls.MS_RDONLY, f"lowerdir={lower}")
    return syscalls.clone_mount(f"{stage}/whole")
