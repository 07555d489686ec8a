"""The samples are what vendors send, and what we write is what they take: by their SDKs' types; imports the SDKs."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter

from fumehood.parts.convert import convert
from tests.support import part_samples as samples

with warnings.catch_warnings():
    # What the SDKs warn of when they are imported is their own affair.
    warnings.simplefilter("ignore")
    import mistralai.client.models as mistral
    from anthropic.types.beta import BetaContentBlock
    from google.genai import interactions
    from google.genai import types as gemini
    from openai.types.responses import ResponseItem, ResponseOutputItem

type Through = Callable[[Any], Any]

_OPENAI: TypeAdapter[Any] = TypeAdapter(ResponseOutputItem | ResponseItem)
_ANTHROPIC: TypeAdapter[Any] = TypeAdapter(BetaContentBlock)
_STEP: TypeAdapter[Any] = TypeAdapter(interactions.Step)
_MISTRAL: dict[str, type[BaseModel]] = {
    "tool.execution": mistral.ToolExecutionEntry,
    "function.call": mistral.FunctionCallEntry,
    "function.result": mistral.FunctionResultEntry,
    "message.output": mistral.MessageOutputEntry,
    "agent.handoff": mistral.AgentHandoffEntry,
}


def _dumped(model: BaseModel) -> Any:
    return model.model_dump(mode="json", by_alias=True, exclude_unset=True)


def _openai(item: Any) -> Any:
    return _dumped(_OPENAI.validate_python(item))


def _anthropic(item: Any) -> Any:
    return _dumped(_ANTHROPIC.validate_python(item))


def _gemini(item: Any) -> Any:
    return _dumped(gemini.Part.model_validate(item))


def _interactions(item: Any) -> Any:
    step = _STEP.validate_python(item)
    assert not getattr(step, "is_unknown", False), item
    return _dumped(step)


def _mistral(item: Any) -> Any:
    return _dumped(_MISTRAL[item["type"]].model_validate(item))


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
def test_what_goes_back_through_a_view_is_what_the_vendor_sends(vendor: str) -> None:
    through, items = THROUGH[vendor]
    back: Any = convert("option2", vendor, convert(vendor, "option2", items))
    assert [through(item) for item in back] == items


def test_a_whole_response_in_the_spelling_of_the_sdk_goes_back() -> None:
    for document in (samples.GEMINI, samples.GEMINI_GROUNDED):
        dumped = gemini.GenerateContentResponse.model_validate(document).model_dump(mode="json")
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
def test_calls_of_one_vendor_are_written_as_another_takes_them(target: str) -> None:
    through, _ = THROUGH[target]
    made: Any = convert("openai", target, CALLS)
    assert [through(item) for item in made] == made
    again: Any = convert(target, "openai", made)
    assert [_openai({"id": "new", **item}) for item in again]
    asked = [item["code"] for item in again if item["type"] == "code_interpreter_call" and item["code"]]
    assert asked == ["print(2)"]
