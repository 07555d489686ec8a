"""The program's `sys.stdout` and `sys.stderr`, which append to the output queue."""

import builtins
import io
from collections.abc import Buffer

from fumehood.sandbox_server.inside import framing
from fumehood.sandbox_server.inside.runner.output_capture import OutputQueue

globals()["__builtins__"] = dict(vars(builtins))  # see output_capture.py


class _QueueStream(io.IOBase):
    """A stream into the output queue; it cannot be closed."""

    def __init__(self, output: OutputQueue, kind: framing.MessageKind) -> None:
        self._output = output
        self._kind = kind

    @property
    def closed(self) -> bool:
        return False

    @property
    def name(self) -> str:
        return "<stdout>" if self._kind is framing.MessageKind.STDOUT else "<stderr>"

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 1 if self._kind is framing.MessageKind.STDOUT else 2

    def flush(self) -> None:
        self._output.flush()

    def close(self) -> None:
        """Only flush: a TextIOWrapper that a program puts around it closes it when it is collected."""
        self._output.flush()


class _CapturedBinaryStream(_QueueStream, io.BufferedIOBase):
    """`sys.stdout.buffer`: decodes bytes incrementally."""

    mode = "wb"

    def __init__(self, output: OutputQueue, kind: framing.MessageKind) -> None:
        super().__init__(output, kind)
        self._decoder = output.add_decoder(kind)

    def write(self, data: Buffer, /) -> int:
        if isinstance(data, str):
            raise TypeError("a bytes-like object is required, not 'str'")
        raw = bytes(data)
        text = self._decoder.decode(raw)
        if text:
            self._output.write_text(self._kind, text.encode())
        return len(raw)


class CapturedStream(_QueueStream, io.TextIOBase):
    """`sys.stdout` or `sys.stderr` of the program."""

    encoding = "utf-8"
    errors = "backslashreplace"
    line_buffering = True
    write_through = False
    mode = "w"

    def __init__(self, output: OutputQueue, kind: framing.MessageKind) -> None:
        super().__init__(output, kind)
        self._buffer = _CapturedBinaryStream(output, kind)

    @property
    def buffer(self) -> io.BufferedIOBase:
        return self._buffer

    def write(self, text: str, /) -> int:
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance] (called by untyped code)
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        self._output.write_text(self._kind, text.encode("utf-8", "backslashreplace"))
        return len(text)

    def reconfigure(self, **options: object) -> None:
        """Ignore the options: text is always UTF-8."""
