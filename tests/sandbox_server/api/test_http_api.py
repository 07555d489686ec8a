"""The HTTP API over real sockets, operation by operation."""

import asyncio
import base64
import errno
import json
import re
import stat
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from fumehood.protocol.sandbox.sandbox_messages import MEMORY_TIERS
from tests.support.sandbox_runs import settings
from tests.support.sandbox_server import RunningServer, SandboxApiClient, content_type_for, run_server
from tests.support.waiting import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKEN = "a-token-of-some-length"
LIMITS: dict[str, Any] = {
    "preload": (),
    "capacity": 4,
    "request_bytes": 20_000,
    "one_shot_bytes": 40_000,
    "file_bytes": 100_000,
    "queued_executions": 1,
    "tenant_sandboxes": 2,
    "retained_executions": 2,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[RunningServer]:
    async with run_server(settings(**LIMITS)) as server:
        await server.client.create_sandbox("box")
        yield server


@pytest_asyncio.fixture(loop_scope="module")
async def client(running: RunningServer) -> AsyncIterator[SandboxApiClient]:
    yield running.client
    for sandbox in (await running.client.request("GET", "/sandboxes")).json["sandboxes"]:
        if sandbox["id"] != "box":
            await running.client.request("DELETE", f"/sandboxes/{sandbox['id']}")


# ---- every refusal --------------------------------------------------------------------------------------------

EXECUTE = "/sandboxes/box/execute"
BAD_TIMEOUT = (400, "invalid_request", "timeout_seconds")
REFUSALS: list[tuple[str, str, Any, tuple[int, str, str | None]]] = [
    # names and paths
    ("GET", "/nothing", None, (404, "not_found", None)),
    ("GET", "/", None, (404, "not_found", None)),
    ("GET", "/sandboxes/", None, (404, "not_found", None)),
    ("GET", "/sandboxes/box/", None, (404, "not_found", None)),
    ("PATCH", "/sandboxes/box", None, (405, "method_not_allowed", None)),
    ("HEAD", "/execute", None, (405, "", None)),
    ("GET", "/execute", None, (405, "method_not_allowed", None)),
    ("GET", "/sandboxes/%ff", None, (400, "invalid_request", "path")),
    ("GET", "/sandboxes/none", None, (404, "sandbox_not_found", None)),
    ("GET", "/sandboxes/-x", None, (400, "invalid_request", "id")),
    ("GET", "/sandboxes/x%0A", None, (400, "invalid_request", "id")),
    ("PUT", "/sandboxes/" + "x" * 65, None, (400, "invalid_request", "id")),
    ("DELETE", "/sandboxes/a%20b", None, (400, "invalid_request", "id")),
    # bodies
    ("PUT", "/sandboxes/new", b"{", (400, "invalid_request", "body")),
    ("PUT", "/sandboxes/new", b"[]", (400, "invalid_request", None)),
    ("PUT", "/sandboxes/new", {"memory": "2g"}, (400, "invalid_request", "memory")),
    ("PUT", "/sandboxes/new", {"colour": "red"}, (400, "invalid_request", "colour")),
    ("PUT", "/sandboxes/new", {"tenant": "a b"}, (400, "invalid_request", "tenant")),
    ("PUT", "/sandboxes/new", {"tenant": "ab\n"}, (400, "invalid_request", "tenant")),
    ("PUT", "/sandboxes/new", {"network": {"type": "all"}}, (400, "invalid_request", "network")),
    ("PUT", "/sandboxes/new", {"requirements": ["x" * 501]}, (400, "invalid_request", "requirements")),
    ("PUT", "/sandboxes/new", b" " * 20_001, (413, "too_large", "body")),
    ("PUT", "/sandboxes/box", {"memory": "4g"}, (409, "conflict", None)),
    ("POST", EXECUTE, None, (400, "invalid_request", "body")),
    ("POST", EXECUTE, {}, (400, "invalid_request", None)),
    ("POST", EXECUTE, {"code": 1}, (400, "invalid_request", "code")),
    ("POST", EXECUTE, b'{"code": "\xff"}', (400, "invalid_request", "body")),
    ("POST", EXECUTE, b'{"code": "\\ud800"}', (400, "invalid_request", "body")),
    ("POST", EXECUTE, b"[" * 15_000, (400, "invalid_request", None)),
    ("POST", EXECUTE, b'{"code": ' + b"[" * 15_000, (400, "invalid_request", "code")),
    ("POST", EXECUTE, b'{"x": ' + b"[" * 15_000, (400, "invalid_request", "x")),
    ("POST", EXECUTE, {"code": "1", "timeout_seconds": 0}, BAD_TIMEOUT),
    ("POST", EXECUTE, {"code": "1", "timeout_seconds": 86_401}, BAD_TIMEOUT),
    ("POST", EXECUTE, b'{"code":"1","timeout_seconds":1e999}', BAD_TIMEOUT),
    ("POST", EXECUTE, b'{"code":"1","timeout_seconds":NaN}', (400, "invalid_request", "body")),
    ("POST", EXECUTE, {"code": "1", "execution_id": "a/b"}, (400, "invalid_request", "execution_id")),
    ("POST", EXECUTE, {"code": "1", "execution_id": "a\n"}, (400, "invalid_request", "execution_id")),
    ("POST", EXECUTE, {"code": "1" * 20_000}, (413, "too_large", "body")),
    ("POST", "/sandboxes/none/execute", {"code": "1"}, (404, "sandbox_not_found", None)),
    ("POST", "/sandboxes/none/execute", {"code": "1", "execution_id": "e"}, (404, "sandbox_not_found", None)),
    # queries
    ("GET", "/sandboxes?tenant=a%20b", None, (400, "invalid_request", "tenant")),
    ("GET", "/sandboxes?tenant=a&tenant=b", None, (400, "invalid_request", "tenant")),
    ("GET", "/sandboxes?tenant=%ff", None, (400, "invalid_request", "query")),
    ("GET", "/sandboxes/box/executions/e", None, (404, "execution_not_found", "execution_id")),
    ("GET", "/sandboxes/box/executions/a%20b", None, (400, "invalid_request", "execution_id")),
    ("GET", "/sandboxes/box/executions/e?after=x", None, (400, "invalid_request", "after")),
    ("GET", "/sandboxes/box/executions/e?after=-2", None, (400, "invalid_request", "after")),
    ("GET", "/sandboxes/box/executions/e?after=1e3", None, (400, "invalid_request", "after")),
    ("GET", "/sandboxes/box/executions/e?after=" + "9" * 30, None, (400, "invalid_request", "after")),
    ("GET", "/sandboxes/none/executions/e", None, (404, "sandbox_not_found", None)),
    ("POST", "/sandboxes/box/interrupt?execution_id=%20", None, (400, "invalid_request", "execution_id")),
    ("POST", "/sandboxes/none/interrupt", None, (404, "sandbox_not_found", None)),
    # files
    ("GET", "/sandboxes/none/files", None, (404, "sandbox_not_found", None)),
    ("GET", "/sandboxes/box/files/none.txt", None, (404, "file_not_found", None)),
    ("GET", "/sandboxes/box/files/", None, (400, "file_refused", "path")),
    ("GET", "/sandboxes/box/files/a%00b", None, (400, "file_refused", "path")),
    ("GET", "/sandboxes/box/files/%ff", None, (400, "invalid_request", "path")),
    ("GET", "/sandboxes/box/files/..%2f..%2fetc%2fpasswd", None, (400, "file_refused", "path")),
    ("GET", "/sandboxes/box/files/../../etc/passwd", None, (400, "file_refused", "path")),
    ("GET", "/sandboxes/box/files//etc/passwd", None, (400, "file_refused", "path")),
    ("PUT", "/sandboxes/box/files/" + "x" * 256, b"x", (400, "file_refused", "path")),
    ("PUT", "/sandboxes/box/files/large", b"x" * 100_001, (413, "too_large", "body")),
    ("PUT", "/sandboxes/none/files/x", b"x", (404, "sandbox_not_found", None)),
    ("DELETE", "/sandboxes/box/files/none.txt", None, (404, "file_not_found", None)),
    ("DELETE", "/sandboxes/none/files/x", None, (404, "sandbox_not_found", None)),
    ("POST", "/sandboxes/box/unpack", b"x", (400, "invalid_request", "kind")),
    ("POST", "/sandboxes/box/unpack?kind=rar", b"x", (400, "invalid_request", "kind")),
    ("POST", "/sandboxes/none/unpack?kind=zip", b"x", (404, "sandbox_not_found", None)),
    # one shots
    ("POST", "/execute", {"code": "1", "files": {"../x": "eA=="}}, (400, "file_refused", "files")),
    ("POST", "/execute", {"code": "1", "files": {"x": "?"}}, (400, "file_refused", "files")),
    ("POST", "/execute", {"code": "1", "files": {"x": 1}}, (400, "invalid_request", "files")),
    ("POST", "/execute", {"code": "1", "memory": "1t"}, (400, "invalid_request", "memory")),
    ("POST", "/execute", {"code": "1", "execution_id": "e"}, (400, "invalid_request", "execution_id")),
    ("POST", "/execute", {"code": "1" * 40_000}, (413, "too_large", "body")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("method", "path", "body", "expected"),
    REFUSALS,
    ids=[f"{method} {path[:50]} {str(body)[:40]}" for method, path, body, _ in REFUSALS],
)
async def test_refusals(
    client: SandboxApiClient, method: str, path: str, body: Any, expected: tuple[int, str, str | None]
) -> None:
    answer = await client.request(method, path, body)
    assert answer.headers["fumehood-sandbox-protocol"] == "1"
    if method == "HEAD":
        assert answer.status == expected[0]
        return
    assert answer.headers["content-type"] == "application/json"
    assert answer.error == expected
    assert answer.json["error"]["message"]
    assert answer.json["error"]["type"] == "invalid_request_error"
    assert (answer.headers.get("allow") is not None) == (answer.status == 405)


@pytest.mark.parametrize("path", ["/sandboxes/box/execute", "/sandboxes/box/files/large", "/execute"])
async def test_too_large_is_found_while_it_streams(client: SandboxApiClient, path: str) -> None:
    async def endless() -> AsyncGenerator[bytes]:
        for _ in range(10_000):
            yield b" " * 10_000

    method = "PUT" if "files" in path else "POST"
    answer = await client.request(method, path, None)
    del answer
    headers = {"content-type": content_type_for(path)}
    async with client.session.request(method, client.url(path), data=endless(), headers=headers) as response:
        assert response.status == 413
        assert (await response.json())["error"]["code"] == "too_large"
    listed = (await client.request("GET", "/sandboxes/box/files")).json["files"]
    assert [file for file in listed if file["size"]] == []


@pytest.mark.parametrize(("version", "status"), [("1", 200), ("1.7", 200), ("2", 400), ("", 400), ("x", 400)])
async def test_another_version_is_refused(client: SandboxApiClient, version: str, status: int) -> None:
    answer = await client.request("GET", "/sandboxes", headers={"fumehood-sandbox-protocol": version})
    assert answer.status == status
    if status == 400:
        assert answer.error == (400, "invalid_request", "fumehood-sandbox-protocol")


# ---- sandboxes ------------------------------------------------------------------------------------------------


async def test_a_sandbox_from_its_making_to_its_end(client: SandboxApiClient) -> None:
    made = await client.request("PUT", "/sandboxes/life", {"memory": "4g", "tenant": "t"})
    assert made.status == 201
    info = made.json
    assert (info["id"], info["memory"], info["tenant"], info["running"], info["waiting"]) == (
        "life", "4g", "t", None, 0,
    )  # fmt: skip
    again = await client.request("PUT", "/sandboxes/life", {"tenant": "t", "memory": "4g"})
    assert (again.status, again.json) == (200, info)
    assert (await client.request("GET", "/sandboxes/life")).json == info
    assert [box["id"] for box in (await client.request("GET", "/sandboxes?tenant=t")).json["sandboxes"]] == [
        "life"
    ]
    assert (await client.request("GET", "/sandboxes?tenant=u")).json == {"sandboxes": []}
    assert (await client.request("DELETE", "/sandboxes/life")).status == 204
    assert (await client.request("GET", "/sandboxes/life")).error == (410, "sandbox_gone", None)
    assert (await client.request("DELETE", "/sandboxes/life")).status == 204
    assert (await client.request("DELETE", "/sandboxes/never")).status == 204


@pytest.mark.parametrize("body", [None, b"", b"{}", b" \n"])
async def test_an_empty_body_means_the_defaults(client: SandboxApiClient, body: bytes | None) -> None:
    answer = await client.request("PUT", "/sandboxes/plain", body)
    assert (answer.status, answer.json["memory"], answer.json["tenant"]) == (201, "1g", "")


async def test_at_capacity(client: SandboxApiClient) -> None:
    for number in range(3):
        await client.create_sandbox(f"full-{number}", tenant=str(number))
    for answer in (
        await client.request("PUT", "/sandboxes/more"),
        await client.request("POST", "/execute", {"code": "1"}),
    ):
        assert answer.error == (429, "at_capacity", None)
        assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.EMFILE, "Too many open files")])
