"""Routes of /v1/files: upload, list, get, download, delete."""

from contextlib import aclosing
from typing import get_args

import msgspec
from msgspec import Raw

from fumehood.cpu_worker import run_in_worker
from fumehood.gateway.gateway_exchange import GatewayExchange, encode_json
from fumehood.gateway.gateway_metrics import GatewayMetrics
from fumehood.gateway.request_limiter import RequestLimiter
from fumehood.gateway.routes.file_downloads import DownloadableFile, send_download
from fumehood.gateway.routes.list_pagination import make_page, parse_page_query
from fumehood.gateway.routes.multipart_form import MultipartForm
from fumehood.interfaces import Caller, FileService
from fumehood.protocol.openai.api_errors import InvalidRequest
from fumehood.protocol.openai.file_objects import (
    FileUploadMetadata,
    UploadedFileRecord,
    UploadPurpose,
    to_file_object,
)
from fumehood.protocol.openai.responses import DeletedObject

_MAX_PAGE_SIZE = 10_000
_PURPOSES: tuple[str, ...] = get_args(UploadPurpose.__value__)
_LIST_ENTRY_BYTES = 300  # approximate size of one file in a list


class FileRoutes:
    """Handlers of /v1/files.

    max_file_bytes: size limit of an upload.
    """

    def __init__(
        self, files: FileService, limits: RequestLimiter, metrics: GatewayMetrics, max_file_bytes: int
    ) -> None:
        self._files = files
        self._limits = limits
        self._metrics = metrics
        self._max_file_bytes = max_file_bytes

    async def create(self, exchange: GatewayExchange, caller: Caller) -> None:
        self._limits.count_request(caller, exchange.extra_headers)
        form = MultipartForm(exchange, self._max_file_bytes)
        if not await form.read_to_file():
            raise _missing_parameter("file")

        def describe_file() -> FileUploadMetadata | None:
            """None until the fields are known; most clients send them first, so errors precede the upload."""
            return _parse_new_file(form) if form.is_complete or "purpose" in form.fields else None

        async with aclosing(form.iter_file()) as content:
            record = await self._files.create_file(caller, describe_file, content)
        exchange.log_fields["file_id"] = record.id
        self._metrics.record_upload(record.bytes)
        await exchange.respond_json(to_file_object(record))

    async def list(self, exchange: GatewayExchange, caller: Caller) -> None:
        query = parse_page_query(exchange, default=_MAX_PAGE_SIZE, maximum=_MAX_PAGE_SIZE)
        found = await self._files.list_files(caller, query, exchange.query_parameter("purpose") or None)
        page = await run_in_worker(
            len(found) * _LIST_ENTRY_BYTES,
            make_page,
            query,
            found,
            lambda record: Raw(encode_json(to_file_object(record))),
        )
        await exchange.respond_json(page)

    async def get(self, exchange: GatewayExchange, caller: Caller) -> None:
        record = await self._files.get_file(caller, exchange.path_parameters["upload_id"])
        await exchange.respond_json(to_file_object(record))

    async def delete(self, exchange: GatewayExchange, caller: Caller) -> None:
        file_id = exchange.path_parameters["upload_id"]
        await self._files.delete_file(caller, file_id)
        await exchange.respond_json(DeletedObject(id=file_id, object="file"))

    async def get_content(self, exchange: GatewayExchange, caller: Caller) -> None:
        record = await self._files.get_file(caller, exchange.path_parameters["upload_id"])
        self._metrics.record_download(await send_download(exchange, self._make_download(caller, record)))

    def _make_download(self, caller: Caller, record: UploadedFileRecord) -> DownloadableFile:
        return DownloadableFile(
            record.filename,
            lambda start, end: self._files.read_file(caller, record.id, start, end),
            record.bytes,
            record.blob,
        )


def _parse_new_file(form: MultipartForm) -> FileUploadMetadata:
    """The metadata in the form fields. Raises InvalidRequest."""
    purpose = form.fields.get("purpose")
    if purpose is None:
        raise _missing_parameter("purpose")
    if purpose not in _PURPOSES:
        known = ", ".join(f"'{name}'" for name in _PURPOSES)
        raise InvalidRequest(
            f"Invalid value: {purpose[:100]!r}. Supported values are: {known}.",
            param="purpose",
            code="invalid_value",
        )
    return FileUploadMetadata(
        filename=form.filename or "",
        purpose=msgspec.convert(purpose, UploadPurpose),
        expires_after=_parse_expiry(form),
    )


def _parse_expiry(form: MultipartForm) -> int | None:
    anchor, seconds = (form.fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise InvalidRequest(
            "'expires_after.anchor' must be 'created_at'.", param="expires_after.anchor", code="invalid_value"
        )
    if seconds is None:
        raise _missing_parameter("expires_after.seconds")
    if not (seconds.isascii() and seconds.isdecimal()) or len(seconds) > 12:
        raise InvalidRequest(
            "'expires_after.seconds' must be an integer.", param="expires_after.seconds", code="invalid_type"
        )
    return int(seconds)


def _missing_parameter(param: str) -> InvalidRequest:
    return InvalidRequest(
        f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
    )
