"""/v1/files without an SDK: order of form fields, disconnects, limits during an upload."""

import asyncio
from collections.abc import AsyncGenerator, Callable

import pytest
import pytest_asyncio

from fumehood.files.upload_file_service import UploadSettings
from fumehood.gateway.request_limiter import RequestLimiter
from fumehood.interfaces import Caller
from fumehood.protocol.api_keys import ApiKeyLimits
from fumehood.protocol.openai.pagination import PageQuery
from tests.support.multipart_bodies import BOUNDARY, form, form_type, part
from tests.support.scripted_gateway import HttpResponse
from tests.support.upload_gateway import UploadGateway, run_upload_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

FILE_BYTES = 900_000
AT_ONCE = 3


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[UploadGateway]:
    settings = UploadSettings(
        file_bytes=FILE_BYTES, tenant_files=50, tenant_bytes=3_000_000, concurrent_uploads=AT_ONCE
    )
    async with run_upload_gateway(tmp_path_factory.mktemp("files"), settings) as upload_gateway:
        yield upload_gateway


@pytest_asyncio.fixture(loop_scope="module")
async def upload_gateway(running: UploadGateway) -> AsyncGenerator[UploadGateway]:
    """Nothing is left behind by any test."""
    yield running
    await wait_until(lambda: not [path for path in running.stored_files() if path.parent.name == "incoming"])
    for record in await running.store.list_uploads("", PageQuery(limit=1000), now=0):
        await running.store.delete_upload("", record.id)
        await running.blobs.delete_unreferenced([record.blob])
    assert running.stored_files() == []


async def wait_until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.01)


async def wait_for_uploads(upload_gateway: UploadGateway, number: int) -> None:
    """Until so many uploads are on their way."""
    await wait_until(lambda: upload_gateway.files.incoming_count == number)


async def post(
    upload_gateway: UploadGateway, *parts: bytes, headers: dict[str, str] | None = None
) -> HttpResponse:
    return await upload_gateway.gateway.request(
        "POST", "/v1/files", form(parts), headers=headers or form_type()
    )


def partial_form(*parts: bytes) -> bytes:
    """A form that has not ended."""
    return form(parts).removesuffix(b"\r\n--%b--\r\n" % BOUNDARY)


