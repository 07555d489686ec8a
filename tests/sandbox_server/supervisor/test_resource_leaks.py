"""Nothing is left on the host after many sandboxes, kills and exhausted resources."""

import contextlib
import dataclasses
import os
import random
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fumehood.sandbox_server.host import disks
from fumehood.sandbox_server.host.disks import DisksUnavailable
from fumehood.sandbox_server.settings import SandboxServerSettings
from tests.support.driver_client import Driver, DriverError, DriverGone, Running, SandboxClient, Who
from tests.support.host_census import (
    Census,
    CensusTaker,
    HostPaths,
    find_processes_by_role,
    resident_kib,
)
from tests.support.sandbox_runs import has_cgroups
from tests.support.waiting import becomes_true

_BOUND = 30.0  # seconds within which whoever waits hears something, also on a busy machine
_SMALL: dict[str, Any] = {"preload": [], "pool": 0, "disk_size_ratio": 1 / 256, "disk_reserve": 0}
_SEED = 20261115


@pytest.fixture(params=["root", "ordinary"])
def who(request: pytest.FixtureRequest) -> Who:
    """As root both are tried; an ordinary user can only try itself."""
    if os.geteuid() != 0 and request.param == "root":
        pytest.skip("needs uid 0")
    if os.geteuid() != 0 and not has_cgroups():
        pytest.skip("memory cannot be bounded as this user")
    return request.param


@pytest.fixture
def own_user() -> Who:
    """The only user whose limits this process may lower."""
    if not has_cgroups():
        pytest.skip("memory cannot be bounded as this user")
    return "root" if os.geteuid() == 0 else "ordinary"


@pytest.fixture
def counter() -> Iterator[CensusTaker]:
    with tempfile.TemporaryDirectory(prefix="census-", dir="/tmp") as top:
        os.chmod(top, 0o755)
        paths = HostPaths(Path(top, "temporary"), Path(top, "disks"))
        paths.temporary.mkdir()
        paths.temporary.chmod(0o777)
        paths.disk_dir.mkdir(0o700)
        yield CensusTaker(paths)


def _start(who: Who, counter: CensusTaker, **settings: Any) -> Driver:
    chosen: dict[str, Any] = {**_SMALL, "disk_dir": str(counter.paths.disk_dir), **settings}
    driver = Driver.start(who, temporary=counter.paths.temporary, **chosen)
    counter.watch_supervisor(driver.started["supervisor"], driver.started["cgroups"])
    return driver


def _large(who: Who) -> str:
    """The tier with a disk, where there are disks."""
    if who != "root":
        return "1g"
    try:
        disks.check_disk_support(SandboxServerSettings())
    except DisksUnavailable:
        return "1g"
    return "16g"


# ---- in good order -----------------------------------------------------------------------------------------------


def _use(driver: Driver, memory: str) -> None:
    box = driver.create(memory=memory)
    box.write_file("in/given.txt", b"x" * 10_000)
    outcome = box.run(
        "import subprocess\nsubprocess.Popen(['sleep', '600'])\nopen('out', 'w').write('y' * 1000)"
    )
    assert outcome.result == "1000"
    assert box.read_file("out") == b"y" * 1000
    assert set(box.list_files()[0]) == {"in/given.txt", "out"}
    box.destroy()


