"""Decides which requirements are taken, before any tool sees them.

Names, extras, versions and markers pass, as in a requirements file. Whatever could make an installer read a file,
open a URL, run something or change its options is refused here, with the line and the reason.
"""

import re
from collections.abc import Iterable, Mapping

from packaging.markers import UndefinedComparison, UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion

from fumehood.protocol.sandbox.sandbox_errors import InstallFailed

MAX_LINES = 100
MAX_LINE_CHARACTERS = 500
_MAX_NAME = 100
_MAX_SHOWN = 80
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")  # `packaging` lets an underscore end it
_COMMENT = re.compile(r"(^|\s+)#.*$")
_VARIABLE = re.compile(r"\$\{?\w|%\w+%")
_ARCHIVES = (".whl", ".zip", ".tar.gz", ".tar.bz2", ".tgz", ".egg")
_OPTION_REFUSED = "options are not taken: the server chooses index, versions of wheels and place"
_URL_REFUSED = "URLs and repositories are not taken: packages come from the server's index by name"
_PATH_REFUSED = "files and paths are not taken: packages come from the server's index by name"


def parse_requirements(lines: Iterable[str]) -> tuple[str, ...]:
    """The requirements that hold for this Python, normalised and sorted; raises InstallFailed.

    Empty lines and comments are passed over, and so is what a marker rules out.
    """
    wanted: set[str] = set()
    for number, line in enumerate(lines, 1):
        if number > MAX_LINES:
            raise requirements_error(f"More than {MAX_LINES} requirements.")
        requirement = _parse_line(line)
        if requirement is not None:
            wanted.add(_normalise(requirement))
    return tuple(sorted(wanted))


def find_unmet(wanted: Iterable[str], present: Mapping[str, str]) -> list[str]:
    """Those that what is present does not answer; extras are not looked into."""
    missing: list[str] = []
    for text in wanted:
        requirement = Requirement(text)
        version = present.get(canonicalize_name(requirement.name))
        met = version is not None and not requirement.extras
        if not met or not requirement.specifier.contains(version or "", prereleases=True):
            missing.append(text)
    return missing


def requirements_error(message: str) -> InstallFailed:
    return InstallFailed(message, param="requirements")


def _parse_line(line: str) -> Requirement | None:
    if len(line) > MAX_LINE_CHARACTERS:
        raise _line_error(line, f"it is longer than {MAX_LINE_CHARACTERS} characters")
    if not line.replace("\t", " ").isprintable():
        raise _line_error(line, "it has control characters or more than one line")
    text = _COMMENT.sub("", line).strip()
    if not text:
        return None
    if reason := _find_refusal_reason(text):
        raise _line_error(line, reason)
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        raise _line_error(line, f"it is not a requirement: {str(error).splitlines()[0]}") from None
    if requirement.url is not None:
        raise _line_error(line, _URL_REFUSED)
    if not all(map(_NAME.fullmatch, (requirement.name, *requirement.extras))):
        raise _line_error(line, "a name begins and ends with a letter or a digit")
    if len(requirement.name) > _MAX_NAME:
        raise _line_error(line, f"a name has at most {_MAX_NAME} characters")
    if any(specifier.operator == "===" for specifier in requirement.specifier):
        raise _line_error(line, "=== compares no versions; use ==")
    return requirement if _marker_applies(line, requirement) else None


def _find_refusal_reason(text: str) -> str | None:
    """What is refused by its looks, so that the reason fits; the parser refuses the rest."""
    head = text.split(";", 1)[0].strip()
    if text.startswith("-") or " -" in head:
        return _OPTION_REFUSED
    if "://" in head or "@" in head or head.startswith(("git+", "hg+", "svn+", "bzr+", "file:")):
        return _URL_REFUSED
    if _VARIABLE.search(text):
        return "variables are not expanded"
    if head.startswith((".", "~")) or "/" in head or "\\" in head or head.lower().endswith(_ARCHIVES):
        return _PATH_REFUSED
    return None


def _marker_applies(line: str, requirement: Requirement) -> bool:
    if requirement.marker is None:
        return True
    try:
        return requirement.marker.evaluate({"extra": ""})  # sandboxes run this very Python
    except (UndefinedComparison, UndefinedEnvironmentName, InvalidVersion) as error:
        raise _line_error(line, f"its marker cannot be evaluated: {error}") from None


def _normalise(requirement: Requirement) -> str:
    extras = ",".join(sorted(canonicalize_name(extra) for extra in requirement.extras))
    return f"{canonicalize_name(requirement.name)}{f'[{extras}]' if extras else ''}{requirement.specifier}"


def _line_error(line: str, reason: str) -> InstallFailed:
    shown = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in line[:_MAX_SHOWN])
    more = "…" if len(line) > _MAX_SHOWN else ""
    return requirements_error(f"The requirement {shown}{more!s} is refused: {reason}.")
