"""A gateway with keys for two tenants, over the real engine, SQLite and containers."""

import json
import sqlite3
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fumehood.containers.container_service import SandboxContainerService
from fumehood.containers.container_settings import ContainerSettings
from fumehood.engine.run_service import EngineRunService
from fumehood.files.input_file_loader import InputFileLoader
from fumehood.files.upload_file_service import UploadFileService
from fumehood.gateway.authentication import AnonymousAuthenticator, ApiKeyAuthenticator
from fumehood.interfaces import Store
from fumehood.protocol.api_keys import (
    DEFAULT_KEY_LIMITS,
    TENANT_SCOPES,
    ApiKeyLimits,
    ApiKeyRecord,
    ApiKeyScope,
    hash_secret,
    new_key_id,
    new_secret,
    secret_hint,
)
from fumehood.protocol.model_turns import ModelRequest
from fumehood.protocol.sandbox.sandbox_messages import Stdout
from fumehood.store.aes_gcm_sealer import AesGcmSealer, load_or_create_keys
from fumehood.store.garbage_collected_blobs import GarbageCollectedBlobs
from fumehood.store.sqlite_store import SqliteStore
from fumehood.testing import (
    FakeClock,
    MemoryBlobStore,
    ScriptedExecution,
    ScriptedModel,
    ScriptedSandboxProvider,
    SingleBackendProvider,
    TurnStep,
    WriteFile,
    calls,
    says,
)
from fumehood.testing.fakes.plain_sealer import PlainSealer
from fumehood.tools.code_interpreter_tool import CodeInterpreterTool
from tests.support.scripted_gateway import HttpResponse, ScriptedGateway, run_gateway

_MANY = 5000
INTERPRETER = {"type": "code_interpreter", "container": {"type": "auto"}}


async def put_key(
    store: Store,
    tenant: str | None = None,
    limits: ApiKeyLimits = DEFAULT_KEY_LIMITS,
    *,
    scopes: Iterable[ApiKeyScope] = TENANT_SCOPES,
) -> str:
    """A new key of that tenant, or of one of its own; its secret."""
    secret, key_id = new_secret(), new_key_id()
    await store.add_api_key(
        ApiKeyRecord(
            id=key_id,
            tenant=tenant or key_id,
            digest=hash_secret(secret.encode()),
            hint=secret_hint(secret),
            created_at=1.0,
            limits=limits,
            scopes=frozenset(scopes),
        )
    )
    return secret


@dataclass
class TenantClient:
    """One tenant, as a client with a key."""

    gateway: ScriptedGateway
    secret: str

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.secret}"}

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> HttpResponse:
        return await self.gateway.request(method, path, body, headers={**self.headers, **headers})

    async def upload(self, name: str, content: bytes, purpose: str = "user_data") -> HttpResponse:
        return await self.gateway.upload(name, content, purpose, headers=self.headers)

    async def create(self, headers: dict[str, str] | None = None, **fields: Any) -> HttpResponse:
        body = {"model": "scripted", "input": "hi", **fields}
        return await self.ask("POST", "/v1/responses", body, **(headers or {}))


@dataclass
class TenantGateway:
    """Two tenants before one gateway; `database` is its file."""

    gateway: ScriptedGateway
    store: SqliteStore
    authenticator: ApiKeyAuthenticator
    clock: FakeClock
    model: ScriptedModel
    database: Path
    ann: TenantClient
    ben: TenantClient
    runs: EngineRunService
    containers: SandboxContainerService
    files: UploadFileService
    sandboxes: ScriptedSandboxProvider
    blobs: MemoryBlobStore

    @asynccontextmanager
    async def restart(self) -> AsyncGenerator[TenantClient]:
        """Another gateway over the same store, which remembers nothing of this one; ann as its client."""
        async with run_gateway(
            runs=self.runs,
            store=self.store,
            containers=self.containers,
            files=self.files,
            authenticator=self.authenticator,
        ) as gateway:
            yield TenantClient(gateway, self.ann.secret)

    def table_rows(self) -> dict[str, int]:
        """How much is in every table."""
        with closing(sqlite3.connect(self.database)) as connection:
            tables = connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall()
            return {
                name: connection.execute(f"SELECT count(*) FROM {name}").fetchone()[0]
                for (name,) in tables
                if not name.startswith("sqlite_")
            }

    async def add_tenant(
        self, tenant: str | None = None, limits: ApiKeyLimits = DEFAULT_KEY_LIMITS
    ) -> TenantClient:
        secret = await put_key(self.store, tenant, limits)
        await self.authenticator.refresh()
        return TenantClient(self.gateway, secret)


