"""A pod runs one sandbox, once, behind its token; what its containers keep from each other."""

import asyncio
import os
from pathlib import Path
from typing import Literal

import aiohttp
import pytest

from fumehood.protocol.sandbox.sandbox_errors import FileRefused, SandboxFileNotFound, SandboxGone
from fumehood.protocol.sandbox.sandbox_messages import ExecuteRequest, ExecutionEnd, SandboxSpec
from fumehood.sandbox_client.remote_provider import RemoteSandboxProvider
from fumehood.sandbox_server.api.http_operations import OPERATIONS
from fumehood.testing.conformance_kits.sandbox_files_kit import read_content
from fumehood.testing.conformance_kits.sandbox_kit import get_end, read_events
from tests.support.archives import make_zip
from tests.support.pods import TOKEN, Pod, make_pod, run_pod
from tests.support.sandbox_server import SandboxApiClient

pytestmark = pytest.mark.asyncio


def _printed(events: list[dict[str, str]]) -> str:
    return "".join(event["text"] for event in events if event["type"] in ("stdout", "stderr"))


async def _run(client: SandboxApiClient, code: str, **request: object) -> str:
    return _printed(await client.run_code("box", code, **request))


async def test_a_pod_holds_one_sandbox_once(pod_directory: Path) -> None:
    async with run_pod(pod_directory, options=("--idle-seconds", "600")) as (pod, client):
        assert (await client.request("GET", "/health")).json["status"] == "ok"
        refused = await client.request("PUT", "/sandboxes/box", {"memory": "4g"})
        assert refused.error == (400, "invalid_request", "memory")
        assert "This pod has 1g of memory" in refused.json["error"]["message"]
        await client.create_sandbox("box")
        assert (
            await _run(client, "import os; print(os.getuid(), os.getcwd())") == f"{_code_uid()} /mnt/data\n"
        )
        other = await client.request("PUT", "/sandboxes/other", {})
        assert (other.status, other.json["error"]["code"]) == (429, "at_capacity")
        await client.request("DELETE", "/sandboxes/box")
        health = await client.request("GET", "/health")
        assert (health.status, health.json["status"]) == (503, "ended")
        assert (await client.request("PUT", "/sandboxes/box", {})).status == 429
        assert (await client.request("POST", "/execute", {"code": "1"})).status == 429
        assert await pod.wait_ended("code") == 0


async def test_a_pod_serves_as_a_host_does(pod_directory: Path) -> None:
    """Files, archives, the shell, time-outs and what ignores them; tests/contracts has the whole kit (slow)."""
    async with (
        run_pod(pod_directory) as (pod, _),
        RemoteSandboxProvider(pod.url, TOKEN) as provider,
    ):
        sandbox = await provider.attach(await provider.create(SandboxSpec(), "box"))

        async def run(
            code: str, timeout: float = 30, language: Literal["python", "shell"] = "python"
        ) -> ExecutionEnd:
            request = ExecuteRequest(code=code, language=language, timeout_seconds=timeout)
            return get_end(await read_events(sandbox.execute(request)))

        await sandbox.write_file("a.txt", b"a")
        assert (await sandbox.unpack_archive(make_zip(("d/z", b"z")), kind="zip")).files == 1
        await sandbox.delete_file("d/z")
        assert (await run("open('b.txt', 'w').write('b')")).status == "ok"
        assert [file.path for file in (await sandbox.list_files()).files] == ["a.txt", "b.txt"]
        assert (await run("import os; os.symlink('/etc/passwd', 'link')")).status == "ok"
        with pytest.raises((SandboxFileNotFound, FileRefused)):
            await read_content(sandbox, "link")
        assert (await run("while True: pass", 0.5)).state_kept
        assert (await run("cat b.txt; exit 4", language="shell")).exit_code == 4
        left = await run("(setsid sleep 600 &); sleep 600", 0.3, "shell")
        assert (left.status, left.state_kept) == ("timeout", True)
        stubborn = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
        end = await run(stubborn, 0.5)
        assert (end.status, end.state_kept) == ("timeout", False)
        with pytest.raises(SandboxGone):
            await run("1")
        assert await pod.wait_ended("code") == 0


async def test_an_idle_sandbox_of_a_pod_expires(pod_directory: Path) -> None:
    async with run_pod(pod_directory, options=("--idle-seconds", "0.4")) as (pod, client):
        await client.create_sandbox("box")
        assert await pod.wait_ended("code") == 0
        answer = await client.request("GET", "/sandboxes/box")
        assert (answer.status, answer.json["error"]["code"]) == (410, "sandbox_gone")
        assert "idle" in answer.json["error"]["message"]


async def test_a_server_exits_after_its_sandbox_and_does_not_come_back(pod_directory: Path) -> None:
    environment = {"FUMEHOOD_SANDBOX_POD_LINGER_SECONDS": "0.2"}
    async with run_pod(pod_directory, environment=environment) as (pod, client):
        await client.create_sandbox("box")
        events = await client.run_code("box", "import os; os._exit(3)")
        assert (events[-1]["status"], events[-1]["state_kept"]) == ("lost", False)
        assert await pod.wait_ended("server") == 0
        assert await pod.wait_ended("code") == 0
        pod.start_container("code")
        pod.start_container("server")
        assert await pod.wait_ended("server") == 125
        assert "This pod has had its sandbox" in pod.read_log("server")