async def test_short_of_memory_or_descriptors(
    running: RunningServer, client: SandboxApiClient, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: str) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(running.service, "get", fail)
        answer = await client.request("GET", "/sandboxes/box")
    assert answer.error == (429, "at_capacity", None)
    assert answer.headers["retry-after"] == "1"


async def test_tenants_have_quotas(client: SandboxApiClient) -> None:
    for number in range(2):
        await client.create_sandbox(f"mine-{number}", tenant="t")
    answer = await client.request("PUT", "/sandboxes/more", {"tenant": "t"})
    assert answer.error == (429, "quota_exceeded", "tenant")
    assert "retry-after" in answer.headers
    await client.create_sandbox("theirs", tenant="u")


async def test_one_that_ended_by_itself_is_gone(client: SandboxApiClient) -> None:
    await client.create_sandbox("short")
    events = await client.run_code("short", "import os; os._exit(5)", execution_id="last")
    assert events[-1] | {"duration_ms": 0} == {
        "type": "end",
        "status": "lost",
        "exit_code": -1,
        "duration_ms": 0,
        "state_kept": False,
        "reason": "The sandbox was lost: the interpreter exited with code 5.",
        "packages_ms": 0,
    }
    for method, path, body in [
        ("GET", "", None),
        ("POST", "/execute", {"code": "1"}),
        ("POST", "/execute", {"code": "1", "execution_id": "new"}),
        ("POST", "/interrupt", None),
        ("GET", "/executions/other", None),
        ("GET", "/files", None),
        ("GET", "/files/x", None),
        ("PUT", "/files/x", b"x"),
        ("DELETE", "/files/x", None),
        ("POST", "/unpack?kind=zip", b"x"),
    ]:
        answer = await client.request(method, f"/sandboxes/short{path}", body)
        assert answer.error == (410, "sandbox_gone", None), (method, path)
        assert "exited with code 5" in answer.json["error"]["message"]
    # How its last call ended can still be read, also by asking for it again.
    again = await client.request("GET", "/sandboxes/short/executions/last")
    assert again.events == events
    assert await client.run_code("short", "import os; os._exit(5)", execution_id="last") == events
    assert (await client.request("PUT", "/sandboxes/short")).status == 201


