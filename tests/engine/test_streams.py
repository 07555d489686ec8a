"""Whole streams of the engine, as they are; imports the engine over doubles."""

from inline_snapshot import snapshot

from fumehood.testing import ScriptedModel, calls, refuses, says, thinks
from tests.support.engines import Engine
from tests.support.streams import check_invariants, readable

WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


async def test_text() -> None:
    events = await Engine(ScriptedModel([*says("Hello you", pieces=2)])).stream()
    check_invariants(events)
    assert readable(events) == snapshot()


async def test_reasoning_then_text() -> None:
    events = await Engine(ScriptedModel([*thinks("hm", pieces=1), *says("Yes", pieces=1)])).stream()
    check_invariants(events)
    assert readable(events)[2:-1] == snapshot()


async def test_refusal_after_text() -> None:
    events = await Engine(ScriptedModel([*says("Well", pieces=1), *refuses("No", pieces=1)])).stream()
    check_invariants(events)
    assert readable(events)[2:-1] == snapshot()


async def test_function_calls_one_after_another() -> None:
    turn = [
        *says("Let me see", pieces=1),
        calls("weather", {"city": "Bonn"}),
        calls("weather", {"city": "Ulm"}),
    ]
    events = await Engine(ScriptedModel(turn)).stream(tools=[WEATHER])
    check_invariants(events)
    assert readable(events)[2:-1] == snapshot()


async def test_a_custom_tool() -> None:
    turn = [calls("patch", {"input": "a\nb"})]
    events = await Engine(ScriptedModel(turn)).stream(tools=[{"type": "custom", "name": "patch"}])
    check_invariants(events)
    assert readable(events)[2:-1] == snapshot()
