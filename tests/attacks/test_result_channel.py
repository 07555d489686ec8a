"""Attacks on the result channel: forged, late, trickled, oversized.

Code shares a process with the runner, so it can always lie about itself, e.g. end its own call early with an
output of its choice. What it must not be able to do: end or fill a call other than the running one, keep a
call open past its deadline, choose a status that is the supervisor's to give, or cost the supervisor memory,
descriptors or time without bound.
"""

from textwrap import dedent

import pytest

from tests.attacks.conftest import Host
from tests.support.driver_client import Outcome, SandboxClient

FRAMES = """
import struct, sys, time, threading
fd = channel_number()
channel = socket.socket(fileno=os.dup(fd))
(CONFIGURE, EXECUTE, FAILED, JAILED, CONFIGURED, STDOUT, STDERR, DISPLAY, RESULT, ERROR, END, OUTPUT) = (
    1, 2, 14, 15, 17, 18, 19, 20, 21, 22, 23, 24)
def frame(kind, call_id, body=b"", flags=0):
    return struct.pack("!BB16s", kind, flags, call_id) + body
def current():
    "The running call's id, from the runner's own memory."
    return sys.__stdout__._output._call
def end(code=0):
    return b'{"exit_code":%d,"interrupted":false}' % code
"""


@pytest.fixture
def forger(box: SandboxClient) -> SandboxClient:
    assert box.run(FRAMES).end.status == "ok"
    return box


def lost(outcome: Outcome, words: str) -> bool:
    end = outcome.end
    return (end.status, end.exit_code, end.state_kept) == ("lost", -1, False) and words in end.reason


REFUSED = {
    "guessed call": ("channel.send(frame(END, b'\\0' * 16, end()))", "not running"),
    "another call": ("channel.send(frame(END, os.urandom(16), end()))", "not running"),
    "output of no call": ("channel.send(frame(STDOUT, bytes(16), b'x'))", "not running"),
    "JAILED": ("socket.send_fds(channel, [frame(JAILED, bytes(16))], [0, 1])", "not running"),
    "JAILED for this call": ("socket.send_fds(channel, [frame(JAILED, current())], [0, 1])", "JAILED"),
    "a kind that was": ("channel.send(frame(16, current(), b'{}'))", "unknown frame kind 16"),
    "CONFIGURED": ("channel.send(frame(CONFIGURED, current(), b'{}'))", "CONFIGURED"),
    "FAILED": ("channel.send(frame(FAILED, current(), b'no'))", "FAILED"),
    "EXECUTE": ("channel.send(frame(EXECUTE, current(), b'{}'))", "EXECUTE"),
    "unknown kind": ("channel.send(frame(99, current()))", "unknown frame kind"),
    "unknown flag": ("channel.send(frame(STDOUT, current(), b'x', 8))", "unknown frame flags"),
    "short": ("channel.send(b'x')", "a packet of 1 bytes"),
    "garbage": ("channel.send(b'\\xff' * 5000)", "unknown frame kind"),
    "too long": ("channel.send(frame(STDOUT, current(), b'x' * 70000))", "a packet of"),
    "not text": ("channel.send(frame(STDOUT, current(), b'\\xff\\xfe'))", "malformed STDOUT"),
    "END that is no JSON": ("channel.send(frame(END, current(), b'{'))", "malformed END"),
    "END of the wrong type": ("channel.send(frame(END, current(), b'[1]'))", "malformed END"),
    "END with a text": (
        'channel.send(frame(END, current(), b\'{\\"exit_code\\":\\"0\\",\\"interrupted\\":false}\'))',
        "malformed END",
    ),
    "RESULT of the wrong type": (
        "channel.send(frame(RESULT, current(), b'{\\\"a\\\":1}'))",
        "malformed RESULT",
    ),
    "ERROR without fields": ("channel.send(frame(ERROR, current(), b'{}'))", "malformed ERROR"),
    "deeply nested": ("channel.send(frame(DISPLAY, current(), b'[' * 60000))", "malformed DISPLAY"),
    "half a surrogate": (
        "channel.send(frame(DISPLAY, current(), b'{\"a\":\"' + bytes([92]) + b'ud800\"}'))",
        "malformed DISPLAY",
    ),
    "unfinished and small": ("channel.send(frame(STDOUT, current(), b'x', 1))", "unfinished STDOUT frame"),
    "another inside": (
        "channel.send(frame(STDOUT, current(), b'x' * 65536, 1)); channel.send(frame(END, current(), end()))",
        "inside an unfinished",
    ),
    "endless message": ("while True: channel.send(frame(DISPLAY, current(), b'x' * 65536, 1))", "more than"),
    "frame flood": ("while True: channel.send(frame(STDOUT, current()))", "more messages"),
    "batch that is no batch": ("channel.send(frame(OUTPUT, current(), b'x' * 100))", "malformed OUTPUT"),
    "batch of one": (
        "channel.send(frame(OUTPUT, current(), bytes([1, 0, 0, 0, 1, 65])))",
        "malformed OUTPUT",
    ),
    "batch flood": (
        "while True: channel.send(frame(OUTPUT, current(), bytes([1, 0, 0, 0, 1, 65]) * 10000))",
        "more output events",
    ),
    "output flood": ("while True: channel.send(frame(STDERR, current(), b'x' * 65536))", "more output"),
}


