"""`/readyz` of a gateway whose sandbox server dies, stops, hangs or starts slowly."""

import asyncio
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from fumehood.sandbox_client.remote_provider import RemoteSandboxProvider
from tests.support import gateway_process
from tests.support.gateway_process import GatewayProcess
from tests.support.sandbox_process import LIMITS, run_sandbox_server
from tests.support.slow_start import SlowStart

PATIENCE = 60.0
NOTICED_WITHIN = 2.5  # the promise is two seconds; the machine may be busy


def is_ready(running: GatewayProcess) -> bool:
    answer = httpx.get(running.url.replace("/v1", "/readyz"), timeout=30)
    assert answer.status_code == 200 or "The sandbox server does not answer" in answer.text
    return answer.status_code == 200


def wait_until_ready(running: GatewayProcess, ready: bool, seconds: float = PATIENCE) -> float:
    """How many seconds it took."""
    began = time.monotonic()
    while is_ready(running) is not ready:
        assert time.monotonic() - began < seconds, f"/readyz did not change within {seconds:g} s"
        time.sleep(0.02)
    return time.monotonic() - began


def list_children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def test_probes_let_a_slow_start_of_the_embedded_server_go_on(tmp_path: Path) -> None:
    slow = SlowStart(tmp_path)
    interpreter = {"sandbox_limits": LIMITS, "sandbox_pool": 0, "sandbox_config": str(slow.config)}
    settings = {"providers": {"code_interpreter": {"settings": interpreter}}}
    with slow.open():
        running = gateway_process.start_gateway(tmp_path, settings)
    try:
        (first,) = list_children(running.process.pid)
        os.kill(first, signal.SIGKILL)
        assert wait_until_ready(running, False) < NOTICED_WITHIN
        seen: set[int] = set()
        for _ in range(4):  # each gives up before the start has ended
            assert not is_ready(running)
            seen.update(list_children(running.process.pid))
        assert len(seen - {first}) == 1, "a probe ended the start that it had begun"
        with slow.open():
            wait_until_ready(running, True)
        assert list_children(running.process.pid) == [*(seen - {first})]
    finally:
        running.stop()


@contextmanager
def sandbox_server(socket: Path) -> Generator[subprocess.Popen[str]]:
    options = ("--socket", str(socket), "--pool", "0", "--grace", "20")
    with run_sandbox_server(*options, kill=True) as (process, _):
        yield process


@pytest.fixture
def running(tmp_path: Path) -> Generator[GatewayProcess]:
    """A gateway without an embedded sandbox server: it asks one at `tmp_path/socket`."""
    interpreter = {"sandbox_url": f"unix:{tmp_path}/socket"}
    settings = {"providers": {"code_interpreter": {"settings": interpreter}}}
    with gateway_process.run_gateway(tmp_path, settings) as gateway:
        yield gateway


def test_the_death_of_a_separate_server_is_noticed_and_so_is_its_return(
    running: GatewayProcess, tmp_path: Path
) -> None:
    for _ in range(2):
        with sandbox_server(tmp_path / "socket") as server:
            wait_until_ready(running, True)
            server.kill()
            assert wait_until_ready(running, False) < NOTICED_WITHIN
        (tmp_path / "socket").unlink()


def test_a_separate_server_that_hangs_is_noticed(running: GatewayProcess, tmp_path: Path) -> None:
    with sandbox_server(tmp_path / "socket") as server:
        wait_until_ready(running, True)
        server.send_signal(signal.SIGSTOP)
        assert wait_until_ready(running, False) < NOTICED_WITHIN
        server.send_signal(signal.SIGCONT)
        assert wait_until_ready(running, True) < NOTICED_WITHIN


async def _until_code_runs(url: str) -> None:
    async with RemoteSandboxProvider(url) as sandboxes, asyncio.timeout(PATIENCE):
        while not (await sandboxes.health()).running:
            await asyncio.sleep(0.02)


def test_a_separate_server_that_stops_and_still_lets_calls_end_is_noticed(
    running: GatewayProcess, tmp_path: Path
) -> None:
    with sandbox_server(tmp_path / "socket") as server:
        wait_until_ready(running, True)
        code = "import time\\nprint(1, flush=True)\\ntime.sleep(60)"
        request = urllib.request.Request(
            f"{running.url}/responses",
            b'{"model": "direct", "stream": true, "tools": [{"type": "code_interpreter"}], "input":'
            b' "```python\\n%s\\n```"}' % code.encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=PATIENCE):
            asyncio.run(_until_code_runs(f"unix:{tmp_path}/socket"))
            server.send_signal(signal.SIGTERM)
            assert wait_until_ready(running, False) < NOTICED_WITHIN
            assert server.poll() is None, "it has ended already: this shows nothing"
