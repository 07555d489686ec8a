"""Attacks by shell commands: floods, leftover processes, limits, the runner."""

import pytest

from tests.attacks.conftest import Host
from tests.support.driver_client import SandboxClient
from tests.support.waiting import becomes_true

MIB = 1 << 20
FLOODS = {
    "stdout": "yes",
    "stderr": "yes >&2",
    "both": "yes & yes >&2",
    "no newline": "tr '\\0' x < /dev/zero",
    "many writers": "for i in 1 2 3 4 5 6; do yes $i & done; wait",
    "descriptors of the runner": "cat /dev/zero > /proc/$PPID/fd/1",
}
PROCESSES = "import os; print(len([name for name in os.listdir('/proc') if name.isdigit()]))"


def alive(box: SandboxClient) -> int:
    return box.ask(PROCESSES)


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, id=name, marks=[] if name in ("both", "many writers") else pytest.mark.slow)
        for name, command in FLOODS.items()
    ],
)
def test_endless_output_is_cut_and_stopped(box: SandboxClient, command: str) -> None:
    before = alive(box)
    outcome = box.shell(command, timeout=0.5)
    assert outcome.end.status in ("timeout", "ok")  # one that ends leaves its children, as a program would
    text = outcome.stdout + outcome.stderr
    assert len(text) < 2 * MIB
    assert box.gone is None
    if outcome.end.status == "timeout":
        assert "[output truncated: more than 1048576 bytes]" in text
        assert becomes_true(lambda: alive(box) == before)


LEFT_BEHIND = {
    "child": "sleep 600 & wait",
    "ignores signals": "trap '' INT TERM HUP; sh -c 'trap \"\" INT TERM HUP; while :; do :; done' & wait",
    "session of its own": "setsid sleep 600 & wait",
    "double fork": "(setsid sh -c 'sleep 600 & sleep 601 &' &) ; sleep 602",
    "daemon of a daemon": "(setsid sh -c '(setsid sh -c \"(sleep 600 &); sleep 601\" &)' &); sleep 602",
    "moves on": "f() { (sleep 0.01; f) & exit; }; (f); sleep 600",
    "stopped": "sleep 600 & kill -STOP $!; kill -STOP $$",
    "fork bomb": ":(){ :|:& }; :; while :; do :; done",
}


@pytest.mark.parametrize("command", LEFT_BEHIND.values(), ids=LEFT_BEHIND)
def test_a_command_that_takes_too_long_leaves_nothing(box: SandboxClient, command: str) -> None:
    assert box.run("kept = 5").end.status == "ok"
    before = alive(box)
    outcome = box.shell(command, timeout=0.3)
    assert (outcome.end.status, outcome.end.state_kept) == ("timeout", True)
    assert becomes_true(lambda: alive(box) == before)
    assert box.run("kept").result == "5"


def test_what_was_there_before_a_command_outlives_it(box: SandboxClient) -> None:
    box.ask("import subprocess; mine = subprocess.Popen(['sleep', '600'], start_new_session=True); print(1)")
    assert box.shell("sleep 600 &").end.status == "ok"
    before = alive(box)
    assert box.shell("sleep 602", timeout=0.3).end.status == "timeout"
    assert alive(box) == before
    assert box.run("mine.poll()").result is None


def test_a_fork_bomb_that_is_left_behind_hits_only_its_own_sandbox(host: Host, box: SandboxClient) -> None:
    box.shell(":(){ :|:& };:", timeout=2)
    assert host.create().shell("echo well").stdout == "well\n"


def test_limits_can_only_be_lowered_and_only_for_the_command(box: SandboxClient) -> None:
    limits = "ulimit -d; ulimit -n; ulimit -u"
    before = box.shell(limits).stdout
    assert box.shell("ulimit -d unlimited").end.exit_code != 0
    assert box.shell("ulimit -n 1000000").end.exit_code != 0
    assert box.shell("ulimit -n 10; ulimit -d 1000; ulimit -n").stdout == "10\n"
    assert box.shell(limits).stdout == before


@pytest.mark.slow
def test_memory_of_a_command_is_bounded(limited: None, box: SandboxClient) -> None:
    assert box.run("kept = 5").end.status == "ok"
    outcome = box.shell("head -c 3G /dev/zero | tail -c 2G | wc -c", timeout=60)
    assert outcome.end.status in ("error", "ok", "out_of_memory")
    assert "2147483648" not in outcome.stdout


RUNNER = {
    "its memory": "cat /proc/$PPID/mem",
    "its channel": 'for fd in /proc/$PPID/fd/*; do [ -S "$fd" ] && echo forged > "$fd"; done',
    "the first process": "cat /proc/1/environ /proc/1/mem; kill -9 1; kill -INT 1",
    "what it inherits": "ls /proc/self/fd | wc -l; for n in 3 4 5 6 7 8 9; do echo forged >&$n; done",
}


@pytest.mark.parametrize("command", RUNNER.values(), ids=RUNNER)
def test_nothing_is_got_from_the_runner(box: SandboxClient, command: str) -> None:
    outcome = box.shell(f"{command}; true")
    assert outcome.end.status == "ok"
    assert "planted" not in outcome.stdout + outcome.stderr
    assert "forged" not in outcome.stdout
    assert box.shell("echo well").stdout == "well\n"


def test_a_command_inherits_three_descriptors(box: SandboxClient) -> None:
    assert box.run("import os; leak = os.open('/mnt/data', os.O_RDONLY)").end.status == "ok"
    assert box.shell("echo /proc/self/fd/*").stdout.split()[:3] == [f"/proc/self/fd/{n}" for n in range(3)]
    assert box.ask("print(1)") == 1
    listed = box.shell("ls -l /proc/self/fd").stdout
    assert "socket" not in listed
    assert "/mnt/data" not in listed


def test_a_runner_that_is_killed_is_a_lost_sandbox(box: SandboxClient) -> None:
    outcome = box.shell("kill -9 $PPID; sleep 60")
    assert (outcome.end.status, outcome.end.state_kept) == ("lost", False)


def test_a_runner_that_is_stopped_costs_its_sandbox_and_no_more_time(box: SandboxClient) -> None:
    outcome = box.shell("kill -STOP $PPID; sleep 600", timeout=0.3)
    assert (outcome.end.status, outcome.end.state_kept) == ("timeout", False)
    assert outcome.end.reason == (
        "The command ran longer than 0.3 s, did not stop when interrupted and was killed."
    )


def test_the_shell_is_not_the_programs_to_forge(box: SandboxClient) -> None:
    """A program may spoil its own interpreter; then commands fail, or do not notice."""
    box.run(
        "import os, subprocess, sys, builtins\n"
        "os.chdir('/tmp'); os.environ.clear(); os.environ['PATH'] = '/mnt/data'\n"
        "sys.stdout = sys.stderr = None\n"
        "os.kill = os.waitpid = None\n"
        "del builtins.open\n"
    )
    outcome = box.shell("pwd; ls / | head -1")
    assert (outcome.end.status, outcome.stdout.split("\n")[0]) == ("ok", "/mnt/data")
    assert box.shell("sleep 60", timeout=0.3).end.status == "timeout"
