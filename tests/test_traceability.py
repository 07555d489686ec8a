"""Every repair and every line of the specifications names tests that exist, or says why it has none."""

import re
import tomllib
from pathlib import Path
from typing import NotRequired, TypedDict, cast

import pytest

from tests.support.named_tests import list_tests
from tests.support.specification_lines import flatten, read_lines

ROOT = Path(__file__).resolve().parent.parent
SPECIFICATIONS = ROOT.parent / "shared" / "specs"
NUMBERS = ["000", "001", "002", "003", "004"]

needs_specifications = pytest.mark.skipif(
    not SPECIFICATIONS.is_dir(), reason="the specifications are not at hand"
)


class _Repair(TypedDict):
    what: str
    tests: list[str]


class _Row(TypedDict):
    spec: str
    id: NotRequired[str]
    says: str
    tests: NotRequired[list[str]]
    decided: NotRequired[str]
    open: NotRequired[str]


def _repairs() -> dict[str, _Repair]:
    text = (ROOT / "tests" / "repairs.toml").read_text(encoding="utf-8")
    sections = cast("dict[str, dict[str, _Repair]]", tomllib.loads(text))
    return {f"{section}.{key}": row for section, rows in sections.items() for key, row in rows.items()}


def _rows() -> list[_Row]:
    text = (ROOT / "tests" / "specifications.toml").read_text(encoding="utf-8")
    return cast("dict[str, list[_Row]]", tomllib.loads(text))["row"]


REPAIRS = _repairs()
ROWS = _rows()


def _find_missing_tests(nodes: list[str]) -> list[str]:
    missing: list[str] = []
    for node in nodes:
        name, _, test = node.partition("::")
        path = ROOT / name
        if not path.is_file() or test not in list_tests(path):
            missing.append(node)
    return missing


def _read_specification(number: str) -> str:
    (path,) = SPECIFICATIONS.glob(f"{number}-*.md")
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("key", REPAIRS)
def test_each_repair_names_tests_that_exist(key: str) -> None:
    tests = REPAIRS[key].get("tests")
    assert tests, f"{key} is open: nothing tests it"
    assert _find_missing_tests(tests) == []


@pytest.mark.parametrize("number", NUMBERS)
def test_each_row_is_tested_or_decided_or_open(number: str) -> None:
    rows = [row for row in ROWS if row["spec"] == number]
    assert rows
    for row in rows:
        outcome = row.keys() & {"tests", "decided", "open"}
        assert len(outcome) == 1, row
        assert row.keys() == {"spec", "says", *outcome, *(["id"] if number == "003" else [])}, row
        assert row.get("tests") != [], row
        assert _find_missing_tests(row.get("tests", [])) == [], row
        if "decided" in row:
            assert re.fullmatch(r"docs/.+\.md", row["decided"]), row
            assert (ROOT / row["decided"]).is_file(), row
        if "open" in row:
            assert re.fullmatch(r".+ \(issue \d+\)\.", row["open"]), row


def test_each_row_is_of_one_of_the_specifications() -> None:
    assert {row["spec"] for row in ROWS} == set(NUMBERS)


@needs_specifications
@pytest.mark.parametrize("number", NUMBERS)
def test_each_row_quotes_one_place(number: str) -> None:
    text = _read_specification(number)
    flat, lines = flatten(text), [*read_lines(text)]
    for row in ROWS:
        if row["spec"] != number:
            continue
        words = flatten(row["says"])
        assert flat.count(words) == 1, row
        ids = {line.id for line in lines if line.id and words in line.text}
        assert not ids or number != "003" or ids == {row.get("id")}, row


@needs_specifications
@pytest.mark.parametrize("number", NUMBERS)
def test_every_line_has_a_row(number: str) -> None:
    said = [flatten(row["says"]) for row in ROWS if row["spec"] == number]
    lines = [line.text for line in read_lines(_read_specification(number))]
    assert [line for line in lines if not any(words in line for words in said)] == []


def test_the_lines_of_a_specification_are_found() -> None:
    """So that a line that nobody has written a row for cannot hide."""
    text = """\
# Title

Some prose. It MUST work. It may
fail, but
should say so.

### User Story 2 - Speed

1. First, over
   two lines
2. Second. Third must be its own.

- **FR-007**: Required
  - nested

| heading | heading |
|---|---|
| a | b |

> quoted

```python
class Thing:
    \"\"\"Do it.

    Attributes:
        size: How large
            it is.

    Example:
        >>> Thing()
    \"\"\"

    def stub(self) -> None: ...

    def whole(self) -> int:
        return 1
```

```json
{"should": 1}
```
"""
    found = [(line.id, line.text) for line in read_lines(text)]
    assert [one for one in found if "class Thing" not in one[1]] == [
        ("", "It MUST work."),
        ("", "It may fail, but should say so."),
        ("US2-1", "1. First, over two lines"),
        ("US2-2", "2. Second. Third must be its own."),
        ("", "Third must be its own."),
        ("FR-007", "- **FR-007**: Required"),
        ("US2-4", "- nested"),
        ("US2-5", "| a | b |"),
        ("US2-6", "> quoted"),
        ("", "size: How large it is."),
        ("", ">>> Thing()"),
        ("", "def stub(self) -> None: ..."),
        ("", '{"should": 1}'),
    ]
    assert len(found) == 14
