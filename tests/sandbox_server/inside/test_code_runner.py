"""The code runner in a real process over a socket pair: state, results, errors, exit codes."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
from inline_snapshot import snapshot

from fumehood.sandbox_server.inside import framing, output_packets
from fumehood.sandbox_server.inside.framing import MessageKind
from fumehood.sandbox_server.inside.runner import tracebacks

SECONDS = 60  # generous: it bounds a hang, it does not measure
_START = "from fumehood.sandbox_server.inside.runner import code_runner; code_runner.main(['{fd}'])"
PRELOADED = "import matplotlib; matplotlib.use('Agg'); import matplotlib.pyplot, pandas; " + _START
SMALL_DISPLAYS = (
    "from fumehood.sandbox_server.inside.runner import output_limits; "
    "output_limits.MAX_DISPLAY_BYTES = 2000; output_limits.MAX_DISPLAYS = 3; " + _START
)


class KernelReply:
    """What one call sent."""

    def __init__(self) -> None:
        self.messages: list[tuple[MessageKind, Any]] = []

    def text(self, kind: MessageKind) -> str:
        return "".join(body for found, body in self.messages if found is kind)

    def all(self, kind: MessageKind) -> list[Any]:
        return [body for found, body in self.messages if found is kind]

    @property
    def out(self) -> str:
        return self.text(MessageKind.STDOUT)

    @property
    def err(self) -> str:
        return self.text(MessageKind.STDERR)

    @property
    def result(self) -> str | None:
        found = self.all(MessageKind.RESULT)
        return found[0]["text/plain"] if found else None

    @property
    def error(self) -> dict[str, str]:
        (found,) = self.all(MessageKind.ERROR)
        return found

    @property
    def traceback(self) -> str:
        return self.error["traceback"]

    @property
    def exit_code(self) -> int:
        return self.messages[-1][1]["exit_code"]

    @property
    def interrupted(self) -> bool:
        return self.messages[-1][1]["interrupted"]

    @property
    def sequence(self) -> list[tuple[str, Any]]:
        """The messages by name, text of one stream joined as far as nothing came between."""
        joined: list[tuple[str, Any]] = []
        for kind, body in self.messages:
            if joined and joined[-1][0] == kind.name and kind in {MessageKind.STDOUT, MessageKind.STDERR}:
                joined[-1] = (kind.name, joined[-1][1] + body)
            else:
                joined.append((kind.name, body))
        return joined


class Kernel:
    """The supervisor's side of one runner."""

    def __init__(self, cwd: Path, *, start: str = _START, **configuration: Any) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", start.format(fd=theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                env={
                    **os.environ,
                    "MPLBACKEND": "Agg",
                    "MPLCONFIGDIR": f"{cwd}-matplotlib",  # the home directory may not be writable
                    "PYTHONPATH": str(Path(framing.__file__).parents[3]),
                },
            )
        self.socket = ours
        self.socket.settimeout(SECONDS)
        self._assembler = framing.MessageAssembler(limit=64 << 20)
        self.frames = 0
        self._pieces: list[tuple[MessageKind, bytes, str]] = []
        self.data_limit: Any = configuration.pop("data_limit", None)
        self.send(MessageKind.CONFIGURE, framing.NO_CALL, {"cwd": str(cwd), **configuration})
        assert self.receive()[0] is MessageKind.CONFIGURED

    def send(self, kind: MessageKind, call: bytes, body: object) -> None:
        for packet in framing.encode_packets(framing.ChannelMessage(kind, call, json.dumps(body).encode())):
            self.socket.send(packet)

    def receive(self) -> tuple[MessageKind, bytes, Any]:
        """The next message; the pieces of a batch one by one."""
        while True:
            if self._pieces:
                return self._pieces.pop(0)
            packet = self.socket.recv(framing.MAX_PACKET)
            if not packet:
                raise EOFError
            message = self._assembler.feed(packet)
            if message is None:
                continue
            self.frames += 1
            if message.kind is MessageKind.OUTPUT:
                self._pieces = [
                    (kind, message.call, text) for kind, text in output_packets.unpack_output(message.body)
                ]
            else:
                text = message.body.decode()
                plain = message.kind in {MessageKind.STDOUT, MessageKind.STDERR}
                return message.kind, message.call, text if plain else json.loads(text)

    def start(self, code: str) -> bytes:
        call = os.urandom(framing.CALL_ID_BYTES)
        limit = {} if self.data_limit is None else {"data_limit": self.data_limit}
        self.data_limit = None  # it comes with the first call
        self.send(MessageKind.EXECUTE, call, {"code": textwrap.dedent(code), **limit})
        return call

    def finish(self, call: bytes, reply: KernelReply | None = None) -> KernelReply:
        reply = reply or KernelReply()
        while not reply.messages or reply.messages[-1][0] is not MessageKind.END:
            kind, sender, body = self.receive()
            assert sender == call
            reply.messages.append((kind, body))
        return reply

    def run(self, code: str) -> KernelReply:
        return self.finish(self.start(code))

    def wait_for_text(self, call: bytes, text: str) -> KernelReply:
        """Read until the program has printed this."""
        reply = KernelReply()
        while text not in reply.out:
            kind, sender, body = self.receive()
            assert sender == call
            assert kind is not MessageKind.END
            reply.messages.append((kind, body))
        return reply

    def interrupt(self, call: bytes, reply: KernelReply | None = None) -> KernelReply:
        """SIGINT to the group every 100 ms until the call has ended, as the supervisor does it."""
        reply = reply or KernelReply()
        deadline = time.monotonic() + SECONDS
        self.socket.settimeout(0.1)
        try:
            while not reply.messages or reply.messages[-1][0] is not MessageKind.END:
                assert time.monotonic() < deadline
                os.killpg(self.process.pid, signal.SIGINT)
                try:
                    while not reply.messages or reply.messages[-1][0] is not MessageKind.END:
                        kind, _, body = self.receive()
                        reply.messages.append((kind, body))
                except TimeoutError:
                    continue
        finally:
            self.socket.settimeout(SECONDS)
        return reply

    def close(self) -> None:
        self.socket.close()
        try:
            self.process.wait(SECONDS)
        finally:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    with Kernel(tmp_path) as kernel:
        yield kernel


