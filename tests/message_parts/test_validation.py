"""Validation of parts, alone and as pairs of call and response."""

import json
from typing import Any

import jsonschema_rs
import pytest

from fumehood.message_parts.conversion import convert
from fumehood.message_parts.part_schema import REPRESENTATIONS
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


RANDOM_CODE = (
    "import random\n\n# Generate a random number\nrandom_number = random.randint(1, 100)\n\n"
    "# Execute some operation with the random number (e.g., squaring it)\nresult = random_number ** 2\n\n"
    "random_number, result"
)
RANDOM_CALL = {
    "type": "code_interpreter",
    "code": RANDOM_CODE,
    "container_id": "cntr_690bdbfed8688190884efd4c7ae6435b0db1f006442e8941",
}
HEADER = {"id": "call_123", "name": "code_interpreter"}


def code_result(logs: str) -> dict[str, Any]:
    return {"type": "code_interpreter", "outputs": [{"type": "logs", "logs": logs}]}


# Specification 002.
EXAMPLES: dict[str, list[dict[str, Any]]] = {
    "option1": [
        {
            "type": "tool_call",
            "id": "call_VSPygqKTWdrhaFErNvMV18Yl",
            "name": "code_interpreter",
            "tool_call": RANDOM_CALL,
        },
        {
            "type": "tool_call_response",
            "id": "call_VSPygqKTWdrhaFErNvMV18Yl",
            "response": code_result("(89, 7921)"),
        },
    ],
    "option2": [
        {
            "type": "server_tool_call",
            **HEADER,
            "server_tool_call": {
                "type": "code_interpreter",
                "code": "print(10 + 20)",
                "container_id": "container_xyz",
            },
        },
        {
            "type": "server_tool_call_response",
            "id": "call_123",
            "server_tool_call_response": code_result("(10, 20)"),
        },
    ],
    "option3": [
        {
            "type": "server_tool",
            **HEADER,
            "tool_call": RANDOM_CALL,
            "tool_response": code_result("(89, 7921)"),
            "status": "completed",
        }
    ],
    "option3-alternative": [
        {
            "type": "server_tool_execution",
            **HEADER,
            "request": {
                "type": "code_interpreter",
                "code": "print('Hello, World!')",
                "container_id": "container_xyz",
            },
            "response": code_result("Hello, World!"),
            "execution_metadata": {
                "status": "completed",
                "duration_ms": 250,
                "timestamp": "2026-01-12T10:30:45Z",
            },
        }
    ],
}


@pytest.mark.parametrize("representation", EXAMPLES)
def test_examples_of_the_specification_are_valid_and_convert(representation: str) -> None:
    """Into every other representation and back; `option1` adds `arguments` for backends."""
    parts: Any = EXAMPLES[representation]
    assert find_problems(parts) == []
    schema = jsonschema_rs.Draft202012Validator(json.loads(read_published_schema(representation)))
    assert [error.message for part in parts for error in schema.iter_errors(part)] == []
    for other, examples in EXAMPLES.items():
        written: Any = convert(representation, other, parts)
        assert find_problems(written) == []
        assert [part["type"] for part in written] == [part["type"] for part in examples]
        back: Any = convert(other, representation, written)
        assert [{key: part[key] for key in part if key != "arguments"} for part in back] == parts


@pytest.mark.parametrize("representation", REPRESENTATIONS)
@pytest.mark.parametrize("vendor", SAMPLES)
def test_samples_of_all_vendors_are_valid(vendor: str, representation: str) -> None:
    """Each call of the samples has its response. The published schema agrees."""
    written: Any = convert(vendor, representation, SAMPLES[vendor])
    assert find_problems(written) == []
    schema = jsonschema_rs.Draft202012Validator(json.loads(read_published_schema(representation)))
    assert [error.message for part in written for error in schema.iter_errors(part)] == []
