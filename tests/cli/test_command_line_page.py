"""docs/command-line.md has every command and every option, and no other."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup, TyperOption
from typer.main import get_command
from typer.testing import CliRunner

from fumehood.cli import app

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "command-line.md").read_text(encoding="utf-8")
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z]")


def _commands() -> Iterator[tuple[str, frozenset[str]]]:
    """Every command that does something, and its options."""
    root = get_command(app)
    context = typer.Context(root)
    assert isinstance(root, TyperGroup)
    found = [(name, root.get_command(context, name)) for name in root.list_commands(context)]
    while found:
        name, command = found.pop()
        assert command is not None
        if isinstance(command, TyperGroup):
            found += [(f"{name} {below}", command.get_command(context, below)) for below in command.commands]
            continue
        given = [one for one in command.params if isinstance(one, TyperOption) and not one.hidden]
        yield name, frozenset(word for one in given for word in one.opts if word.startswith("--"))


COMMANDS = dict(_commands())


def _section(command: str) -> str:
    """What the page says under the headings that name it."""
    sections = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
    first = command.split(maxsplit=1)[0]
    found = [one for one in sections if re.search(rf"\bfumehood {first}\b", one.partition("\n")[0])]
    assert found, f"the page has no part on `fumehood {first}`"
    return "".join(found)


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_the_page_has_the_command_with_all_its_options(command: str) -> None:
    section = _section(command)
    assert f"fumehood {command}" in section
    missing = COMMANDS[command] - {"--help"} - set(_OPTION.findall(section))
    assert not missing, f"the page does not tell of {sorted(missing)}"


@pytest.mark.parametrize("command", sorted({command.split()[0] for command in COMMANDS}))
def test_the_page_has_no_option_that_is_not_there(command: str) -> None:
    known = {option for name, options in COMMANDS.items() if name.split()[0] == command for option in options}
    heading, _, section = _section(command).partition("\n")
    others = {name for name in re.findall(r"fumehood (\w+)", heading) if name != command}
    known |= {option for name, options in COMMANDS.items() if name.split()[0] in others for option in options}
    documented = {
        option
        for row in re.findall(r"^\| (.*?) \|", section, re.MULTILINE)
        for option in _OPTION.findall(row)
    }
    assert documented <= known, f"there is no {sorted(documented - known)}"


@pytest.mark.parametrize("group", ["", "keys", "containers", "files", "parts"])
def test_lists_of_commands_say_whole_sentences(group: str) -> None:
    help_text = CliRunner().invoke(app, [*group.split(), "--help"], env={"COLUMNS": "80"}).stdout
    listed = help_text.partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
    assert len(listed) > 2
    assert [line for line in listed if not line.endswith(".") or line.endswith("...")] == []
