"""The two short-lived helper processes of a sandbox: one works on its files, one attaches packages.

A helper receives one task over its own socket, sends one answer and exits. While it writes files, it asks the
supervisor for quota (see quota_requests.py).
"""

import errno
import json
import os
import re
import socket
from dataclasses import astuple
from typing import Any, NoReturn

from fumehood.sandbox_server.inside import layout, syscalls
from fumehood.sandbox_server.inside.files import (
    archive_unpacker,
    atomic_writes,
    file_bundles,
    untrusted_files,
)
from fumehood.sandbox_server.inside.files.quota_requests import FileTaskRefused, WriteQuota
from fumehood.sandbox_server.inside.jail import jail_builder, landlock, seccomp_installer

_MAX_TASK_BYTES = 64 * 1024
_OOM_SCORE = 1000  # the OOM killer takes it before the sandbox's own processes
_LAYER_NAME = re.compile(r"[0-9a-f]{64}")
_MOUNT_FLAGS = syscalls.MS_NOSUID | syscalls.MS_NODEV


def run_file_helper(
    uid: int, seccomp_program: bytes, supervisor_socket: socket.socket, data_fd: int, cgroups: list[int]
) -> NoReturn:
    """Become the sandbox's user in its cgroup, receive a task, perform it, answer and exit."""
    answer: dict[str, Any]
    opened: list[int] = []
    try:
        jail_builder.join_cgroups(cgroups)
        jail_builder.raise_oom_score(_OOM_SCORE)
        jail_builder.switch_user(uid)
        syscalls.drop_all_privileges()
        seccomp_installer.install(seccomp_program)
        body, fds, _, _ = socket.recv_fds(supervisor_socket, _MAX_TASK_BYTES, 1)
        if not body:
            os._exit(0)
        answer = _FileTask(json.loads(body), data_fd, fds[0] if fds else -1, opened).perform(
            WriteQuota(supervisor_socket)
        )
    except untrusted_files.UnsafePath as error:
        answer = {"error": str(error), "errno": errno.EINVAL}
    except FileTaskRefused as error:
        answer = {"error": str(error), "errno": error.number, "kind": error.kind}
    except OSError as error:
        answer = {"error": error.strerror or str(error), "errno": error.errno or errno.EIO}
    except BaseException as error:
        answer = {"error": f"{type(error).__name__}: {error}", "errno": errno.EIO}
    try:
        socket.send_fds(supervisor_socket, [json.dumps(answer).encode()], opened)
    except OSError:  # nobody waits for it any more
        os._exit(1)
    os._exit(0)