# ---- executions -----------------------------------------------------------------------------------------------


async def test_events(client: SandboxApiClient) -> None:
    answer = await client.request(
        "POST",
        "/sandboxes/box/execute",
        {
            "code": "import sys\nprint('a')\nprint('b', file=sys.stderr)\ndisplay('c')\n'd'",
            "execution_id": "events",
        },
    )
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.headers["fumehood-execution-id"] == "events"
    assert answer.headers["cache-control"] == "no-store"
    assert [(event["type"], event.get("text") or event.get("data")) for event in answer.events[:-1]] == [
        ("stdout", "a\n"),
        ("stderr", "b\n"),
        ("display", {"text/plain": "'c'"}),
        ("result", {"text/plain": "'d'"}),
    ]
    assert (answer.events[-1]["type"], answer.events[-1]["status"]) == ("end", "ok")
    for after in range(-1, 6):
        rest = await client.request("GET", f"/sandboxes/box/executions/events?after={after}")
        assert (rest.status, rest.events) == (200, answer.events[after + 1 :])
        assert rest.headers["fumehood-execution-id"] == "events"


async def test_the_server_chooses_an_id(client: SandboxApiClient) -> None:
    answer = await client.request("POST", "/sandboxes/box/execute", {"code": "1"})
    chosen = answer.headers["fumehood-execution-id"]
    assert re.fullmatch("[0-9a-f]{24}", chosen)
    assert (await client.request("GET", f"/sandboxes/box/executions/{chosen}")).events == answer.events