# --- state --------------------------------------------------------------------------------------------


def test_a_call_is_a_result_and_an_end(kernel: Kernel) -> None:
    reply = kernel.run("print('before')\nx = 20\nx + 1")
    assert reply.sequence == snapshot(
        [
            ("STDOUT", "before\n"),
            ("RESULT", {"text/plain": "21"}),
            ("END", {"exit_code": 0, "interrupted": False}),
        ]
    )


# Calls one after another, and what a notebook shows of each: what is printed, then the value of the last expression.
TRANSCRIPTS: dict[str, list[tuple[str, str]]] = {
    "state": [
        ("x = 1\ndef f(): return x\nclass A: pass", ""),
        ("x = 41", ""),
        ("f() + 1", "42"),
        ("_", "42"),
        ("A.__module__, __name__, __doc__", "('__main__', '__main__', None)"),
        ("import sys; sys.argv, sys.path[0], '__file__' in globals()", "([''], '', False)"),
    ],
    "main blocks": [("if __name__ == '__main__': print('main')", "main\n")],
    "annotations": [("n: int = 3\n__annotations__", "{'n': <class 'int'>}")],
    "pickled classes": [
        ("import dataclasses, pickle\n@dataclasses.dataclass\nclass Point:\n    x: int", ""),
        ("pickle.loads(pickle.dumps([Point(1), Point]))", "[Point(x=1), <class '__main__.Point'>]"),
    ],
    "future imports": [
        ("from __future__ import annotations", ""),
        ("def f(x: missing): pass\nf.__annotations__", "{'x': 'missing'}"),
    ],
    "working directory": [
        ("import os; start = os.getcwd(); os.mkdir('sub'); os.chdir('sub')", ""),
        ("os.path.relpath(os.getcwd(), start)", "'sub'"),
    ],
    "code larger than a packet": [(f"len({'é' * 200_000!r})", "200000")],
    "sources": [
        ("def f():\n    return 1", ""),
        ("import inspect; inspect.getsource(f)", repr("def f():\n    return 1\n")),
    ],
    "await": [
        ("import asyncio\nawait asyncio.sleep(0, 'value')", "'value'"),
        ("x = await asyncio.sleep(0, 4)\nx + 1", "5"),
        ("async def g():\n    for i in range(3): yield i\n[i async for i in g()]", "[0, 1, 2]"),
        ("async for i in g(): print(i)", "0\n1\n2\n"),
        ("async with asyncio.timeout(5): print('in')", "in\n"),
        ("await asyncio.sleep(0)\nasyncio.create_task(asyncio.sleep(0)).done()", "False"),
    ],
    "tasks go on in the next call that awaits": [
        (
            "import asyncio\nasync def work():\n    await gate.wait(); return 'done'\ngate = asyncio.Event()",
            "",
        ),
        ("task = asyncio.ensure_future(work())\nawait asyncio.sleep(0)", ""),
        ("gate.set(); task.done()", "False"),
        ("await task", "'done'"),
    ],
    "asyncio.run": [
        ("import asyncio\nasyncio.run(asyncio.sleep(0, 3))", "3"),
        ("await asyncio.sleep(0, 4)", "4"),
        ("asyncio.run(asyncio.sleep(0, 5))", "5"),
    ],
}


