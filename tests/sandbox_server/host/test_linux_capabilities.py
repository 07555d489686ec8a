"""Which capabilities a root server keeps, and that it works with these."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from fumehood.sandbox_server.host import disks, linux_capabilities
from fumehood.sandbox_server.host.disks import DisksUnavailable
from fumehood.sandbox_server.host.linux_capabilities import SUPERVISOR_CAPABILITIES, read_capabilities
from fumehood.sandbox_server.settings import SandboxServerSettings
from tests.support.package_index import FakePackageIndex, wheel
from tests.support.sandbox_runs import build_environment
from tests.support.sandbox_server import SandboxApiClient
from tests.support.websites import Website

ALLOWED = sum(1 << number for number in SUPERVISOR_CAPABILITIES)
DOMAIN = "data.test"
TIMEOUT_SECONDS = 90


@pytest.mark.parametrize(
    ("options", "hides"),
    [
        ("rw,nosuid,nodev,noexec,relatime", False),
        ("rw,hidepid=invisible", False),
        ("rw,gid=27,hidepid=invisible", True),
        ("rw,gid=27,hidepid=2", True),
        ("rw,gid=27", False),
        ("rw,hidepid=ptraceable", True),
    ],
)
def test_where_proc_hides_processes_from_root(options: str, hides: bool) -> None:
    mounts = f"sysfs /sys sysfs rw 0 0\nproc /proc proc {options} 0 0\n"
    assert linux_capabilities.is_proc_restricted(mounts) == hides


class Running:
    """A server as a command starts it."""

    def __init__(self, process: subprocess.Popen[str], client: SandboxApiClient) -> None:
        self.process = process
        self.client = client

    def threads(self) -> list[dict[str, int]]:
        tasks = os.listdir(f"/proc/{self.process.pid}/task")
        return [read_capabilities(f"{self.process.pid}/task/{task}") for task in tasks]

    def children(self) -> list[int]:
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]

    async def stdout(self, name: str, code: str, **request: Any) -> str:
        events = await self.client.run_code(name, code, **request)
        assert events[-1]["status"] == "ok", events
        return "".join(event["text"] for event in events if event["type"] == "stdout")


@asynccontextmanager
async def serving(directory: Path, **settings: Any) -> AsyncGenerator[Running]:
    file = directory / "sandbox.yaml"
    file.write_text(json.dumps(settings))  # JSON is YAML
    command = [str(Path(sys.executable).parent / "fumehood"), "sandbox", "--listen", "127.0.0.1:0"]
    process = subprocess.Popen(
        [*command, "--pool", "1", "--preload", "", "--config", str(file)],
        env=build_environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    client = None
    try:
        ready = await asyncio.to_thread(process.stdout.readline)
        assert ready.startswith("Serving sandboxes on http"), ready
        client = SandboxApiClient(ready.split()[3])
        yield Running(process, client)
    finally:
        if client is not None:
            await client.session.close()
        process.terminate()
        await asyncio.to_thread(process.wait, TIMEOUT_SECONDS)
        process.stdout.close()


def _limited(running: Running) -> None:
    for sets in running.threads():
        assert sets["CapEff"] & ~ALLOWED == 0
        assert sets["CapPrm"] & ~ALLOWED == 0
        assert sets["CapBnd"] & ~ALLOWED == 0
        assert sets["CapInh"] == sets["CapAmb"] == 0


def _has_disks() -> bool:
    try:
        disks.check_disk_support(SandboxServerSettings())
    except DisksUnavailable:
        return False
    return True


@pytest.mark.root
@pytest.mark.timeout(300)
async def test_a_server_that_is_root_keeps_few_capabilities_and_works_with_them(tmp_path: Path) -> None:
    """Files, packages, disks and the network, before and after the zygote and the egress proxy were killed."""
    with FakePackageIndex() as index:
        index.add(wheel("hello", "1.0", {"hello.py": "version = 1"}))
        (tmp_path / "disks").mkdir()
        async with (
            Website() as site,
            serving(
                tmp_path,
                index_url=index.url,
                packages_dir=str(tmp_path / "packages"),
                disk_dir=str(tmp_path / "disks"),
                disk_size_ratio=1 / 64,
                disk_reserve=0,
                egress="allowlist",
                egress_hosts={DOMAIN: "127.0.0.1"},
                egress_private_networks=["127.0.0.0/8"],
                egress_ports=[site.port],
            ) as running,
        ):
            _limited(running)
            await _use_everything(running, site, "first")
            _limited(running)
            before = running.children()
            assert before
            for pid in before:
                os.kill(pid, signal.SIGKILL)
            async with asyncio.timeout(TIMEOUT_SECONDS):
                while not _all_replaced(running, before):
                    await asyncio.sleep(0.05)
                while (await running.client.request("GET", "/health")).status != 200:
                    await asyncio.sleep(0.05)
            await _use_everything(running, site, "second")
            _limited(running)


def _all_replaced(running: Running, before: list[int]) -> bool:
    now = running.children()
    return not set(now) & set(before) and len(now) >= 2


async def _use_everything(running: Running, site: Website, name: str) -> None:
    client = running.client
    network = {"type": "allowlist", "allowed_domains": [DOMAIN]}
    await client.create_sandbox(name, network=network)
    assert await running.stdout(name, "print(6 * 7)") == "42\n"
    fetch = f"import urllib.request\nprint(urllib.request.urlopen('http://{DOMAIN}:{site.port}/a').read().decode())"
    assert await running.stdout(name, fetch) == "GET /a\n"
    assert await running.stdout(name, "import hello\nprint(hello.version)", requirements=["hello"]) == "1\n"
    files = f"/sandboxes/{name}/files"
    assert (await client.request("PUT", f"{files}/a/b.txt", b"given")).status == 200
    assert (
        await running.stdout(name, "import os\nos.chmod('a', 0o700)\nprint(open('a/b.txt').read())")
        == "given\n"
    )
    assert (await client.request("GET", f"{files}/a/b.txt")).body == b"given"
    assert (await client.request("DELETE", f"{files}/a/b.txt")).status == 204
    assert await running.stdout(name, "import os\nprint(os.system('true'))") == "0\n"
    await client.create_sandbox(f"{name}-large", memory="16g")
    kind = await running.stdout(
        f"{name}-large",
        "print([line.split(' - ')[1].split()[0] for line in open('/proc/self/mountinfo') "
        "if line.split()[4] == '/mnt/data'][-1])",
    )
    assert kind == ("ext4\n" if _has_disks() else "tmpfs\n")
    events = await client.run_code(name, "while True: pass", timeout_seconds=0.5)
    assert events[-1]["status"] == "timeout"
    for made in (name, f"{name}-large"):
        assert (await client.request("DELETE", f"/sandboxes/{made}")).status == 204


@pytest.mark.root
def test_a_thread_that_has_more_is_noticed() -> None:
    program = """
