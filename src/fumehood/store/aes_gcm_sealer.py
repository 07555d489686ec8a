"""Seals state that clients carry, with keys of the operator.

A seal is base64 of version, key id, nonce and the content encrypted with AES-256-GCM. Version, key id and tenant are
authenticated, so that a seal is invalid for another tenant or after any change.
"""

import base64
import binascii
import contextlib
import functools
import hashlib
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fumehood.http_server.secret_files import InsecureSecretFile, read_secret_file
from fumehood.interfaces import InvalidSeal
from fumehood.store.temporary_blob_files import fsync_path

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_BYTES = 32
MAX_SEALED_CHARS = 10 << 20  # as in OpenAI's API
_VERSION = b"\x01"
_KEY_ID_BYTES = 4
_NONCE_BYTES = 12
_HEADER_BYTES = len(_VERSION) + _KEY_ID_BYTES
_MIN_SEALED_BYTES = _HEADER_BYTES + _NONCE_BYTES + 16
_PURPOSE = b"fumehood compaction"
_MAX_FILE_BYTES = 1 << 16


class InvalidSealingKeys(Exception):
    """The keys cannot be used. The message says why and what to do, and contains no key."""


class AesGcmSealer:
    """A `Sealer`. The first key seals, and all keys unseal.

    To rotate keys, put the new one first, and remove the old one when its seals are not needed any more.
    """

    def __init__(self, keys: Sequence[bytes]) -> None:
        if not keys:
            raise InvalidSealingKeys("there is no key in it. Make one with: openssl rand -base64 32")
        if any(len(key) != KEY_BYTES for key in keys):
            raise InvalidSealingKeys(
                f"a key in it does not have {KEY_BYTES} bytes. Make one with: openssl rand -base64 32"
            )
        self._keys = {_key_id(key): key for key in reversed(keys)}
        if len(self._keys) < len(set(keys)):
            raise InvalidSealingKeys("two keys in it have the same id by chance. Make another one.")
        self._sealing_key_id = _key_id(keys[0])

    @functools.cached_property
    def _ciphers(self) -> "dict[bytes, AESGCM]":
        # Imported on first use: it takes 7 MB, and most gateways never seal anything.
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        return {key_id: AESGCM(key) for key_id, key in self._keys.items()}

    def seal(self, tenant: str, content: bytes) -> str:
        header = _VERSION + self._sealing_key_id
        nonce = secrets.token_bytes(_NONCE_BYTES)
        sealed = self._ciphers[self._sealing_key_id].encrypt(nonce, content, _associated_data(header, tenant))
        return base64.urlsafe_b64encode(header + nonce + sealed).decode()

    def unseal(self, tenant: str, sealed: str) -> bytes:
        if len(sealed) > MAX_SEALED_CHARS:
            raise InvalidSeal(f"it is longer than {MAX_SEALED_CHARS} characters")
        content = _decode_sealed(sealed)
        if content is None or len(content) < _MIN_SEALED_BYTES:
            raise InvalidSeal("it was not sealed by this server, or is incomplete")
        if not content.startswith(_VERSION):
            raise InvalidSeal("it was sealed by another release")
        header, nonce = content[:_HEADER_BYTES], content[_HEADER_BYTES : _HEADER_BYTES + _NONCE_BYTES]
        cipher = self._ciphers.get(header[len(_VERSION) :])
        if cipher is None:
            raise InvalidSeal("it was sealed with an unknown key, or was changed")
        from cryptography.exceptions import InvalidTag

        try:
            return cipher.decrypt(
                nonce, content[_HEADER_BYTES + _NONCE_BYTES :], _associated_data(header, tenant)
            )
        except InvalidTag:
            raise InvalidSeal("it was changed, or belongs to another tenant") from None


def _key_id(key: bytes) -> bytes:
    """Return an id of a key that reveals nothing of it."""
    return hashlib.sha256(_PURPOSE + b" key name" + key).digest()[:_KEY_ID_BYTES]


def _associated_data(header: bytes, tenant: str) -> bytes:
    return b"\0".join([_PURPOSE, header, tenant.encode(errors="surrogatepass")])


def _decode_sealed(sealed: str) -> bytes | None:
    """Return None unless it is canonical base64; other forms would hide changes."""
    try:
        text = sealed.encode("ascii")
        content = base64.urlsafe_b64decode(text)
    except (UnicodeEncodeError, binascii.Error):
        return None
    return content if base64.urlsafe_b64encode(content) == text else None


# --- keys ---------------------------------------------------------------------------------------------


def parse_keys(text: str) -> list[bytes]:
    """Parse keys in base64, separated by spaces, commas or lines; `#` begins a comment. Raises InvalidSealingKeys."""
    words = [word for line in text.splitlines() for word in line.partition("#")[0].replace(",", " ").split()]
    keys: list[bytes] = []
    for number, word in enumerate(words, 1):
        try:
            keys.append(base64.b64decode(word.replace("-", "+").replace("_", "/"), validate=True))
        except (binascii.Error, ValueError):
            raise InvalidSealingKeys(f"key {number} in it is not base64") from None
    return keys


def read_keys_file(path: Path) -> list[bytes]:
    """Read keys from a file that only its owner may read. Raises InvalidSealingKeys."""
    try:
        return parse_keys(read_secret_file(path, _MAX_FILE_BYTES).decode("ascii"))
    except InsecureSecretFile as error:
        raise InvalidSealingKeys(str(error)) from None
    except OSError as error:
        raise InvalidSealingKeys(f"it cannot be read: {error.strerror}") from None
    except UnicodeError:
        raise InvalidSealingKeys("it does not contain keys in base64") from None


def load_or_create_keys(path: Path) -> list[bytes]:
    """Read keys from a file, and create it with a new key if it does not exist. Raises InvalidSealingKeys."""
    try:
        if not path.exists():
            _create_keys_file(path)
        if path.stat().st_mode & 0o077:
            raise InvalidSealingKeys(f"others may read it. Run: chmod 600 {path}")
    except OSError as error:
        raise InvalidSealingKeys(f"it cannot be created or read: {error.strerror}") from None
    return read_keys_file(path)


def _create_keys_file(path: Path) -> None:
    """Create the file atomically; never replace one that another process creates at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(base64.b64encode(secrets.token_bytes(KEY_BYTES)) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
        fsync_path(str(path.parent))
    finally:
        draft.unlink()
