"""Directories for the volumes of pods."""

import os
from pathlib import Path

import pytest


@pytest.fixture
def pod_directory(tmp_path: Path) -> Path:
    """A directory whose parents other users may pass, as they may a node's volumes."""
    for path in (tmp_path, *tmp_path.parents[:3]):
        if path.stat().st_uid == os.geteuid():
            path.chmod(path.stat().st_mode | 0o011)
    return tmp_path
