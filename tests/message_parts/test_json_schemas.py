"""The published schemas: how they are built, what they accept and reject."""

import copy
import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, cast

import jsonschema_rs
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fumehood.message_parts import read_published_schema
from fumehood.message_parts.canonical_parts import Json
from fumehood.message_parts.conversion import convert, from_vendor, to_vendor
from fumehood.message_parts.otel_parts import from_representation, to_representation, upgrade_part
from fumehood.message_parts.part_schema import REPRESENTATIONS, TOOL_PART_TYPES, find_part_error
from fumehood.message_parts.tool_payloads import TOOL_KINDS, required_fields
from tests.support.vendor_item_samples import SAMPLES
from tools.build_message_parts import PUBLISHED_SCHEMAS, schema_text

OTEL = Path(__file__).parents[3] / "shared" / "reference" / "otel" / "gen-ai-output-messages.json"

# Specification 002: what calls and responses were before payloads had types.
CURRENT: dict[str, dict[str, Any]] = {
    "tool_call": {
        "type": "object",
        "properties": {
            "type": {"const": "tool_call"},
            "id": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "name": {"type": "string"},
            "arguments": {},
        },
        "required": ["type", "name"],
    },
    "tool_call_response": {
        "type": "object",
        "properties": {
            "type": {"const": "tool_call_response"},
            "id": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "response": {},
        },
        "required": ["type", "response"],
    },
}

# One payload for each kind, call and response, with nothing but what must be there.
PAYLOADS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "function": ({"arguments": {"a": 1}}, {"result": 3}),
    "code_interpreter": ({"code": "print(2)"}, {"outputs": [{"type": "logs", "logs": "2\n"}]}),
    "file_search": ({"queries": ["q"]}, {"results": [{"file_id": "file_1"}]}),
    "web_search": ({"queries": ["q"]}, {"results": [{"url": "https://e.x"}]}),
    "shell": ({"commands": ["ls"]}, {"outputs": [{"stdout": "a\n"}]}),
    "mcp": ({"arguments": "{}"}, {"output": "ok"}),
    "image_generation": ({"prompt": "a cat"}, {"result": "aGk="}),
    "computer": ({"actions": [{"type": "click"}]}, {"output": {"type": "computer_screenshot"}}),
    "apply_patch": ({"operation": {"type": "delete_file", "path": "a"}}, {"output": "Done"}),
    "divination": ({"of": "stars"}, {"said": "yes"}),
}


@cache
def validator(representation: str) -> jsonschema_rs.Draft202012Validator:
    return jsonschema_rs.Draft202012Validator(json.loads(read_published_schema(representation)))


def build_part(form_type: str, kind: str) -> dict[str, Any]:
    form = TOOL_PART_TYPES[form_type]
    call, response = PAYLOADS[kind]
    made: dict[str, Any] = {"type": form_type, "id": "call_1"}
    if form.call:
        made |= {"name": kind, form.call: {"type": kind, **call}}
    if form.response:
        made[form.response] = {"type": kind, **response}
    return copy.deepcopy(made)


FORMS_AND_KINDS = [
    (representation, form, kind)
    for representation, types in REPRESENTATIONS.items()
    for form in types
    for kind in PAYLOADS
    if representation != "option1-compat"
]


def validate_both_ways(representation: str, made: Any, *, compat: bool = False) -> bool:
    """Whether the part is valid; our own check and the schema must say the same."""
    valid = validator(representation).is_valid(made)
    assert (find_part_error(made, compat=compat) == "") == valid, (made, find_part_error(made, compat=compat))
    return valid


@pytest.mark.parametrize("representation", REPRESENTATIONS)
def test_published_schemas_match_the_payload_types(representation: str) -> None:
    assert (PUBLISHED_SCHEMAS / f"{representation}.json").read_text(encoding="utf-8") == schema_text(
        representation
    )
    assert (
        json.loads(read_published_schema(representation))["$schema"]
        == "https://json-schema.org/draft/2020-12/schema"
    )
    jsonschema_rs.meta.validate(json.loads(read_published_schema(representation)))


def test_every_kind_is_in_every_schema() -> None:
    for representation in REPRESENTATIONS:
        definitions = json.loads(read_published_schema(representation))["$defs"]
        for kind in TOOL_KINDS.values():
            for side in (kind.call, kind.response):
                assert definitions[side.__name__]["properties"]["type"]["const"] == kind.name
                assert definitions[side.__name__]["additionalProperties"] is True
    assert set(PAYLOADS) - {"divination"} == set(TOOL_KINDS)


