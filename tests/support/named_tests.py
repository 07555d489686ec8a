"""The names of a module's tests, without importing it."""

import ast
from functools import cache
from pathlib import Path


@cache
def list_tests(path: Path) -> set[str]:
    """Return the names of test functions, methods as `Class::name`."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, functions):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names.update(f"{node.name}::{inner.name}" for inner in node.body if isinstance(inner, functions))
    return {name for name in names if name.rpartition("::")[2].startswith("test_")}
