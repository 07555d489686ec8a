"""A gateway with keys for two tenants, over the real engine, SQLite and containers; imports fumehood and siblings."""

import json
import sqlite3
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fumehood.engine.runs import EngineRuns
from fumehood.files.inputs import InputFiles
from fumehood.files.uploads import UploadedFiles
from fumehood.gateway.auth import Everybody, KeyHolders
from fumehood.interfaces import Store
from fumehood.protocol.keys import (
    TENANT_SCOPES,
    USUAL,
    ApiKey,
    KeyLimits,
    KeyScope,
    digest_of,
    hint_of,
    new_key_id,
    new_secret,
)
from fumehood.protocol.models import ModelRequest
from fumehood.protocol.sandbox import Stdout
from fumehood.sandbox.container import ContainerSettings
from fumehood.sandbox.containers import SandboxContainers
from fumehood.store.referred_blobs import ReferredBlobs
from fumehood.store.sealing import KeyedSealer, own_keys
from fumehood.store.sqlite import SqliteStore
from fumehood.testing import (
    Beat,
    FakeClock,
    MemoryBlobs,
    ScriptedModel,
    ScriptedModels,
    ScriptedSandboxes,
    Step,
    WriteFile,
    calls,
    says,
)
from fumehood.testing.sealing import PlainSealer
from fumehood.tools.code_interpreter import CodeInterpreter
from tests.support.gateway import Answer, Served, serving_gateway

_MANY = 5000
INTERPRETER = {"type": "code_interpreter", "container": {"type": "auto"}}


async def put_key(
    store: Store,
    tenant: str | None = None,
    limits: KeyLimits = USUAL,
    *,
    scopes: Iterable[KeyScope] = TENANT_SCOPES,
) -> str:
    """A new key of that tenant, or of one of its own; its secret."""
    secret, key_id = new_secret(), new_key_id()
    await store.put_key(
        ApiKey(
            id=key_id,
            tenant=tenant or key_id,
            digest=digest_of(secret.encode()),
            hint=hint_of(secret),
            created_at=1.0,
            limits=limits,
            scopes=frozenset(scopes),
        )
    )
    return secret


@dataclass
class Party:
    """One tenant, as a client with a key."""

    served: Served
    secret: str

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.secret}"}

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        return await self.served.ask(method, path, body, headers={**self.headers, **headers})

    async def upload(self, name: str, content: bytes, purpose: str = "user_data") -> Answer:
        return await self.served.upload(name, content, purpose, headers=self.headers)

    async def create(self, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
        body = {"model": "scripted", "input": "hi", **fields}
        return await self.ask("POST", "/v1/responses", body, **(headers or {}))


@dataclass
class House:
    """Two tenants before one gateway; `database` is its file."""

    served: Served
    store: SqliteStore
    holders: KeyHolders
    clock: FakeClock
    model: ScriptedModel
    database: Path
    ann: Party
    ben: Party
    runs: EngineRuns
    containers: SandboxContainers
    files: UploadedFiles
    sandboxes: ScriptedSandboxes
    blobs: MemoryBlobs

    @asynccontextmanager
    async def restarted(self) -> AsyncGenerator[Party]:
        """Another gateway over the same store, which remembers nothing of this one; ann as its client."""
        async with serving_gateway(
            runs=self.runs,
            store=self.store,
            containers=self.containers,
            files=self.files,
            callers=self.holders,
        ) as served:
            yield Party(served, self.ann.secret)

    def rows(self) -> dict[str, int]:
        """How much is in every table."""
        with closing(sqlite3.connect(self.database)) as connection:
            tables = connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall()
            return {
                name: connection.execute(f"SELECT count(*) FROM {name}").fetchone()[0]
                for (name,) in tables
                if not name.startswith("sqlite_")
            }

    async def another(self, tenant: str | None = None, limits: KeyLimits = USUAL) -> Party:
        secret = await put_key(self.store, tenant, limits)
        await self.holders.refresh()
        return Party(self.served, secret)


def _turn(request: ModelRequest) -> list[Beat]:
    """Run code where that may be done and was not yet in this turn of the conversation."""
    last = request.segments[-1].entries[-1]
    if request.functions and request.choice != "none" and last.type != "code_interpreter_call":
        return [*calls("code_interpreter", {"code": "make()"})]
    return [*says("done")]


@asynccontextmanager
async def two_tenants(directory: Path, **options: Any) -> AsyncGenerator[House]:
    """`options` are those of `Gateway`."""
    clock = FakeClock()
    database = directory / "tenants.db"
    store = await SqliteStore.open(database)
    steps = [Step(None, [Stdout(text="made\n"), WriteFile("made.txt", b"content")])] * _MANY
    sandboxes = ScriptedSandboxes(*steps)
    contents = MemoryBlobs()
    blobs = ReferredBlobs(contents, store)
    files = UploadedFiles(store, blobs, clock)
    containers = SandboxContainers(
        sandboxes,
        store,
        blobs,
        clock,
        ContainerSettings(containers_per_tenant=_MANY, alone=True),
        sealer=PlainSealer(),
        uploads=files,
    )
    model = ScriptedModel(*[_turn] * _MANY)
    tools = [CodeInterpreter(containers, clock, uploads=files)]
    sealer = KeyedSealer(own_keys(directory / "keys"))
    runs = EngineRuns(
        ScriptedModels(model), tools, store, clock, sealer=sealer, attachments=InputFiles(files)
    )
    ann, ben = await put_key(store, "ann"), await put_key(store, "ben")
    try:
        async with (
            KeyHolders(store, clock, Everybody()) as holders,
            serving_gateway(
                runs=runs, store=store, containers=containers, files=files, callers=holders, **options
            ) as served,
        ):
            yield House(
                served,
                store,
                holders,
                clock,
                model,
                database,
                Party(served, ann),
                Party(served, ben),
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
class Objects:
    """What one tenant has, by the names that paths give it."""

    response_id: str
    container_id: str
    file_id: str
    upload_id: str
    item_id: str
    call_id: str


async def objects_of(party: Party) -> Objects:
    """A kept response, in which code has written a file, and an upload."""
    made = await party.create(tools=[INTERPRETER], input="make a file")
    assert made.status == 200, made.body
    call, message = (
        next(item for item in made.json["output"] if item["type"] == kind)
        for kind in ("code_interpreter_call", "message")
    )
    files = await party.ask("GET", f"/v1/containers/{call['container_id']}/files")
    (file,) = json.loads(files.body)["data"]
    uploaded = await party.upload("own.txt", b"own")
    return Objects(
        made.json["id"], call["container_id"], file["id"], uploaded.json["id"], message["id"], call["id"]
    )
