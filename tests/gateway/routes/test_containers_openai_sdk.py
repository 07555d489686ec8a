"""Every method of the OpenAI SDK's `client.containers`, in its strict mode."""

import asyncio
import inspect
import io
import tarfile
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, cast

import openai
import pytest
import pytest_asyncio
from inline_snapshot import snapshot
from openai import AsyncOpenAI
from openai.resources.containers import AsyncContainers
from openai.resources.containers.files import AsyncFiles
from openai.resources.containers.files.content import AsyncContent

from fumehood.protocol.api_keys import ApiKeyLimits
from tests.support.two_tenant_gateway import INTERPRETER, TenantClient, TenantGateway, two_tenants

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tenant_gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[TenantGateway]:
    async with two_tenants(tmp_path_factory.mktemp("containers")) as tenant_gateway:
        yield tenant_gateway


@pytest_asyncio.fixture(loop_scope="module")
async def client(tenant_gateway: TenantGateway) -> AsyncGenerator[AsyncOpenAI]:
    async with AsyncOpenAI(
        base_url=f"{tenant_gateway.gateway.base}/v1",
        api_key=tenant_gateway.ann.secret,
        max_retries=0,
        _strict_response_validation=True,
    ) as client:
        yield client


def rejection(refused: pytest.ExceptionInfo[Any]) -> tuple[int, str | None, str | None]:
    error = cast("openai.APIStatusError", refused.value)
    return error.status_code, error.code, error.param


def methods(kind: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(kind, inspect.isfunction) if name[0] != "_"}


async def test_no_method_is_forgotten() -> None:
    assert methods(AsyncContainers) == {"create", "retrieve", "list", "delete"}
    assert methods(AsyncFiles) == {"create", "retrieve", "list", "delete"}
    assert methods(AsyncContent) == {"retrieve"}


# --- containers ---------------------------------------------------------------------------------------


async def test_create(client: AsyncOpenAI) -> None:
    made = await client.containers.create(name="mine")
    assert made.id.startswith("cntr_")
    assert len(made.id) <= 64
    assert made.created_at == made.last_active_at
    assert made.model_dump(exclude={"id", "created_at", "last_active_at"}) == snapshot(
        {
            "name": "mine",
            "object": "container",
            "status": "running",
            "expires_after": {"anchor": "last_active_at", "minutes": 20},
            "memory_limit": "1g",
            "network_policy": {"type": "disabled", "allowed_domains": None},
        }
    )


async def test_create_with_everything(client: AsyncOpenAI) -> None:
    upload = await client.files.create(file=("täble.csv", b"a,b\n"), purpose="user_data")
    made = await client.containers.create(
        name="all of it",
        expires_after={"anchor": "last_active_at", "minutes": 7},
        file_ids=[upload.id],
        memory_limit="4g",
        network_policy={"type": "disabled"},
        extra_body={"new": {"field": 1}, "skills": []},
    )
    assert made.expires_after is not None
    assert (made.memory_limit, made.expires_after.minutes) == ("4g", 7)
    (file,) = (await client.containers.files.list(made.id)).data
    assert (file.path, file.bytes, file.source) == ("/mnt/data/täble.csv", 4, "user")
    await client.files.delete(upload.id)  # the container has its own
    content = await client.containers.files.content.retrieve(file.id, container_id=made.id)
    assert content.read() == b"a,b\n"


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({}, (400, "missing_required_parameter", "name")),
        ({"name": ""}, (400, "invalid_value", "name")),
        ({"name": 5}, (400, "invalid_type", "name")),
        ({"name": "x", "memory_limit": "8g"}, (400, "invalid_value", "memory_limit")),
        ({"name": "x", "expires_after": {"minutes": 0}}, (400, "invalid_value", "expires_after.minutes")),
        ({"name": "x", "expires_after": {"minutes": 61}}, (400, "invalid_value", "expires_after.minutes")),
        (
            {"name": "x", "expires_after": {"anchor": "created_at", "minutes": 5}},
            (400, "invalid_value", "expires_after.anchor"),
        ),
        ({"name": "x", "file_ids": ["file-unknown"]}, (400, "invalid_value", "file_ids")),
        (
            {"name": "x", "network_policy": {"type": "allowlist", "allowed_domains": ["a.example"]}},
            (400, "invalid_value", "network_policy"),
        ),
        ({"name": "x", "network_policy": {"type": "open"}}, (400, "invalid_value", "network_policy")),
        ({"name": "x", "skills": [{"type": "skill_reference"}]}, (400, None, "skills")),
    ],
)
async def test_create_what_cannot_be(
    tenant_gateway: TenantGateway, client: AsyncOpenAI, body: dict[str, Any], error: tuple[int, str, str]
) -> None:
    rows = tenant_gateway.table_rows()
    with pytest.raises(openai.BadRequestError) as refused:
        await client.post("/containers", body=body, cast_to=object)
    assert rejection(refused) == error
    assert tenant_gateway.table_rows() == rows


