"""`fumehood parts`, as a shell sees it; imports the command line."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from typer.testing import CliRunner

from fumehood.cli import app
from fumehood.parts.convert import names
from fumehood.parts.forms import VIEWS
from tests.support.part_samples import DOCUMENTS, SAMPLES


@dataclass
class Done:
    code: int
    out: str
    err: str


def parts(*arguments: str, given: str | None = None) -> Done:
    result = CliRunner().invoke(app, ["parts", *arguments], input=given, env={"COLUMNS": "300"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return Done(result.exit_code, result.stdout, result.stderr)


def saved(directory: Path, document: Any) -> str:
    file = directory / "document.json"
    file.write_text(json.dumps(document), encoding="utf-8")
    return str(file)


def test_schemas_are_printed() -> None:
    for view in VIEWS:
        done = parts("schema", view)
        assert done.code == 0
        jsonschema_rs.meta.validate(json.loads(done.out))
    unknown = parts("schema", "option9")
    assert unknown.code == 2
    assert "option3-alternative" in unknown.err


@pytest.mark.parametrize("view", VIEWS)
def test_items_come_back_equal(view: str, tmp_path: Path) -> None:
    """One item, a list of them, and a whole response."""
    for document in (SAMPLES["openai"][2], SAMPLES["openai"], DOCUMENTS[0][1]):
        there = parts("convert", "--from", "openai", "--to", view, saved(tmp_path, document))
        assert there.code == 0, there.err
        assert parts("validate", saved(tmp_path, json.loads(there.out))) == Done(0, "", "")
        back = parts("convert", "--from", view, "--to", "openai", "-", given=there.out)
        assert json.loads(back.out) == document


def test_any_vendor_or_view_may_be_named(tmp_path: Path) -> None:
    file = saved(tmp_path, SAMPLES["anthropic"])
    for name in names():
        assert json.loads(parts("convert", "--from", "anthropic", "--to", name, file).out)
    unknown = parts("convert", "--from", "anthropic", "--to", "acme", file)
    assert unknown.code == 2
    assert "bedrock-agents" in unknown.err
    assert "--to" in unknown.err


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ({"type": "server_tool_call", "name": "code_interpreter"}, "`server_tool_call` is missing"),
        (
            [
                {
                    "type": "server_tool_call",
                    "name": "code_interpreter",
                    "server_tool_call": {"type": "banana"},
                }
            ],
            "[0]: a tool with the name code_interpreter cannot have a payload of the type banana",
        ),
        (
            [{"type": "server_tool_call_response", "id": "1", "server_tool_call_response": {"type": "x"}}],
            "[0]: the response 1 has no call before it",
        ),
    ],
)
def test_what_is_malformed_is_told(document: Any, reason: str, tmp_path: Path) -> None:
    done = parts("validate", saved(tmp_path, document))
    assert done.code == 1
    assert done.out == ""
    assert reason in done.err


def test_the_form_before_is_taken_if_asked_for(tmp_path: Path) -> None:
    file = saved(tmp_path, {"type": "tool_call", "name": "f", "arguments": {}})
    assert parts("validate", file).code == 1
    assert parts("validate", "--compat", file).code == 0
    upgraded = parts("convert", "--from", "option1-compat", "--to", "option1", file)
    assert parts("validate", "-", given=upgraded.out).code == 0


def test_malformed_parts_are_not_converted(tmp_path: Path) -> None:
    done = parts("convert", "--from", "option2", "--to", "openai", saved(tmp_path, [{"type": "text"}]))
    assert (done.code, done.out) == (1, "")
    assert "part 0: a text part needs `content`" in done.err


def test_what_is_no_json_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "broken.json"
    file.write_text("{", encoding="utf-8")
    for command in (("validate",), ("convert", "--from", "openai", "--to", "option2")):
        done = parts(*command, str(file))
        assert done.code == 2
        assert "is not JSON" in done.err
        assert parts(*command, str(tmp_path / "nothing")).code == 2
    assert "NaN is no number" in parts("validate", "-", given="[NaN]").err
    deep = "[" * 900 + "]" * 900
    assert parts("convert", "--from", "openai", "--to", "option2", "-", given=deep).code in (0, 2)
    assert parts("convert", "--from", "openai", "--to", "option2", "-", given="[" * 10**5).code == 2
