"""One line for every request, without its content; imports msgspec and the standard library.

Lines are written many at a time: written one by one, through `logging`, they cost as much as a short answer.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Literal

import msgspec

type Field = str | int | float | bool | None
type LogFormat = Literal["text", "json"]
type RequestLog = Callable[[int, Mapping[str, Field]], None]

_PATIENCE = 0.05  # seconds that a line may wait for others
_MOST = 200  # characters of one field
_SHORT = 600  # of a line of usual fields

logger = logging.getLogger("fumehood.gateway.requests")


def to_logging(level: int, fields: Mapping[str, Field]) -> None:
    """A `RequestLog` for whoever has configured `logging`."""
    if logger.isEnabledFor(level):
        logger.log(level, "request", extra={"fields": dict(fields)})


class RequestLines:
    """A `RequestLog` that writes lines of its own, as `fumehood.sandboxd.logs` would.

    write: takes whole lines, mostly several.
    """

    def __init__(self, write: Callable[[str], object], form: LogFormat) -> None:
        self._write = write
        self._format = _json if form == "json" else _text
        self._lines: list[str] = []
        self._timer: asyncio.TimerHandle | None = None
        self._second = 0
        self._date = ""

    def __call__(self, level: int, fields: Mapping[str, Field]) -> None:
        if not logger.isEnabledFor(level):
            return
        self._lines.append(self._format(self._time(), "warning" if level > logging.INFO else "info", fields))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_PATIENCE, self.flush)

    def flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._lines:
            lines, self._lines = self._lines, []
            self._write("".join(lines))

    def _time(self) -> str:
        now = time.time()
        second = int(now)
        if second != self._second:
            self._second = second
            self._date = datetime.fromtimestamp(second, UTC).isoformat()[:19]
        return f"{self._date}.{int(now % 1 * 1000):03d}+00:00"


def _json(when: str, level: str, fields: Mapping[str, Field]) -> str:
    line = {"time": when, "level": level, "event": "request", **fields}
    return msgspec.json.encode(line).decode() + "\n"


def _text(when: str, level: str, fields: Mapping[str, Field]) -> str:
    """So that no line can pretend to be two, nor a field to be another. Mostly one look at the whole line is enough."""
    told = [f"{name}={value}" for name, value in fields.items() if value is not None]
    shown = " ".join(told)
    if len(shown) > _SHORT or not _is_plain(shown) or shown.count(" ") >= len(told):
        shown = " ".join([f"{name}={_shown(value)}" for name, value in fields.items() if value is not None])
    return f"{when} {level:7} request {shown}\n"


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isprintable() and '"' not in text


def _shown(value: Field) -> str:
    if not isinstance(value, str):
        return str(value)
    if _is_plain(value) and " " not in value:
        return value[:_MOST]
    return ascii(value[:_MOST])
