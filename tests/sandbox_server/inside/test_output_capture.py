"""Captured output: order, streaming, limits, threads, child processes, replaced streams."""

import codecs
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fumehood.sandbox_server.inside.framing import MAX_BODY, MessageKind
from fumehood.sandbox_server.inside.runner import output_limits
from tests.sandbox_server.inside.test_code_runner import SECONDS, Kernel, kernel

__all__ = ["kernel"]  # the fixture


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with Kernel(tmp_path_factory.mktemp("shared"), output_limit=100_000) as kernel:
        yield kernel


# --- properties ---------------------------------------------------------------------------------------

_TEXT = st.text(st.characters(codec="utf-8"), max_size=30)
_PRINTED = st.tuples(st.sampled_from(["out", "err"]), _TEXT)
_RAW = st.tuples(st.sampled_from([1, 2]), st.one_of(_TEXT.map(str.encode), st.binary(max_size=30)))
_REPLAY = """
import json, os, sys
for where, what in json.loads({data!r}):
    if where == "out": sys.stdout.write(what)
    elif where == "err": sys.stderr.write(what)
    else: os.write(where, bytes(what))
"""


def _replay(
    kernel: Kernel, writes: list[tuple[str | int, str | bytes]]
) -> tuple[str, str, list[tuple[str, str]]]:
    data = json.dumps([(where, what if isinstance(what, str) else list(what)) for where, what in writes])
    reply = kernel.run(_REPLAY.format(data=data))
    assert reply.exit_code == 0
    return reply.out, reply.err, [(name, text) for name, text in reply.sequence if name != "END"]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(_PRINTED, _RAW), max_size=20))
def test_each_stream_comes_back_as_it_was_written(
    shared: Kernel, writes: list[tuple[str | int, str | bytes]]
) -> None:
    expected: dict[int, str] = {1: "", 2: ""}
    decoders = {fd: codecs.getincrementaldecoder("utf-8")("replace") for fd in (1, 2)}
    for where, what in writes:
        fd = {"out": 1, "err": 2}.get(str(where)) or int(where)
        expected[fd] += what if isinstance(what, str) else decoders[fd].decode(what)
    for fd, decoder in decoders.items():
        expected[fd] += decoder.decode(b"", final=True)
    out, err, _ = _replay(shared, writes)
    assert (out, err) == (expected[1], expected[2])


@settings(max_examples=100, deadline=None)
@given(st.lists(_PRINTED, max_size=30))
def test_prints_to_both_streams_keep_their_order(shared: Kernel, writes: list[tuple[str, str]]) -> None:
    expected: list[tuple[str, str]] = []
    for where, text in writes:
        name = "STDOUT" if where == "out" else "STDERR"
        if expected and expected[-1][0] == name:
            expected[-1] = (name, expected[-1][1] + text)
        elif text:
            expected.append((name, text))
    assert _replay(shared, [*writes])[2] == expected


@settings(max_examples=60, deadline=None)
@given(
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=20), st.lists(st.integers(0, 100), max_size=8)
)
def test_characters_split_over_raw_writes_come_back_whole(shared: Kernel, text: str, cuts: list[int]) -> None:
    raw = text.encode()
    edges = sorted({0, len(raw), *(cut % (len(raw) + 1) for cut in cuts)})
    pieces = [raw[a:b] for a, b in itertools.pairwise(edges)]
    assert _replay(shared, [(1, piece) for piece in pieces])[0] == text


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=60_000 // 4), min_size=1, max_size=12))
def test_the_cap_cuts_between_characters_and_marks_once(shared: Kernel, texts: list[str]) -> None:
    whole = "".join(texts).encode()
    out, _, _ = _replay(shared, [("out", text) for text in texts])
    if len(whole) <= 100_000:
        assert out.encode() == whole
    else:
        kept, _, rest = out.rpartition("[output truncated: more than 100000 bytes]\n")
        assert rest == ""
        assert whole.startswith(kept.removesuffix("\n").encode())
        assert 100_000 - 4 <= len(kept.encode()) <= 100_001