async def test_odd_code(client: SandboxApiClient) -> None:
    for code in ("\0", "'\0'", "\ufeff1", "é", "x" * 19_000, "\u2028", "", "\r\r\n"):
        assert (await client.run_code("box", code))[-1]["type"] == "end"
    body = b'{"code": "1", "code": "2", "timeout_seconds": 1e1}'
    answer = await client.request("POST", "/sandboxes/box/execute", body)
    assert answer.events[0]["data"] == {"text/plain": "2"}


# ---- files ----------------------------------------------------------------------------------------------------


async def test_files(client: SandboxApiClient) -> None:
    await client.create_sandbox("files")
    path = "/sandboxes/files/files"
    empty = (await client.request("GET", path)).json
    assert (empty["files"], empty["complete"]) == ([], True)
    content = bytes(range(256)) * 300
    name = "a%20b/%C3%A4%25.bin"
    written = await client.request("PUT", f"{path}/{name}", content)
    assert (written.status, written.json["path"], written.json["size"]) == (200, "a b/ä%.bin", len(content))
    read = await client.request("GET", f"{path}/{name}")
    assert (read.status, read.body) == (200, content)
    assert (read.headers["content-type"], read.headers["content-length"]) == (
        "application/octet-stream",
        str(len(content)),
    )
    changed = (await client.request("GET", f"{path}?since={empty['mark']}")).json
    assert ([file["path"] for file in changed["files"]], changed["complete"]) == (["a b/ä%.bin"], False)
    assert (await client.run_code("files", "import os; os.path.getsize('a b/ä%.bin')"))[0]["data"] == {
        "text/plain": str(len(content))
    }
    assert (await client.request("DELETE", f"{path}/{name}")).status == 204
    after = (await client.request("GET", f"{path}?since={changed['mark']}")).json
    assert (after["files"], after["deleted"]) == ([], ["a b/ä%.bin"])
    unknown = (await client.request("GET", f"{path}?since=nonsense")).json
    assert (unknown["files"], unknown["complete"]) == ([], True)


