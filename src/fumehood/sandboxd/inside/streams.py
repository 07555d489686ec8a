"""Captures what a program writes and sends it while it runs; imports only the standard library and siblings.

File descriptors 1 and 2 are pipes which this process reads itself, so that child processes and C code are
captured as well. `sys.stdout` and `sys.stderr` do not go through those pipes: they append to the ordered
queue of `Output`, after whatever the pipes hold at that moment. That keeps both kinds in the order in which
they were written, and makes a `print` cheap.
"""

import _thread
import builtins
import codecs
import concurrent.futures.thread
import contextlib
import errno
import functools
import importlib
import io
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Buffer, Callable, Generator, Iterable
from typing import Any

from fumehood.sandboxd.inside import batches, bounds, wire
from fumehood.sandboxd.inside.interrupts import Guard

# Functions look up their builtins where their module was told to when they were made: in a copy that a
# program which deletes `builtins.len` cannot reach.
globals()["__builtins__"] = dict(vars(builtins))

_PIPE_BYTES = 64 * 1024
_LAST_READS = 64  # a background process that never stops writing must not hold up the end of a call
_TEXT = frozenset({wire.Kind.STDOUT, wire.Kind.STDERR})
_SHOWN = frozenset({wire.Kind.DISPLAY, wire.Kind.RESULT})
_BORN = "_fumehood_call"  # attribute of a Thread: the number of the call that started it
_TRANSIENT = frozenset({errno.ENOBUFS, errno.ENOMEM, errno.EAGAIN})
_ALL_SIGNALS = frozenset(map(int, signal.valid_signals()))
# signal.pthread_sigmask() without its conversions to enums: an exception for each real-time signal in every sandbox.
_mask_signals: Callable[[int, Iterable[int]], set[int]] = importlib.import_module("_signal").pthread_sigmask
# Programs replace those of the module, to test with a time of their own.
_now = time.monotonic
_sleep = time.sleep


class _Pipes:
    """Descriptors 1 and 2 as pipes, with the ends that are needed to read them and to put them back."""

    def __init__(self) -> None:
        while (spare := os.open("/dev/null", os.O_RDWR)) <= 2:
            os.set_inheritable(spare, True)
        os.close(spare)
        self.readers: list[int] = []
        self.writers: list[int] = []
        self._inodes: list[int] = []
        for fd in (1, 2):
            reader, writer = os.pipe()
            os.set_blocking(reader, False)
            os.dup2(writer, fd)
            self.readers.append(reader)
            self.writers.append(writer)
            self._inodes.append(os.fstat(writer).st_ino)
        self.kinds = {self.readers[0]: wire.Kind.STDOUT, self.readers[1]: wire.Kind.STDERR}
        self.wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.poll = self.poller()

    def poller(self) -> select.poll:
        poller = select.poll()
        for reader in self.readers:
            poller.register(reader, select.POLLIN)
        return poller

    def restore(self) -> None:
        """Point 1 and 2 at the pipes again, if the program closed or replaced them, and 0 at nothing."""
        try:
            os.fstat(0)
        except OSError:
            os.open("/dev/null", os.O_RDONLY)  # the lowest number that is free
            os.set_inheritable(0, True)
        for fd in (1, 2):
            try:
                same = os.fstat(fd).st_ino == self._inodes[fd - 1]
            except OSError:
                same = False
            if not same:
                os.dup2(self.writers[fd - 1], fd)

    def close(self) -> None:
        for fd in (*self.readers, *self.writers, self.wake):
            with contextlib.suppress(OSError):
                os.close(fd)


