"""Every field that the gateway sends, against the SDK's types and recorded traffic."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import RunningGateway
from tests.support.compliance_client import connect
from tests.support.gateway_process import USAGE, tool_call, tool_calls
from tests.support.raw_model_server import DONE, chunk, stream

REFERENCE = Path(__file__).parents[3] / "shared" / "reference"
SHAPES = REFERENCE / "openai-sdk-3.49-shapes.json"
RECORDED = sorted((REFERENCE / "recorded").glob("openai-*.chunks.txt"))

# What the SDK's types do not have, and why it is sent all the same.
BEYOND_THE_SDK = {
    "response": {"store", "presence_penalty", "frequency_penalty"},  # OpenResponses demands them
    "custom_tool_call": {"status"},  # OpenAI sends it
}
# What OpenAI was not recorded to send, and the SDK knows.
BEYOND_THE_RECORDINGS = {
    "reasoning": {"content"},  # open models show their thoughts
    "response.custom_tool_call_input.delta": {"sequence_number"},  # missing in the recording alone
}
# What OpenAI always sends, and nobody reads.
LEFT_OUT = {"obfuscation"}

pytestmark = pytest.mark.skipif(not (SHAPES.exists() and RECORDED), reason="the references are not here")

TOOLS: list[Any] = [
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}, "strict": True},
    {"type": "custom", "name": "shout"},
]


async def stream_everything(gateway: RunningGateway) -> list[Any]:
    """A stream with an item of every type that the gateway makes."""
    thought = chunk({"reasoning_content": "Hm."})
    gateway.model.script(
        tool_calls([thought], tool_call("code_interpreter", {"code": "open('a.csv', 'w').write('1')"})),
        stream(
            chunk({"content": "See [a](sandbox:/mnt/data/a.csv)."}),
            *tool_call("f", {"x": 1}, call_id="call_f"),
            *tool_call("shout", {"input": "HI"}, call_id="call_s", index=1),
            chunk(finish="tool_calls"),
            USAGE,
            DONE,
        ),
    )
    async with connect(gateway.process.url) as wire:
        return await wire.unchecked(input="?", tools=TOOLS, include=["code_interpreter_call.outputs"])


def name_objects(event: Any) -> Iterator[tuple[str, set[str]]]:
    """The objects of an event by their names, with their fields."""
    yield event["type"], set(event)
    for name in ("item", "response", "part"):
        if isinstance(event.get(name), dict):
            yield event[name].get("type", name), set(event[name])


async def test_fields_against_the_sdk(gateway: RunningGateway) -> None:
    known = json.loads(SHAPES.read_text())
    shapes: dict[str, dict[str, str]] = {**known["events"], **known["items"], "response": known["Response"]}
    seen: set[str] = set()
    for event in await stream_everything(gateway):
        for name, fields in name_objects(event):
            if (shape := shapes.get(name)) is not None:
                required = {field for field, kind in shape.items() if not kind.startswith("?")}
                assert required <= fields, name
                assert fields - shape.keys() <= BEYOND_THE_SDK.get(name, set()), name
                seen.add(name)
    assert known["events"].keys() >= {name for name in seen if name.startswith("response.")}
    assert {"message", "reasoning", "function_call", "custom_tool_call", "code_interpreter_call"} <= seen
    assert len(seen) > 25


async def test_fields_against_recorded_traffic(gateway: RunningGateway) -> None:
    ever: dict[str, set[str]] = {}
    always: dict[str, set[str]] = {}
    for path in RECORDED:
        for line in path.read_text().splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue  # cut off in the recording
            for name, fields in name_objects(event):
                ever[name] = ever.get(name, set()) | fields
                always[name] = always.get(name, fields) & fields
    compared: set[str] = set()
    for event in await stream_everything(gateway):
        for name, fields in name_objects(event):
            if name in ever:
                assert always[name] - LEFT_OUT <= fields, name
                if name != "response":  # the recordings have but a few of its fields
                    assert fields - ever[name] <= BEYOND_THE_RECORDINGS.get(name, set()), name
                compared.add(name)
    assert len(compared) > 20
