"""Where placeholders are replaced, and where not."""

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.sandbox_server.egress.secret_placeholders import SecretPlaceholders

FILL = SecretPlaceholders({"KEY": "s3cret", "KEY_2": "$KEY", "a": "x"})


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"$KEY", b"s3cret"),
        (b"Bearer $KEY", b"Bearer s3cret"),
        (b"$KEY$KEY", b"s3crets3cret"),
        (b"$KEY_2", b"$KEY"),  # what a secret contains is not filled in
        (b"$KEY_3 $KEYS KEY $key $", b"$KEY_3 $KEYS KEY $key $"),
        (b"a=$a; b=$KEY.", b"a=x; b=s3cret."),
    ],
)
def test_values(before: bytes, after: bytes) -> None:
    assert FILL.fill([(b"X-Any", before)]) == [(b"X-Any", after)]


def test_basic_credentials() -> None:
    def basic(text: bytes, scheme: bytes = b"Basic ") -> list[tuple[bytes, bytes]]:
        return [(b"Authorization", scheme + base64.b64encode(text))]

    assert FILL.fill(basic(b"user:$KEY")) == basic(b"user:s3cret")
    assert FILL.fill(basic(b"$KEY:", b"basic  ")) == basic(b"s3cret:", b"basic  ")
    assert FILL.fill(basic(b"user:other")) == basic(b"user:other")
    assert FILL.fill([(b"Authorization", b"Basic $KEY")]) == [(b"Authorization", b"Basic s3cret")]


def test_neither_names_nor_framing() -> None:
    headers = [(b"$KEY", b"1"), (b"Host", b"$KEY"), (b"content-length", b"$KEY")]
    assert FILL.fill(headers) == headers


@given(st.binary(max_size=60))
def test_anything_else_stays(value: bytes) -> None:
    if b"$" not in value:
        assert FILL.fill([(b"X", value)]) == [(b"X", value)]
    assert len(FILL.fill([(b"Authorization", value)])) == 1
