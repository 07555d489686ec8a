"""Dataclasses as JSON and as schemas; imports `fumehood.client.serde` and hypothesis."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema_rs import validator_for

from fumehood.client import serde


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
def test_what_is_encoded_is_decoded(tree: Tree) -> None:
    assert serde.decode(serde.encode(tree), Tree) == tree


@settings(max_examples=40)
@given(st.builds(Plain, st.text(), st.integers(-(2**53), 2**53), leaves))
def test_what_is_encoded_fits_the_strict_schema(plain: Plain) -> None:
    schema = serde.schema_of(Plain)
    assert schema.strict
    validator = validator_for(schema.body)
    assert validator.is_valid(serde.builtins(plain))
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
    assert serde.schema_of(Plain).body["properties"]["text"] == {"type": "string", "description": "Anything."}
    tree = serde.schema_of(Tree)
    age = tree.body["properties"]["age"]
    assert age == {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "null"}], "description": "In years."}
    assert tree.body["properties"]["inner"] == {"anyOf": [{"$ref": "#/$defs/Tree"}, {"type": "null"}]}
    assert tree.body["description"] == "A tree."


def test_what_cannot_be_strict_says_so() -> None:
    assert not serde.schema_of(Tree).strict  # it has a mapping

    @dataclass
    class Loose:
        anything: Any

    assert not serde.schema_of(Loose).strict

    @dataclass
    class Odd:
        thing: object
        stream: type[Leaf]

    with pytest.raises(TypeError):
        serde.schema_of(Odd)


def test_errors_say_where() -> None:
    for text, said in (
        ("{", "truncated"),
        ('{"leaves": [{"name": 1}]}', r"\$\.leaves\[0\]\.name"),
        ("[]", "object"),
    ):
        with pytest.raises(serde.DecodeError, match=said):
            serde.decode(text, Tree)
