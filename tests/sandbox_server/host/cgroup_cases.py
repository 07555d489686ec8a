"""Real cgroups, of the version that this host has.

Every process and every cgroup touched here is made here: trees of other supervisors are left alone.
"""

import errno
import fcntl
import json
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fumehood.sandbox_server.host import cgroup_discovery, cgroups
from fumehood.sandbox_server.host.cgroups import (
    Cgroup,
    CgroupLimits,
    CgroupTree,
    CgroupUnavailable,
    open_tree,
    remove_stale_trees,
)

MIB = 1 << 20
SMALL = CgroupLimits(memory=64 * MIB, pids=20)
# For bombs: each copy of the tests' own process takes memory, above all for its page tables.
ROOMY = 1024 * MIB
OTHER_UID = 54321


# --- Processes of the tests -----------------------------------------------------------------------


@dataclass
class Children:
    """Forks children that run one function each; `end` leaves none of them."""

    pids: set[int] = field(default_factory=set[int])

    def start(self, body: Callable[[], object]) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                body()
                os._exit(0)
            except MemoryError:
                os._exit(3)
            except BaseException:
                import traceback

                traceback.print_exc()
                os._exit(1)
        self.pids.add(pid)
        return pid

    def wait(self, pid: int) -> int:
        self.pids.discard(pid)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def ask(self, body: Callable[[], object]) -> Any:
        """Runs `body` in a child and returns what it returned, by way of JSON."""
        reader, writer = os.pipe()
        pid = self.start(lambda: _send(writer, json.dumps(body())))
        os.close(writer)
        answer = _receive(reader)
        assert self.wait(pid) == 0
        return json.loads(answer)

    def end(self) -> None:
        for pid in tuple(self.pids):
            os.kill(pid, signal.SIGKILL)
            self.wait(pid)


def _send(writer: int, text: str) -> None:
    os.write(writer, text.encode())
    os.close(writer)


def _receive(reader: int) -> str:
    # One read: forked bombs inherit the other end, so the end of the file may never come.
    try:
        return os.read(reader, 4096).decode()
    finally:
        os.close(reader)


def join(fds: list[int]) -> None:
    for fd in fds:
        os.write(fd, b"0")
        os.close(fd)


