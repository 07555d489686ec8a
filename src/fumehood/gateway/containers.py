"""/v1/containers and their files: make, find, fill, read and delete; imports `interfaces`, `protocol`, siblings."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from msgspec import Raw

from fumehood.gateway.downloads import Download, send_download
from fumehood.gateway.exchange import Exchange, encode
from fumehood.gateway.limits import Limits
from fumehood.gateway.listing import asked_window, windowed_page
from fumehood.gateway.metrics import Metrics
from fumehood.gateway.multipart import Form, is_form
from fumehood.gateway.reading import check_json, decode
from fumehood.interfaces import Caller, Containers
from fumehood.protocol.containers import (
    DATA_DIRECTORY,
    ContainerFileRecord,
    ContainerSpec,
    CreateContainer,
    CreateContainerFile,
    container_on_the_wire,
    file_on_the_wire,
    memory_tier,
    network_policy,
    unpacked_on_the_wire,
)
from fumehood.protocol.errors import InvalidRequest
from fumehood.protocol.responses import Deleted
from fumehood.protocol.sandbox import ArchiveFormat

_LARGEST_BODY = 1 << 20
_ARCHIVES: dict[str, ArchiveFormat] = {
    ".zip": "zip",
    ".tar": "tar",
    ".tar.gz": "tar.gz",
    ".tgz": "tar.gz",
    ".tar.zst": "tar.zst",
    ".tzst": "tar.zst",
}
_SAID = {"true": True, "1": True, "false": False, "0": False, "": False}

_creations = msgspec.json.Decoder(CreateContainer)
_references = msgspec.json.Decoder(CreateContainerFile)


class ContainerRoutes:
    """Handlers of one path each."""

    def __init__(self, containers: Containers, limits: Limits) -> None:
        self._containers = containers
        self._limits = limits

    async def create(self, exchange: Exchange, caller: Caller) -> None:
        self._limits.count(caller, exchange.extra)
        spec = _spec(decode(_creations, await _json_body(exchange, caller, self._limits)))
        record = await self._containers.create(caller, spec)
        exchange.noted["container_id"] = record.id
        await exchange.answer_json(container_on_the_wire(record))

    async def list(self, exchange: Exchange, caller: Caller) -> None:
        window = asked_window(exchange)
        found = await self._containers.containers(caller, window, exchange.query("name") or None)
        await exchange.answer_json(
            windowed_page(window, found, lambda record: Raw(encode(container_on_the_wire(record))))
        )

    async def get(self, exchange: Exchange, caller: Caller) -> None:
        record = await self._containers.container(caller, exchange.parameters["container_id"])
        await exchange.answer_json(container_on_the_wire(record))

    async def delete(self, exchange: Exchange, caller: Caller) -> None:
        container_id = exchange.parameters["container_id"]
        await self._containers.delete(caller, container_id)
        await exchange.answer_json(Deleted(id=container_id, object="container.deleted"))


class ContainerFiles:
    """The same for the files of one container.

    file_bytes: the largest file that is read.
    """

    def __init__(self, containers: Containers, limits: Limits, metrics: Metrics, file_bytes: int) -> None:
        self._containers = containers
        self._limits = limits
        self._metrics = metrics
        self._file_bytes = file_bytes

    async def create(self, exchange: Exchange, caller: Caller) -> None:
        self._limits.count(caller, exchange.extra)
        if not is_form(exchange):
            named = decode(_references, await _json_body(exchange, caller, self._limits))
            await self._place(exchange, caller, named.file_id)
            return
        form = Form(exchange, self._file_bytes)
        if await form.reach_file():
            await self._receive(exchange, caller, form)
        elif "file_id" in form.fields:
            await self._place(exchange, caller, form.fields["file_id"])
        else:
            raise InvalidRequest(
                "Send a 'file', or the 'file_id' of one that was uploaded.",
                param="file",
                code="missing_required_parameter",
            )

    async def _place(self, exchange: Exchange, caller: Caller, file_id: str) -> None:
        container_id = exchange.parameters["container_id"]
        (record,) = await self._containers.place(caller, container_id, [file_id])
        await exchange.answer_json(file_on_the_wire(record))

    async def _receive(self, exchange: Exchange, caller: Caller, form: Form) -> None:
        container_id, name = exchange.parameters["container_id"], form.filename or ""
        unpack = _unpacks(form)
        async with aclosing(_content(form, unpack=unpack)) as content:
            if not unpack:
                record = await self._containers.put(caller, container_id, name, content)
                self._metrics.uploaded(record.bytes)
                await exchange.answer_json(file_on_the_wire(record))
                return
            into = name.removeprefix(f"{DATA_DIRECTORY}/").rpartition("/")[0]
            records = await self._containers.unpack(caller, container_id, content, _archive(name), into)
        if not records:
            raise InvalidRequest("There is no file in this archive.", param="file", code="invalid_value")
        self._metrics.uploaded(sum(record.bytes for record in records))
        await exchange.answer_json(unpacked_on_the_wire(records))

    async def list(self, exchange: Exchange, caller: Caller) -> None:
        window = asked_window(exchange)
        found = await self._containers.files(caller, exchange.parameters["container_id"], window)
        await exchange.answer_json(
            windowed_page(window, found, lambda record: Raw(encode(file_on_the_wire(record))))
        )

    async def get(self, exchange: Exchange, caller: Caller) -> None:
        await exchange.answer_json(file_on_the_wire(await self._found(exchange, caller)))

    async def delete(self, exchange: Exchange, caller: Caller) -> None:
        names = exchange.parameters
        await self._containers.delete_file(caller, names["container_id"], names["file_id"])
        await exchange.answer_json(Deleted(id=names["file_id"], object="container.file.deleted"))

    async def content(self, exchange: Exchange, caller: Caller) -> None:
        record = await self._found(exchange, caller)
        self._metrics.downloaded(await send_download(exchange, self._download(caller, record)))

    async def _found(self, exchange: Exchange, caller: Caller) -> ContainerFileRecord:
        names = exchange.parameters
        return await self._containers.file(caller, names["container_id"], names["file_id"])

    def _download(self, caller: Caller, record: ContainerFileRecord) -> Download:
        """No size is told of what is only in a sandbox: code may change it at any time."""

        def read(start: int, end: int | None) -> AsyncGenerator[bytes]:
            return self._containers.read(caller, record.container_id, record.id, start, end)

        return Download(record.path, read, record.bytes if record.blob else None, record.blob or None)


async def _json_body(exchange: Exchange, caller: Caller, limits: Limits) -> bytes:
    check_json(exchange)
    with limits.room(caller) as room:
        return await exchange.body(min(limits.body_bytes(caller), _LARGEST_BODY), room.take)


def _spec(asked: CreateContainer) -> ContainerSpec:
    """Raises InvalidRequest."""
    if asked.skills:
        raise InvalidRequest("Skills are not served here; leave 'skills' out.", param="skills")
    return ContainerSpec(
        name=asked.name,
        memory=memory_tier(asked.memory_limit, "memory_limit"),
        network=network_policy(asked.network_policy, "network_policy"),
        file_ids=tuple(asked.file_ids or ()),
        idle_minutes=None if asked.expires_after is None else asked.expires_after.minutes,
    )


def _unpacks(form: Form) -> bool:
    said = form.fields.get("unpack", "").strip().lower()
    if said not in _SAID:
        raise InvalidRequest("'unpack' is 'true' or 'false'.", param="unpack", code="invalid_value")
    return _SAID[said]


async def _content(form: Form, *, unpack: bool) -> AsyncGenerator[bytes]:
    """The file; what comes behind it must not change what is done with it."""
    async with aclosing(form.content()) as pieces:
        async for piece in pieces:
            yield piece
    if _unpacks(form) != unpack:
        raise InvalidRequest("'unpack' has to come before the file.", param="unpack", code="invalid_value")


def _archive(name: str) -> ArchiveFormat:
    for ending, kind in _ARCHIVES.items():
        if name.lower().endswith(ending):
            return kind
    known = ", ".join(_ARCHIVES)
    raise InvalidRequest(
        f"An archive is told by its name, which ends in one of {known}.", param="file", code="invalid_value"
    )
