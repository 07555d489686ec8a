"""Checksums and decoding of rows, to detect damage."""

import logging
import zlib
from collections.abc import Iterable
from contextlib import suppress

import msgspec

from fumehood.protocol.openai.api_errors import StorageCorrupted

logger = logging.getLogger(__name__)
encode = msgspec.json.Encoder().encode


class DamagedRow(StorageCorrupted):
    """A row whose content is not what was written. It is logged when raised.

    table, row: where it is; `row` is its primary key.
    """

    def __init__(self, table: str, row: str, reason: str) -> None:
        super().__init__(
            f"Stored data is damaged ({table} {row}). The operator of this server can run `fumehood doctor --data`."
        )
        self.table = table
        self.row = row
        self.reason = reason
        logger.error("storage_corrupted", extra={"fields": {"table": table, "row": row, "reason": reason}})


def compute_checksum(*columns: bytes | None) -> int:
    """Return the CRC-32 of a row's columns. NULL and empty differ."""
    total = 0
    for column in columns:
        total = zlib.crc32(b"\0" if column is None else column, total)
        total = zlib.crc32(b"\1", total)
    return total


def verify_checksum(table: str, row: str, expected: int | None, *columns: bytes | None) -> None:
    """Raises DamagedRow if the checksum differs. Rows of older releases have none; they must be valid JSON."""
    if expected is not None:
        try:
            found = compute_checksum(*columns)
        except TypeError as error:
            raise DamagedRow(table, row, str(error)) from error
        if found != expected:
            raise DamagedRow(table, row, f"its checksum is {found}, expected {expected}")
        return
    for column in columns:
        if column is not None:
            decode(_any_decoder, column, table, row)


def decode[T](decoder: msgspec.json.Decoder[T], content: bytes, table: str, row: str) -> T:
    """Raises DamagedRow."""
    try:
        return decoder.decode(content)
    except (msgspec.MsgspecError, TypeError, ValueError) as error:
        raise DamagedRow(table, row, str(error)) from error


def decode_readable[T](
    decoder: msgspec.json.Decoder[T], rows: Iterable[tuple[str, bytes]], table: str
) -> list[T]:
    """Decode rows and skip damaged ones, which are logged, so that sweeps continue."""
    found: list[T] = []
    for row, content in rows:
        with suppress(DamagedRow):
            found.append(decode(decoder, content, table, row))
    return found


_any_decoder: msgspec.json.Decoder[object] = msgspec.json.Decoder()