@pytest.mark.parametrize(("attack", "words"), REFUSED.values(), ids=REFUSED)
def test_frames_that_the_runner_never_sends(
    host: Host, forger: SandboxClient, attack: str, words: str
) -> None:
    """They end the sandbox, and the reason names what was wrong."""
    outcome = forger.run(f"{attack}\ntime.sleep(20)", timeout=30)
    assert lost(outcome, "broke the protocol"), outcome.end
    assert words in outcome.end.reason
    assert forger.gone is not None


def test_an_empty_packet_is_not_taken_for_more(forger: SandboxClient) -> None:
    assert lost(forger.run("channel.send(b'')\ntime.sleep(20)"), "")


def test_a_forged_end_ends_only_its_own_call(host: Host, forger: SandboxClient) -> None:
    """With the right id, found in memory: the call ends early, as the code could have done by returning."""
    outcome = forger.run("channel.send(frame(END, current(), end(3)))\ntime.sleep(1)", timeout=30)
    assert (outcome.end.status, outcome.end.exit_code) == ("error", 3)
    # The code went on behind its call's back: its own true end is now one too many.
    later = forger.run("1 + 1", timeout=30)
    assert lost(later, "broke the protocol"), later.end
    host.check()


@pytest.mark.parametrize(
    "code",
    ["-1", "-9", "256", "100000", "1" + "0" * 30, "1" + "0" * 5000],
    ids=["lost", "negative", "wide", "wider", "30 digits", "5000 digits"],
)
def test_a_forged_exit_code_stays_in_range(forger: SandboxClient, code: str) -> None:
    """-1 means time-out or loss, and these are the supervisor's to say."""
    body = f'{{"exit_code":{code},"interrupted":false}}'
    outcome = forger.run(
        f"channel.send(frame(END, current(), {body!r}.encode()))\ntime.sleep(20)", timeout=30
    )
    assert lost(outcome, "") or 0 <= outcome.end.exit_code <= 255, outcome.end


def test_a_forged_interruption_is_not_one(forger: SandboxClient) -> None:
    body = b'{"exit_code":0,"interrupted":true}'
    outcome = forger.run(f"channel.send(frame(END, current(), {body!r}))\ntime.sleep(1)")
    assert outcome.end.status in ("ok", "error", "lost")


