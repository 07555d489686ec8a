"""The specifications' demands and the tests that show them."""

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
ROWS: list[dict[str, Any]] = tomllib.loads((TESTS / "client" / "checklist.toml").read_text(encoding="utf-8"))[
    "row"
]
SPECIFICATIONS = ROOT.parent / "shared" / "specs"

_FENCE = re.compile(r"```.*?```", re.DOTALL)
_BEGINS = re.compile(r"(\d+\.|-|\|)\s")
_RULE = re.compile(r"\|[-| ]+\|\Z")


@cache
def defined(path: str) -> set[str]:
    tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['spec']}: {row['says'][:50]}")
def test_a_row_names_existing_tests(row: dict[str, Any]) -> None:
    kinds = row.keys() & {"tests", "decided", "open"}
    assert len(kinds) == 1, "a row has tests, or a decision, or is open"
    assert row.keys() == {"spec", "says", *kinds}
    for name in row.get("tests", ()):
        path, _, function = name.partition("::")
        assert function in defined(path), f"{name} does not exist"
    if "decided" in row:
        assert (ROOT / "docs" / row["decided"]).is_file()


def test_nothing_is_open() -> None:
    assert [row["says"] for row in ROWS if "open" in row] == []


def units(text: str) -> Iterator[str]:
    """Everything in a specification that has to have a row: demands, numbered steps, rows of tables."""
    block = ""
    for line in [*_FENCE.sub("", text).splitlines(), ""]:
        stripped = line.strip()
        if not stripped or stripped.startswith("#") or _BEGINS.match(stripped):
            if _is_unit(block):
                yield block
            block = ""
        if not stripped.startswith("#") and not _RULE.match(stripped):
            block = f"{block} {stripped}".strip()


def _is_unit(block: str) -> bool:
    listed = re.match(r"\d+\.\s", block) or (block.startswith("|") and "| Feature |" not in block)
    return bool(listed or re.search(r"\b(MUST|SHOULD)\b", block))


@pytest.mark.skipif(not SPECIFICATIONS.is_dir(), reason="the specifications are not at hand")
@pytest.mark.parametrize("number", ["000", "001", "004"])
def test_every_demand_has_a_row(number: str) -> None:
    (path,) = SPECIFICATIONS.glob(f"{number}-*.md")
    text = path.read_text(encoding="utf-8")
    flat = " ".join(text.split())
    said = [" ".join(row["says"].split()) for row in ROWS if row["spec"] == number]
    assert [words for words in said if words not in flat] == []
    assert [unit for unit in units(text) if not any(words in unit for words in said)] == []
