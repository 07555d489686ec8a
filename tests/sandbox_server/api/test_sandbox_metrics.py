"""Prometheus metrics of the sandbox server, each changed by a real operation."""

import asyncio
import errno
import io
import os
import re
import signal
import zipfile
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Self

import pytest
import pytest_asyncio

from fumehood.sandbox_server.host.resource_allocator import ResourceAllocator
from tests.support.package_index import FakePackageIndex, wheel
from tests.support.sandbox_runs import has_cgroups, settings
from tests.support.sandbox_server import RunningServer, SandboxApiClient, run_server
from tests.support.websites import Website

pytestmark = pytest.mark.asyncio(loop_scope="module")

TIMEOUT_SECONDS = 60
SITE = "data.test"
type Samples = dict[str, float]


@pytest.fixture(scope="module")
def index() -> Iterator[FakePackageIndex]:
    with FakePackageIndex() as made:
        made.add(wheel("hello", "1.0", {"hello.py": "version = 1"}))
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site() -> AsyncIterator[Website]:
    async with Website() as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(
    index: FakePackageIndex, site: Website, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RunningServer]:
    chosen = settings(
        preload=(),
        shards=2,
        capacity=6,
        interrupt_grace=0.2,
        index_url=index.url,
        packages_dir=tmp_path_factory.mktemp("packages"),
        egress="allowlist",
        egress_hosts={SITE: "127.0.0.1"},
        egress_private_networks=("127.0.0.0/8",),
        egress_ports=(site.port,),
    )
    async with run_server(chosen) as server:
        yield server


@pytest_asyncio.fixture(loop_scope="module")
async def client(running: RunningServer) -> AsyncIterator[SandboxApiClient]:
    yield running.client
    await running.client.delete_all()


