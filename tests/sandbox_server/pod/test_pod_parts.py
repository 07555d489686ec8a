"""The parts of a pod's server and containers: its tier, its mark, its limits, merged layers."""

from pathlib import Path

import pytest

from fumehood.protocol.sandbox.sandbox_errors import SandboxServerAtCapacity
from fumehood.protocol.sandbox.sandbox_messages import MemoryTier
from fumehood.sandbox_server.inside.processes import pod_container
from fumehood.sandbox_server.isolation_errors import IsolationUnavailable
from fumehood.sandbox_server.pod.layer_publisher import publish_layer
from fumehood.sandbox_server.pod.pod_use import PodUse
from fumehood.sandbox_server.settings import SandboxServerSettings


@pytest.mark.parametrize(
    ("chosen", "limit", "tier"),
    [
        (None, 1 << 30, "1g"),
        (None, 5 << 30, "4g"),
        (None, 64 << 30, "64g"),
        ("4g", 4 << 30, "4g"),
        ("16g", None, "16g"),
        ("1g", 4 << 30, "1g"),
    ],
)
def test_the_tier_is_what_was_set_or_what_fits(
    chosen: MemoryTier | None, limit: int | None, tier: str
) -> None:
    pod = PodUse(SandboxServerSettings(mode="pod", pod_memory=chosen))
    pod.choose_memory(limit)
    assert pod.memory == tier


@pytest.mark.parametrize(
    ("chosen", "limit", "reason"),
    [
        (None, None, "is not known: the limit of the code's container is unknown"),
        (None, 1 << 29, "536870912 bytes"),
        ("4g", 1 << 30, "pod_memory is 4g, but the container of the code may use only 1073741824"),
    ],
)
def test_a_tier_that_is_unknown_or_too_large_is_refused(
    chosen: MemoryTier | None, limit: int | None, reason: str
) -> None:
    pod = PodUse(SandboxServerSettings(mode="pod", pod_memory=chosen))
    with pytest.raises(IsolationUnavailable, match=reason):
        pod.choose_memory(limit)


def test_without_enforced_limits_it_says_so(caplog: pytest.LogCaptureFixture) -> None:
    pod = PodUse(SandboxServerSettings(mode="pod", limits="best-effort"))
    pod.choose_memory(None)
    assert "nothing limits the memory of the code" in caplog.text


def test_the_mark_outlives_the_server(tmp_path: Path) -> None:
    settings = SandboxServerSettings(mode="pod", state_dir=tmp_path)
    pod = PodUse(settings)
    pod.open()
    pod.reserve()
    with pytest.raises(SandboxServerAtCapacity, match="one sandbox, once"):
        pod.reserve()
    with pytest.raises(IsolationUnavailable, match="has had its sandbox"):
        PodUse(settings).open()


def test_limits_of_either_version_of_cgroups(tmp_path: Path) -> None:
    assert pod_container.read_memory_limit(tmp_path) is None
    assert pod_container.count_oom_kills(tmp_path) == 0
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    (tmp_path / "memory/memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    assert (pod_container.read_memory_limit(tmp_path), pod_container.count_oom_kills(tmp_path)) == (None, 3)
    (tmp_path / "memory/memory.limit_in_bytes").write_text("1073741824\n")
    assert pod_container.read_memory_limit(tmp_path) == 1 << 30
    (tmp_path / "memory.max").write_text("4294967296\n")
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\nmax 9\noom 2\noom_kill 1\n")
    assert (pod_container.read_memory_limit(tmp_path), pod_container.count_oom_kills(tmp_path)) == (
        4 << 30,
        1,
    )


def test_layers_are_merged_and_the_later_one_wins(tmp_path: Path) -> None:
    first, second, target = (tmp_path / name for name in ("first", "second", "target"))
    for path, text in (
        (first / "pkg/a.py", "first"),
        (first / "pkg/sub/b.py", "first"),
        (first / "module", "a file"),
        (second / "pkg/a.py", "second"),
        (second / "module/__init__.py", "a directory"),
        (second / "pkg/sub", "now a file"),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    target.mkdir()
    publish_layer(first, target)
    publish_layer(second, target)
    found = {str(path.relative_to(target)): path.read_text() for path in target.rglob("*") if path.is_file()}
    assert found == {"pkg/a.py": "second", "pkg/sub": "now a file", "module/__init__.py": "a directory"}
    assert (first / "pkg/a.py").read_text() == "first"
