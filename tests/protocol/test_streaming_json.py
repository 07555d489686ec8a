"""A string streamed out of JSON that is still being written."""

import json
from itertools import pairwise

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fumehood.protocol.streaming_json import StringArrayPiece, StringArrayScanner, StringFieldScanner

text = st.text(st.characters(exclude_categories=["Cs"]))
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=8,
)


def fed(written: str, cuts: list[int], name: str = "code") -> tuple[StringFieldScanner, list[str]]:
    """The text in fragments, cut at these places."""
    places = sorted({0, len(written), *(cut % (len(written) + 1) for cut in cuts)})
    field = StringFieldScanner(name)
    return field, [piece for start, end in pairwise(places) for piece in field.feed([written[start:end]])]


def every_character(written: str, name: str = "code") -> tuple[StringFieldScanner, list[str]]:
    return fed(written, list(range(len(written))), name)


@given(
    before=st.dictionaries(text, values, max_size=4),
    code=text,
    after=st.dictionaries(text, values, max_size=3),
    name=text,
    cuts=st.lists(st.integers(0, 10_000), max_size=40),
    ascii_only=st.booleans(),
    indent=st.sampled_from([None, 0, 2]),
)
@example({}, "\U0001f600\u00e9", {}, "code", list(range(60)), True, None)
@example({"a": {"code": "not this"}}, '\\"\\\\', {}, "code", list(range(90)), True, None)
def test_what_was_streamed_is_what_was_meant(
    before: dict[str, object],
    code: str,
    after: dict[str, object],
    name: str,
    cuts: list[int],
    ascii_only: bool,
    indent: int | None,
) -> None:
    whole = {**{key: value for key, value in before.items() if key != name}, name: code}
    whole.update({key: value for key, value in after.items() if key not in whole})
    written = json.dumps(whole, ensure_ascii=ascii_only, indent=indent)
    field, deltas = fed(written, cuts, name)
    assert "".join(deltas) == code == field.value
    assert field.is_complete
    assert field.text == written


@given(
    written=st.text(st.sampled_from('{}[]":,\\u0dc8de9fnx \n\U0001f600'), max_size=60),
    cuts=st.lists(st.integers(0, 60)),
)
def test_whatever_comes_nothing_breaks_and_cuts_do_not_matter(written: str, cuts: list[int]) -> None:
    whole, _ = fed(written, [])
    field, deltas = fed(written, cuts)
    assert "".join(deltas) == (field.value or "") == (whole.value or "")
    assert (field.value, field.is_complete) == (whole.value, whole.is_complete)
    "".join(deltas).encode()
    try:
        decoded = msgspec.json.decode(written, type=dict[str, object])
    except msgspec.DecodeError:
        return
    if isinstance(decoded.get("code"), str) and written.count("code") == 1:
        assert field.value == decoded["code"]


def test_a_run_without_escapes_is_passed_on_as_it_is() -> None:
    field = StringFieldScanner("code")
    field.feed(['{"code": "'])
    fragment = "print" * 3
    assert field.feed([fragment])[0] is fragment


@given(
    code=text,
    cuts=st.lists(st.integers(0, 200), max_size=30),
    together=st.lists(st.integers(0, 30), max_size=10),
    ascii_only=st.booleans(),
)
@example("a\0b\n", list(range(30)), [], True)
@example("\0\n", list(range(30)), [], False)
@example('"\\"', list(range(30)), [], True)
def test_fragments_that_come_together_are_read_as_if_they_came_singly(
    code: str, cuts: list[int], together: list[int], ascii_only: bool
) -> None:
    written = json.dumps({"code": code}, ensure_ascii=ascii_only).replace("\\u0000", "\0")
    places = sorted({0, len(written), *(cut % (len(written) + 1) for cut in cuts)})
    fragments = [written[start:end] for start, end in pairwise(places)]
    fragments.insert(len(fragments) // 2, "")
    singly, pieces = fed(written, cuts)
    field = StringFieldScanner("code")
    groups = sorted({0, len(fragments), *(cut % (len(fragments) + 1) for cut in together)})
    found = [piece for start, end in pairwise(groups) for piece in field.feed(fragments[start:end])]
    assert found == pieces
    assert "" not in found
    assert (field.value, field.text, field.is_complete) == (code, written, True)
    assert singly.value == code


@pytest.mark.parametrize("escape", ["\\n", "\\u00e9", "\\ud83d\\ude00", "\\\\", '\\"', "\\/"])
def test_an_escape_cut_anywhere_comes_out_whole(escape: str) -> None:
    written = '{"code": "a' + escape + 'b"}'
    field, deltas = every_character(written)
    assert field.value == msgspec.json.decode(written)["code"]
    assert [delta for delta in deltas if delta] == ["a", *[json.loads(f'"{escape}"')], "b"]


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ('{"code": "\\ud83d"}', "\N{REPLACEMENT CHARACTER}"),
        ('{"code": "\\ud83dx"}', "\N{REPLACEMENT CHARACTER}x"),
        ('{"code": "\\ud83d\\n\\ude00"}', "\N{REPLACEMENT CHARACTER}\n\N{REPLACEMENT CHARACTER}"),
        ('{"code": "\\ud83d\\ud83d\\ude00"}', "\N{REPLACEMENT CHARACTER}\U0001f600"),
    ],
)
def test_half_a_pair_never_leaves(written: str, value: str) -> None:
    field, deltas = every_character(written)
    assert field.value == value == "".join(deltas)


