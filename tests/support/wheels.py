"""Builds the wheel and installs it as users do, out of reach of the source tree.

All packages come from a directory of wheels, fetched once for each version of Python and verified against uv.lock.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ORDINARY = 54321
PYTHONS = ("3.12", "3.13")
_SETUP = str(ROOT / "tools" / "setup.sh")
_WHEELS = ROOT / ".wheels"
_SECONDS = 900
# An ordinary user has no cgroup of his own.
_WITHOUT_CGROUP = {"FUMEHOOD_LIMITS": "best-effort"}


@dataclass(frozen=True)
class Kind:
    """How and for whom Fumehood is installed."""

    installer: str  # "pip" or "uv"
    python: str  # "3.12"
    ordinary: bool  # for an ordinary user, by himself, else for root

    def __str__(self) -> str:
        return f"{self.installer}-{self.python}-{'user' if self.ordinary else 'root'}"


def kinds() -> list[Kind]:
    """All combinations; without root, those of an ordinary user."""
    users = (False, True) if os.geteuid() == 0 else (True,)
    return [
        Kind(installer, python, ordinary)
        for installer in ("pip", "uv")
        for python in PYTHONS
        for ordinary in users
    ]


def base_kinds() -> list[Kind]:
    """Those that are tested without any extra: an ordinary user's."""
    return [kind for kind in kinds() if kind.ordinary]


class PythonMissing(Exception):
    """There is no interpreter of that version on this machine."""


@dataclass(frozen=True)
class Fetched:
    """The locked packages for one Python: a directory of wheels, and a file that pins their versions."""

    directory: Path
    constraints: Path


@dataclass(frozen=True)
class Wheels:
    """What installations are made of, in a directory that everybody can read."""

    directory: Path
    fumehood: Path
    uv: Path

    def find_python(self, version: str) -> Path:
        done = subprocess.run([_SETUP, "find", version], capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise PythonMissing(done.stderr.strip())
        return Path(done.stdout.strip())

    def fetch(self, version: str) -> Fetched:
        """The locked packages for that Python, fetched if they are not in the checkout yet; raises PythonMissing."""
        python = self.find_python(version)
        locked = _uv("export", "--frozen", "--extra", "all", "--no-dev", "--no-emit-project", "--no-annotate")
        digest = hashlib.sha256(f"{version} {locked}".encode()).hexdigest()[:16]
        fetched = _WHEELS / f"{version}-{digest}"
        if not fetched.is_dir():
            _download(python, locked, fetched)
        target = self.directory / f"wheels-{version}"
        shutil.copytree(fetched, target, copy_function=_link_or_copy)
        return Fetched(target, target / "constraints.txt")


def _download(python: Path, locked: str, target: Path) -> None:
    _WHEELS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_WHEELS) as name:
        wheels = Path(name, "wheels")
        wheels.mkdir(mode=0o755)
        hashed = Path(name, "requirements.txt")
        hashed.write_text(locked)
        options = ("--no-deps", "--only-binary", ":all:", "--require-hashes", "--quiet")
        _run([str(python), "-m", "pip", "download", *options, "-d", str(wheels), "-r", str(hashed)])
        pins = _uv("export", "--frozen", "--extra", "all", "--no-dev", "--no-emit-project", "--no-hashes")
        (wheels / "constraints.txt").write_text(pins)
        wheels.rename(target)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _uv(*arguments: str) -> str:
    return _run([_SETUP, "uv", *arguments])


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"{command} failed: {done.stdout}{done.stderr}")
    return done.stdout


