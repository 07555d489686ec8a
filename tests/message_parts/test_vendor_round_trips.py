"""Vendor items convert to parts and back without loss, through every representation."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fumehood.message_parts.canonical_parts import Json, ToolPart
from fumehood.message_parts.conversion import convert, from_vendor, list_formats, to_vendor
from fumehood.message_parts.json_path_access import copy_json, is_same_json
from fumehood.message_parts.part_schema import REPRESENTATIONS, find_part_error
from fumehood.message_parts.vendors import VENDORS
from tests.support import xai_chat_chunks
from tests.support.vendor_item_samples import DOCUMENTS, SAMPLES

REFERENCE = Path(__file__).parents[3] / "shared" / "reference"

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


def mutate_json(value: Json, chance: random.Random, others: list[Json]) -> Json:
    """The value with things changed, left out, put in and put into another order, here and there."""
    if chance.random() < 0.08:
        return chance.choice([*others, "shell", "function", "server_tool_use", "completed"])
    if isinstance(value, list):
        return [mutate_json(inner, chance, others) for inner in value if chance.random() > 0.05]
    if isinstance(value, dict):
        members = [
            (key, mutate_json(inner, chance, others))
            for key, inner in value.items()
            if chance.random() > 0.08
        ]
        if chance.random() < 0.2:
            members.append(
                (chance.choice(["id", "call_id", "status", "error", "new"]), chance.choice(others))
            )
        if chance.random() < 0.3:
            chance.shuffle(members)
        return dict(members)
    return value


def assert_round_trip(vendor: str, document: Json) -> None:
    given_ = copy_json(document)
    parts = from_vendor(vendor, document)
    assert is_same_json(document, given_), "what is given is not changed"
    assert is_same_json(to_vendor(vendor, parts), document)
    for representation in REPRESENTATIONS:
        written = json.loads(json.dumps(convert(vendor, representation, document)))
        for part in written:
            assert find_part_error(part) == "", part
        assert is_same_json(convert(representation, vendor, written), document), representation


@pytest.mark.parametrize("vendor", SAMPLES)
def test_samples_go_back(vendor: str) -> None:
    assert_round_trip(vendor, SAMPLES[vendor])
    for item in SAMPLES[vendor]:
        assert_round_trip(vendor, item)


@pytest.mark.parametrize(("vendor", "document"), [*DOCUMENTS, ("xai", xai_chat_chunks.WHOLE)])
def test_whole_responses_go_back(vendor: str, document: Any) -> None:
    assert_round_trip(vendor, document)


@pytest.mark.parametrize("representation", REPRESENTATIONS)
def test_parts_of_several_responses_convert_back_to_each(representation: str) -> None:
    """As somebody has them who reads the spans of a conversation one after another."""
    item: Any = SAMPLES["openai"][2]
    for vendor, document in DOCUMENTS:
        parts: Any = convert(vendor, representation, document)
        assert is_same_json(convert(representation, vendor, [*parts, *parts, *parts]), [document] * 3), vendor
    response: Any = {"id": "other", "output": [item]}
    for documents, expected in (
        ([item, response], [item, response]),
        ([response, item], [response, item]),
        ([item, item], [item, item]),
        ([[item, item], response], {**response, "output": [item, item, item]}),
    ):
        several: list[Any] = [convert("openai", representation, each) for each in documents]
        assert convert(representation, "openai", [part for parts in several for part in parts]) == expected


@pytest.mark.parametrize("representation", REPRESENTATIONS)
def test_parallel_calls_convert_back_in_order(representation: str) -> None:
    uses: list[Any] = [
        {"type": "server_tool_use", "id": name, "name": "web_search", "input": {"query": name}}
        for name in "abc"
    ]
    results: list[Any] = [
        {"type": "web_search_tool_result", "tool_use_id": name, "content": []} for name in "acb"
    ]
    blocks: list[Any] = [*uses, {"type": "text", "text": "x"}, *results]
    parts: Any = convert("anthropic", representation, blocks)
    assert convert(representation, "anthropic", [*parts, *parts]) == [*blocks, *blocks]
    if representation == "option3":  # one object for each call, with its response
        assert [part.get("id") for part in parts] == ["a", "b", "c", None]
    # Without one of them, the others keep their order.
    fewer = [part for part in parts if part["type"] != "text"]
    assert convert(representation, "anthropic", fewer) == [*uses, *results]


@pytest.mark.parametrize("vendor", SAMPLES)
@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), others=st.lists(anything, min_size=1, max_size=4))
def test_mutilated_items_go_back(vendor: str, seed: int, others: list[Json]) -> None:
    chance = random.Random(seed)
    items: Json = mutate_json(chance.sample(SAMPLES[vendor], min(3, len(SAMPLES[vendor]))), chance, others)
    assert_round_trip(vendor, items)


@pytest.mark.parametrize("vendor", SAMPLES)
@settings(max_examples=25)
@given(document=anything)
def test_anything_goes_back(vendor: str, document: Json) -> None:
    assert is_same_json(to_vendor(vendor, from_vendor(vendor, document)), document)
    written = convert(vendor, "option2", document)
    assert is_same_json(convert("option2", vendor, written), document)


@pytest.mark.parametrize("vendor", SAMPLES)
def test_every_shape_has_a_sample(vendor: str) -> None:
    parts = {part.vendor_type for part in from_vendor(vendor, SAMPLES[vendor]) if isinstance(part, ToolPart)}
    own = {mapping.type for mapping in VENDORS[vendor].item_mappings}
    if vendor in ("azure", "xai"):
        own -= {mapping.type for mapping in VENDORS["openai"].item_mappings}
    if vendor == "gemini":
        own -= {f"{member}:{tool}" for member in ("toolCall", "toolResponse") for tool in GEMINI_UNSAMPLED}
    if vendor == "anthropic":
        own.remove("server_tool_use:tool_search_tool_bm25")
    assert own <= parts


GEMINI_UNSAMPLED = ("GOOGLE_SEARCH_IMAGE", "FILE_SEARCH", "GOOGLE_MAPS")


@pytest.mark.parametrize("representation", REPRESENTATIONS)
@pytest.mark.parametrize("vendor", SAMPLES)
def test_every_representation_converts_to_every_other(vendor: str, representation: str) -> None:
    """From representation to representation nothing is lost either."""
    for other in REPRESENTATIONS:
        through = convert(representation, other, convert(vendor, representation, SAMPLES[vendor]))
        assert is_same_json(convert(other, vendor, through), SAMPLES[vendor])


@pytest.mark.parametrize("target", list_formats())
@pytest.mark.parametrize("vendor", SAMPLES)
def test_every_vendor_converts_to_every_format(vendor: str, target: str) -> None:
    assert convert(vendor, target, SAMPLES[vendor])


def _load_recorded_samples() -> list[tuple[str, Json]]:
    found: list[tuple[str, Json]] = []
    if REFERENCE.is_dir():
        samples = json.loads((REFERENCE / "server-tool-samples.json").read_bytes())
        found += [*samples.items()]
        found += [
            ("openai", json.loads(file.read_bytes()))
            for file in sorted((REFERENCE / "recorded").glob("*.json"))
        ]
    return found


@pytest.mark.skipif(not REFERENCE.is_dir(), reason="the reference is not here")
def test_recorded_responses_go_back() -> None:
    recorded = _load_recorded_samples()
    assert len(recorded) > 20
    for vendor, document in recorded:
        assert_round_trip(vendor, document)


@pytest.mark.slow
@pytest.mark.parametrize("vendor", SAMPLES)
@settings(max_examples=300)
@given(seed=st.integers(0, 2**32), others=st.lists(anything, min_size=1, max_size=4))
def test_many_mutilated_items_go_back(vendor: str, seed: int, others: list[Json]) -> None:
    chance = random.Random(seed)
    documents = [document for name, document in DOCUMENTS if name == vendor]
    assert_round_trip(vendor, mutate_json(chance.choice([SAMPLES[vendor], *documents]), chance, others))
