"""Samples and converted items against the types of the vendors' SDKs."""

import functools
import json
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter, ValidationError

from fumehood.message_parts.canonical_parts import Json, ToolCallPart, ToolCallResponsePart
from fumehood.message_parts.conversion import convert, from_vendor, to_vendor
from fumehood.message_parts.part_schema import REPRESENTATIONS
from tests.support import vendor_item_samples as samples

type Through = Callable[[Any], Any]


@dataclass(frozen=True)
class SdkTypes:
    """Of the SDKs, which take seconds to import: whoever only collects these tests does without them."""

    openai: TypeAdapter[Any]
    anthropic: TypeAdapter[Any]
    step: TypeAdapter[Any]
    part: type[BaseModel]
    content: type[BaseModel]
    mistral: dict[str, type[BaseModel]]


@functools.cache
def types() -> SdkTypes:
    with warnings.catch_warnings():
        # What the SDKs warn of when they are imported is their own affair.
        warnings.simplefilter("ignore")
        import mistralai.client.models as mistral
        from anthropic.types.beta import BetaContentBlock
        from google.genai import interactions
        from google.genai import types as gemini
        from openai.types.responses import ResponseItem, ResponseOutputItem
    return SdkTypes(
        openai=TypeAdapter(ResponseOutputItem | ResponseItem),
        anthropic=TypeAdapter(BetaContentBlock),
        step=TypeAdapter(interactions.Step),
        part=gemini.Part,
        content=gemini.GenerateContentResponse,
        mistral={
            "tool.execution": mistral.ToolExecutionEntry,
            "function.call": mistral.FunctionCallEntry,
            "function.result": mistral.FunctionResultEntry,
            "message.output": mistral.MessageOutputEntry,
            "agent.handoff": mistral.AgentHandoffEntry,
        },
    )


def _dumped(model: BaseModel) -> Any:
    return model.model_dump(mode="json", by_alias=True, exclude_unset=True)


def _openai(item: Any) -> Any:
    return _dumped(types().openai.validate_python(item))


def _anthropic(item: Any) -> Any:
    return _dumped(types().anthropic.validate_python(item))


def _gemini(item: Any) -> Any:
    return _dumped(types().part.model_validate(item))


def _interactions(item: Any) -> Any:
    step = types().step.validate_python(item)
    assert not getattr(step, "is_unknown", False), item
    return _dumped(step)


def _mistral(item: Any) -> Any:
    return _dumped(types().mistral[item["type"]].model_validate(item))


THROUGH: dict[str, tuple[Through, list[Any]]] = {
    "openai": (_openai, samples.OPENAI),
    "anthropic": (_anthropic, samples.ANTHROPIC),
    "gemini": (_gemini, samples.SAMPLES["gemini"]),
    "gemini-interactions": (_interactions, samples.INTERACTIONS),
    "mistral": (_mistral, samples.MISTRAL),
}


@pytest.mark.parametrize("vendor", THROUGH)
def test_samples_are_what_the_vendor_sends(vendor: str) -> None:
    through, items = THROUGH[vendor]
    assert [through(item) for item in items] == items


@pytest.mark.parametrize("vendor", THROUGH)
def test_items_converted_back_fit_the_sdk_types(vendor: str) -> None:
    through, items = THROUGH[vendor]
    back: Any = convert("option2", vendor, convert(vendor, "option2", items))
    assert [through(item) for item in back] == items


def test_a_whole_response_in_the_spelling_of_the_sdk_goes_back() -> None:
    for document in (samples.GEMINI, samples.GEMINI_GROUNDED):
        dumped = types().content.model_validate(document).model_dump(mode="json")
        assert convert("option3", "gemini", convert("gemini", "option3", dumped)) == dumped
        kinds = [part.get("type") for part in _parts(convert("gemini", "option2", dumped))]
        assert kinds == [part.get("type") for part in _parts(convert("gemini", "option2", document))]


def _parts(written: Any) -> list[dict[str, Any]]:
    return written


# Entries of search results keep their first vendor's members, so searches are not among these.
CALLS: list[Any] = [
    item for item in samples.OPENAI if item["type"] in ("code_interpreter_call", "mcp_call", "function_call")
]


@pytest.mark.parametrize("target", [name for name in THROUGH if name != "openai"])
def test_calls_converted_to_another_vendor_fit_its_types(target: str) -> None:
    through, _ = THROUGH[target]
    made: Any = convert("openai", target, CALLS)
    assert [through(item) for item in made] == made
    again: Any = convert(target, "openai", made)
    assert [_openai({"id": "new", **item}) for item in again]
    asked = [item["code"] for item in again if item["type"] == "code_interpreter_call" and item["code"]]
    assert asked == ["print(2)"]


# --- items that nobody has thought of, but that the vendor would take ----------------------------------


_STRUCTURE = ("type", "object", "role", "status")


