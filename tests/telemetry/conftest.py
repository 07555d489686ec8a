"""An OTLP receiver for one test."""

from collections.abc import Iterator

import pytest

from tests.support.otlp_receiver import OtlpReceiver


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as running:
        yield running