class Output:
    """The one ordered queue of everything a call sends, and the only user of the channel for sending.

    Every method may be entered again by the thread that is in it, through a signal handler or a finaliser
    which prints: then the text is only queued, and the outer entry sends it.
    """

    def __init__(self, guard: Guard) -> None:
        self.forked = False
        self.guard = guard
        self.limit = bounds.OUTPUT_BYTES
        self.display_bytes = bounds.DISPLAY_BYTES
        self._call: bytes | None = None
        self._serial = 0
        self._lock = threading.RLock()
        self._busy = False
        self._queue: list[tuple[wire.Kind, bytes]] = []
        self._queued = 0
        self._room = 0
        self._display_room = 0
        self._flushes = 0
        self._last: wire.Kind | None = None
        self._truncated = False
        self._sent_at = 0.0
        self._decoders: list[tuple[wire.Kind, codecs.IncrementalDecoder]] = []
        self._raw = {kind: self.decoder(kind) for kind in (wire.Kind.STDOUT, wire.Kind.STDERR)}
        self._tails = dict.fromkeys(_TEXT, b"")  # of a forked child: lines not yet complete
        self._ticking = False
        self._carried = threading.local()
        self._pumping = False
        self._follow_threads()

    def open(self, channel: socket.socket) -> None:
        """From here on there is somebody to send to, in this process and in no fork of it."""
        self._channel = channel
        self.guard.main = threading.get_ident()
        self._pipes = _Pipes()
        self._start_pump()
        os.register_at_fork(after_in_child=self._after_fork)

    @contextlib.contextmanager
    def rehearsal(self, channel: socket.socket) -> Generator[None]:
        """Send to `channel` for a while, without the thread that pumps; afterwards all is as before."""
        saved = [os.dup(1), os.dup(2)]
        self._channel = channel
        self._pipes = _Pipes()
        self._pumping = True
        try:
            yield
        finally:
            self._pumping = False
            self._serial = 0
            self._pipes.close()
            for fd in (1, 2):
                os.dup2(saved[fd - 1], fd)
                os.close(saved[fd - 1])

    # --- a call's beginning and end ---------------------------------------------------------------

    def begin(self, call: bytes) -> None:
        """What is written from now on belongs to this call; what lies in the pipes belongs to none."""
        with self._lock:
            self._busy = True
            try:
                if self._pumping:
                    self._pipes.restore()
                else:  # the program closed descriptors that were not its own
                    self._pipes.close()
                    self._pipes = _Pipes()
                    self._start_pump()
                self._drain(_LAST_READS)
                for _, decoder in self._decoders:
                    decoder.reset()
                self._queue.clear()
                self._queued = 0
                self._room = self.limit
                self._display_room = self.display_bytes
                self._flushes = bounds.FLUSHES
                self._last = None
                self._truncated = False
                self._sent_at = 0.0  # the first line of a call never waits
                self._serial += 1
                self._call = call
            finally:
                self._busy = False

    def end(self, body: bytes) -> None:
        """Send what is left and then END, after which nothing of this call can follow."""
        with self._lock:
            self._busy = True
            try:
                call = self._call or wire.NO_CALL
                try:
                    self._drain(_LAST_READS)
                    for kind, decoder in self._decoders:
                        self._append(kind, decoder.decode(b"", final=True).encode())
                    self._flush()
                except MemoryError:
                    pass  # output is lost, the reply is not
                self._call = None
                self._queue.clear()
                self._queued = 0
                for packet in wire.packets(wire.Message(wire.Kind.END, call, body)):
                    self._send(packet)
            finally:
                self._busy = False

    def decoder(self, kind: wire.Kind) -> codecs.IncrementalDecoder:
        """For bytes that may end in the middle of a character; what is left of one at the end is replaced."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoders.append((kind, decoder))
        return decoder

    # --- what is written --------------------------------------------------------------------------

    def text(self, kind: wire.Kind, data: bytes) -> None:
        """Queue text (whole UTF-8 characters) of the thread that calls."""
        guard = self.guard
        main = threading.get_ident() == guard.main
        if main:
            guard.depth += 1
        try:
            with self._lock:
                if self.forked:
                    self._write_through(kind, data)
                elif self._belongs(main):
                    if self._busy:
                        self._append(kind, data)
                        return
                    self._busy = True
                    try:
                        self._drain()
                        self._append(kind, data)
                        self._flush_or_wake(at_once=b"\n" in data)
                    finally:
                        self._busy = False
        finally:
            if main:
                guard.leave()

    def message(self, kind: wire.Kind, body: bytes) -> bool:
        """Send a message after everything written before it; False when so much cannot be shown any more.

        Of a thread that belongs to no call nothing is sent.
        """
        guard = self.guard
        main = threading.get_ident() == guard.main
        if main:
            guard.depth += 1
        try:
            with self._lock:
                if self.forked or not self._belongs(main):
                    return True
                if kind in _SHOWN:
                    if len(body) > self._display_room:
                        return False
                    self._display_room -= len(body)
                if self._busy:
                    self._queue.append((kind, body))
                    return True
                self._busy = True
                try:
                    self._drain()
                    self._queue.append((kind, body))
                    self._flush()
                finally:
                    self._busy = False
                return True
        finally:
            if main:
                guard.leave()

    def flush(self) -> None:
        guard = self.guard
        main = threading.get_ident() == guard.main
        if main:
            guard.depth += 1
        try:
            with self._lock:
                if self.forked:
                    for kind in _TEXT:
                        self._write_through(kind, b"", whole=True)
                elif self._queue and not self._busy:
                    self._busy = True
                    try:
                        # A program may end its process next, or crash. But a progress bar flushes after
                        # every step: in the long run, keep to the same pace as for lines.
                        if self._flushes:
                            self._flushes -= 1
                            self._flush()
                        else:
                            self._flush_or_wake(at_once=True)
                    finally:
                        self._busy = False
        finally:
            if main:
                guard.leave()

    def reply(self, kind: wire.Kind, body: bytes) -> None:
        """Send a message that belongs to no call."""
        with self._lock:
            for packet in wire.packets(wire.Message(kind, wire.NO_CALL, body)):
                self._send(packet)

    # --- under the lock ---------------------------------------------------------------------------

    def _append(self, kind: wire.Kind, data: bytes) -> None:
        if self._truncated or not data:
            return
        if kind is not self._last:
            if self._last is not None:
                self._room -= bounds.SWITCH_COST  # bounds the number of pieces as well
            self._last = kind
        if len(data) > self._room:
            self._truncated = True
            data = data[: batches.boundary(data, self._room)]
            line = f"[output truncated: more than {self.limit} bytes]\n".encode()
            data += line if not data or data.endswith(b"\n") else b"\n" + line
        self._room -= len(data)
        self._queue.append((kind, data))
        self._queued += len(data)

    def _drain(self, rounds: int = 1) -> None:
        """Queue what the pipes hold, without waiting; drop it while no call runs."""
        pipes = self._pipes
        for _ in range(rounds):
            ready = pipes.poll.poll(0)
            if not ready:
                return
            for fd, events in ready:
                data = b""
                if events & select.POLLIN:
                    with contextlib.suppress(OSError):
                        data = os.read(fd, _PIPE_BYTES)
                if not data:  # only if the program closed our end
                    pipes.poll.unregister(fd)
                    self._pumping = False
                elif self._call is not None and not self._truncated:
                    kind = pipes.kinds[fd]
                    self._append(kind, self._raw[kind].decode(data).encode())

    def _flush_or_wake(self, *, at_once: bool) -> None:
        if not self._queue:
            return
        quiet = _now() - self._sent_at >= bounds.QUIET_SECONDS
        if (at_once and quiet) or self._queued >= bounds.FULL_BYTES or len(self._queue) >= bounds.FULL_PIECES:
            self._flush()
        elif at_once and not self._ticking:
            # Part of a line waits for its end, as it would on a terminal; nobody needs to be woken for it.
            self._ticking = True
            with contextlib.suppress(OSError):
                os.eventfd_write(self._pipes.wake, 1)

    def _flush(self) -> None:
        while self._queue:
            items = self._queue[:]
            ready = self._packets(items)
            # From here on nothing fails for lack of memory or stack: a message is sent whole or not at all.
            del self._queue[: len(items)]
            self._queued = 0
            for packet in ready:
                self._send(packet)
        self._sent_at = _now()

    def _packets(self, items: list[tuple[wire.Kind, bytes]]) -> list[bytes]:
        call = self._call or wire.NO_CALL
        ready: list[wire.Message] = []
        texts: list[tuple[wire.Kind, bytes]] = []
        for kind, data in items:
            if kind in _TEXT:
                texts.append((kind, data))
            else:
                ready.extend(batches.messages(call, texts))
                texts = []
                ready.append(wire.Message(kind, call, data))
        ready.extend(batches.messages(call, texts))
        return [packet for message in ready for packet in wire.packets(message)]

    def _send(self, packet: bytes) -> None:
        while True:
            try:
                self._channel.send(packet)
                return
            except OSError as error:
                if error.errno not in _TRANSIENT:
                    os._exit(1)  # nobody is left to talk to
                _sleep(0.01)

    # --- threads and processes --------------------------------------------------------------------

    def _belongs(self, main: bool) -> bool:
        return self._call is not None and (main or self._thread_serial() == self._serial)

    def _thread_serial(self) -> int:
        """The number of the call for which this thread runs; a foreign thread runs for the current one."""
        serial = getattr(self._carried, "serial", None)
        if serial is None:
            active: dict[int, threading.Thread] = getattr(threading, "_active")  # noqa: B009 (private)
            serial = getattr(active.get(threading.get_ident()), _BORN, self._serial)
        return serial

    def _follow_threads(self) -> None:
        """Remember for each thread, and for each task of a thread pool, which call it was started by."""
        start = threading.Thread.start
        thread_serial = self._thread_serial
        submit: Callable[..., Any] = concurrent.futures.thread.ThreadPoolExecutor.submit

        @functools.wraps(start)
        def marked_start(self: threading.Thread) -> None:
            setattr(self, _BORN, thread_serial())
            start(self)

        def carry(serial: int, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            before = getattr(self._carried, "serial", None)
            self._carried.serial = serial
            try:
                return function(*args, **kwargs)
            finally:
                self._carried.serial = before

        @functools.wraps(submit)
        def marked_submit(pool: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            return submit(pool, carry, self._thread_serial(), function, *args, **kwargs)

        threading.Thread.start = marked_start
        concurrent.futures.thread.ThreadPoolExecutor.submit = marked_submit

    def _after_fork(self) -> None:
        """In a child of the program: no channel and no queue, its output goes into the pipes."""
        self.forked = True
        self._lock = threading.RLock()
        self._busy = False
        self._queue.clear()
        self.guard.after_fork()
        with contextlib.suppress(OSError):
            self._channel.close()
        self._pipes.close()

    def _write_through(self, kind: wire.Kind, data: bytes, *, whole: bool = False) -> None:
        """Write to descriptor 1 or 2 itself, by lines, so that processes do not cut each other's."""
        data = self._tails[kind] + data
        cut = len(data) if whole or len(data) > bounds.FULL_BYTES else data.rfind(b"\n") + 1
        self._tails[kind] = data[cut:]
        view = memoryview(data)[:cut]
        while view:
            view = view[os.write(1 if kind is wire.Kind.STDOUT else 2, view) :]

    # --- the pump ---------------------------------------------------------------------------------

    def _start_pump(self) -> None:
        """Not a `threading.Thread`: programs count and join those."""
        before = _mask_signals(signal.SIG_BLOCK, _ALL_SIGNALS)
        self._pumping = True
        self._ticking = False
        try:
            _thread.start_new_thread(self._pump, (self._pipes,))
        finally:
            _mask_signals(signal.SIG_SETMASK, before)

    def _pump(self, pipes: _Pipes) -> None:
        poller = pipes.poller()
        poller.register(pipes.wake, select.POLLIN)
        timeout: int | None = None
        while True:
            try:
                events = poller.poll(timeout)
                if any(event & (select.POLLNVAL | select.POLLERR) for _, event in events):
                    self._pumping = False
                if any(fd == pipes.wake for fd, _ in events):
                    os.eventfd_read(pipes.wake)
                timeout = self._tick(pipes, expired=not events)
            except MemoryError:
                _sleep(bounds.TICK_MS / 1000)  # the program is at its limit; it will raise there, too
            except Exception:
                self._pumping = False
            if not self._pumping or self._pipes is not pipes:
                return

    def _tick(self, pipes: _Pipes, *, expired: bool) -> int | None:
        with self._lock:
            if self._busy or self._pipes is not pipes:
                return bounds.TICK_MS
            self._busy = True
            try:
                self._drain()
                if self._call is None:
                    self._queue.clear()
                else:
                    self._ticking = True  # this thread is awake already
                    if expired:
                        self._flush()
                    self._flush_or_wake(at_once=True)
                self._ticking = bool(self._queue)
                return bounds.TICK_MS if self._ticking else None
            finally:
                self._busy = False


