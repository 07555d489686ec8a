"""A receiver for one test; imports pytest and the support."""

from collections.abc import Iterator

import pytest

from tests.support.otlp import Receiver


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as running:
        yield running
