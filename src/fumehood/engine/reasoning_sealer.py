"""Seals reasoning for clients that carry their conversation themselves, and opens it when they send it back.

Reasoning that a model server has encrypted itself is not touched: only that server can open it.
"""

import logging
from collections.abc import Sequence

import msgspec
from msgspec import Raw

from fumehood.interfaces import MAX_SEALED_BYTES, InvalidSeal, Sealer
from fumehood.protocol.conversation import ConversationEntry
from fumehood.protocol.model_turns import UPSTREAM_REASONING_PREFIX
from fumehood.protocol.openai.api_errors import InvalidRequest
from fumehood.protocol.openai.items import ReasoningText

logger = logging.getLogger(__name__)


class _SealedReasoning(
    msgspec.Struct, frozen=True, tag_field="type", tag="reasoning", forbid_unknown_fields=True
):
    """What is sealed. The tag keeps it apart from sealed compactions."""

    texts: list[str]


class _EncryptedItem(msgspec.Struct):
    encrypted_content: str | None = None


_encode = msgspec.json.Encoder().encode
_item_decoder = msgspec.json.Decoder(_EncryptedItem)
_sealed_decoder = msgspec.json.Decoder(_SealedReasoning)
_fields_decoder = msgspec.json.Decoder(dict[str, Raw])


class ReasoningSealer:
    """Seals and opens `encrypted_content` of reasoning items.

    sealer: None if this server has no keys; then it seals nothing.
    """

    def __init__(self, sealer: Sealer | None) -> None:
        self._sealer = sealer

    def seal(self, tenant: str, texts: Sequence[str]) -> str | None:
        """Return the texts of a reasoning item as `encrypted_content`; None if that is not possible."""
        if self._sealer is None:
            return None
        content = _encode(_SealedReasoning([*texts]))
        if len(content) > MAX_SEALED_BYTES:
            logger.warning(
                "a reasoning item of %d bytes has no encrypted_content: at most %d bytes can be sealed",
                len(content),
                MAX_SEALED_BYTES,
            )
            return None
        return self._sealer.seal(tenant, content)

    def open_entry(self, tenant: str, entry: ConversationEntry, where: str) -> ConversationEntry:
        """Return the entry with the text that is sealed in it.

        where: the item's place in the request. Raises InvalidRequest, which names it, if the content was not sealed
        for this tenant, or was changed.
        """
        try:
            sealed = read_encrypted_content(entry)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"{where} is not a valid item: {error}", param=where) from None
        if not sealed or sealed.startswith(UPSTREAM_REASONING_PREFIX):
            return entry
        param = f"{where}.encrypted_content"
        try:
            if self._sealer is None:
                raise InvalidSeal("this server has no keys")
            texts = _sealed_decoder.decode(self._sealer.unseal(tenant, sealed)).texts
        except InvalidSeal as error:
            raise InvalidRequest(
                f"The reasoning item cannot be opened: {error}. Leave the item out.",
                param=param,
                code="invalid_encrypted_content",
            ) from None
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            raise InvalidRequest(
                "The encrypted_content is not that of a reasoning item. Leave the item out.",
                param=param,
                code="invalid_encrypted_content",
            ) from None
        if not texts:
            return entry
        fields = _fields_decoder.decode(entry.raw)
        fields["content"] = Raw(_encode([ReasoningText(text=text) for text in texts]))
        return msgspec.structs.replace(entry, raw=_encode(fields))


def read_encrypted_content(entry: ConversationEntry) -> str | None:
    """Raises msgspec.ValidationError if it is not a string."""
    return _item_decoder.decode(entry.raw).encrypted_content
