"""Conformance tests of `Sealer`.

`SealerKit` needs a fixture `sealer`. Secrecy and integrity depend on the implementation, and are tested there.
"""

import pytest

from fumehood.interfaces import MAX_SEALED_BYTES, InvalidSeal, Sealer


class SealerKit:
    @pytest.mark.parametrize("content", [b"", b"state", bytes(range(256)), b"x" * MAX_SEALED_BYTES])
    @pytest.mark.parametrize("tenant", ["", "tenant", "Ä\n"])
    def test_what_is_sealed_opens(self, sealer: Sealer, tenant: str, content: bytes) -> None:
        assert sealer.unseal(tenant, sealer.seal(tenant, content)) == content

    def test_a_seal_is_text_that_json_can_carry(self, sealer: Sealer) -> None:
        sealed = sealer.seal("tenant", bytes(range(256)))
        assert sealed.isascii()
        assert sealed.isprintable()

    @pytest.mark.parametrize("other", ["", "other", "tenant ", "tenant\0", "TENANT"])
    def test_another_tenant_cannot_open_it(self, sealer: Sealer, other: str) -> None:
        with pytest.raises(InvalidSeal):
            sealer.unseal(other, sealer.seal("tenant", b"state"))

    @pytest.mark.parametrize("text", ["", "?", "AAAA", "=" * 40, "Ä" * 40, "\ud800", "A" * 10_000])
    def test_invalid_seals_are_refused(self, sealer: Sealer, text: str) -> None:
        with pytest.raises(InvalidSeal):
            sealer.unseal("tenant", text)