async def test_an_empty_file(client: SandboxApiClient) -> None:
    for body in (b"", None):
        assert (await client.request("PUT", "/sandboxes/box/files/empty", body)).json["size"] == 0
    read = await client.request("GET", "/sandboxes/box/files/empty")
    assert (read.status, read.body, read.headers["content-length"]) == (200, b"", "0")


async def test_a_file_is_no_directory(client: SandboxApiClient) -> None:
    """What is to be written cannot be missing; what is to be read can."""
    assert (await client.request("PUT", "/sandboxes/box/files/plain", b"x")).status == 200
    below = "/sandboxes/box/files/plain/below"
    assert (await client.request("PUT", below, b"x")).error[:2] == (400, "file_refused")
    assert (await client.request("GET", below)).error[:2] == (404, "file_not_found")
    assert (await client.request("DELETE", below)).error[:2] == (404, "file_not_found")
    assert (await client.request("DELETE", "/sandboxes/box/files/plain")).status == 204


async def test_files_of_other_kinds_are_refused(client: SandboxApiClient) -> None:
    await client.run_code(
        "box", "import os\nos.symlink('/etc/passwd', 'link')\nos.mkfifo('fifo')\nos.mkdir('dir')"
    )
    for name in ("link", "fifo", "dir"):
        answer = await client.request("GET", f"/sandboxes/box/files/{name}")
        assert answer.error[:2] == (400, "file_refused"), name
    await client.run_code("box", "os.unlink('link'); os.unlink('fifo'); os.rmdir('dir')")


# ---- one shots ------------------------------------------------------------------------------------------------


async def test_one_shot(running: RunningServer, client: SandboxApiClient) -> None:
    live = running.service.supervisor.live_count
    answer = await client.request(
        "POST",
        "/execute",
        {
            "code": "print(open('d/in').read()); open('d/out', 'w').write('ok'); 1",
            "files": {"d/in": base64.b64encode(b"hello").decode()},
            "memory": "4g",
            "tenant": "t",
        },
    )
    response = answer.json
    assert response.pop("execution_time_ms") >= 0
    assert response == {
        "status": "success",
        "stdout": "hello\n1\n",
        "stderr": "",
        "exit_code": 0,
        "files_produced": {"d/out": base64.b64encode(b"ok").decode()},
    }
    assert running.service.supervisor.live_count == live