def test_definitions_have_the_names_of_the_specification() -> None:
    """Specification 002: a part chooses among definitions of payloads, and other fields are allowed."""
    definitions = json.loads(read_published_schema("option1"))["$defs"]
    for name, field, suffix in (
        ("ToolCallRequestPart", "tool_call", "ToolCall"),
        ("ToolCallResponsePart", "response", "ToolCallResponse"),
    ):
        part = definitions[name]
        assert part["additionalProperties"] is True
        assert {"type", field} <= {*part["required"]} <= {"type", "name", field}
        choices = [choice["$ref"] for choice in part["properties"][field]["oneOf"]]
        assert choices[:2] == [f"#/$defs/Function{suffix}", f"#/$defs/CodeInterpreter{suffix}"]


@pytest.mark.parametrize(("representation", "form", "kind"), FORMS_AND_KINDS)
def test_valid_parts_are_accepted_and_malformed_ones_rejected(
    representation: str, form: str, kind: str
) -> None:
    good = build_part(form, kind)
    assert validate_both_ways(representation, good)
    assert validate_both_ways(representation, {**good, "id": None, "new": {"more": 1}})
    for bad in iter_malformed_parts(form, kind):
        assert not validate_both_ways(representation, bad), bad


NO_PAYLOADS: list[Any] = [None, "text", [], {}, {"type": None}, {"type": 7}]


def iter_malformed_parts(form_type: str, kind: str) -> Iterator[dict[str, Any]]:
    form, good = TOOL_PART_TYPES[form_type], build_part(form_type, kind)
    keys = [key for key in (form.call, form.response) if key]
    yield {**good, "id": 7}
    yield {key: value for key, value in good.items() if key not in keys}
    for key in form.forbidden_fields:
        yield {**good, key: {"type": kind}}
    if form.call:
        yield {**good, "name": None}
        yield {key: value for key, value in good.items() if key != "name"}
    for key in keys:
        call = key == form.call
        for payload in NO_PAYLOADS:
            yield {**good, key: payload}
        if kind not in TOOL_KINDS:
            continue
        for name in required_fields(TOOL_KINDS[kind], call=call):
            inner = {field: value for field, value in good[key].items() if field != name}
            yield {**good, key: inner}
        # The other half's payload under the same discriminator, alone and mixed in.
        other = PAYLOADS[kind][1 if call else 0]
        yield {**good, key: {"type": kind, **other}}
        yield {**good, key: {**good[key], **other}}
        if form.call and not TOOL_KINDS[kind].has_named_tools:
            yield {**good, key: {**good[key], "type": "divination"}}
            yield {**good, "name": "web_search" if kind != "web_search" else "shell"}


WRONG: list[tuple[Any, Any]] = [
    ({"type": "code_interpreter", "code": 5}, None),
    ({"type": "code_interpreter", "code": "1", "outputs": []}, None),
    ({"type": "web_search", "queries": "q"}, None),
    ({"type": "shell", "commands": [1]}, None),
    ({"type": "computer", "actions": [{}]}, None),
    ({"type": "apply_patch", "operation": {"path": "a"}}, None),
    (None, {"type": "code_interpreter", "outputs": [{"logs": "2"}]}),
    (None, {"type": "code_interpreter", "outputs": [{"type": "logs", "logs": 2}]}),
    (None, {"type": "file_search", "results": [{"score": "high"}]}),
    (None, {"type": "image_generation", "result": {"digest": "sha256:0"}}),
]


@pytest.mark.parametrize(("payload", "response"), WRONG)
def test_payloads_of_wrong_types_are_refused(payload: Any, response: Any) -> None:
    if payload is not None:
        made = {"type": "server_tool_call", "id": "1", "name": payload["type"], "server_tool_call": payload}
    else:
        made = {"type": "server_tool_call_response", "id": "1", "server_tool_call_response": response}
    assert not validate_both_ways("option2", made)


TYPED = [
    (kind, side, field.encode_name)
    for kind in TOOL_KINDS
    for side in (0, 1)
    for field in msgspec.structs.fields((TOOL_KINDS[kind].call, TOOL_KINDS[kind].response)[side])
    if field.type is not Any
]


