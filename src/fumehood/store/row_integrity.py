"""Tells rows that are damaged from those that can be read."""

import logging
import zlib
from collections.abc import Iterable
from contextlib import suppress

import msgspec

from fumehood.protocol.openai.api_errors import StorageCorrupted

logger = logging.getLogger(__name__)


class DamagedRow(StorageCorrupted):
    """A row whose content is not what was written.

    table, row: where it is; row is its key, as operators and doctors print it.
    """

    def __init__(self, table: str, row: str, reason: str) -> None:
        super().__init__(
            f"What is stored cannot be read ({table} {row}): its data is damaged. `fumehood doctor --data` tells the "
            "operator of this server more."
        )
        self.table = table
        self.row = row
        self.reason = reason
        logger.error("storage_corrupted", extra={"fields": {"table": table, "row": row, "reason": reason}})


def compute_checksum(*columns: bytes | None) -> int:
    """Of what a row holds; a column that is missing is not the same as an empty one."""
    total = 0
    for column in columns:
        total = zlib.crc32(b"\0" if column is None else column, total)
        total = zlib.crc32(b"\1", total)
    return total


def verify_checksum(table: str, row: str, expected: int | None, *columns: bytes | None) -> None:
    """Raises DamagedRow. Rows of older releases have no checksum: of those it is only known whether they are JSON."""
    if expected is not None:
        try:
            found = compute_checksum(*columns)
        except TypeError as error:
            raise DamagedRow(table, row, str(error)) from error
        if found != expected:
            raise DamagedRow(table, row, f"its checksum is {found}, and {expected} was written")
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
    """Those that can be read; one that cannot is logged, and must not keep whoever tidies up from the others."""
    found: list[T] = []
    for row, content in rows:
        with suppress(DamagedRow):
            found.append(decode(decoder, content, table, row))
    return found


_any_decoder: msgspec.json.Decoder[object] = msgspec.json.Decoder()
