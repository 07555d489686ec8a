"""Runs a program as a neighbouring container would: another PID namespace, its own /mnt/data.

    python tests/support/pod_container.py PROGRAM ARGUMENT…

It ends with whoever started it, and what it runs ends with it.
"""

import os
import signal
import sys

from fumehood.sandbox_server.inside import syscalls


def main(command: list[str]) -> int:
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    uid, gid = os.getuid(), os.getgid()
    os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNS | os.CLONE_NEWPID)
    for name, line in (("setgroups", "deny"), ("gid_map", f"{gid} {gid} 1"), ("uid_map", f"{uid} {uid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)
    syscalls.mount("none", "/", None, syscalls.MS_PRIVATE | syscalls.MS_REC)
    syscalls.mount("data", "/mnt", "tmpfs", 0)
    os.mkdir("/mnt/data")
    pid = os.fork()
    if pid == 0:
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        syscalls.mount("proc", "/proc", "proc", 0)
        os.execv(command[0], command)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