import threading
from fumehood.sandbox_server.host.linux_capabilities import limit_supervisor_capabilities
from fumehood.sandbox_server.isolation_errors import IsolationUnavailable
hold = threading.Event()
thread = threading.Thread(target=hold.wait, daemon=True)
thread.start()
try:
    limit_supervisor_capabilities()
except IsolationUnavailable as error:
    print(error.reason)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "has more" in done.stdout, done.stderr


@pytest.mark.root
def test_what_is_given_up_does_not_come_back_by_executing_a_program() -> None:
    program = """
import subprocess, sys
from fumehood.sandbox_server.host.linux_capabilities import limit_capabilities, KILL
limit_capabilities([KILL])
print(subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True).stdout)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    sets = dict(line.split(":") for line in done.stdout.splitlines() if line.startswith("Cap"))
    assert int(sets["CapEff"], 16) == int(sets["CapBnd"], 16) == 1 << linux_capabilities.KILL


@pytest.mark.skipif(os.geteuid() == 0, reason="about an ordinary user")
def test_an_ordinary_user_keeps_the_bounding_set() -> None:
    """Programs that map users for it need it."""
    before = read_capabilities()["CapBnd"]
    linux_capabilities.limit_supervisor_capabilities()
    assert read_capabilities()["CapBnd"] == before
