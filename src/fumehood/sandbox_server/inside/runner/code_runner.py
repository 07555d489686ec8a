"""Runs the calls of a program one after another in this process.

Everything is imported at import of this module: the zygote imports it once for all sandboxes, and a program may put its
own `json.py` into the working directory.
"""

import asyncio
import builtins
import contextlib
import ctypes
import gc
import getpass
import importlib
import io
import json
import linecache
import mmap
import multiprocessing.process
import os
import re
import resource
import signal
import socket
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

from fumehood.sandbox_server.inside import framing, layout
from fumehood.sandbox_server.inside.runner import (
    captured_streams,
    cell_compiler,
    display,
    interrupts,
    output_capture,
    output_limits,
    shell_commands,
    tracebacks,
)

globals()["__builtins__"] = dict(vars(builtins))  # see output_capture.py

_REQUEST_LIMIT = 256 << 20
_CALL_KINDS = (framing.MessageKind.EXECUTE, framing.MessageKind.COMMAND)
_MEMORY_RESERVE_BYTES = (
    8 << 20
)  # address space released when memory runs out, so that the error can be reported
_MIN_RECURSION_LIMIT = 1000
# The C function: json.loads() needs builtins that a program may have replaced.
_decoder: Any = json.JSONDecoder()
_decode_json: Callable[[str, int], tuple[dict[str, Any], int]] = _decoder.scan_once
# The functions of `signal` without their enum conversions, which take longer than the system calls.
_signal: Any = importlib.import_module("_signal")
_set_handler: Callable[[int, Callable[..., None]], object] = _signal.signal
_mask_signals: Callable[[int, tuple[int, ...]], object] = _signal.pthread_sigmask
_FORK_WARNING = "This process .* is multi-threaded, use of (fork|forkpty)"
re.compile(_FORK_WARNING, re.IGNORECASE)  # into the cache of `re`, for the warnings filter
_libc = ctypes.CDLL(None)
_flush_c: Callable[[None], int] = _libc.fflush
_LINE_BUFFERED = 1  # _IOLBF of stdio.h
_WARM_UP_CONFIGURATION = {"environment": dict[str, str](), "cwd": "/"}
_NO_KEYBOARD = "the code runs without a keyboard; put the value into the code or read it from a file"


def main(argv: list[str]) -> NoReturn:
    """Serve on the descriptor whose number is the only argument; the entry point of a fresh interpreter."""
    fd = int(argv[0])
    os.set_inheritable(fd, False)
    CodeRunner().serve(socket.socket(fileno=fd))