def _turn(request: ModelRequest) -> list[TurnStep]:
    """Run code where that may be done and was not yet in this turn of the conversation."""
    last = request.segments[-1].entries[-1]
    if request.function_tools and request.tool_choice != "none" and last.type != "code_interpreter_call":
        return [*calls("code_interpreter", {"code": "make()"})]
    return [*says("done")]


@asynccontextmanager
async def two_tenants(directory: Path, **options: Any) -> AsyncGenerator[TenantGateway]:
    """`options` are those of `Gateway`."""
    clock = FakeClock()
    database = directory / "tenants.db"
    store = await SqliteStore.open(database)
    steps = [ScriptedExecution(None, [Stdout(text="made\n"), WriteFile("made.txt", b"content")])] * _MANY
    sandboxes = ScriptedSandboxProvider(*steps)
    contents = MemoryBlobStore()
    blobs = GarbageCollectedBlobs(contents, store)
    files = UploadFileService(store, blobs, clock)
    containers = SandboxContainerService(
        sandboxes,
        store,
        blobs,
        clock,
        ContainerSettings(containers_per_tenant=_MANY),
        sealer=PlainSealer(),
        uploads=files,
    )
    model = ScriptedModel(*[_turn] * _MANY)
    tools = [CodeInterpreterTool(containers, clock, uploads=files)]
    sealer = AesGcmSealer(load_or_create_keys(directory / "keys"))
    runs = EngineRunService(
        SingleBackendProvider(model), tools, store, clock, sealer=sealer, attachments=InputFileLoader(files)
    )
    ann, ben = await put_key(store, "ann"), await put_key(store, "ben")
    try:
        async with (
            ApiKeyAuthenticator(store, clock, AnonymousAuthenticator()) as authenticator,
            run_gateway(
                runs=runs,
                store=store,
                containers=containers,
                files=files,
                authenticator=authenticator,
                **options,
            ) as gateway,
        ):
            yield TenantGateway(
                gateway,
                store,
                authenticator,
                clock,
                model,
                database,
                TenantClient(gateway, ann),
                TenantClient(gateway, ben),
                runs,
                containers,
                files,
                sandboxes,
                contents,
            )
    finally:
        await containers.close()
        await sandboxes.close()
        await store.close()


@dataclass(frozen=True)
class TenantObjects:
    """What one tenant has, by the names that paths give it."""

    response_id: str
    container_id: str
    file_id: str
    upload_id: str
    item_id: str
    call_id: str


async def create_objects(tenant: TenantClient) -> TenantObjects:
    """A kept response, in which code has written a file, and an upload."""
    made = await tenant.create(tools=[INTERPRETER], input="make a file")
    assert made.status == 200, made.body
    call, message = (
        next(item for item in made.json["output"] if item["type"] == kind)
        for kind in ("code_interpreter_call", "message")
    )
    files = await tenant.ask("GET", f"/v1/containers/{call['container_id']}/files")
    (file,) = json.loads(files.body)["data"]
    uploaded = await tenant.upload("own.txt", b"own")
    return TenantObjects(
        made.json["id"], call["container_id"], file["id"], uploaded.json["id"], message["id"], call["id"]
    )