@pytest.mark.parametrize("calls", TRANSCRIPTS.values(), ids=TRANSCRIPTS)
def test_calls_one_after_another(kernel: Kernel, calls: list[tuple[str, str]]) -> None:
    for code, shown in calls:
        reply = kernel.run(code)
        assert (reply.out + (reply.result or ""), reply.exit_code) == (shown, 0)


def test_modules_written_by_the_program_can_be_imported_at_once(kernel: Kernel, tmp_path: Path) -> None:
    assert kernel.run("import json\nopen('one.py', 'w').write('value = 1');").exit_code == 0
    assert kernel.run("import one; one.value").result == "1"
    (tmp_path / "two.py").write_text("value = 2")
    assert kernel.run("import two; two.value").result == "2"


def test_configuration_sets_environment_and_working_directory(tmp_path: Path) -> None:
    with Kernel(tmp_path, environment={"COLOUR": "green"}) as kernel:
        assert kernel.run("import os; os.environ['COLOUR'], os.getcwd()").result == repr(
            ("green", str(tmp_path))
        )


@pytest.mark.parametrize(
    "damage",
    [
        "sys.settrace(lambda *a: 1/0)",
        "sys.setprofile(lambda *a: 1/0)",
        "sys.setrecursionlimit(60)",
        "import gc; gc.disable()",
        "import builtins; builtins.print = None; del builtins.isinstance; del builtins.any",
        "sys.modules['__main__'] = None",
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)",
        "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())",
        "sys.stdout = sys.stderr = sys.stdin = None",
        "sys.stdout.close(); sys.stderr.close(); sys.stdin.close()",
        "open('json.py', 'w').write('1/0'); open('traceback.py', 'w').write('1/0')",
        "import linecache; linecache.clearcache()",
        "globals().clear()",
        "del __builtins__",
        "import threading; threading.Thread.start = None",
        "import warnings; warnings.simplefilter('error')",
    ],
)
def test_a_program_cannot_spoil_the_next_call(kernel: Kernel, damage: str) -> None:
    kernel.run(f"import sys\n{damage}")
    assert kernel.run("6 * 7").result == "42"
    assert kernel.run("1 / 0").error["name"] == "ZeroDivisionError"
    assert kernel.run("import sys; sys.stdout.write('still here\\n');").out == "still here\n"


