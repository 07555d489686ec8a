"""The short-lived process that works on a sandbox's files as its user and in its cgroup; imports only siblings.

It answers once: what it did, or why not. On the way it may ask (`leave`), and the supervisor answers.
"""

import errno
import json
import os
import socket
from dataclasses import astuple
from typing import Any, NoReturn

from fumehood.sandboxd.inside import archives, bundles, files, filters, jail, landlock, staging
from fumehood.sandboxd.inside.leave import AskedLeave, Refused

_MAX_TASK = 64 * 1024
_OOM_SCORE = 1000  # before anything of the sandbox itself


def run(uid: int, program: bytes, supervisor: socket.socket, data: int, cgroups: list[int]) -> NoReturn:
    """The helper's whole life: become the sandbox's user in its cgroup, hear the task, do it, answer, end."""
    answer: dict[str, Any]
    opened: list[int] = []
    try:
        jail.join_cgroups(cgroups)
        jail.prefer_for_oom(_OOM_SCORE)
        jail.take_user(uid)
        jail.renounce()
        filters.install(program)
        body, fds, _, _ = socket.recv_fds(supervisor, _MAX_TASK, 1)
        if not body:
            os._exit(0)
        answer = _Task(json.loads(body), data, fds[0] if fds else -1, opened).perform(AskedLeave(supervisor))
    except files.UnsafePath as error:
        answer = {"error": str(error), "errno": errno.EINVAL}
    except Refused as error:
        answer = {"error": str(error), "errno": error.number, "kind": error.kind}
    except OSError as error:
        answer = {"error": error.strerror or str(error), "errno": error.errno or errno.EIO}
    except BaseException as error:
        answer = {"error": f"{type(error).__name__}: {error}", "errno": errno.EIO}
    try:
        socket.send_fds(supervisor, [json.dumps(answer).encode()], opened)
    except OSError:  # nobody waits any more
        os._exit(1)
    os._exit(0)


class _Task:
    def __init__(self, task: dict[str, Any], data: int, source: int, opened: list[int]) -> None:
        self._task = task
        self._data = data
        self._source = source
        self._opened = opened

    def perform(self, leave: AskedLeave) -> dict[str, Any]:
        task, data = self._task, self._data
        match task["do"]:
            case "write":
                found = staging.write(
                    data, task["path"], self._source, task["token"], leave, executable=task["executable"]
                )
                return {
                    "size": found.size,
                    "modified_ns": found.modified_ns,
                    "changed_ns": found.changed_ns,
                    "inode": found.inode,
                    "executable": found.executable,
                }
            case "unpack":
                return self._unpack(leave)
            case "receive":
                return self._receive(leave)
            case "give":
                return self._give()
            case "discard":
                staging.discard(data, task["token"], task["most"])
            case "delete":
                files.delete(data, task["path"])
            case "open":
                self._opened.append(files.open_regular(data, task["path"]))
            case "walk":
                return self._walk()
            case unknown:
                raise ValueError(f"unknown task {unknown!r}")
        return {}

    def _unpack(self, leave: AskedLeave) -> dict[str, Any]:
        """Decoders are written in C and read what strangers wrote: nothing but the data directory is in reach."""
        task = self._task
        landlock.restrict_to_directory(self._data)
        done = archives.unpack(
            self._data,
            self._source,
            kind=task["kind"],
            into=task["into"],
            token=task["token"],
            bounds=self._bounds(),
            leave=leave,
        )
        return {
            "files": done.files,
            "bytes": done.size,
            "skipped": done.skipped,
            "modified_ns": done.modified_ns,
            "changed_ns": done.changed_ns,
        }

    def _receive(self, leave: AskedLeave) -> dict[str, Any]:
        landlock.restrict_to_directory(self._data)
        done = bundles.receive(
            self._data, self._source, token=self._task["token"], bounds=self._bounds(), leave=leave
        )
        return {
            "files": done.files,
            "bytes": done.size,
            "modified_ns": done.modified_ns,
            "changed_ns": done.changed_ns,
            "refused": done.refused,
            "reasons": done.reasons,
        }

    def _bounds(self) -> archives.Bounds:
        return archives.Bounds(members=self._task["members"], size=self._task["bytes"])

    def _give(self) -> dict[str, Any]:
        """The paths come through the same socket through which the files go: there can be many."""
        with socket.socket(fileno=os.dup(self._source)) as stream:
            paths = json.loads(b"".join(staging.received_from(self._source)))
            for piece in bundles.answers(self._data, paths):
                stream.sendall(piece)
            stream.shutdown(socket.SHUT_WR)
        return {}

    def _walk(self) -> dict[str, Any]:
        """A listing can be longer than a packet."""
        found, cut = files.walk(self._data)
        listing = os.memfd_create("listing")
        with os.fdopen(os.dup(listing), "wb") as file:
            file.write(json.dumps([astuple(item) for item in found]).encode())
        self._opened.append(listing)
        return {"cut": cut}