@pytest.mark.parametrize(
    "representation",
    [representation for representation in REPRESENTATIONS if representation != "option1-compat"],
)
def test_every_typed_field_rejects_other_types(representation: str) -> None:
    for kind, side, member in TYPED:
        form = next(
            form
            for form in REPRESENTATIONS[representation]
            if (TOOL_PART_TYPES[form].call, TOOL_PART_TYPES[form].response)[side]
        )
        good = build_part(form, kind)
        key = (TOOL_PART_TYPES[form].call, TOOL_PART_TYPES[form].response)[side]
        refused = [
            value
            for value in VALUES
            if not validate_both_ways(representation, {**good, key: {**good[key], member: value}})
        ]
        assert refused, (kind, member)
    assert len(TYPED) > 25


def test_call_and_response_must_be_of_one_kind() -> None:
    for representation, form in (
        ("option3", "server_tool"),
        ("option3-alternative", "server_tool_execution"),
    ):
        made = build_part(form, "mcp")
        made[TOOL_PART_TYPES[form].response] = {"type": "function", "result": 1}
        assert not validate_both_ways(representation, made)
        for side in (TOOL_PART_TYPES[form].call, TOOL_PART_TYPES[form].response):
            assert not validate_both_ways(
                representation, {**build_part(form, "mcp"), side: {"type": "divination"}}
            )


def test_functions_and_mcp_tools_may_have_any_name() -> None:
    for kind in ("function", "mcp"):
        assert validate_both_ways(
            "option2", {**build_part("server_tool_call", kind), "name": "code_interpreter"}
        )


@settings(max_examples=200)
@given(seed=st.integers(0, 2**32))
def test_the_check_and_the_schemas_agree(seed: int) -> None:
    """On parts with members left out, replaced and put in at random."""
    chance = random.Random(seed)
    representation, form, kind = chance.choice(FORMS_AND_KINDS)
    made = damage_json(build_part(form, kind), chance)
    if (
        isinstance(made, dict)
        and made.get("type") in REPRESENTATIONS[representation]
        and not _has_two_unknown_kinds(made, form)
    ):
        validate_both_ways(representation, made)


def _has_two_unknown_kinds(made: dict[str, Any], form: str) -> bool:
    kinds = set[str]()
    for key in (TOOL_PART_TYPES[form].call, TOOL_PART_TYPES[form].response):
        payload: Any = made.get(key)
        if isinstance(payload, dict):
            kinds.add(json.dumps(cast("dict[str, Any]", payload).get("type")))
    return len(kinds) > 1 and not kinds & {json.dumps(kind) for kind in TOOL_KINDS}


def test_only_the_check_compares_two_unknown_kinds() -> None:
    """A JSON schema cannot say that two values are equal."""
    made = {**build_part("server_tool_execution", "mcp"), "name": "x"}
    made |= {"request": {"type": "augury"}, "response": {"type": "divination"}}
    assert find_part_error(made) == "a augury call cannot have a divination response"
    assert validator("option3-alternative").is_valid(made)


# What JSON has and Python's types do not: 1.0 is an integer, numbers have no bounds, half a character is text.
ODD_PAYLOADS: list[tuple[str, dict[str, Any], bool]] = [
    ("code_interpreter", {"outputs": None, "exit_code": 1.0}, True),
    ("code_interpreter", {"outputs": None, "exit_code": 10**400}, True),
    ("code_interpreter", {"outputs": None, "exit_code": 1.5}, False),
    ("code_interpreter", {"outputs": None, "exit_code": "1"}, False),
    ("code_interpreter", {"outputs": None, "error": 1.0}, False),
    ("file_search", {"results": [{"score": 10**400}]}, True),
    ("shell", {"outputs": "\ud800"}, False),
    ("shell", {"outputs": ["\ud800"]}, False),
    ("shell", {"outputs": [{"stdout": "\ud800", "\ud800": 1}]}, True),
    ("shell", {"outputs": [{"stdout": "\ud800", "\ud800": 1, "stderr": 2}]}, False),
    ("shell", {"outputs": [], "\ud800": "\ud800"}, True),
]


