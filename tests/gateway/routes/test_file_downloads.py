"""Downloads of uploads: ranges, ETags, filenames."""

import asyncio
from collections.abc import AsyncGenerator

import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from fumehood.protocol.openai.file_objects import UploadedFileRecord
from tests.support.scripted_gateway import HttpResponse
from tests.support.upload_gateway import UploadGateway, run_upload_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONTENT = bytes(range(32, 127)) * 8000
SIZE = len(CONTENT)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def upload_gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[UploadGateway]:
    async with run_upload_gateway(tmp_path_factory.mktemp("downloads")) as upload_gateway:
        yield upload_gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def path(upload_gateway: UploadGateway) -> str:
    return f"/v1/files/{(await upload_gateway.gateway.upload('a.txt', CONTENT)).json['id']}/content"


async def ask(upload_gateway: UploadGateway, path: str, **headers: str) -> HttpResponse:
    return await upload_gateway.gateway.request(
        "GET", path, headers={name.replace("_", "-"): each for name, each in headers.items()}
    )


async def test_all_of_it(upload_gateway: UploadGateway, path: str) -> None:
    answer = await ask(upload_gateway, path)
    assert (answer.status, answer.body) == (200, CONTENT)
    assert answer.headers["content-length"] == str(SIZE)
    assert answer.headers["accept-ranges"] == "bytes"
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.headers["content-disposition"] == 'attachment; filename="a.txt"'
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "sandbox" in answer.headers["content-security-policy"]


@pytest.mark.parametrize(
    ("asked", "start", "end"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=5-", 5, SIZE),
        ("bytes=-7", SIZE - 7, SIZE),
        (f"bytes=-{SIZE + 5}", 0, SIZE),
        ("bytes=300000-699999", 300_000, 700_000),
        (f"bytes={SIZE - 1}-{SIZE + 100}", SIZE - 1, SIZE),
        ("BYTES = 1 - 2", 1, 3),
    ],
)
async def test_a_part(upload_gateway: UploadGateway, path: str, asked: str, start: int, end: int) -> None:
    answer = await ask(upload_gateway, path, range=asked)
    assert (answer.status, answer.body) == (206, CONTENT[start:end])
    assert answer.headers["content-range"] == f"bytes {start}-{end - 1}/{SIZE}"
    assert answer.headers["content-length"] == str(end - start)


@pytest.mark.parametrize("asked", [f"bytes={SIZE}-", "bytes=-0", "bytes=99999999999999999-"])
async def test_a_part_that_is_not_there(upload_gateway: UploadGateway, path: str, asked: str) -> None:
    answer = await ask(upload_gateway, path, range=asked)
    assert answer.error == (416, "range_not_satisfiable", None)
    assert answer.headers["content-range"] == f"bytes */{SIZE}"


@pytest.mark.parametrize(
    "asked",
    [
        "bytes=0-1,5-6",
        "bytes=5-2",
        "bytes=-",
        "bytes=",
        "items=0-1",
        "bytes=a-b",
        "0-1",
        "bytes=" + "9" * 400 + "-",
    ],
)
async def test_what_cannot_be_understood_is_not_looked_at(
    upload_gateway: UploadGateway, path: str, asked: str
) -> None:
    answer = await ask(upload_gateway, path, range=asked)
    assert (answer.status, len(answer.body)) == (200, SIZE)


async def test_tags(upload_gateway: UploadGateway, path: str) -> None:
    tag = (await ask(upload_gateway, path)).headers["etag"]
    assert (await ask(upload_gateway, path, range="bytes=0-1", if_range=tag)).status == 206
    for other in ('"another"', f"W/{tag}", "Sun, 06 Nov 1994 08:49:37 GMT"):
        assert (await ask(upload_gateway, path, range="bytes=0-1", if_range=other)).status == 200
    for known in (tag, f'"x", W/{tag}', "*"):
        answer = await ask(upload_gateway, path, if_none_match=known)
        assert (answer.status, answer.body, answer.headers["etag"]) == (304, b"", tag)
    assert (await ask(upload_gateway, path, if_none_match='"x"')).status == 200


async def test_an_empty_file(upload_gateway: UploadGateway) -> None:
    file_id = (await upload_gateway.gateway.upload("empty.txt", b"")).json["id"]
    path = f"/v1/files/{file_id}/content"
    answer = await ask(upload_gateway, path)
    assert (answer.status, answer.body, answer.headers["content-length"]) == (200, b"", "0")
    assert (await ask(upload_gateway, path, range="bytes=0-")).status == 416


@pytest.mark.parametrize(
    ("name", "header"),
    [
        ("a.csv", 'attachment; filename="a.csv"'),
        ("ü b.csv", "attachment; filename=\"_ b.csv\"; filename*=UTF-8''%C3%BC%20b.csv"),
        ("../../a.csv", 'attachment; filename="a.csv"'),
        ("a\u202ecsv.txt", "attachment; filename=\"a_csv.txt\"; filename*=UTF-8''a%EF%BF%BDcsv.txt"),
        ("a\r\nset-cookie: b.txt", None),
    ],
)
async def test_names(upload_gateway: UploadGateway, name: str, header: str | None) -> None:
    file_id = (await upload_gateway.gateway.upload(name, b"x")).json["id"]
    answer = await ask(upload_gateway, f"/v1/files/{file_id}/content")
    assert answer.status == 200
    assert "set-cookie" not in answer.headers
    if header is not None:
        assert answer.headers["content-disposition"] == header


@settings(max_examples=30, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
async def test_no_name_breaks_a_header(upload_gateway: UploadGateway, name: str) -> None:
    made = await upload_gateway.gateway.upload(f"{name}.txt", b"x")
    assert made.status == 200, made.body
    answer = await ask(upload_gateway, f"/v1/files/{made.json['id']}/content")
    assert (answer.status, answer.body) == (200, b"x")
    assert answer.headers["content-disposition"].isascii()
    await upload_gateway.gateway.request("DELETE", f"/v1/files/{made.json['id']}")


async def test_nothing_is_read_for_a_client_that_has_left(
    upload_gateway: UploadGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = asyncio.Event()

    async def endless(*_: object) -> AsyncGenerator[bytes]:
        try:
            while True:
                yield b"x" * 10_000
                await asyncio.sleep(0)
        finally:
            ended.set()

    record = UploadedFileRecord(
        id="file-long", tenant="", filename="a", bytes=1 << 50, purpose="vision", created_at=1.0, blob="x"
    )
    await upload_gateway.store.add_upload(record)
    monkeypatch.setattr(upload_gateway.files, "read_file", endless)
    async with upload_gateway.gateway.open_connection() as (reader, writer):
        writer.write(b"GET /v1/files/file-long/content HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
    async with asyncio.timeout(30):
        await ended.wait()
    await upload_gateway.store.delete_upload("", record.id)


async def test_what_was_deleted_meanwhile_is_read_to_its_end(upload_gateway: UploadGateway) -> None:
    content = b"x" * 900_000
    file_id = (await upload_gateway.gateway.upload("long.txt", content)).json["id"]
    async with upload_gateway.gateway.open_connection() as (reader, writer):
        writer.write(b"GET /v1/files/%b/content HTTP/1.1\r\nhost: localhost\r\n\r\n" % file_id.encode())
        await reader.readuntil(b"\r\n\r\n")
        assert (await upload_gateway.gateway.request("DELETE", f"/v1/files/{file_id}")).status == 200
        assert await asyncio.wait_for(reader.readexactly(len(content)), 30) == content
