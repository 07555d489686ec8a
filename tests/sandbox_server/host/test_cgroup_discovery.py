"""Choice of the parent cgroup on v2, on a model of the kernel's rules; test_cgroups.py uses real cgroups."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fumehood.sandbox_server.host import cgroup_discovery, cgroups
from fumehood.sandbox_server.host.cgroups import CgroupLimits, CgroupTree, CgroupUnavailable, open_tree


class FakeV2:
    """A directory that keeps the rules of cgroup v2 as far as placing a tree depends on them."""

    def __init__(self, base: Path, controllers: str = "cpu memory pids", own: str = "/") -> None:
        self.root, self.proc = base / "cg", base / "proc"
        self._mkdir, self._rmdir = os.mkdir, os.rmdir
        for path in (base, self.root, self.proc, self.proc / "self"):
            path.mkdir(exist_ok=True)
        self._populate(self.root, controllers)
        mountinfo = f"41 31 0:38 / {self.root} rw - cgroup2 cgroup2 rw\n25 1 0:2 / /proc rw - proc proc rw\n"
        (self.proc / "self/mountinfo").write_text(mountinfo)
        (self.proc / "self/cgroup").write_text(f"0::{own}\n")
        (self.proc / "self/stat").write_text("1 (a ) b) S " + " ".join(str(n) for n in range(4, 40)))

    def cgroup(self, path: str, members: list[int]) -> Path:
        cgroup = self.root / path
        self._mkdir(cgroup)
        self._populate(cgroup, (cgroup.parent / "cgroup.subtree_control").read_text())
        (cgroup / "cgroup.events").touch()
        (cgroup / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in members))
        return cgroup

    def _populate(self, path: Path, controllers: str) -> None:
        files = ["cgroup.procs", "cgroup.subtree_control", "cgroup.kill"]
        files += ["memory.max", "memory.swap.max"] if "memory" in controllers else []
        files += ["pids.max"] if "pids" in controllers else []
        files += ["cpu.max", "cpu.weight"] if "cpu" in controllers else []
        for name in files:
            (path / name).touch()
        (path / "cgroup.controllers").write_text(controllers)

    def _resolve(self, path: str | Path, dir_fd: int | None) -> Path:
        return Path(path) if dir_fd is None else Path(os.readlink(f"/proc/self/fd/{dir_fd}")) / path

    def mkdir(self, path: str | Path, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        target = self._resolve(path, dir_fd)
        if target.is_relative_to(self.root):
            self.cgroup(str(target.relative_to(self.root)), [])
        else:
            self._mkdir(path, mode, dir_fd=dir_fd)

    def rmdir(self, path: str | Path, *, dir_fd: int | None = None) -> None:
        target = self._resolve(path, dir_fd)
        if (target / "cgroup.procs").read_text() or any(child.is_dir() for child in target.iterdir()):
            raise OSError(errno.EBUSY, "busy", str(target))
        for child in target.iterdir():
            child.unlink()
        self._rmdir(target)

    def write(self, path: str, value: str | int, dir_fd: int | None = None) -> None:
        target = self._resolve(path, dir_fd)
        if target.name == "cgroup.subtree_control":
            self._control(target, str(value))
        elif target.name == "cgroup.procs":
            for procs in self.root.rglob("cgroup.procs"):
                procs.write_text(
                    "".join(f"{pid}\n" for pid in procs.read_text().split() if pid != str(value))
                )
            target.write_text(target.read_text() + f"{value}\n")
        else:
            original_write(str(target), value)

    def _control(self, target: Path, value: str) -> None:
        cgroup = target.parent
        if cgroup != self.root and (cgroup / "cgroup.procs").read_text():
            raise OSError(errno.EBUSY, "internal processes", str(cgroup))
        enabled = set(target.read_text().split())
        for word in value.split():
            if word[1:] not in (cgroup / "cgroup.controllers").read_text():
                raise FileNotFoundError(errno.ENOENT, "no such controller", str(cgroup))
            (enabled.add if word[0] == "+" else enabled.discard)(word[1:])
        target.write_text(" ".join(sorted(enabled)))
        for child in cgroup.iterdir():
            if child.is_dir():
                self._populate(child, " ".join(sorted(enabled)))


original_write = cgroup_discovery.write_control_file
type MakeFake = Callable[..., FakeV2]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeFake:
    def make(controllers: str = "cpu memory pids", own: str = "/") -> FakeV2:
        kernel = FakeV2(tmp_path, controllers, own)
        monkeypatch.setattr(os, "mkdir", kernel.mkdir)
        monkeypatch.setattr(os, "rmdir", kernel.rmdir)
        for module in (cgroups, cgroup_discovery):
            monkeypatch.setattr(module, "write_control_file", kernel.write)
        return kernel

    return make


def open_fake(kernel: FakeV2) -> CgroupTree:
    return open_tree(memory_total=1000, cpus=1.5, pids_total=50, root=kernel.root, proc=kernel.proc)


def test_fake_v2_alone_in_its_cgroup(fake: MakeFake) -> None:
    kernel = fake(own="/svc")
    (kernel.root / "cgroup.subtree_control").write_text("cpu memory pids")
    own = kernel.cgroup("svc", [os.getpid()])
    tree = open_fake(kernel)
    (path,) = tree.paths
    assert (tree.version, tree.has_cpu, path.parent) == ("v2", True, own)
    assert path.name.startswith(f"fumehood-{os.getpid()}-22-0-")
    assert (own / "supervisor/cgroup.procs").read_text() == f"{os.getpid()}\n"
    found = {
        name: (path / name).read_text() for name in ("memory.max", "memory.swap.max", "pids.max", "cpu.max")
    }
    assert found == {
        "memory.max": "1000",
        "memory.swap.max": "0",
        "pids.max": "50",
        "cpu.max": "150000 100000",
    }
    tree.create("sb", CgroupLimits(memory=100, pids=7, cpus=0.5))
    found = {name: (path / "sb" / name).read_text() for name in ("memory.max", "pids.max", "cpu.max")}
    assert found == {"memory.max": "100", "pids.max": "7", "cpu.max": "50000 100000"}
    tree.create("zygote").set_weight(10_000)
    assert (path / "zygote/cpu.weight").read_text() == "10000"
    assert tree.close()
    assert [child for child in own.iterdir() if child.is_dir()] == []
    assert (own / "cgroup.subtree_control").read_text() == ""
    assert (own / "cgroup.procs").read_text() == f"{os.getpid()}\n"


@pytest.mark.parametrize(
    ("stat", "held"),
    [
        ("anon 100\nfile 50\nkernel 30\nshmem 20\nslab_reclaimable 25\nslab 28\n", 125),
        ("anon 100\nfile 50\nshmem 20\nslab_reclaimable 25\nslab 28\n", 120),
    ],
    ids=["now", "before Linux 5.18"],
)
def test_fake_v2_what_the_kernel_can_take_back_is_not_held(fake: MakeFake, stat: str, held: int) -> None:
    tree = open_fake(fake())
    (tree.paths[0] / "memory.stat").write_text(stat)
    assert tree.unreclaimable_memory() == held
    tree.close()


def test_fake_v2_root_in_a_login_session_uses_the_root(fake: MakeFake) -> None:
    kernel = fake(own="/session")
    (kernel.root / "cgroup.subtree_control").write_text("memory pids")
    session = kernel.cgroup("session", [1, os.getpid()])
    tree = open_fake(kernel)
    assert [path.parent for path in tree.paths] == [kernel.root]
    assert (session / "cgroup.procs").read_text() == f"1\n{os.getpid()}\n"
    assert tree.has_cpu
    assert tree.close()


def test_fake_v2_launchers_in_a_delegated_cgroup_move_along(
    fake: MakeFake, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = fake(own="/svc")
    (kernel.root / "cgroup.subtree_control").write_text("memory pids")
    own = kernel.cgroup("svc", [77, os.getpid()])
    monkeypatch.setattr(cgroup_discovery, "_is_delegated", own.__eq__)
    tree = open_fake(kernel)
    assert [path.parent for path in tree.paths] == [own]
    assert not tree.has_cpu
    assert (own / "supervisor/cgroup.procs").read_text() == f"77\n{os.getpid()}\n"
    tree.create("sb", CgroupLimits(memory=100, pids=7, cpus=0.5))
    assert tree.close()


def test_fake_v2_in_a_container_everything_moves_into_the_leaf(fake: MakeFake) -> None:
    kernel = fake()
    (kernel.root / "cgroup.events").touch()
    (kernel.root / "cgroup.procs").write_text(f"1\n{os.getpid()}\n")
    tree = open_fake(kernel)
    assert (kernel.root / "supervisor/cgroup.procs").read_text() == f"1\n{os.getpid()}\n"
    assert tree.close()


def test_fake_v2_members_of_another_pid_namespace_cannot_be_moved(fake: MakeFake) -> None:
    kernel = fake()
    (kernel.root / "cgroup.events").touch()
    (kernel.root / "cgroup.procs").write_text(f"0\n{os.getpid()}\n")
    with pytest.raises(CgroupUnavailable, match="another pid namespace") as caught:
        open_fake(kernel)
    assert "a cgroup of its own" in caught.value.advice


def test_fake_v2_not_delegated_says_what_to_do(fake: MakeFake, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = fake(own="/session")
    kernel.cgroup("session", [os.getpid()])

    def never(*_: object, **__: object) -> bool:
        return False

    monkeypatch.setattr(os, "access", never)
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    with pytest.raises(CgroupUnavailable, match="not delegated") as caught:
        open_fake(kernel)
    assert "systemd-run --user --scope -p Delegate=yes" in caught.value.advice
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(CgroupUnavailable, match="Read-only") as caught:
        open_fake(kernel)
    assert "writable in this container" in caught.value.advice


def test_without_a_memory_controller_there_is_no_tree(fake: MakeFake) -> None:
    kernel = fake(controllers="cpu pids")
    with pytest.raises(CgroupUnavailable, match="no cgroup controller for memory and pids") as caught:
        open_fake(kernel)
    assert "cgroup_enable=memory" in caught.value.advice


@pytest.mark.parametrize(
    ("mounted", "cgroup", "expected"),
    [
        ("/", "/", "."),
        ("/", "/a/b", "a/b"),
        ("/a", "/a/b", "b"),
        ("/x", "/a", "."),
        ("/", "/../y", "."),
        ("/", "/gone", "."),
    ],
)
def test_our_cgroup_is_found_below_its_mount(
    tmp_path: Path, mounted: str, cgroup: str, expected: str
) -> None:
    for path in ("a/b", "b"):
        (tmp_path / path).mkdir(parents=True)
    assert cgroup_discovery.resolve_own_cgroup(tmp_path, mounted, cgroup) == tmp_path / expected