# --- order and time -----------------------------------------------------------------------------------


def test_children_and_prints_are_interleaved_as_written(kernel: Kernel) -> None:
    reply = kernel.run("""
        import os, subprocess, sys
        print("1"); os.system("echo 2"); print("3"); subprocess.run(["echo", "4"])
        subprocess.run(["echo", "5"], stdout=sys.stdout); os.write(1, b"6\\n"); print("7", end="")
    """)
    assert reply.out == "1\n2\n3\n4\n5\n6\n7"


def test_what_c_code_prints_is_captured(kernel: Kernel) -> None:
    kernel.run("import ctypes; libc = ctypes.CDLL(None)")
    reply = kernel.run("print(1); libc.printf(b'2\\n'); print(3); libc.printf(b'4');")
    assert reply.out == "1\n2\n3\n4"


def test_output_is_sent_while_the_program_runs(kernel: Kernel, tmp_path: Path) -> None:
    for how in ("print('go')", "import os; os.system('echo go')", "print('go', end='', flush=True)"):
        (tmp_path / "continue").unlink(missing_ok=True)
        call = kernel.start(
            f"import os, time\n{how}\nwhile not os.path.exists('continue'): time.sleep(0.005)"
        )
        reply = kernel.wait_for_text(call, "go")
        (tmp_path / "continue").touch()
        assert kernel.finish(call, reply).exit_code == 0


def test_a_second_line_soon_after_the_first_is_sent_by_the_pump(kernel: Kernel, tmp_path: Path) -> None:
    call = kernel.start(
        "import os, time\nprint(1)\nprint(2)\nwhile not os.path.exists('go'): time.sleep(0.005)"
    )
    reply = kernel.wait_for_text(call, "1\n2\n")
    (tmp_path / "go").touch()
    assert kernel.finish(call, reply).exit_code == 0


def test_many_small_prints_become_few_frames(kernel: Kernel) -> None:
    reply = kernel.run("for i in range(50_000): print('x')")
    assert reply.out == "x\n" * 50_000
    assert len(reply.messages) < 400


@pytest.mark.parametrize(
    "step",
    [
        "print('x', flush=True)",
        "print('x'); print('y', file=sys.stderr)",
        "print('x', flush=True); print('y', file=sys.stderr, flush=True)",
        "sys.stdout.write('x'); sys.stdout.flush(); sys.stderr.flush()",
    ],
)
def test_neither_turns_nor_flushes_make_many_frames(kernel: Kernel, step: str) -> None:
    began, before = time.monotonic(), kernel.frames
    reply = kernel.run(f"import sys\nfor i in range(20_000): {step}")
    assert reply.out.count("x") == 20_000
    paced = (time.monotonic() - began) * (1 / output_limits.QUIET_SECONDS + 1000 / output_limits.TICK_MS)
    assert kernel.frames - before < paced + output_limits.MAX_FLUSHES + 100


def test_what_was_flushed_is_heard_though_the_process_ends(kernel: Kernel) -> None:
    call = kernel.start("import os\nfor i in range(3): print(i, flush=True)\nos._exit(0)")
    assert kernel.wait_for_text(call, "0\n1\n2\n").out == "0\n1\n2\n"


def test_turns_are_bounded_as_bytes_are(tmp_path: Path) -> None:
    with Kernel(tmp_path, output_limit=1000) as kernel:
        code = "import sys\nfor i in range(1000): sys.stdout.write('o'); sys.stderr.write('e')"
        for _ in range(2):
            *pieces, (_, last), _ = kernel.run(code).sequence
            assert [text for _, text in pieces] == (["o", "e"] * 50)[: len(pieces)]
            assert len(pieces) == (1000 - 1) // (output_limits.SWITCH_COST + 1) + 1
            assert last == "[output truncated: more than 1000 bytes]\n"


