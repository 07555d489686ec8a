"""Reads and drops the Linux capabilities of this process (numbers as in linux/capability.h)."""

import logging
import os
from collections.abc import Iterable
from pathlib import Path

from fumehood.sandbox_server.inside import syscalls
from fumehood.sandbox_server.isolation_errors import IsolationUnavailable

CHOWN = 0
DAC_OVERRIDE = 1
FOWNER = 3
KILL = 5
SETGID = 6
SETUID = 7
SETPCAP = 8
SYS_PTRACE = 19
SYS_ADMIN = 21

SUPERVISOR_CAPABILITIES = (
    CHOWN,  # own installed packages; give directories to the users that work in them
    DAC_OVERRIDE,  # read files of sandboxes; remove what these users leave
    FOWNER,  # the same for modes and times
    KILL,  # processes of sandboxes have other uids
    SETGID,  # run zygotes, installers and the egress proxy as other users; map user namespaces
    SETUID,
    SETPCAP,  # child processes drop their capabilities for good
    SYS_ADMIN,  # mounts: jails of restarted zygotes, disks, tmpfs quotas
)
"""What a supervisor needs while it runs as root."""

_CAPABILITY_COUNT = 64

logger = logging.getLogger(__name__)


def read_capabilities(pid: int | str = "self") -> dict[str, int]:
    """Inheritable, permitted, effective, bounding and ambient sets, as `/proc` names them (CapEff, …)."""
    lines = Path(f"/proc/{pid}/status").read_bytes().decode(errors="replace").splitlines()
    return {
        name: int(value, 16)
        for name, _, value in (line.partition(":") for line in lines)
        if name[:3] == "Cap"
    }


def limit_capabilities(allowed: Iterable[int]) -> None:
    """Drop all others, for this process and its children; raises OSError.

    Call it before threads start: each thread has its own sets. Without SETPCAP the bounding set cannot be changed and
    stays as it is.
    """
    mask = _to_mask(allowed)
    if _has_capability(SETPCAP):
        _limit_bounding_set(mask)
    syscalls.keep_capabilities(read_capabilities("thread-self")["CapPrm"] & mask)


def limit_supervisor_capabilities() -> None:
    """As root: drop what a supervisor does not need. Raises IsolationUnavailable, also if another thread has more."""
    if os.geteuid() != 0:
        return
    bounded = _has_capability(SETPCAP)
    allowed = SUPERVISOR_CAPABILITIES
    if is_proc_restricted(Path("/proc/self/mounts").read_text(errors="replace")):
        # Otherwise /proc hides the processes that it starts.
        allowed = (*SUPERVISOR_CAPABILITIES, SYS_PTRACE)
    try:
        limit_capabilities(allowed)
    except OSError as error:
        raise _limit_error(str(error)) from error
    excess = ~_to_mask(allowed)
    for thread in os.listdir("/proc/self/task"):
        sets = read_capabilities(f"self/task/{thread}")
        if not bounded:
            del sets["CapBnd"]
        if any(held & excess for held in sets.values()):
            raise _limit_error(f"thread {thread} has more")
    if not bounded:
        logger.warning(
            "CAP_SETPCAP is missing: programs that this server starts as root may have all capabilities of its "
            "container."
        )


def is_proc_restricted(mounts: str) -> bool:
    """Whether /proc hides processes of other users from root without SYS_PTRACE.

    mounts: the text of /proc/self/mounts. `hidepid` exempts the group `gid`, root's by default; `ptraceable` exempts
    none.
    """
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 4 or fields[1] != "/proc" or fields[2] != "proc":
            continue
        parted = (option.partition("=") for option in fields[3].split(","))
        options = {name: value for name, _, value in parted}
        hidden = options.get("hidepid", "off")
        if hidden in ("ptraceable", "4") or (hidden not in ("off", "0") and options.get("gid", "0") != "0"):
            return True
    return False


def _limit_error(reason: str) -> IsolationUnavailable:
    return IsolationUnavailable(
        f"Capabilities that the server does not need cannot be dropped: {reason}.",
        "Allow the system calls capset and prctl, or run it as an ordinary user.",
    )


def _to_mask(numbers: Iterable[int]) -> int:
    return sum(1 << number for number in numbers)


def _has_capability(number: int) -> bool:
    return bool(read_capabilities("thread-self")["CapEff"] >> number & 1)


def _limit_bounding_set(allowed: int) -> None:
    """No program executed from now on gets more than `allowed`."""
    for number in range(_CAPABILITY_COUNT):
        if not allowed >> number & 1 and _is_in_bounding_set(number):
            syscalls.prctl(syscalls.PR_CAPBSET_DROP, number)


def _is_in_bounding_set(number: int) -> bool:
    try:
        return syscalls.prctl(syscalls.PR_CAPBSET_READ, number) == 1
    except OSError:  # past the last capability of this kernel
        return False


def switch_user(uid: int) -> None:
    """As root: become this user and its group for good, without capabilities; raises OSError."""
    if _has_capability(SETPCAP):
        _limit_bounding_set(0)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    syscalls.drop_all_privileges()
