"""Decides which requirements are taken, before any tool sees them; imports `packaging` and the sandbox's errors.

Names, extras, versions and markers pass, as in a requirements file. Whatever could make an installer read a file,
open a URL, run something or change its options is refused here, with the line and the reason.
"""

import re
from collections.abc import Iterable, Mapping

from packaging.markers import UndefinedComparison, UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion

from fumehood.protocol.sandbox_errors import InstallFailed

MOST_LINES = 100
MOST_CHARACTERS = 500
_MOST_NAME = 100
_SHOWN = 80
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")  # `packaging` lets an underscore end it
_COMMENT = re.compile(r"(^|\s+)#.*$")
_VARIABLE = re.compile(r"\$\{?\w|%\w+%")
_ARCHIVES = (".whl", ".zip", ".tar.gz", ".tar.bz2", ".tgz", ".egg")
_OPTION = "options are not taken: the server chooses index, versions of wheels and place"
_URL = "URLs and repositories are not taken: packages come from the server's index by name"
_PATH = "files and paths are not taken: packages come from the server's index by name"


def parse(lines: Iterable[str]) -> tuple[str, ...]:
    """The requirements that hold for this Python, normalised and sorted; raises InstallFailed.

    Empty lines and comments are passed over, and so is what a marker rules out.
    """
    wanted: set[str] = set()
    for number, line in enumerate(lines, 1):
        if number > MOST_LINES:
            raise refused(f"More than {MOST_LINES} requirements.")
        requirement = _parse_line(line)
        if requirement is not None:
            wanted.add(_normal(requirement))
    return tuple(sorted(wanted))


def unmet(wanted: Iterable[str], present: Mapping[str, str]) -> list[str]:
    """Those that what is present does not answer; extras are not looked into."""
    missing: list[str] = []
    for text in wanted:
        requirement = Requirement(text)
        version = present.get(canonicalize_name(requirement.name))
        met = version is not None and not requirement.extras
        if not met or not requirement.specifier.contains(version or "", prereleases=True):
            missing.append(text)
    return missing


def refused(message: str) -> InstallFailed:
    return InstallFailed(message, param="requirements")


def _parse_line(line: str) -> Requirement | None:
    if len(line) > MOST_CHARACTERS:
        raise _refuse(line, f"it is longer than {MOST_CHARACTERS} characters")
    if not line.replace("\t", " ").isprintable():
        raise _refuse(line, "it has control characters or more than one line")
    text = _COMMENT.sub("", line).strip()
    if not text:
        return None
    if reason := _suspicious(text):
        raise _refuse(line, reason)
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        raise _refuse(line, f"it is not a requirement: {str(error).splitlines()[0]}") from None
    if requirement.url is not None:
        raise _refuse(line, _URL)
    if not all(map(_NAME.fullmatch, (requirement.name, *requirement.extras))):
        raise _refuse(line, "a name begins and ends with a letter or a digit")
    if len(requirement.name) > _MOST_NAME:
        raise _refuse(line, f"a name has at most {_MOST_NAME} characters")
    if any(specifier.operator == "===" for specifier in requirement.specifier):
        raise _refuse(line, "=== compares no versions; use ==")
    return requirement if _holds(line, requirement) else None


def _suspicious(text: str) -> str | None:
    """What is refused by its looks, so that the reason fits; the parser refuses the rest."""
    head = text.split(";", 1)[0].strip()
    if text.startswith("-") or " -" in head:
        return _OPTION
    if "://" in head or "@" in head or head.startswith(("git+", "hg+", "svn+", "bzr+", "file:")):
        return _URL
    if _VARIABLE.search(text):
        return "variables are not expanded"
    if head.startswith((".", "~")) or "/" in head or "\\" in head or head.lower().endswith(_ARCHIVES):
        return _PATH
    return None


def _holds(line: str, requirement: Requirement) -> bool:
    if requirement.marker is None:
        return True
    try:
        return requirement.marker.evaluate({"extra": ""})  # sandboxes run this very Python
    except (UndefinedComparison, UndefinedEnvironmentName, InvalidVersion) as error:
        raise _refuse(line, f"its marker cannot be evaluated: {error}") from None


def _normal(requirement: Requirement) -> str:
    extras = ",".join(sorted(canonicalize_name(extra) for extra in requirement.extras))
    return f"{canonicalize_name(requirement.name)}{f'[{extras}]' if extras else ''}{requirement.specifier}"


def _refuse(line: str, reason: str) -> InstallFailed:
    shown = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in line[:_SHOWN])
    more = "…" if len(line) > _SHOWN else ""
    return refused(f"The requirement {shown}{more!s} is refused: {reason}.")
