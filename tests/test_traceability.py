"""Every repair and every requirement names tests that exist."""

import tomllib
from pathlib import Path
from typing import TypedDict, cast

import pytest

from tests.support.named_tests import list_tests

TESTS = Path(__file__).parent
CLUSTER = {"FR-010", "FR-011", "FR-012", "US3-1", "US3-2"}
"""Requirements of specification 003 that only a cluster can show."""


class _Row(TypedDict, total=False):
    what: str
    tests: list[str]
    missing: str


def _requirements() -> dict[str, _Row]:
    text = (TESTS / "specification_003.toml").read_text(encoding="utf-8")
    return cast("dict[str, _Row]", tomllib.loads(text))


def _repairs() -> dict[str, _Row]:
    text = (TESTS / "repairs.toml").read_text(encoding="utf-8")
    sections = cast("dict[str, dict[str, _Row]]", tomllib.loads(text))
    return {f"{section}.{key}": row for section, rows in sections.items() for key, row in rows.items()}


ROWS = _repairs() | _requirements()


@pytest.mark.parametrize("key", [key for key, row in ROWS.items() if "missing" not in row])
def test_each_row_names_tests_that_exist(key: str) -> None:
    tests = ROWS[key].get("tests")
    assert tests, f"{key} is open: nothing tests it"
    for node in tests:
        path, _, name = node.partition("::")
        assert name, f"{key}: {node} names no test, only a file"
        assert (TESTS.parent / path).is_file(), f"{key}: there is no {path}"
        assert name in list_tests(TESTS.parent / path), f"{key}: {path} has no test {name}"


def test_every_requirement_has_a_row() -> None:
    requirements = _requirements()
    assert set(requirements) == {
        *(f"FR-{number:03}" for number in range(1, 17)),
        *("US1-1", "US1-2", "US1-3", "US1-4", "US2-1", "US2-2", "US3-1", "US3-2", "US3-3", "US4-1", "US4-2"),
        *(f"EC-{number}" for number in range(1, 5)),
        *(f"SC-{number:03}" for number in range(1, 6)),
    }
    assert {key for key, row in requirements.items() if "missing" in row} == CLUSTER