class CodeRunner:
    """Runs calls. Created once in the zygote, so that this work is shared; `serve` is called in each fork."""

    def __init__(self) -> None:
        self._guard = interrupts.InterruptGuard()
        self._wrapped_forks = self._guard.wrap_forks()
        self._output = output_capture.OutputQueue(self._guard)
        self._stdout = captured_streams.CapturedStream(self._output, framing.MessageKind.STDOUT)
        self._stderr = captured_streams.CapturedStream(self._output, framing.MessageKind.STDERR)
        self._displays = display.DisplayPublisher(self._output)
        self._commands = shell_commands.ShellCommandRunner(self._guard)
        self._cell_compiler = cell_compiler.CellCompiler()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._memory_reserve: mmap.mmap | None = None
        self._main_module = types.ModuleType("__main__")
        self._globals = vars(self._main_module)
        self._globals["__builtins__"] = builtins
        self._stdin = _open_stdin()
        builtins.input = self._make_input(builtins.input)
        getpass.getpass = _refuse_getpass
        for name in ("exit", "quit"):
            setattr(builtins, name, _ExitCommand(name))
        builtins.__dict__["display"] = self._displays.display
        # Flush output of C code by lines; libc would buffer it.
        _libc.setvbuf(ctypes.c_void_p.in_dll(_libc, "stdout"), None, _LINE_BUFFERED, 0)
        self._displays.hook_matplotlib()
        display.install_ipython_stub(self._displays)
        cell_compiler.install_shell_builtin()
        # The pump is a thread, but holds no lock that a forked child could miss.
        warnings.filterwarnings("ignore", _FORK_WARNING, DeprecationWarning)

    def serve(self, channel: socket.socket) -> NoReturn:
        """Serve requests until the supervisor closes the channel."""
        channel.settimeout(None)
        channel.set_inheritable(False)
        self._channel = channel
        os.fork, os.forkpty = self._wrapped_forks
        _set_handler(signal.SIGINT, self._guard.handle_sigint)
        self._output.open_channel(channel)
        self._known_paths = len(sys.path_importer_cache)
        self._set_up_interpreter()
        # Not in the zygote: later forks could read it.
        multiprocessing.process.current_process().authkey = os.urandom(32)
        self._serve_requests()

    def warm_up(self, sources: list[str]) -> None:
        """Run these programs as in a sandbox, drop their output and reset all state."""
        channel, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        names = ("stdout", "stderr", "displayhook")
        before = {name: getattr(sys, name) for name in names}
        modules, argv = sys.modules["__main__"], sys.argv
        assembler = framing.MessageAssembler(limit=_REQUEST_LIMIT)
        with channel, peer, self._output.warm_up(channel):
            peer.setblocking(False)
            self._channel = channel
            self._known_paths = len(sys.path_importer_cache)
            for source in sources:
                for kind, request in (
                    (framing.MessageKind.CONFIGURE, _WARM_UP_CONFIGURATION),
                    (framing.MessageKind.EXECUTE, {"code": source}),
                ):
                    for packet in framing.encode_packets(
                        framing.ChannelMessage(kind, framing.NO_CALL, json.dumps(request).encode())
                    ):
                        peer.send(packet)
                    self._handle_packet(assembler)
                with contextlib.suppress(BlockingIOError):
                    while peer.recv(framing.MAX_PACKET):
                        pass
        for name, value in before.items():
            setattr(sys, name, value)
        sys.modules["__main__"], sys.argv = modules, argv
        _set_handler(signal.SIGINT, signal.default_int_handler)
        self._reset_state()

    def _reset_state(self) -> None:
        for name in ("last_exc", "last_type", "last_value", "last_traceback"):
            sys.__dict__.pop(name, None)
        builtins.__dict__.pop("_", None)
        linecache.clearcache()
        self._globals.clear()
        self._globals.update({"__name__": "__main__", "__builtins__": builtins})
        for name in ("__doc__", "__package__", "__loader__", "__spec__"):
            self._globals[name] = None
        self._cell_compiler = cell_compiler.CellCompiler()
        if self._memory_reserve is not None:
            self._memory_reserve.close()
            self._memory_reserve = None

    def _set_up_interpreter(self) -> None:
        """Make the interpreter look like an interactive one."""
        sys.modules["__main__"] = self._main_module
        sys.argv = [""]
        if sys.path[:1] != [""]:
            sys.path.insert(0, "")
        sys.stdin = sys.__stdin__ = self._stdin
        sys.__stdout__ = self._stdout
        sys.__stderr__ = self._stderr
        self._restore_streams()

    # --- requests -----------------------------------------------------------------------------------

    def _serve_requests(self) -> NoReturn:
        assembler = framing.MessageAssembler(limit=_REQUEST_LIMIT)
        while self._handle_packet(assembler):
            pass
        os._exit(0)  # the supervisor is gone; the program ends with it

    def _handle_packet(self, assembler: framing.MessageAssembler) -> bool:
        """Receive a packet and perform the request it completes; returns False at the end of the channel."""
        try:
            packet = self._channel.recv(framing.MAX_PACKET)
        except OSError:
            packet = b""
        if not packet:
            return False
        message = assembler.feed(packet)
        if message is None:
            return True
        request = _decode_json(message.body.decode(), 0)[0]
        if message.kind is framing.MessageKind.CONFIGURE:
            self._configure(request)
            self._output.send_reply(framing.MessageKind.CONFIGURED, b"{}")
        elif message.kind in _CALL_KINDS:
            if limit := request.get("data_limit"):
                resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
            run = self._execute if message.kind is framing.MessageKind.EXECUTE else self._run_command
            run(message.call, request["code"])
        return True

    def _configure(self, request: dict[str, Any]) -> None:
        os.environ.update(request.get("environment") or {})
        if certificates := request.get("ca_certificates"):
            _install_ca_certificates(certificates)
        if cwd := request.get("cwd"):
            os.chdir(cwd)
            # Spawned workers look for modules here instead of in "".
            multiprocessing.process.ORIGINAL_DIR = cwd  # type: ignore[attr-defined]
            self._commands.configure(cwd, dict(os.environ))
        self._output.max_bytes = request.get("output_limit", output_limits.MAX_OUTPUT_BYTES)
        self._output.max_display_bytes = request.get("display_bytes", output_limits.MAX_TOTAL_DISPLAY_BYTES)

    # --- one call -----------------------------------------------------------------------------------

    def _execute(self, call: bytes, source: str) -> None:
        self._begin_call(call)
        failure = self._run_interruptible(self._run_cell, source)
        if isinstance(failure, KeyboardInterrupt):
            display.close_figures()
        else:
            failure = self._run_interruptible(self._flush_after_cell) or failure
        if sys.getrecursionlimit() < _MIN_RECURSION_LIMIT:
            sys.setrecursionlimit(_MIN_RECURSION_LIMIT)
        code = 0
        interrupted = False
        if failure is not None:
            interrupted = self._guard.delivered and isinstance(failure, KeyboardInterrupt)
            code = self._report_failure(failure)
            failure = None
        if self._output.is_forked:
            self._exit_forked_child(code)
        self._end_call(code, interrupted)

    def _run_command(self, call: bytes, command: str) -> None:
        self._begin_call(call)
        failure = self._run_interruptible(self._commands.run, command)
        if failure is not None:
            self._commands.kill()
            if not isinstance(failure, KeyboardInterrupt):
                self._commands.exit_code = shell_commands.NOT_STARTED
                self._stderr.write(f"The command could not be started: {failure}\n")
        self._end_call(self._commands.exit_code, isinstance(failure, KeyboardInterrupt))

    def _begin_call(self, call: bytes) -> None:
        """Start a call and undo what the last one did to shared state."""
        self._output.begin_call(call)
        self._displays.begin_call()
        self._restore_streams()
        sys.modules["__main__"] = self._main_module
        self._globals.pop("__warningregistry__", None)  # the same line of another cell warns again
        if self._memory_reserve is None:
            with contextlib.suppress(OSError, ValueError):
                self._memory_reserve = mmap.mmap(
                    -1, _MEMORY_RESERVE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
                )
        self._invalidate_import_caches()
        guard = self._guard
        guard.delivered = False
        guard.pending = guard.depth = 0
        _set_handler(signal.SIGINT, guard.handle_sigint)
        _mask_signals(signal.SIG_UNBLOCK, (signal.SIGINT,))

    def _invalidate_import_caches(self) -> None:
        """Like importlib.invalidate_caches(), but skip directories known before the program started."""
        cache = sys.path_importer_cache
        paths = [path or os.getcwd() for path in sys.path]
        if len(cache) > self._known_paths:
            paths += list(cache)[self._known_paths :]
        for path in paths:
            finder: Any = cache.get(path)
            if finder is not None:
                finder.invalidate_caches()
            else:
                cache.pop(path, None)  # it did not exist when it was first looked up

    def _restore_streams(self) -> None:
        sys.stdout = self._stdout
        sys.stderr = self._stderr
        if self._stdin.closed:  # `exit()` of the site module closes it
            self._stdin = _reopen_stdin()
            sys.stdin = self._stdin

    def _run_interruptible(self, function: Callable[..., None], *args: Any) -> BaseException | None:
        """Run user code with interrupts enabled; returns the exception it raised, or None."""
        guard = self._guard
        failure: BaseException | None = None
        try:
            guard.armed = True
            function(*args)
        except BaseException as error:
            guard.armed = False
            failure = error
        guard.armed = False
        try:
            if sys.gettrace() is not None:
                sys.settrace(None)
            if sys.getprofile() is not None:
                sys.setprofile(None)
        except BaseException:  # raised by the profiler; the interpreter removes it then
            sys.settrace(None)
            sys.setprofile(None)
        try:
            return failure
        finally:
            del failure  # its frames refer to this one

    def _run_cell(self, source: str) -> None:
        cell = self._cell_compiler.compile(source)
        if cell.is_async:
            value = self._run_async_cell(cell)
        else:
            if cell.body is not None:
                exec(cell.body, self._globals)
            value = eval(cell.last, self._globals) if cell.last is not None else None
        if value is not None:
            builtins.__dict__["_"] = value
            self._displays.publish_result(value)

    def _flush_after_cell(self) -> None:
        """Show open figures and flush streams: also user code, after its last line."""
        self._displays.show_figures()
        for stream, own in ((sys.stdout, self._stdout), (sys.stderr, self._stderr)):
            if stream is not own:
                with contextlib.suppress(Exception):
                    stream.flush()
        _flush_c(None)

    def _run_async_cell(self, cell: cell_compiler.CompiledCell) -> object:
        """Run a cell with top-level await on the event loop that all such cells share."""
        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.new_event_loop()
        loop = self._loop
        asyncio.set_event_loop(loop)
        guard = self._guard
        guard.depth += 1  # an unknown task would run in a later call
        task = loop.create_task(_run_async(cell, self._globals))
        interrupt: KeyboardInterrupt | None = None
        while True:
            try:
                if guard.depth:
                    guard.leave_critical_section()
                return loop.run_until_complete(task)
            except KeyboardInterrupt as error:
                if task.done():
                    raise
                # It hit the loop, not the cell: cancel the cell, or it would continue in the next call.
                interrupt = error
                task.cancel()
            except asyncio.CancelledError as error:
                if interrupt is None:
                    raise
                raise interrupt.with_traceback(error.__traceback__) from None
            except BaseException:  # another task's SystemExit
                task.cancel()
                raise

    # --- the end of a call --------------------------------------------------------------------------

    def _report_failure(self, failure: BaseException) -> int:
        """Send the error of a failed call; returns the exit code."""
        if isinstance(failure, MemoryError) and self._memory_reserve is not None:
            self._memory_reserve.close()
            self._memory_reserve = None
        tracebacks.trim_frames(failure)
        if isinstance(failure, SystemExit):
            return self._handle_system_exit(failure)
        try:
            # str() of an exception is user code: allow an interrupt, unless one ended the call.
            self._guard.armed = not isinstance(failure, KeyboardInterrupt)
            report = tracebacks.describe_exception(failure)
        except BaseException as problem:
            self._guard.armed = False
            report = self._describe_minimally(failure, problem)
        self._guard.armed = False
        if isinstance(failure, MemoryError):
            # Frames hold what did not fit; the next call needs that memory.
            failure.__traceback__ = failure.__context__ = failure.__cause__ = None
            gc.collect()
        else:
            sys.last_exc = failure
            sys.last_type, sys.last_value, sys.last_traceback = type(failure), failure, failure.__traceback__
        if self._output.is_forked:
            self._stderr.write(report["traceback"])
        with contextlib.suppress(MemoryError):
            self._output.send_message(framing.MessageKind.ERROR, display.encode_json(report))
        return 1

    def _describe_minimally(self, failure: BaseException, problem: BaseException) -> dict[str, str]:
        try:
            return tracebacks.describe_minimally(failure, problem)
        except Exception:  # out of memory, or anything else: the call must end
            name = tracebacks.exception_name(failure)[: output_limits.MAX_NAME_CHARS]
            return {"name": name, "value": "", "traceback": f"{name}: <no traceback>\n"}

    def _handle_system_exit(self, failure: SystemExit) -> int:
        code: object = failure.code
        if code is None:
            return 0
        if isinstance(code, int):
            return int(code) & 0xFF
        try:
            self._guard.armed = True
            text = str(code)
        except BaseException:
            self._guard.armed = False
            text = "<exit message cannot be shown>"
        self._guard.armed = False
        self._stderr.write(text + "\n")
        return 1

    def _end_call(self, code: int, interrupted: bool) -> None:
        body = b'{"exit_code":%d,"interrupted":%s}' % (code, b"true" if interrupted else b"false")
        try:
            self._output.end_call(body)
        except MemoryError:
            gc.collect()
            self._output.end_call(body)

    def _exit_forked_child(self, code: int) -> NoReturn:
        """Exit in a forked child that reached the end of the cell; only the parent continues."""
        with contextlib.suppress(BaseException):
            self._output.flush()
        os._exit(code)

    def _make_input(self, original: Callable[..., str]) -> Callable[..., str]:
        def input(prompt: object = "", /) -> str:  # noqa: A001 (replaces the builtin)
            if sys.stdin is not self._stdin:  # the program has replaced stdin
                return original(prompt)
            raise EOFError(f"input() is not available: {_NO_KEYBOARD}")

        return input


