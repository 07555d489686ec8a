"""Checks requirements before any tool sees them.

Names, extras, versions and markers are accepted, as in a requirements file. Whatever could make an installer read a
file, open a URL, run something or change its options is refused, with the line and the reason.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from packaging.markers import UndefinedComparison, UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion

from fumehood.protocol.sandbox.sandbox_errors import InstallFailed

MAX_LINES = 100
MAX_LINE_CHARACTERS = 500
_MAX_NAME = 100
_MAX_EXCERPT = 80
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")  # `packaging` accepts a final underscore
_COMMENT = re.compile(r"(^|\s+)#.*$")
_VARIABLE = re.compile(r"\$\{?\w|%\w+%")
_ARCHIVES = (".whl", ".zip", ".tar.gz", ".tar.bz2", ".tgz", ".egg")
_OPTION_REFUSED = "options are not accepted: the server chooses the index, the wheels and the location"
_URL_REFUSED = "URLs and repositories are not accepted: packages come from the server's index by name"
_PATH_REFUSED = "files and paths are not accepted: packages come from the server's index by name"


def parse_requirements(lines: Iterable[str]) -> tuple[str, ...]:
    """Return the requirements for this Python, normalised and sorted. Raises InstallFailed.

    Empty lines, comments, and lines whose marker does not apply are skipped.
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
    """Return the requirements that the present packages do not meet; one with extras is never met."""
    missing: list[str] = []
    for text in wanted:
        requirement = Requirement(text)
        version = present.get(canonicalize_name(requirement.name))
        met = version is not None and not requirement.extras
        if not met or not requirement.specifier.contains(version or "", prereleases=True):
            missing.append(text)
    return missing


def summarise(names: Sequence[str]) -> str:
    """The names with commas between them; of many, the first eight and how many more there are."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def requirements_error(message: str) -> InstallFailed:
    """Return the error for the parameter `requirements`."""
    return InstallFailed(message, param="requirements")


def _parse_line(line: str) -> Requirement | None:
    if len(line) > MAX_LINE_CHARACTERS:
        raise _line_error(line, f"it is longer than {MAX_LINE_CHARACTERS} characters")
    if not line.replace("\t", " ").isprintable():
        raise _line_error(line, "it has control characters or several lines")
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
        raise _line_error(line, "a name must start and end with a letter or a digit")
    if len(requirement.name) > _MAX_NAME:
        raise _line_error(line, f"a name has at most {_MAX_NAME} characters")
    if any(specifier.operator == "===" for specifier in requirement.specifier):
        raise _line_error(line, "=== does not compare versions; use ==")
    return requirement if _marker_applies(line, requirement) else None


def _find_refusal_reason(text: str) -> str | None:
    """Return why a line is refused by its form; the parser refuses the rest."""
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
    excerpt = "".join(
        char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in line[:_MAX_EXCERPT]
    )
    more = "…" if len(line) > _MAX_EXCERPT else ""
    return requirements_error(f"The requirement {excerpt}{more!s} is refused: {reason}.")
