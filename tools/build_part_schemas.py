"""Writes the schemas of `fumehood.parts` anew; imports `fumehood.parts.schemas`.

Run `python -m tools.build_part_schemas` after a change of the types; a test compares what is committed with them.
"""

import json
from pathlib import Path

from fumehood.parts.forms import VIEWS
from fumehood.parts.schemas import schema

PUBLISHED = Path(__file__).resolve().parent.parent / "src" / "fumehood" / "parts" / "published"


def text_of(view: str) -> str:
    return json.dumps(schema(view), indent=2, ensure_ascii=False) + "\n"


def main() -> None:
    PUBLISHED.mkdir(exist_ok=True)
    for view in VIEWS:
        (PUBLISHED / f"{view}.json").write_text(text_of(view), encoding="utf-8")


if __name__ == "__main__":
    main()
