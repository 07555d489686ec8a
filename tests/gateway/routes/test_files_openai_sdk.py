"""Every method of the OpenAI SDK's `client.files`, in its strict mode."""

import inspect
import io
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, cast

import openai
import pytest
import pytest_asyncio
from inline_snapshot import snapshot
from openai import AsyncOpenAI
from openai.resources.files import AsyncFiles

from fumehood.files.upload_file_service import UploadSettings
from tests.support.upload_gateway import UploadGateway, run_upload_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 4000


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def upload_gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[UploadGateway]:
    settings = UploadSettings(file_bytes=2_000_000, tenant_files=200, tenant_bytes=20_000_000)
    async with run_upload_gateway(tmp_path_factory.mktemp("files"), settings) as upload_gateway:
        yield upload_gateway


@pytest_asyncio.fixture(loop_scope="module")
async def client(upload_gateway: UploadGateway) -> AsyncGenerator[AsyncOpenAI]:
    async with AsyncOpenAI(
        base_url=f"{upload_gateway.gateway.base}/v1",
        api_key="none",
        max_retries=0,
        _strict_response_validation=True,
    ) as client:
        yield client
        for file in (await client.files.list()).data:
            await client.files.delete(file.id)
        assert upload_gateway.stored_files() == []


async def test_no_method_is_forgotten() -> None:
    methods = {name for name, _ in inspect.getmembers(AsyncFiles, inspect.isfunction) if name[0] != "_"}
    assert methods == {
        *("create", "retrieve", "list", "delete", "content", "retrieve_content", "wait_for_processing"),
    }


# --- create -------------------------------------------------------------------------------------------


async def test_create_from_bytes(client: AsyncOpenAI) -> None:
    file = await client.files.create(file=b"a,b\n1,2\n", purpose="user_data")
    assert file.id.startswith("file-")
    assert file.model_dump(exclude={"id", "created_at"}) == snapshot(
        {
            "bytes": 8,
            "filename": "upload",
            "object": "file",
            "purpose": "user_data",
            "status": "processed",
            "expires_at": None,
            "status_details": None,
        }
    )


async def test_create_from_a_path(client: AsyncOpenAI, tmp_path: Path) -> None:
    path = tmp_path / 'Ünïcode "quoted" name.png'
    path.write_bytes(PNG)
    file = await client.files.create(file=path, purpose="vision")
    assert (file.bytes, file.purpose) == (len(PNG), "vision")
    assert file.filename == "Ünïcode %22quoted%22 name.png"  # as httpx and browsers write quotes in a form
    assert (await client.files.content(file.id)).content == PNG