def test_a_frame_is_never_longer_than_its_limit(kernel: Kernel) -> None:
    reply = kernel.run("print('é' * 400_000, end='')")
    assert reply.out == "é" * 400_000
    assert all(len(text.encode()) <= MAX_BODY for text in reply.all(MessageKind.STDOUT))


def test_a_flood_from_a_child_is_dropped_and_the_code_goes_on(tmp_path: Path) -> None:
    with Kernel(tmp_path, output_limit=1000) as kernel:
        reply = kernel.run("import os\nos.system('head -c 50000000 /dev/zero | tr \"\\\\0\" x')\ndone = 1")
        assert reply.out == "x" * 1000 + "\n[output truncated: more than 1000 bytes]\n"
        assert kernel.run("done").result == "1"
        assert kernel.run("print('fresh')").out == "fresh\n"


def test_a_child_that_never_stops_writing_does_not_hold_up_the_end(kernel: Kernel) -> None:
    reply = kernel.run("import subprocess; child = subprocess.Popen(['yes'])")
    assert reply.exit_code == 0
    assert kernel.run("child.kill(); child.wait();").exit_code == 0
    assert kernel.run("print('quiet')").out == "quiet\n"


# --- the stream objects -------------------------------------------------------------------------------


def test_streams_look_like_streams(kernel: Kernel) -> None:
    reply = kernel.run("""
        import sys
        s = sys.stdout
        s.reconfigure(encoding="latin-1", line_buffering=True)
        facts = (s.encoding, s.errors, s.fileno(), sys.stderr.fileno(), s.isatty(), s.writable(),
                 s.readable(), s.closed, s.line_buffering, s.name, s.mode, s.buffer.fileno(), s is sys.__stdout__)
        s.writelines(["a", "b"]); s.buffer.write("é".encode()[:1]); s.buffer.write("é".encode()[1:])
        s.buffer.flush(); s.write("\\udc80"); s.write(""); s.write("c\\n"), facts
    """)
    assert reply.out == "abé\\udc80c\n"
    assert reply.result == (
        "(2, ('utf-8', 'backslashreplace', 1, 2, False, True, False, False, True, '<stdout>', 'w', 1, True))"
    )
    assert kernel.run("sys.stdout.write(b'x')").error["value"] == "write() argument must be str, not bytes"


def test_redirected_and_wrapped_streams(kernel: Kernel) -> None:
    assert (
        kernel.run("""
        import contextlib, io, sys
        with contextlib.redirect_stdout(io.StringIO()) as caught: print("hidden")
        print("seen", caught.getvalue(), end="")
    """).out
        == "seen hidden\n"
    )
    assert kernel.run("sys.stdout = io.TextIOWrapper(sys.stdout.buffer)\nprint('wrapped')").out == "wrapped\n"
    assert kernel.run("import gc; gc.collect(); print('own')").out == "own\n"
    kernel.run("sys.stdout = open('/dev/null', 'w')")
    assert kernel.run("print('back')").out == "back\n"


@pytest.mark.parametrize(
    "damage",
    [
        "os.close(1); os.close(2)",
        "os.dup2(os.open('/dev/null', os.O_WRONLY), 1); os.dup2(1, 2)",
        "sys.stdout.close(); open(1, 'w').close(); open(2, 'w').close()",
        "os.closerange(0, 3)",
    ],
)
def test_descriptors_are_there_again_in_the_next_call(kernel: Kernel, damage: str) -> None:
    assert kernel.run(f"import os, sys\nprint('a', flush=True)\n{damage}\nprint('b')").out == "a\nb\n"
    assert kernel.run("os.system('cat')").result == "0"
    assert kernel.run("os.system('echo raw; echo raw >&2'); print('c')").sequence[:2] in (
        [("STDOUT", "raw\nc\n"), ("STDERR", "raw\n")],
        [("STDOUT", "raw\n"), ("STDERR", "raw\n")],
        [("STDERR", "raw\n"), ("STDOUT", "raw\nc\n")],
    )