def test_the_runner_goes_with_its_supervisor(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path)
    kernel.socket.close()
    assert kernel.process.wait(SECONDS) == 0


# --- results ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "result"),
    [
        ("None", None),
        ("x = 3", None),
        ("3;", None),
        ("(3) ;  # quiet", None),
        ("'a;b'", "'a;b'"),
        ("'é' + ';' # ;", "'é;'"),
        ("1; 2", "2"),
        ("", None),
        ("# nothing", None),
        ("for i in range(3): i", None),
        ("if True:\n    5", None),
        ("(1,\n 2)\n\n# end", "(1, 2)"),
        ("'line'\r\n'break'\r\n", "'break'"),
        ("'\\ud800'", "'\\ud800'"),
    ],
)
def test_the_last_expression(kernel: Kernel, code: str, result: str | None) -> None:
    reply = kernel.run(code)
    assert (reply.result, reply.exit_code) == (result, 0)


def test_a_huge_result_is_cut(tmp_path: Path) -> None:
    with Kernel(tmp_path, output_limit=1000) as kernel:
        result = kernel.run("'x' * 10_000_000").result
    assert result is not None
    assert result.endswith("\n[output truncated: more than 1000 bytes]")
    assert len(result) < 1100


# --- errors -------------------------------------------------------------------------------------------


def test_a_traceback_has_only_the_users_lines(kernel: Kernel) -> None:
    kernel.run("def half(x):\n    return 1 / x")
    reply = kernel.run("half(0)")
    assert [kind for kind, _ in reply.sequence] == ["ERROR", "END"]
    # Which columns are underlined differs between versions of Python.
    assert [line for line in reply.traceback.splitlines() if set(line) - set(" ~^")] == snapshot(
        [
            "Traceback (most recent call last):",
            '  File "<cell 2>", line 1, in <module>',
            "    half(0)",
            '  File "<cell 1>", line 2, in half',
            "    return 1 / x",
            "ZeroDivisionError: division by zero",
        ]
    )


@pytest.mark.parametrize(
    "code",
    [
        "import json; json.loads('{')",
        "import asyncio\nasync def f(): 1/0\nawait f()",
        "import concurrent.futures as c\nwith c.ThreadPoolExecutor() as p: p.submit(lambda: 1/0).result()",
        "input()",
        "import getpass; getpass.getpass()",
        "display(type('A', (), {'__repr__': lambda self: 1/0})())",
        "import threading; threading.Thread(target=print).start(1)",
    ],
)
def test_no_frame_of_the_runner_is_shown(kernel: Kernel, code: str) -> None:
    reply = kernel.run(code)
    assert "fumehood" not in reply.traceback
    assert reply.traceback.startswith('Traceback (most recent call last):\n  File "<cell 1>"')


def test_a_syntax_error(kernel: Kernel) -> None:
    assert kernel.run("x = 1\nif x\n    pass").error == snapshot(
        {
            "name": "SyntaxError",
            "value": "expected ':' (<cell 1>, line 2)",
            "traceback": """\
  File "<cell 1>", line 2
    if x
        ^
SyntaxError: expected ':'
""",
        }
    )
    assert kernel.run("x").error["name"] == "NameError"
    assert kernel.run("print('not run')\nreturn 3").sequence[0][0] == "ERROR"


