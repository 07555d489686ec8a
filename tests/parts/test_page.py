"""docs/telemetry.md says what the converters do; imports `tools.build_parts`."""

import re

from fumehood.cli import app
from fumehood.parts import assembly, content, messages, views
from fumehood.parts.convert import VENDORS
from fumehood.parts.forms import FORMS, VIEWS
from tools.build_parts import PAGE, with_tables

TEXT = PAGE.read_text(encoding="utf-8")


def test_the_tables_are_what_the_converters_say() -> None:
    assert with_tables(TEXT) == TEXT
    for vendor in VENDORS.values():
        assert TEXT.count(f"| {vendor.title} |") == 3


def test_every_view_and_its_parts_are_named() -> None:
    rows = dict(re.findall(r"^\| `(option[\w-]+)` \| (.*) \|$", TEXT, re.MULTILINE))
    assert set(rows) == set(VIEWS) - {"option1-compat"}
    for view, row in rows.items():
        assert f"`{VIEWS[view][0]}`" in row
        for key in (FORMS[VIEWS[view][0]].call, FORMS[VIEWS[view][0]].response):
            assert f"`{key}`" in row or not key
    assert "`option1-compat`" in TEXT


def test_the_functions_and_commands_that_it_names_are_there() -> None:
    modules = {"assembly": assembly, "content": content, "messages": messages, "views": views}
    named = re.findall(r"`(assembly|content|messages|views)\.(\w+)`", TEXT)
    assert len(named) == 7
    for module, name in named:
        assert callable(getattr(modules[module], name))
    assert views.SOURCE in TEXT
    assert content.CUT in TEXT
    (parts,) = [group for group in app.registered_groups if group.name == "parts"]
    assert parts.typer_instance is not None
    commands = {command.name for command in parts.typer_instance.registered_commands}
    assert set(re.findall(r"^fumehood parts (\w+)", TEXT, re.MULTILINE)) == commands


def test_the_example_runs() -> None:
    # Those of the client are run by its own tests.
    (example,) = re.findall(r"(?<!-->\n)^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    exec(compile(example, str(PAGE), "exec"), {})
    assert example.count("assert ") == 3