class _Bytes(io.BufferedIOBase):
    """`sys.stdout.buffer`: bytes, decoded piece by piece."""

    def __init__(self, output: Output, kind: wire.Kind) -> None:
        self._output = output
        self._kind = kind
        self._decoder = output.decoder(kind)

    @property
    def closed(self) -> bool:
        return False

    @property
    def name(self) -> str:
        return "<stdout>" if self._kind is wire.Kind.STDOUT else "<stderr>"

    @property
    def mode(self) -> str:
        return "wb"

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 1 if self._kind is wire.Kind.STDOUT else 2

    def write(self, data: Buffer, /) -> int:
        if isinstance(data, str):
            raise TypeError("a bytes-like object is required, not 'str'")
        raw = bytes(data)
        text = self._decoder.decode(raw)
        if text:
            self._output.text(self._kind, text.encode())
        return len(raw)

    def flush(self) -> None:
        self._output.flush()

    def close(self) -> None:
        """Stays open: a TextIOWrapper which a program puts around it closes it when it is collected."""
        self._output.flush()


class Stream(io.TextIOBase):
    """`sys.stdout` or `sys.stderr` of the program."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, output: Output, kind: wire.Kind) -> None:
        self._output = output
        self._kind = kind
        self._buffer = _Bytes(output, kind)

    @property
    def buffer(self) -> io.BufferedIOBase:
        return self._buffer

    @property
    def closed(self) -> bool:
        return False

    @property
    def line_buffering(self) -> bool:
        return True

    @property
    def write_through(self) -> bool:
        return False

    @property
    def name(self) -> str:
        return self._buffer.name

    @property
    def mode(self) -> str:
        return "w"

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._buffer.fileno()

    def write(self, text: str, /) -> int:
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance] (called by untyped code)
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        self._output.text(self._kind, text.encode("utf-8", "backslashreplace"))
        return len(text)

    def writelines(self, lines: Iterable[str], /) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._output.flush()

    def close(self) -> None:
        self._output.flush()

    def reconfigure(self, **options: object) -> None:
        """Accepted and ignored: the text is UTF-8 on its whole way."""