def replace_texts(value: Json, chance: random.Random, texts: list[str]) -> Json:
    """The same with other words, numbers and lengths; which of them must not change, the vendor's types know."""
    if isinstance(value, dict):
        return {
            key: inner if key in _STRUCTURE else replace_texts(inner, chance, texts)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [
            replace_texts(inner, chance, texts) for inner in value for _ in range(chance.choice([0, 1, 1, 2]))
        ]
    if isinstance(value, bool) or chance.random() < 0.5:
        return value
    if isinstance(value, int):
        return chance.choice([0, -1, 2**31, 2**53 + 1])
    if isinstance(value, str) and value.startswith("{"):
        return json.dumps({"code": chance.choice(texts), "n": [1.5, None]})
    return chance.choice(texts) if isinstance(value, str) else value


def is_accepted_by(through: Through, item: Json) -> bool:
    try:
        return through(item) == item
    except (
        ValidationError,
        AssertionError,
        UserWarning,
    ):  # of a word that its type does not know, Gemini's warns
        return False


def assert_changed_item_round_trips(vendor: str, index: int, seed: int, texts: list[str]) -> None:
    through, items = THROUGH[vendor]
    chance = random.Random(seed)
    tries = (replace_texts(items[index], chance, texts) for _ in range(6))
    made = next((item for item in tries if is_accepted_by(through, item)), None)
    assume(made is not None)
    for representation in REPRESENTATIONS:
        back = convert(representation, vendor, convert(vendor, representation, made))
        assert back == made
        assert through(back) == made


words = st.lists(st.text(max_size=8), min_size=1, max_size=3)
SORTS = [(vendor, index) for vendor, (_, items) in THROUGH.items() for index in range(len(items))]
TAKEN = settings(
    max_examples=15, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow], deadline=None
)


@pytest.mark.parametrize("vendor", THROUGH)
@TAKEN
@given(data=st.data(), seed=st.integers(0, 2**32), texts=words)
def test_whatever_a_vendor_would_send_goes_back(
    vendor: str, data: st.DataObject, seed: int, texts: list[str]
) -> None:
    index = data.draw(st.integers(0, len(THROUGH[vendor][1]) - 1))
    assert_changed_item_round_trips(vendor, index, seed, texts)


@pytest.mark.slow
@pytest.mark.parametrize(("vendor", "index"), SORTS)
@settings(TAKEN, max_examples=20)
@given(seed=st.integers(0, 2**32), texts=words)
def test_whatever_a_vendor_would_send_of_each_sort_goes_back(
    vendor: str, index: int, seed: int, texts: list[str]
) -> None:
    assert_changed_item_round_trips(vendor, index, seed, texts)


# --- what one vendor said, in another's words ----------------------------------------------------------


def _tool(kind: str, name: str, call: Any, result: Any) -> list[Any]:
    return [
        ToolCallPart(kind=kind, name=name, payload=call, call_id="c1"),
        ToolCallResponsePart(kind=kind, payload=result, call_id="c1"),
    ]


def test_the_result_of_a_command_is_the_same_everywhere() -> None:
    ran = {"stdout": "a\n", "stderr": "b\n", "exit_code": 3}
    parts = _tool("shell", "shell", {"commands": ["ls"]}, {"outputs": [ran]})
    made: Any = to_vendor("openai", parts)
    assert [_openai({"id": "new", **item}) for item in made]
    assert made[1]["output"] == [
        {"stdout": "a\n", "stderr": "b\n", "outcome": {"type": "exit", "exit_code": 3}}
    ]
    again: Any = convert("openai", "anthropic", made)
    assert [_anthropic(item) for item in again] == again
    assert again[1]["content"]["return_code"] == 3
    (_, result) = from_vendor("anthropic", again)
    assert isinstance(result, ToolCallResponsePart)
    assert result.payload["outputs"] == [ran]


def test_a_function_without_arguments_has_none_anywhere() -> None:
    asked: Json = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    for vendor, member in (("anthropic", "input"), ("gemini-interactions", "arguments")):
        (made,) = _parts(convert("openai", vendor, [asked]))
        assert made[member] == {}
    (made,) = _parts(convert("openai", "gemini", [asked]))
    assert made == {"functionCall": {"name": "f", "args": {}, "id": "c1"}}


def test_a_vendor_that_repeats_the_name_with_the_result_gets_it() -> None:
    asked: Json = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    answered: Json = {"type": "function_call_output", "call_id": "c1", "output": "3"}
    _, made = _parts(convert("openai", "gemini", [asked, answered]))
    assert made == {"functionResponse": {"name": "f", "response": {"result": "3"}, "id": "c1"}}


def test_a_tool_of_an_mcp_server_is_a_function_where_there_are_none() -> None:
    parts = _tool("mcp", "lookup", {"arguments": '{"q": 1}', "server_label": "s"}, {"output": "found"})
    called, answered = _parts(to_vendor("mistral", parts))
    assert (called["name"], called["arguments"], answered["result"]) == ("lookup", '{"q": 1}', "found")


def test_an_mcp_call_without_a_server_label_is_valid_for_the_vendor() -> None:
    parts = _tool("mcp", "lookup", {"arguments": {"q": 1}}, {"output": "found"})
    for vendor in ("openai", "anthropic", "gemini-interactions"):
        through, _ = THROUGH[vendor]
        made = _parts(to_vendor(vendor, parts))
        assert [through(item) for item in made] == made
