"""Resolves and installs requirements with uv, and explains its errors."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from fumehood.sandbox_server.packages.install_jail import UvResult
from fumehood.sandbox_server.packages.layer_store import PinnedPackage
from fumehood.sandbox_server.packages.package_index_config import PackageIndexConfig
from fumehood.sandbox_server.packages.preinstalled_packages import PreinstalledPackages

_MAX_QUOTED = 600
_MAX_READ = 8000  # of uv's output: the index controls much of it, and regular expressions take time
_NETWORK_ERROR = re.compile(
    r"error sending request|tcp connect error|dns error|operation timed out|Could not connect|"
    r"connection (?:refused|reset|closed)|HTTP status server error|network is unreachable",
    re.IGNORECASE,
)
_INDEX_REFUSED = re.compile(r"(?:HTTP status client error|authentication credentials) \((\d{3}[^)]*)\)")
_UNKNOWN_PACKAGE = re.compile(
    r"([\w.-]{1,120}) was not found in the (package registry|cache|provided package locations|index)"
)
_NO_WHEELS = re.compile(r"([\w.=<>,|*-]{1,120}) (?:have|has) no (?:usable wheels|wheels with a matching)")
_WHEELS_REQUIRED = re.compile(r"Wheels are required for `([^`]+)`")
_BECAUSE = re.compile(r"\b(Because .*)", re.DOTALL)
_CONCLUSION = re.compile(r",? ?(?:and )?we can conclude that your requirements are unsatisfiable\.?")
_HASH = re.compile(r"--hash=(sha256:[0-9a-f]{64})")
_COMMON_ARGUMENTS = (
    "--only-binary",
    ":all:",
    "--no-header",
    "--no-annotate",
    "--color",
    "never",
    "--generate-hashes",
)


class ResolutionFailed(Exception):
    """uv found no versions; `uv_output` is its text, to be explained by `explain_failure`."""

    def __init__(self, uv_output: str) -> None:
        super().__init__(uv_output)
        self.uv_output = uv_output = uv_output[:_MAX_READ]
        self.is_network_error = bool(_NETWORK_ERROR.search(uv_output))
        self.has_no_solution = "No solution found" in uv_output


class UvRunner(Protocol):
    """Where uv runs: `InstallJail`, or `UvContainer` in a pod."""

    @property
    def index(self) -> PackageIndexConfig: ...
    @property
    def cache(self) -> Path: ...
    @property
    def uid(self) -> int | None: ...
    @property
    def timeout(self) -> float: ...
    @property
    def max_bytes(self) -> int: ...
    @property
    def python(self) -> str: ...
    @property
    def links_path(self) -> str: ...

    def inputs_path(self, inputs: Path) -> str:
        """Return where uv sees the directory of its inputs."""
        ...

    def output_path(self, output: Path) -> str:
        """Return where uv sees the directory to install into."""
        ...

    def pyvenv_config(self) -> str: ...

    def with_timeout(self, seconds: float) -> "UvRunner": ...

    async def run(self, arguments: Sequence[str], inputs: Path, output: Path | None = None) -> UvResult:
        """Run uv. Raises InstallTimeout, DiskSpaceExhausted, OSError."""
        ...


@dataclass(frozen=True, slots=True)
class UvClient:
    """Runs uv, with the preinstalled packages as known wheels."""

    jail: UvRunner
    base: PreinstalledPackages

    async def resolve(
        self,
        wanted: Sequence[str],
        present: Mapping[str, str],
        staging: Path,
        *,
        fixed: bool,
        offline: bool,
    ) -> list[PinnedPackage]:
        """Return the versions of all required packages.

        present: name -> version. fixed: those versions must stay; otherwise they are only available.
        Raises ResolutionFailed, InstallTimeout, DiskSpaceExhausted, OSError.
        """
        inputs = self._make_inputs(staging / f"resolve-{int(fixed)}{int(offline)}")
        versions = "".join(f"{name}=={version}\n" for name, version in sorted(present.items()))
        (inputs / "requirements.in").write_text("\n".join(wanted) + "\n")
        (inputs / "versions.txt").write_text(versions)
        self.base.write_stub_wheels(inputs / "links")
        seen = self.jail.inputs_path(inputs)
        arguments = [
            *("pip", "compile", f"{seen}/requirements.in", "--python", self.jail.python),
            *_COMMON_ARGUMENTS,
            *("--find-links", f"{seen}/links"),
            *self._find_links_arguments(),
            *(["--offline"] if offline else []),
            *(["--constraints", f"{seen}/versions.txt"] if fixed else []),
        ]
        result = await self.jail.run(arguments, inputs)
        if result.exit_code != 0:
            raise ResolutionFailed(result.stderr)
        return parse_pins(result.stdout)

    async def install(
        self, pins: Iterable[PinnedPackage], staging: Path, output: Path, *, offline: bool
    ) -> UvResult:
        """Install exactly these packages, checked by their hashes, into `output`."""
        inputs = self._make_inputs(staging / f"install-{int(offline)}")
        lines = [
            " ".join([f"{pin.name}=={pin.version}", *(f"--hash={digest}" for digest in pin.hashes)])
            for pin in pins
        ]
        (inputs / "pins.txt").write_text("\n".join(lines) + "\n")
        arguments = [
            *("pip", "install", "--python", self.jail.python),
            *("--target", self.jail.output_path(output), "--no-deps"),
            *("--only-binary", ":all:", "--require-hashes", "--compile-bytecode", "--color", "never"),
            *self._find_links_arguments(),
            *(["--offline"] if offline else []),
            *("-r", f"{self.jail.inputs_path(inputs)}/pins.txt"),
        ]
        return await self.jail.run(arguments, inputs, output)

    async def empty_cache(self, staging: Path) -> None:
        """Remove everything from uv's cache."""
        await self.jail.run(["cache", "clean"], self._make_inputs(staging / "clean"))

    def _make_inputs(self, directory: Path) -> Path:
        """Create a directory for the inputs of a run of uv."""
        directory.mkdir(mode=0o755)
        (directory / "pyvenv.cfg").write_text(self.jail.pyvenv_config())
        return directory

    def _find_links_arguments(self) -> list[str]:
        return [] if self.jail.index.find_links is None else ["--find-links", self.jail.links_path]