async def test_create_from_io(client: AsyncOpenAI, tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("# notes")
    with (tmp_path / "notes.md").open("rb") as opened:
        file = await client.files.create(file=opened, purpose="assistants")
    assert (file.filename, file.bytes) == ("notes.md", 7)
    nameless = await client.files.create(file=io.BytesIO(b"text"), purpose="assistants")
    assert (await client.files.content(nameless.id)).text == "text"


async def test_create_from_a_tuple(client: AsyncOpenAI) -> None:
    file = await client.files.create(
        file=("dir/data.jsonl", b'{"a":1}\n', "application/jsonl"), purpose="batch"
    )
    assert (file.filename, file.purpose) == ("data.jsonl", "batch")
    assert file.expires_at == file.created_at + 30 * 86_400


async def test_create_with_an_end(client: AsyncOpenAI, upload_gateway: UploadGateway) -> None:
    file = await client.files.create(
        file=("a.txt", b"x"), purpose="fine-tune", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert file.expires_at == file.created_at + 3600
    upload_gateway.clock.advance(3600)
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(file.id)
    assert (await client.files.list()).data == []
    assert await upload_gateway.files.sweep() == 1
    assert upload_gateway.stored_files() == []


async def test_create_for_evals(upload_gateway: UploadGateway) -> None:
    """The SDK's own type of a file does not know this purpose, so no strict client can read the answer."""
    async with AsyncOpenAI(base_url=f"{upload_gateway.gateway.base}/v1", api_key="none") as client:
        file = await client.files.create(file=("a.jsonl", b"{}"), purpose="evals")
        assert cast("Any", file.purpose) == "evals"
        await client.files.delete(file.id)


# --- retrieve, list, delete ---------------------------------------------------------------------------


async def test_retrieve(client: AsyncOpenAI) -> None:
    made = await client.files.create(file=("a.txt", b"x"), purpose="user_data")
    assert await client.files.retrieve(made.id) == made
    raw = await client.files.with_raw_response.retrieve(made.id)
    assert raw.http_response.json()["status"] == "processed"


async def test_list(client: AsyncOpenAI, upload_gateway: UploadGateway) -> None:
    made: list[str] = []
    for number in range(7):
        purpose = "vision" if number % 2 else "user_data"
        made.append((await client.files.create(file=(f"{number}.txt", b"x"), purpose=purpose)).id)
        upload_gateway.clock.advance(0.25)
    assert [file.id async for file in client.files.list()] == made[::-1]
    assert [file.id async for file in client.files.list(limit=2)] == made[::-1], "page after page"
    assert [file.id async for file in client.files.list(limit=3, order="asc")] == made
    page = await client.files.list(limit=2, order="asc", after=made[2])
    assert ([file.id for file in page.data], page.has_next_page()) == (made[3:5], True)
    assert [file.id async for file in client.files.list(purpose="vision")] == made[5::-2]
    assert (await client.files.list(purpose="batch")).data == []


async def test_delete(client: AsyncOpenAI, upload_gateway: UploadGateway) -> None:
    made = await client.files.create(file=("a.txt", b"deleted"), purpose="user_data")
    assert (await client.files.delete(made.id)).model_dump() == {
        "id": made.id,
        "deleted": True,
        "object": "file",
    }
    for call in (client.files.retrieve, client.files.delete, client.files.content):
        with pytest.raises(openai.NotFoundError):
            await call(made.id)
    assert upload_gateway.stored_files() == []


async def test_equal_contents(client: AsyncOpenAI, upload_gateway: UploadGateway) -> None:
    one, two = [await client.files.create(file=(name, PNG), purpose="vision") for name in ("1.png", "2.png")]
    assert one.id != two.id
    assert len(upload_gateway.stored_files()) == 1
    await client.files.delete(one.id)
    assert (await client.files.content(two.id)).content == PNG
    await client.files.delete(two.id)
    assert upload_gateway.stored_files() == []


# --- content ------------------------------------------------------------------------------------------


async def test_content(client: AsyncOpenAI, tmp_path: Path) -> None:
    made = await client.files.create(file=("picture.png", PNG), purpose="vision")
    content = await client.files.content(made.id)
    assert content.content == PNG
    assert content.response.headers["content-type"] == "image/png"
    assert content.response.headers["content-length"] == str(len(PNG))
    content.write_to_file(tmp_path / "copy.png")
    assert (tmp_path / "copy.png").read_bytes() == PNG


async def test_content_with_streaming_response(client: AsyncOpenAI) -> None:
    made = await client.files.create(file=("picture.png", PNG), purpose="vision")
    async with client.files.with_streaming_response.content(made.id) as answer:
        assert b"".join([piece async for piece in answer.iter_bytes(10_000)]) == PNG


async def test_retrieve_content(client: AsyncOpenAI) -> None:
    made = await client.files.create(file=("a.txt", "naïve".encode()), purpose="user_data")
    with pytest.warns(DeprecationWarning, match="content"):
        content = await client.files.retrieve_content(made.id)  # pyright: ignore[reportDeprecated]
    assert content == "naïve"


async def test_wait_for_processing(client: AsyncOpenAI) -> None:
    made = await client.files.create(file=("a.txt", b"x"), purpose="user_data")
    assert (await client.files.wait_for_processing(made.id, poll_interval=60)).status == "processed"


# --- errors -------------------------------------------------------------------------------------------


async def test_errors_of_create(client: AsyncOpenAI, upload_gateway: UploadGateway) -> None:
    purpose: Any = "world domination"
    with pytest.raises(openai.BadRequestError) as refused:
        await client.files.create(file=("a.txt", b"x"), purpose=purpose)
    assert (refused.value.param, refused.value.code) == ("purpose", "invalid_value")
    end: Any
    for end, param in (
        ({"anchor": "created_at", "seconds": 10}, "expires_after.seconds"),
        ({"anchor": "created_at", "seconds": "soon"}, "expires_after.seconds"),
        ({"anchor": "created_at"}, "expires_after.seconds"),
        ({"anchor": "last_active_at", "seconds": 3600}, "expires_after.anchor"),
        ({"seconds": 3600}, "expires_after.anchor"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.files.create(file=("a.txt", b"x"), purpose="user_data", expires_after=end)
        assert refused.value.param == param
    with pytest.raises(openai.BadRequestError) as refused:
        await client.files.create(file=("a.png", b"no picture"), purpose="vision")
    assert (refused.value.param, refused.value.code) == ("file", "unsupported_file")
    with pytest.raises(openai.APIStatusError) as too_large:
        await client.files.create(file=("a.txt", b"x" * 2_000_001), purpose="user_data")
    assert (too_large.value.status_code, too_large.value.code) == (413, "request_too_large")
    assert upload_gateway.stored_files() == []


async def test_a_full_quota(client: AsyncOpenAI, upload_gateway: UploadGateway) -> None:
    for number in range(10):
        await client.files.create(file=("a.txt", b"%d" % number * 2_000_000), purpose="user_data")
    with pytest.raises(openai.BadRequestError) as refused:
        await client.files.create(file=("b.txt", b"x"), purpose="user_data")
    assert refused.value.code == "storage_quota_exceeded"
    assert len(upload_gateway.stored_files()) == 10


async def test_errors_of_the_others(client: AsyncOpenAI) -> None:
    for call in (client.files.retrieve, client.files.delete, client.files.content):
        with pytest.raises(openai.NotFoundError) as missing:
            await call("file-0000")
        assert missing.value.body == {
            "message": "No such File object: file-0000",
            "type": "invalid_request_error",
            "param": "id",
            "code": None,
        }
    for options in ({"after": "file-0000"}, {"limit": 0}, {"limit": 10_001}, {"order": "up"}):
        arguments: Any = options
        with pytest.raises(openai.BadRequestError) as refused:
            await client.files.list(**arguments)
        assert refused.value.param == next(iter(options))
