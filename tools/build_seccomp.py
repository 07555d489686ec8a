"""Compiles the seccomp policy with libseccomp into the committed programs.

Run it after each change of syscall_policy.py; `--check` compares instead of writing. Exit status: 0 done or equal, 1
different, 3 unknown (no libseccomp, or another version than the manifest's).

libseccomp takes call numbers of its own machine and, for a foreign architecture, translates them by name, which fails
for calls newer than the library. So all programs are compiled for x86_64 with the numbers of the target, and the one
word that means "x86_64" is replaced. Tests run the programs, so this is checked.
"""

import argparse
import ctypes
import ctypes.util
import hashlib
import json
import os
import struct
import sys
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from fumehood.sandbox_server.seccomp import syscall_policy as p  # noqa: E402

TARGET = ROOT / "src/fumehood/sandbox_server/seccomp"
MANIFEST = "manifest.json"
UNKNOWN = 3

_ATTRIBUTE_BAD_ARCH, _ATTRIBUTE_OPTIMIZE = 2, 8
_BINARY_TREE = 2
_MASKED_EQ = 7
_UNKNOWN_NAME = -1  # below that: known, but not on this architecture


class _Comparison(ctypes.Structure):
    """struct scmp_arg_cmp."""

    _fields_ = [
        ("arg", ctypes.c_uint),
        ("op", ctypes.c_int),
        ("datum_a", ctypes.c_uint64),
        ("datum_b", ctypes.c_uint64),
    ]


class _Version(ctypes.Structure):
    """struct scmp_version."""

    _fields_ = [("major", ctypes.c_uint), ("minor", ctypes.c_uint), ("micro", ctypes.c_uint)]


class Libseccomp:
    """The functions of libseccomp that compile a policy."""

    def __init__(self, path: str) -> None:
        lib = ctypes.CDLL(path)
        lib.seccomp_version.restype = ctypes.POINTER(_Version)
        lib.seccomp_version.argtypes = []
        lib.seccomp_init.restype = ctypes.c_void_p
        lib.seccomp_init.argtypes = [ctypes.c_uint32]
        lib.seccomp_release.restype = None
        lib.seccomp_release.argtypes = [ctypes.c_void_p]
        lib.seccomp_attr_set.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32]
        lib.seccomp_syscall_resolve_name_arch.argtypes = [ctypes.c_uint32, ctypes.c_char_p]
        lib.seccomp_rule_add_exact_array.argtypes = [
            ctypes.c_void_p,
            ctypes.c_uint32,
            ctypes.c_int,
            ctypes.c_uint,
            ctypes.c_void_p,
        ]
        lib.seccomp_export_bpf.argtypes = [ctypes.c_void_p, ctypes.c_int]
        self._lib = lib

    def version(self) -> str:
        found = self._lib.seccomp_version().contents
        return f"{found.major}.{found.minor}.{found.micro}"

    def number(self, name: str, machine: str) -> int | None:
        """Return a call's number, or None if the architecture does not have it."""
        found = int(self._lib.seccomp_syscall_resolve_name_arch(p.AUDIT_ARCH[machine], name.encode()))
        if found == _UNKNOWN_NAME:
            if name not in p.NUMBERS:
                raise SystemExit(
                    f"libseccomp does not know {name}: give its number in syscall_policy.NUMBERS"
                )
            return p.NUMBERS[name]
        if name in p.NUMBERS and found != p.NUMBERS[name]:
            raise SystemExit(f"syscall_policy.NUMBERS is wrong about {name}: it is {found}")
        return found if found >= 0 else None

    def compile(self, policy: p.SeccompPolicy, numbers: dict[str, int]) -> bytes:
        """Return the program for x86_64 with these numbers."""
        context = self._lib.seccomp_init(p.DEFAULT)
        if not context:
            raise SystemExit("seccomp_init failed")
        try:
            self._attribute(context, _ATTRIBUTE_BAD_ARCH, p.BAD_ARCH)
            self._attribute(context, _ATTRIBUTE_OPTIMIZE, _BINARY_TREE)
            for name, number in sorted(numbers.items()):
                for rule in rules_of(policy, name):
                    self._add(context, number, rule, name)
            return self._export(context)
        finally:
            self._lib.seccomp_release(context)

    def _attribute(self, context: int, attribute: int, value: int) -> None:
        if self._lib.seccomp_attr_set(context, attribute, value) != 0:
            raise SystemExit(f"libseccomp refuses attribute {attribute}")

    def _add(self, context: int, number: int, rule: p.SyscallRule, name: str) -> None:
        tests = (_Comparison * len(rule.tests))(
            *[_Comparison(test.index, _MASKED_EQ, test.mask, test.value) for test in rule.tests]
        )
        result = self._lib.seccomp_rule_add_exact_array(context, rule.action, number, len(tests), tests)
        if result != 0:
            raise SystemExit(f"libseccomp refuses a rule of {name}: {os.strerror(-result)}: {rule}")

    def _export(self, context: int) -> bytes:
        fd = os.memfd_create("program")
        with open(fd, "rb") as file:
            if self._lib.seccomp_export_bpf(context, fd) != 0:
                raise SystemExit("seccomp_export_bpf failed")
            file.seek(0)
            return file.read()


