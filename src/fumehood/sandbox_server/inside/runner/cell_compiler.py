"""Compiles the code of calls: notebook-style last expressions, top-level await, and the magics that models write.

Each call is a cell with a name such as `<cell 3>`, under which `linecache` finds its source.
"""

import __future__

import ast
import builtins
import importlib
import io
import linecache
import re
import shutil
import subprocess
import sys
import tokenize
from dataclasses import dataclass
from types import CodeType
from typing import cast

globals()["__builtins__"] = dict(vars(builtins))  # see output_capture.py

COROUTINE = 0x80  # inspect.CO_COROUTINE
_MAX_MAGIC_LINES = 100
_MAGIC = re.compile(r"[ \t\f]*[!%]")
_SHELL_BUILTIN = "__fumehood_shell__"  # the builtin that a `!command` line calls
_FUTURE_FLAGS: int = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)


@dataclass(frozen=True, slots=True)
class CompiledCell:
    """The code of a call: its statements, and the last expression if its value is to be shown."""

    body: CodeType | None
    last: CodeType | None

    @property
    def is_async(self) -> bool:
        return any(code is not None and code.co_flags & COROUTINE for code in (self.body, self.last))


class CellCompiler:
    """Compiles cells as a notebook does: the last expression is kept apart for display, `await` and magics work.

    A `from __future__` import applies to later cells too.
    """

    def __init__(self) -> None:
        self._count = 0
        self._flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT

    def compile(self, source: str) -> CompiledCell:
        """Compile the source of a call. Raises SyntaxError and what else `compile` raises."""
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
        translated = _translate_magics(source, name)
        if translated is None:
            raise failure
        return cast(ast.Module, compile(translated, name, "exec", flags, dont_inherit=True))

    def _compile_tree(self, tree: ast.Module | ast.Expression, name: str, mode: str) -> CodeType:
        code = compile(tree, name, mode, self._flags, dont_inherit=True)
        self._flags |= code.co_flags & _FUTURE_FLAGS
        return code


def _is_silenced(last: ast.Expr, lines: list[str]) -> bool:
    """Whether a semicolon follows the expression, which hides its value as in notebooks."""
    end = last.end_lineno or 1
    if ";" not in lines[end - 1]:
        return False
    rest = lines[end - 1].encode("utf-8", "surrogatepass")[last.end_col_offset or 0 :]
    return rest.lstrip().startswith(b";")


# --- magics ---------------------------------------------------------------------------------------------


def _translate_magics(source: str, name: str) -> str | None:
    """Replace magic lines by plain Python, keeping line numbers; returns None if there are none."""
    lines = source.split("\n")
    candidates = [number for number, line in enumerate(lines) if _MAGIC.match(line)]
    found = False
    last_translated = -1
    for number in candidates[:_MAX_MAGIC_LINES]:
        if number <= last_translated or not _starts_statement(lines[:number], lines[number]):
            continue
        found = True
        last_translated = number
        text = lines[number]
        while text.endswith("\\") and last_translated + 1 < len(lines):
            last_translated += 1
            text = text[:-1] + lines[last_translated]
            lines[last_translated] = ""
        indent = text[: len(text) - len(text.lstrip())]
        lines[number] = indent + _translate_magic(text.strip(), name, number + 1)
    return "\n".join(lines) if found else None


def _starts_statement(before: list[str], line: str) -> bool:
    """Whether a line after these starts a statement: not within a string, brackets or a continued line."""
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
    """Run a `!command` line; its output is the program's output."""
    head, _, rest = command.partition(" ")
    if head in {"pip", "pip3", "python", "python3"}:
        # This interpreter, whatever PATH says.
        module = " -m pip" if head.startswith("pip") else ""
        command = f'"{sys.executable}"{module} {rest}'
    subprocess.run([shutil.which("bash") or "/bin/sh", "-c", command], check=False, stdin=subprocess.DEVNULL)
    if " pip " in f" {command} ".replace("-m pip ", " pip "):
        importlib.invalidate_caches()  # this cell may import what it installed


def install_shell_builtin() -> None:
    """Add the builtin that `!command` lines call."""
    setattr(builtins, _SHELL_BUILTIN, run_shell_line)