def test_a_program_that_closes_everything_takes_the_runner_along(tmp_path: Path) -> None:
    with Kernel(tmp_path) as kernel:
        with pytest.raises(EOFError):
            kernel.run("import os; os.closerange(0, 1000)\nprint('x')")
        assert kernel.process.wait(SECONDS) == 1


def test_a_program_that_closes_the_pipes_loses_only_raw_output(kernel: Kernel) -> None:
    code = "import os\nfor fd in range(3, 20):\n    try:\n        s = os.readlink(f'/proc/self/fd/{fd}')\n"
    code += "        if 'pipe' in s: os.close(fd)\n    except OSError: pass\nprint('a')"
    assert kernel.run(code).out == "a\n"
    assert kernel.run("os.system('echo b'); print('c')").out == "b\nc\n"


# --- no keyboard --------------------------------------------------------------------------------------


def test_there_is_no_keyboard(kernel: Kernel) -> None:
    kernel.run("import getpass, io, os, sys")
    assert kernel.run("input('name?')").error["value"] == (
        "input() is not available: the code runs without a keyboard; "
        "put the value into the code or read it from a file"
    )
    assert kernel.run("getpass.getpass()").error["value"].startswith("getpass() is not available")
    assert kernel.run("sys.stdin.read(), os.read(0, 10)").result == "('', b'')"
    assert kernel.run("os.system('cat')").result == "0"
    assert kernel.run("sys.stdin = io.StringIO('typed\\n'); input()").result == "'typed'"


# --- threads ------------------------------------------------------------------------------------------


def test_a_thread_that_outlives_its_call_is_heard_no_more(kernel: Kernel) -> None:
    kernel.run("""
        import threading
        go, done = threading.Event(), threading.Event()
        def late():
            print("early")
            ready.set(); go.wait(); print("late"); display(1)
            inner = threading.Thread(target=print, args=("inner",)); inner.start(); inner.join()
            done.set()
        ready = threading.Event()
        threading.Thread(target=late).start()
        ready.wait()
    """)
    assert kernel.run("go.set(); done.wait(); print('mine')").sequence == [
        ("STDOUT", "mine\n"),
        ("END", {"exit_code": 0, "interrupted": False}),
    ]


def test_a_thread_pool_speaks_for_the_call_that_gave_it_the_task(kernel: Kernel) -> None:
    kernel.run("""
        import concurrent.futures, threading, time
        pool = concurrent.futures.ThreadPoolExecutor(1)
        pool.submit(print, "one").result()
    """)
    assert kernel.run("pool.submit(print, 'two').result()").out == "two\n"
    kernel.run("go = threading.Event(); old = pool.submit(lambda: (go.wait(), print('three'))); 0")
    assert kernel.run("go.set(); old.result(); print('four')").out == "four\n"


def test_an_exception_in_a_thread_is_printed(kernel: Kernel) -> None:
    reply = kernel.run("import threading\nt = threading.Thread(target=lambda: 1/0); t.start(); t.join()")
    assert "ZeroDivisionError: division by zero" in reply.err
    assert reply.exit_code == 0


def test_the_runner_adds_no_thread_that_a_program_could_see(kernel: Kernel) -> None:
    assert kernel.run("import threading; threading.active_count()").result == "1"


def test_many_threads_lose_nothing(kernel: Kernel) -> None:
    reply = kernel.run("""
        import threading
        def work(name):
            for i in range(500): print(f"{name}-{i}\\n", end="")
        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for t in threads: t.start()
        for t in threads: t.join()
    """)
    assert sorted(reply.out.splitlines()) == sorted(f"{n}-{i}" for n in range(8) for i in range(500))


