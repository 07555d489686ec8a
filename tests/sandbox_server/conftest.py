"""Shared fixtures of the sandbox server's tests."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.unpack_target import UnpackTarget


@pytest.fixture
def unpack_target(tmp_path: Path) -> Iterator[UnpackTarget]:
    (tmp_path / "data").mkdir()
    fd = os.open(tmp_path / "data", os.O_RDONLY | os.O_DIRECTORY)
    yield UnpackTarget(tmp_path / "data", fd)
    os.close(fd)
    assert os.listdir(tmp_path) == ["data"], "something was written beside the directory"
