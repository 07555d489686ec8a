"""docs/telemetry.md matches the converters."""

import re

from fumehood import message_parts
from fumehood.cli import app
from fumehood.message_parts.part_schema import REPRESENTATIONS, TOOL_PART_TYPES
from fumehood.message_parts.vendors import VENDORS
from tools.build_message_parts import PAGE, update_tables

TEXT = PAGE.read_text(encoding="utf-8")


def test_the_tables_are_what_the_converters_say() -> None:
    assert update_tables(TEXT) == TEXT
    for vendor in VENDORS.values():
        assert TEXT.count(f"| {vendor.title} |") == 3


def test_every_representation_and_its_parts_are_on_the_page() -> None:
    rows = dict(re.findall(r"^\| `(option[\w-]+)` \| (.*) \|$", TEXT, re.MULTILINE))
    assert set(rows) == set(REPRESENTATIONS) - {"option1-compat"}
    for representation, row in rows.items():
        assert f"`{REPRESENTATIONS[representation][0]}`" in row
        for key in (
            TOOL_PART_TYPES[REPRESENTATIONS[representation][0]].call,
            TOOL_PART_TYPES[REPRESENTATIONS[representation][0]].response,
        ):
            assert f"`{key}`" in row or not key
    assert "`option1-compat`" in TEXT


def test_the_functions_and_commands_on_the_page_exist() -> None:
    named = re.findall(r"`message_parts\.(\w+)`", TEXT)
    assert len(named) == 8
    for name in named:
        assert callable(getattr(message_parts, name))
    assert message_parts.SOURCE_FIELD in TEXT
    assert message_parts.TRUNCATED_FIELD in TEXT
    (parts,) = [group for group in app.registered_groups if group.name == "parts"]
    assert parts.typer_instance is not None
    commands = {command.name for command in parts.typer_instance.registered_commands}
    assert set(re.findall(r"^fumehood parts (\w+)", TEXT, re.MULTILINE)) == commands


def test_the_example_runs() -> None:
    # Those of the client are run by its own tests.
    (example,) = re.findall(r"(?<!-->\n)^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    exec(compile(example, str(PAGE), "exec"), {})
    assert example.count("assert ") == 3
