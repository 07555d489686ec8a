"""Observed times of a tool call, as `execution_metadata` of its part: when it started and how long it took."""

from datetime import UTC, datetime

import msgspec

from fumehood.message_parts.canonical_parts import Json, JsonObject

EXECUTION_METADATA = "execution_metadata"

type _Observed = Json | msgspec.UnsetType


def build_timing(started_at: datetime | None, duration_ms: float | None) -> JsonObject:
    """Return `duration_ms` in milliseconds and `timestamp` in RFC 3339; what is not known is left out."""
    timing: JsonObject = {}
    if duration_ms is not None and duration_ms >= 0:
        rounded = round(duration_ms, 3)
        timing["duration_ms"] = int(rounded) if rounded == int(rounded) else rounded
    if started_at is not None:
        timing["timestamp"] = started_at.astimezone(UTC).isoformat().replace("+00:00", "Z")
    return timing


def read_timing(started_at: _Observed, ended_at: _Observed, duration_ms: _Observed) -> JsonObject:
    """Read times as vendors write them: RFC 3339, or seconds since 1970."""
    start, end = _read_time(started_at), _read_time(ended_at)
    duration = _read_number(duration_ms)
    if duration is None and start is not None and end is not None:
        duration = (end - start).total_seconds() * 1000
    return build_timing(start, duration)


def _read_time(value: _Observed) -> datetime | None:
    seconds = _read_number(value)
    try:
        if seconds is not None:
            return datetime.fromtimestamp(seconds, UTC)
        found = datetime.fromisoformat(value) if isinstance(value, str) else None
        return (
            None if found is None else (found if found.tzinfo else found.replace(tzinfo=UTC)).astimezone(UTC)
        )
    except (ValueError, OverflowError, OSError):
        return None


def _read_number(value: _Observed) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
