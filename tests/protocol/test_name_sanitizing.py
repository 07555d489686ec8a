"""Names from untrusted places."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.protocol.name_sanitizing import MAX_NAME_LENGTH, sanitize_name


@pytest.mark.parametrize(
    "name", ["report.csv", "a b/c.txt", "Bericht für März.pdf", "图表.png", "😀.png", "[x](y)"]
)
def test_ordinary_names_stay(name: str) -> None:
    assert sanitize_name(name) == name


@pytest.mark.parametrize(
    ("name", "cleaned"),
    [
        ("a\nb.txt", "a�b.txt"),
        ("a\r\n\tb", "a���b"),
        ("\x1b[31mred", "�[31mred"),
        ("safe\u202egpj.exe", "safe�gpj.exe"),
        ("\u2066x\u2069", "�x�"),
        ("zero\u200bwidth", "zero�width"),
        ("line\u2028end", "line�end"),
        ("half\ud83d", "half�"),
    ],
)
def test_what_is_invisible_or_misleading_is_shown(name: str, cleaned: str) -> None:
    assert sanitize_name(name) == cleaned


def test_a_long_name_keeps_its_beginning_and_its_end() -> None:
    cleaned = sanitize_name("x" * 5_000 + ".png")
    assert len(cleaned) == MAX_NAME_LENGTH
    assert cleaned.startswith("xxx")
    assert cleaned.endswith("x.png")
    assert "…" in cleaned


@given(st.text())
def test_every_name_ends_up_harmless(name: str) -> None:
    cleaned = sanitize_name(name)
    assert len(cleaned) <= MAX_NAME_LENGTH
    assert sanitize_name(cleaned) == cleaned
    assert not {unicodedata.category(character) for character in cleaned} & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    cleaned.encode()
