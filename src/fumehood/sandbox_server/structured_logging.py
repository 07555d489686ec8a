"""Writes what the sandbox server does as lines for people or as JSON.

Events have names and fields. Whatever a field holds is escaped, so that no line can pretend to be two.
"""

import logging
import sys
from datetime import UTC, datetime
from typing import Literal, override

import msgspec

type LogFormat = Literal["text", "json"]
type LogField = str | int | float | bool | None

logger = logging.getLogger("fumehood.sandbox_server")

_MAX_FIELD_CHARACTERS = 2000  # characters of one field


def log_event(name: str, *, level: int = logging.INFO, **fields: LogField) -> None:
    """Log one event; costs next to nothing where its level is off."""
    if logger.isEnabledFor(level):
        # Not through logger.log(), which looks for the line of the caller: an event is known by its name.
        record = logging.LogRecord(logger.name, level, "", 0, name, None, None)
        record.fields = fields
        logger.handle(record)


def configure_logging(log_format: LogFormat, level: int) -> None:
    """Send the logs of this package, of its web server and of OpenTelemetry to standard error."""
    # Nothing of this is in a line, and finding it out costs more than writing it.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if log_format == "json" else _TextFormatter())
    for name in ("fumehood", "uvicorn", "opentelemetry"):
        chosen = logging.getLogger(name)
        chosen.handlers = [handler]
        chosen.propagate = False
        chosen.setLevel(level)
    # What the web server says at this level is said by events already.
    logging.getLogger("uvicorn").setLevel(max(level, logging.WARNING))


def _event_fields(record: logging.LogRecord) -> dict[str, LogField]:
    """An event's own fields; a plain message of any other logger becomes one."""
    given: dict[str, LogField] | None = getattr(record, "fields", None)
    egress: dict[str, LogField] | None = getattr(record, "egress", None)
    name = str(record.msg)
    if egress is not None:
        # The proxy knows a sandbox by the name that `sandbox_created` calls its instance.
        name = "egress_request"
        given = {"instance": egress["sandbox"], **egress, "sandbox": None}
    if given is None:
        fields: dict[str, LogField] = {
            "event": "message",
            "message": record.getMessage()[:_MAX_FIELD_CHARACTERS],
        }
    else:
        fields = {"event": name}
        fields |= {
            key: value[:_MAX_FIELD_CHARACTERS] if isinstance(value, str) else value
            for key, value in given.items()
            if value is not None
        }
    if record.exc_info:
        fields["traceback"] = logging.Formatter().formatException(record.exc_info)
    return fields


def _format_time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


class _JsonFormatter(logging.Formatter):
    @override
    def format(self, record: logging.LogRecord) -> str:
        line = {"time": _format_time(record), "level": record.levelname.lower(), **_event_fields(record)}
        return msgspec.json.encode(line).decode()


class _TextFormatter(logging.Formatter):
    @override
    def format(self, record: logging.LogRecord) -> str:
        fields = _event_fields(record)
        name = fields.pop("event")
        traceback = fields.pop("traceback", None)
        if name == "message":
            shown = _escape_control_characters(str(fields.pop("message")))
        else:
            shown = " ".join(
                [
                    str(name),
                    *(f"{key}={_escape_control_characters(_quote(value))}" for key, value in fields.items()),
                ]
            )
        line = f"{_format_time(record)} {record.levelname.lower():7} {shown}"
        return line if traceback is None else f"{line}\n{traceback}"


def _quote(value: LogField) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return msgspec.json.encode(text).decode() if not text or " " in text or '"' in text else text


def _escape_control_characters(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in text)
