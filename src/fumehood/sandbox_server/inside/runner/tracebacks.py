"""The program's text as its author sees it, compiled and in tracebacks.

Each call is a cell with a name such as `<cell 3>`, under which `linecache` knows its source. Frames of
`inside/` never appear in a traceback.
"""

import __future__

import ast
import builtins
import importlib
import io
import linecache
import os
import re
import shutil
import subprocess
import sys
import tokenize
import traceback
from dataclasses import dataclass
from types import CodeType, TracebackType
from typing import Any, cast

from fumehood.sandbox_server.inside.runner import output_limits

globals()["__builtins__"] = dict(vars(builtins))  # see streams.py

_INSIDE_DIRECTORY = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_CELL = re.compile(r"<cell \d+>")
_FIRST_FRAMES, _LAST_FRAMES = 8, 32  # frames of a deep traceback that are shown
_MAX_CHAIN = 20  # exceptions of a chain
_MAGIC_LINES = 100
_MAGIC = re.compile(r"[ \t\f]*[!%]")
_SHELL_BUILTIN = "__fumehood_shell__"  # in builtins: what a `!command` line is turned into
_FUTURES: int = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)


# --- cells ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CompiledCell:
    """A call's code: statements, and the last expression if its value is to be shown."""

    body: CodeType | None
    last: CodeType | None

    @property
    def is_async(self) -> bool:
        return any(code is not None and code.co_flags & COROUTINE for code in (self.body, self.last))


COROUTINE = 0x80  # inspect.COCOROUTINE


class CellCompiler:
    """Compiles one call after another; `from __future__` holds for the calls after it, as in a REPL."""

    def __init__(self) -> None:
        self._count = 0
        self._flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT

    def compile(self, source: str) -> CompiledCell:
        self._count += 1
        name = f"<cell {self._count}>"
        if "\r" in source:
            source = source.replace("\r\n", "\n").replace("\r", "\n")
        lines = [line + "\n" for line in source.split("\n")]
        linecache.cache[name] = (len(source), None, lines, name)
        tree = self._parse(source, name)
        last: ast.Expression | None = None
        if tree.body and isinstance(final := tree.body[-1], ast.Expr) and not _is_silenced(final, lines):
            tree.body.pop()
            last = ast.Expression(final.value)
        body = self._compile_tree(tree, name, "exec") if tree.body else None
        return CompiledCell(body, self._compile_tree(last, name, "eval") if last is not None else None)

    def _parse(self, source: str, name: str) -> ast.Module:
        flags = self._flags | ast.PyCF_ONLY_AST
        try:
            return cast(ast.Module, compile(source, name, "exec", flags, dont_inherit=True))
        except SyntaxError as error:
            failure = error
        plain = _translate_magics(source, name)
        if plain is None:
            raise failure
        return cast(ast.Module, compile(plain, name, "exec", flags, dont_inherit=True))

    def _compile_tree(self, tree: ast.Module | ast.Expression, name: str, mode: str) -> CodeType:
        code = compile(tree, name, mode, self._flags, dont_inherit=True)
        self._flags |= code.co_flags & _FUTURES
        return code


def _is_silenced(last: ast.Expr, lines: list[str]) -> bool:
    """Whether a semicolon follows the expression, which in notebooks hides its value."""
    end = last.end_lineno or 1
    if ";" not in lines[end - 1]:
        return False
    rest = lines[end - 1].encode("utf-8", "surrogatepass")[last.end_col_offset or 0 :]
    return rest.lstrip().startswith(b";")


# --- the few magics that models write -------------------------------------------------------------------


def _translate_magics(source: str, name: str) -> str | None:
    """The source with its magic lines as plain Python, line for line; None if it has none."""
    lines = source.split("\n")
    candidates = [number for number, line in enumerate(lines) if _MAGIC.match(line)]
    found = False
    taken = -1
    for number in candidates[:_MAGIC_LINES]:
        if number <= taken or not _starts_statement(lines[:number], lines[number]):
            continue
        found = True
        taken = number
        text = lines[number]
        while text.endswith("\\") and taken + 1 < len(lines):
            taken += 1
            text = text[:-1] + lines[taken]
            lines[taken] = ""
        indent = text[: len(text) - len(text.lstrip())]
        lines[number] = indent + _translate_magic(text.strip(), name, number + 1)
    return "\n".join(lines) if found else None


