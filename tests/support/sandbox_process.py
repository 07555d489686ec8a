"""`fumehood sandbox` as a process."""

import re
import subprocess
import sys
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager

from tests.support.sandbox_runs import build_environment, has_cgroups

LIMITS = "enforced" if has_cgroups() else "best-effort"
_ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+|unix:\S+")


@contextmanager
def run_sandbox_server(
    *options: str, environment: Mapping[str, str] | None = None, kill: bool = False
) -> Generator[tuple[subprocess.Popen[str], str]]:
    """One that serves, and its address. kill: end it without letting calls end."""
    command = [sys.executable, "-m", "fumehood", "sandbox", "--preload", "", "--limits", LIMITS, *options]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**build_environment(), **(environment or {})},
    ) as process:
        assert process.stdout is not None
        address = next((found[0] for line in process.stdout if (found := _ADDRESS.search(line))), None)
        assert address is not None, "it did not serve"
        drain = threading.Thread(target=process.stdout.read, daemon=True)
        drain.start()
        try:
            yield process, address
        finally:
            (process.kill if kill else process.terminate)()
            process.wait(60)
            drain.join()
