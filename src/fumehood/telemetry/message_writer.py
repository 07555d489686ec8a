"""Messages and parts as span and event attributes hold them: redacted, written in a representation, and truncated."""

import json
from collections.abc import Callable
from typing import cast

from fumehood.message_parts import (
    SOURCE_FIELD,
    TRUNCATED_PART_TYPE,
    JsonObject,
    Part,
    ToolCallPart,
    ToolCallResponsePart,
    redact_parts,
    replace_inline_data,
    to_messages,
    to_representation,
    truncate_parts,
    validate,
)


class MessageWriter:
    """Writes canonical parts.

    representation: how tool calls are written. redact: called with every text, returns what may be recorded.
    """

    def __init__(self, representation: str, redact: Callable[[str], str] | None = None) -> None:
        self._representation = representation
        self._redactor = redact

    def write_parts(self, parts: list[Part], max_bytes: int) -> list[JsonObject]:
        """Write parts without vendor items, which only conversion back to the vendor needs."""
        written = to_representation(self._representation, self._redact(parts))
        return truncate_parts(_drop_sources(written), max_bytes)

    def write_messages(
        self,
        parts: list[Part],
        max_bytes: int,
        finish_reason: str | None = None,
        *,
        dropped_count: int = 0,
        keep_vendor_items: bool = False,
    ) -> list[JsonObject]:
        """Write messages; with a finish reason as output, else as input.

        Each message gets the same share of `max_bytes`. If they do not fit, the first ones are dropped.
        dropped_count: how many parts are missing already. The first message says how many are missing in all.
        """
        if dropped_count:
            parts = _drop_unpaired_responses(parts)
        messages = to_messages(self._representation, self._redact(parts), finish_reason)
        share = max_bytes // max(1, len(messages))
        for message in messages:
            written = _parts_of(message)
            kept = written if keep_vendor_items else _drop_sources(written)
            message["parts"] = [*truncate_parts(kept, share)]
        while messages and (len(json.dumps(messages)) > max_bytes or validate([*messages])):
            half = max(1, len(messages) // 2)
            dropped_count += sum(len(_parts_of(message)) for message in messages[:half])
            messages = messages[half:]
        if dropped_count:
            notice: JsonObject = {
                "role": "system",
                "parts": [{"type": TRUNCATED_PART_TYPE, "parts": dropped_count}],
            }
            messages.insert(
                0, notice if finish_reason is None else {**notice, "finish_reason": finish_reason}
            )
        return messages

    def _redact(self, parts: list[Part]) -> list[Part]:
        parts = replace_inline_data(parts)
        return parts if self._redactor is None else redact_parts(parts, self._redactor)


def _drop_unpaired_responses(parts: list[Part]) -> list[Part]:
    call_ids = {part.call_id for part in parts if isinstance(part, ToolCallPart)}
    return [part for part in parts if not isinstance(part, ToolCallResponsePart) or part.call_id in call_ids]


def _parts_of(message: JsonObject) -> list[JsonObject]:
    return cast(list[JsonObject], message["parts"])


def _drop_sources(parts: list[JsonObject]) -> list[JsonObject]:
    return [{key: value for key, value in part.items() if key != SOURCE_FIELD} for part in parts]
