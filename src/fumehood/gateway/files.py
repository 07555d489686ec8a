"""/v1/files: upload, find, read and delete files; imports msgspec, `interfaces`, `protocol` and siblings."""

from contextlib import aclosing
from typing import get_args

import msgspec
from msgspec import Raw

from fumehood.aside import aside
from fumehood.gateway.downloads import Download, send_download
from fumehood.gateway.exchange import Exchange, encode
from fumehood.gateway.limits import Limits
from fumehood.gateway.listing import asked_window, windowed_page
from fumehood.gateway.metrics import Metrics
from fumehood.gateway.multipart import Form
from fumehood.interfaces import Caller, Files
from fumehood.protocol.errors import InvalidRequest
from fumehood.protocol.files import FileRecord, NewFile, UploadPurpose, file_object
from fumehood.protocol.responses import Deleted, Page

_MOST = 10_000
_PURPOSES: tuple[str, ...] = get_args(UploadPurpose.__value__)
_ENTRY_BYTES = 300  # about what one file in a list takes


class Uploads:
    """Handlers of one path each.

    file_bytes: the largest file that is read.
    """

    def __init__(self, files: Files, limits: Limits, metrics: Metrics, file_bytes: int) -> None:
        self._files = files
        self._limits = limits
        self._metrics = metrics
        self._file_bytes = file_bytes

    async def create(self, exchange: Exchange, caller: Caller) -> None:
        self._limits.count(caller, exchange.extra)
        form = Form(exchange, self._file_bytes)
        if not await form.reach_file():
            raise _missing("file")

        def told() -> NewFile | None:
            """Most clients send the fields first: then what is wrong is told before the file has come."""
            return _described(form) if form.ended or "purpose" in form.fields else None

        async with aclosing(form.content()) as content:
            record = await self._files.create(caller, told, content)
        exchange.noted["file_id"] = record.id
        self._metrics.uploaded(record.bytes)
        await exchange.answer_json(file_object(record))

    async def list(self, exchange: Exchange, caller: Caller) -> None:
        window = asked_window(exchange, usual=_MOST, most=_MOST)
        found = await self._files.files(caller, window, exchange.query("purpose") or None)

        def listed() -> Page:
            return windowed_page(window, found, lambda record: Raw(encode(file_object(record))))

        await exchange.answer_json(await aside(len(found) * _ENTRY_BYTES, listed))

    async def get(self, exchange: Exchange, caller: Caller) -> None:
        record = await self._files.file(caller, exchange.parameters["upload_id"])
        await exchange.answer_json(file_object(record))

    async def delete(self, exchange: Exchange, caller: Caller) -> None:
        file_id = exchange.parameters["upload_id"]
        await self._files.delete(caller, file_id)
        await exchange.answer_json(Deleted(id=file_id, object="file"))

    async def content(self, exchange: Exchange, caller: Caller) -> None:
        record = await self._files.file(caller, exchange.parameters["upload_id"])
        self._metrics.downloaded(await send_download(exchange, self._download(caller, record)))

    def _download(self, caller: Caller, record: FileRecord) -> Download:
        return Download(
            record.filename,
            lambda start, end: self._files.read(caller, record.id, start, end),
            record.bytes,
            record.blob,
        )


def _described(form: Form) -> NewFile:
    """What the fields say of the file; raises InvalidRequest."""
    purpose = form.fields.get("purpose")
    if purpose is None:
        raise _missing("purpose")
    if purpose not in _PURPOSES:
        known = ", ".join(f"'{name}'" for name in _PURPOSES)
        raise InvalidRequest(
            f"Invalid value: {purpose[:100]!r}. Supported values are: {known}.",
            param="purpose",
            code="invalid_value",
        )
    return NewFile(
        filename=form.filename or "",
        purpose=msgspec.convert(purpose, UploadPurpose),
        expires_after=_expiry(form),
    )


def _expiry(form: Form) -> int | None:
    anchor, seconds = (form.fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise InvalidRequest(
            "'expires_after.anchor' is 'created_at'.", param="expires_after.anchor", code="invalid_value"
        )
    if seconds is None:
        raise _missing("expires_after.seconds")
    if not (seconds.isascii() and seconds.isdecimal()) or len(seconds) > 12:
        raise InvalidRequest(
            "'expires_after.seconds' is a whole number.", param="expires_after.seconds", code="invalid_type"
        )
    return int(seconds)


def _missing(param: str) -> InvalidRequest:
    return InvalidRequest(
        f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
    )
