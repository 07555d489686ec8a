"""The request log: one line per request, without content.

Lines are written in batches: writing each through `logging` costs as much CPU as a short response.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Literal

import msgspec

type LogValue = str | int | float | bool | None
type LogFormat = Literal["text", "json"]
type RequestLog = Callable[[int, Mapping[str, LogValue]], None]

_FLUSH_SECONDS = 0.05  # batch lines for this long
_MAX_VALUE_LENGTH = 200  # characters of one field
_MAX_PLAIN_LENGTH = 600  # characters of a line that is checked as a whole

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
        self._lines: list[str] = []
        self._timer: asyncio.TimerHandle | None = None
        self._second = 0
        self._date = ""

    def __call__(self, level: int, fields: Mapping[str, LogValue]) -> None:
        if not logger.isEnabledFor(level):
            return
        self._lines.append(
            self._format_line(self._timestamp(), "warning" if level > logging.INFO else "info", fields)
        )
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_FLUSH_SECONDS, self.flush)

    def flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._lines:
            lines, self._lines = self._lines, []
            self._write("".join(lines))

    def _timestamp(self) -> str:
        now = time.time()
        second = int(now)
        if second != self._second:
            self._second = second
            self._date = datetime.fromtimestamp(second, UTC).isoformat()[:19]
        return f"{self._date}.{int(now % 1 * 1000):03d}+00:00"


def _format_json(when: str, level: str, fields: Mapping[str, LogValue]) -> str:
    line = {"time": when, "level": level, "event": "request", **fields}
    return msgspec.json.encode(line).decode() + "\n"


def _format_text(when: str, level: str, fields: Mapping[str, LogValue]) -> str:
    """Quote values where needed, so that no value can forge a line or a field. Most lines need one check only."""
    pairs = [f"{name}={value}" for name, value in fields.items() if value is not None]
    line = " ".join(pairs)
    if len(line) > _MAX_PLAIN_LENGTH or not _is_plain(line) or line.count(" ") >= len(pairs):
        line = " ".join(
            [f"{name}={_quote_value(value)}" for name, value in fields.items() if value is not None]
        )
    return f"{when} {level:7} request {line}\n"


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isprintable() and '"' not in text


def _quote_value(value: LogValue) -> str:
    if not isinstance(value, str):
        return str(value)
    if _is_plain(value) and " " not in value:
        return value[:_MAX_VALUE_LENGTH]
    return ascii(value[:_MAX_VALUE_LENGTH])
