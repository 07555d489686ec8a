"""Captures what a program writes and sends it while the program runs.

File descriptors 1 and 2 are pipes that this process reads itself, so that child processes and C code are captured too.
`sys.stdout` and `sys.stderr` (captured_streams.py) do not use the pipes: they append to `OutputQueue`, after what the
pipes hold at that moment. This keeps the order of writing and makes `print` cheap.
"""

import _thread
import builtins
import codecs
import concurrent.futures.thread
import contextlib
import errno
import functools
import importlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterable
from typing import Any

from fumehood.sandbox_server.inside import framing, output_packets
from fumehood.sandbox_server.inside.runner import output_limits
from fumehood.sandbox_server.inside.runner.interrupts import InterruptGuard

# Functions of this module use a copy of the builtins, so that a program which deletes `builtins.len` cannot break them.
globals()["__builtins__"] = dict(vars(builtins))

_PIPE_BYTES = 64 * 1024
_MAX_FINAL_READS = 64  # a background process that never stops writing must not delay the end of a call
_TEXT_KINDS = frozenset({framing.MessageKind.STDOUT, framing.MessageKind.STDERR})
_DISPLAY_KINDS = frozenset({framing.MessageKind.DISPLAY, framing.MessageKind.RESULT})
_CALL_ATTRIBUTE = "_fumehood_call"  # attribute of a Thread: number of the call that started it
_TRANSIENT_ERRORS = frozenset({errno.ENOBUFS, errno.ENOMEM, errno.EAGAIN})
_ALL_SIGNALS = frozenset(map(int, signal.valid_signals()))
# signal.pthread_sigmask() without its enum conversions, which raise an exception for each real-time signal.
_mask_signals: Callable[[int, Iterable[int]], set[int]] = importlib.import_module("_signal").pthread_sigmask
# Bound now: programs replace those of `time` to fake the time.
_now = time.monotonic
_sleep = time.sleep


class _OutputPipes:
    """Pipes as descriptors 1 and 2, with their read ends and spare write ends to restore them."""

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
        self.kinds = {
            self.readers[0]: framing.MessageKind.STDOUT,
            self.readers[1]: framing.MessageKind.STDERR,
        }
        self.wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.poll = self.poller()

    def poller(self) -> select.poll:
        """Return a new poll object for the read ends."""
        poller = select.poll()
        for reader in self.readers:
            poller.register(reader, select.POLLIN)
        return poller

    def restore(self) -> None:
        """Restore descriptors 1 and 2 to the pipes, and 0 to /dev/null, if the program closed or replaced them."""
        try:
            os.fstat(0)
        except OSError:
            os.open("/dev/null", os.O_RDONLY)  # gets the lowest free number
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


