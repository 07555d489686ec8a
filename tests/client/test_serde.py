"""Dataclasses as JSON and as schemas."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, make_dataclass
from datetime import date
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema_rs import validator_for
from openai.lib._pydantic import _ensure_strict_json_schema  # pyright: ignore[reportPrivateUsage] - the oracle

from fumehood.client import serde
from fumehood.client.errors import PromptValidationError


@dataclass(frozen=True)
class Leaf:
    name: str
    weight: float = 1.0
    note: str | None = None


@dataclass(frozen=True)
class Tree:
    """A tree."""

    leaves: list[Leaf]
    kind: Literal["oak", "elm"] = "oak"
    age: Annotated[int, msgspec.Meta(ge=0, description="In years.")] = 0
    best: Leaf | None = None
    inner: "Tree | None" = None
    tags: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class Plain:
    text: str = field(metadata={"description": "Anything."})
    count: int = 3
    leaf: Leaf = field(default_factory=lambda: Leaf("default"))


leaves = st.builds(Leaf, st.text(), st.floats(allow_nan=False, allow_infinity=False), st.none() | st.text())
trees = st.recursive(
    st.builds(Tree, st.lists(leaves, max_size=3), tags=st.dictionaries(st.text(), st.text(), max_size=2)),
    lambda inner: st.builds(Tree, st.lists(leaves, max_size=2), inner=inner, best=st.none() | leaves),
    max_leaves=4,
)


@settings(max_examples=40)
@given(trees)
def test_encoded_values_decode_to_the_same(tree: Tree) -> None:
    assert serde.decode(serde.encode(tree), Tree) == tree


@settings(max_examples=40)
@given(st.builds(Plain, st.text(), st.integers(-(2**53), 2**53), leaves))
def test_encoded_values_match_the_strict_schema(plain: Plain) -> None:
    schema = serde.build_schema(Plain)
    assert schema.strict
    validator = validator_for(schema.body)
    assert validator.is_valid(serde.to_builtins(plain))
    assert validator.is_valid({"text": "x", "count": None, "leaf": None})
    assert not validator.is_valid({"text": "x"})
    assert not validator.is_valid({"text": "x", "count": 1, "leaf": None, "more": 1})


def test_a_null_stands_for_the_default_unless_the_type_has_one() -> None:
    assert serde.decode('{"text": "x", "count": null, "leaf": null}', Plain) == Plain("x")
    read = serde.decode('{"leaves": [{"name": "a", "weight": null, "note": null}], "best": null}', Tree)
    assert read == Tree([Leaf("a")])
    with pytest.raises(serde.DecodeError, match=r"\$\.text"):
        serde.decode('{"text": null}', Plain)


def test_descriptions_come_from_metadata_and_from_meta() -> None:
    assert serde.build_schema(Plain).body["properties"]["text"] == {
        "type": "string",
        "description": "Anything.",
    }
    tree = serde.build_schema(Tree)
    age = tree.body["properties"]["age"]
    assert age == {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "null"}], "description": "In years."}
    assert tree.body["properties"]["inner"] == {"anyOf": [{"$ref": "#/$defs/Tree"}, {"type": "null"}]}
    assert tree.body["description"] == "A tree."


def test_a_schema_that_cannot_be_strict_says_so() -> None:
    assert not serde.build_schema(Tree).strict  # it has a mapping

    @dataclass
    class Loose:
        anything: Any

    assert not serde.build_schema(Loose).strict

    @dataclass
    class Odd:
        thing: object
        stream: type[Leaf]

    with pytest.raises(PromptValidationError, match=r"Odd.* cannot be described to a model"):
        serde.build_schema(Odd)

    @dataclass
    class Ahead:
        thing: "NotYet"  # pyright: ignore[reportUndefinedVariable] # noqa: F821 - that is the mistake

    with pytest.raises(PromptValidationError, match="'NotYet' is not defined"):
        serde.build_schema(Ahead)


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Choices:
    """Everything that OpenAI's strict mode is known to be particular about."""

    one_of: Literal["a", "b"]
    mixed: Literal["a", 1]
    colour: Colour
    leaf: Leaf = field(metadata={"description": "A reference with something to say."})
    shade: Colour = field(default=Colour.RED, metadata={"description": "Of the leaf."})
    several: list[Leaf] | None = None
    day: date | None = None


def nodes(schema: Any) -> Iterator[dict[str, Any]]:
    """Every schema within a schema."""
    yield schema
    below = [*schema.get("properties", {}).values(), *schema.get("$defs", {}).values()]
    for one in (*below, *schema.get("anyOf", ()), *([schema["items"]] if "items" in schema else ())):
        yield from nodes(one)


def test_a_strict_schema_is_accepted_by_openai() -> None:
    """Every node says its type, and a reference stands alone; the SDK's own pass over it finds nothing to do."""
    schema = serde.build_schema(Choices)
    assert schema.strict
    for node in nodes(schema.body):
        assert node.keys() & {"type", "anyOf", "$ref"}
        assert "$ref" not in node or len(node) == 1
    assert schema.body["properties"]["one_of"] == {"enum": ["a", "b"], "type": "string"}
    assert schema.body["properties"]["mixed"]["type"] == ["integer", "string"]
    assert schema.body["properties"]["leaf"] == {
        "anyOf": [{"$ref": "#/$defs/Leaf"}],
        "description": "A reference with something to say.",
    }
    theirs = copy.deepcopy(schema.body)
    assert _ensure_strict_json_schema(theirs, path=(), root=theirs) == schema.body
    sample = {"one_of": "a", "mixed": 1, "colour": "red", "leaf": {"name": "x", "weight": None, "note": None}}
    sample |= {"shade": None, "several": None, "day": "2026-01-01"}
    assert validator_for(schema.body).is_valid(sample)


@pytest.mark.parametrize(
    "kind", [bytes, Decimal, set[int], Annotated[str, msgspec.Meta(min_length=2)], tuple[int, str]]
)
def test_types_outside_strict_mode_are_not_strict(kind: Any) -> None:
    made = make_dataclass("Made", [("value", kind)])
    assert not serde.build_schema(made).strict


@dataclass(frozen=True)
class Orchard:
    rows: list[Leaf] | None = None
    named: dict[str, Leaf] = field(default_factory=dict[str, Leaf])
    listed: dict[str, list[Leaf]] | None = None


def test_a_null_stands_for_the_default_wherever_a_dataclass_is() -> None:
    leaf = '{"name": "a", "weight": null}'
    read = serde.decode(
        f'{{"rows": [{leaf}], "named": {{"x": {leaf}}}, "listed": {{"y": [{leaf}]}}}}', Orchard
    )
    assert read == Orchard([Leaf("a")], {"x": Leaf("a")}, {"y": [Leaf("a")]})


def test_decode_errors_name_the_path() -> None:
    for text, expected_error in (
        ("{", "truncated"),
        ('{"leaves": [{"name": 1}]}', r"\$\.leaves\[0\]\.name"),
        ("[]", "object"),
    ):
        with pytest.raises(serde.DecodeError, match=expected_error):
            serde.decode(text, Tree)
