"""Prints rows as tables or JSON lines. Their text is untrusted: it is sanitized before it reaches a terminal."""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated

import typer

_MAX_TEXT_LENGTH = 500

type TableRow = dict[str, object]
type TableColumns = Mapping[str, Callable[[TableRow], str]]
"""The cells of a table row, by column heading."""

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")]


def sanitize_text(text: str) -> str:
    """Make text safe for a terminal: one line, without control and bidirectional characters."""
    from fumehood.protocol.name_sanitizing import sanitize_name

    return sanitize_name(" ".join(text.split()), _MAX_TEXT_LENGTH)


def format_text(row: TableRow, name: str) -> str:
    value = row.get(name)
    return "" if value is None else sanitize_text(value if isinstance(value, str) else json.dumps(value))


def format_time(row: TableRow, name: str) -> str:
    value = row.get(name)
    with suppress(OverflowError, OSError, ValueError):
        if isinstance(value, int | float):
            return datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%d %H:%M")
    return ""


def format_size(row: TableRow, name: str) -> str:
    value = row.get(name)
    return f"{value:,}" if isinstance(value, int) else ""


def print_json(rows: Iterable[TableRow]) -> None:
    """Print JSON lines in ASCII, which contain no control characters."""
    for row in rows:
        print(json.dumps(row).replace("\x7f", "\\u007f"))


def print_list(
    found: Sequence[TableRow], more: bool, columns: TableColumns, *, as_json: bool, empty_message: str
) -> None:
    """Print a table or JSON lines, and whether the server has more."""
    if as_json:
        print_json(found)
    elif found:
        _print_table(found, columns)
    else:
        print_message(empty_message)
    if more:
        print_message(f"There are more than {len(found)}; use --limit to list them.")


def _print_table(found: Sequence[TableRow], columns: TableColumns) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for head in columns:
        table.add_column(head, no_wrap=True, justify="right" if head == "BYTES" else "left")
    for row in found:
        table.add_row(*(Text(cell(row)) for cell in columns.values()))
    wide = None if sys.stdout.isatty() else 10_000
    Console(width=wide, highlight=False).print(table, soft_wrap=True)


def print_object(row: TableRow, *, as_json: bool) -> None:
    if as_json:
        print_json([row])
        return
    names = [sanitize_text(name) for name in row]
    width = max(map(len, names), default=0)
    for name, shown in zip(row, names, strict=True):
        value = format_time(row, name) if name.endswith("_at") else format_text(row, name)
        print(f"{shown.ljust(width)}  {value}")


def print_message(text: str) -> None:
    print(text, file=sys.stderr)