@pytest.mark.parametrize(
    "count", [16, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_sandboxes_leave_nothing(who: Who, counter: CensusTaker, count: int) -> None:
    if count == 1000 and who != "root":
        pytest.skip("the long run is root's: it has disks as well")
    with _start(who, counter) as driver:
        large = _large(who)
        for memory in ("1g", large) * 4:  # caches fill, templates are made
            _use(driver, memory)
        before, memory_before = counter.wait_until_stable(), resident_kib(counter.supervisor)
        for number in range(count):
            _use(driver, large if number % 4 == 0 else "1g")
        assert counter.wait_for_census(before) == {}
        assert resident_kib(counter.supervisor) - memory_before < 4096
    assert counter.wait_for_census(Census()) == {}


# ---- sudden deaths -----------------------------------------------------------------------------------------------


class Chaos:
    """Rounds of one action and one death at a random moment; supervisors are followed by others."""

    ROLES = ("supervisor", "jail", "spawner", "zygote", "init", "interpreter", "helper")
    ACTIONS = ("create", "execute", "upload", "destroy")

    def __init__(self, who: Who, counter: CensusTaker, seed: int, **settings: Any) -> None:
        self.who: Who = who
        self.counter = counter
        self.random = random.Random(seed)
        self.large = _large(who)
        self.settings = settings
        self.killed: dict[str, int] = dict.fromkeys(self.ROLES, 0)
        self._open()

    def _open(self) -> None:
        self.driver = _start(self.who, self.counter, **self.settings)
        self.zygotes_lost = 0
        _use(self.driver, self.large)
        self.rest = self.counter.wait_until_stable()
        trees = {os.path.basename(name) for name in self.rest.cgroups} - {"zygote"}
        assert len(trees) == 1, "what the last one left is gone"

    def round(self) -> None:
        # More deaths of zygotes than this, and the supervisor rightly takes its time.
        role = "supervisor" if self.zygotes_lost == 2 else self.random.choice(self.ROLES)
        box = self.driver.create(memory=self.random.choice(("1g", self.large)))
        zygote = self.driver.info()["zygote"]
        action = "upload" if role == "helper" else self.random.choice(self.ACTIONS)
        waiting = self._begin(action, box)
        pid = self.counter.supervisor
        self._kill_soon(role, pid)
        gone = self._answer(action, waiting)
        if role == "supervisor":
            self._follow(gone)
            return
        assert not gone, f"the supervisor ended when the {role} was killed"
        self._works_on()
        if role in ("init", "interpreter", "helper"):
            assert self.driver.info()["zygote"] == zygote, f"the death of {role} cost the zygote as well"
        with contextlib.suppress(DriverError):
            box.destroy()
        for made in self.leftover:
            made.destroy()
        left = self.counter.wait_for_census(self.rest)
        assert left == {}, f"after {action} and the death of {role}"

    def _begin(self, action: str, box: SandboxClient) -> Running:
        self.leftover: list[SandboxClient] = []
        match action:
            case "create":
                return self.driver.send("create", memory=self.large)
            case "execute":
                return box.start(
                    "import subprocess, time\nsubprocess.Popen(['sleep', '600'])\ntime.sleep(0.3)"
                )
            case "upload":
                return self.driver.send("write_file", sandbox=box.name, path="a/b", content="eHh4" * 500_000)
            case _:
                return self.driver.send("destroy", sandbox=box.name)

    def _kill_soon(self, role: str, supervisor: int) -> None:
        time.sleep(self.random.random() * 0.08)
        for _ in range(20 if role == "helper" else 1):  # it lives for a moment only
            victims = find_processes_by_role(supervisor)[role]
            if victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.random.choice(victims), signal.SIGKILL)
                    self.killed[role] += 1
                    self.zygotes_lost += role in ("jail", "spawner", "zygote")
                return

    def _answer(self, action: str, waiting: Running) -> bool:
        """Whoever waited hears within the bound how it ended; True when the supervisor itself is gone."""
        try:
            answer = waiting.wait(_BOUND)
        except DriverGone:
            return True
        except DriverError as error:
            if error.kind not in ("SandboxStartFailed", "SandboxGone", "FileRefused") or not error.text:
                raise
            return False
        if action == "create":
            self.leftover.append(SandboxClient(self.driver, answer["sandbox"]))
        if action == "execute":
            end = waiting.events[-1]
            assert end["type"] == "end"
            assert end["status"] in ("ok", "lost"), end
            assert end["status"] == "ok" or end["reason"]
        return False

    def _works_on(self) -> None:
        box = self.driver.create()
        assert box.run("1 + 1").result == "2"
        box.destroy()

    def _follow(self, gone: bool) -> None:
        """Without anybody's help the kernel ends everything that runs or is mounted; the successor does the rest."""
        pid = self.counter.supervisor
        if not gone:
            assert becomes_true(lambda: not os.path.exists(f"/proc/{pid}/fd/0"), _BOUND)
        with contextlib.suppress(DriverGone):
            self.driver.close()
        wanted = Census(cgroups=self.counter.take_census().cgroups, files=self.counter.take_census().files)
        assert self.counter.wait_for_census(wanted) == {}
        self._open()

    def close(self) -> None:
        self.driver.close()
        assert self.counter.wait_for_census(Census()) == {}


@pytest.mark.parametrize("count", [5, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_random_deaths_leave_nothing(who: Who, counter: CensusTaker, count: int) -> None:
    chaos = Chaos(who, counter, _SEED + count)
    try:
        for _ in range(count):
            chaos.round()
    finally:
        chaos.close()
    # Now and then the victim is gone before it is found; most are met.
    assert sum(chaos.killed.values()) >= count // 2, chaos.killed


def test_a_killed_supervisor_of_mode_degraded_is_cleaned_up_after(
    own_user: Who, counter: CensusTaker
) -> None:
    with _start(own_user, counter, mode="unsafe-degraded") as neighbour:
        kept = neighbour.create()
        kept.run("open('kept', 'w').write('x')")
        neighbours = counter.take_census()
        with contextlib.suppress(DriverGone), _start(own_user, counter, mode="unsafe-degraded") as driver:
            box = driver.create()
            box.run("import os\nos.mkdir('closed'); open('closed/x', 'w').close(); os.chmod('closed', 0)")
            box.run("import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)")
            assert {"files", "processes"} <= counter.take_census().growth_over(neighbours).keys()
            os.kill(driver.started["supervisor"], signal.SIGKILL)
            box.run("1")
        # What runs ends by itself; what has a name waits for the successor.
        left = counter.wait_for_census(dataclasses.replace(neighbours, descriptors=1 << 20), seconds=3)
        assert left.keys() <= {"files", "cgroups", "descriptors"}
        with _start(own_user, counter, mode="unsafe-degraded") as driver:
            assert driver.create().run("1 + 1").result == "2"
            assert len(os.listdir(counter.paths.temporary)) == 2, "the neighbour's and the successor's"
        assert kept.read_file("kept") == b"x"
    assert counter.wait_for_census(Census()) == {}


def test_in_mode_degraded_sandboxes_end_with_their_zygote(own_user: Who, counter: CensusTaker) -> None:
    with _start(own_user, counter, mode="unsafe-degraded") as driver:
        before = counter.wait_until_stable()
        box = driver.create()
        box.run("import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)")
        call = _sleeping(box)
        os.kill(driver.started["zygote"], signal.SIGKILL)
        assert call.outcome(_BOUND).end.status == "lost"
        again = driver.create()
        assert again.run("1 + 1").result == "2"
        again.destroy()
        assert counter.wait_for_census(before) == {}
    assert counter.wait_for_census(Census()) == {}


def _sleeping(box: SandboxClient) -> Running:
    call = box.start("print('on', flush=True)\nimport time\ntime.sleep(600)", timeout=600)
    call.until_stdout("on")
    return call


# ---- exhausted ---------------------------------------------------------------------------------------------------


def test_a_supervisor_without_descriptors_says_so_and_recovers(own_user: Who, counter: CensusTaker) -> None:
    with _start(own_user, counter) as driver:
        _use(driver, "1g")
        before = counter.wait_until_stable()
        pid = driver.started["supervisor"]
        _, most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        boxes: list[SandboxClient] = []
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (counter.own_descriptors() + 25, most))
        refusal = _create_until_refused(driver, boxes, 50)
        assert refusal.kind == "SandboxStartFailed"
        assert "Too many open files" in refusal.text
        # Those that live can still be used, or say why not, and are given back.
        with contextlib.suppress(DriverError):
            assert boxes[0].run("1 + 1").result == "2"
        for box in boxes:
            box.destroy()
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, most))
        assert counter.wait_for_census(before) == {}
        _use(driver, "1g")
        assert counter.wait_for_census(before) == {}