class OutputQueue:
    """The ordered queue of everything a call sends, and the only sender on the channel.

    Methods are reentrant: a signal handler or a finaliser that prints may enter one again in the same thread. Then the
    text is only queued, and the outer entry sends it.
    """

    def __init__(self, guard: InterruptGuard) -> None:
        self.is_forked = False
        self.guard = guard
        self.max_bytes = output_limits.MAX_OUTPUT_BYTES
        self.max_display_bytes = output_limits.MAX_TOTAL_DISPLAY_BYTES
        self._call: bytes | None = None
        self._call_number = 0
        self._lock = threading.RLock()
        self._is_busy = False
        self._queue: list[tuple[framing.MessageKind, bytes]] = []
        self._queued_bytes = 0
        self._output_budget = 0
        self._display_budget = 0
        self._flushes_left = 0
        self._last_kind: framing.MessageKind | None = None
        self._is_truncated = False
        self._sent_at = 0.0
        self._decoders: list[tuple[framing.MessageKind, codecs.IncrementalDecoder]] = []
        self._pipe_decoders = {
            kind: self.add_decoder(kind) for kind in (framing.MessageKind.STDOUT, framing.MessageKind.STDERR)
        }
        self._partial_lines = dict.fromkeys(_TEXT_KINDS, b"")  # incomplete lines of a forked child
        self._tick_pending = False
        self._thread_local = threading.local()
        self._is_pumping = False
        self._track_threads()

    def open_channel(self, channel: socket.socket) -> None:
        """Send to `channel` from now on, in this process but in no fork of it."""
        self._channel = channel
        self.guard.main = threading.get_ident()
        self._pipes = _OutputPipes()
        self._start_pump()
        os.register_at_fork(after_in_child=self._reset_after_fork)

    @contextlib.contextmanager
    def warm_up(self, channel: socket.socket) -> Generator[None]:
        """Send to `channel` within the context, without the pump thread; everything is restored afterwards."""
        saved = [os.dup(1), os.dup(2)]
        self._channel = channel
        self._pipes = _OutputPipes()
        self._is_pumping = True
        try:
            yield
        finally:
            self._is_pumping = False
            self._call_number = 0
            self._pipes.close()
            for fd in (1, 2):
                os.dup2(saved[fd - 1], fd)
                os.close(saved[fd - 1])

    # --- start and end of a call ------------------------------------------------------------------

    def begin_call(self, call: bytes) -> None:
        """Start a call: output from now on belongs to it; what is in the pipes is dropped."""
        with self._lock:
            self._is_busy = True
            try:
                if self._is_pumping:
                    self._pipes.restore()
                else:  # the program closed our descriptors
                    self._pipes.close()
                    self._pipes = _OutputPipes()
                    self._start_pump()
                self._drain(_MAX_FINAL_READS)
                for _, decoder in self._decoders:
                    decoder.reset()
                self._queue.clear()
                self._queued_bytes = 0
                self._output_budget = self.max_bytes
                self._display_budget = self.max_display_bytes
                self._flushes_left = output_limits.MAX_FLUSHES
                self._last_kind = None
                self._is_truncated = False
                self._sent_at = 0.0  # the first line of a call is sent at once
                self._call_number += 1
                self._call = call
            finally:
                self._is_busy = False

    def end_call(self, body: bytes) -> None:
        """Send the rest of the output and then END; nothing of this call follows it."""
        with self._lock:
            self._is_busy = True
            try:
                call = self._call or framing.NO_CALL
                try:
                    self._drain(_MAX_FINAL_READS)
                    for kind, decoder in self._decoders:
                        self._append(kind, decoder.decode(b"", final=True).encode())
                    self._flush()
                except MemoryError:
                    pass  # lose output, but still send END
                self._call = None
                self._queue.clear()
                self._queued_bytes = 0
                for packet in framing.encode_packets(
                    framing.ChannelMessage(framing.MessageKind.END, call, body)
                ):
                    self._send(packet)
            finally:
                self._is_busy = False

    def add_decoder(self, kind: framing.MessageKind) -> codecs.IncrementalDecoder:
        """Return a decoder for bytes that may split characters; `end_call` replaces an incomplete last one."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoders.append((kind, decoder))
        return decoder

    # --- writing ----------------------------------------------------------------------------------

    def write_text(self, kind: framing.MessageKind, data: bytes) -> None:
        """Queue text (whole UTF-8 characters) of the calling thread."""
        self._run_uninterrupted(self._write_text, kind, data)

    def send_message(self, kind: framing.MessageKind, body: bytes) -> bool:
        """Send a message after everything written before it; returns False if it exceeds the display budget.

        A message of a thread that belongs to no call is dropped.
        """
        return self._run_uninterrupted(self._send_message, kind, body)

    def flush(self) -> None:
        """Send queued text now, or at the next tick once the program has flushed often."""
        self._run_uninterrupted(self._flush_text)

    def _run_uninterrupted[Result](self, function: Callable[..., Result], *args: Any) -> Result:
        """Run `function` under the lock; in the main thread, interrupts are deferred until it returns."""
        guard = self.guard
        main = threading.get_ident() == guard.main
        if main:
            guard.depth += 1
        try:
            with self._lock:
                return function(*args)
        finally:
            if main:
                guard.leave_critical_section()

    def _write_text(self, kind: framing.MessageKind, data: bytes) -> None:
        if self.is_forked:
            self._write_through(kind, data)
        elif self._belongs_to_call():
            if self._is_busy:
                self._append(kind, data)
                return
            self._is_busy = True
            try:
                self._drain()
                self._append(kind, data)
                self._flush_or_wake(at_once=b"\n" in data)
            finally:
                self._is_busy = False

    def _send_message(self, kind: framing.MessageKind, body: bytes) -> bool:
        if self.is_forked or not self._belongs_to_call():
            return True
        if kind in _DISPLAY_KINDS:
            if len(body) > self._display_budget:
                return False
            self._display_budget -= len(body)
        if self._is_busy:
            self._queue.append((kind, body))
            return True
        self._is_busy = True
        try:
            self._drain()
            self._queue.append((kind, body))
            self._flush()
        finally:
            self._is_busy = False
        return True

    def _flush_text(self) -> None:
        if self.is_forked:
            for kind in _TEXT_KINDS:
                self._write_through(kind, b"", whole=True)
        elif self._queue and not self._is_busy:
            self._is_busy = True
            try:
                # The program may exit or crash next. But a progress bar flushes after every step: after many flushes,
                # keep the pace of lines.
                if self._flushes_left:
                    self._flushes_left -= 1
                    self._flush()
                else:
                    self._flush_or_wake(at_once=True)
            finally:
                self._is_busy = False

    def send_reply(self, kind: framing.MessageKind, body: bytes) -> None:
        """Send a message that belongs to no call."""
        with self._lock:
            for packet in framing.encode_packets(framing.ChannelMessage(kind, framing.NO_CALL, body)):
                self._send(packet)

    # --- under the lock ---------------------------------------------------------------------------

    def _append(self, kind: framing.MessageKind, data: bytes) -> None:
        if self._is_truncated or not data:
            return
        if kind is not self._last_kind:
            if self._last_kind is not None:
                self._output_budget -= output_limits.SWITCH_COST  # limits the number of chunks as well
            self._last_kind = kind
        if len(data) > self._output_budget:
            self._is_truncated = True
            data = data[: output_packets.utf8_boundary(data, self._output_budget)]
            line = f"[output truncated: more than {self.max_bytes} bytes]\n".encode()
            data += line if not data or data.endswith(b"\n") else b"\n" + line
        self._output_budget -= len(data)
        self._queue.append((kind, data))
        self._queued_bytes += len(data)

    def _drain(self, rounds: int = 1) -> None:
        """Queue what the pipes hold without waiting; drop it if no call runs."""
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
                if not data:  # the program closed our end
                    pipes.poll.unregister(fd)
                    self._is_pumping = False
                elif self._call is not None and not self._is_truncated:
                    kind = pipes.kinds[fd]
                    self._append(kind, self._pipe_decoders[kind].decode(data).encode())

    def _flush_or_wake(self, *, at_once: bool) -> None:
        if not self._queue:
            return
        quiet = _now() - self._sent_at >= output_limits.QUIET_SECONDS
        if (
            (at_once and quiet)
            or self._queued_bytes >= output_limits.FLUSH_BYTES
            or len(self._queue) >= output_limits.FLUSH_CHUNKS
        ):
            self._flush()
        elif at_once and not self._tick_pending:
            # A partial line waits for its end, as on a terminal, and wakes nobody.
            self._tick_pending = True
            with contextlib.suppress(OSError):
                os.eventfd_write(self._pipes.wake, 1)

    def _flush(self) -> None:
        while self._queue:
            items = self._queue[:]
            ready = self._packets(items)
            # Nothing below fails for lack of memory or stack: a message is sent whole or not at all.
            del self._queue[: len(items)]
            self._queued_bytes = 0
            for packet in ready:
                self._send(packet)
        self._sent_at = _now()

    def _packets(self, items: list[tuple[framing.MessageKind, bytes]]) -> list[bytes]:
        call = self._call or framing.NO_CALL
        ready: list[framing.ChannelMessage] = []
        texts: list[tuple[framing.MessageKind, bytes]] = []
        for kind, data in items:
            if kind in _TEXT_KINDS:
                texts.append((kind, data))
            else:
                ready.extend(output_packets.pack_output(call, texts))
                texts = []
                ready.append(framing.ChannelMessage(kind, call, data))
        ready.extend(output_packets.pack_output(call, texts))
        return [packet for message in ready for packet in framing.encode_packets(message)]

    def _send(self, packet: bytes) -> None:
        while True:
            try:
                self._channel.send(packet)
                return
            except OSError as error:
                if error.errno not in _TRANSIENT_ERRORS:
                    os._exit(1)  # the supervisor is gone
                _sleep(0.01)

    # --- threads and processes --------------------------------------------------------------------

    def _belongs_to_call(self) -> bool:
        """Whether the calling thread belongs to the current call."""
        main = threading.get_ident() == self.guard.main
        return self._call is not None and (main or self._thread_call_number() == self._call_number)

    def _thread_call_number(self) -> int:
        """Return the number of the call that this thread belongs to; unknown threads belong to the current one."""
        number = getattr(self._thread_local, "call_number", None)
        if number is None:
            active: dict[int, threading.Thread] = getattr(threading, "_active")  # noqa: B009 (private)
            number = getattr(active.get(threading.get_ident()), _CALL_ATTRIBUTE, self._call_number)
        return number

    def _track_threads(self) -> None:
        """Record for each thread, and for each task of a thread pool, which call started it."""
        start = threading.Thread.start
        thread_call_number = self._thread_call_number
        submit: Callable[..., Any] = concurrent.futures.thread.ThreadPoolExecutor.submit

        @functools.wraps(start)
        def marked_start(self: threading.Thread) -> None:
            setattr(self, _CALL_ATTRIBUTE, thread_call_number())
            start(self)

        def run_for_call(number: int, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            before = getattr(self._thread_local, "call_number", None)
            self._thread_local.call_number = number
            try:
                return function(*args, **kwargs)
            finally:
                self._thread_local.call_number = before

        @functools.wraps(submit)
        def marked_submit(pool: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            return submit(pool, run_for_call, self._thread_call_number(), function, *args, **kwargs)

        threading.Thread.start = marked_start
        concurrent.futures.thread.ThreadPoolExecutor.submit = marked_submit

    def _reset_after_fork(self) -> None:
        """In a child that the program forked: no channel and no queue; output goes into the pipes."""
        self.is_forked = True
        self._lock = threading.RLock()
        self._is_busy = False
        self._queue.clear()
        self.guard.reset_after_fork()
        with contextlib.suppress(OSError):
            self._channel.close()
        self._pipes.close()

    def _write_through(self, kind: framing.MessageKind, data: bytes, *, whole: bool = False) -> None:
        """Write to descriptor 1 or 2 by lines, so that processes do not split each other's lines."""
        data = self._partial_lines[kind] + data
        cut = len(data) if whole or len(data) > output_limits.FLUSH_BYTES else data.rfind(b"\n") + 1
        self._partial_lines[kind] = data[cut:]
        view = memoryview(data)[:cut]
        while view:
            view = view[os.write(1 if kind is framing.MessageKind.STDOUT else 2, view) :]

    # --- the pump ---------------------------------------------------------------------------------

    def _start_pump(self) -> None:
        """Start the thread that reads the pipes. Not a `threading.Thread`: programs count and join those."""
        before = _mask_signals(signal.SIG_BLOCK, _ALL_SIGNALS)
        self._is_pumping = True
        self._tick_pending = False
        try:
            _thread.start_new_thread(self._pump, (self._pipes,))
        finally:
            _mask_signals(signal.SIG_SETMASK, before)

    def _pump(self, pipes: _OutputPipes) -> None:
        poller = pipes.poller()
        poller.register(pipes.wake, select.POLLIN)
        timeout: int | None = None
        while True:
            try:
                events = poller.poll(timeout)
                if any(event & (select.POLLNVAL | select.POLLERR) for _, event in events):
                    self._is_pumping = False
                if any(fd == pipes.wake for fd, _ in events):
                    os.eventfd_read(pipes.wake)
                timeout = self._tick(pipes, expired=not events)
            except MemoryError:
                _sleep(
                    output_limits.TICK_MS / 1000
                )  # the program is at its memory limit, and fails there too
            except Exception:
                self._is_pumping = False
            if not self._is_pumping or self._pipes is not pipes:
                return

    def _tick(self, pipes: _OutputPipes, *, expired: bool) -> int | None:
        with self._lock:
            if self._is_busy or self._pipes is not pipes:
                return output_limits.TICK_MS
            self._is_busy = True
            try:
                self._drain()
                if self._call is None:
                    self._queue.clear()
                else:
                    self._tick_pending = True  # this thread is awake
                    if expired:
                        self._flush()
                    self._flush_or_wake(at_once=True)
                self._tick_pending = bool(self._queue)
                return output_limits.TICK_MS if self._tick_pending else None
            finally:
                self._is_busy = False
