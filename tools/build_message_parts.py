"""Writes the generated files of `fumehood.message_parts`: its schemas, and the tables of docs/telemetry.md.

Run `python -m tools.build_message_parts` after a change of payloads, representations or vendors; tests compare.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from fumehood.message_parts.part_schema import REPRESENTATIONS
from fumehood.message_parts.tool_payloads import TOOL_KINDS, ToolKind, required_fields
from fumehood.message_parts.vendor_codec import ItemMapping, VendorCodec
from fumehood.message_parts.vendors import VENDORS, openai
from tools.message_part_schemas import build_schema

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED_SCHEMAS = ROOT / "src" / "fumehood" / "message_parts" / "published_schemas"
PAGE = ROOT / "docs" / "telemetry.md"
_BLOCK = "<!-- {name}: made by tools/build_message_parts.py -->\n"


def schema_text(representation: str) -> str:
    return json.dumps(build_schema(representation), indent=2, ensure_ascii=False) + "\n"


# --- the comparison of vendors ------------------------------------------------------------------------


def _own_mappings(vendor: VendorCodec) -> list[ItemMapping]:
    """Two vendors have OpenAI's items beside their own."""
    return [
        mapping
        for mapping in vendor.item_mappings
        if vendor is openai.VENDOR or mapping not in openai.ITEM_MAPPINGS
    ]


def _format_path(path: tuple[str | int, ...]) -> str:
    return f"`{'.'.join(map(str, path))}`"


def _id_fields(mappings: list[ItemMapping], *, call: bool) -> str:
    found = [
        mapping.call_id or mapping.id
        for mapping in mappings
        if (mapping.call if call else mapping.response) is not None
    ]
    return ", ".join(dict.fromkeys(f"`{path[-1]}`" for path in found if path))


def vendor_table() -> Iterator[str]:
    yield "| vendor | `--from`, `--to` | call and response | call id | response id | OpenAI's items, too |"
    yield "|---|---|---|---|---|---|"
    for vendor in VENDORS.values():
        own = _own_mappings(vendor)
        code = [mapping for mapping in own if mapping.kind == "code_interpreter"]
        joint = "one item, split" if any(mapping.is_unified for mapping in code) else "two items"
        more = "yes" if len(own) < len(vendor.item_mappings) else ""
        ids = f"{_id_fields(own, call=True)} | {_id_fields(own, call=False)}"
        yield f"| {vendor.title} | `{vendor.name}` | {joint} | {ids} | {more} |"


def kind_table() -> Iterator[str]:
    yield f"| vendor | {' | '.join(TOOL_KINDS)} | other kinds |"
    yield f"|---|{'---|' * (len(TOOL_KINDS) + 1)}"
    for vendor in VENDORS.values():
        own = _own_mappings(vendor)
        cells = [_cell([mapping for mapping in own if mapping.kind == kind]) for kind in TOOL_KINDS]
        others = ", ".join(dict.fromkeys(mapping.kind for mapping in own if mapping.kind not in TOOL_KINDS))
        yield f"| {vendor.title} | {' | '.join(cells)} | {others} |"


def _cell(mappings: list[ItemMapping]) -> str:
    return "<br>".join(f"`{mapping.type}`" for mapping in mappings)


def code_field_table() -> Iterator[str]:
    yield "| vendor | code | outputs |"
    yield "|---|---|---|"
    for vendor in VENDORS.values():
        code = [mapping for mapping in _own_mappings(vendor) if mapping.kind == "code_interpreter"]
        asked = [
            _format_path(field.path)
            for mapping in code
            for field in mapping.call or ()
            if field.name == "code"
        ]
        came = [
            _format_path(field.path)
            for mapping in code
            for field in mapping.response or ()
            if field.name == "outputs"
        ]
        yield f"| {vendor.title} | {', '.join(asked)} | {', '.join(came) or 'in a message that follows'} |"


def payload_table() -> Iterator[str]:
    yield "| kind | call | response |"
    yield "|---|---|---|"
    for kind in TOOL_KINDS.values():
        yield f"| `{kind.name}` | {_format_fields(kind, call=True)} | {_format_fields(kind, call=False)} |"


def _format_fields(kind: ToolKind, *, call: bool) -> str:
    known = [field.name for field in msgspec.structs.fields(kind.payload_type(call=call))]
    needed = required_fields(kind, call=call)
    groups = (needed, [name for name in known if name not in needed])
    return "; ".join(", ".join(f"`{name}`" for name in group) for group in groups if group)


TABLES = {"payloads": payload_table, "vendors": vendor_table, "kinds": kind_table, "code": code_field_table}


def update_tables(page: str) -> str:
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
    PUBLISHED_SCHEMAS.mkdir(exist_ok=True)
    for representation in REPRESENTATIONS:
        (PUBLISHED_SCHEMAS / f"{representation}.json").write_text(
            schema_text(representation), encoding="utf-8"
        )
    PAGE.write_text(update_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
