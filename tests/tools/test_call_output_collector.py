"""Output that stays bounded whatever comes."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.containers.container_settings import ContainerSettings
from fumehood.containers.file_sync import ContainerFileLimits
from fumehood.protocol.sandbox.sandbox_messages import DisplayData, Stdout
from fumehood.tools.call_output_collector import CallOutput, HeadTailBuffer, OutputLimits
from fumehood.tools.interpreter_call import CodeInterpreterToolSettings


@given(st.lists(st.text(max_size=30), max_size=40), st.integers(2, 100))
def test_the_beginning_and_the_end_are_kept(pieces: list[str], limit: int) -> None:
    kept = HeadTailBuffer(limit)
    for piece in pieces:
        kept.add(piece)
    whole = "".join(pieces)
    assert kept.is_empty == (not whole)
    assert kept.is_truncated == (len(whole) > limit)
    if len(whole) <= limit:
        assert kept.render() == whole
    else:
        widest = len(f"\n<{len(whole)}>\n")
        room = limit if widest > limit // 2 else limit - widest
        text = kept.render("<{left_out}>")
        head, left_out, tail = text.partition(f"\n<{len(whole) - room}>\n")
        assert left_out
        assert whole.startswith(head)
        assert whole.endswith(tail)
        assert len(head) + len(tail) == room
        assert len(text) <= limit or room == limit


@pytest.mark.parametrize("character", ["x", "ü", "\N{SNOWMAN}", "\N{GRINNING FACE}"])
@pytest.mark.parametrize("more", [-1, 0, 1, 7, 100_000])
@pytest.mark.parametrize("limits", [OutputLimits(), OutputLimits(stored_output_characters=100)])
def test_logs_keep_to_their_cap(limits: OutputLimits, more: int, character: str) -> None:
    cap = limits.stored_output_characters
    output = CallOutput(limits)
    written = character * (cap + more)
    for start in range(0, len(written), 40_001):
        output.add_event(Stdout(written[start : start + 40_001]))
    for part in (output.logs, output.stdout):
        text = part.render()
        assert len(text) <= cap
        if more <= 0:
            assert text == written
        else:
            shown = text.count(character)
            assert f"\n[… {len(written) - shown:,} characters left out …]\n" in text
            assert shown > cap // 2 - 1
    assert output.is_truncated == (more > 0)


def test_lines_of_their_own() -> None:
    kept = HeadTailBuffer(100)
    for text in ("one\n", "two", "three\n"):
        kept.add_line(text)
    assert kept.render() == "one\ntwo\nthree\n"


def test_memory_is_bounded() -> None:
    output = CallOutput(
        OutputLimits(model_output_characters=1000, stored_output_characters=10_000, images=2, image_bytes=100)
    )
    for _ in range(200):
        output.add_event(Stdout("x" * 100_000))
        output.add_event(Stdout("y"))
        output.add_event(DisplayData({"image/png": "A" * 1_000_000}))
    held = [output.model_text, output.logs, output.stdout]
    assert all(len(part.render()) < 10_200 for part in held)
    sizes = [sum(map(len, part._tail)) for part in held]  # pyright: ignore[reportPrivateUsage]
    assert max(sizes) <= 20_000
    assert output.is_truncated


def test_the_page_tells_the_bounds() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/code-interpreter.md").read_text(encoding="utf-8")
    output, files, containers = OutputLimits(), ContainerFileLimits(), ContainerSettings()
    assert f"more than {output.model_output_characters:,} characters" in page
    assert f"at most {output.stored_output_characters:,} characters" in page
    assert f"at\n  most {output.images} a call" in page
    assert f"Up to {CodeInterpreterToolSettings().inline.file_bytes >> 20} MiB the URL is" in page
    assert f"| one file | {files.file_bytes >> 20} MiB;" in page
    assert f"| all files of a container | {files.container_bytes >> 30} GiB," in page
    assert f"| files of a container | {files.files:,};" in page
    assert f"| time for copying | {files.sync_timeout:g} s;" in page
    assert f"A container expires after {containers.idle_minutes} minutes" in page
    assert f"`claim_timeout` ({containers.claim_timeout:g} s)" in page
    assert f"A tenant can have {containers.containers_per_tenant} active ones\n(`limits" in page
    assert f"`execution_timeout` ({CodeInterpreterToolSettings().execution_timeout:g} s)" in page
