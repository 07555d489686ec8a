"""Every sealer passes the kit."""

import pytest

from fumehood.interfaces import Sealer
from fumehood.store.aes_gcm_sealer import AesGcmSealer
from fumehood.testing import PlainSealer
from fumehood.testing.conformance_kits.sealer_kit import SealerKit


class TestPlainSealer(SealerKit):
    @pytest.fixture
    def sealer(self) -> Sealer:
        return PlainSealer()


class TestKeyedSealer(SealerKit):
    @pytest.fixture
    def sealer(self) -> Sealer:
        return AesGcmSealer([b"k" * 32, b"o" * 32])
