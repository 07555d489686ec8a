"""Structured logs of the sandbox server, as text or JSON lines.

An event has a name and fields. Field values are escaped, so that none can forge a second line.
"""

import logging
import sys
from datetime import UTC, datetime
from typing import Literal, override

import msgspec

type LogFormat = Literal["text", "json"]
type LogField = str | int | float | bool | None

logger = logging.getLogger("fumehood.sandbox_server")

_MAX_FIELD_CHARACTERS = 2000


def log_event(name: str, *, level: int = logging.INFO, **fields: LogField) -> None:
    """Log one event; costs next to nothing if its level is disabled."""
    if logger.isEnabledFor(level):
        logger.log(level, name, extra={"fields": fields})


def configure_logging(log_format: LogFormat, level: int) -> None:
    """Send the logs of Fumehood, uvicorn and OpenTelemetry to standard error."""
    # No line shows these, and determining them costs more than writing the line.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if log_format == "json" else _TextFormatter())
    for name in ("fumehood", "uvicorn", "opentelemetry"):
        target = logging.getLogger(name)
        target.handlers = [handler]
        target.propagate = False
        target.setLevel(level)
    # What uvicorn logs at this level, our events already say.
    logging.getLogger("uvicorn").setLevel(max(level, logging.WARNING))


def _event_fields(record: logging.LogRecord) -> dict[str, LogField]:
    """The fields of an event; a plain message of another logger becomes the field `message`."""
    event_fields: dict[str, LogField] | None = getattr(record, "fields", None)
    if event_fields is None:
        fields: dict[str, LogField] = {
            "event": "message",
            "message": record.getMessage()[:_MAX_FIELD_CHARACTERS],
        }
    else:
        fields = {"event": str(record.msg)}
        fields |= {
            key: value[:_MAX_FIELD_CHARACTERS] if isinstance(value, str) else value
            for key, value in event_fields.items()
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
            message = _escape_control_characters(str(fields.pop("message")))
        else:
            message = " ".join(
                [
                    str(name),
                    *(f"{key}={_escape_control_characters(_quote(value))}" for key, value in fields.items()),
                ]
            )
        line = f"{_format_time(record)} {record.levelname.lower():7} {message}"
        return line if traceback is None else f"{line}\n{traceback}"


def _quote(value: LogField) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return msgspec.json.encode(text).decode() if not text or " " in text or '"' in text else text


def _escape_control_characters(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in text)
