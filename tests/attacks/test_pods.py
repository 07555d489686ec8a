"""Attacks from the code of a pod whose containers are processes; `make test-gvisor` makes them under gVisor."""

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attacks.conftest import PRELUDE
from tests.support.pod_attacks import PodAttackKit, PodBox
from tests.support.pods import Pod, make_pod


class _Pods:
    """Gives the sandbox of one pod to all attacks until one of them ends it.

    Its code has a network namespace of its own, and so the filter that allows more.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._pod: Pod | None = None
        self._box: PodBox | None = None

    def get_box(self) -> PodBox:
        if self._box is not None and self._box.run(PRELUDE).end.status == "ok":
            return self._box
        self.close()
        self._pod = make_pod(self._directory, allow_unshare=True)
        asyncio.run(self._pod.start())
        self._box = PodBox(self._pod.url)
        assert self._box.run(PRELUDE).end.status == "ok"
        return self._box

    def close(self) -> None:
        if self._pod is not None:
            asyncio.run(self._pod.stop())


@pytest.fixture(scope="class")
def pods() -> Iterator[_Pods]:
    with tempfile.TemporaryDirectory(prefix="fh-attacked", dir="/tmp") as name:
        Path(name).chmod(0o755)
        pods = _Pods(Path(name))
        yield pods
        pods.close()


class TestInPods(PodAttackKit):
    @pytest.fixture
    def box(self, pods: _Pods) -> PodBox:
        return pods.get_box()
