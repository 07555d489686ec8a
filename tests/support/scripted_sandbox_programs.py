"""A `ScriptedSandboxProvider` that runs the programs of `SandboxKit`."""

import asyncio

from fumehood.protocol.sandbox.sandbox_messages import (
    ExceptionRaised,
    ExecutionEnd,
    ExpressionResult,
    Stderr,
    Stdout,
)
from fumehood.testing import (
    DeleteFile,
    ExecutionStep,
    SandboxAction,
    ScriptedSandbox,
    ScriptedSandboxProvider,
    WriteFile,
)
from fumehood.testing.kits.sandbox_kit import PYTHON_PROGRAMS, SandboxProgram


async def _wait_for_go_file(sandbox: ScriptedSandbox) -> None:
    while not any(file.path == "go" for file in sandbox.files.list_files().files):
        await asyncio.sleep(0)


def _actions_by_program() -> dict[SandboxProgram, list[SandboxAction]]:
    return {
        "prints hello": [Stdout("hello\n")],
        "speaks on every channel": [
            Stdout("out\n"),
            Stderr("err\n"),
            ExpressionResult({"text/plain": "'value'"}),
        ],
        "raises ValueError": [ExceptionRaised("ValueError", "no", "ValueError: no\n")],
        "exits with 3": [ExecutionEnd(status="error", exit_code=3, duration_ms=0, state_kept=True)],
        "waits to be interrupted": [Stdout("waiting\n"), asyncio.Event()],
        "waits for the file go": [
            Stdout("waiting\n"),
            _wait_for_go_file,
            WriteFile("done.txt", b"done"),
            Stdout("done\n"),
        ],
        "writes out.txt": [WriteFile("out.txt", b"made")],
        "deletes out.txt": [DeleteFile("out.txt")],
        "a command exits with 3": [
            Stdout("out\n"),
            Stderr("err\n"),
            WriteFile("out.txt", b"made\n"),
            ExecutionEnd(status="error", exit_code=3, duration_ms=0, state_kept=True),
        ],
        "a command waits to be interrupted": [Stdout("waiting\n"), asyncio.Event()],
    }


def make_scripted_sandboxes() -> ScriptedSandboxProvider:
    return ScriptedSandboxProvider(
        repeatable=[
            ExecutionStep(PYTHON_PROGRAMS[name], actions) for name, actions in _actions_by_program().items()
        ]
    )