def _starts_statement(before: list[str], line: str) -> bool:
    """Whether a line after these begins a statement, and is not in a string, brackets or a continued line."""
    indent = line[: len(line) - len(line.lstrip())]
    text = "\n".join([*before, f"{indent}{_SHELL_BUILTIN}\n"])
    previous = tokenize.NEWLINE
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.string == _SHELL_BUILTIN and token.start[0] == len(before) + 1:
                return previous in {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
            if token.type not in {tokenize.NL, tokenize.COMMENT}:
                previous = token.type
    except (tokenize.TokenError, SyntaxError):
        pass
    return False


def _translate_magic(magic: str, name: str, number: int) -> str:
    if magic.startswith("!"):
        return f"{_SHELL_BUILTIN}({magic.lstrip('!').strip()!r})"
    word, _, rest = magic.partition(" ")
    if word == "%pip":
        return f"{_SHELL_BUILTIN}({'pip ' + rest!r})"
    if word == "%matplotlib":
        return "pass"
    raise SyntaxError(
        f"the IPython magic {word} is not available here; write it in plain Python",
        (name, number, 1, magic, number, len(word) + 1),
    )


def run_shell_line(command: str) -> None:
    """Run a `!command` line; its output goes where the program's own goes."""
    head, _, rest = command.partition(" ")
    if head in {"pip", "pip3", "python", "python3"}:
        # The interpreter that runs this code, whatever PATH says.
        module = " -m pip" if head.startswith("pip") else ""
        command = f'"{sys.executable}"{module} {rest}'
    subprocess.run([shutil.which("bash") or "/bin/sh", "-c", command], check=False, stdin=subprocess.DEVNULL)
    if " pip " in f" {command} ".replace("-m pip ", " pip "):
        importlib.invalidate_caches()  # what it brought is to be found in this very cell


def install_shell_builtin() -> None:
    setattr(builtins, _SHELL_BUILTIN, run_shell_line)


# --- tracebacks -----------------------------------------------------------------------------------------


class _TruncatedStack(traceback.StackSummary):
    """A stack with a gap."""

    # Since Python 3.13 there are options, for colours.
    def format_frame_summary(self, frame_summary: traceback.FrameSummary, **options: Any) -> str:
        if frame_summary.filename == "":
            return f"  [… {frame_summary.lineno} more frames …]\n"
        return super().format_frame_summary(frame_summary, **options)


def trim_frames(error: BaseException) -> None:
    """Drop the runner's frames, which are the outermost; from then on nothing refers to them."""
    start = error.__traceback__
    while start is not None and not _CELL.fullmatch(start.tb_frame.f_code.co_filename):
        start = start.tb_next
    if start is None:  # raised outside of any cell, e.g. by a library's __repr__
        start = error.__traceback__
        while start is not None and start.tb_frame.f_code.co_filename.startswith(_INSIDE_DIRECTORY):
            start = start.tb_next
    error.__traceback__ = start


def describe_exception(error: BaseException) -> dict[str, str]:
    """Name, text and traceback of an exception, each of bounded length, whatever its own methods do.

    These may raise what is no `Exception`; then `bare` is left.
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
        value = str.__str__(str(error))  # what __str__ returns may be of a class of the user's as well
    except Exception:
        value = "<exception str() failed>"
    return _limit_lengths(error, value, text)


def describe_minimally(error: BaseException, problem: BaseException) -> dict[str, str]:
    """As `describe`, without a call of the exception's own methods, one of which raised `problem`."""
    return _limit_lengths(error, "", _format_minimal_traceback(error, problem))


def exception_name(error: BaseException) -> str:
    """The name of its class, even where a metaclass has other ideas."""
    return type.__dict__["__name__"].__get__(type(error))


def _limit_lengths(error: BaseException, value: str, text: str) -> dict[str, str]:
    return {
        "name": _shorten(exception_name(error), output_limits.MAX_NAME_CHARS),
        "value": _shorten(value, output_limits.MAX_VALUE_CHARS),
        "traceback": _shorten(text, output_limits.MAX_TRACEBACK_CHARS),
    }


def _format_minimal_traceback(error: BaseException, problem: BaseException) -> str:
    """Where it was raised, and why no more can be said: it may be the exception's fault, or ours."""
    places = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    places = [(code, line) for code, line in places if not code.co_filename.startswith(_INSIDE_DIRECTORY)]
    shown = ["Traceback (most recent call last):\n"] if places else []
    for code, line in places[-_LAST_FRAMES:]:
        shown.append(f'  File "{code.co_filename}", line {line}, in {code.co_name}\n')
        entry = linecache.cache.get(code.co_filename, ())
        if len(entry) == 4 and 0 < line <= len(entry[2]):  # else a loader of the user's would be asked
            shown.append(f"    {entry[2][line - 1].strip()}\n")
    why = exception_name(problem)
    for frame, line in traceback.walk_tb(problem.__traceback__):
        # Not os.path.basename(): it needs builtins that a program may have replaced.
        why = f"{exception_name(problem)} at {frame.f_code.co_filename.rpartition('/')[2]}:{line}"
    return f"{''.join(shown)}{exception_name(error)}: <the exception cannot be shown: {why}>\n"


def _tidy(report: traceback.TracebackException, error: BaseException) -> None:
    """Bound the chain's length and each stack's, and take our own frames out."""
    todo = [(report, error, 0)]
    while todo:
        report, error, depth = todo.pop()
        frames = _visible_frames(report, error.__traceback__)
        # No header above no frames: a syntax error has none.
        report.stack = _TruncatedStack(frames) if frames else cast(traceback.StackSummary, None)
        if depth == _MAX_CHAIN:
            report.__cause__ = report.__context__ = None
        for link, below in ((report.__cause__, error.__cause__), (report.__context__, error.__context__)):
            if link is not None and below is not None:
                todo.append((link, below, depth + 1))
        if report.exceptions and isinstance(error, BaseExceptionGroup):
            members = cast(BaseExceptionGroup[BaseException], error).exceptions
            todo.extend(
                (link, below, depth + 1) for link, below in zip(report.exceptions, members, strict=False)
            )


def _visible_frames(
    report: traceback.TracebackException, start: TracebackType | None
) -> list[traceback.FrameSummary]:
    shown = [frame for frame in report.stack if not frame.filename.startswith(_INSIDE_DIRECTORY)]
    depth = sum(1 for _ in traceback.walk_tb(start))
    if depth <= _LAST_FRAMES:
        return shown
    head = traceback.StackSummary.extract(
        traceback.walk_tb(start), limit=min(_FIRST_FRAMES, depth - _LAST_FRAMES)
    )
    if depth > _FIRST_FRAMES + _LAST_FRAMES:
        head.append(traceback.FrameSummary("", depth - _FIRST_FRAMES - _LAST_FRAMES, ""))
    return [*(frame for frame in head if not frame.filename.startswith(_INSIDE_DIRECTORY)), *shown]


def _shorten(text: str, most: int) -> str:
    if len(text) > most:
        half = most // 2
        text = f"{text[:half]}\n[… {len(text) - most} characters left out …]\n{text[-half:]}"
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()
