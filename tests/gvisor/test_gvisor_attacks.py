"""Attacks from the code of a pod under gVisor (`make test-gvisor`)."""

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attacks.conftest import PRELUDE
from tests.support.gvisor_pods import GvisorPod, find_obstacle
from tests.support.pod_attacks import PodAttackKit, PodBox
from tests.support.pods import PodOptions

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_obstacle() is not None, reason=find_obstacle() or ""),
]


class _Pods:
    """Gives the sandbox of one pod to all attacks until one of them ends it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._pod: GvisorPod | None = None
        self._box: PodBox | None = None

    def get_box(self) -> PodBox:
        if self._box is not None and self._box.run(PRELUDE).end.status == "ok":
            return self._box
        self.close()
        self._pod = GvisorPod(self._directory, PodOptions())
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


class TestInGvisor(PodAttackKit):
    @pytest.fixture
    def box(self, pods: _Pods) -> PodBox:
        return pods.get_box()
