"""Reserved file descriptors, and how often that is logged."""

import logging

import pytest

from fumehood.http_server.descriptor_limit import FileDescriptorLimit


@pytest.mark.parametrize(
    ("limit", "last"), [(-1, 1 << 20), (64, 55), (1024, 959), (1 << 20, (1 << 20) - 65), (44, 35)]
)
def test_some_are_kept_back(limit: int, last: int) -> None:
    descriptors = FileDescriptorLimit(lambda: limit)
    assert not descriptors.rejects(last)
    assert descriptors.rejects(last + 1) == (limit > 0)


def test_it_is_told_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    descriptors = FileDescriptorLimit(lambda: 64, lambda: now[0])
    with caplog.at_level(logging.WARNING):
        for now[0] in (0.0, 1.0, 59.0, 60.0, 61.0):
            assert descriptors.rejects(60)
    assert [record.args for record in caplog.records] == [(64, 1), (64, 3)]