@pytest.mark.parametrize(
    ("written", "value", "complete"),
    [
        ("", None, False),
        ("[]", None, False),
        ('"code"', None, False),
        ('{"code": 5}', None, False),
        ('{"code": null, "other": "code"}', None, False),
        ('{"codes": "x", "cod": "y"}', None, False),
        ('{"code": ["x"], "inner": {"code": "y"}}', None, False),
        ('{"code": {"code": "x"}}', None, False),
        ('{"other": "code", "code": ""}', "", True),
        ('{"c\\u006fde": "spelled otherwise"}', "spelled otherwise", True),
        ('{"code": "first", "code": "second"}', "first", True),
        ('{"code": 1, "code": "second"}', "second", True),
        ('{"code": "not over', "not over", False),
        ('{"code": "two\nlines\tas they are"}', "two\nlines\tas they are", True),
        ('{"code": "no such \\x escape"}', "no such ", False),
        ('{"code": "no such \\u12g4 escape"}', "no such ", False),
        ('{"code": "the end"}, and more "code": "x"', "the end", True),
    ],
)
def test_text_that_is_not_quite_what_was_asked_for(written: str, value: str | None, complete: bool) -> None:
    for field, deltas in (fed(written, []), every_character(written)):
        assert (field.value, field.is_complete) == (value, complete)
        assert "".join(deltas) == (value or "")


def test_deep_nesting_is_passed_over() -> None:
    written = '{"other": ' + "[" * 100_000 + '"]"' + "]" * 100_000 + ', "code": "x"}'
    field, _ = fed(written, [])
    assert field.value == "x"


# --- strings of an array --------------------------------------------------------------------------------


def strings_fed(written: str, cuts: list[int]) -> tuple[StringArrayScanner, list[StringArrayPiece]]:
    places = sorted({0, len(written), *(cut % (len(written) + 1) for cut in cuts)})
    field = StringArrayScanner("commands")
    return field, [piece for start, end in pairwise(places) for piece in field.feed(written[start:end])]


def gathered(pieces: list[StringArrayPiece]) -> list[str]:
    """What they add up to; fails unless they come string by string, with nothing after an end."""
    strings: list[str] = []
    over = True
    for piece in pieces:
        if over:
            strings.append("")
        assert piece.position == len(strings) - 1
        strings[-1] += piece.text
        over = piece.is_complete
    return strings


@given(
    before=st.dictionaries(text, values, max_size=3),
    commands=st.lists(text, max_size=5),
    after=st.dictionaries(text, values, max_size=3),
    cuts=st.lists(st.integers(0, 10_000), max_size=40),
    ascii_only=st.booleans(),
    indent=st.sampled_from([None, 0, 2]),
)
@example({"a": {"commands": ["not this"]}}, ["", "\U0001f600", '\\"]'], {}, list(range(200)), True, None)
def test_strings_of_an_array(
    before: dict[str, object],
    commands: list[str],
    after: dict[str, object],
    cuts: list[int],
    ascii_only: bool,
    indent: int | None,
) -> None:
    whole = {**{key: value for key, value in before.items() if key != "commands"}, "commands": commands}
    whole.update({key: value for key, value in after.items() if key not in whole})
    written = json.dumps(whole, ensure_ascii=ascii_only, indent=indent)
    field, pieces = strings_fed(written, cuts)
    assert gathered(pieces) == commands == field.values
    assert field.is_complete
    assert field.text == written


@given(
    written=st.text(st.sampled_from('{}[]":,\\u0d8de9fnx \n\U0001f600'), max_size=60),
    cuts=st.lists(st.integers(0, 60)),
)
def test_whatever_comes_cuts_do_not_matter_to_an_array(written: str, cuts: list[int]) -> None:
    written = '{"commands": [' + written
    whole, told = strings_fed(written, [])
    field, pieces = strings_fed(written, cuts)
    assert gathered(pieces) == gathered(told)
    assert (field.values, field.is_complete) == (whole.values, whole.is_complete)
    "".join(field.values).encode()


@pytest.mark.parametrize(
    ("written", "values"),
    [
        ('{"commands": "ls"}', []),
        ('{"commands": ["a", 5, "b"]}', ["a"]),
        ('{"commands": ["a"], "commands": ["b"]}', ["a"]),
        ('{"commands": ["a", "b', ["a", "b"]),
        ('["commands"]', []),
    ],
)
def test_arrays_that_are_not_as_they_should_be(written: str, values: list[str]) -> None:
    field, _ = strings_fed(written, list(range(len(written))))
    assert field.values == values
