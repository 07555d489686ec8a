"""How many tokens a request has; imports `interfaces`, msgspec and the standard library.

There is one way to know: the model server counts, where it can. Else the last usage that it told for this conversation
is taken, and what came since is estimated; with no usage to stand on, all of it is.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from fumehood.aside import ITEM, aside
from fumehood.interfaces import Caller, ModelBackend
from fumehood.protocol.conversation import Entry, Piece, Segment
from fumehood.protocol.errors import ModelError
from fumehood.protocol.models import ModelRequest
from fumehood.protocol.responses import Usage

logger = logging.getLogger(__name__)

BYTES_A_TOKEN = 4
_A_MESSAGE = 4  # the marks around it
_A_PICTURE = 800
_NAME = "tokens/1"  # under which a segment keeps its estimate
_MOST_NOTES = 10_000
_COUNT_SECONDS = 10.0  # an estimate is better than waiting longer


@dataclass(frozen=True, slots=True)
class Count:
    """How many tokens a request has; exact if the model's server has counted them."""

    tokens: int
    exact: bool


# --- estimates ----------------------------------------------------------------------------------------


class _Part(msgspec.Struct):
    type: str = ""
    text: str | None = None
    refusal: str | None = None
    file_data: str | None = None


class _Said(msgspec.Struct):
    """What of an item a model is shown, whatever its type."""

    content: str | list[_Part] | None = None
    output: str | list[_Part] | None = None
    arguments: str = ""
    input: str = ""
    name: str = ""


_said = msgspec.json.Decoder(_Said)


def tokens_of(segment: Segment) -> int:
    """An estimate for the segment, made once."""
    kept = segment.renderings.get(_NAME)
    if kept is None:
        kept = segment.renderings[_NAME] = sum(map(estimate, segment.entries)).to_bytes(8)
    return int.from_bytes(kept)


async def tokens_of_all(segments: Sequence[Segment]) -> int:
    """The estimates together; those that have yet to be made are made beside the loop if that takes long."""
    unseen = [segment for segment in segments if _NAME not in segment.renderings]
    await aside(effort(unseen), _look_at, unseen)
    return sum(map(tokens_of, segments))


def _look_at(segments: Sequence[Segment]) -> None:
    for segment in segments:
        tokens_of(segment)


def effort(segments: Sequence[Segment]) -> int:
    """What it takes to look at all that they hold, for `aside`."""
    return sum([ITEM * len(segment.entries) + segment.size for segment in segments])


def is_rendered(piece: Piece) -> bool:
    """Whether a model server was told of it, so that there is more than an estimate."""
    return len(piece.renderings) > (_NAME in piece.renderings)


def estimate(entry: Entry) -> int:
    seen = entry.exchange
    if seen is not None:
        texts = len(seen.name) + _size(seen.arguments) + _size(seen.output)
        return 2 * _A_MESSAGE + _A_PICTURE * len(seen.images) + texts // BYTES_A_TOKEN
    if entry.type == "reasoning":  # few models are shown it again, and of those the usage tells
        return 0
    try:
        said = _said.decode(entry.raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return len(entry.raw) // BYTES_A_TOKEN
    size = len(said.name) + _size(said.arguments) + _size(said.input)
    pictures = 0
    for content in (said.content, said.output):
        if isinstance(content, str):
            size += _size(content)
            continue
        for part in content or ():
            size += _size(part.text or "") + _size(part.refusal or "") + len(part.file_data or "") * 3 // 4
            pictures += part.type == "input_image"
    size += sum([len(one.text or "") for one in entry.attachments])
    size += sum([len(one.data or "") * 3 // 4 for one in entry.attachments if one.kind != "picture"])
    if not size and entry.type != "message":  # an item of a kind that says it otherwise
        size = len(entry.raw)
    return _A_MESSAGE + _A_PICTURE * pictures + -(-size // BYTES_A_TOKEN)


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode(errors="replace"))


def fixed_tokens(request: ModelRequest) -> int:
    """What comes before the conversation."""
    size = _size(request.instructions or "")
    for spec in request.functions:
        size += len(spec.name) + len(spec.description) + len(spec.parameters)
    size += sum(len(spec.raw) for spec in request.others)
    return size // BYTES_A_TOKEN


# --- counting -----------------------------------------------------------------------------------------


class _Note(NamedTuple):
    """The conversation up to an item had so many tokens for that model, `fixed` of them before its beginning."""

    tenant: str
    model: str
    tokens: int
    fixed: int


class Tokens:
    """Counts, and remembers what model servers told. An item that one wrote is found again by its id, be it that the
    conversation is continued or that the client gives it back.
    """

    def __init__(self) -> None:
        self._notes: dict[str, _Note] = {}

    def note(
        self, caller: Caller, request: ModelRequest, usage: Usage, made: Sequence[Entry], left_out: int = 0
    ) -> None:
        """What the server told of a turn that made these entries.

        left_out: estimated tokens of the conversation that it was not shown.
        """
        if not made or made[-1].id is None or usage.input_tokens <= 0:  # some servers tell zeros
            return
        told = usage.input_tokens + max(0, usage.output_tokens - usage.output_tokens_details.reasoning_tokens)
        for entry in made:
            if entry.exchange is not None:  # its result was not written by the model, and will be read by it
                told += _size(entry.exchange.output) // BYTES_A_TOKEN
        if len(self._notes) >= _MOST_NOTES:
            del self._notes[next(iter(self._notes))]
        self._notes[made[-1].id] = _Note(caller.tenant, request.model, told + left_out, fixed_tokens(request))

    async def estimate(self, caller: Caller, request: ModelRequest) -> int:
        """The last usage, and what came since; costs what came since."""
        fixed = fixed_tokens(request)
        note, since = self._last_note(caller, request)
        if note is None:
            return fixed + await tokens_of_all(since)
        return max(0, note.tokens + fixed - note.fixed) + await tokens_of_all(since)

    def fixed(self, caller: Caller, request: ModelRequest) -> int:
        """What comes before this conversation, or came before it when the model was last asked: who has it compacted
        does not send the tools again.
        """
        note, _ = self._last_note(caller, request)
        return max(fixed_tokens(request), 0 if note is None else note.fixed)

    def _last_note(self, caller: Caller, request: ModelRequest) -> tuple[_Note | None, list[Segment]]:
        """The last note of this conversation, and what came since."""
        whose = (caller.tenant, request.model)
        since: list[Segment] = []
        for segment in reversed(request.segments):
            for place in range(len(segment.entries) - 1, -1, -1):
                note = self._notes.get(segment.entries[place].id or "")
                if note is not None and note[:2] == whose:
                    since.append(Segment(segment.entries[place + 1 :]))
                    return note, since
            since.append(segment)
        return None, since

    async def count(
        self, backend: ModelBackend, caller: Caller, request: ModelRequest, *, around: int = 0
    ) -> Count:
        """Raises InvalidRequest for what cannot be shown to the model.

        around: the number that is of interest; a server is not asked about what is far below it.
        """
        estimated = await self.estimate(caller, request)
        if backend.profile(request.model).counts and estimated >= around // 2:
            try:
                async with asyncio.timeout(_COUNT_SECONDS):
                    tokens, exact = await backend.count(request)
            except (ModelError, TimeoutError) as error:
                logger.warning("no count of tokens for %r: %s", request.model, error or "no answer in time")
            else:
                if exact:
                    return Count(tokens, exact=True)
        return Count(estimated, exact=False)
