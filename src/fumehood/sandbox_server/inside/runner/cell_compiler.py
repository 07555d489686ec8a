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
    """A call's code: statements, and the last expression if its value is to be shown."""

    body: CodeType | None
    last: CodeType | None

    @property
    def is_async(self) -> bool:
        return any(code is not None and code.co_flags & COROUTINE for code in (self.body, self.last))


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
        self._flags |= code.co_flags & _FUTURE_FLAGS
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
    for number in candidates[:_MAX_MAGIC_LINES]:
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
