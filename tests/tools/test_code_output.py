"""Output that stays bounded whatever comes; imports pytest, hypothesis and fumehood."""

from hypothesis import given
from hypothesis import strategies as st

from fumehood.protocol.sandbox import Display, Stdout
from fumehood.tools.code_output import CodeOutput, HeadAndTail, OutputLimits


@given(st.lists(st.text(max_size=30), max_size=40), st.integers(2, 100))
def test_the_beginning_and_the_end_are_kept(pieces: list[str], limit: int) -> None:
    kept = HeadAndTail(limit)
    for piece in pieces:
        kept.add(piece)
    whole = "".join(pieces)
    assert kept.empty == (not whole)
    assert kept.truncated == (len(whole) > limit)
    if len(whole) <= limit:
        assert kept.text() == whole
    else:
        head, left_out, tail = kept.text("<{left_out}>").partition(f"\n<{len(whole) - limit}>\n")
        assert left_out
        assert whole.startswith(head)
        assert whole.endswith(tail)
        assert len(head) + len(tail) == limit


def test_lines_of_their_own() -> None:
    kept = HeadAndTail(100)
    for text in ("one\n", "two", "three\n"):
        kept.add_line(text)
    assert kept.text() == "one\ntwo\nthree\n"


def test_memory_is_bounded() -> None:
    output = CodeOutput(
        OutputLimits(model_characters=1000, kept_characters=10_000, images=2, image_bytes=100)
    )
    for _ in range(200):
        output.take(Stdout("x" * 100_000))
        output.take(Stdout("y"))
        output.take(Display({"image/png": "A" * 1_000_000}))
    held = [output.told, output.logs, output.stdout]
    assert all(len(part.text()) < 10_200 for part in held)
    sizes = [sum(map(len, part._tail)) for part in held]  # pyright: ignore[reportPrivateUsage]
    assert max(sizes) <= 20_000
    assert output.truncated