@pytest.mark.parametrize(
    ("code", "traceback"),
    [
        pytest.param(
            "class A:\n    def __repr__(self): raise ValueError('no')\nA()",
            snapshot("""\
Traceback (most recent call last):
  File "<cell 1>", line 2, in __repr__
    def __repr__(self): raise ValueError('no')
                        ^^^^^^^^^^^^^^^^^^^^^^
ValueError: no
"""),
            id="in a repr",
        ),
        pytest.param(
            "try:\n    {}['a']\nexcept KeyError as e:\n    raise ValueError('b') from e",
            snapshot("""\
Traceback (most recent call last):
  File "<cell 1>", line 2, in <module>
    {}['a']
    ~~^^^^^
KeyError: 'a'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "<cell 1>", line 4, in <module>
    raise ValueError('b') from e
ValueError: b
"""),
            id="chained",
        ),
        pytest.param(
            "async def f():\n    raise ValueError(1)\nawait f()",
            snapshot("""\
Traceback (most recent call last):
  File "<cell 1>", line 3, in <module>
    await f()
  File "<cell 1>", line 2, in f
    raise ValueError(1)
ValueError: 1
"""),
            id="awaited",
        ),
    ],
)
def test_whole_tracebacks(kernel: Kernel, code: str, traceback: str) -> None:
    reply = kernel.run(code)
    assert (reply.traceback, reply.exit_code) == (traceback, 1)


def test_exception_groups(kernel: Kernel) -> None:
    reply = kernel.run("raise ExceptionGroup('several', [ValueError(1), TypeError('two')])")
    assert reply.error["name"] == "ExceptionGroup"
    assert "ValueError: 1" in reply.traceback
    assert "TypeError: two" in reply.traceback


def test_deep_recursion_has_a_short_traceback(kernel: Kernel) -> None:
    reply = kernel.run("def f(n): return g(n)\ndef g(n): return f(n)\nf(1)")
    assert reply.error["name"] == "RecursionError"
    assert 'File "<cell 1>", line 3, in <module>' in reply.traceback
    assert "more frames …]" in reply.traceback
    assert reply.traceback.count("\n") < 150


def test_long_chains_and_messages_are_cut(kernel: Kernel) -> None:
    reply = kernel.run("""
        error = None
        for n in range(500):
            try:
                raise ValueError(n) from error
            except ValueError as e:
                error = e
        raise error
    """)
    assert len(reply.traceback) < 20_000
    reply = kernel.run("raise ValueError('x' * 50_000_000)")
    assert len(reply.error["value"]) < 40_000
    assert len(reply.traceback) < 140_000


@pytest.mark.parametrize("method", ["__str__", "__repr__"])
@pytest.mark.parametrize("how", ["raise KeyError(1)", "sys.exit(3)", "return 3", "self.f()"])
def test_exceptions_that_cannot_be_shown(kernel: Kernel, method: str, how: str) -> None:
    reply = kernel.run(f"""
        import sys
        class Bad(Exception):
            def {method}(self): {how}
            def f(self): self.f()
        raise Bad(Bad())
    """)
    assert (reply.error["name"], reply.exit_code) == ("Bad", 1)
    assert 'File "<cell 1>", line 6, in <module>\n    raise Bad(Bad())\n' in reply.traceback
    assert kernel.run("1").result == "1"


_HOSTILE = {
    "cause": "__cause__ = property(lambda self: sys.exit(3))",
    "context": "__context__ = property(lambda self: 1/0)",
    "notes": "__notes__ = property(lambda self: sys.exit(3))",
    "text": "__str__ = lambda self: type('S', (str,), {'isascii': None, '__len__': None, '__format__': None})('x')",
    "module": "__module__ = property(lambda self: 1/0)",
}


@pytest.mark.parametrize("member", _HOSTILE.values(), ids=_HOSTILE)
@pytest.mark.parametrize("where", ["class", "metaclass"])
def test_exceptions_that_break_the_traceback(kernel: Kernel, member: str, where: str) -> None:
    kernel.run(f"""
        import sys
        class Meta(type):
            {member if where == "metaclass" else "pass"}
            if {where == "metaclass"}: __name__ = property(lambda cls: 1/0)
        class Bad(Exception, metaclass=Meta):
            {member if where == "class" else "pass"}
    """)
    reply = kernel.run("raise Bad('text')")
    assert (reply.error["name"], reply.exit_code) == ("Bad", 1)
    assert "File \"<cell 2>\", line 1, in <module>\n    raise Bad('text')\n" in reply.traceback
    assert kernel.run("1").result == "1"


