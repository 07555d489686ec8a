"""Disables features of the specifications, one at a time, and expects their tests to fail.

    python -m tools.disable_features [--rows N] [--seed N]

Rows of tests/specifications.toml are chosen at random, the same ones for the same seed. For each of them
tests/disabled_features.toml has a patch that disables what the row asks for; it is applied to a copy of the package.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_SEED = 1
DEFAULT_ROWS = 34
_LIVE = "tests/live/"
_PYTEST_FAILED = 1  # pytest's exit code if a test failed; others are errors of the run
_TIMEOUT_SECONDS = 600


@dataclass(frozen=True)
class SpecificationRow:
    """A row that names tests which run without keys."""

    spec: str
    says: str
    tests: tuple[str, ...]

    def get_rank(self, seed: int) -> str:
        """Rows are chosen by their rank, so that a new row changes the choice of others little."""
        return hashlib.sha256(f"{seed}:{self.spec}:{self.says}".encode()).hexdigest()


@dataclass(frozen=True)
class FeaturePatch:
    """A replacement of one piece of source, after which `test` has to fail. `disables` says what is gone then."""

    spec: str
    says: str
    disables: str
    test: str
    file: str
    old: str
    new: str


def load_rows() -> list[SpecificationRow]:
    rows: list[SpecificationRow] = []
    for row in _load_toml("specifications.toml", "row"):
        tests = tuple(test for test in cast("list[str]", row.get("tests", [])) if not test.startswith(_LIVE))
        if tests:
            rows.append(SpecificationRow(row["spec"], row["says"], tests))
    return rows


def choose_rows(rows: Sequence[SpecificationRow], number: int, seed: int) -> list[SpecificationRow]:
    """The same rows for the same seed."""
    return sorted(rows, key=lambda row: row.get_rank(seed))[:number]


def load_patches() -> dict[tuple[str, str], FeaturePatch]:
    patches = [FeaturePatch(**entry) for entry in _load_toml("disabled_features.toml", "patch")]
    return {(patch.spec, patch.says): patch for patch in patches}


def _load_toml(name: str, table: str) -> list[dict[str, Any]]:
    text = (ROOT / "tests" / name).read_text(encoding="utf-8")
    return cast("dict[str, list[dict[str, Any]]]", tomllib.loads(text))[table]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=DEFAULT_ROWS, help="how many rows to choose")
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED, help="which ones")
    options = parser.parse_args()
    patches = load_patches()
    chosen = choose_rows(load_rows(), options.rows, options.seed)
    missing = [row for row in chosen if (row.spec, row.says) not in patches]
    for row in missing:
        print(f"no patch      {row.spec}  {row.says}")
    with tempfile.TemporaryDirectory(prefix="fumehood-disabled-") as directory:
        copy = Path(directory)
        shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__"))
        wanted = [patches[row.spec, row.says] for row in chosen if row not in missing]
        failures = [*_check_patches(copy, wanted)]
    print(
        f"{len(wanted) - len(failures)} of {len(chosen)} rows have a test that fails without their feature."
    )
    return 1 if failures or missing else 0


def _check_patches(copy: Path, patches: Sequence[FeaturePatch]) -> Iterator[FeaturePatch]:
    """Print a line for each patch; yields those whose test does not fail."""
    tests = sorted({patch.test for patch in patches})
    if (code := _run_tests(copy, tests)) != 0:
        sys.exit(f"The tests do not pass as they are (pytest's exit code is {code}).")
    for patch in patches:
        with _Applied(copy / patch.file, patch):
            code = _run_tests(copy, [patch.test])
        outcome = {0: "STILL PASSES", _PYTEST_FAILED: "fails"}.get(code, f"error {code}")
        print(f"{outcome:12}  {patch.spec}  {patch.disables:60}  {patch.test}", flush=True)
        if code != _PYTEST_FAILED:
            yield patch


class _Applied:
    """Applies a patch for the length of a context."""

    def __init__(self, file: Path, patch: FeaturePatch) -> None:
        self._file = file
        self._patch = patch
        self._text = file.read_text(encoding="utf-8")

    def __enter__(self) -> None:
        if self._text.count(self._patch.old) != 1:
            sys.exit(f"{self._patch.file} does not have this piece once:\n{self._patch.old}")
        self._file.write_text(self._text.replace(self._patch.old, self._patch.new), encoding="utf-8")

    def __exit__(self, *_: object) -> None:
        self._file.write_text(self._text, encoding="utf-8")


def _run_tests(copy: Path, tests: Sequence[str]) -> int:
    """pytest's exit code with the package of the copy."""
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-m", "", "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_SECONDS,
        check=False,
    )
    if result.returncode not in (0, _PYTEST_FAILED):
        print(result.stdout[-3000:], result.stderr[-1000:], file=sys.stderr)
    return result.returncode


if __name__ == "__main__":
    sys.exit(main())
