"""Messages of parts, as OpenTelemetry's attributes hold them."""

import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from fumehood.message_parts import (
    REPRESENTATIONS,
    from_vendor,
    infer_finish_reason,
    to_messages,
    validate,
)
from tests.support.vendor_item_samples import OPENAI, SAMPLES

TURN: list[Any] = [
    {"type": "message", "role": "user", "content": "Compute."},
    OPENAI[2],
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "3"},
    {"type": "message", "role": "assistant", "content": "It is 2."},
]


@pytest.mark.parametrize(
    ("representation", "items", "expected"),
    [
        (
            "option2",
            TURN,
            [
                ("user", ["text"]),
                ("assistant", ["server_tool_call", "server_tool_call_response", "tool_call"]),
                ("tool", ["tool_call_response"]),
                ("assistant", ["text"]),
            ],
        ),
        (
            "option1",
            TURN[:3],
            [
                ("user", ["text"]),
                ("assistant", ["tool_call"]),
                ("tool", ["tool_call_response"]),
                ("assistant", ["tool_call"]),
            ],
        ),
    ],
)
def test_server_tools_are_in_assistant_messages_except_responses_in_option_1(
    representation: str, items: list[Any], expected: list[Any]
) -> None:
    messages: Any = to_messages(representation, from_vendor("openai", items))
    assert [
        (message["role"], [part["type"] for part in message["parts"]]) for message in messages
    ] == expected


def test_output_messages_say_why_the_model_stopped() -> None:
    for items, reason in ((TURN[1:3], "tool_call"), (TURN[1:], "stop"), (TURN[1:2], "stop")):
        parts = from_vendor("openai", items)
        assert infer_finish_reason(parts) == reason
        for message in to_messages("option2", parts, infer_finish_reason(parts)):
            assert message["finish_reason"] == reason
            assert validate(message) == [] or items == TURN[1:]


OTEL = Path(__file__).parents[3] / "shared" / "reference" / "otel"


@pytest.mark.skipif(not OTEL.is_dir(), reason="the reference is not here")
def test_messages_match_opentelemetrys_schema() -> None:
    for name, reason in (("input", None), ("output", "stop")):
        schema = jsonschema_rs.Draft202012Validator(
            json.loads((OTEL / f"gen-ai-{name}-messages.json").read_bytes())
        )
        for vendor, items in SAMPLES.items():
            for representation in REPRESENTATIONS:
                schema.validate(to_messages(representation, from_vendor(vendor, items), reason))
