"""A server without a token refuses requests from web pages of other sites."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from fumehood.sandbox_server.api.http_operations import OPERATIONS, ApiOperation
from tests.support.archives import make_tar
from tests.support.sandbox_runs import settings
from tests.support.sandbox_server import RunningServer, SandboxApiClient, run_server

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKEN = "a-token-of-some-length"
FOREIGN_PAGES = [
    {"origin": "https://evil.example"},
    {"origin": "null"},
    {"origin": ""},
    {"origin": "http://localhost:1"},
    {"origin": "https://evil.example", "sec-fetch-site": "same-origin"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
]
FOREIGN_HOSTS = [
    "evil.example",
    "evil.example:8080",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "a b",
]
FORM_TYPES = [
    "text/plain",
    "text/plain;charset=UTF-8",
    "application/x-www-form-urlencoded",
    "multipart/form-data",
    "",
]
JSON_BODIES: list[tuple[str, str, Any]] = [
    ("PUT", "/sandboxes/new", b"{}"),
    ("POST", "/sandboxes/box/execute", b"{\"code\": \"open('/mnt/data/ran', 'w')\"}"),
    ("POST", "/sandboxes/box/read", b'{"paths": ["kept.txt"]}'),
    ("POST", "/execute", b'{"code": "1"}'),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[RunningServer]:
    async with run_server(settings(preload=())) as server:
        await server.client.create_sandbox("box")
        await server.client.request("PUT", "/sandboxes/box/files/kept.txt", b"kept")
        yield server


@pytest_asyncio.fixture(loop_scope="module")
async def client(running: RunningServer) -> AsyncIterator[SandboxApiClient]:
    """Whatever a test has tried, the one sandbox and its one file are there afterwards, and nothing else."""
    yield running.client
    assert [box["id"] for box in (await running.client.request("GET", "/sandboxes")).json["sandboxes"]] == [
        "box"
    ]
    files = (await running.client.request("GET", "/sandboxes/box/files")).json["files"]
    assert [(file["path"], file["size"]) for file in files] == [("kept.txt", 4)]


def _path(operation: ApiOperation) -> str:
    path = operation.path.format(id="box", path="kept.txt", execution_id="e")
    return path + "?kind=tar" if path.endswith("/unpack") else path


async def _assert_refused(client: SandboxApiClient, headers: dict[str, str], param: str) -> None:
    places = [(operation.method, _path(operation)) for operation in OPERATIONS]
    for method, path in [*places, ("GET", "/nothing"), ("PATCH", "/sandboxes/box"), ("OPTIONS", "/execute")]:
        answer = await client.request(method, path, headers={"content-type": "application/json", **headers})
        assert answer.error == (403, "forbidden", param), (method, path, answer.body)
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("headers", FOREIGN_PAGES)
async def test_pages_of_other_sites_reach_no_operation(
    client: SandboxApiClient, headers: dict[str, str]
) -> None:
    await _assert_refused(client, headers, "origin")


@pytest.mark.parametrize("host", FOREIGN_HOSTS)
async def test_pages_whose_name_leads_here_reach_no_operation(client: SandboxApiClient, host: str) -> None:
    await _assert_refused(client, {"host": host}, "host")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:8080", "box.localhost", "[::1]:8080", "10.0.0.7"])
async def test_the_servers_own_names_and_pages_are_served(client: SandboxApiClient, host: str) -> None:
    for headers in (
        {"host": host},
        {"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"},
        {"host": host, "sec-fetch-site": "none"},
    ):
        assert (await client.request("GET", "/sandboxes/box", headers=headers)).status == 200


@pytest.mark.parametrize(("method", "path", "body"), JSON_BODIES)
async def test_a_body_that_is_not_json_is_refused(
    client: SandboxApiClient, method: str, path: str, body: bytes
) -> None:
    for kind in (*FORM_TYPES, "application/octet-stream", "text/json"):
        answer = await client.request(method, path, body, headers={"content-type": kind})
        assert answer.error == (415, "unsupported_media_type", "content-type"), kind
        assert "application/json" in answer.json["error"]["message"]


@pytest.mark.parametrize(
    "kind", ["application/json", "Application/JSON; charset=utf-8", "application/ld+json"]
)
async def test_json_by_any_of_its_names(client: SandboxApiClient, kind: str) -> None:
    answer = await client.request("POST", "/execute", {"code": "print(1)"}, headers={"content-type": kind})
    assert answer.json["stdout"] == "1\n"


@pytest.mark.parametrize("kind", FORM_TYPES)
async def test_what_a_form_can_send_is_no_archive_and_no_bundle(client: SandboxApiClient, kind: str) -> None:
    archive = make_tar(("new.txt", b"new"))
    for path in ("/sandboxes/box/unpack?kind=tar", "/sandboxes/box/write"):
        answer = await client.request("POST", path, archive, headers={"content-type": kind})
        assert answer.error == (415, "unsupported_media_type", "content-type")


@pytest.mark.parametrize("kind", [*FORM_TYPES, "image/png"])
async def test_a_file_may_have_any_type(client: SandboxApiClient, kind: str) -> None:
    """Browsers ask before they PUT, and are told no."""
    answer = await client.request("PUT", "/sandboxes/box/files/other", b"x", headers={"content-type": kind})
    assert answer.status == 200
    assert (await client.request("DELETE", "/sandboxes/box/files/other")).status == 204


async def test_on_a_unix_socket_any_name_will_do_but_no_foreign_page(tmp_path: Path) -> None:
    async with run_server(settings(preload=(), pool=0), path=tmp_path / "s") as server:
        assert (
            await server.client.request("GET", "/sandboxes", headers={"host": "any.example"})
        ).status == 200
        await _assert_refused(server.client, {"origin": "https://evil.example"}, "origin")


async def test_where_there_is_a_token_it_decides() -> None:
    page = {"host": "sandboxes.example", "origin": "https://page.example"}
    async with run_server(settings(preload=(), pool=0), token=TOKEN) as server:
        assert (await server.client.request("GET", "/sandboxes", headers=page)).status == 200
        stranger = SandboxApiClient(server.where)
        try:
            assert (await stranger.request("GET", "/sandboxes", headers=page)).error == (
                401,
                "not_allowed",
                None,
            )
        finally:
            await stranger.session.close()
        answer = await server.client.request(
            "POST", "/execute", b'{"code": "1"}', headers={"content-type": "text/plain"}
        )
        assert answer.error == (415, "unsupported_media_type", "content-type")