def test_frames_after_the_end(host: Host, forger: SandboxClient) -> None:
    """A thread that talks between calls, with the id of the call that is over."""
    program = """
        old = current()
        def late():
            while current() == old: time.sleep(0.001)
            time.sleep(0.3)
            channel.send(frame(STDOUT, old, b"late"))
        threading.Thread(target=late, daemon=True).start()
    """
    assert forger.run(dedent(program)).end.status == "ok"
    outcome = forger.run("time.sleep(5)\nprint('reached')")
    assert lost(outcome, "broke the protocol")
    assert "late" not in outcome.stdout
    assert "reached" not in outcome.stdout


def test_an_id_of_an_old_call_is_worthless(forger: SandboxClient) -> None:
    forger.run("old = current()")
    outcome = forger.run("channel.send(frame(END, old, end()))\ntime.sleep(20)")
    assert lost(outcome, "not running")


def test_a_trickle_does_not_outlast_the_deadline(host: Host, forger: SandboxClient) -> None:
    """Parts of a message that is never finished: the call's time is over when it is over."""
    program = """
        import signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        while True:
            channel.send(frame(DISPLAY, current(), b" " * 65536, 1)); time.sleep(0.2)
    """
    outcome = forger.run(dedent(program), timeout=1)
    assert outcome.end.status == "timeout"
    assert not outcome.end.state_kept
    assert outcome.end.duration_ms >= 1000


def test_an_unfinished_message_does_not_poison_the_next_call(forger: SandboxClient) -> None:
    outcome = forger.run("channel.send(frame(STDOUT, current(), b'x' * 65536, 1))")
    assert lost(outcome, "inside an unfinished")


@pytest.mark.parametrize(
    "close", ["os.close(fd); channel.close()", "channel.shutdown(2)", "os.closerange(3, 100)"]
)
def test_a_closed_channel_ends_the_sandbox(host: Host, forger: SandboxClient, close: str) -> None:
    outcome = forger.run(f"{close}\ntime.sleep(20)", timeout=30)
    assert outcome.end.status == "lost"
    assert not outcome.end.state_kept
    assert outcome.end.exit_code == -1


def test_a_stolen_request_is_the_sandboxes_own_affair(host: Host, forger: SandboxClient) -> None:
    """A thread that reads the channel instead of the runner gets code of the same tenant, and no more."""
    program = """
        def thief():
            channel.recv(100000)
            time.sleep(600)
        threading.Thread(target=thief, daemon=True).start()
        time.sleep(0.2)
    """
    forger.run(dedent(program))
    outcomes = [forger.run("1 + 1", timeout=1)]
    assert outcomes[0].end.status in ("timeout", "ok")
    host.check()


def test_descriptors_over_the_channel(host: Host, forger: SandboxClient) -> None:
    """The supervisor takes none after the start: the kernel throws them away on arrival."""
    before = host.driver.info()["open_files"]
    program = """
        import array
        null = os.open("/dev/null", os.O_RDONLY)
        load = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [null] * 200))]
        refused = 0
        for _ in range(500):
            try: channel.sendmsg([frame(STDOUT, current(), b"x")], load)
            except OSError as error: refused += 1
        report(refused)
    """
    outcome = forger.run(dedent(program))
    assert outcome.end.status == "ok"
    assert outcome.stdout.count("x") > 0
    assert host.driver.info()["open_files"] <= before + 8
    assert host.create().run("1 + 1").result == "2"


def test_children_cannot_talk_for_the_runner(forger: SandboxClient) -> None:
    """A child that kept the channel is no better placed than the code itself."""
    program = """
        child = os.fork()
        if child == 0:
            channel.send(frame(STDOUT, current() or bytes(16), b"from a child"))
            os._exit(0)
        os.waitpid(child, 0)
        time.sleep(0.5)
    """
    outcome = forger.run(dedent(program))
    assert outcome.end.status in ("ok", "lost")
    if outcome.end.status == "lost":
        assert "broke the protocol" in outcome.end.reason
