"""Attacks by plain code: output, loops, standard input."""

from textwrap import dedent

import pytest

from tests.attacks.conftest import Host
from tests.support.driver_client import SandboxClient

MIB = 1 << 20

ENDLESS = {
    "print": "while True: print('x' * 1000)",
    "no newline": "import sys\nwhile True: sys.stdout.write('x' * 100)",
    "stderr": "import sys\nwhile True: print('x' * 1000, file=sys.stderr)",
    "descriptor": "while True: os.write(1, b'x' * 65536)",
    "child": "os.system('yes')",
    "threads": """if True:
        import threading, time
        def chatter():
            while True: print("x" * 999)
        for _ in range(4): threading.Thread(target=chatter, daemon=True).start()
        time.sleep(600)
    """,
}


@pytest.mark.parametrize("program", ENDLESS.values(), ids=ENDLESS)
def test_endless_output_is_cut_and_stopped(host: Host, box: SandboxClient, program: str) -> None:
    outcome = box.run(program, timeout=1)
    assert outcome.end.status == "timeout"
    text = outcome.stdout + outcome.stderr
    assert len(text) < 2 * MIB
    assert "[output truncated: more than 1048576 bytes]" in text


def test_one_huge_output(box: SandboxClient) -> None:
    outcome = box.run("print('x' * (200 << 20))", timeout=60)
    assert outcome.end.status == "ok"
    assert outcome.end.state_kept
    assert len(outcome.stdout) < 2 * MIB
    assert "truncated" in outcome.stdout


HUGE = {
    "result": "'x' * (64 << 20)",
    "repr": "class Big:\n    def __repr__(self): return 'x' * (64 << 20)\nBig()",
    "html": "class Big:\n    def _repr_html_(self): return '<p>' * (32 << 20)\nBig()",
    "display": "display('x' * (64 << 20))",
    "many displays": "for _ in range(10000): display('x' * 10000)",
    "many figures": "import matplotlib.pyplot as plt\nfor _ in range(8): plt.figure(); plt.plot([1])",
    "exception": "raise ValueError('x' * (64 << 20))",
    "exception name": "raise type('x' * (16 << 20), (Exception,), {})('y')",
    "deep exception": """if True:
        def f(n):
            try: f(n - 1) if n else 1 / 0
            except Exception as e: raise ValueError("x" * 10000) from e
        f(300)
    """,
}


@pytest.mark.parametrize("program", HUGE.values(), ids=HUGE)
def test_huge_things_to_show(host: Host, box: SandboxClient, program: str) -> None:
    """Whatever the size, the call ends as the code's, within the bounds of what one call may show."""
    outcome = box.run(program, timeout=60)
    assert outcome.end.status in ("ok", "error"), outcome.end
    assert outcome.end.state_kept
    size = sum(len(repr(event)) for event in outcome.events)
    assert size < 50 * MIB
    assert box.run("1 + 1").result == "2"


STUBBORN = {
    "ignores SIGINT": "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass",
    "blocks all signals": """if True:
        import signal
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True: pass
    """,
    "catches everything": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "in C": "import re\nre.match('(a+)+b', 'a' * 64)",
    "finaliser": "class X:\n    def __del__(self):\n        while True: pass\nx = X()\ndel x",
    "recursive handler": """if True:
        import signal
        def again(*_):
            while True: pass
        signal.signal(signal.SIGINT, again)
        while True: pass
    """,
    "stopped": "import signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "vfork": "import subprocess\nsubprocess.run(['sh', '-c', 'trap \"\" INT; while :; do :; done'])",
    "exiting forever": "while True:\n    try: raise SystemExit\n    except SystemExit: pass",
}


@pytest.mark.parametrize("program", STUBBORN.values(), ids=STUBBORN)
def test_loops_that_will_not_stop(host: Host, program: str) -> None:
    box = host.create()
    outcome = box.run(program, timeout=0.5)
    assert (outcome.end.status, outcome.end.exit_code) == ("timeout", -1)
    assert outcome.end.duration_ms < 20_000
    if outcome.end.state_kept:
        assert box.run("1 + 1").result == "2"
    else:
        assert "killed" in outcome.end.reason


def test_an_interrupted_call_keeps_its_variables(box: SandboxClient) -> None:
    running = box.start(
        "kept = 41\nprint('on', flush=True)\nimport time\nwhile True: time.sleep(1)", timeout=60
    )
    running.until_stdout("on")
    box.interrupt()
    outcome = running.outcome()
    assert outcome.end.status == "interrupted"
    assert outcome.end.state_kept
    assert box.run("kept + 1").result == "42"


def test_interrupting_a_stubborn_call_ends_the_sandbox(box: SandboxClient) -> None:
    code = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('on', flush=True)\nwhile True: pass"
    running = box.start(code, timeout=60)
    running.until_stdout("on")
    box.interrupt()
    outcome = running.outcome()
    assert (outcome.end.status, outcome.end.state_kept) == ("interrupted", False)


STDIN = {
    "input": ("input()", "EOFError"),
    "getpass": ("import getpass\ngetpass.getpass()", "EOFError"),
    "sys.stdin": ("import sys\nassert sys.stdin.read() == ''", None),
    "descriptor": ("assert os.read(0, 10) == b''", None),
    "child": ("import subprocess\nassert subprocess.run(['cat'], capture_output=True).stdout == b''", None),
    "breakpoint": ("breakpoint()", "BdbQuit"),
}


@pytest.mark.parametrize(("program", "error"), STDIN.values(), ids=STDIN)
def test_standard_input_is_empty(box: SandboxClient, program: str, error: str | None) -> None:
    outcome = box.run(program, timeout=20)
    assert outcome.error == error
    assert outcome.end.status == ("ok" if error is None else "error")


def test_late_output_of_threads_belongs_to_no_later_call(box: SandboxClient) -> None:
    program = """
        import threading, time
        def chatter():
            while True: print("chatter", flush=True); time.sleep(0.01)
        threading.Thread(target=chatter, daemon=True).start()
    """
    box.run(dedent(program))
    outcome = box.run("import time; time.sleep(0.3); print('mine')")
    assert outcome.stdout == "mine\n"


def test_exit_does_not_end_the_sandbox(box: SandboxClient) -> None:
    outcome = box.run("kept = 1\nimport sys; sys.exit(3)")
    assert (outcome.end.status, outcome.end.exit_code, outcome.end.state_kept) == ("error", 3, True)
    assert box.run("kept").result == "1"


def test_strange_exit_codes_stay_in_range(box: SandboxClient) -> None:
    for code in ("-1", "256", "10**40", "'text'", "None", "3.5"):
        end = box.run(f"raise SystemExit({code})").end
        assert end.state_kept, code
        assert 0 <= end.exit_code <= 255, code


def test_huge_code(box: SandboxClient) -> None:
    outcome = box.run("x = '" + "a" * (4 * MIB) + "'\nlen(x)", timeout=60)
    assert outcome.result == str(4 * MIB)
