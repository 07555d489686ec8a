"""Installs a seccomp program on the calling process."""

import ctypes
import errno

from fumehood.sandbox_server.inside import syscalls

_SECCOMP_SET_MODE_FILTER = 1
# The caller has one thread; if a library has started another, it is filtered too, or the call fails.
# SECCOMP_FILTER_FLAG_SPEC_ALLOW is not set: it would opt untrusted code out of the speculation mitigations that some
# kernels tie to seccomp.
_SECCOMP_FILTER_FLAG_TSYNC = 1
_INSTRUCTION = 8
_MAX_INSTRUCTIONS = 4096  # BPF_MAXINSNS


class _SockFprog(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


def install(program: bytes) -> None:
    """Filter this process and everything it starts. Raises OSError, and then nothing has changed.

    no_new_privs must be set, also for callers with CAP_SYS_ADMIN, from whom the kernel does not require it.
    """
    count, rest = divmod(len(program), _INSTRUCTION)
    if rest or not 0 < count <= _MAX_INSTRUCTIONS:
        raise OSError(errno.EINVAL, f"seccomp program of {len(program)} bytes")
    if syscalls.prctl(syscalls.PR_GET_NO_NEW_PRIVS) != 1:
        raise PermissionError(errno.EACCES, "seccomp without no_new_privs")
    instructions = ctypes.create_string_buffer(program, len(program))
    argument = _SockFprog(count, ctypes.addressof(instructions))
    thread = syscalls.seccomp(
        _SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_TSYNC, ctypes.addressof(argument)
    )
    if thread > 0:
        raise OSError(errno.EBUSY, f"seccomp: thread {thread} cannot be filtered")