def parse_pins(text: str) -> list[PinnedPackage]:
    """Parse the output of `uv pip compile`. Raises ResolutionFailed for anything but `name==version`."""
    pins: list[PinnedPackage] = []
    for line in text.replace("\\\n", " ").splitlines():
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        head = line.split(" ", 1)[0]
        try:
            requirement = Requirement(head)
            (specifier,) = requirement.specifier
        except (InvalidRequirement, ValueError):
            raise ResolutionFailed(f"uv resolved to something that is not a version: {head[:100]}") from None
        if specifier.operator != "==" or requirement.url is not None:
            raise ResolutionFailed(f"uv resolved to something that is not a version: {head[:100]}")
        hashes = tuple(sorted(set(_HASH.findall(line))))
        pins.append(PinnedPackage(canonicalize_name(requirement.name), specifier.version, hashes))
    return sorted(pins)


def is_unknown_package(uv_output: str) -> bool:
    """Whether an index answered that it does not have the package."""
    return bool(_UNKNOWN_PACKAGE.search(uv_output[:_MAX_READ]))


def explain_failure(uv_output: str) -> str:
    """Return uv's error as one clause for the client; quotes uv if no simpler text is known."""
    uv_output = uv_output[:_MAX_READ]
    if refusal := _INDEX_REFUSED.search(uv_output):
        return f"the package index refused the request ({refusal[1]})"
    if "No space left on device" in uv_output:
        return "the server has no space left for packages"
    if unknown := _UNKNOWN_PACKAGE.search(uv_output):
        return f"there is no package {unknown[1]} on the index"
    if missing := _NO_WHEELS.search(uv_output) or _WHEELS_REQUIRED.search(uv_output):
        return (
            f"{missing[1]} has no wheel for this Python and platform, and packages that must be built from "
            "source are not installed"
        )
    if _NETWORK_ERROR.search(uv_output):
        return "the package index cannot be reached"
    because = _BECAUSE.search(uv_output)
    text = because[1] if because else uv_output.strip()
    text = text.split("hint:")[0]
    text = _CONCLUSION.sub("", " ".join(text.split())).rstrip(" .,")
    text = text.removeprefix("Because ").removeprefix("error: ")
    return text[:_MAX_QUOTED] or "uv gave no reason"
