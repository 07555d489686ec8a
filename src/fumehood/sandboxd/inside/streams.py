"""Captures what a program writes and sends it while it runs; imports only the standard library and `wire`.

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
import io
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Buffer, Callable, Iterable
from types import FrameType
from typing import Any

from fumehood.sandboxd.inside import wire

# Functions look up their builtins where their module was told to when they were made: in a copy that a
# program which deletes `builtins.len` cannot reach.
globals()["__builtins__"] = dict(vars(builtins))

OUTPUT_LIMIT = 1 << 20
_QUIET_SECONDS = 0.010  # after a pause of this length output is sent at once
_TICK_MS = 20  # else at the pump's next tick
_FULL = 32 * 1024  # or when this much has gathered
_MANY = 4096  # or this many pieces
_PIPE_BYTES = 64 * 1024
_LAST_READS = 64  # a background process that never stops writing must not hold up the end of a call
_TEXT = frozenset({wire.Kind.STDOUT, wire.Kind.STDERR})
_BORN = "_fumehood_call"  # attribute of a Thread: the number of the call that started it
_TRANSIENT = frozenset({errno.ENOBUFS, errno.ENOMEM, errno.EAGAIN})


class Guard:
    """Decides when SIGINT becomes KeyboardInterrupt: in user code only, never in the middle of a message.

    `armed` and `depth` are set by plain stores: CPython runs signal handlers after calls and at backward
    jumps, so that nothing can come between such a store and the statement before it.
    """

    __slots__ = ("armed", "delivered", "depth", "main", "pending")

    def __init__(self) -> None:
        self.armed = False
        self.delivered = False
        self.pending = False
        self.depth = 0
        self.main = threading.get_ident()

    def handle(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002 (signature of a handler)
        if not self.armed:
            return
        if self.depth:
            self.pending = True
            return
        self.delivered = True
        raise KeyboardInterrupt

    def leave(self) -> None:
        self.depth -= 1
        if self.pending and not self.depth:
            self.pending = False
            if self.armed:
                self.delivered = True
                raise KeyboardInterrupt


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

    def __init__(self, channel: socket.socket, guard: Guard) -> None:
        self.forked = False
        self.guard = guard
        self.limit = OUTPUT_LIMIT
        self._channel = channel
        self._call: bytes | None = None
        self._serial = 0
        self._lock = threading.RLock()
        self._busy = False
        self._queue: list[tuple[wire.Kind, bytes]] = []
        self._queued = 0
        self._room = 0
        self._truncated = False
        self._sent_at = 0.0
        self._decoders: list[tuple[wire.Kind, codecs.IncrementalDecoder]] = []
        self._raw = {kind: self.decoder(kind) for kind in (wire.Kind.STDOUT, wire.Kind.STDERR)}
        self._tails = dict.fromkeys(_TEXT, b"")  # of a forked child: lines not yet complete
        self._ticking = False
        self._carried = threading.local()
        self._pipes = _Pipes()
        self._pumping = False
        self._start_pump()
        os.register_at_fork(after_in_child=self._after_fork)
        self._follow_threads()

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
        """Send a message after everything written before it; False when the thread belongs to no call."""
        guard = self.guard
        main = threading.get_ident() == guard.main
        if main:
            guard.depth += 1
        try:
            with self._lock:
                if self.forked or not self._belongs(main):
                    return False
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
                        # A progress bar flushes after every step: keep to the same pace as for lines.
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
        if len(data) > self._room:
            self._truncated = True
            data = data[: _boundary(data, self._room)]
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
        quiet = time.monotonic() - self._sent_at >= _QUIET_SECONDS
        if (at_once and quiet) or self._queued >= _FULL or len(self._queue) >= _MANY:
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
        self._sent_at = time.monotonic()

    def _packets(self, items: list[tuple[wire.Kind, bytes]]) -> list[bytes]:
        call = self._call or wire.NO_CALL
        merged: list[tuple[wire.Kind, list[bytes]]] = []
        for kind, data in items:
            if merged and merged[-1][0] is kind and kind in _TEXT:
                merged[-1][1].append(data)
            else:
                merged.append((kind, [data]))
        ready: list[bytes] = []
        for kind, parts in merged:
            body = parts[0] if len(parts) == 1 else b"".join(parts)
            while kind in _TEXT and len(body) > wire.MAX_BODY:
                cut = _boundary(body, wire.MAX_BODY)
                ready.extend(wire.packets(wire.Message(kind, call, body[:cut])))
                body = body[cut:]
            ready.extend(wire.packets(wire.Message(kind, call, body)))
        return ready

    def _send(self, packet: bytes) -> None:
        while True:
            try:
                self._channel.send(packet)
                return
            except OSError as error:
                if error.errno not in _TRANSIENT:
                    os._exit(1)  # nobody is left to talk to
                time.sleep(0.01)

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
        self.guard.depth = 0
        self.guard.pending = False
        self.guard.main = threading.get_ident()
        with contextlib.suppress(OSError):
            self._channel.close()
        self._pipes.close()

    def _write_through(self, kind: wire.Kind, data: bytes, *, whole: bool = False) -> None:
        """Write to descriptor 1 or 2 itself, by lines, so that processes do not cut each other's."""
        data = self._tails[kind] + data
        cut = len(data) if whole or len(data) > _FULL else data.rfind(b"\n") + 1
        self._tails[kind] = data[cut:]
        view = memoryview(data)[:cut]
        while view:
            view = view[os.write(1 if kind is wire.Kind.STDOUT else 2, view) :]

    # --- the pump ---------------------------------------------------------------------------------

    def _start_pump(self) -> None:
        """Not a `threading.Thread`: programs count and join those."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self._pumping = True
        self._ticking = False
        try:
            _thread.start_new_thread(self._pump, (self._pipes,))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

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
                time.sleep(_TICK_MS / 1000)  # the program is at its limit; it will raise there, too
            except Exception:
                self._pumping = False
            if not self._pumping or self._pipes is not pipes:
                return

    def _tick(self, pipes: _Pipes, *, expired: bool) -> int | None:
        with self._lock:
            if self._busy or self._pipes is not pipes:
                return _TICK_MS
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
                return _TICK_MS if self._ticking else None
            finally:
                self._busy = False


def _boundary(data: bytes, cut: int) -> int:
    """The largest index not above `cut` at which a character of this UTF-8 text begins."""
    while 0 < cut < len(data) and data[cut] & 0xC0 == 0x80:
        cut -= 1
    return cut


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
