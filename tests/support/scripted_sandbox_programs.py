"""A `ScriptedSandboxProvider` that runs the programs of `SandboxKit` and `ContainerServiceKit`."""

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
    SandboxAction,
    ScriptedExecution,
    ScriptedSandbox,
    ScriptedSandboxProvider,
    WriteFile,
)
from fumehood.testing.conformance_kits import container_subject, sandbox_kit


async def _wait_for_go_file(sandbox: ScriptedSandbox) -> None:
    while not any(file.path == "go" for file in sandbox.files.list_files().files):
        await asyncio.sleep(0)


async def _print_out_file(sandbox: ScriptedSandbox) -> Stdout:
    return Stdout(sandbox.files.read_file("out.txt").decode() + "\n")


def _actions_by_program() -> dict[str, list[SandboxAction]]:
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
        "changes out.txt": [WriteFile("out.txt", b"changed")],
        "prints out.txt": [_print_out_file],
        "writes hidden and temporary files": [
            WriteFile(name, b"x") for name in (".hidden", "__pycache__/x.pyc", "backup~", "half.tmp")
        ],
        "a command exits with 3": [
            Stdout("out\n"),
            Stderr("err\n"),
            WriteFile("out.txt", b"made\n"),
            ExecutionEnd(status="error", exit_code=3, duration_ms=0, state_kept=True),
        ],
        "a command waits to be interrupted": [Stdout("waiting\n"), asyncio.Event()],
    }


def make_scripted_sandboxes() -> ScriptedSandboxProvider:
    programs: dict[str, str] = {**sandbox_kit.PYTHON_PROGRAMS, **container_subject.PYTHON_PROGRAMS}
    steps = [ScriptedExecution(programs[name], actions) for name, actions in _actions_by_program().items()]
    return ScriptedSandboxProvider(repeatable=steps)
