"""Says what a server serves, from its own table of routes."""

import difflib
import re
from collections.abc import Iterable

_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
_MIN_SIMILARITY = 0.7  # of 1, from which on a path is worth mentioning
_MAX_PATH_LENGTH = 200


def format_path(path: str) -> str:
    """A route's path for people: `{model:path}`, which says how to match, becomes `{model}`."""
    return _PARAMETER.sub(r"{\1}", path)


def suggest_routes(requested: str, paths: Iterable[str]) -> str:
    """A sentence or two for somebody who asked for a path that is not served: which one was probably meant, and all
    that need no id.
    """
    shown = list(dict.fromkeys(format_path(path) for path in paths))
    nearest = _find_nearest(requested[:_MAX_PATH_LENGTH], shown)
    advice = "" if nearest is None else f"Did you mean {nearest}? "
    return f"{advice}Served here: {', '.join(path for path in shown if '{' not in path)}."


def _find_nearest(asked: str, shown: list[str]) -> str | None:
    score, nearest = max((_similarity(asked, path), path) for path in shown)
    return nearest if score >= _MIN_SIMILARITY else None


def _similarity(asked: str, path: str) -> float:
    """How alike they are, from 0 to 1: by their least similar parts, where a parameter is like anything."""
    given, parts = [part for part in asked.split("/") if part], path.strip("/").split("/")
    if len(given) == len(parts):
        return min(
            1.0 if part.startswith("{") else _ratio(part, value)
            for part, value in zip(parts, given, strict=True)
        )
    return 0.0 if "{" in path else _ratio("/".join(given), "/".join(parts))


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()
