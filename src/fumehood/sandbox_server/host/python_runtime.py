"""Finds the interpreter and the packages that sandboxes get."""

import importlib.metadata
import os
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_CERTIFICATES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)


class PythonRuntimeUnavailable(Exception):
    """The interpreter or its packages cannot be used for sandboxes; the message says why."""


@dataclass(frozen=True, slots=True)
class PackageDirectory:
    """A directory of installed packages; sandboxes see only its top-level entries in `visible_names`."""

    path: Path
    visible_names: frozenset[str]


@dataclass(frozen=True, slots=True)
class PythonRuntime:
    """The interpreter and packages that sandboxes get; `prefix` is None for the distribution's own Python.

    packages: where the packages of the extra `sandbox` are installed, in the order in which Python finds them.
    """

    prefix: Path | None
    executable: Path
    version: str
    library: str
    packages: tuple[PackageDirectory, ...]
    certificates: Path | None

    @property
    def has_shared_library(self) -> bool:
        """Whether the loader needs LD_LIBRARY_PATH for libpython, whose recorded path is absolute."""
        return self.prefix is not None and any((self.prefix / "lib").glob("libpython*.so*"))


def discover_runtime() -> PythonRuntime:
    """This interpreter with the packages of the extra `sandbox`; raises PythonRuntimeUnavailable."""
    executable = Path(os.path.realpath(sys.executable))
    prefix = Path(os.path.realpath(sys.base_prefix))
    if not executable.is_relative_to(prefix / "bin"):
        raise PythonRuntimeUnavailable(
            f"the interpreter {executable} does not lie in its own prefix {prefix}; use a standard Python build",
        )
    certificates = next((Path(path) for path in _CERTIFICATES if os.path.isfile(path)), None)
    return PythonRuntime(
        prefix=None if prefix == Path("/usr") else prefix,
        executable=executable,
        version=f"{sys.version_info.major}.{sys.version_info.minor}",
        library=Path(sysconfig.get_path("stdlib")).name,
        packages=_group_by_directory(find_sandbox_distributions()),
        certificates=certificates,
    )


def find_sandbox_distributions() -> dict[str, importlib.metadata.Distribution]:
    """The installed distributions among the dependencies of `fumehood[sandbox]`."""
    found: dict[str, importlib.metadata.Distribution] = {}
    pending: list[tuple[str, str]] = []
    try:
        wanted = _read_requirements("fumehood", "sandbox")
    except importlib.metadata.PackageNotFoundError:
        raise PythonRuntimeUnavailable(
            "fumehood is not installed, only importable; install it in an environment"
        ) from None
    for requirement in wanted:
        if requirement.marker is not None and "extra" in str(requirement.marker):
            pending.append((requirement.name, ""))
            pending += [(requirement.name, extra) for extra in requirement.extras]
    seen: set[tuple[str, str]] = set()
    while pending:
        name, extra = pending.pop()
        key = (canonicalize_name(name), extra)
        if key in seen:
            continue
        seen.add(key)
        try:
            found[key[0]] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        for requirement in _read_requirements(name, extra):
            pending.append((requirement.name, ""))
            pending += [(requirement.name, further) for further in requirement.extras]
    return found


def _read_requirements(name: str, extra: str) -> list[Requirement]:
    parsed = [Requirement(line) for line in importlib.metadata.distribution(name).requires or ()]
    return [item for item in parsed if item.marker is None or item.marker.evaluate({"extra": extra})]


def _group_by_directory(
    distributions: dict[str, importlib.metadata.Distribution],
) -> tuple[PackageDirectory, ...]:
    """By directory: with `pip install --user` or system packages there is more than one."""
    names: dict[str, set[str]] = {}
    for distribution in distributions.values():
        directory = os.path.realpath(str(distribution.locate_file("")))
        if os.path.isdir(directory):
            names.setdefault(directory, set()).update(_read_top_level_names(distribution))
    order = {os.path.realpath(entry): number for number, entry in reversed(list(enumerate(sys.path)))}
    found = sorted(names, key=lambda directory: order.get(directory, len(order)))
    return tuple(PackageDirectory(Path(directory), frozenset(names[directory])) for directory in found)


def _read_top_level_names(distribution: importlib.metadata.Distribution) -> set[str]:
    """The top-level files and directories that a distribution installed."""
    names: set[str] = set()
    for line in (distribution.read_text("RECORD") or "").splitlines():
        first = line.split(",", 1)[0].split("/", 1)[0].strip('"')
        # Path files (.pth) are the environment's, not the sandbox's.
        if first not in ("..", "") and not first.endswith(".pth"):
            names.add(first)
    return names