def test_descriptors_that_run_out_amid_creations_cost_those_alone(
    own_user: Who, counter: CensusTaker, capfd: pytest.CaptureFixture[str]
) -> None:
    with _start(own_user, counter) as driver:
        _use(driver, "1g")
        before = counter.wait_until_stable()
        pid = driver.started["supervisor"]
        _, most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        for room in (6, 10, 14, 18):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (counter.own_descriptors() + room, most))
            refusals = _refusals([driver.send("create") for _ in range(6)], driver)
            assert refusals
            assert {refusal.kind for refusal in refusals} == {"SandboxStartFailed"}, refusals
            assert all("Too many open files" in refusal.text for refusal in refusals), refusals
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, most))
            assert counter.wait_for_census(before) == {}
        assert driver.create().run("1 + 1").result == "2"
    assert "Traceback" not in capfd.readouterr().err


def _refusals(creations: list[Running], driver: Driver) -> list[DriverError]:
    """What was said to those that got no sandbox; the others' are destroyed."""
    refusals: list[DriverError] = []
    for asked in creations:
        try:
            SandboxClient(driver, asked.wait(_BOUND)["sandbox"]).destroy()
        except DriverError as error:
            refusals.append(error)
    return refusals


def _create_until_refused(driver: Driver, boxes: list[SandboxClient], most: int) -> DriverError:
    while len(boxes) < most:
        try:
            boxes.append(driver.create())
        except DriverError as error:
            return error
    raise AssertionError(f"{most} sandboxes could be made")


