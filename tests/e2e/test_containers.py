"""Containers over restarts, kills and crowds, with real sandboxes and processes."""

import asyncio
import contextlib
import io
import os
import sqlite3
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from fumehood.protocol.sandbox.sandbox_errors import SandboxServerUnreachable
from fumehood.sandbox_client.remote_provider import RemoteSandboxProvider
from fumehood.sandbox_client.server_connection import SandboxConnectionTimeouts
from tests.e2e.conftest import OUTPUTS, RunningGateway, find_call, make_client, read_logs
from tests.e2e.test_keys_and_idempotency import create_key
from tests.support import gateway_process
from tests.support.gateway_process import GatewayProcess
from tests.support.sandbox_process import LIMITS, run_sandbox_server
from tests.support.waiting import becomes_true

GIB = 1 << 30
CROWD = 50


def settings(**interpreter: object) -> dict[str, object]:
    return {"providers": {"code_interpreter": {"settings": {"sandbox_limits": LIMITS, **interpreter}}}}


def run_code(client: OpenAI, code: str, container: object = None, **more: Any) -> Any:
    """The response to code that the built-in model runs."""
    create: Any = client.responses.create
    tool = {"type": "code_interpreter", "container": container or {"type": "auto"}}
    return create(model="direct", input=f"```python\n{code}\n```", tools=[tool], include=OUTPUTS, **more)


def test_a_repository_is_worked_on(gateway: RunningGateway) -> None:
    """More files than fit into one page of anything, in and out, changed, outliving their sandbox."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for number in range(1500):
            archive.writestr(f"src/d{number % 40}/{number}.py", f"x = {number}\n")
    container = gateway.client.containers.create(name="repository").id
    files: Any = gateway.client.containers.files
    put = files.create(container, file=("all.zip", content.getvalue()), extra_body={"unpack": "true"})
    assert len(put.model_extra["fumehood:unpacked"]) == 1500
    count = "import glob; print(len(glob.glob('**/*.*', recursive=True)), open('src/d7/1447.py').read())"
    assert read_logs(run_code(gateway.client, count, container)) == "1500 x = 1447\n\n"
    change = "for i in range(10): open(f'src/d{i}/{i}.py', 'a').write('changed')"
    make = "for i in range(1000): open(f'made{i}.txt', 'w').write(str(i))"
    run_code(gateway.client, f"{change}\n{make}", container)
    listed = {one.path: one for one in files.list(container, limit=100)}
    assert len(listed) == 2500
    changed = listed["/mnt/data/src/d3/3.py"]
    assert (changed.source, changed.bytes) == ("user", len("x = 3\nchanged"))
    assert files.content.retrieve(changed.id, container_id=container).read() == b"x = 3\nchanged"
    assert listed["/mnt/data/made999.txt"].source == "assistant"
    killed = run_code(gateway.client, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", container)
    assert find_call(killed).status == "failed"
    again = "import glob; print(len(glob.glob('**/*.*', recursive=True)), open('src/d3/3.py').read())"
    assert "2500 x = 3\nchanged" in read_logs(run_code(gateway.client, again, container))
    gateway.client.containers.delete(container)


HIDDEN_CHANGES = {
    "in place": "with open('a.txt', 'r+b') as file: file.write(b'second')",
    "by another file": "open('.b', 'wb').write(b'second'); os.utime('.b', ns=times); os.replace('.b', 'a.txt')",
}


# Older kernels cannot tell two changes within one tick of their clock.
NEXT_TICK = """
import os
open('.tick', 'w').close()
began = os.stat('.tick').st_ctime_ns
while os.stat('.tick').st_ctime_ns == began:
    os.utime('.tick')
"""


@pytest.mark.parametrize("change", HIDDEN_CHANGES)
@pytest.mark.parametrize("given", [0, 1, 2], ids=["made by code", "given", "given with another"])
def test_a_change_of_the_same_size_and_time_is_seen(gateway: RunningGateway, change: str, given: int) -> None:
    files = gateway.client.containers.files
    container = gateway.client.containers.create(name="hidden").id
    for name in ("a.txt", "c.txt")[:given]:
        files.create(container, file=(name, b"first!"))
    run_code(
        gateway.client, NEXT_TICK if given else f"open('a.txt', 'w').write('first!')\n{NEXT_TICK}", container
    )
    (file,) = [one for one in files.list(container) if one.path == "/mnt/data/a.txt"]
    assert files.content.retrieve(file.id, container_id=container).read() == b"first!"
    times = "import os; before = os.stat('a.txt'); times = (before.st_atime_ns, before.st_mtime_ns)"
    check = "after = os.stat('a.txt'); print((after.st_size, after.st_mtime_ns) == (6, before.st_mtime_ns))"
    hide = "os.utime('a.txt', ns=times)"
    response = run_code(gateway.client, "\n".join([times, HIDDEN_CHANGES[change], hide, check]), container)
    assert read_logs(response) == "True\n"
    assert files.content.retrieve(file.id, container_id=container).read() == b"second"
    gateway.client.containers.delete(container)


@pytest.fixture
def socket(tmp_path: Path) -> Iterator[Path]:
    """A sandbox server that is nobody's child but ours."""
    path = tmp_path / "sandboxes.sock"
    with run_sandbox_server("--socket", str(path), "--pool", "1"):
        yield path


