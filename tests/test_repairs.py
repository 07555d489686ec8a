"""Holds tests/repairs.toml to the tests it names."""

import ast
import tomllib
from pathlib import Path
from typing import TypedDict, cast

import pytest

ROOT = Path(__file__).resolve().parents[1]


class _Repair(TypedDict):
    what: str
    tests: list[str]


def _repairs() -> dict[str, _Repair]:
    with open(ROOT / "tests" / "repairs.toml", "rb") as file:
        sections = cast("dict[str, dict[str, _Repair]]", tomllib.load(file))
    return {f"{section}.{key}": repair for section, keys in sections.items() for key, repair in keys.items()}


def _tests_of(path: Path) -> set[str]:
    """The names of a module's test functions, methods as `Class::name`."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            methods = (ast.FunctionDef, ast.AsyncFunctionDef)
            names.update(f"{node.name}::{inner.name}" for inner in node.body if isinstance(inner, methods))
    return {name for name in names if name.rpartition("::")[2].startswith("test_")}


@pytest.mark.parametrize("key", _repairs())
def test_each_line_names_tests_that_exist(key: str) -> None:
    tests = _repairs()[key]["tests"]
    assert tests, f"{key} is open: nothing tests it"
    for node in tests:
        path, _, name = node.partition("::")
        assert name, f"{key}: {node} names no test, only a file"
        assert (ROOT / path).is_file(), f"{key}: there is no {path}"
        assert name in _tests_of(ROOT / path), f"{key}: {path} has no test {name}"
