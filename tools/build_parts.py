"""Writes anew what is made from `fumehood.parts`: its schemas, and the tables of docs/telemetry.md; imports it.

Run `python -m tools.build_parts` after a change of payloads, views or vendors; tests compare what is committed.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from fumehood.parts.forms import VIEWS
from fumehood.parts.payloads import KINDS, Kind, required_in
from fumehood.parts.schemas import schema
from fumehood.parts.shapes import Shape, Vendor
from fumehood.parts.vendors import VENDORS, openai

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED = ROOT / "src" / "fumehood" / "parts" / "published"
PAGE = ROOT / "docs" / "telemetry.md"
_BLOCK = "<!-- {name}: made by tools/build_parts.py -->\n"


def text_of(view: str) -> str:
    return json.dumps(schema(view), indent=2, ensure_ascii=False) + "\n"


# --- the comparison of vendors ------------------------------------------------------------------------


def _own(vendor: Vendor) -> list[Shape]:
    """Two vendors have OpenAI's items beside their own."""
    return [shape for shape in vendor.shapes if vendor is openai.VENDOR or shape not in openai.SHAPES]


def _path(path: tuple[str | int, ...]) -> str:
    return f"`{'.'.join(map(str, path))}`"


def _ids(shapes: list[Shape], *, call: bool) -> str:
    found = [
        shape.call_id or shape.id for shape in shapes if (shape.call if call else shape.result) is not None
    ]
    return ", ".join(dict.fromkeys(f"`{path[-1]}`" for path in found if path))


def overview() -> Iterator[str]:
    yield "| vendor | `--from`, `--to` | server's call and result | id of the call | id of the result | OpenAI's, too |"
    yield "|---|---|---|---|---|---|"
    for vendor in VENDORS.values():
        own = _own(vendor)
        code = [shape for shape in own if shape.kind == "code_interpreter"]
        joint = "one item, split" if any(shape.unified for shape in code) else "two items"
        more = "yes" if len(own) < len(vendor.shapes) else ""
        ids = f"{_ids(own, call=True)} | {_ids(own, call=False)}"
        yield f"| {vendor.title} | `{vendor.name}` | {joint} | {ids} | {more} |"


def kinds() -> Iterator[str]:
    yield f"| vendor | {' | '.join(KINDS)} | other kinds |"
    yield f"|---|{'---|' * (len(KINDS) + 1)}"
    for vendor in VENDORS.values():
        own = _own(vendor)
        cells = [_cell([shape for shape in own if shape.kind == kind]) for kind in KINDS]
        others = ", ".join(dict.fromkeys(shape.kind for shape in own if shape.kind not in KINDS))
        yield f"| {vendor.title} | {' | '.join(cells)} | {others} |"


def _cell(shapes: list[Shape]) -> str:
    return "<br>".join(f"`{shape.type}`" for shape in shapes)


def moves() -> Iterator[str]:
    yield "| vendor | code | outputs |"
    yield "|---|---|---|"
    for vendor in VENDORS.values():
        code = [shape for shape in _own(vendor) if shape.kind == "code_interpreter"]
        asked = [_path(field.path) for shape in code for field in shape.call or () if field.name == "code"]
        came = [
            _path(field.path) for shape in code for field in shape.result or () if field.name == "outputs"
        ]
        yield f"| {vendor.title} | {', '.join(asked)} | {', '.join(came) or 'in a message that follows'} |"


def payloads() -> Iterator[str]:
    yield "| kind | a call has | a result has |"
    yield "|---|---|---|"
    for kind in KINDS.values():
        yield f"| `{kind.name}` | {_members(kind, call=True)} | {_members(kind, call=False)} |"


def _members(kind: Kind, *, call: bool) -> str:
    known = [field.name for field in msgspec.structs.fields(kind.type_of(call=call))]
    needed = required_in(kind, call=call)
    groups = (needed, [name for name in known if name not in needed])
    return "; ".join(", ".join(f"`{name}`" for name in group) for group in groups if group)


TABLES = {"payloads": payloads, "vendors": overview, "kinds": kinds, "code": moves}


def with_tables(page: str) -> str:
    """The page with every table as it is made now."""
    for name, made in TABLES.items():
        begin = _BLOCK.format(name=name)
        table = "\n".join(made())
        page, count = re.subn(
            rf"{re.escape(begin)}\n(\|.*\n)*", lambda _, text=f"{begin}\n{table}\n": text, page
        )
        assert count == 1, f"docs/telemetry.md has no place for the table of {name}"
    return page


def main() -> None:
    PUBLISHED.mkdir(exist_ok=True)
    for view in VIEWS:
        (PUBLISHED / f"{view}.json").write_text(text_of(view), encoding="utf-8")
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