async def read_samples(client: SandboxApiClient) -> Samples:
    """Every sample, by its name and labels as they are written."""
    text = (await client.request("GET", "/metrics")).body.decode()
    lines = (line for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


class SampleChanges:
    """What has changed since it was made, by names without their prefix; `_sum` and its like are left out."""

    def __init__(self, client: SandboxApiClient, before: Samples) -> None:
        self._client = client
        self._before = before

    @classmethod
    async def since_now(cls, client: SandboxApiClient) -> Self:
        return cls(client, await read_samples(client))

    async def read(self) -> Samples:
        now = await read_samples(self._client)
        changed = {name: value - self._before.get(name, 0) for name, value in now.items()}
        return {
            name.removeprefix("fumehood_sandbox_"): difference
            for name, difference in changed.items()
            if difference and not re.search(r"_(sum|bucket|created)\b|memory_bytes", name)
        }


async def wait_for_samples(client: SandboxApiClient, holds: Callable[[Samples], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while not holds(await read_samples(client)):
            await asyncio.sleep(0.01)


def execution_ended(status: str, state: str = "kept", number: int = 1) -> Samples:
    return {
        f'executions_total{{state="{state}",status="{status}"}}': number,
        'phase_duration_seconds_count{phase="execute"}': number,
        'phase_duration_seconds_count{phase="first_output"}': number,
    }


CREATED_COLD = {
    'starts_total{kind="cold"}': 1,
    'phase_duration_seconds_count{phase="create_cold"}': 1,
    "instances": 1,
}


async def test_every_name_says_whose_it_is(client: SandboxApiClient) -> None:
    answer = await client.request("GET", "/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    names = {line.split()[2] for line in answer.body.decode().splitlines() if line.startswith("# TYPE")}
    assert all(name.startswith("fumehood_sandbox_") for name in names)


async def test_several_zygotes_are_no_restarts(client: SandboxApiClient) -> None:
    assert (await read_samples(client))["fumehood_sandbox_zygote_restarts_total"] == 0


async def test_a_life(client: SandboxApiClient) -> None:
    change = await SampleChanges.since_now(client)
    await client.create_sandbox("box")
    assert await change.read() == CREATED_COLD
    change = await SampleChanges.since_now(client)
    await client.run_code("box", "1")
    assert await change.read() == execution_ended("ok")
    change = await SampleChanges.since_now(client)
    await client.run_code("box", "1/0")
    assert await change.read() == execution_ended("error")
    change = await SampleChanges.since_now(client)
    await client.request("DELETE", "/sandboxes/box")
    assert await change.read() == {'phase_duration_seconds_count{phase="destroy"}': 1, "instances": -1}
    change = await SampleChanges.since_now(client)
    await client.request("GET", "/sandboxes/never-was")
    assert await change.read() == {'errors_total{code="sandbox_not_found"}': 1}


STUBBORN = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("while True: pass", execution_ended("timeout")),
        (STUBBORN, {**execution_ended("timeout", "lost"), "unexpected_exits_total": 1, "instances": -1}),
        (
            "import os; os._exit(0)",
            {**execution_ended("lost", "lost"), "unexpected_exits_total": 1, "instances": -1},
        ),
        pytest.param(
            "import mmap\nm = mmap.mmap(-1, 2 << 30)\nfor i in range(0, 2 << 30, 4096): m[i] = 1",
            {**execution_ended("out_of_memory", "lost"), "unexpected_exits_total": 1, "instances": -1},
            marks=pytest.mark.skipif(not has_cgroups(), reason="memory cannot be bounded as this user"),
        ),
    ],
    ids=["time-out", "killed at its time-out", "lost", "out of memory"],
)
async def test_how_code_ends_badly(client: SandboxApiClient, code: str, expected: Samples) -> None:
    await client.create_sandbox("box")
    change = await SampleChanges.since_now(client)
    await client.run_code("box", code, timeout_seconds=0.3 if "while" in code else TIMEOUT_SECONDS)
    assert await change.read() == expected


async def test_what_is_interrupted_runs_until_then(client: SandboxApiClient) -> None:
    await client.create_sandbox("box")
    change = await SampleChanges.since_now(client)
    work = asyncio.ensure_future(client.run_code("box", "import time; time.sleep(600)"))
    await wait_for_samples(client, lambda now: now["fumehood_sandbox_running_executions"] == 1)
    await client.request("POST", "/sandboxes/box/interrupt")
    await work
    assert await change.read() == execution_ended("interrupted")


async def test_files(client: SandboxApiClient) -> None:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as members:
        members.writestr("member", b"x" * 1000)
    await client.create_sandbox("box")
    change = await SampleChanges.since_now(client)
    await client.request("PUT", "/sandboxes/box/files/put", b"12345")
    await client.request("POST", "/sandboxes/box/unpack?kind=zip", archive.getvalue())
    await client.request("GET", "/sandboxes/box/files/member")
    assert await change.read() == {
        'file_transfer_bytes_total{direction="in"}': 1005,
        'file_transfer_bytes_total{direction="out"}': 1000,
    }
    change = await SampleChanges.since_now(client)
    code = "import os; open(os.environ['OUTPUT_DIR'] + '/made', 'w').write('abc')"
    await client.request("POST", "/execute", {"code": code, "files": {"given": "aGVsbG8="}})
    seen = await change.read()
    assert seen['file_transfer_bytes_total{direction="in"}'] == 5
    assert seen['file_transfer_bytes_total{direction="out"}'] == 3


async def test_packages(client: SandboxApiClient) -> None:
    change = await SampleChanges.since_now(client)
    await client.create_sandbox("box", requirements=["hello"])
    assert await change.read() == {
        'starts_total{kind="cold"}': 1,
        'phase_duration_seconds_count{phase="install"}': 1,
        "instances": 1,
        'package_installs_total{outcome="installed"}': 1,
    }
    change = await SampleChanges.since_now(client)
    await client.run_code("box", "1", requirements=["hello"])  # is there already
    await client.run_code("box", "1", requirements=["never-was"])
    seen = await change.read()
    assert seen['package_installs_total{outcome="failed"}'] == 1
    assert 'package_installs_total{outcome="installed"}' not in seen
    assert seen['executions_total{state="kept",status="install_failed"}'] == 1


async def test_whoever_waits(client: SandboxApiClient, index: FakePackageIndex) -> None:
    index.add(wheel("late", "1.0", {"late.py": ""}))
    with index.held():
        asked = asyncio.ensure_future(client.create_sandbox("box", requirements=["late"]))
        await wait_for_samples(client, lambda now: now["fumehood_sandbox_pending_creations"] == 1)
    await asked
    assert (await read_samples(client))["fumehood_sandbox_pending_creations"] == 0


async def test_the_network(client: SandboxApiClient, site: Website) -> None:
    network: dict[str, Any] = {"type": "allowlist", "allowed_domains": [SITE]}
    await client.create_sandbox("box", network=network)
    code = """
import urllib.request
for url in {urls!r}:
    try:
        urllib.request.urlopen(url, timeout=30).read()
    except OSError as error:
        print(error)
"""
    change = await SampleChanges.since_now(client)
    urls = [f"http://{SITE}:{site.port}/", f"http://other.test:{site.port}/"]
    await client.run_code("box", code.format(urls=urls))
    assert await change.read() == {
        **execution_ended("ok"),
        'egress_requests_total{verdict="allowed"}': 1,
        'egress_requests_total{verdict="refused"}': 1,
    }


@pytest.mark.skipif(not has_cgroups(), reason="memory is not counted as this user")
async def test_memory(client: SandboxApiClient) -> None:
    await client.create_sandbox("box")
    before = (await read_samples(client))["fumehood_sandbox_memory_bytes"]
    await client.run_code("box", "held = b'x' * (200 << 20)")
    assert (await read_samples(client))["fumehood_sandbox_memory_bytes"] > before + (150 << 20)


async def test_the_pool() -> None:
    async with run_server(settings(preload=(), pool=1, capacity=4)) as server:
        client = server.client
        await wait_for_samples(client, lambda now: now["fumehood_sandbox_pool_available"] == 1)
        change = await SampleChanges.since_now(client)
        await client.create_sandbox("warm")
        await wait_for_samples(client, lambda now: now["fumehood_sandbox_pool_available"] == 1)
        assert await change.read() == {
            'starts_total{kind="warm"}': 1,
            'phase_duration_seconds_count{phase="create_warm"}': 1,
            "instances": 1,
            "pool_refills_total": 1,
        }
        now = await read_samples(client)
        assert (now["fumehood_sandbox_pool_size"], now["fumehood_sandbox_capacity"]) == (1, 4)
        assert now["fumehood_sandbox_pool_refill_failures_total"] == 0


async def test_a_pool_that_cannot_be_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "no descriptors are left")

    async with run_server(settings(preload=(), pool=1, capacity=4)) as server:
        await wait_for_samples(server.client, lambda now: now["fumehood_sandbox_pool_available"] == 1)
        monkeypatch.setattr(ResourceAllocator, "allocate", refuse)
        await server.client.create_sandbox("takes-the-parked-one")
        await wait_for_samples(
            server.client, lambda now: now["fumehood_sandbox_pool_refill_failures_total"] >= 1
        )
        monkeypatch.undo()
        pid = server.service.supervisor.zygote.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await wait_for_samples(server.client, lambda now: now["fumehood_sandbox_zygote_restarts_total"] == 1)
        await wait_for_samples(server.client, lambda now: now["fumehood_sandbox_unexpected_exits_total"] == 1)