@pytest.mark.parametrize(("kind", "payload", "valid"), ODD_PAYLOADS)
def test_numbers_and_texts_are_what_json_says(kind: str, payload: dict[str, Any], valid: bool) -> None:
    response: Any = {"type": kind, **payload}
    made: Any = {"type": "server_tool_call_response", "server_tool_call_response": response}
    assert (find_part_error(made) == "") == valid
    if "\\ud800" not in json.dumps(made):  # the validator cannot be given half a character
        assert validate_both_ways("option2", made) == valid
    item: Json = {"type": "shell_call_output", "call_id": "c", "output": payload.get("outputs")}
    assert to_vendor("openai", from_vendor("openai", [item])) == [item]


def test_only_media_have_a_mime_type() -> None:
    for kind, members in (("text", {"content": "x"}), ("uri", {"modality": "image", "uri": "u"})):
        made: Any = {"type": kind, **members, "mime_type": 5}
        assert validate_both_ways("option2", made) == (kind == "text")
        assert kind != "text" or to_representation("option2", from_representation([made])) == [made]


VALUES: list[Json] = [None, 1, 1.5, True, "x", [], ["x"], {}, {"type": "x"}, [{"type": "x"}]]


def damage_json(value: Json, chance: random.Random) -> Json:
    if chance.random() < 0.12:
        return chance.choice(VALUES)
    if isinstance(value, dict):
        members = {key: damage_json(inner, chance) for key, inner in value.items() if chance.random() > 0.1}
        if chance.random() < 0.15:
            members[chance.choice(["name", "outputs", "code", "response", "error"])] = chance.choice(VALUES)
        return members
    return [damage_json(inner, chance) for inner in value] if isinstance(value, list) else value


# --- the form before, and after -----------------------------------------------------------------------

texts = st.text(max_size=5)
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=5,
)
members = st.fixed_dictionaries(
    {"name": texts, "response": anything},
    optional={
        "id": st.none() | texts,
        "arguments": anything,
        "tool_call": anything,
        "tool_response": anything,
        "server_tool_call": anything,
        "more": anything,
    },
)


@settings(max_examples=100)
@given(members=members, kind=st.sampled_from(["tool_call", "tool_call_response"]))
def test_parts_before_typed_payloads_are_valid_under_compat_and_can_be_upgraded(
    members: dict[str, Any], kind: str
) -> None:
    made = {"type": kind, **members}
    assert jsonschema_rs.Draft202012Validator(CURRENT[kind]).is_valid(made)
    assert validate_both_ways("option1-compat", made, compat=True)
    assert validate_both_ways("option1", upgrade_part(made))


@pytest.mark.parametrize(
    "made", [{"type": "tool_call"}, {"type": "tool_call_response"}, {"type": "tool_call", "name": 1}]
)
def test_parts_malformed_before_typed_payloads_stay_malformed(made: dict[str, Any]) -> None:
    assert not validate_both_ways("option1-compat", made, compat=True)
    assert upgrade_part(made) == made


def test_functions_keep_working() -> None:
    """Specification 002: what a function tool wrote before becomes a `FunctionToolCall`."""
    call: Any = {"type": "tool_call", "id": "1", "name": "f", "arguments": {"a": 1}}
    answer: Any = {"type": "tool_call_response", "id": "1", "response": "3"}
    assert not validate_both_ways("option1", call)
    assert upgrade_part(call) == {**call, "tool_call": {"type": "function", "arguments": {"a": 1}}}
    assert upgrade_part(answer) == {**answer, "response": {"type": "function", "result": "3"}}
    assert convert("option1-compat", "openai", [call, answer]) == [
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": 1}', "id": "1"},
        {"type": "function_call_output", "call_id": "1", "output": "3", "status": "completed", "id": "1"},
    ]
    enhanced = build_part("tool_call", "code_interpreter")
    assert upgrade_part(enhanced) == enhanced


@pytest.mark.skipif(not OTEL.is_file(), reason="the reference is not here")
def test_option_2_is_what_opentelemetry_adopted() -> None:
    """Its own schema takes every part, and takes it as a server tool's, not as anything."""
    schema = json.loads(OTEL.read_bytes())
    definitions = {"$defs": schema["$defs"]}
    named = {
        "server_tool_call": "ServerToolCallPart",
        "server_tool_call_response": "ServerToolCallResponsePart",
    }
    parts: set[str] = set()
    for vendor, items in SAMPLES.items():
        for made in to_representation("option2", from_vendor(vendor, items)):
            if title := named.get(str(made["type"])):
                jsonschema_rs.validate({**definitions, "$ref": f"#/$defs/{title}"}, made)
                parts.add(title)
    assert parts == set(named.values())