class RawUpload:
    """One that is sent by hand, in chunks."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def begin(self, *headers: bytes) -> None:
        head = [
            b"POST /v1/files HTTP/1.1",
            b"host: localhost",
            b"content-type: multipart/form-data; boundary=" + BOUNDARY,
            *(headers or [b"transfer-encoding: chunked"]),
        ]
        self.writer.write(b"\r\n".join(head) + b"\r\n\r\n")
        await self.writer.drain()

    async def send(self, content: bytes) -> None:
        self.writer.write(b"%x\r\n%b\r\n" % (len(content), content))
        await self.writer.drain()

    async def status(self) -> int:
        return int((await self.reader.readline()).split()[1])


# --- forms --------------------------------------------------------------------------------------------


async def test_the_purpose_may_come_after_the_file(upload_gateway: UploadGateway) -> None:
    made = await post(
        upload_gateway,
        part("file", b"x" * 100_000, "a.txt"),
        part("purpose", b"assistants"),
        part("expires_after[anchor]", b"created_at"),
        part("expires_after[seconds]", b"7200"),
    )
    assert (made.json["bytes"], made.json["purpose"]) == (100_000, "assistants")
    assert made.json["expires_at"] == made.json["created_at"] + 7200


async def test_some_fields_may_come_before_and_some_after(upload_gateway: UploadGateway) -> None:
    made = await post(
        upload_gateway,
        part("purpose", b"user_data"),
        part("expires_after[anchor]", b"created_at"),
        part("expires_after[seconds]", b"3600"),
        part("file", b"x" * 100_000, "a.txt"),
    )
    assert made.json["expires_at"] == made.json["created_at"] + 3600
    made = await post(
        upload_gateway,
        part("purpose", b"user_data"),
        part("file", b"x" * 100_000, "a.txt"),
        part("expires_after[anchor]", b"created_at"),
        part("expires_after[seconds]", b"3601"),
    )
    assert made.json["expires_at"] == made.json["created_at"] + 3601


async def test_fields_that_nobody_knows_are_left_alone(upload_gateway: UploadGateway) -> None:
    made = await post(
        upload_gateway, part("new", b"1"), part("purpose", b"batch"), part("file", b"{}", "a.jsonl")
    )
    assert made.status == 200


@pytest.mark.parametrize(
    ("parts", "param", "code"),
    [
        ([part("purpose", b"batch")], "file", "missing_required_parameter"),
        ([part("purpose", b"batch"), part("file", b"not a file")], "file", "missing_required_parameter"),
        ([part("file", b"x", "a.txt")], "purpose", "missing_required_parameter"),
        ([part("file", b"x", "a.txt"), part("purpose", b"batch_output")], "purpose", "invalid_value"),
        ([part("purpose", b""), part("file", b"x", "a.txt")], "purpose", "invalid_value"),
        ([part("file", b"x", "a.exe"), part("purpose", b"batch")], "file", "unsupported_file"),
        ([part("purpose", b"batch"), part("file", b"\x7fELF\0", "a")], "file", "unsupported_file"),
    ],
)
async def test_what_a_form_lacks(
    upload_gateway: UploadGateway, parts: list[bytes], param: str, code: str
) -> None:
    assert (await post(upload_gateway, *parts)).error == (400, code, param)


async def test_no_form_at_all(upload_gateway: UploadGateway) -> None:
    answer = await upload_gateway.gateway.request("POST", "/v1/files", {"file": "x", "purpose": "batch"})
    assert answer.error == (400, None, None)
    assert "multipart/form-data" in answer.json["error"]["message"]
    assert (await upload_gateway.gateway.request("POST", "/v1/files", headers=form_type())).status == 400


# --- while it comes -----------------------------------------------------------------------------------


async def test_a_client_that_leaves(upload_gateway: UploadGateway) -> None:
    for rest in (b"", b"x" * 800_000):
        async with upload_gateway.gateway.open_connection() as connection:
            upload = RawUpload(*connection)
            await upload.begin()
            await upload.send(
                partial_form(part("purpose", b"user_data"), part("file", b"x" * 10_000, "a.txt")) + rest
            )
            await wait_for_uploads(upload_gateway, 1)
        await wait_for_uploads(upload_gateway, 0)
        await wait_until(lambda: upload_gateway.stored_files() == [])
    assert list(await upload_gateway.files.list_files(Caller(), PageQuery())) == []


async def test_a_body_that_is_shorter_than_was_said(upload_gateway: UploadGateway) -> None:
    body = form([part("purpose", b"user_data"), part("file", b"x", "a.txt")])
    async with upload_gateway.gateway.open_connection() as connection:
        upload = RawUpload(*connection)
        await upload.begin(b"content-length: %d" % (len(body) + 1))
        upload.writer.write(body)
        await wait_for_uploads(upload_gateway, 1)
    await wait_for_uploads(upload_gateway, 0)
    await wait_until(lambda: upload_gateway.stored_files() == [])


async def test_a_form_that_ends_before_its_end(upload_gateway: UploadGateway) -> None:
    for body in (
        partial_form(part("purpose", b"batch"), part("file", b"x" * 50_000, "a.txt")),
        b"--b0undary",
    ):
        answer = await upload_gateway.gateway.request("POST", "/v1/files", body, headers=form_type())
        assert answer.error == (400, None, None)


async def test_what_is_too_large_is_refused_before_its_end(upload_gateway: UploadGateway) -> None:
    async with upload_gateway.gateway.open_connection() as connection:
        upload = RawUpload(*connection)
        await upload.begin()
        await upload.send(
            partial_form(part("purpose", b"user_data"), part("file", b"x" * FILE_BYTES, "a.txt"))
        )
        await upload.send(b"x")
        assert await upload.status() == 413
    async with upload_gateway.gateway.open_connection() as connection:
        upload = RawUpload(*connection)
        await upload.begin(b"content-length: 99999999")
        assert await upload.status() == 413, "before anything has come"


async def test_what_may_not_be_is_refused_before_its_end(upload_gateway: UploadGateway) -> None:
    async with upload_gateway.gateway.open_connection() as connection:
        upload = RawUpload(*connection)
        await upload.begin()
        await upload.send(
            partial_form(part("purpose", b"vision"), part("file", b"no picture" * 1000, "a.png"))
        )
        assert await upload.status() == 400
    async with upload_gateway.gateway.open_connection() as connection:
        upload = RawUpload(*connection)
        await upload.begin()
        await upload.send(partial_form(part("purpose", b"fun"), part("file", b"", "a.png")))
        assert await upload.status() == 400


async def test_the_room_of_a_tenant_ends_while_a_file_comes(upload_gateway: UploadGateway) -> None:
    for number in range(3):
        content = bytes([65 + number]) * FILE_BYTES
        assert (await upload_gateway.gateway.upload("a.txt", content)).status == 200
    async with upload_gateway.gateway.open_connection() as connection:
        upload = RawUpload(*connection)
        await upload.begin()
        await upload.send(partial_form(part("purpose", b"user_data"), part("file", b"x" * 300_001, "a.txt")))
        assert await upload.status() == 400
    assert (await upload_gateway.gateway.upload("a.txt", b"x" * 300_000)).status == 200


async def test_uploads_at_once(upload_gateway: UploadGateway) -> None:
    body = partial_form(part("purpose", b"user_data"), part("file", b"x", "a.txt"))
    connections = [upload_gateway.gateway.open_connection() for _ in range(AT_ONCE)]
    uploads = [RawUpload(*await connection.__aenter__()) for connection in connections]
    for upload in uploads:
        await upload.begin()
        await upload.send(body)
    await wait_for_uploads(upload_gateway, AT_ONCE)
    refused = await upload_gateway.gateway.upload("a.txt", b"x")
    assert refused.error == (429, "rate_limit_exceeded", None)
    assert refused.headers["retry-after"] == "1"
    for number, upload in enumerate(uploads):
        await upload.send(b"%d\r\n--%b--\r\n" % (number, BOUNDARY))
        await upload.send(b"")
        assert await upload.status() == 200
    for connection in connections:
        await connection.__aexit__(None, None, None)
    assert (await upload_gateway.gateway.upload("a.txt", b"x")).status == 200


async def test_many_at_once_are_all_there(upload_gateway: UploadGateway) -> None:
    async def one(number: int) -> tuple[bytes, HttpResponse]:
        content = b"%d" % (number % 5) * 20_000
        while (made := await upload_gateway.gateway.upload(f"{number}.txt", content)).status == 429:
            await asyncio.sleep(0.01)
        return content, made

    results = await asyncio.gather(*(one(number) for number in range(20)))
    for content, made in results:
        assert (
            await upload_gateway.gateway.request("GET", f"/v1/files/{made.json['id']}/content")
        ).body == content
    assert len(upload_gateway.stored_files()) == 5
    await asyncio.gather(
        *(
            upload_gateway.gateway.request("DELETE", f"/v1/files/{made.json['id']}")
            for _, made in results[:15]
        )
    )
    assert len(upload_gateway.stored_files()) == 5
    for content, made in results[15:]:
        assert (
            await upload_gateway.gateway.request("GET", f"/v1/files/{made.json['id']}/content")
        ).body == content


# --- besides ------------------------------------------------------------------------------------------


async def test_uploads_count_as_requests(tmp_path_factory: pytest.TempPathFactory) -> None:
    limits = RequestLimiter(ApiKeyLimits(requests_per_minute=2))
    async with run_upload_gateway(tmp_path_factory.mktemp("limited"), limits=limits) as upload_gateway:
        answers = [await upload_gateway.gateway.upload("a.txt", b"x") for _ in range(3)]
        assert [answer.status for answer in answers] == [200, 200, 429]
        figures = (await upload_gateway.gateway.request("GET", "/metrics")).body.decode()
        assert "fumehood_uploads_total 2.0" in figures
        assert 'fumehood_file_bytes_total{direction="in"} 2.0' in figures


async def test_names_are_made_fit(upload_gateway: UploadGateway) -> None:
    for sent, kept in (
        ("../../etc/passwd", "passwd"),
        ("C:\\dir\\a.txt", "a.txt"),
        ("..", "upload"),
        ("", "upload"),
        ("dir/", "upload"),
        ("a\0b.txt", "a\ufffdb.txt"),
        ("x" * 5000 + ".txt", None),
    ):
        name = (await upload_gateway.gateway.upload(sent, b"x")).json["filename"]
        assert name == kept or (kept is None and len(name) == 200 and name.endswith(".txt"))


async def test_ids_cannot_be_guessed(upload_gateway: UploadGateway) -> None:
    ids = [(await upload_gateway.gateway.upload("a.txt", b"x")).json["id"] for _ in range(5)]
    assert len({made[-34:] for made in ids}) == 5
    assert all(len(made) == len("file-") + 48 for made in ids)
    for wrong in (ids[0].upper(), ids[0][:-1], ids[0] + "0", "%00", "..%2f", "file-%ff"):
        assert (await upload_gateway.gateway.request("GET", f"/v1/files/{wrong}")).status in (400, 404)
