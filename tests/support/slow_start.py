"""Settings that a sandbox server can read only when a test lets it: its start takes as long as the test wants."""

import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


class SlowStart:
    """`config` is a pipe: whoever opens it to read waits until the test writes."""

    def __init__(self, directory: Path) -> None:
        self.config = directory / "sandbox.yaml"
        os.mkfifo(self.config)

    @contextmanager
    def open(self) -> Generator[None]:
        """One server can start meanwhile."""
        writer = threading.Thread(target=self._write, daemon=True)
        writer.start()
        yield
        writer.join(60)
        assert not writer.is_alive(), "no server has read its settings"

    def _write(self) -> None:
        self.config.write_text("")
