"""Discovery of the interpreter, its packages and uid ranges."""

import importlib.metadata
import os
import pwd
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest

from fumehood.sandbox_server.host import python_runtime, uid_ranges
from fumehood.sandbox_server.host.python_runtime import PythonRuntimeUnavailable, discover_runtime
from fumehood.sandbox_server.host.uid_ranges import UidRange, reserve_subordinate_uids, reserve_uid_range
from fumehood.sandbox_server.isolation_errors import IsolationUnavailable


def test_the_runtime_is_this_interpreter_with_the_sandbox_packages_only() -> None:
    found = discover_runtime()
    assert found.executable == Path(os.path.realpath(sys.executable))
    (packages,) = found.packages
    assert packages.path == Path(os.path.realpath(sysconfig.get_path("platlib")))
    assert {"numpy", "pandas", "matplotlib", "dateutil", "PIL", "pylab.py"} <= packages.visible_names
    assert not {"pytest", "fumehood", "hypothesis", "typer", "ruff"} & packages.visible_names
    assert not [name for name in packages.visible_names if name.endswith(".pth")]


def test_without_packages_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_runtime, "find_sandbox_distributions", dict)
    assert discover_runtime().packages == ()


def test_packages_may_lie_in_several_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with `pip install --user`, or with a distribution's own packages behind a virtual environment."""
    for directory, names in {"user": ("one",), "system": ("two", "three")}.items():
        for name in names:
            about = tmp_path / directory / f"{name}-1.0.dist-info"
            about.mkdir(parents=True)
            (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            (about / "RECORD").write_text(
                f"{name}.py,,\n{about.name}/METADATA,,\n../../bin/{name},,\n{name}.pth,,\n"
            )
    monkeypatch.setattr(sys, "path", [str(tmp_path / "user"), str(tmp_path / "system"), *sys.path])
    found = {name: importlib.metadata.distribution(name) for name in ("three", "two", "one")}
    monkeypatch.setattr(python_runtime, "find_sandbox_distributions", lambda: found)
    first, second = discover_runtime().packages
    assert (first.path, first.visible_names) == (tmp_path / "user", {"one.py", "one-1.0.dist-info"})
    assert second.path == tmp_path / "system"
    assert second.visible_names == {"two.py", "two-1.0.dist-info", "three.py", "three-1.0.dist-info"}


def test_an_interpreter_outside_its_prefix_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "base_prefix", "/nowhere")
    with pytest.raises(PythonRuntimeUnavailable, match="does not lie in its own prefix"):
        discover_runtime()


def test_blocks_of_users_do_not_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uid_ranges, "_MAX_BLOCKS", 2)
    tmp_path.chmod(0o700)
    one, other = reserve_uid_range(5_000, tmp_path), reserve_uid_range(5_000, tmp_path)
    assert set(range(one.first_uid, one.first_uid + one.count)).isdisjoint(
        range(other.first_uid, other.first_uid + other.count)
    )
    with pytest.raises(IsolationUnavailable, match="uid blocks are in use"):
        reserve_uid_range(5_000, tmp_path)
    one.close()
    again = reserve_uid_range(5_000, tmp_path)
    assert again.first_uid == one.first_uid
    again.close()
    other.close()


def test_maps_of_users() -> None:
    assert UidRange(100, 50).id_map_rows("uid") == [(0, 100, 50)]
    mine = UidRange(100, 50, own_ids=(1000, 1001))
    assert (mine.id_map_rows("uid"), mine.id_map_rows("gid")) == (
        [(0, 1000, 1), (1, 100, 49)],
        [(0, 1001, 1), (1, 100, 49)],
    )


def test_subordinate_users_need_program_and_matching_grants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", str.upper)  # any name is found
    me = pwd.struct_passwd(("me", "", os.getuid(), os.getgid(), "", "", ""))
    monkeypatch.setattr(pwd, "getpwuid", {os.getuid(): me}.__getitem__)
    assert reserve_subordinate_uids(tmp_path) is None
    line = f"{os.getuid()}:200000:65536\n"
    (tmp_path / "subuid").write_text("other:1:1\n" + line)
    (tmp_path / "subgid").write_text(f"{os.getuid()}:300000:65536\n")
    assert reserve_subordinate_uids(tmp_path) is None
    (tmp_path / "subgid").write_text(line)
    found, other = (
        reserve_subordinate_uids(tmp_path, tmp_path / "locks"),
        reserve_subordinate_uids(tmp_path, tmp_path / "locks"),
    )
    assert found is not None
    assert other is not None
    assert (found.first_uid, found.count) == (200_000, 4096)
    assert other.first_uid == 204_096, "another supervisor of the same user"
    found.close()
    other.close()
    monkeypatch.setattr(shutil, "which", dict[str, str]().get)  # none is
    assert reserve_subordinate_uids(tmp_path) is None


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ("0 0 4294967295", 2_000_000_000),
        ("0 100000 65536", 32_768),
        ("0 1000 1\n1 100000 20000", 10_001),
    ],
)
def test_a_base_that_is_not_mapped_is_replaced(tmp_path: Path, rows: str, expected: int) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/uid_map").write_text(rows + "\n")
    found = reserve_uid_range(2_000_000_000, tmp_path / "locks", tmp_path)
    found.close()
    assert found.first_uid == expected


def test_too_few_users_are_refused(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/uid_map").write_text("0 1000 1\n")
    with pytest.raises(IsolationUnavailable, match="knows 1 users"):
        reserve_uid_range(2_000_000_000, tmp_path / "locks", tmp_path)


def test_locks_that_others_could_hold_are_refused(tmp_path: Path) -> None:
    (tmp_path / "locks").mkdir()
    (tmp_path / "locks").chmod(0o777)
    with pytest.raises(IsolationUnavailable, match="this user alone"):
        reserve_uid_range(2_000_000_000, tmp_path / "locks")
