"""`fumehood parts`, as a shell sees it."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from fumehood.message_parts.conversion import list_formats
from fumehood.message_parts.part_schema import REPRESENTATIONS
from tests.support.cli_runner import run_command
from tests.support.vendor_item_samples import DOCUMENTS, SAMPLES

run_parts = partial(run_command, "parts")


def write_json(directory: Path, document: Any) -> str:
    file = directory / "document.json"
    file.write_text(json.dumps(document), encoding="utf-8")
    return str(file)


def test_schemas_are_printed() -> None:
    for view in REPRESENTATIONS:
        result = run_parts("schema", view)
        assert result.code == 0
        jsonschema_rs.meta.validate(json.loads(result.out))
    unknown = run_parts("schema", "option9")
    assert unknown.code == 2
    assert "option3-alternative" in unknown.err


@pytest.mark.parametrize("view", REPRESENTATIONS)
def test_items_come_back_equal(view: str, tmp_path: Path) -> None:
    """One item, a list of them, and a whole response."""
    for document in (SAMPLES["openai"][2], SAMPLES["openai"], DOCUMENTS[0][1]):
        there = run_parts("convert", "--from", "openai", "--to", view, write_json(tmp_path, document))
        assert there.code == 0, there.err
        assert run_parts("validate", write_json(tmp_path, json.loads(there.out))).streams == (0, "", "")
        back = run_parts("convert", "--from", view, "--to", "openai", "-", stdin=there.out)
        assert json.loads(back.out) == document


def test_any_vendor_or_view_may_be_named(tmp_path: Path) -> None:
    file = write_json(tmp_path, SAMPLES["anthropic"])
    for name in list_formats():
        assert json.loads(run_parts("convert", "--from", "anthropic", "--to", name, file).out)
    unknown = run_parts("convert", "--from", "anthropic", "--to", "acme", file)
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
def test_malformed_parts_are_reported(document: Any, reason: str, tmp_path: Path) -> None:
    result = run_parts("validate", write_json(tmp_path, document))
    assert result.code == 1
    assert result.out == ""
    assert reason in result.err


def test_parts_without_types_are_accepted_with_compat(tmp_path: Path) -> None:
    file = write_json(tmp_path, {"type": "tool_call", "name": "f", "arguments": {}})
    assert run_parts("validate", file).code == 1
    assert run_parts("validate", "--compat", file).code == 0
    upgraded = run_parts("convert", "--from", "option1-compat", "--to", "option1", file)
    assert run_parts("validate", "-", stdin=upgraded.out).code == 0


def test_malformed_parts_are_not_converted(tmp_path: Path) -> None:
    result = run_parts(
        "convert", "--from", "option2", "--to", "openai", write_json(tmp_path, [{"type": "text"}])
    )
    assert (result.code, result.out) == (1, "")
    assert "part 0: a text part needs `content`" in result.err


def test_dropped_parts_are_reported(tmp_path: Path) -> None:
    """As when an item is taken for a part of a view: nothing would be left of it, and nobody would know."""
    item = write_json(tmp_path, SAMPLES["openai"][2])
    result = run_parts("convert", "--from", "option2", "--to", "openai", item)
    assert (result.code, result.out) == (0, "[]")
    assert result.err == "1 part dropped, which openai cannot express: code_interpreter_call"
    picture = {"type": "uri", "modality": "image", "uri": "https://e.x/y.png"}
    text = {"type": "text", "content": "x"}
    several = write_json(tmp_path, [picture, text, {"type": "e\nvil"}, picture])
    result = run_parts("convert", "--from", "option2", "--to", "openai", several)
    assert result.code == 0
    assert len(json.loads(result.out)) == 1
    assert result.err == "3 parts dropped, which openai cannot express: uri, e\\nvil"
    assert run_parts("convert", "--from", "option2", "--to", "option1", several).err == ""


@pytest.mark.parametrize("vendor", SAMPLES)
def test_converting_to_a_view_and_back_drops_nothing(vendor: str, tmp_path: Path) -> None:
    there = run_parts("convert", "--from", vendor, "--to", "option2", write_json(tmp_path, SAMPLES[vendor]))
    back = run_parts("convert", "--from", "option2", "--to", vendor, "-", stdin=there.out)
    assert (there.err, back.err) == ("", "")


CONVERT = ("convert", "--from", "openai", "--to", "option2")
REFUSED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is not JSON: Expecting value"),
    "cut off": (b"{", "is not JSON: Expecting property name"),
    "two documents": (b"[] []", "is not JSON: Extra data"),
    "a bare line feed": (b'{"a": "x\ny"}', "is not JSON: Invalid control character"),
    "no UTF-8": (b'["\xff"]', "is not JSON: at byte 2 it is not UTF-8"),
    "zeros": (b"\x00\x00\x00", "is not JSON"),
    "NaN": (b"[NaN]", "NaN is not a JSON number"),
    "infinity": (b"[-Infinity]", "-Infinity is not a JSON number"),
    "beyond all bounds": (b"[1e999]", "the number 1e999 is too large"),
    "next to nothing": (b"[1e-999]", "the number 1e-999 is too small"),
    "many digits": (b"[" + b"9" * 10_000 + b"]", "a number has too many digits"),
    "two of one name": (b'{"a": {"type": 1, "type": 2}}', "an object has the member 'type' twice"),
    "deep": (b"[" * 10**5, "is nested too deeply"),
    "deep and closed": (b"[" * 10**5 + b"]" * 10**5, "is nested too deeply"),
}


@pytest.mark.parametrize("command", [("validate",), CONVERT, ("convert", "--from", "option1", "--to", "xai")])
@pytest.mark.parametrize("case", REFUSED)
def test_invalid_json_is_reported_in_one_line(case: str, command: tuple[str, ...], tmp_path: Path) -> None:
    content, reason = REFUSED[case]
    file = tmp_path / "hostile.json"
    file.write_bytes(content)
    result = run_parts(*command, str(file))
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"{file} ")
    assert reason in result.err
    assert "\n" not in result.err


@pytest.mark.parametrize("command", [("validate",), CONVERT])
def test_an_unreadable_file_is_reported_in_one_line(command: tuple[str, ...], tmp_path: Path) -> None:
    assert run_parts(*command, str(tmp_path)).streams == (2, "", f"{tmp_path}: Is a directory")
    missing = tmp_path / "nothing"
    assert run_parts(*command, str(missing)).streams == (2, "", f"{missing}: No such file or directory")
    closed = tmp_path / "closed.json"
    closed.write_text("[]", encoding="utf-8")
    closed.chmod(0)
    if not os.access(closed, os.R_OK):  # the superuser reads everything
        assert run_parts(*command, str(closed)).streams == (2, "", f"{closed}: Permission denied")


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_json_in_any_of_its_encodings_is_read(encoding: str, tmp_path: Path) -> None:
    file = tmp_path / "document.json"
    file.write_bytes(json.dumps([SAMPLES["openai"][2]], ensure_ascii=False).encode(encoding))
    assert run_parts(*CONVERT, str(file)).code == 0


@pytest.mark.parametrize("depth", [10, 200, 400, 800, 900, 950, 980])
def test_deep_nesting_is_converted_or_refused(depth: int) -> None:
    stdin = (
        f'{{"type": "function_call", "call_id": "c", "name": "f", "arguments": {"[" * depth}{"]" * depth}}}'
    )
    result = run_parts(*CONVERT, "-", stdin=stdin)
    assert (result.code == 0) == (result.err == "")
    assert result.code == 0 or result.streams == (2, "", "standard input is nested too deeply")
    assert result.code == 0 or depth > 100


def test_lone_surrogates_survive_a_conversion(tmp_path: Path) -> None:
    item = {"type": "shell_call_output", "call_id": "c", "output": "\ud800", "\udfff": "\udfff"}
    there = run_parts(*CONVERT, write_json(tmp_path, item))
    assert there.code == 0, there.err
    back = run_parts("convert", "--from", "option2", "--to", "openai", "-", stdin=there.out)
    assert json.loads(back.out) == item
    response = {"type": "shell", "outputs": "\ud800"}
    malformed = {"type": "server_tool_call_response", "server_tool_call_response": response}
    result = run_parts("validate", write_json(tmp_path, malformed))
    assert (result.code, result.out) == (1, "")
    assert result.err == "`server_tool_call_response`: Expected `array | null`, got `str` - at `$.outputs`"


def test_control_characters_of_a_document_are_escaped(tmp_path: Path) -> None:
    evil = "\x1b[2J\rfine\nall is fine\u202e\u0085"
    call = {"type": "server_tool_call", "id": evil, "name": "x", "server_tool_call": {"type": "x"}}
    result = run_parts("validate", write_json(tmp_path, [call, call]))
    assert result.code == 1
    assert result.err == ("[1]: the id \\x1b[2J\\rfine\\nall is fine\\u202e\\x85 is called a second time")


def shell(line: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    (tmp_path / "empty.json").write_text("[]", encoding="utf-8")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.run(
        ["sh", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )


def test_closed_and_full_streams_are_reported_in_one_line(tmp_path: Path) -> None:
    closed = shell("fumehood parts validate - <&-", tmp_path)
    assert (closed.returncode, closed.stderr) == (2, "standard input: it is closed\n")
    full = shell("fumehood parts convert --from openai --to option2 empty.json >/dev/full", tmp_path)
    assert (full.returncode, full.stderr) == (2, "standard output: No space left on device\n")
