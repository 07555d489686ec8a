"""A scripted double that behaves as the programs of the conformance kit do; imports fumehood."""

import asyncio

from fumehood.protocol.sandbox import End, Raised, Result, Stderr, Stdout
from fumehood.testing import Action, DeleteFile, ScriptedSandbox, ScriptedSandboxes, Step, WriteFile
from fumehood.testing.sandbox_kit import PYTHON_PROGRAMS, Program


async def _until_go(sandbox: ScriptedSandbox) -> None:
    while not any(file.path == "go" for file in sandbox.files.listing().files):
        await asyncio.sleep(0)


def _behaviours() -> dict[Program, list[Action]]:
    return {
        "prints hello": [Stdout("hello\n")],
        "speaks on every channel": [Stdout("out\n"), Stderr("err\n"), Result({"text/plain": "'value'"})],
        "raises ValueError": [Raised("ValueError", "no", "ValueError: no\n")],
        "exits with 3": [End(status="error", exit_code=3, duration_ms=0, state_kept=True)],
        "waits to be interrupted": [Stdout("waiting\n"), asyncio.Event()],
        "waits for the file go": [
            Stdout("waiting\n"),
            _until_go,
            WriteFile("done.txt", b"done"),
            Stdout("done\n"),
        ],
        "writes out.txt": [WriteFile("out.txt", b"made")],
        "deletes out.txt": [DeleteFile("out.txt")],
        "a command exits with 3": [
            Stdout("out\n"),
            Stderr("err\n"),
            WriteFile("out.txt", b"made\n"),
            End(status="error", exit_code=3, duration_ms=0, state_kept=True),
        ],
        "a command waits to be interrupted": [Stdout("waiting\n"), asyncio.Event()],
    }


def scripted() -> ScriptedSandboxes:
    return ScriptedSandboxes(
        always=[Step(PYTHON_PROGRAMS[name], actions) for name, actions in _behaviours().items()]
    )
