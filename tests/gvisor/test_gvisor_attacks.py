"""Attacks from the code of a pod under gVisor (`make test-gvisor`)."""

import asyncio
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attacks import test_syscalls
from tests.attacks.conftest import PRELUDE
from tests.support.gvisor_pods import GvisorPod, choose_platform, find_obstacle
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
    # These look into what gVisor does not have: /proc/self/ns/cgroup, pidfds, ambient capabilities, lines of a status
    # that name them, empty packets, RLIMIT_SIGPENDING.
    test_setns = None
    test_another_process_is_not_traced = None
    test_no_capabilities = None
    test_children_have_the_same_walls = None
    test_an_empty_packet = None
    test_timers_and_pending_signals = None

    @pytest.mark.parametrize("attack", test_syscalls.FOREIGN.values(), ids=test_syscalls.FOREIGN)
    def test_foreign_tables(self, box: PodBox, attack: str) -> None:
        if attack.startswith("i386") and choose_platform() == "ptrace":
            pytest.skip("the platform ptrace takes `int 0x80` for a 64-bit call, which the filter then sees")
        test_syscalls.test_foreign_tables(box, attack)

    def test_no_process_has_a_capability_or_is_traced(self, box: PodBox) -> None:
        code = """
import subprocess, sys
child = "import os; print([line.split()[1] for line in open('/proc/self/status') if line.startswith('Cap')])"
for where in (sys.executable,):
    print(subprocess.run([where, "-c", child], capture_output=True, text=True).stdout.strip())
exec(child)
report([call(101, 16, os.getppid(), 0, 0), call(101, 0, 0, 0, 0), attempt(os.setns, os.open("/proc/self/ns/net", 0))])
"""
        *capabilities, refusals = box.run(code).stdout.splitlines()
        assert {digit for line in capabilities for digit in line if digit.isdigit()} == {"0"}
        assert json.loads(refusals) == ["EPERM"] * 3

    @pytest.fixture
    def box(self, pods: _Pods) -> PodBox:
        return pods.get_box()
