"""How many values a document has."""

import json
import resource

import pytest

from fumehood.protocol.json_limits import has_too_many_values


@pytest.mark.parametrize(
    ("document", "many"),
    [
        (b"[1,1,1,1]", True),
        (b"[1,1,1]", False),
        (b'["a,b,c,d,e,f",1,1]', False),
        (b'["a\\",b,c,\\\\",1,1]', False),
        (b'["\\\\",1,1,1]', True),
        (b'["","","",""]', True),
        (b'{"a":[],"b":[],"c":[],"d":[]}', True),
        (b",,,,", True),
        (b'"a,b,c,d,e', False),
        (b"", False),
    ],
)
def test_commas_outside_of_strings_are_counted(document: bytes, many: bool) -> None:
    assert has_too_many_values(document, limit=2) is many


def test_a_long_document_is_counted_in_steps() -> None:
    text = json.dumps(["a,b" * 1_000_000, 1, 2]).encode()
    assert not has_too_many_values(text, limit=2)
    assert has_too_many_values(text, limit=1)
    assert has_too_many_values(b"[" + b"1," * 1_500_000 + b"1]", limit=1_499_999)
    assert not has_too_many_values(b"[" + b"1," * 1_500_000 + b"1]", limit=1_500_000)


def test_escapes_in_a_long_text_take_no_memory() -> None:
    text = json.dumps(["1,2\n" * 2_000_000, "\\", 1]).encode()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert not has_too_many_values(text, limit=2)
    assert has_too_many_values(text, limit=1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


@pytest.mark.parametrize("document", [b'[1,"' + b"a" * 99 + b"\\", b'[1,"\\'])
def test_a_text_that_breaks_off_is_the_last(document: bytes) -> None:
    assert has_too_many_values(document + b',,,,"', limit=0)
    assert not has_too_many_values(document + b",,,,", limit=1)
