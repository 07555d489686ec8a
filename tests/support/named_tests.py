"""The names of a module's tests, without importing it."""

import ast
from collections.abc import Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def list_tests(path: Path) -> set[str]:
    """Return the names of test functions, methods as `Class::name`; a class has the tests of a kit that it extends."""
    names: set[str] = set()
    modules: dict[str, str] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            modules |= {alias.name: node.module for alias in node.names}
        elif isinstance(node, _FUNCTIONS):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names |= {f"{node.name}::{method}" for method in _list_methods(node, modules)}
    return {name for name in names if name.rpartition("::")[2].startswith("test_")}


def _list_methods(node: ast.ClassDef, modules: Mapping[str, str]) -> set[str]:
    """modules: where imported names come from."""
    names = {inner.name for inner in node.body if isinstance(inner, _FUNCTIONS)}
    for base in node.bases:
        module = modules.get(base.id, "") if isinstance(base, ast.Name) else ""
        if module.startswith("tests."):
            kit = ROOT.joinpath(*module.split(".")).with_suffix(".py")
            names |= {
                name.partition("::")[2]
                for name in list_tests(kit)
                if name.startswith(f"{ast.unparse(base)}::")
            }
    return names