def close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def switch_uid(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def allocate(amount: int) -> bytearray:
    return bytearray(b"x" * MIB) * (amount // MIB)


@pytest.fixture
def children() -> Iterator[Children]:
    started = Children()
    yield started
    started.end()


@pytest.fixture
def tree() -> Iterator[CgroupTree]:
    try:
        opened = open_tree(memory_total=None, cpus=None, pids_total=None)
    except CgroupUnavailable as unavailable:
        pytest.skip(f"no cgroups to work with: {unavailable}")
    yield opened
    assert opened.close()
    assert not any(path.exists() for path in opened.paths)


def start_in(cgroup: Cgroup, children: Children, body: Callable[[], object]) -> int:
    fds = cgroup.open_join_fds()
    pid = children.start(lambda: (join(fds), body())[1])
    close_all(fds)
    return pid


def start_paused(cgroup: Cgroup, children: Children, before: Callable[[], object] = lambda: None) -> int:
    """A child in the cgroup that has run `before` and waits to be killed; `before`'s result stays alive."""
    reader, writer = os.pipe()

    def body() -> None:
        kept = before()
        _send(writer, "ready")
        signal.pause()
        del kept

    pid = start_in(cgroup, children, body)
    os.close(writer)
    _receive(reader)
    return pid


# --- Limits ---------------------------------------------------------------------------------------


def test_memory_beyond_the_limit_is_an_oom_kill(tree: CgroupTree, children: Children) -> None:
    cgroup = tree.create("sb", SMALL)
    pid = start_in(cgroup, children, lambda: allocate(32 * MIB))
    assert children.wait(pid) == 0
    assert cgroup.oom_kills() == 0
    pid = start_in(cgroup, children, lambda: allocate(256 * MIB))
    assert children.wait(pid) == -signal.SIGKILL
    assert cgroup.oom_kills() == 1


def test_a_raised_limit_gives_room(tree: CgroupTree, children: Children) -> None:
    cgroup = tree.create("sb", SMALL)
    cgroup.set_memory(200 * MIB)
    pid = start_in(cgroup, children, lambda: allocate(128 * MIB))
    assert children.wait(pid) == 0
    cgroup.set_memory(32 * MIB)
    pid = start_in(cgroup, children, lambda: allocate(128 * MIB))
    assert children.wait(pid) == -signal.SIGKILL


def test_limits_larger_than_the_machine_are_set(tree: CgroupTree) -> None:
    cgroup = tree.create("sb", SMALL)
    for limit in (1 << 46, 1 << 45, 1 << 30, 1 << 46):
        cgroup.set_memory(limit)


def count_tasks(cgroup: Cgroup) -> int:
    return int(cgroup._read_value("pids", "pids.current"))  # pyright: ignore[reportPrivateUsage]


def test_a_fork_bomb_stops_at_pids(tree: CgroupTree, children: Children) -> None:
    cgroup = tree.create("sb", CgroupLimits(memory=ROOMY, pids=SMALL.pids))

    def bomb() -> None:
        with suppress(BlockingIOError):
            while os.fork():
                pass
            signal.pause()

    start_paused(cgroup, children, bomb)
    assert count_tasks(cgroup) == SMALL.pids
    assert len(cgroup.processes()) == SMALL.pids
    assert cgroup.kill()
    assert cgroup.processes() == []


def test_an_endless_fork_bomb_is_killed(tree: CgroupTree, children: Children) -> None:
    cgroup = tree.create("sb", CgroupLimits(memory=ROOMY, pids=100))

    def bomb() -> None:
        while True:
            with suppress(BlockingIOError):
                if os.fork() and os.fork():
                    os._exit(0)

    start_in(cgroup, children, bomb)
    while count_tasks(cgroup) < 50:
        pass
    assert cgroup.remove()


def test_the_aggregate_memory_bound_bites_across_cgroups(children: Children, tree: CgroupTree) -> None:
    tree.set_limits(memory=96 * MIB, cpus=None, pids=None)
    first, second = (tree.create(name, CgroupLimits(memory=90 * MIB, pids=5)) for name in ("a", "b"))
    start_paused(first, children, lambda: allocate(60 * MIB))
    pid = start_in(second, children, lambda: allocate(60 * MIB))
    children.wait(pid)
    assert first.oom_kills() + second.oom_kills() == 1


def test_the_aggregate_pids_bound_bites_across_cgroups(children: Children, tree: CgroupTree) -> None:
    tree.set_limits(memory=None, cpus=None, pids=10)
    limits = CgroupLimits(memory=ROOMY, pids=SMALL.pids)
    cgroup = tree.create("a", limits)
    for _ in range(6):
        start_paused(cgroup, children)
    other = tree.create("b", limits)

    def count() -> int:
        join(fds)
        forked = 0
        with suppress(BlockingIOError):
            while os.fork():
                forked += 1
            signal.pause()
        return forked

    fds = other.open_join_fds()
    reader, writer = os.pipe()
    pid = children.start(lambda: _send(writer, str(count())))
    children.wait(pid)
    os.close(writer)
    close_all(fds)
    assert other.kill()
    assert _receive(reader) == "3"


def test_a_cpu_quota_bounds_the_time_used(tree: CgroupTree, children: Children) -> None:
    if not tree.has_cpu:
        pytest.skip("no cpu controller")
    cgroup = tree.create("sb", CgroupLimits(memory=64 * MIB, pids=5, cpus=0.1))

    def spin() -> None:
        until = time.monotonic() + 0.6
        while time.monotonic() < until:
            pass

    pid = start_in(cgroup, children, spin)
    children.pids.discard(pid)
    _, status, usage = os.wait4(pid, 0)
    assert status == 0
    assert usage.ru_utime + usage.ru_stime < 0.3


def test_limits_out_of_range_and_strange_names_are_refused(tree: CgroupTree) -> None:
    with pytest.raises(ValueError, match="out of range"):
        CgroupLimits(memory=1, pids=0)
    for name in ("", "..", "a/b", "/abs", "memory.max", "-x", "a\n"):
        with pytest.raises(ValueError, match="Not a cgroup name"):
            tree.create(name, SMALL)
    tree.create("sb", SMALL)
    with pytest.raises(FileExistsError):
        tree.create("sb", SMALL)


def test_a_failed_create_leaves_nothing(tree: CgroupTree, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EBUSY, "no")

    monkeypatch.setattr(Cgroup, "apply", fail)
    with pytest.raises(OSError, match="no"):
        tree.create("sb", SMALL)
    assert not any((path / "sb").exists() for path in tree.paths)


# --- Joining and leaving --------------------------------------------------------------------------


@pytest.mark.root
def test_another_uid_in_a_user_namespace_joins_by_fd(tree: CgroupTree, children: Children) -> None:
    """As sandboxes do: from the zygote's leaf, with no rights of its own."""
    zygote, cgroup = tree.create("zygote"), tree.create("sb", SMALL)
    own, other = zygote.open_join_fds(), cgroup.open_join_fds()

    def body() -> None:
        join(own)
        switch_uid(OTHER_UID)
        os.unshare(os.CLONE_NEWUSER)
        join(other)

    reader, writer = os.pipe()
    pid = children.start(lambda: (body(), _send(writer, "ready"), signal.pause())[0])
    os.close(writer)
    close_all(own + other)
    assert _receive(reader) == "ready"
    assert cgroup.processes() == [pid]
    assert zygote.processes() == []
    assert cgroup.memory_current() > 0
    assert cgroup.remove()
    assert children.wait(pid) == -signal.SIGKILL


def test_add_moves_a_process(tree: CgroupTree, children: Children) -> None:
    pid = children.start(signal.pause)
    cgroup = tree.create("sb", SMALL)
    cgroup.add(pid)
    assert cgroup.processes() == [pid]


def test_removal_is_idempotent_and_never_waits_when_asked_not_to(
    tree: CgroupTree, children: Children
) -> None:
    cgroup = tree.create("sb", SMALL)
    pid = start_paused(cgroup, children)
    while not cgroup.try_remove():
        pass
    assert children.wait(pid) == -signal.SIGKILL
    assert cgroup.try_remove()
    assert cgroup.remove()
    assert cgroup.kill()
    with pytest.raises(FileNotFoundError):
        cgroup.oom_kills()
    with pytest.raises(FileNotFoundError):
        cgroup.open_join_fds()


def test_an_orphaned_join_fd_leads_nowhere(tree: CgroupTree, children: Children) -> None:
    cgroup = tree.create("sb", SMALL)
    fds = cgroup.open_join_fds()
    assert cgroup.remove()
    with pytest.raises(OSError, match="No such device"):
        os.write(fds[0], b"0")
    close_all(fds)


def test_close_kills_all_and_leaves_nothing(children: Children, tree: CgroupTree) -> None:
    tree.close()
    before = [sorted(path.parent.iterdir()) for path in tree.paths]
    second = open_tree(memory_total=1 << 30, cpus=1.5, pids_total=100, name=f"test-{os.getpid()}-close")
    cgroup = second.create("sb", SMALL)
    pids = [start_paused(second.create("zygote"), children), start_paused(cgroup, children)]
    assert second.close()
    assert [children.wait(pid) for pid in pids] == [-signal.SIGKILL] * 2
    assert second.close()
    assert cgroup.remove()
    with pytest.raises(FileNotFoundError):
        cgroup.set_memory(MIB)
    after = [sorted(path.parent.iterdir()) for path in second.paths]
    mine = f"{os.getpid()}-"
    assert [[p for p in listing if mine in p.name] for listing in after] == [[] for _ in before]


# --- Ordinary users -------------------------------------------------------------------------------


def try_cgroups() -> object:
    try:
        opened = open_tree(memory_total=256 * MIB, cpus=None, pids_total=50)
    except CgroupUnavailable as unavailable:
        return {"reason": unavailable.reason, "advice": unavailable.advice}
    cgroup = opened.create("sb", SMALL)
    children = Children()
    start_paused(opened.create("zygote"), children)
    pid = start_in(cgroup, children, lambda: allocate(256 * MIB))
    status = children.wait(pid)
    report = {"version": opened.version, "status": status, "ooms": cgroup.oom_kills()}
    paths = [str(path) for path in opened.paths]
    return {**report, "paths": paths, "closed": opened.close()}


@pytest.mark.root
def test_an_ordinary_user_without_delegation_is_told_what_to_do(tree: CgroupTree, children: Children) -> None:
    fds = tree.create("plain").open_join_fds()
    answer = children.ask(lambda: (join(fds), switch_uid(OTHER_UID), try_cgroups())[2])
    close_all(fds)
    assert "/plain" in answer["reason"]
    assert ("Delegate=yes" if tree.version == "v2" else f"chown it to uid {OTHER_UID}") in answer["advice"]


@pytest.mark.root
def test_an_ordinary_user_works_in_a_delegated_cgroup(tree: CgroupTree, children: Children) -> None:
    leaf = tree.create("user", CgroupLimits(memory=512 * MIB, pids=100))
    delegated = [path / "user" for path in tree.paths]
    for path in delegated:
        for file in (path, path / "cgroup.procs", path / "cgroup.subtree_control"):
            with suppress(FileNotFoundError):
                os.chown(file, OTHER_UID, OTHER_UID)
    before = [sorted(path.iterdir()) for path in delegated]
    fds = leaf.open_join_fds()
    answer = children.ask(lambda: (join(fds), switch_uid(OTHER_UID), try_cgroups())[2])
    close_all(fds)
    paths = answer.pop("paths")
    assert answer == {"version": tree.version, "status": -signal.SIGKILL, "ooms": 1, "closed": True}
    assert [Path(path).parent for path in paths] == delegated
    assert [sorted(path.iterdir()) for path in delegated] == before


# --- Sweeping -------------------------------------------------------------------------------------


@pytest.fixture
def nest(tree: CgroupTree) -> tuple[Cgroup, list[Path]]:
    """A cgroup in which other supervisors put their trees."""
    return tree.create("nest"), [path / "nest" for path in tree.paths]


def test_sweeping_spares_the_living_and_removes_the_dead(
    nest: tuple[Cgroup, list[Path]], children: Children
) -> None:
    reader, writer = os.pipe()

    def supervisor() -> None:
        opened = open_tree(memory_total=None, cpus=None, pids_total=None)
        member = start_paused(opened.create("sb", SMALL), Children())
        _send(writer, json.dumps([member, *map(str, opened.paths)]))
        signal.pause()

    pid = start_in(nest[0], children, supervisor)
    os.close(writer)
    member, *paths = json.loads(_receive(reader))
    member_fd = os.pidfd_open(member)
    assert remove_stale_trees(directories=nest[1]) == []
    assert select.select([member_fd], [], [], 0)[0] == []
    os.kill(pid, signal.SIGKILL)
    children.wait(pid)
    assert remove_stale_trees(directories=nest[1]) == [Path(path) for path in paths]
    assert not any(Path(path).exists() for path in paths)
    assert select.select([member_fd], [], [], 5)[0] == [member_fd]
    os.close(member_fd)
    assert remove_stale_trees(directories=nest[1]) == []


def test_sweeping_is_not_fooled(nest: tuple[Cgroup, list[Path]]) -> None:
    below, start = nest[1][0], cgroups.read_start_time(Path("/proc"), "self")
    assert start is not None
    here = os.stat("/proc/self/ns/pid").st_ino
    alive = below / f"fumehood-{os.getpid()}-{start}-{here}-00000001"
    reused = below / f"fumehood-{os.getpid()}-{start + 1}-{here}-00000002"
    elsewhere = below / f"fumehood-{os.getpid()}-{start}-{here + 1}-00000003"
    foreign = below / f"fumehood-{os.getpid()}-{start + 1}-{here}-00000004"
    unrelated = below / "fumehood-1"
    for path in (alive, reused, elsewhere, foreign, unrelated):
        path.mkdir()
    if os.geteuid() == 0:
        os.chown(foreign, OTHER_UID, OTHER_UID)
    else:
        foreign.rmdir()
    fd = os.open(elsewhere, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)
    assert remove_stale_trees(directories=[below]) == [reused]
    os.close(fd)
    assert remove_stale_trees(directories=[below]) == [elsewhere]


# --- v2 for real ----------------------------------------------------------------------------------


@pytest.fixture
def bare_v2() -> Iterator[CgroupTree]:
    """A tree in a real unified hierarchy without controllers, as hybrid machines have it."""
    mounts = cgroup_discovery.find_mounts(Path("/sys/fs/cgroup"), Path("/proc"))
    own = next((mount.own_cgroup for mount in mounts if mount.version == "v2"), None)
    if own is None or not os.access(own, os.W_OK):
        pytest.skip("no writable unified cgroup mount")
    tree = CgroupTree("v2", [cgroup_discovery.DelegatedCgroup(own, frozenset())], f"test-{os.getpid()}-bare")
    yield tree
    assert tree.close()
    assert not tree.paths[0].exists()


def test_v2_without_controllers_joins_kills_and_removes(bare_v2: CgroupTree, children: Children) -> None:
    cgroup = bare_v2.create("sb")
    pids = sorted([start_paused(cgroup, children), start_paused(cgroup, children)])
    assert cgroup.processes() == pids
    assert (bare_v2.paths[0] / "sb/cgroup.kill").exists()
    assert cgroup.kill()
    assert [children.wait(pid) for pid in pids] == [-signal.SIGKILL] * 2
    assert cgroup.try_remove()
    assert not (bare_v2.paths[0] / "sb").exists()


@pytest.mark.root
def test_real_v2_root_alone_splits_its_cgroup_and_mends_it(tree: CgroupTree, children: Children) -> None:
    if tree.version == "v1":
        pytest.skip("v2 only")
    below = tree.paths[0] / "own"
    fds = tree.create("own").open_join_fds()

    def body() -> object:
        join(fds)
        opened = open_tree(memory_total=None, cpus=None, pids_total=None)
        inside = Path("/proc/self/cgroup").read_text().strip()
        opened.create("sb", SMALL)
        parent = str(opened.paths[0].parent)
        opened.close()
        return [inside, parent, Path("/proc/self/cgroup").read_text().strip()]

    answer = children.ask(body)
    close_all(fds)
    own = f"0::/{below.relative_to('/sys/fs/cgroup')}"
    assert answer == [f"{own}/supervisor", str(below), own]
    assert not (below / "supervisor").exists()


@pytest.mark.root
def test_real_v2_root_leaves_a_shared_cgroup_alone(tree: CgroupTree, children: Children) -> None:
    if tree.version == "v1":
        pytest.skip("v2 only")
    session = tree.create("session")
    neighbour = start_paused(session, children)
    fds = session.open_join_fds()

    def body() -> object:
        join(fds)
        opened = open_tree(memory_total=None, cpus=None, pids_total=None)
        opened.create("sb", SMALL)
        parent = str(opened.paths[0].parent)
        return [parent, opened.close(), session.processes() == sorted([neighbour, os.getpid()])]

    answer = children.ask(body)
    close_all(fds)
    assert answer == ["/sys/fs/cgroup", True, True]
