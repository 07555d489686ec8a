"""Secrecy and integrity of AES-GCM seals, and key files."""

import base64
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.interfaces import InvalidSeal
from fumehood.store.aes_gcm_sealer import (
    MAX_SEALED_CHARS,
    AesGcmSealer,
    InvalidSealingKeys,
    load_or_create_keys,
    parse_keys,
    read_keys_file,
)

KEY, OTHER = b"k" * 32, b"o" * 32
SEALER = AesGcmSealer([KEY])


def test_two_seals_of_the_same_differ_and_show_nothing() -> None:
    first, second = SEALER.seal("t", b"secret" * 9), SEALER.seal("t", b"secret" * 9)
    assert first != second
    assert b"secret" not in base64.urlsafe_b64decode(first)
    with pytest.raises(InvalidSeal, match="another tenant"):
        SEALER.unseal("other", first)


def flip_bit(content: bytes, data: st.DataObject) -> bytes:
    bit = data.draw(st.integers(0, len(content) * 8 - 1))
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@given(st.binary(max_size=40), st.data())
def test_any_bit_that_is_changed_is_noticed(content: bytes, data: st.DataObject) -> None:
    sealed = SEALER.seal("t", content)
    for changed in (
        base64.urlsafe_b64encode(flip_bit(base64.urlsafe_b64decode(sealed), data)).decode(),
        flip_bit(sealed.encode(), data).decode("latin-1"),
    ):
        with pytest.raises(InvalidSeal):
            SEALER.unseal("t", changed)


@given(st.binary(max_size=40), st.data())
def test_so_is_a_missing_end(content: bytes, data: st.DataObject) -> None:
    sealed = SEALER.seal("t", content)
    with pytest.raises(InvalidSeal):
        SEALER.unseal("t", sealed[: data.draw(st.integers(0, len(sealed) - 1))])


@given(st.text(max_size=60))
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(InvalidSeal):
        SEALER.unseal("t", text)


def test_what_is_too_long_is_not_looked_at() -> None:
    with pytest.raises(InvalidSeal, match="longer"):
        SEALER.unseal("t", "A" * (MAX_SEALED_CHARS + 1))


def test_keys_are_changed_without_losing_anything() -> None:
    old = SEALER.seal("t", b"old")
    both = AesGcmSealer([OTHER, KEY])
    new = both.seal("t", b"new")
    assert both.unseal("t", old) == b"old"
    assert AesGcmSealer([OTHER]).unseal("t", new) == b"new"
    with pytest.raises(InvalidSeal, match="unknown key"):
        AesGcmSealer([OTHER]).unseal("t", old)
    with pytest.raises(InvalidSeal, match="unknown key"):
        SEALER.unseal("t", new)


def test_keys_are_read_from_files_and_variables(tmp_path: Path) -> None:
    first, second = base64.b64encode(KEY).decode(), base64.urlsafe_b64encode(OTHER).decode()
    file = tmp_path / "keys"
    file.write_text(f"# the new one\n{first}\n\n{second}  # from spring\n")
    file.chmod(0o600)
    assert read_keys_file(file) == [KEY, OTHER]
    assert parse_keys(f"{first},{second}") == [KEY, OTHER]


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "no key"), ("# none\n", "no key"), ("c2hvcnQ=", "32 bytes"), ("not base64!", "not base64")],
)
def test_bad_keys_are_refused_without_showing_them(text: str, message: str) -> None:
    with pytest.raises(InvalidSealingKeys, match=message) as refused:
        AesGcmSealer(parse_keys(text))
    assert not text or text not in str(refused.value)


def test_a_key_file_is_created_once_with_mode_0600(tmp_path: Path) -> None:
    file = tmp_path / "below" / "gateway.db.keys"
    keys = load_or_create_keys(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert load_or_create_keys(file) == keys
    assert len(keys[0]) == 32
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    file.chmod(0o644)
    with pytest.raises(InvalidSealingKeys, match="chmod 600"):
        load_or_create_keys(file)


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o660, 0o602])
def test_a_keys_file_that_others_can_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "keys"
    file.write_text(base64.b64encode(KEY).decode())
    file.chmod(mode)
    with pytest.raises(InvalidSealingKeys, match="chmod 600"):
        read_keys_file(file)


def test_a_missing_file_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(InvalidSealingKeys, match="No such file"):
        read_keys_file(tmp_path / "nothing")
