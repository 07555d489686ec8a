"""The request log: one line per request, without content.

Lines are made and written in batches: writing each through `logging` costs as much CPU as a short response.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Literal

import msgspec

type LogValue = str | int | float | bool | None
type LogFormat = Literal["text", "json"]
type RequestLog = Callable[[int, Mapping[str, LogValue]], None]

_FLUSH_SECONDS = 0.05  # batch lines for this long
_MAX_VALUE_LENGTH = 200  # characters of one field

logger = logging.getLogger("fumehood.gateway.requests")


def log_to_logger(level: int, fields: Mapping[str, LogValue]) -> None:
    """A `RequestLog` that writes to the logger `fumehood.gateway.requests`."""
    if logger.isEnabledFor(level):
        logger.log(level, "request", extra={"fields": dict(fields)})


class BufferedRequestLog:
    """A `RequestLog` that writes batches of lines in the format of `fumehood.sandbox_server.structured_logging`.

    write: called with one or more complete lines.
    """

    def __init__(self, write: Callable[[str], object], log_format: LogFormat) -> None:
        self._write = write
        self._format_line = _format_json if log_format == "json" else _format_text
        self._requests: list[tuple[datetime, str, Mapping[str, LogValue]]] = []
        self._timer: asyncio.TimerHandle | None = None

    def __call__(self, level: int, fields: Mapping[str, LogValue]) -> None:
        if not logger.isEnabledFor(level):
            return
        self._requests.append((datetime.now(UTC), "warning" if level > logging.INFO else "info", fields))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_FLUSH_SECONDS, self.flush)

    def flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        requests, self._requests = self._requests, []
        if requests:
            self._write("".join([self._format_line(*request) for request in requests]))


def _format_json(when: datetime, level: str, fields: Mapping[str, LogValue]) -> str:
    line = {"time": _format_time(when), "level": level, "event": "request", **fields}
    return msgspec.json.encode(line).decode() + "\n"


def _format_text(when: datetime, level: str, fields: Mapping[str, LogValue]) -> str:
    """Quote values where needed, so that no value can forge a line or a field."""
    pairs = [f"{name}={_quote_value(value)}" for name, value in fields.items() if value is not None]
    return f"{_format_time(when)} {level:7} request {' '.join(pairs)}\n"


def _format_time(when: datetime) -> str:
    return when.isoformat(timespec="milliseconds")


def _quote_value(value: LogValue) -> str:
    if not isinstance(value, str):
        return str(value)
    shown = value[:_MAX_VALUE_LENGTH]
    is_plain = shown.isascii() and shown.isprintable() and '"' not in shown and " " not in shown
    return shown if is_plain else ascii(shown)
