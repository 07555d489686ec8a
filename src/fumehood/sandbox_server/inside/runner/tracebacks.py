"""Describes exceptions for the caller: name, text and traceback, each of limited length.

Frames of the `inside` package never appear in a traceback.
"""

import builtins
import linecache
import os
import re
import traceback
from types import TracebackType
from typing import Any, cast

from fumehood.sandbox_server.inside.runner import output_limits

globals()["__builtins__"] = dict(vars(builtins))  # see output_capture.py

_INSIDE_DIRECTORY = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_CELL = re.compile(r"<cell \d+>")
_FIRST_FRAMES, _LAST_FRAMES = 8, 32  # frames of a deep traceback that are shown
_MAX_CHAIN = 20  # exceptions of a chain


class _TruncatedStack(traceback.StackSummary):
    """A stack with omitted frames."""

    # Python 3.13 added options, for colours.
    def format_frame_summary(self, frame_summary: traceback.FrameSummary, **options: Any) -> str:
        if frame_summary.filename == "":
            return f"  [… {frame_summary.lineno} more frames …]\n"
        return super().format_frame_summary(frame_summary, **options)


def trim_frames(error: BaseException) -> None:
    """Drop the runner's frames, which are the outermost, from the exception's traceback."""
    start = error.__traceback__
    while start is not None and not _CELL.fullmatch(start.tb_frame.f_code.co_filename):
        start = start.tb_next
    if start is None:  # raised outside of any cell, e.g. by a library's __repr__
        start = error.__traceback__
        while start is not None and start.tb_frame.f_code.co_filename.startswith(_INSIDE_DIRECTORY):
            start = start.tb_next
    error.__traceback__ = start


def describe_exception(error: BaseException) -> dict[str, str]:
    """Return name, text and traceback of an exception, each of limited length.

    Errors in the exception's own methods are handled, except those that are no `Exception`; then use
    `describe_minimally`.
    """
    try:
        report = traceback.TracebackException(
            type(error), error, error.__traceback__, limit=-_LAST_FRAMES, compact=True
        )
        _tidy(report, error)
        text = "".join(report.format())
    except Exception as problem:
        text = _format_minimal_traceback(error, problem)
    try:
        value = str.__str__(str(error))  # __str__ may return an instance of a user's class
    except Exception:
        value = "<exception str() failed>"
    return _limit_lengths(error, value, text)


def describe_minimally(error: BaseException, problem: BaseException) -> dict[str, str]:
    """Describe an exception without calling its methods, one of which raised `problem`."""
    return _limit_lengths(error, "", _format_minimal_traceback(error, problem))


def exception_name(error: BaseException) -> str:
    """Return the name of its class, whatever a metaclass says."""
    return type.__dict__["__name__"].__get__(type(error))


def _limit_lengths(error: BaseException, value: str, text: str) -> dict[str, str]:
    return {
        "name": _shorten(exception_name(error), output_limits.MAX_NAME_CHARS),
        "value": _shorten(value, output_limits.MAX_VALUE_CHARS),
        "traceback": _shorten(text, output_limits.MAX_TRACEBACK_CHARS),
    }


def _format_minimal_traceback(error: BaseException, problem: BaseException) -> str:
    """Format where it was raised, and which error prevented a full traceback."""
    locations = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    locations = [
        (code, line) for code, line in locations if not code.co_filename.startswith(_INSIDE_DIRECTORY)
    ]
    lines = ["Traceback (most recent call last):\n"] if locations else []
    for code, line in locations[-_LAST_FRAMES:]:
        lines.append(f'  File "{code.co_filename}", line {line}, in {code.co_name}\n')
        entry = linecache.cache.get(code.co_filename, ())
        if len(entry) == 4 and 0 < line <= len(entry[2]):  # else a user's loader would be called
            lines.append(f"    {entry[2][line - 1].strip()}\n")
    reason = exception_name(problem)
    for frame, line in traceback.walk_tb(problem.__traceback__):
        # Not os.path.basename(), which needs builtins that a program may have replaced.
        reason = f"{exception_name(problem)} at {frame.f_code.co_filename.rpartition('/')[2]}:{line}"
    return f"{''.join(lines)}{exception_name(error)}: <the exception cannot be shown: {reason}>\n"


def _tidy(report: traceback.TracebackException, error: BaseException) -> None:
    """Limit the length of the chain and of each stack, and remove frames of this package."""
    pending = [(report, error, 0)]
    while pending:
        report, error, depth = pending.pop()
        frames = _visible_frames(report, error.__traceback__)
        # Without frames (a syntax error) there is no header either.
        report.stack = _TruncatedStack(frames) if frames else cast(traceback.StackSummary, None)
        if depth == _MAX_CHAIN:
            report.__cause__ = report.__context__ = None
        for link, below in ((report.__cause__, error.__cause__), (report.__context__, error.__context__)):
            if link is not None and below is not None:
                pending.append((link, below, depth + 1))
        if report.exceptions and isinstance(error, BaseExceptionGroup):
            members = cast(BaseExceptionGroup[BaseException], error).exceptions
            pending.extend(
                (link, below, depth + 1) for link, below in zip(report.exceptions, members, strict=False)
            )


def _visible_frames(
    report: traceback.TracebackException, start: TracebackType | None
) -> list[traceback.FrameSummary]:
    tail = [frame for frame in report.stack if not frame.filename.startswith(_INSIDE_DIRECTORY)]
    depth = sum(1 for _ in traceback.walk_tb(start))
    if depth <= _LAST_FRAMES:
        return tail
    head = traceback.StackSummary.extract(
        traceback.walk_tb(start), limit=min(_FIRST_FRAMES, depth - _LAST_FRAMES)
    )
    if depth > _FIRST_FRAMES + _LAST_FRAMES:
        head.append(traceback.FrameSummary("", depth - _FIRST_FRAMES - _LAST_FRAMES, ""))
    return [*(frame for frame in head if not frame.filename.startswith(_INSIDE_DIRECTORY)), *tail]


def _shorten(text: str, max_chars: int) -> str:
    if len(text) > max_chars:
        half = max_chars // 2
        text = f"{text[:half]}\n[… {len(text) - max_chars} characters left out …]\n{text[-half:]}"
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()