async def list_running(path: Path) -> list[str]:
    async with RemoteSandboxProvider(f"unix:{path}", timeouts=SandboxConnectionTimeouts(retries=0)) as remote:
        return [info.id for info in await remote.list_sandboxes()]


def find_sandboxes(path: Path) -> list[str] | None:
    """Those that live, None if the server does not answer."""
    try:
        return asyncio.run(list_running(path))
    except SandboxServerUnreachable:
        return None


def count_rows(running: GatewayProcess, table: str) -> int:
    with contextlib.closing(sqlite3.connect(running.directory / "gateway.db")) as database:
        (number,) = database.execute(f"SELECT count(*) FROM {table}").fetchone()
        return number


def list_blobs(running: GatewayProcess) -> list[Path]:
    return [path for path in (running.directory / "blobs").rglob("*") if len(path.name) == 64]


def test_a_gateway_that_was_killed_finds_its_containers_again(tmp_path: Path, socket: Path) -> None:
    elsewhere = settings(sandbox_url=f"unix:{socket}")
    running = gateway_process.start_gateway(tmp_path, elsewhere)
    with make_client(running) as client:
        made = client.containers.create(name="kept")
        client.containers.files.create(made.id, file=("given.txt", b"given"))
        first = run_code(client, "x = 41\nopen('made.txt', 'w').write('made')\nNone", made.id)
        assert find_call(first).status == "completed"
        alone = client.containers.create(name="never used")
        client.containers.files.create(alone.id, file=("given.txt", b"given"))
    running.kill()
    assert find_sandboxes(socket) == [f"{made.id}-1"]
    with (
        gateway_process.run_gateway(tmp_path, elsewhere) as running,
        make_client(running, strict=True) as client,
    ):
        assert client.containers.retrieve(made.id).status == "running"
        again = run_code(client, "print(x + 1, open('given.txt').read())", made.id)
        assert read_logs(again) == "42 given\n"
        assert {file.path: file.source for file in client.containers.files.list(made.id)} == {
            "/mnt/data/given.txt": "user",
            "/mnt/data/made.txt": "assistant",
        }
        assert read_logs(run_code(client, "print(open('given.txt').read())", alone.id)) == "given\n"
        for container in (made, alone):
            client.containers.delete(container.id)
        assert find_sandboxes(socket) == []
        assert count_rows(running, "files") == 0
        assert list_blobs(running) == []


def test_a_sandbox_that_is_lost_while_code_runs_fails_the_call(tmp_path: Path, socket: Path) -> None:
    """And the container that is deleted meanwhile is such a case."""
    with (
        gateway_process.run_gateway(tmp_path, settings(sandbox_url=f"unix:{socket}")) as running,
        make_client(running) as client,
    ):
        made = client.containers.create(name="lost")
        tool: Any = {"type": "code_interpreter", "container": made.id}
        code = "```python\nimport time\nfor n in range(600): time.sleep(0.1)\n```"
        with client.responses.create(model="direct", input=code, tools=[tool], stream=True) as events:
            for event in events:
                if event.type == "response.code_interpreter_call.interpreting":
                    assert becomes_true(lambda: bool(find_sandboxes(socket)), 60)
                    client.containers.delete(made.id)
                if event.type == "response.completed":
                    assert find_call(event.response).status == "failed"
        assert find_sandboxes(socket) == []
        with pytest.raises(openai.NotFoundError):
            run_code(client, "1", made.id)


def test_containers_of_an_embedded_server_expire_with_it(tmp_path: Path) -> None:
    running = gateway_process.start_gateway(tmp_path, settings())
    with make_client(running) as client:
        first = run_code(client, "x = 41\nopen('made.txt', 'w').write('made')\nNone")
        container = find_call(first).container_id
        client.containers.files.create(container, file=("given.txt", b"given"))
        unused = client.containers.create(name="never used")
    running.kill()
    with (
        gateway_process.run_gateway(tmp_path, settings()) as running,
        make_client(running, strict=True) as client,
    ):
        assert client.containers.retrieve(container).status == "expired"
        assert client.containers.retrieve(unused.id).status == "running"
        with pytest.raises(openai.NotFoundError):
            client.containers.files.list(container)
        with pytest.raises(openai.BadRequestError, match=r"Container is expired\."):
            run_code(client, "1", container)
        code = "import os\nprint(sorted(os.listdir()), 'x' in globals())"
        second = run_code(client, code, previous_response_id=first.id)
        assert find_call(second).container_id != container
        assert read_logs(second) == "['given.txt'] False\n"
        assert client.responses.retrieve(first.id).status == "completed"


