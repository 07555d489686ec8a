"""What was rendered of a conversation, kept on its pieces so that it is done once; imports msgspec and `protocol`.

A segment keeps its own rendering until it is part of a stretch. Then the stretch has it, in one piece with those of the
others: what a late turn sends is a few long pieces instead of hundreds of short ones from all over the memory.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence

import msgspec

from fumehood.protocol.conversation import Entry, Piece, Segment, Stretch, pieces_of

_MOST = 16  # of one segment or stretch, for a segment with what each leaves
_MOST_TIMES = 3  # its size, for all of them: callers may name as many models as they like
_SMALL = 4096  # bytes, about which nobody cares
NOTHING = b""

# The entries of a segment, after what the one before has left: what they are rendered to, and what is left of them.
type Render = Callable[[Sequence[Entry], bytes], tuple[bytes, bytes]]


def render_all(segments: Sequence[Segment], dialect: str, render: Render) -> tuple[list[bytes], bytes]:
    """What there is to be sent of all of them, piece by piece, and what the last one has left. Raises as `render` does.

    dialect: a name for all that `render` goes by, apart from what it is given.
    """
    parts: list[bytes] = []
    left = NOTHING
    for piece in pieces_of(segments):
        if isinstance(piece, Segment):
            rendered, left = _segment(piece, dialect, left, render)
        elif piece.in_one:
            rendered, left = _stretch(piece, dialect, left, render)
        else:
            rendered = NOTHING
            for segment in piece.segments:
                one, left = _segment(segment, dialect, left, render)
                if one:
                    parts.append(one)
        if rendered:
            parts.append(rendered)
    return parts, left


def _segment(segment: Segment, dialect: str, before: bytes, render: Render) -> tuple[bytes, bytes]:
    kept = segment.renderings
    name = _name(dialect, before)
    rendered, left = kept.get(name), kept.get(name + ">")
    if rendered is not None and left is not None:  # beside the loop, one may be there without the other
        return rendered, left
    rendered, left = render(segment.entries, before)
    held = sum(map(len, [*kept.values(), rendered, left]))
    if _is_too_much(segment, held):
        kept.clear()
    kept[name + ">"], kept[name] = left, rendered
    return rendered, left


def _stretch(stretch: Stretch, dialect: str, before: bytes, render: Render) -> tuple[bytes, bytes]:
    kept = stretch.renderings
    name = _name(dialect, before)
    found = kept.get(name)
    if found is not None:
        return found
    parts: list[bytes] = []
    names: list[str] = []
    left = before
    for segment in stretch.segments:
        names.append(_name(dialect, left))
        rendered, left = _segment(segment, dialect, left, render)
        if rendered:
            parts.append(rendered)
    found = (b",".join(parts), left)
    held = sum([len(one) + len(its_left) for one, its_left in (*kept.values(), found)])
    if _is_too_much(stretch, held):
        kept.clear()
    kept[name] = found
    for segment, its_name in zip(stretch.segments, names, strict=True):
        segment.renderings.pop(its_name, None)
        segment.renderings.pop(its_name + ">", None)
    return found


def _is_too_much(piece: Piece, held: int) -> bool:
    return len(piece.renderings) >= _MOST or held > max(_SMALL, _MOST_TIMES * piece.size)


def _name(dialect: str, before: bytes) -> str:
    return f"{dialect}/{hashlib.sha256(before).hexdigest()}" if before else dialect


def with_list(name: str, items: Sequence[bytes], fields: Mapping[str, object]) -> list[bytes]:
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