async def test_retrieve(client: AsyncOpenAI) -> None:
    made = await client.containers.create(name="found")
    found = await client.containers.retrieve(made.id)
    assert found.model_dump() == made.model_dump()
    for name in ("cntr_unknown", made.id[:-1], "%20", "é"):
        with pytest.raises(openai.NotFoundError):
            await client.containers.retrieve(name)


async def test_retrieve_counts_as_a_use(tenant_gateway: TenantGateway, client: AsyncOpenAI) -> None:
    made = await client.containers.create(name="used")
    assert made.last_active_at is not None
    tenant_gateway.clock.advance(100)
    assert (await client.containers.retrieve(made.id)).last_active_at == made.last_active_at + 100


async def test_list(tenant_gateway: TenantGateway, client: AsyncOpenAI) -> None:
    made = [(await client.containers.create(name=f"list {number % 2}")).id for number in range(5)]
    page = await client.containers.list(limit=2, name="list 0")
    assert page.has_more
    found = [one.id async for one in page]  # page after page
    assert sorted(found) == sorted(made[::2])
    oldest = [one.id async for one in client.containers.list(limit=2, name="list 0", order="asc")]
    assert oldest == found[::-1]
    rest = await client.containers.list(after=found[0], name="list 0")
    assert [one.id for one in rest.data] == found[1:]
    everything = [one.id async for one in client.containers.list(limit=100)]
    assert set(made) <= set(everything)
    assert (await client.containers.list(name="no such name")).data == []
    ben = AsyncOpenAI(
        base_url=f"{tenant_gateway.gateway.base}/v1", api_key=tenant_gateway.ben.secret, max_retries=0
    )
    assert [one.id async for one in ben.containers.list(name="list 0")] == []
    await ben.close()