async def _run_async(cell: cell_compiler.CompiledCell, namespace: dict[str, Any]) -> object:
    value: Any = None
    for code in (cell.body, cell.last):
        if code is not None:
            value = eval(code, namespace)
            if code.co_flags & cell_compiler.COROUTINE:
                value = await value
    return value if cell.last is not None else None


def _open_stdin() -> io.TextIOBase:
    """Open descriptor 0, which is /dev/null."""
    return open(0, encoding="utf-8", closefd=False)


def _reopen_stdin() -> io.TextIOBase:
    with contextlib.suppress(OSError):
        null = os.open("/dev/null", os.O_RDONLY)
        if null != 0:
            os.dup2(null, 0)
            os.close(null)
    return _open_stdin()


def _refuse_getpass(*_args: object, **_kwargs: object) -> str:
    raise EOFError(f"getpass() is not available: {_NO_KEYBOARD}")


def _install_ca_certificates(certificates: str) -> None:
    """Write a bundle of the system's certificate authorities and these; the environment names it."""
    system = ""
    with (
        contextlib.suppress(OSError),
        open(layout.SYSTEM_CA_BUNDLE, encoding="ascii", errors="replace") as file,
    ):
        system = file.read()
    os.makedirs(os.path.dirname(layout.CA_BUNDLE), exist_ok=True)
    with open(layout.CA_BUNDLE, "w", encoding="ascii", errors="replace") as file:
        file.write(f"{system}\n{certificates}")


class _ExitCommand:
    """`exit` and `quit`; those of `site` close stdin, and not every interpreter has them."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"Use {self._name}() to end this call"

    def __call__(self, code: Any = None) -> NoReturn:
        raise SystemExit(code)
