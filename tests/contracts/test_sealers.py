"""The conformance kit on every sealer; imports pytest and fumehood."""

import pytest

from fumehood.interfaces import Sealer
from fumehood.store.sealing import KeyedSealer
from fumehood.testing import PlainSealer
from fumehood.testing.sealer_kit import SealerKit


class TestPlainSealer(SealerKit):
    @pytest.fixture
    def sealer(self) -> Sealer:
        return PlainSealer()


class TestKeyedSealer(SealerKit):
    @pytest.fixture
    def sealer(self) -> Sealer:
        return KeyedSealer([b"k" * 32, b"o" * 32])
