"""Validation of parts, alone and as pairs of call and response."""

import json
from typing import Any

import jsonschema_rs
import pytest

from fumehood.message_parts.conversion import convert
from fumehood.message_parts.part_format import REPRESENTATIONS
from fumehood.message_parts.validation import read_published_schema, validate
from tests.support.vendor_item_samples import SAMPLES


def call(shared: str | None = "1", kind: str = "code_interpreter") -> dict[str, Any]:
    payload = {"type": kind, "code": "1"} if kind == "code_interpreter" else {"type": kind}
    return {"type": "server_tool_call", "id": shared, "name": kind, "server_tool_call": payload}


def answer(shared: str | None = "1", kind: str = "code_interpreter") -> dict[str, Any]:
    payload: Any = {"type": kind, "outputs": []} if kind == "code_interpreter" else {"type": kind}
    return {"type": "server_tool_call_response", "id": shared, "server_tool_call_response": payload}


def find_problems(document: Any) -> list[str]:
    return [str(problem) for problem in validate(document)]


@pytest.mark.parametrize(
    "document",
    [
        [],
        call(),
        [call(), answer()],
        [call("1"), call("2"), answer("2"), answer("1")],
        [call(None), answer(None)],
        [call(None), call(None), answer(None), answer(None)],
        [{"role": "assistant", "parts": [call()]}, {"role": "tool", "parts": [answer()]}],
        [{"type": "server_tool", "name": "x", "id": "1", "tool_response": {"type": "x"}}],
        [{"type": "text", "content": "x"}, {"type": "whatever"}],
    ],
)
def test_valid_parts_have_no_problems(document: Any) -> None:
    assert find_problems(document) == []


@pytest.mark.parametrize(
    ("document", "reasons"),
    [
        ([answer()], ["[0]: the response 1 has no call before it"]),
        ([call("1"), answer("2")], ["[1]: the response 2 has no call before it"]),
        (
            [answer(), call()],
            ["[0]: the response 1 has no call before it", "[1]: the call 1 comes after its response"],
        ),
        ([call(), call()], ["[1]: the id 1 is called a second time"]),
        ([call(), answer(), answer()], ["[2]: the call 1 is answered a second time"]),
        (
            [call(), answer(kind="x")],
            ["[1]: the call 1 is of the kind code_interpreter, its response of the kind x"],
        ),
        (
            [call(None), answer(None), answer(None)],
            ["[2]: a code_interpreter response without an id has no call before it"],
        ),
        (
            [{"type": "server_tool", "name": "x", "tool_response": {"type": "x"}}, answer(None, "x")],
            ["[1]: a x response without an id has no call before it"],
        ),
        ([call(None), answer(None, "x")], ["[1]: a x response without an id has no call before it"]),
        ([{"role": "assistant", "parts": [call(), 5]}], ["[0].parts[1]: a part is an object"]),
        (
            {"type": "server_tool_call", "id": "1", "name": "x"},
            ["`server_tool_call` is missing or not an object"],
        ),
        (7, ["a part is an object"]),
        ({}, ["`type` is missing"]),
        ({"type": "text"}, ["a text part needs `content`, a string"]),
        (
            {
                "type": "server_tool_call",
                "name": "shell",
                "server_tool_call": {"type": "code_interpreter", "code": "1"},
            },
            ["a tool with the name shell cannot have a payload of the type code_interpreter"],
        ),
        (
            {**call(), "server_tool_call_response": {"type": "code_interpreter", "outputs": []}},
            ["`server_tool_call_response` does not belong in a server_tool_call part"],
        ),
        (
            {**call(), "server_tool_call": {"type": "code_interpreter", "code": "1", "outputs": []}},
            [
                "`server_tool_call`: a code_interpreter call cannot hold `outputs`, which belongs to the response"
            ],
        ),
        (
            {**call(), "server_tool_call": {"type": "code_interpreter"}},
            ["`server_tool_call`: Object missing required field `code`"],
        ),
    ],
)
def test_invalid_parts_have_problems(document: Any, reasons: list[str]) -> None:
    assert find_problems(document) == reasons


@pytest.mark.parametrize("representation", REPRESENTATIONS)
@pytest.mark.parametrize("vendor", SAMPLES)
def test_samples_of_all_vendors_are_valid(vendor: str, representation: str) -> None:
    """Each call of the samples has its response. The published schema agrees."""
    written: Any = convert(vendor, representation, SAMPLES[vendor])
    assert find_problems(written) == []
    schema = jsonschema_rs.Draft202012Validator(json.loads(read_published_schema(representation)))
    assert [error.message for part in written for error in schema.iter_errors(part)] == []