def test_a_bug_in_the_making_of_a_traceback_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all that can be known without it: where the program failed, and where we did."""

    def broken(*_: object) -> None:
        raise LookupError("ours")

    monkeypatch.setattr(tracebacks, "_tidy", broken)
    try:
        raise ValueError("theirs")
    except ValueError as error:
        report = tracebacks.describe_exception(error)
    assert (report["name"], report["value"]) == ("ValueError", "theirs")
    lines = report["traceback"].splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].endswith("in test_a_bug_in_the_making_of_a_traceback_is_told")
    assert lines[2] == '    raise ValueError("theirs")'
    assert lines[3].startswith(
        "ValueError: <the exception cannot be shown: LookupError at test_code_runner.py:"
    )


def test_warnings_show_the_users_line_in_every_call(kernel: Kernel) -> None:
    code = "import warnings\nwarnings.warn('careful')"
    assert kernel.run(code).err == "<cell 1>:2: UserWarning: careful\n  warnings.warn('careful')\n"
    assert kernel.run(code).err == "<cell 2>:2: UserWarning: careful\n  warnings.warn('careful')\n"


def test_the_last_exception_is_kept_as_in_a_repl_and_no_other_reference(kernel: Kernel) -> None:
    kernel.run("""
        import weakref, sys
        class Big: pass
        def fail():
            global watch
            big = Big()
            watch = weakref.ref(big)
            raise ValueError
        fail()
    """)
    assert kernel.run("type(sys.last_exc), sys.last_exc.__traceback__.tb_frame.f_code.co_name").result == (
        "(<class 'ValueError'>, '<module>')"
    )
    assert kernel.run("1/0").exit_code == 1
    assert kernel.run("watch() is None").result == "True"


def test_lack_of_memory_is_an_error_and_the_state_survives(tmp_path: Path) -> None:
    with Kernel(tmp_path, data_limit=150 << 20) as kernel:
        kernel.run("keep = 5")
        for bomb in (
            "bytearray(10 << 30)",
            "hold = []\nwhile True: hold.append(bytearray(1 << 16))",
            "def f():\n    local = []\n    while True: local.append(object())\nf()",
            "hold = []\nwhile True: hold.append([])",
        ):
            reply = kernel.run(bomb)
            assert (reply.error["name"], reply.exit_code) == ("MemoryError", 1)
            assert kernel.run("hold = None\nkeep").result == "5"


# --- exit codes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "exit_code", "err"),
    [
        ("sys.exit()", 0, ""),
        ("sys.exit(None)", 0, ""),
        ("sys.exit(7)", 7, ""),
        ("sys.exit(-1)", 255, ""),
        ("sys.exit(256)", 0, ""),
        ("sys.exit(True)", 1, ""),
        ("sys.exit('bye')", 1, "bye\n"),
        ("exit(4)", 4, ""),
        ("quit()", 0, ""),
        ("raise SystemExit(5)", 5, ""),
        ("import asyncio; await asyncio.sleep(0); sys.exit(6)", 6, ""),
        ("sys.exit(type('A', (), {'__str__': lambda s: 1/0})())", 1, "<exit message cannot be shown>\n"),
    ],
)
def test_exit_codes(kernel: Kernel, code: str, exit_code: int, err: str) -> None:
    reply = kernel.run(f"import sys\nx = 1\n{code}")
    assert (reply.exit_code, reply.err, reply.all(MessageKind.ERROR)) == (exit_code, err, [])
    assert kernel.run("x").result == "1"


def test_os_exit_ends_the_process(kernel: Kernel) -> None:
    with pytest.raises(EOFError):
        kernel.run("import os; os._exit(3)")
    assert kernel.process.wait(SECONDS) == 3
