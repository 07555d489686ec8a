"""Asks uv for exact versions and says in plain words why there are none; imports only siblings and `packaging`."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from fumehood.sandboxd.packages.base import Base
from fumehood.sandboxd.packages.jail import Finished, InstallJail
from fumehood.sandboxd.packages.store import Pin

# One that is a sentence of its own in every case is quoted as uv wrote it.
_MOST_QUOTED = 600
_MOST_READ = 8000  # of what uv said: an index chooses much of it, and patterns take their time
_NETWORK = re.compile(
    r"error sending request|tcp connect error|dns error|operation timed out|Could not connect|"
    r"connection (?:refused|reset|closed)|HTTP status server error|network is unreachable",
    re.IGNORECASE,
)
_REFUSED = re.compile(r"(?:HTTP status client error|authentication credentials) \((\d{3}[^)]*)\)")
_UNKNOWN = re.compile(
    r"([\w.-]{1,120}) was not found in the (package registry|cache|provided package locations|index)"
)
_NO_WHEELS = re.compile(r"([\w.=<>,|*-]{1,120}) (?:have|has) no (?:usable wheels|wheels with a matching)")
_WHEELS_REQUIRED = re.compile(r"Wheels are required for `([^`]+)`")
_BECAUSE = re.compile(r"\b(Because .*)", re.DOTALL)
_CONCLUSION = re.compile(r",? ?(?:and )?we can conclude that your requirements are unsatisfiable\.?")
_HASH = re.compile(r"--hash=(sha256:[0-9a-f]{64})")
_COMMON = ("--only-binary", ":all:", "--no-header", "--no-annotate", "--color", "never", "--generate-hashes")


class Unresolved(Exception):
    """No versions were found; `network`: because the index was not reached. The text is uv's own, to be explained."""

    def __init__(self, said: str) -> None:
        super().__init__(said)
        self.said = said = said[:_MOST_READ]
        self.network = bool(_NETWORK.search(said))
        self.no_solution = "No solution found" in said


@dataclass(frozen=True, slots=True)
class Resolver:
    """Finds out which packages are needed for what was asked for."""

    jail: InstallJail
    base: Base

    async def resolve(
        self,
        wanted: Sequence[str],
        present: Mapping[str, str],
        staging: Path,
        *,
        fixed: bool,
        offline: bool,
    ) -> list[Pin]:
        """Versions of everything that is needed; `fixed`: what is present stays, else it is only preferred.

        Raises Unresolved, TookTooLong, OSError.
        """
        inputs = staging / f"resolve-{int(fixed)}{int(offline)}"
        inputs.mkdir(mode=0o755)
        versions = "".join(f"{name}=={version}\n" for name, version in sorted(present.items()))
        (inputs / "requirements.in").write_text("\n".join(wanted) + "\n")
        (inputs / "versions.txt").write_text(versions)
        (inputs / "pyvenv.cfg").write_text(self.jail.pyvenv())
        self.base.write_stubs(inputs / "links")
        arguments = ["pip", "compile", "/in/requirements.in", "--python", self.jail.python, *_COMMON]
        arguments += ["--find-links", "/in/links", *self._more_links(), *(["--offline"] if offline else [])]
        if fixed:
            arguments += ["--constraints", "/in/versions.txt"]
        finished = await self.jail.run(arguments, inputs)
        if finished.code != 0:
            raise Unresolved(finished.stderr)
        return read_pins(finished.stdout)

    async def install(self, pins: Iterable[Pin], staging: Path, output: Path, *, offline: bool) -> Finished:
        """Exactly these, each by its hashes, into `output`."""
        inputs = staging / f"install-{int(offline)}"
        inputs.mkdir(mode=0o755)
        lines = [
            " ".join([f"{pin.name}=={pin.version}", *(f"--hash={digest}" for digest in pin.hashes)])
            for pin in pins
        ]
        (inputs / "pins.txt").write_text("\n".join(lines) + "\n")
        (inputs / "pyvenv.cfg").write_text(self.jail.pyvenv())
        arguments = ["pip", "install", "--python", self.jail.python, "--target", "/opt/packages", "--no-deps"]
        arguments += ["--only-binary", ":all:", "--require-hashes", "--compile-bytecode", "--color", "never"]
        arguments += [*self._more_links(), *(["--offline"] if offline else []), "-r", "/in/pins.txt"]
        return await self.jail.run(arguments, inputs, output)

    async def empty_cache(self, staging: Path) -> None:
        inputs = staging / "clean"
        inputs.mkdir(mode=0o755)
        (inputs / "pyvenv.cfg").write_text(self.jail.pyvenv())
        await self.jail.run(["cache", "clean"], inputs)

    def _more_links(self) -> list[str]:
        return [] if self.jail.index.find_links is None else ["--find-links", "/links"]


def read_pins(text: str) -> list[Pin]:
    """What `uv pip compile` printed; whatever is not `name==version` with hashes is refused."""
    pins: list[Pin] = []
    for line in text.replace("\\\n", " ").splitlines():
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        head = line.split(" ", 1)[0]
        try:
            requirement = Requirement(head)
            (specifier,) = requirement.specifier
        except (InvalidRequirement, ValueError):
            raise Unresolved(f"uv resolved to something that is no version: {head[:100]}") from None
        if specifier.operator != "==" or requirement.url is not None:
            raise Unresolved(f"uv resolved to something that is no version: {head[:100]}")
        hashes = tuple(sorted(set(_HASH.findall(line))))
        pins.append(Pin(canonicalize_name(requirement.name), specifier.version, hashes))
    return sorted(pins)


def is_unknown(said: str) -> bool:
    """Whether an index answered that it has no such package."""
    return bool(_UNKNOWN.search(said[:_MOST_READ]))


def explain(said: str) -> str:
    """uv's error as one sentence for whoever asked; quoted only where nothing simpler is known."""
    said = said[:_MOST_READ]
    if refusal := _REFUSED.search(said):
        return f"the package index refused the request ({refusal[1]})"
    if "No space left on device" in said:
        return "the server has no space left for packages"
    if unknown := _UNKNOWN.search(said):
        return f"there is no package {unknown[1]} on the index"
    if missing := _NO_WHEELS.search(said) or _WHEELS_REQUIRED.search(said):
        return (
            f"{missing[1]} has no wheel for this Python and platform, and packages that must be built from "
            "source are not installed"
        )
    if _NETWORK.search(said):
        return "the package index cannot be reached"
    because = _BECAUSE.search(said)
    text = because[1] if because else said.strip()
    text = text.split("hint:")[0]
    text = _CONCLUSION.sub("", " ".join(text.split())).rstrip(" .,")
    text = text.removeprefix("Because ").removeprefix("error: ")
    return text[:_MOST_QUOTED] or "uv gave no reason"