async def test_a_pod_ends_when_its_code_container_ends_unused(pod_directory: Path) -> None:
    async with run_pod(pod_directory) as (pod, client):
        pod.containers["code"].terminate()
        await pod.wait_ended("code")
        async with asyncio.timeout(10):
            while (health := await client.request("GET", "/health")).status == 200:
                await asyncio.sleep(0.02)
        assert health.json["status"] == "ended"


async def test_every_route_needs_the_token(pod_directory: Path) -> None:
    async with run_pod(pod_directory) as (pod, client):
        await client.create_sandbox("box")
        tried = 0
        async with aiohttp.ClientSession() as session:
            for operation in OPERATIONS:
                path = operation.path.replace("{id}", "box").replace("{eid}", "e").replace("{path}", "f")
                for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": TOKEN}):
                    async with session.request(operation.method, pod.url + path, headers=headers) as response:
                        open_to_all = operation.path == "/health"
                        assert response.status == (200 if open_to_all else 401), (operation.path, headers)
                        tried += 1
        assert tried >= 30
        assert await _run(client, "print(1 + 1)") == "2\n"


_SEARCH = """
import os, stat
token = {reversed!r}[::-1].encode()
found, read = [], 0
tops = "/run /var/run /tmp /home/user /mnt /proc /opt/packages /etc /dev/shm".split()
for top in (*tops, {hidden!r}):
    for folder, folders, names in os.walk(top):
        folders[:] = [one for one in folders if folder.count("/") < 8]
        for name in names:
            path = os.path.join(folder, name)
            try:
                if stat.S_ISREG(os.lstat(path).st_mode):
                    with open(path, "rb", buffering=0) as file:
                        body = file.read(1 << 20) or b""
                    read += 1
                    found += [path] * (token in body)
            except OSError:
                pass
print(found, read > 50, token.decode() in str(os.environ), "1" in os.listdir("/proc"))
"""


async def test_code_cannot_read_the_token(pod_directory: Path) -> None:
    """Neither in files, nor in environments, nor in /proc: other containers have their own processes and mounts."""
    async with run_pod(pod_directory) as (pod, client):
        await client.create_sandbox("box")
        code = _SEARCH.format(reversed=TOKEN[::-1], hidden=str(pod.directory))
        assert await _run(client, code, timeout_seconds=60) == "[] True False True\n"
        names = await _run(client, "!cat /proc/[0-9]*/comm; ls -A /run /run/fumehood /run/secrets 2>&1")
        assert "fumehood" not in names.splitlines()
        assert "token" not in names
        environments = await _run(client, "!cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'")
        assert "STATE_DIR" not in environments


@pytest.mark.parametrize("own_network", [False, True])
async def test_code_has_no_network(pod_directory: Path, own_network: bool) -> None:
    """Whatever the policies of the cluster say: the test's own server on the pod's loopback stands for the network."""
    async with run_pod(pod_directory, allow_unshare=own_network) as (pod, client):
        await client.create_sandbox("box")
        port = pod.url.rsplit(":", 1)[1]
        code = f"""
import socket
for family, kind, address in (
    (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", {port})),
    (socket.AF_INET, socket.SOCK_STREAM, ("169.254.169.254", 80)),
    (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 53)),
    (socket.AF_INET6, socket.SOCK_STREAM, ("::1", {port})),
):
    try:
        with socket.socket(family, kind) as sock:
            sock.settimeout(2)
            sock.connect(address)
    except OSError as error:
        print(type(error).__name__)
    else:
        print("connected")
"""
        outcomes = (await _run(client, code)).split()
        if own_network:
            assert outcomes[:3] == ["ConnectionRefusedError", "OSError", "PermissionError"]
            assert outcomes[3] != "connected"
            own = "import socket\nwith socket.create_server(('127.0.0.1', 0)) as s, "
            own += "socket.create_connection(s.getsockname()): print('own loopback')"
            assert await _run(client, own) == "own loopback\n"
        else:
            assert outcomes == ["PermissionError"] * 4
        assert (
            await _run(client, "import multiprocessing as m\nwith m.Manager() as x: print(x.list([1]))")
            == "[1]\n"
        )
        assert await _run(client, "import asyncio\nprint(await asyncio.sleep(0, 7))") == "7\n"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"memory": None}, "The memory tier of this pod is not known"),
        ({"environment": {"FUMEHOOD_SANDBOX_TOKEN": TOKEN}}, "mode pod takes no token from the environment"),
    ],
)
async def test_a_pod_that_is_not_safe_does_not_start(
    pod_directory: Path, options: dict[str, object], reason: str
) -> None:
    pod: Pod = make_pod(pod_directory, **options)
    try:
        pod.start_container("code")
        pod.start_container("server")
        assert await pod.wait_ended("server", 60) in (2, 125)
        text = " ".join(pod.read_log("server").replace("│", " ").split())
        assert reason in text
    finally:
        await pod.stop()


def _code_uid() -> int:
    return 10003 if os.geteuid() == 0 else os.getuid()
