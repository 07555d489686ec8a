"""What `fumehood:execution` tells of produced files."""

import base64
import hashlib

import pytest

from fumehood.protocol.openai.items import ExecutionDetailsFile
from fumehood.protocol.sandbox.sandbox_messages import DisplayData, Stderr, Stdout
from fumehood.testing import ScriptedExecution, WriteFile
from fumehood.tools.interpreter_call import CodeInterpreterToolSettings
from fumehood.tools.produced_files import InlineLimits
from tests.support.interpreter_harness import run_scripted

LIMITS = CodeInterpreterToolSettings(inline=InlineLimits(file_bytes=10, total_bytes=25))
PNG = b"\x89PNG\r\n\x1a\n" + bytes(2)


def content_of(file: ExecutionDetailsFile) -> bytes | None:
    return None if file.content is None else base64.b64decode(file.content)


@pytest.mark.parametrize(
    ("sizes", "sent"),
    [
        ([10], [True]),
        ([11], [False]),
        ([0], [True]),
        ([10, 10, 5], [True, True, True]),
        ([10, 10, 6], [True, True, False]),
        ([10, 10, 6, 5, 1], [True, True, False, True, False]),
    ],
)
async def test_contents_up_to_a_size_and_up_to_a_sum(sizes: list[int], sent: list[bool]) -> None:
    files = [(f"{number}.txt", bytes([number]) * size) for number, size in enumerate(sizes)]
    step = ScriptedExecution("x", [WriteFile(name, content) for name, content in files])
    async with run_scripted(step, settings=LIMITS) as interpreter:
        execution = (await interpreter.run("x", wants_contents=True)).execution
    assert [file.filename for file in execution.files] == [name for name, _ in files]
    assert [file.bytes for file in execution.files] == sizes
    assert [file.sha256 for file in execution.files] == [hashlib.sha256(c).hexdigest() for _, c in files]
    expected = [content if one else None for (_, content), one in zip(files, sent, strict=True)]
    assert list(map(content_of, execution.files)) == expected
    assert (execution.files_complete, execution.missing_files) == (True, [])


async def test_a_client_that_does_not_ask_is_sent_no_contents() -> None:
    async with run_scripted(ScriptedExecution("x", [WriteFile("a.json", b"{}")])) as interpreter:
        (file,) = (await interpreter.run("x")).execution.files
    assert (file.mime_type, file.sha256) == ("application/json", hashlib.sha256(b"{}").hexdigest())
    assert file.content is None


async def test_streams_and_exit_code_are_apart_and_figures_are_files() -> None:
    shown = DisplayData({"image/png": base64.b64encode(PNG).decode(), "text/plain": "<Figure>"})
    async with run_scripted(ScriptedExecution("x", [Stdout("o\n"), Stderr("e\n"), shown])) as interpreter:
        execution = (await interpreter.run("x", wants_contents=True)).execution
    assert (execution.stdout, execution.stderr, execution.exit_code) == ("o\n", "e\n", 0)
    (figure,) = execution.files
    assert (figure.filename, figure.mime_type, content_of(figure)) == ("figure.png", "image/png", PNG)
