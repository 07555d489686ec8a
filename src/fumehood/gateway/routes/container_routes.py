"""Routes of /v1/containers and /v1/containers/{container_id}/files."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from msgspec import Raw

from fumehood.gateway.body_parsing import check_json_body, decode_json
from fumehood.gateway.gateway_exchange import GatewayExchange, encode_json
from fumehood.gateway.gateway_metrics import GatewayMetrics
from fumehood.gateway.request_limiter import RequestLimiter
from fumehood.gateway.routes.file_downloads import DownloadableFile, send_download
from fumehood.gateway.routes.list_pagination import make_page, parse_page_query
from fumehood.gateway.routes.multipart_form import MultipartForm, is_multipart_form
from fumehood.interfaces import Caller, ContainerService
from fumehood.protocol.file_types import HEAD_BYTES, UploadFileTypes
from fumehood.protocol.openai.api_errors import InvalidRequest
from fumehood.protocol.openai.container_objects import (
    DATA_DIRECTORY,
    ContainerFilePage,
    ContainerFileRecord,
    ContainerSpec,
    CreateContainer,
    CreateContainerFile,
    parse_memory_tier,
    parse_network_policy,
    to_container_file_object,
    to_container_object,
    to_unpacked_files_object,
)
from fumehood.protocol.openai.responses import DeletedObject
from fumehood.protocol.sandbox.sandbox_messages import ArchiveFormat

_MAX_BODY_BYTES = 1 << 20
_ARCHIVE_FORMATS: dict[str, ArchiveFormat] = {
    ".zip": "zip",
    ".tar": "tar",
    ".tar.gz": "tar.gz",
    ".tgz": "tar.gz",
    ".tar.zst": "tar.zst",
    ".tzst": "tar.zst",
}
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False, "": False}

_create_decoder = msgspec.json.Decoder(CreateContainer)
_file_reference_decoder = msgspec.json.Decoder(CreateContainerFile)


class ContainerRoutes:
    """Handlers of /v1/containers."""

    def __init__(self, containers: ContainerService, limits: RequestLimiter) -> None:
        self._containers = containers
        self._limits = limits

    async def create(self, exchange: GatewayExchange, caller: Caller) -> None:
        self._limits.count_request(caller, exchange.extra_headers)
        spec = _parse_spec(
            decode_json(_create_decoder, await _read_json_body(exchange, caller, self._limits))
        )
        record = await self._containers.create_container(caller, spec)
        exchange.log_fields["container_id"] = record.id
        await exchange.respond_json(to_container_object(record))

    async def list(self, exchange: GatewayExchange, caller: Caller) -> None:
        query = parse_page_query(exchange)
        found = await self._containers.list_containers(
            caller, query, exchange.query_parameter("name") or None
        )
        await exchange.respond_json(
            make_page(query, found, lambda record: Raw(encode_json(to_container_object(record))))
        )

    async def get(self, exchange: GatewayExchange, caller: Caller) -> None:
        record = await self._containers.get_container(caller, exchange.path_parameters["container_id"])
        await exchange.respond_json(to_container_object(record))

    async def delete(self, exchange: GatewayExchange, caller: Caller) -> None:
        container_id = exchange.path_parameters["container_id"]
        await self._containers.delete_container(caller, container_id)
        await exchange.respond_json(DeletedObject(id=container_id, object="container.deleted"))


class ContainerFileRoutes:
    """Handlers of /v1/containers/{container_id}/files.

    max_file_bytes: size limit of an uploaded file. accepted_types: of uploaded files; members of archives may be of any
    type.
    """

    def __init__(
        self,
        containers: ContainerService,
        limits: RequestLimiter,
        metrics: GatewayMetrics,
        max_file_bytes: int,
        accepted_types: UploadFileTypes,
    ) -> None:
        self._containers = containers
        self._limits = limits
        self._metrics = metrics
        self._max_file_bytes = max_file_bytes
        self._accepted_types = accepted_types

    async def create(self, exchange: GatewayExchange, caller: Caller) -> None:
        self._limits.count_request(caller, exchange.extra_headers)
        if not is_multipart_form(exchange):
            reference = decode_json(
                _file_reference_decoder, await _read_json_body(exchange, caller, self._limits)
            )
            await self._copy_uploaded_file(exchange, caller, reference.file_id)
            return
        form = MultipartForm(exchange, self._max_file_bytes)
        if await form.read_to_file():
            await self._receive_file(exchange, caller, form)
        elif "file_id" in form.fields:
            await self._copy_uploaded_file(exchange, caller, form.fields["file_id"])
        else:
            raise InvalidRequest(
                "Send a 'file', or the 'file_id' of an uploaded file.",
                param="file",
                code="missing_required_parameter",
            )

    async def _copy_uploaded_file(self, exchange: GatewayExchange, caller: Caller, file_id: str) -> None:
        container_id = exchange.path_parameters["container_id"]
        (record,) = await self._containers.copy_uploads(caller, container_id, [file_id])
        await exchange.respond_json(to_container_file_object(record))

    async def _receive_file(self, exchange: GatewayExchange, caller: Caller, form: MultipartForm) -> None:
        container_id, name = exchange.path_parameters["container_id"], form.filename or ""
        unpack = _parse_unpack(form)
        async with aclosing(_iter_content(form, unpack=unpack)) as content:
            if not unpack:
                async with aclosing(_check_type(name, content, self._accepted_types)) as checked:
                    record = await self._containers.write_file(caller, container_id, name, checked)
                self._metrics.record_upload(record.bytes)
                await exchange.respond_json(to_container_file_object(record))
                return
            directory = name.removeprefix(f"{DATA_DIRECTORY}/").rpartition("/")[0]
            records = await self._containers.unpack_archive(
                caller, container_id, content, _detect_archive_format(name), directory
            )
        if not records:
            raise InvalidRequest("The archive contains no file.", param="file", code="invalid_value")
        self._metrics.record_upload(sum(record.bytes for record in records))
        await exchange.respond_json(to_unpacked_files_object(records))

    async def list(self, exchange: GatewayExchange, caller: Caller) -> None:
        query = parse_page_query(exchange)
        with_unlisted = _parse_boolean(exchange.query_parameter("unlisted") or "", "unlisted")
        container_id = exchange.path_parameters["container_id"]
        found = await self._containers.list_files(caller, container_id, query)
        page = make_page(query, found, lambda record: Raw(encode_json(to_container_file_object(record))))
        if not with_unlisted:
            await exchange.respond_json(page)
            return
        others = await self._containers.find_unlisted_files(caller, container_id)
        await exchange.respond_json(
            ContainerFilePage(
                **msgspec.structs.asdict(page),
                links=list(others.links),
                unlisted=list(others.paths),
                truncated=others.truncated,
            )
        )

    async def get(self, exchange: GatewayExchange, caller: Caller) -> None:
        await exchange.respond_json(to_container_file_object(await self._find_file(exchange, caller)))

    async def delete(self, exchange: GatewayExchange, caller: Caller) -> None:
        parameters = exchange.path_parameters
        await self._containers.delete_file(caller, parameters["container_id"], parameters["file_id"])
        await exchange.respond_json(DeletedObject(id=parameters["file_id"], object="container.file.deleted"))

    async def get_content(self, exchange: GatewayExchange, caller: Caller) -> None:
        record = await self._find_file(exchange, caller)
        self._metrics.record_download(await send_download(exchange, self._make_download(caller, record)))

    async def _find_file(self, exchange: GatewayExchange, caller: Caller) -> ContainerFileRecord:
        parameters = exchange.path_parameters
        return await self._containers.get_file(caller, parameters["container_id"], parameters["file_id"])

    def _make_download(self, caller: Caller, record: ContainerFileRecord) -> DownloadableFile:
        """The size of a file that is only in a sandbox is unknown: code may change it at any time."""

        def read(start: int, end: int | None) -> AsyncGenerator[bytes]:
            return self._containers.read_file(caller, record.container_id, record.id, start, end)

        return DownloadableFile(record.path, read, record.bytes if record.blob else None, record.blob or None)


async def _read_json_body(exchange: GatewayExchange, caller: Caller, limits: RequestLimiter) -> bytes:
    check_json_body(exchange)
    with limits.memory_budget(caller) as budget:
        return await exchange.read_body(min(limits.max_body_bytes(caller), _MAX_BODY_BYTES), budget.reserve)


def _parse_spec(body: CreateContainer) -> ContainerSpec:
    """Raises InvalidRequest."""
    if body.skills:
        raise InvalidRequest("Skills are not supported; omit 'skills'.", param="skills")
    return ContainerSpec(
        name=body.name,
        memory=parse_memory_tier(body.memory_limit, "memory_limit"),
        network=parse_network_policy(body.network_policy, "network_policy"),
        file_ids=tuple(body.file_ids or ()),
        idle_minutes=None if body.expires_after is None else body.expires_after.minutes,
    )


def _parse_unpack(form: MultipartForm) -> bool:
    return _parse_boolean(form.fields.get("unpack", ""), "unpack")


def _parse_boolean(text: str, param: str) -> bool:
    value = text.strip().lower()
    if value not in _BOOLEANS:
        raise InvalidRequest(f"'{param}' must be 'true' or 'false'.", param=param, code="invalid_value")
    return _BOOLEANS[value]


async def _iter_content(form: MultipartForm, *, unpack: bool) -> AsyncGenerator[bytes]:
    """The file. A later field must not change how it is stored."""
    async with aclosing(form.iter_file()) as chunks:
        async for chunk in chunks:
            yield chunk
    if _parse_unpack(form) != unpack:
        raise InvalidRequest("'unpack' must precede the file.", param="unpack", code="invalid_value")


async def _check_type(
    name: str, content: AsyncGenerator[bytes], types: UploadFileTypes
) -> AsyncGenerator[bytes]:
    """Pass the content on once its beginning has been checked. Raises InvalidRequest."""
    head: bytearray | None = bytearray()
    async for chunk in content:
        if head is None:
            yield chunk
            continue
        head += chunk
        if len(head) >= HEAD_BYTES:
            types.check(name, bytes(head[:HEAD_BYTES]))
            yield bytes(head)
            head = None
    if head is not None:
        types.check(name, bytes(head))
        if head:
            yield bytes(head)


def _detect_archive_format(name: str) -> ArchiveFormat:
    for suffix, archive_format in _ARCHIVE_FORMATS.items():
        if name.lower().endswith(suffix):
            return archive_format
    known = ", ".join(_ARCHIVE_FORMATS)
    raise InvalidRequest(
        f"Unknown archive format: the filename must end in one of {known}.",
        param="file",
        code="invalid_value",
    )
