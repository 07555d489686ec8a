"""What responses say, as message parts in a span's attributes; imports msgspec, `parts` and `protocol`."""

import json
from collections.abc import Callable

import msgspec

from fumehood.parts.canonical import JsonObject
from fumehood.parts.content import bounded, redacted, without_data
from fumehood.parts.convert import from_vendor
from fumehood.parts.messages import finish_reason, to_messages
from fumehood.protocol.responses import Response

# Backends cut attributes, or refuse spans, beyond 256 KB.
LONGEST = 200_000


class OutputMessages:
    """`gen_ai.output.messages` of a response, in one of the views."""

    def __init__(
        self, view: str = "option2", *, longest: int = LONGEST, redact: Callable[[str], str] | None = None
    ) -> None:
        self._view = view
        self._longest = longest
        self._redact = redact

    def __call__(self, response: Response) -> dict[str, str]:
        parts = without_data(from_vendor("openai", msgspec.json.decode(msgspec.json.encode(response.output))))
        if self._redact is not None:
            parts = redacted(parts, self._redact)
        messages = to_messages(self._view, parts, finish_reason(parts))
        share = self._longest // max(1, len(messages))
        return {"gen_ai.output.messages": json.dumps([_within(message, share) for message in messages])}


def _within(message: JsonObject, share: int) -> JsonObject:
    parts = message["parts"]
    written = [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return {**message, "parts": [*bounded(written, share)]}