def test_more_conversations_than_containers_are_allowed(gateway: RunningGateway) -> None:
    """Each with a container of its own; fifty may run, and those that nobody uses any more make room."""
    auto: Any = [{"type": "code_interpreter", "container": {"type": "auto"}}]
    script = "```\nprint(6 * 7)\n```"
    answers = [
        gateway.strict.responses.create(model="direct", input=script, tools=auto, store=False).output_text
        for _ in range(60)
    ]
    assert [text for text in answers if not text.startswith("42")] == []
    states = [one.status for one in gateway.strict.containers.list(limit=100)]
    assert states.count("running") <= 50


def test_an_archive_is_unpacked_where_the_code_finds_it(gateway: RunningGateway) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("data/numbers.csv", "1\n2\n3\n")
        archive.writestr("read me.txt", "hello")
    made = gateway.strict.containers.create(name="unpacked")
    first = gateway.strict.containers.files.create(
        made.id, file=("all.zip", packed.getvalue()), extra_body={"unpack": "true"}
    )
    assert first.path == "/mnt/data/data/numbers.csv"
    code = "print(sum(map(int, open('data/numbers.csv'))), open('read me.txt').read())"
    assert read_logs(run_code(gateway.strict, code, made.id)) == "6 hello\n"
    changed = "open('data/numbers.csv', 'a').write('4\\n')\nNone"
    run_code(gateway.strict, changed, made.id)
    files = {file.path: file for file in gateway.strict.containers.files.list(made.id)}
    assert files["/mnt/data/data/numbers.csv"].id == first.id
    assert {file.source for file in files.values()} == {"user"}
    gateway.strict.containers.delete(made.id)


# --- crowds -------------------------------------------------------------------------------------------