def test_a_cgroup_that_cannot_be_made_is_an_error_of_that_sandbox(who: Who, counter: CensusTaker) -> None:
    with _start(who, counter) as driver:
        _use(driver, "1g")
        first = driver.create()
        before = counter.take_census()
        (number,) = {
            int(name.rpartition("-")[2])
            for name in before.cgroups
            if os.path.basename(name).startswith("sb-")
        }
        # The kernel refuses the second hierarchy, or the only one: the name is taken.
        taken = [Path(driver.started["cgroups"][-1], f"sb-{n}") for n in range(number + 1, number + 4)]
        for path in taken:
            path.mkdir()
        with pytest.raises(DriverError, match="File exists") as refusal:
            driver.create()
        assert refusal.value.kind == "SandboxStartFailed"
        for path in taken:
            path.rmdir()
        assert counter.wait_for_census(before) == {}
        assert driver.create().run("1 + 1").result == "2"
        assert first.run("2 + 2").result == "4"
    assert counter.wait_for_census(Census()) == {}


# ---- the zygote's death ------------------------------------------------------------------------------------------


def test_a_zygotes_death_is_told_to_everybody_and_made_good(who: Who, counter: CensusTaker) -> None:
    with _start(who, counter, pool=2) as driver:
        boxes = [driver.create() for _ in range(3)]
        calls = [_sleeping(box) for box in boxes[:2]]
        upload = driver.send("write_file", sandbox=boxes[2].name, path="a", content="eHh4" * 500_000)
        began = time.monotonic()
        os.kill(find_processes_by_role(driver.started["supervisor"])["zygote"][0], signal.SIGKILL)
        for call in calls:
            end = call.outcome(_BOUND).end
            assert (end.status, end.state_kept) == ("lost", False)
            assert "its zygote ended" in end.reason
        with contextlib.suppress(DriverError):
            upload.wait(_BOUND)
        assert time.monotonic() - began < _BOUND
        assert [box.gone for box in boxes] == ["its zygote ended"] * 3
        # A new one fills the pool without being asked.
        pid = driver.started["supervisor"]
        assert becomes_true(lambda: len(find_processes_by_role(pid)["interpreter"]) == 2, _BOUND)
        assert driver.create().run("1 + 1").result == "2"
    assert counter.wait_for_census(Census()) == {}


@pytest.mark.slow
def test_zygotes_that_keep_dying_are_started_less_and_less_often(own_user: Who, counter: CensusTaker) -> None:
    with _start(own_user, counter, pool=1) as driver:
        pid = driver.started["supervisor"]
        seen: set[int] = set()
        refused: set[str] = set()
        until = time.monotonic() + 10
        while time.monotonic() < until:
            asked = driver.send("create")
            while asked.arrived.empty():
                _kill_zygotes(pid, seen)
                time.sleep(0.02)
            try:
                asked.wait(_BOUND)
            except DriverError as error:
                refused.add(error.text)
        assert len(seen) <= 8, "three at once, then after one, two, four and eight seconds"
        assert any("times within a minute; the next start is in" in text for text in refused), refused
        assert becomes_true(lambda: _creates(driver), _BOUND)
    assert counter.wait_for_census(Census()) == {}


def _kill_zygotes(supervisor: int, seen: set[int]) -> None:
    for zygote in find_processes_by_role(supervisor)["zygote"]:
        seen.add(zygote)
        with contextlib.suppress(ProcessLookupError):
            os.kill(zygote, signal.SIGKILL)


def _creates(driver: Driver) -> bool:
    try:
        driver.create().destroy()
    except DriverError:
        time.sleep(0.2)
        return False
    return True


def test_the_census_sees_what_there_is(who: Who, counter: CensusTaker) -> None:
    """Else the tests above would prove nothing."""
    with _start(who, counter) as driver:
        _use(driver, _large(who))
        before = counter.wait_until_stable()
        box = driver.create(memory=_large(who))
        more = counter.take_census().growth_over(before)
        assert {"processes", "cgroups", "descriptors"} <= more.keys()
        if _large(who) != "1g":
            assert {"loop_devices", "mounts"} <= more.keys()
        box.destroy()
        (counter.paths.temporary / "left").touch()
        assert "files" in counter.take_census().growth_over(before)
        (counter.paths.temporary / "left").unlink()


@pytest.mark.skipif(shutil.which("chmod") is None, reason="needs coreutils")
def test_unlocked_scratch_of_others_is_left_alone(counter: CensusTaker) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs uid 0")
    foreign = counter.paths.temporary / "fumehood-scratch-0123456789abcdef"
    foreign.mkdir()
    os.chown(foreign, 54321, 54321)
    link = counter.paths.temporary / "fumehood-scratch-fedcba9876543210"
    link.symlink_to("/etc")
    own = counter.paths.temporary / "fumehood-scratch-00112233"
    own.mkdir()
    with _start("root", counter):
        assert (foreign.is_dir(), link.is_symlink(), own.exists()) == (True, True, False)
    foreign.rmdir()
    link.unlink()