def rules_of(policy: p.SeccompPolicy, name: str) -> tuple[p.SyscallRule, ...]:
    if name in policy.allowed:
        return (p.SyscallRule((), p.ALLOW),)
    if name in policy.refused:
        return (p.SyscallRule((), policy.refused[name]),)
    return policy.by_argument[name]


def names_of(policy: p.SeccompPolicy) -> list[str]:
    groups = (set(policy.allowed), set(policy.refused), set(policy.by_argument))
    names = set[str]().union(*groups)
    if len(names) != sum(len(group) for group in groups):
        raise SystemExit(f"{policy.name}: a call is in two places")
    return sorted(names)


def retarget(program: bytes, machine: str) -> bytes:
    """The same program for another architecture: the word it compares `seccomp_data.arch` with."""
    layout = struct.Struct("<HBBI")
    found = [list(fields) for fields in layout.iter_unpack(program)]
    places = [fields for fields in found if fields[3] == p.AUDIT_ARCH["x86_64"]]
    if len(places) != 1:
        raise SystemExit(f"expected one architecture test in the program, found {len(places)}")
    places[0][3] = p.AUDIT_ARCH[machine]
    return b"".join(layout.pack(*fields) for fields in found)


def build(library: Libseccomp) -> dict[str, bytes]:
    """Return the content of every generated file, by name."""
    files: dict[str, bytes] = {}
    table: dict[str, dict[str, int]] = {}
    blobs: dict[str, dict[str, int | str]] = {}
    for machine in p.AUDIT_ARCH:
        table[machine] = {}
        for policy in p.POLICIES.values():
            found = {name: library.number(name, machine) for name in names_of(policy)}
            numbers = {name: number for name, number in found.items() if number is not None}
            table[machine] |= numbers
            program = retarget(library.compile(policy, numbers), machine)
            files[f"{policy.name}.{machine}.bpf"] = program
            blobs[f"{policy.name}.{machine}.bpf"] = {
                "instructions": len(program) // 8,
                "sha256": hashlib.sha256(program).hexdigest(),
            }
    manifest = {"libseccomp": library.version(), "blobs": blobs, "numbers": table}
    files[MANIFEST] = (json.dumps(manifest, indent=1, sort_keys=True) + "\n").encode()
    return files


def exit_unknown(reason: str) -> NoReturn:
    print(reason)
    raise SystemExit(UNKNOWN)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile the seccomp policy.")
    parser.add_argument("--check", action="store_true", help="compare with the committed files")
    check: bool = parser.parse_args().check
    path = ctypes.util.find_library("seccomp")
    if os.uname().machine != "x86_64" or path is None:
        exit_unknown("compiling the seccomp policy needs libseccomp.so.2 on x86_64")
    library = Libseccomp(path)
    if check:
        recorded = json.loads((TARGET / MANIFEST).read_text())["libseccomp"]
        if recorded != library.version():
            exit_unknown(f"compiled with libseccomp {recorded}, here is {library.version()}")
    files = build(library)
    if check:
        different = [
            name
            for name, content in files.items()
            if not (TARGET / name).is_file() or (TARGET / name).read_bytes() != content
        ]
        if different:
            print(f"out of date: {', '.join(different)}; run tools/build_seccomp.py")
            raise SystemExit(1)
        return
    for name, content in files.items():
        (TARGET / name).write_bytes(content)
        print(f"{name}: {len(content)} bytes")


if __name__ == "__main__":
    main()