def test_printing_finalisers_and_signal_handlers_do_not_lock_up(kernel: Kernel) -> None:
    reply = kernel.run("""
        import signal, gc
        class Loud:
            def __init__(self): self.me = self
            def __del__(self): print("d")
        signal.signal(signal.SIGALRM, lambda *a: print("s"))
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        for i in range(20_000):
            Loud(); print("x")
        signal.setitimer(signal.ITIMER_REAL, 0)
        gc.collect()
        print("end")
    """)
    # A print is two writes, so that lines may be cut; but nothing is lost.
    assert reply.out.count("x") == 20_000
    assert reply.out.count("d") == 20_001
    assert reply.out.endswith("end\n")


def test_output_between_calls_is_dropped(kernel: Kernel, tmp_path: Path) -> None:
    kernel.run("""
        import subprocess
        child = subprocess.Popen("while [ ! -e go ]; do sleep 0.01; done; echo late; touch went", shell=True)
    """)
    (tmp_path / "go").touch()
    deadline = time.monotonic() + SECONDS
    while not (tmp_path / "went").exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert kernel.run("print('now')").out == "now\n"


# --- child processes ----------------------------------------------------------------------------------


def test_a_forked_child_writes_in_order_and_never_answers_for_its_parent(kernel: Kernel) -> None:
    reply = kernel.run("""
        import os, sys
        print("before")
        if os.fork() == 0:
            print("child"); display("shown"); sys.exit(7)
        print("status", os.waitstatus_to_exitcode(os.wait()[1]))
    """)
    assert reply.sequence == [
        ("STDOUT", "before\nchild\n'shown'\nstatus 7\n"),
        ("END", {"exit_code": 0, "interrupted": False}),
    ]
    reply = kernel.run("if os.fork() == 0: 1/0\nos.waitstatus_to_exitcode(os.wait()[1])")
    assert reply.result == "1"
    assert 'File "<cell 2>", line 1, in <module>' in reply.err
    assert reply.all(MessageKind.ERROR) == []


def test_no_descriptor_of_the_runner_reaches_another_program(kernel: Kernel) -> None:
    reply = kernel.run("""
        import os, subprocess
        subprocess.run(["ls", "-l", "/proc/self/fd"], close_fds=False, stdout=open("list", "w"))
        print(open("list").read())
        if os.fork() == 0:
            print([os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if n > "2"][:-1])
            os._exit(0)
        os.wait();
    """)
    assert "socket" not in reply.out
    assert "eventfd" not in reply.out


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing(kernel: Kernel, tmp_path: Path, method: str) -> None:
    (tmp_path / "work.py").write_text(
        "import sys\ndef double(x):\n    sys.stdout.write(f'worker {x}\\n')\n    return 2 * x\n"
    )
    reply = kernel.run(f"""
        import multiprocessing, work
        with multiprocessing.get_context({method!r}).Pool(2) as pool:
            found = pool.map(work.double, [1, 2, 3]), pool.map(abs, [-1])
            pool.close(); pool.join()
        found
    """)
    assert reply.err == ""
    assert reply.result == "([2, 4, 6], [1])"
    assert sorted(reply.out.splitlines()) == ["worker 1", "worker 2", "worker 3"]


def test_multiprocessing_by_fork_knows_the_cells_own_functions(kernel: Kernel) -> None:
    reply = kernel.run("""
        import concurrent.futures, multiprocessing
        class Box:
            def __init__(self, x): self.x = x
        def double(box):
            print("worker"); return Box(2 * box.x)
        context = multiprocessing.get_context("fork")
        with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
            found = [box.x for box in pool.map(double, [Box(1), Box(2)])]
        process = context.Process(target=double, args=(Box(3),)); process.start(); process.join()
        found, process.exitcode
    """)
    assert reply.err == ""
    assert reply.result == "([2, 4], 0)"
    assert reply.out == "worker\n" * 3
