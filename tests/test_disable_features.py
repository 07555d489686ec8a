"""The patches of `make test-mutations` apply, and belong to rows of the specifications that are chosen at random."""

import pytest

from tools.disable_features import (
    DEFAULT_ROWS,
    DEFAULT_SEED,
    ROOT,
    FeaturePatch,
    SpecificationRow,
    choose_rows,
    load_patches,
    load_rows,
)

ROWS = {(row.spec, row.says): row for row in load_rows()}
PATCHES = load_patches()


def test_there_is_a_patch_for_at_least_thirty_of_the_chosen_rows() -> None:
    chosen = choose_rows([*ROWS.values()], DEFAULT_ROWS, DEFAULT_SEED)
    assert len([row for row in chosen if (row.spec, row.says) in PATCHES]) >= 30


@pytest.mark.parametrize("patch", PATCHES.values(), ids=lambda patch: patch.disables)
def test_each_patch_applies_and_names_a_test_of_its_row(patch: FeaturePatch) -> None:
    assert (ROOT / patch.file).read_text(encoding="utf-8").count(patch.old) == 1
    assert patch.new != patch.old
    assert patch.test in ROWS[patch.spec, patch.says].tests


def test_the_choice_is_random_and_stays_with_its_seed() -> None:
    rows = [SpecificationRow("000", str(number), ("tests/test_x.py::test_y",)) for number in range(100)]
    chosen = choose_rows(rows, 10, 7)
    assert choose_rows(rows[::-1], 10, 7) == chosen
    assert choose_rows(rows, 10, 8) != chosen
    new = [*rows, SpecificationRow("000", "new", ("tests/test_x.py::test_y",))]
    assert len({*choose_rows(new, 10, 7)} & {*chosen}) >= 9
