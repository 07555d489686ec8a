"""Lines are the same however their bytes arrive."""

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.sandbox_client.remote_provider import LineSplitter, LineTooLong


@given(st.lists(st.binary(max_size=20).map(lambda line: line.replace(b"\n", b""))), st.data())
def test_lines_do_not_depend_on_the_pieces(lines: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(line + b"\n" for line in lines) + b"rest"
    positions = st.lists(st.integers(0, len(whole)), max_size=20)
    cuts = [0, *sorted(data.draw(positions)), len(whole)]
    splitter = LineSplitter(1000)
    seen = [line for start, end in itertools.pairwise(cuts) for line in splitter.feed(whole[start:end])]
    assert seen == lines
    assert splitter.feed(b"\n") == [b"rest"]


def test_a_long_line_in_small_pieces_is_joined_once() -> None:
    splitter = LineSplitter(1 << 30)
    piece = b"x" * 4096
    began = time.process_time()
    for _ in range((24 << 20) // len(piece)):
        assert splitter.feed(piece) == []
    (line,) = splitter.feed(b"\n")
    assert len(line) == 24 << 20
    assert time.process_time() - began < 2, "the work is more than linear"


def test_a_line_without_end_is_not_held() -> None:
    splitter = LineSplitter(100)
    assert splitter.feed(b"x" * 100 + b"\n" + b"y" * 100) == [b"x" * 100]
    with pytest.raises(LineTooLong):
        splitter.feed(b"y")