@pytest.mark.parametrize("query", [{"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "cntr_unknown"}])
async def test_list_what_is_not_there(client: AsyncOpenAI, query: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.containers.list(**query)
    assert rejection(refused) == (400, "invalid_value", *query)


async def test_delete(client: AsyncOpenAI) -> None:
    made = await client.containers.create(name="deleted")
    file = await client.containers.files.create(made.id, file=("a.txt", b"a"))
    raw = await client.containers.with_raw_response.delete(made.id)
    assert raw.http_response.json() == {"id": made.id, "object": "container.deleted", "deleted": True}
    with pytest.raises(openai.NotFoundError):
        await client.containers.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        await client.containers.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        await client.containers.files.list(made.id)
    with pytest.raises(openai.NotFoundError):
        await client.containers.files.content.retrieve(file.id, container_id=made.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(
            model="scripted", input="hi", tools=[{"type": "code_interpreter", "container": made.id}]
        )
    assert made.id not in [one.id async for one in client.containers.list(limit=100)]


async def test_an_expired_one(tenant_gateway: TenantGateway, client: AsyncOpenAI) -> None:
    made = await client.containers.create(
        name="expired", expires_after={"anchor": "last_active_at", "minutes": 1}
    )
    file = await client.containers.files.create(made.id, file=("a.txt", b"a"))
    tenant_gateway.clock.advance(61)
    assert (await client.containers.retrieve(made.id)).status == "expired"
    (listed,) = (await client.containers.list(name="expired")).data
    assert listed.status == "expired"
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(
            model="scripted", input="hi", tools=[{"type": "code_interpreter", "container": made.id}]
        )
    assert cast("Any", refused.value.body)["message"] == "Container is expired."
    for call in (
        client.containers.files.list(made.id),
        client.containers.files.retrieve(file.id, container_id=made.id),
        client.containers.files.content.retrieve(file.id, container_id=made.id),
        client.containers.files.delete(file.id, container_id=made.id),
        client.containers.files.create(made.id, file=("b.txt", b"b")),
    ):
        with pytest.raises(openai.NotFoundError):
            await call
    await client.containers.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        await client.containers.retrieve(made.id)


async def test_as_many_as_allowed(tenant_gateway: TenantGateway) -> None:
    party = await tenant_gateway.add_tenant("carl", ApiKeyLimits(containers=2))
    async with AsyncOpenAI(
        base_url=f"{tenant_gateway.gateway.base}/v1", api_key=party.secret, max_retries=0
    ) as client:
        first = await client.containers.create(name="1")
        await client.containers.create(name="2")
        with pytest.raises(openai.RateLimitError) as refused:
            await client.containers.create(name="3")
        assert refused.value.code == "container_limit_exceeded"
        await client.containers.delete(first.id)
        await client.containers.create(name="3")


# --- files --------------------------------------------------------------------------------------------


@pytest_asyncio.fixture(loop_scope="module")
async def container(client: AsyncOpenAI) -> AsyncGenerator[str]:
    made = await client.containers.create(name="files")
    yield made.id
    await client.containers.delete(made.id)


async def test_files_create(client: AsyncOpenAI, container: str, tmp_path: Path) -> None:
    path = tmp_path / "on disk.bin"
    path.write_bytes(b"disk")
    made = await client.containers.files.create(container, file=("dir/a b.txt", b"hello", "text/plain"))
    assert made.id.startswith("cfile_")
    assert made.model_dump(exclude={"id", "created_at", "container_id"}) == snapshot(
        {
            "bytes": 5,
            "object": "container.file",
            "path": "/mnt/data/dir/a b.txt",
            "source": "user",
        }
    )
    assert made.container_id == container
    assert (await client.containers.files.create(container, file=path)).path == "/mnt/data/on disk.bin"
    assert (await client.containers.files.create(container, file=io.BytesIO(b"io"))).bytes == 2
    again = await client.containers.files.create(container, file=("dir/a b.txt", b"other"))
    assert (again.id, again.bytes) == (made.id, 5)


async def test_files_create_by_id(client: AsyncOpenAI, container: str) -> None:
    upload = await client.files.create(file=("up.txt", b"uploaded"), purpose="user_data")
    made = await client.containers.files.create(container, file_id=upload.id)
    assert (made.path, made.bytes, made.source) == ("/mnt/data/up.txt", 8, "user")
    again = await client.containers.files.create(container, file_id=upload.id)
    assert again.id == made.id
    with pytest.raises(openai.NotFoundError):
        await client.containers.files.create(container, file_id="file-unknown")


@pytest.mark.parametrize(
    ("name", "into"),
    [
        ("into/them.tar.gz", "/mnt/data/into"),
        ("/mnt/data/into/them.tar.gz", "/mnt/data/into"),
        ("/mnt/data/them.tar.gz", "/mnt/data"),
    ],
)
async def test_files_create_from_an_archive(
    client: AsyncOpenAI, container: str, name: str, into: str
) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for member in ("a.txt", "sub/b.txt"):
            info = tarfile.TarInfo(member)
            info.size = 3
            archive.addfile(info, io.BytesIO(b"abc"))
    made = await client.containers.files.create(
        container, file=(name, packed.getvalue()), extra_body={"unpack": "true"}
    )
    assert (made.path, made.bytes, made.source) == (f"{into}/a.txt", 3, "user")
    unpacked = cast("Any", made.model_extra)["fumehood:unpacked"]
    assert [file["path"] for file in unpacked] == [f"{into}/a.txt", f"{into}/sub/b.txt"]
    listed = [file.path async for file in client.containers.files.list(container)]
    assert sorted(listed) == [f"{into}/a.txt", f"{into}/sub/b.txt"]


@pytest.mark.parametrize(
    ("file", "fields", "error"),
    [
        (None, {}, (400, "missing_required_parameter", "file_id")),
        (("../up.txt", b"x"), {}, (400, "invalid_value", "file")),
        (("/etc/passwd", b"x"), {}, (400, "invalid_value", "file")),
        (("a.txt", b"x"), {"unpack": "true"}, (400, "invalid_value", "file")),
        (("a.zip", b"x"), {"unpack": "true"}, (400, None, "file")),
        (("a.zip", b"x"), {"unpack": "perhaps"}, (400, "invalid_value", "unpack")),
    ],
)
async def test_files_create_what_cannot_be(
    client: AsyncOpenAI, container: str, file: Any, fields: dict[str, str], error: tuple[int, str, str]
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.containers.files.create(
            container, extra_body=fields, **({} if file is None else {"file": file})
        )
    assert rejection(refused) == error
    assert (await client.containers.files.list(container)).data == []


async def test_files_retrieve(client: AsyncOpenAI, container: str) -> None:
    made = await client.containers.files.create(container, file=("a.txt", b"a"))
    found = await client.containers.files.retrieve(made.id, container_id=container)
    assert found.model_dump() == made.model_dump()
    other = await client.containers.create(name="other")
    with pytest.raises(openai.NotFoundError):
        await client.containers.files.retrieve(made.id, container_id=other.id)
    with pytest.raises(openai.NotFoundError):
        await client.containers.files.retrieve("cfile_unknown", container_id=container)


async def test_files_list(client: AsyncOpenAI, container: str) -> None:
    made = [
        (await client.containers.files.create(container, file=(f"{number}.txt", b"x"))).id
        for number in range(5)
    ]
    page = await client.containers.files.list(container, limit=2)
    assert page.has_more
    found = [file.id async for file in page]
    assert sorted(found) == sorted(made)
    oldest = [file.id async for file in client.containers.files.list(container, limit=2, order="asc")]
    assert oldest == found[::-1]
    with pytest.raises(openai.BadRequestError) as refused:
        await client.containers.files.list(container, after="cfile_unknown")
    assert rejection(refused) == (400, "invalid_value", "after")


async def test_files_delete(client: AsyncOpenAI, container: str) -> None:
    made = await client.containers.files.create(container, file=("a.txt", b"a"))
    raw = await client.containers.files.with_raw_response.delete(made.id, container_id=container)
    assert raw.http_response.json() == {"id": made.id, "object": "container.file.deleted", "deleted": True}
    for call in (
        client.containers.files.delete(made.id, container_id=container),
        client.containers.files.retrieve(made.id, container_id=container),
        client.containers.files.content.retrieve(made.id, container_id=container),
    ):
        with pytest.raises(openai.NotFoundError):
            await call


async def test_files_content_retrieve(client: AsyncOpenAI, container: str, tmp_path: Path) -> None:
    whole = bytes(range(256)) * 5000
    made = await client.containers.files.create(container, file=("päth/a.bin", whole))
    contents = client.containers.files.content
    answer = await contents.retrieve(made.id, container_id=container)
    assert answer.read() == whole
    assert answer.response.headers["content-disposition"] == 'attachment; filename="a.bin"'
    assert answer.response.headers["content-type"] == "application/octet-stream"
    async with contents.with_streaming_response.retrieve(made.id, container_id=container) as streamed:
        await streamed.stream_to_file(tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == whole
    part = await contents.retrieve(
        made.id, container_id=container, extra_headers={"range": "bytes=1000-1009"}
    )
    assert (part.response.status_code, part.read()) == (206, whole[1000:1010])
    assert part.response.headers["content-range"] == f"bytes 1000-1009/{len(whole)}"
    with pytest.raises(openai.APIStatusError) as refused:
        await contents.retrieve(
            made.id, container_id=container, extra_headers={"range": f"bytes={len(whole)}-"}
        )
    assert refused.value.status_code == 416
    with pytest.raises(openai.NotFoundError):
        await contents.retrieve("cfile_unknown", container_id=container)


# --- a crowd ------------------------------------------------------------------------------------------


async def test_two_tenants_with_fifty_containers_each(tmp_path: Path) -> None:
    """All at once: made, filled, used, listed, and gone; nobody sees anything of the other's."""
    number = 50

    async def one(party: TenantClient, mark: str) -> str:
        made = (await party.ask("POST", "/v1/containers", {"name": "crowd"})).json["id"]
        form = f'--b\r\ncontent-disposition: form-data; name="file"; filename="given.txt"\r\n\r\n{mark}\r\n--b--\r\n'
        headers = {"content-type": "multipart/form-data; boundary=b"}
        put = await party.ask("POST", f"/v1/containers/{made}/files", form.encode(), **headers)
        assert put.status == 200, put.body
        tool = {"type": "code_interpreter", "container": made}
        assert (await party.create(tools=[tool])).status == 200
        content = await party.ask("GET", f"/v1/containers/{made}/files/{put.json['id']}/content")
        assert content.body == mark.encode()
        return made

    async with two_tenants(tmp_path) as tenant_gateway:
        before = tenant_gateway.table_rows()
        parties = (tenant_gateway.ann, tenant_gateway.ben)
        made = await asyncio.gather(
            *(
                one(party, f"{tenant} {place}")
                for place in range(number)
                for tenant, party in enumerate(parties)
            )
        )
        assert len(set(made)) == 2 * number
        for tenant, party in enumerate(parties):
            own = made[tenant::2]
            listed = (await party.ask("GET", "/v1/containers?limit=100")).json
            assert {one["id"] for one in listed["data"]} == set(own)
            assert not listed["has_more"]
            foreign = made[1 - tenant]
            assert (await party.ask("DELETE", f"/v1/containers/{foreign}")).status == 404
        gone = [
            (party, name) for tenant, party in enumerate(parties) for name in made[tenant::2][: number // 2]
        ]
        await asyncio.gather(*(party.ask("DELETE", f"/v1/containers/{name}") for party, name in gone))
        tenant_gateway.clock.advance(21 * 60)
        await tenant_gateway.containers.sweep()
        for party in parties:
            listed = (await party.ask("GET", "/v1/containers?limit=100")).json["data"]
            assert [one["status"] for one in listed] == ["expired"] * (number // 2)
        tenant_gateway.clock.advance(8 * 24 * 3600)
        await tenant_gateway.containers.sweep()
        await tenant_gateway.containers.sweep()
        left = {name: number - before[name] for name, number in tenant_gateway.table_rows().items()}
        assert (left["containers"], left["files"]) == (0, 0)
        assert await tenant_gateway.sandboxes.list_sandboxes() == []
        assert tenant_gateway.blobs.contents == {}


# --- along a conversation -----------------------------------------------------------------------------


async def test_a_conversation_goes_on_in_the_container_that_was_made_for_it(
    client: AsyncOpenAI, container: str
) -> None:
    await client.containers.files.create(container, file=("given.txt", b"given"))
    made = await client.responses.create(
        model="scripted", input="hi", tools=[{"type": "code_interpreter", "container": container}]
    )
    (call,) = [item for item in made.output if item.type == "code_interpreter_call"]
    assert call.container_id == container
    sources = {file.path: file.source async for file in client.containers.files.list(container)}
    assert sources == {"/mnt/data/given.txt": "user", "/mnt/data/made.txt": "assistant"}


async def test_a_conversation_whose_container_expired_goes_on_in_another(
    tenant_gateway: TenantGateway, client: AsyncOpenAI
) -> None:
    tool = cast("Any", INTERPRETER)
    first = await client.responses.create(model="scripted", input="hi", tools=[tool])
    (call,) = [item for item in first.output if item.type == "code_interpreter_call"]
    await client.containers.files.create(call.container_id, file=("given.txt", b"given"))
    tenant_gateway.clock.advance(21 * 60)
    asked = len(tenant_gateway.model.requests)
    second = await client.responses.create(
        model="scripted", input="more", previous_response_id=first.id, tools=[tool]
    )
    (again,) = [item for item in second.output if item.type == "code_interpreter_call"]
    assert again.container_id != call.container_id
    sources = {file.path: file.source async for file in client.containers.files.list(again.container_id)}
    assert sources == {"/mnt/data/given.txt": "user", "/mnt/data/made.txt": "assistant"}
    assert len(tenant_gateway.model.requests) == asked + 2
    told = [
        entry.exchange.output
        for segment in tenant_gateway.model.requests[-1].segments
        for entry in segment.entries
        if entry.exchange is not None
    ]
    assert "has expired, with their variables" in told[-1]
    assert "with the files that the user had put there" in told[-1]
    assert (await client.containers.retrieve(call.container_id)).status == "expired"
    assert (await client.responses.retrieve(first.id)).status == "completed"