class _FileTask:
    """One task on the files below `data_fd`.

    source_fd: where content comes from, or -1.
    opened_fds: receives the descriptors to send with the answer.
    """

    def __init__(self, task: dict[str, Any], data_fd: int, source_fd: int, opened_fds: list[int]) -> None:
        self._task = task
        self._data_fd = data_fd
        self._source_fd = source_fd
        self._opened_fds = opened_fds

    def perform(self, permit: WriteQuota) -> dict[str, Any]:
        task, data = self._task, self._data_fd
        match task["op"]:
            case "write":
                written = atomic_writes.write_file(
                    data, task["path"], self._source_fd, task["token"], permit, executable=task["executable"]
                )
                return {
                    "size": written.size,
                    "modified_ns": written.modified_ns,
                    "changed_ns": written.changed_ns,
                    "inode": written.inode,
                    "executable": written.executable,
                }
            case "unpack":
                return self._unpack_archive(permit)
            case "receive":
                return self._receive_files(permit)
            case "send":
                return self._send_files()
            case "discard":
                atomic_writes.discard_staged(data, task["token"], task["max_entries"])
            case "delete":
                untrusted_files.delete_file(data, task["path"])
            case "open":
                self._opened_fds.append(untrusted_files.open_regular_file(data, task["path"]))
            case "list":
                return self._list_files()
            case unknown:
                raise ValueError(f"unknown task {unknown!r}")
        return {}

    def _unpack_archive(self, permit: WriteQuota) -> dict[str, Any]:
        """Unpack with the data directory as the only writable one: decompressors in C parse untrusted input."""
        task = self._task
        landlock.restrict_to_directory(self._data_fd)
        outcome = archive_unpacker.unpack_archive(
            self._data_fd,
            self._source_fd,
            kind=task["kind"],
            into=task["into"],
            token=task["token"],
            limits=self._limits(),
            permit=permit,
        )
        return {
            "files": outcome.files,
            "bytes": outcome.size,
            "skipped": outcome.skipped,
            "modified_ns": outcome.modified_ns,
            "changed_ns": outcome.changed_ns,
        }

    def _receive_files(self, permit: WriteQuota) -> dict[str, Any]:
        landlock.restrict_to_directory(self._data_fd)
        outcome = file_bundles.receive_files(
            self._data_fd, self._source_fd, token=self._task["token"], limits=self._limits(), permit=permit
        )
        return {
            "files": outcome.files,
            "bytes": outcome.size,
            "modified_ns": outcome.modified_ns,
            "changed_ns": outcome.changed_ns,
            "refused": outcome.refused,
            "reasons": outcome.reasons,
        }

    def _limits(self) -> archive_unpacker.UnpackLimits:
        return archive_unpacker.UnpackLimits(members=self._task["members"], size=self._task["bytes"])

    def _send_files(self) -> dict[str, Any]:
        """Read paths from the source socket and send the contents back through it: there can be many."""
        with socket.socket(fileno=os.dup(self._source_fd)) as stream:
            paths = json.loads(b"".join(atomic_writes.read_chunks(self._source_fd)))
            for chunk in file_bundles.stream_contents(self._data_fd, paths):
                stream.sendall(chunk)
            stream.shutdown(socket.SHUT_WR)
        return {}

    def _list_files(self) -> dict[str, Any]:
        """Put the listing into a memory file: it can be longer than a packet."""
        found = untrusted_files.list_files(self._data_fd)
        listing = os.memfd_create("listing")
        with os.fdopen(os.dup(listing), "wb") as target:
            target.write(json.dumps([[astuple(file) for file in found.files], found.links]).encode())
        self._opened_fds.append(listing)
        return {"truncated": found.is_truncated}


def run_package_helper(supervisor_socket: socket.socket, mount_namespaces: list[int]) -> NoReturn:
    """Receive the names of package layers, the first on top; attach them to a sandbox, answer and exit.

    mount_namespaces: the sandbox's, and the one with the package layers if there is one.
    """
    answer: dict[str, str] = {}
    try:
        names: list[str] = json.loads(supervisor_socket.recv(_MAX_TASK_BYTES))["layers"]
        if len(mount_namespaces) != 2:
            raise OSError("this zygote has no package layers")
        namespace, layers = mount_namespaces
        os.setns(layers, os.CLONE_NEWNS)
        os.unshare(os.CLONE_NEWNS)
        tree = _assemble_layers(names)
        os.setns(namespace, os.CLONE_NEWNS)
        syscalls.attach_mount(tree, layout.ATTACHED_PACKAGES)
    except BaseException as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    supervisor_socket.send(json.dumps(answer).encode())
    os._exit(0)


def _assemble_layers(names: list[str]) -> int:
    """Return a detached read-only overlay of these layers."""
    stage = layout.STAGING
    syscalls.mount("stage", stage, "tmpfs", _MOUNT_FLAGS, "mode=0755,size=1m")
    for number, name in enumerate(names):
        if not _LAYER_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of a layer")
        os.mkdir(f"{stage}/{number}")
        syscalls.mount(f"{layout.PACKAGE_LAYERS}/{name}", f"{stage}/{number}", None, syscalls.MS_BIND)
    os.mkdir(f"{stage}/empty")  # an overlay needs two layers
    os.mkdir(f"{stage}/whole")
    os.chdir(stage)
    lower = ":".join([*map(str, range(len(names))), "empty"])
    syscalls.mount(
        "packages", f"{stage}/whole", "overlay", _MOUNT_FLAGS | syscalls.MS_RDONLY, f"lowerdir={lower}"
    )
    return syscalls.clone_mount(f"{stage}/whole")
