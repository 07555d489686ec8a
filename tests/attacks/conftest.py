"""Fixtures: drivers, fresh sandboxes, and the checks after every attack.

Each attack gets a sandbox of its own. Beside it, for the whole session, lives a neighbour with a variable and
a counter: after each attack it is asked whether it is still itself, as are the supervisor and the zygote.
"""

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.driver_client import TIMEOUT, Driver, DriverError, SandboxClient, Who
from tests.support.waiting import becomes_true

PRELUDE = (Path(__file__).parent / "programs" / "prelude.py").read_text()
_NEIGHBOUR = """
import threading, time
mine, count = {token!r}, 0
def tick():
    global count
    while True:
        count += 1
        time.sleep(0.05)
threading.Thread(target=tick, daemon=True).start()
"""


@dataclass
class Neighbour:
    """The other tenant: knows at once when something of it changed."""

    box: SandboxClient
    token: str
    last: int = 0

    def check(self) -> None:
        def counted() -> bool:
            mine, count = self.box.ask("import json; print(json.dumps([mine, count]))", timeout=TIMEOUT)
            assert mine == self.token
            moved = count > self.last
            self.last = count
            return moved

        assert becomes_true(counted), "the neighbour's counter stands still"


@dataclass
class Host:
    driver: Driver
    neighbour: Neighbour
    zygote: int
    boxes: list[SandboxClient] = field(default_factory=list[SandboxClient])

    @property
    def who(self) -> Who:
        return self.driver.who

    @property
    def limited(self) -> bool:
        """Whether memory and processes are bounded by cgroups here."""
        return bool(self.driver.started["cgroups"])

    def create(self, **spec: Any) -> SandboxClient:
        box = self.driver.create(**spec)
        self.boxes.append(box)
        outcome = box.run(PRELUDE)
        assert outcome.end.status == "ok", outcome
        return box

    def check(self) -> None:
        """Supervisor, zygote and neighbour are what they were."""
        info = self.driver.info()
        assert info["supervisor"] == self.driver.started["supervisor"]
        assert (info["zygote"], info["zygote_alive"]) == (self.zygote, True), "the zygote was replaced"
        self.neighbour.check()


# ---- what may be left behind: nothing --------------------------------------------------------------------------


def children_of(parents: set[int]) -> set[int]:
    """All descendants of these processes."""
    pairs: list[tuple[int, int]] = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path(f"/proc/{entry}/stat").read_text()
            except OSError:
                continue
            pairs.append((int(entry), int(stat.rpartition(")")[2].split()[1])))
    found = set(parents)
    while more := {pid for pid, parent in pairs if parent in found} - found:
        found |= more
    return found


def started_at(pid: int) -> str | None:
    """Tells a process from a later one with the same pid; None when it is gone, or waits to be reaped."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state == "Z" else rest[18]


def mounts() -> set[str]:
    """Those of the host that look like a supervisor's."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return {line for line in lines if "fumehood" in line or " stage " in line}


class Residue:
    """Looks at one driver's traces, from before its start until after its end.

    temporary: the driver's TMPDIR, its alone: other supervisors may run on this machine.
    """

    def __init__(self) -> None:
        # Not pytest's: that is closed to other users.
        self.temporary = Path(tempfile.mkdtemp(prefix="attacks-"))
        self.temporary.chmod(0o1777)
        self._mounts = mounts()
        self._seen: dict[int, str] = {}
        self._cgroups: list[Path] = []

    def note(self, driver: Driver) -> None:
        """Remember what runs for it now."""
        self._cgroups = [Path(path) for path in driver.started["cgroups"]]
        for pid in children_of({driver.started["supervisor"]}):
            if (began := started_at(pid)) is not None:
                self._seen[pid] = began

    def alive(self) -> set[int]:
        return {pid for pid, began in self._seen.items() if started_at(pid) == began}

    def assert_none(self) -> None:
        assert self._seen
        assert becomes_true(lambda: not self.alive()), f"processes outlived their supervisor: {self.alive()}"
        assert [path for path in self._cgroups if path.exists()] == []
        assert mounts() - self._mounts == set()
        assert list(self.temporary.iterdir()) == []

    def close(self) -> None:
        shutil.rmtree(self.temporary)


def start_driver(who: Who, residue: Residue, **settings: Any) -> Driver:
    """With limits where this machine has them for us; else as well as it goes."""
    if who == "ordinary" and os.geteuid() != 0:
        try:
            return Driver.start(who, temporary=residue.temporary, **settings)
        except DriverError as error:
            if error.kind != "IsolationUnavailable":
                raise
            settings["limits"] = "best-effort"
    return Driver.start(who, temporary=residue.temporary, **settings)


# ---- fixtures ---------------------------------------------------------------------------------------------------


def _everybody() -> list[Who]:
    return ["root", "ordinary"] if os.geteuid() == 0 else ["ordinary"]


@pytest.fixture(scope="session", params=_everybody(), ids=lambda who: who)
def who(request: pytest.FixtureRequest) -> Who:
    return request.param


class Hosts:
    """One for each user, started when it is first asked for: tests of both take turns with them, file after file."""

    def __init__(self, until: contextlib.ExitStack) -> None:
        self._until = until
        self._started: dict[Who, Host] = {}

    def of(self, who: Who) -> Host:
        if who not in self._started:
            self._started[who] = self._until.enter_context(_hosting(who))
        return self._started[who]


@contextlib.contextmanager
def _hosting(who: Who) -> Generator[Host]:
    residue = Residue()
    secret = f"planted-{secrets.token_hex(16)}"
    with contextlib.closing(residue):
        with start_driver(who, residue, secret=secret, interrupt_grace=0.7) as driver:
            box = driver.create()
            neighbour = Neighbour(box, secrets.token_hex(8))
            assert box.run(_NEIGHBOUR.format(token=neighbour.token)).end.status == "ok"
            yield Host(driver, neighbour, driver.started["zygote"])
            residue.note(driver)
        residue.assert_none()


@pytest.fixture(scope="session")
def hosts() -> Iterator[Hosts]:
    with contextlib.ExitStack() as until:
        yield Hosts(until)


@pytest.fixture(scope="session")
def session_host(who: Who, hosts: Hosts) -> Host:
    return hosts.of(who)


@pytest.fixture
def host(session_host: Host) -> Iterator[Host]:
    """The shared host; afterwards the test's sandboxes are gone and everybody else is well."""
    yield session_host
    boxes, session_host.boxes = session_host.boxes, []
    for ending in [session_host.driver.send("destroy", sandbox=box.name) for box in boxes]:
        ending.wait()
    session_host.check()
    # One that is being made for the pool counts until it is parked.
    assert becomes_true(lambda: session_host.driver.info()["live"] == 1), "sandboxes outlived their deletion"


@pytest.fixture
def box(host: Host) -> SandboxClient:
    """A fresh sandbox with the names of programs/prelude.py."""
    return host.create()


@pytest.fixture
def residue() -> Iterator[Residue]:
    residue = Residue()
    yield residue
    residue.close()


@pytest.fixture
def limited(host: Host) -> None:
    if not host.limited:
        pytest.skip("no cgroup is delegated to this user, so memory is not bounded here")


# What these try does not depend on the user under whom the supervisor runs: the other one is for the slow tests.
_SAME_FOR_EVERY_USER = {"test_calls", "test_commands", "test_results", "test_syscalls"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        same = item.path.parent == here and item.path.stem in _SAME_FOR_EVERY_USER
        if same and "[ordinary" in item.nodeid and os.geteuid() == 0:
            item.add_marker(pytest.mark.slow)