async def test_one_shot_ends_when_its_caller_leaves(running: RunningServer, client: SandboxApiClient) -> None:
    live = running.service.supervisor.live_count
    work = asyncio.ensure_future(client.request("POST", "/execute", {"code": "while True: pass"}))
    await wait_until(lambda: running.service.health().running)
    work.cancel()
    await wait_until(
        lambda: running.service.supervisor.live_count <= live and not running.service.health().running
    )


async def test_packages_that_are_refused(running: RunningServer, client: SandboxApiClient) -> None:
    """Nothing is installed, nothing runs, and it is said in the place where each caller looks."""
    wanted = ["--index-url=https://example.org"]
    live = running.service.supervisor.live_count
    made = await client.request("PUT", "/sandboxes/new", {"requirements": wanted})
    assert made.error == (400, "install_failed", "requirements")
    once = (await client.request("POST", "/execute", {"code": "print(1)", "requirements": wanted})).json
    assert (once["status"], once["exit_code"], once["stdout"]) == ("error", -1, "")
    assert "--index-url" in once["stderr"]
    events = await client.run_code("box", "ran = True", requirements=wanted)
    assert (events[-1]["status"], events[-1]["exit_code"], events[-1]["state_kept"]) == (
        "install_failed",
        -1,
        True,
    )
    assert (await client.run_code("box", "ran"))[0]["name"] == "NameError"
    assert running.service.supervisor.live_count == live


# ---- the server itself ----------------------------------------------------------------------------------------


async def test_health(client: SandboxApiClient) -> None:
    answer = await client.request("GET", "/health")
    health = answer.json
    assert answer.status == 200
    assert (health["status"], health["mode"], health["protocol"], health["capacity"]) == (
        "ok",
        "namespaces",
        1,
        4,
    )
    assert (health["live"], health["parked"], health["running"]) == (1, 0, 0)
    assert health["uptime_seconds"] > 0
    assert set(health) == {
        "status", "mode", "protocol", "version", "python", "capacity", "live", "parked", "running", "uptime_seconds",
    }  # fmt: skip


async def test_a_server_on_a_unix_socket_with_a_token(tmp_path: Path) -> None:
    path = tmp_path / "sandboxes.sock"
    async with run_server(settings(preload=()), path=path, token=TOKEN) as server:
        assert server.where == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        await server.client.create_sandbox("box")
        assert (await server.client.run_code("box", "6 * 7"))[0]["data"] == {"text/plain": "42"}
        for wrong in (None, "", TOKEN[:-1], TOKEN + "x", TOKEN.upper()):
            stranger = SandboxApiClient(server.where, wrong)
            try:
                for method, target in [
                    ("GET", "/sandboxes"),
                    ("GET", "/metrics"),
                    ("GET", "/openapi.json"),
                    ("DELETE", "/sandboxes/box"),
                    ("POST", "/execute"),
                    ("GET", "/nothing"),
                    ("PATCH", "/sandboxes/box"),
                ]:
                    answer = await stranger.request(method, target)
                    assert answer.error == (401, "not_allowed", None), (method, target)
                    assert answer.headers["www-authenticate"] == "Bearer"
                health = await stranger.request("GET", "/health")
                assert (health.status, health.json) == (200, {"status": "ok"})
            finally:
                await stranger.session.close()
        twice = await server.client.request("GET", "/sandboxes", headers=[("authorization", "Bearer x")])
        assert twice.status == 401
        assert "live" in (await server.client.request("GET", "/health")).json
    assert not path.exists()


async def test_openapi_is_served_and_fits_the_types(client: SandboxApiClient) -> None:
    document = (await client.request("GET", "/openapi.json")).json
    assert document["openapi"] == "3.1.0"
    assert set(document["components"]["schemas"]["SandboxSpec"]["properties"]["memory"]["enum"]) == set(
        MEMORY_TIERS
    )
    references = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert references == set(document["components"]["schemas"])
