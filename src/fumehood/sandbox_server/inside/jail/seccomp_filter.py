"""Installs a seccomp program on the calling process.

This runs in a fork of the zygote, so symbols are looked up at import.
"""

import ctypes
import errno
import functools
import os

_PR_SET_NO_NEW_PRIVS = 38
_PR_GET_NO_NEW_PRIVS = 39
_SECCOMP_SET_MODE_FILTER = 1
# The caller has one thread; if a library has started another, it is filtered too, or the call fails.
# SECCOMP_FILTER_FLAG_SPEC_ALLOW is not set: it would opt untrusted code out of the speculation mitigations that some
# kernels tie to seccomp.
_SECCOMP_FILTER_FLAG_TSYNC = 1
_SECCOMP_NUMBER = {"x86_64": 317, "aarch64": 277}.get(os.uname().machine)
_INSTRUCTION = 8
_MAX_INSTRUCTIONS = 4096  # BPF_MAXINSNS


class _SockFprog(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


_libc = ctypes.CDLL(None, use_errno=True)
_prctl = _libc.prctl
_prctl.restype = ctypes.c_int
_prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong]
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = [ctypes.c_long, ctypes.c_ulong, ctypes.c_ulong, ctypes.POINTER(_SockFprog)]


def _os_error(number: int, what: str) -> OSError:
    return OSError(number, f"{what}: {os.strerror(number)}")


def set_no_new_privs() -> None:
    """Set no_new_privs, which `install` requires. Raises OSError."""
    if _prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise _os_error(ctypes.get_errno(), "no_new_privs")


@functools.cache
def prepare_program(program: bytes) -> tuple[_SockFprog, ctypes.Array[ctypes.c_char]]:
    """Return the kernel's argument and the memory it points to; cached, so that a fork need not make it."""
    count, rest = divmod(len(program), _INSTRUCTION)
    if rest or not 0 < count <= _MAX_INSTRUCTIONS:
        raise _os_error(errno.EINVAL, f"seccomp program of {len(program)} bytes")
    instructions = ctypes.create_string_buffer(program, len(program))
    return _SockFprog(count, ctypes.addressof(instructions)), instructions


def install(program: bytes) -> None:
    """Filter this process and everything it starts. Raises OSError, and then nothing has changed.

    no_new_privs must be set, also for callers with CAP_SYS_ADMIN, from whom the kernel does not require it.
    """
    argument, _ = prepare_program(program)
    if _SECCOMP_NUMBER is None:
        raise _os_error(errno.ENOSYS, f"seccomp on {os.uname().machine}")
    if _prctl(_PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) != 1:
        raise _os_error(errno.EACCES, "seccomp without no_new_privs")
    result = _syscall(_SECCOMP_NUMBER, _SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_TSYNC, argument)
    if result < 0:
        raise _os_error(ctypes.get_errno(), "seccomp")
    if result > 0:
        raise _os_error(errno.EBUSY, f"seccomp: thread {result} cannot be filtered")
