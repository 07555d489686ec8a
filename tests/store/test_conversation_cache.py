"""The cache of conversations."""

from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.models.rendering.rendering_cache import render_segments
from fumehood.protocol.conversation import ConversationEntry, ConversationSegment
from fumehood.store.conversation_cache import ConversationCache, ThreadPosition


def _entries(text: str, size: int = 0) -> tuple[ConversationEntry, ...]:
    return (ConversationEntry(type="message", id=None, turn=0, raw=text.encode() + b"x" * size),)


def _append_turns(cached: ConversationCache, name: str, turns: int, size: int = 0, thread: int = 1) -> None:
    for number in range(turns):
        previous = f"{name}{number - 1}" if number else None
        cached.append(
            "t", f"{name}{number}", previous, ThreadPosition(thread, number), _entries(f"{number}", size)
        )


def _get_segments(cached: ConversationCache, response_id: str) -> list[ConversationSegment]:
    found = cached.get("t", response_id)
    assert found is not None
    return list(found)


def test_a_turn_is_shared_by_its_continuations() -> None:
    cached = ConversationCache(1 << 20)
    _append_turns(cached, "a", 3)
    cached.append("t", "fork", "a0", ThreadPosition(2, 1), _entries("fork"))
    first, second, third = _get_segments(cached, "a2")
    assert (_get_segments(cached, "a1"), _get_segments(cached, "a0")) == ([first, second], [first])
    found = _get_segments(cached, "fork")
    assert found[0] is first
    assert third.entries == _entries("2")


@given(st.lists(st.one_of(st.just(0), st.integers(0, 40)), max_size=80))
def test_long_conversations_and_their_forks_share_segment_groups(steps: list[int]) -> None:
    """Each step is the distance of the continued response from the newest."""
    cached = ConversationCache(1 << 30)
    paths: list[list[str]] = []
    for number, back in enumerate([0, *steps]):
        tip = number - 1 - min(back, number - 1) if number else None
        before = paths[tip] if tip is not None else []
        place = ThreadPosition(number, len(before))
        cached.append("t", str(number), None if tip is None else str(tip), place, _entries(str(number)))
        paths.append([*before, str(number)])
    for number, path in enumerate(paths):
        found = cached.get("t", str(number))
        assert found is not None
        assert [segment.entries[0].raw.decode() for segment in found] == path
        assert len(found.pieces) == len(path) // 16 + len(path) % 16
        for other in paths[:number]:
            shared = cached.get("t", other[-1])
            assert shared is not None
            together = len([*takewhile(lambda pair: pair[0] == pair[1], zip(path, other, strict=False))])
            assert list(found)[:together] == list(shared)[:together]
            assert found.pieces[: together // 16] == shared.pieces[: together // 16]


@pytest.mark.parametrize("size", [1000, 100_000])
def test_forks_count_the_memory_of_their_segment_groups(size: int) -> None:
    cached = ConversationCache(1 << 30)
    _append_turns(cached, "a", 15, size)
    for number in range(50):
        cached.append("t", f"fork{number}", "a14", ThreadPosition(100 + number, 15), _entries("fork"))
    paths = [cached.get("t", f"fork{number}") for number in range(50)]
    for path in paths:
        assert path is not None
        render_segments(path, "dialect", lambda entries, _: (b"".join([entry.raw for entry in entries]), b""))
    pieces = {
        id(piece): piece for path in paths if path for each in path.pieces for piece in (each, *each.segments)
    }
    held = sum(len(text) for piece in pieces.values() for text, _ in piece.renderings.values())
    assert held < cached.memory_bytes
    for number in range(50):
        cached.remove(f"fork{number}")
    for number in range(15):
        cached.remove(f"a{number}")
    assert cached.memory_bytes == 0


def test_a_conversation_is_a_sequence() -> None:
    cached = ConversationCache(1 << 20)
    _append_turns(cached, "a", 40)
    found, plain = cached.get("t", "a39"), tuple(_get_segments(cached, "a39"))
    assert found is not None
    assert (len(found), found[-1], found[0], found[16]) == (40, plain[-1], plain[0], plain[16])
    assert found[10:35] == plain[10:35]
    assert list(reversed(found)) == list(reversed(plain))
    with pytest.raises(IndexError):
        found[40]


def test_what_it_does_not_know_is_not_guessed() -> None:
    cached = ConversationCache(1 << 20)
    _append_turns(cached, "a", 2)
    assert cached.get("other", "a1") is None
    cached.append("t", "later", "unknown", ThreadPosition(9, 4), _entries("later"))
    cached.append("other", "stolen", "a1", ThreadPosition(1, 2), _entries("stolen"))
    cached.append("t", "gap", "a1", ThreadPosition(1, 3), _entries("gap"))
    assert [cached.get("t", name) for name in ("later", "gap")] == [None, None]
    assert cached.get("other", "stolen") is None


def test_a_loaded_conversation_uses_what_is_there() -> None:
    cached = ConversationCache(1 << 20)
    _append_turns(cached, "a", 2)
    known = _get_segments(cached, "a1")
    loaded = cached.load("t", "b", [(ThreadPosition(1, n), _entries(str(n))) for n in range(3)])
    assert list(loaded[:2]) == known
    assert _get_segments(cached, "b") == list(loaded)
    assert list(cached.load("t", "nothing", [])) == []


def test_the_least_used_go_first_and_nothing_is_left_of_them() -> None:
    cached = ConversationCache(100_000)
    for number in range(100):
        _append_turns(cached, f"talk {number} ", 3, size=1000, thread=number + 1)
        assert cached.get("t", "talk 0 2") is not None  # used all the time
        assert cached.memory_bytes <= 100_000
    assert cached.get("t", "talk 1 2") is None
    assert cached.get("t", "talk 99 2") is not None
    for number in range(100):
        for turn in range(3):
            cached.remove(f"talk {number} {turn}")
    assert cached.memory_bytes == 0


def test_a_conversation_above_the_limit_is_returned_but_not_cached() -> None:
    cached = ConversationCache(1000)
    loaded = cached.load("t", "a", [(ThreadPosition(1, 0), _entries("a", 5000))])
    assert loaded[0].entries == _entries("a", 5000)
    assert cached.get("t", "a") is None
    assert cached.memory_bytes == 0


def test_removing_a_response_keeps_shared_turns() -> None:
    cached = ConversationCache(1 << 20)
    _append_turns(cached, "a", 2)
    first, second = _get_segments(cached, "a1")
    cached.remove("a0")
    cached.remove("unknown")
    assert cached.get("t", "a0") is None
    assert _get_segments(cached, "a1") == [first, second]
