"""What was rendered of a conversation, kept on its pieces so that it is done once.

A segment keeps its own rendering until it is part of a stretch. Then the stretch has it, in one piece with those of the
others: what a late turn sends is a few long pieces instead of hundreds of short ones from all over the memory.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence

import msgspec

from fumehood.protocol.conversation import (
    ConversationEntry,
    ConversationPiece,
    ConversationSegment,
    SegmentRun,
    conversation_pieces,
)

_MAX_RENDERINGS = 16  # of one segment or stretch, for a segment with what each leaves
_MAX_SIZE_FACTOR = 3  # its size, for all of them: callers may name as many models as they like
_ALWAYS_CACHED_BYTES = 4096  # bytes, about which nobody cares
EMPTY = b""

# The entries of a segment, after what the one before has left: what they are rendered to, and what is left of them.
type RenderSegment = Callable[[Sequence[ConversationEntry], bytes], tuple[bytes, bytes]]


def render_segments(
    segments: Sequence[ConversationSegment], cache_key: str, render: RenderSegment
) -> tuple[list[bytes], bytes]:
    """What there is to be sent of all of them, piece by piece, and what the last one has left. Raises as `render` does.

    dialect: a name for all that `render` goes by, apart from what it is given.
    """
    parts: list[bytes] = []
    left = EMPTY
    for piece in conversation_pieces(segments):
        if isinstance(piece, ConversationSegment):
            rendered, left = _render_segment(piece, cache_key, left, render)
        elif piece.in_one:
            rendered, left = _render_segment_run(piece, cache_key, left, render)
        else:
            rendered = EMPTY
            for segment in piece.segments:
                one, left = _render_segment(segment, cache_key, left, render)
                if one:
                    parts.append(one)
        if rendered:
            parts.append(rendered)
    return parts, left


def _render_segment(
    segment: ConversationSegment, cache_key: str, carry: bytes, render: RenderSegment
) -> tuple[bytes, bytes]:
    kept = segment.renderings
    name = _make_cache_key(cache_key, carry)
    rendered, left = kept.get(name), kept.get(name + ">")
    if rendered is not None and left is not None:  # beside the loop, one may be there without the other
        return rendered, left
    rendered, left = render(segment.entries, carry)
    held = sum(map(len, [*kept.values(), rendered, left]))
    if _exceeds_cache_limit(segment, held):
        kept.clear()
    kept[name + ">"], kept[name] = left, rendered
    return rendered, left


def _render_segment_run(
    run: SegmentRun, cache_key: str, carry: bytes, render: RenderSegment
) -> tuple[bytes, bytes]:
    kept = run.renderings
    name = _make_cache_key(cache_key, carry)
    found = kept.get(name)
    if found is not None:
        return found
    parts: list[bytes] = []
    names: list[str] = []
    left = carry
    for segment in run.segments:
        names.append(_make_cache_key(cache_key, left))
        rendered, left = _render_segment(segment, cache_key, left, render)
        if rendered:
            parts.append(rendered)
    found = (b",".join(parts), left)
    held = sum([len(one) + len(its_left) for one, its_left in (*kept.values(), found)])
    if _exceeds_cache_limit(run, held):
        kept.clear()
    kept[name] = found
    for segment, its_name in zip(run.segments, names, strict=True):
        segment.renderings.pop(its_name, None)
        segment.renderings.pop(its_name + ">", None)
    return found


def _exceeds_cache_limit(piece: ConversationPiece, total_bytes: int) -> bool:
    return len(piece.renderings) >= _MAX_RENDERINGS or total_bytes > max(
        _ALWAYS_CACHED_BYTES, _MAX_SIZE_FACTOR * piece.size
    )


def _make_cache_key(cache_key: str, carry: bytes) -> str:
    return f"{cache_key}/{hashlib.sha256(carry).hexdigest()}" if carry else cache_key


def encode_object_with_list(name: str, items: Sequence[bytes], fields: Mapping[str, object]) -> list[bytes]:
    """The pieces of a JSON object: these items, each of them one or more with commas between, under that name, then the
    fields, of which there is at least one.
    """
    pieces = [b'{"%b":[' % name.encode()]
    for item in items:
        pieces += (item, b",")
    if items:
        pieces.pop()
    pieces.append(b"]," + msgspec.json.encode(fields)[1:])
    return pieces