@contextmanager
def build() -> Generator[Wheels]:
    """Build the wheel in a directory outside of the checkout, removed afterwards."""
    directory = Path(tempfile.mkdtemp(prefix="fumehood-wheel-", dir="/var/tmp"))
    directory.chmod(0o755)
    try:
        _uv("build", "--quiet", "--wheel", "--out-dir", str(directory / "dist"), str(ROOT))
        (wheel,) = (directory / "dist").glob("*.whl")
        uv = directory / "uv"
        shutil.copy2(_path_of_uv(), uv)
        yield Wheels(directory, wheel, uv)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _path_of_uv() -> str:
    """The executable itself: an ordinary user cannot reach the one in the checkout."""
    for candidate in (
        shutil.which("uv"),
        str(ROOT / ".uv" / "bin" / "uv"),
        os.path.expanduser("~/.local/bin/uv"),
    ):
        if candidate is not None and os.access(candidate, os.X_OK):
            return os.path.realpath(candidate)
    raise FileNotFoundError("uv")


@dataclass(frozen=True)
class Installation:
    """An environment with the wheel in it, and the user whose it is."""

    kind: Kind
    home: Path
    base: Path  # the interpreter it was made from

    @property
    def environment(self) -> Path:
        return self.home / "environment"

    @property
    def bin(self) -> Path:
        return self.environment / "bin"

    @property
    def variables(self) -> dict[str, str]:
        return {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
            "XDG_CACHE_HOME": str(self.home / "cache"),
            "FUMEHOOD_PACKAGES_DIR": str(self.home / "packages"),
            "SECRET_OF_THE_HOST": "canary-4711",
            **(_WITHOUT_CGROUP if self.kind.ordinary else {}),
        }

    def command(self, *arguments: str, **variables: str) -> list[str]:
        """As that user, with his variables and no others."""
        given = [f"{name}={value}" for name, value in {**self.variables, **variables}.items()]
        command = ["env", "-i", *given, *arguments]
        if not self.kind.ordinary or os.geteuid() != 0:
            return command
        helper = str(ROOT / "tests" / "support" / "unprivileged_user.py")
        prefix = str(self.base.resolve().parent.parent)
        return [sys.executable, helper, "--uid", str(ORDINARY), "--tree", prefix, "--", *command]

    def run(
        self, *arguments: str, timeout: float = 110, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments, **variables),
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def fumehood(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return self.run(str(self.bin / "fumehood"), *arguments, timeout=110, **variables)


def install(wheels: Wheels, kind: Kind, packages: Fetched, extra: str = "[all]") -> Installation:
    """Install the wheel with an extra, by the user himself; without any index."""
    name = f"{kind}{'' if extra else '-base'}"
    home = wheels.directory / name
    home.mkdir(mode=0o755)
    if kind.ordinary and os.geteuid() == 0:
        os.chown(home, ORDINARY, ORDINARY)
    made = Installation(kind, home, wheels.find_python(kind.python))
    wheel = f"fumehood{extra} @ file://{wheels.fumehood}"
    offline = (
        "--no-index",
        "--find-links",
        str(packages.directory),
        "--constraint",
        str(packages.constraints),
    )
    if kind.installer == "pip":
        commands = [
            [str(made.base), "-m", "venv", str(made.environment)],
            [str(made.bin / "pip"), "install", "--quiet", *offline, wheel],
        ]
    else:
        uv = [str(wheels.uv), "--quiet", "--cache-dir", str(wheels.directory / f"uv-{kind.ordinary}")]
        commands = [
            [*uv, "venv", "--python", str(made.base), str(made.environment)],
            [*uv, "pip", "install", "--python", str(made.bin / "python"), *offline, wheel],
        ]
        Path(uv[-1]).mkdir(mode=0o755, exist_ok=True)
        if kind.ordinary and os.geteuid() == 0:
            os.chown(uv[-1], ORDINARY, ORDINARY)
    for command in commands:
        done = made.run(
            *("env", "PIP_DISABLE_PIP_VERSION_CHECK=1", "PIP_ROOT_USER_ACTION=ignore", *command),
            timeout=_SECONDS,
        )
        if done.returncode:
            raise RuntimeError(f"{kind}: {command} failed: {done.stdout}{done.stderr}")
    return made