def read_memory_bytes(running: GatewayProcess) -> int:
    status = Path(f"/proc/{running.process.pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) << 10


@pytest.mark.slow
def test_a_gib_into_a_container_takes_no_memory(tmp_path: Path) -> None:
    large = settings(container_bytes=4 * GIB) | {"files": {"file_bytes": 2 * GIB}}
    content = tmp_path / "large.bin"
    with content.open("wb") as file:
        for number in range(1024):
            file.write(os.urandom(1024) * 1024 if number % 7 == 0 else bytes([number % 256]) * (1 << 20))
    with gateway_process.run_gateway(tmp_path, large) as running, make_client(running) as client:
        made = client.with_options(timeout=600).containers.create(name="large")
        client.containers.files.create(made.id, file=("small.bin", b"x"))
        before = read_memory_bytes(running)
        peak = [before]
        watching = True

        def watch() -> None:
            while watching:
                peak.append(read_memory_bytes(running))
                time.sleep(0.02)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            with content.open("rb") as file:
                put = client.with_options(timeout=600).containers.files.create(made.id, file=file)
        finally:
            watching = False
            watcher.join()
        assert put.bytes == GIB
        assert max(peak) - before < 64 << 20
        part = client.containers.files.content.retrieve(
            put.id, container_id=made.id, extra_headers={"range": f"bytes={GIB - 10}-"}
        )
        assert len(part.read()) == 10
        client.containers.delete(made.id)
        assert list_blobs(running) == []


@pytest.mark.slow
def test_the_sandbox_of_a_call_that_a_kill_cut_off_goes_when_the_gateway_comes_back(
    tmp_path: Path, socket: Path
) -> None:
    """With a sandbox for every call, and long before an idle one would be noticed."""
    elsewhere = settings(sandbox_url=f"unix:{socket}", isolation="execution")
    running = gateway_process.start_gateway(tmp_path, elsewhere)
    tool: Any = {"type": "code_interpreter"}
    with make_client(running) as client:
        create: Any = client.responses.create
        code = "import time\ntime.sleep(60)"
        request = {"model": "direct", "input": f"```python\n{code}\n```", "stream": True}
        stream = create(tools=[tool], **request)
        while next(stream).type != "response.code_interpreter_call.interpreting":
            pass
        assert becomes_true(lambda: len(find_sandboxes(socket) or ()) == 1, 60)
        running.kill()
    assert len(find_sandboxes(socket) or ()) == 1
    with gateway_process.run_gateway(tmp_path, elsewhere):
        assert becomes_true(lambda: find_sandboxes(socket) == [], 60)


@pytest.mark.slow
def test_nothing_is_left_of_what_a_kill_cut_off(tmp_path: Path, socket: Path) -> None:
    """Calls that run, files that arrive and files that were just written."""
    elsewhere = settings(sandbox_url=f"unix:{socket}")
    code = "import time\nfor n in range(600):\n    open(f'{n}.txt', 'w').write(str(n))\n    time.sleep(0.1)"
    tool: Any = {"type": "code_interpreter"}

    def run(client: OpenAI, container: str, begun: threading.Semaphore) -> None:
        create: Any = client.responses.create
        request = {"model": "direct", "input": f"```python\n{code}\n```", "stream": True}
        with contextlib.suppress(openai.OpenAIError, httpx2.HTTPError):
            for event in create(tools=[{**tool, "container": container}], **request):
                if event.type == "response.code_interpreter_call.interpreting":
                    begun.release()

    def upload(client: OpenAI, container: str) -> None:
        with contextlib.suppress(openai.OpenAIError, httpx2.HTTPError):
            while True:
                client.containers.files.create(container, file=("large.bin", os.urandom(8 << 20)))

    running = gateway_process.start_gateway(tmp_path, elsewhere)
    begun = threading.Semaphore(0)
    with make_client(running) as client:
        made = [client.containers.create(name=f"{number}").id for number in range(6)]
        work = [threading.Thread(target=run, args=(client, name, begun)) for name in made]
        work += [threading.Thread(target=upload, args=(client, name)) for name in made[:2]]
        for thread in work:
            thread.start()
        for _ in made:
            assert begun.acquire(timeout=60)
        assert becomes_true(
            lambda: len(find_sandboxes(socket) or ()) == len(made) and bool(list_blobs(running)), 60
        )
        running.kill()
        for thread in work:
            thread.join(60)
    with gateway_process.run_gateway(tmp_path, elsewhere) as running, make_client(running) as client:
        assert {container.id for container in client.containers.list()} == set(made)
        for name in made:
            client.containers.delete(name)
        assert find_sandboxes(socket) == []
        assert count_rows(running, "files") == 0
        left = [path for path in (running.directory / "blobs" / "incoming").iterdir() if path.is_file()]
        assert (list_blobs(running), left) == ([], [])


@pytest.mark.slow
def test_a_hundred_containers_of_two_tenants(tmp_path: Path, socket: Path) -> None:
    """Each has a sandbox, code that runs and files; nobody sees anything of the other's, and nothing is left."""
    elsewhere = settings(sandbox_url=f"unix:{socket}", claim_timeout=300)
    keys = {tenant: create_key(tmp_path, elsewhere, "--tenant", tenant) for tenant in ("ann", "ben")}

    async def one(client: AsyncOpenAI, tenant: str, place: int) -> str:
        mark = f"{tenant} {place}"
        made = await client.containers.create(name=tenant)
        await client.containers.files.create(made.id, file=("given.txt", mark.encode()))
        tool: Any = {"type": "code_interpreter", "container": made.id}
        code = "given = open('given.txt').read()\nopen('made.txt', 'w').write(given)\nprint(given)"
        response: Any = await client.responses.create(
            model="direct", input=f"```python\n{code}\n```", tools=[tool], include=OUTPUTS
        )
        assert read_logs(response) == f"{mark}\n"
        files = {file.path: file async for file in client.containers.files.list(made.id)}
        content = await client.containers.files.content.retrieve(
            files["/mnt/data/made.txt"].id, container_id=made.id
        )
        assert content.read() == mark.encode()
        return made.id

    async def crowd(running: GatewayProcess) -> None:
        async with contextlib.AsyncExitStack() as stack:
            clients = {
                tenant: await stack.enter_async_context(
                    AsyncOpenAI(base_url=running.url, api_key=key, max_retries=0, timeout=600)
                )
                for tenant, key in keys.items()
            }
            places = range(CROWD)
            made = await asyncio.gather(
                *(one(client, tenant, place) for place in places for tenant, client in clients.items())
            )
            assert len(await list_running(socket)) == 2 * CROWD
            for number, (tenant, client) in enumerate(clients.items()):
                own = set(made[number::2])
                assert {container.id async for container in client.containers.list(limit=20)} == own
                foreign = next(name for name in made if name not in own)
                with pytest.raises(openai.NotFoundError):
                    await client.containers.retrieve(foreign)
                with pytest.raises(openai.RateLimitError):  # as many as are allowed
                    await client.containers.create(name=tenant)
            await asyncio.gather(
                *(
                    client.containers.delete(name)
                    for number, client in enumerate(clients.values())
                    for name in made[number::2]
                )
            )

    with gateway_process.run_gateway(tmp_path, elsewhere) as running:
        asyncio.run(crowd(running))
        assert find_sandboxes(socket) == []
        assert count_rows(running, "files") == 0
        assert list_blobs(running) == []
