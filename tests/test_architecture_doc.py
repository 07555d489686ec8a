"""The names in docs/architecture.md are names of the code."""

import importlib
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
SOURCE = Path(__file__).parents[1] / "src" / "fumehood"
_TOP = "|".join(sorted(path.stem for path in SOURCE.iterdir() if path.name != "__pycache__"))
NAMES = sorted(set(re.findall(rf"`((?:{_TOP})(?:\.\w+)+)`", PAGE.read_text())))
FILES = sorted(set(re.findall(r"`([\w/]+\.py)`", PAGE.read_text())))


def test_the_page_names_the_code() -> None:
    assert len(NAMES) > 40
    assert len(FILES) > 5


@pytest.mark.parametrize("name", NAMES)
def test_a_name_resolves(name: str) -> None:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(("fumehood", *parts[:length])))
        except ModuleNotFoundError:
            continue
        for attribute in parts[length:]:
            found = getattr(found, attribute)
        return
    pytest.fail(f"there is no {name}")


@pytest.mark.parametrize("file", FILES)
def test_a_file_is_there(file: str) -> None:
    places = (SOURCE / file, SOURCE.parents[1] / file)
    assert any(place.is_file() for place in places)
