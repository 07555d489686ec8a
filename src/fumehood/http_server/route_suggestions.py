"""Suggests routes for an unknown path."""

import difflib
import re
from collections.abc import Iterable

_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
_MIN_SIMILARITY = 0.7  # for a suggestion
_MAX_PATH_LENGTH = 200


def format_path(path: str) -> str:
    """The path of a route without converters: `{model:path}` becomes `{model}`."""
    return _PARAMETER.sub(r"{\1}", path)


def suggest_routes(requested: str, paths: Iterable[str]) -> str:
    """A message for a 404: the most similar path, and all paths without parameters."""
    formatted = list(dict.fromkeys(format_path(path) for path in paths))
    nearest = _find_nearest(requested[:_MAX_PATH_LENGTH], formatted)
    advice = "" if nearest is None else f"Did you mean {nearest}? "
    return f"{advice}Served here: {', '.join(path for path in formatted if '{' not in path)}."


def _find_nearest(requested: str, paths: list[str]) -> str | None:
    score, nearest = max((_similarity(requested, path), path) for path in paths)
    return nearest if score >= _MIN_SIMILARITY else None


def _similarity(requested: str, path: str) -> float:
    """Similarity from 0 to 1, by the least similar segment; a parameter matches anything."""
    segments, parts = [part for part in requested.split("/") if part], path.strip("/").split("/")
    if len(segments) == len(parts):
        return min(
            1.0 if part.startswith("{") else _ratio(part, value)
            for part, value in zip(parts, segments, strict=True)
        )
    return 0.0 if "{" in path else _ratio("/".join(segments), "/".join(parts))


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()
