"""Kills of each process, and what must happen to the others.

Each test has a supervisor of its own, without preloaded packages so that it starts quickly.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.attacks.conftest import Residue, children_of, start_driver, started_at
from tests.support.driver_client import Driver, DriverGone, SandboxClient, Who
from tests.support.waiting import becomes_true


@pytest.fixture
def driver(who: Who, residue: Residue) -> Iterator[Driver]:
    with start_driver(who, residue, preload=[], pool=1) as driver:
        yield driver
    residue.assert_none()


def kill(pid: int) -> None:
    """Only ever a process below the driver that this test started."""
    assert pid > 1
    os.kill(pid, signal.SIGKILL)


def status(pid: int) -> dict[str, list[str]]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}


def member(box: SandboxClient, inside: int) -> int:
    """The host's pid of a process that has this pid inside."""
    known = box.members()
    if not known:
        pytest.skip("without a cgroup the sandbox's processes are not known here")
    namespace = os.readlink(f"/proc/{known[0]}/ns/pid")
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (
                os.readlink(path / "ns/pid") == namespace
                and int(status(int(path.name))["NSpid"][-1]) == inside
            ):
                return int(path.name)
    raise AssertionError(f"there is no process {inside} in the sandbox")


def running(box: SandboxClient) -> Any:
    call = box.start("print('on', flush=True)\nimport time\nwhile True: time.sleep(1)", timeout=120)
    call.until_stdout("on")
    return call


def inner_zygote(driver: Driver) -> int:
    """PID 1 of the outer jail."""
    return min(children_of({driver.started["zygote"]}) - {driver.started["zygote"]})


@pytest.mark.parametrize("which", ["outer", "inner"])
def test_the_zygote_is_killed(driver: Driver, residue: Residue, which: str) -> None:
    """The running call ends as lost, the next sandbox comes from a new zygote."""
    box, other = driver.create(), driver.create()
    call, other_call = running(box), running(other)
    residue.note(driver)
    began = time.monotonic()
    kill(driver.started["zygote"] if which == "outer" else inner_zygote(driver))
    for outcome in (call.outcome(), other_call.outcome()):
        assert (outcome.end.status, outcome.end.exit_code, outcome.end.state_kept) == ("lost", -1, False)
        assert outcome.end.reason
    assert time.monotonic() - began < 15  # 3 s on a quiet machine
    assert becomes_true(lambda: residue.alive() == {driver.started["supervisor"]})
    assert driver.create().run("1 + 1").result == "2"
    assert driver.info()["zygote"] != driver.started["zygote"]
    residue.note(driver)


def test_an_interpreter_has_another_number_than_its_zygote(driver: Driver, residue: Residue) -> None:
    """By that OpenSSL knows a fork: else all sandboxes had the random numbers that the zygote was about to draw."""
    interpreter = status(member(driver.create(), 2))
    zygote = status(int(interpreter["PPid"][0]))
    assert zygote["NSpid"][-1] != interpreter["NSpid"][-1]
    residue.note(driver)


def test_init_handles_no_signal(driver: Driver, residue: Residue) -> None:
    """Code could send those, where Landlock does not keep it from that; without a handler they do not arrive."""
    box = driver.create()
    init = member(box, 1)
    assert int(status(init)["SigCgt"][0], 16) == 0
    os.kill(init, signal.SIGINT)
    assert box.run("1 + 1").result == "2"
    assert box.gone is None
    residue.note(driver)


def test_init_is_killed(driver: Driver, residue: Residue) -> None:
    box, other = driver.create(), driver.create()
    residue.note(driver)
    other.run("kept = 41")
    call = running(box)
    members = set(box.members())
    kill(member(box, 1))
    outcome = call.outcome()
    assert (outcome.end.status, outcome.end.exit_code, outcome.end.state_kept) == ("lost", -1, False)
    assert becomes_true(lambda: not members & children_of({driver.started["supervisor"]}))
    assert other.run("kept + 1").result == "42"
    assert driver.info()["zygote"] == driver.started["zygote"]


def test_the_interpreter_is_killed(driver: Driver, residue: Residue) -> None:
    box = driver.create()
    residue.note(driver)
    box.run("import subprocess; child = subprocess.Popen(['sleep', '600'])")
    call = running(box)
    members = set(box.members())
    kill(member(box, 2))
    outcome = call.outcome()
    assert outcome.end.status == "lost"
    assert "SIGKILL" in outcome.end.reason
    assert becomes_true(lambda: not members & children_of({driver.started["supervisor"]}))
    assert box.gone is not None
    assert driver.create().run("1 + 1").result == "2"


def test_the_interpreter_is_killed_between_calls(driver: Driver, residue: Residue) -> None:
    box = driver.create()
    residue.note(driver)
    assert box.run("1 + 1").result == "2"
    kill(member(box, 2))
    assert becomes_true(lambda: box.gone is not None)
    assert "SIGKILL" in (box.gone or "")


def test_a_parked_sandbox_is_killed(driver: Driver, residue: Residue) -> None:
    """One that died in the pool is not handed out: at once a living one is found, or made."""
    assert driver.create().run("1 + 1").result == "2"
    time.sleep(0.5)  # the pool is refilled behind our back
    residue.note(driver)
    spawner = inner_zygote(driver)
    own = os.readlink(f"/proc/{spawner}/ns/pid")
    for pid in children_of({spawner}) - {spawner}:
        # The death of one may take others with it.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if started_at(pid) is not None and os.readlink(f"/proc/{pid}/ns/pid") != own:
                kill(pid)
    for _ in range(3):
        assert driver.create().run("1 + 1").result == "2"
    residue.note(driver)


def test_the_supervisor_is_killed(who: Who, residue: Residue, request: pytest.FixtureRequest) -> None:
    """Nothing of it survives, and the next one clears away what it could not."""
    driver = start_driver(who, residue, preload=[], pool=1)
    request.addfinalizer(driver.close)
    box = driver.create()
    daemon = "if os.fork() == 0:\n    os.setsid()\n    while True: time.sleep(1)"
    box.run(f"import os, time\n{daemon}\n{daemon}")
    call = running(box)
    residue.note(driver)
    cgroups = [Path(path) for path in driver.started["cgroups"]]
    kill(driver.started["supervisor"])
    with pytest.raises(DriverGone):
        call.outcome()
    assert becomes_true(lambda: not residue.alive()), f"still alive: {residue.alive()}"
    driver.close()
    if os.geteuid() != 0 or who == "root":  # else the delegated cgroup went with its parent: nothing to sweep
        with start_driver(who, residue, preload=[], pool=0) as successor:
            assert [path for path in cgroups if path.exists()] == []
            assert successor.create().run("1 + 1").result == "2"
    residue.assert_none()


def test_it_leaves_in_good_order_while_calls_run(who: Who, residue: Residue) -> None:
    """The end of standard input ends the driver: also with running, stubborn and forking sandboxes."""
    driver = start_driver(who, residue, preload=[], pool=1)
    boxes = [driver.create() for _ in range(3)]
    boxes[0].start(
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\nwhile True: pass",
        timeout=99,
    )
    boxes[1].start(
        "import os\nfor _ in range(20):\n    if os.fork() == 0: break\nwhile True: pass", timeout=99
    )
    running(boxes[2])
    residue.note(driver)
    driver.close()
    residue.assert_none()
