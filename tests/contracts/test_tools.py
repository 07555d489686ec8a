"""The conformance kit of hosted tools on the code interpreter and on the double; imports pytest and fumehood."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from fumehood.protocol.sandbox import Stdout
from fumehood.sandbox.containers import SandboxContainers
from fumehood.store.referred_blobs import ReferredBlobs
from fumehood.testing import (
    Answer,
    FakeClock,
    MemoryBlobs,
    MemoryStore,
    ScriptedSandboxes,
    ScriptedTool,
    Step,
    WriteFile,
)
from fumehood.testing.tool_kit import Subject, ToolKit
from fumehood.tools.code_interpreter import CodeInterpreter
from fumehood.tools.shell import Shell

BROKEN = [
    "",
    "{",
    "[]",
    "null",
    "{}",
    '{"code": 1}',
    '{"code": "x", "requirements": "y"}',
    '{"code": "\\ud800"}',
    "print(1)",
]


class TestCodeInterpreter(ToolKit):
    @pytest.fixture
    async def subject(self) -> AsyncGenerator[Subject]:
        clock = FakeClock()
        steps = [
            Step("print(1)", [Stdout("1\n"), WriteFile("a.csv", b"x")]),
            Step("wait()", [Stdout("waiting\n"), asyncio.Event()]),
        ]
        async with ScriptedSandboxes(always=steps) as provider:
            store = MemoryStore(clock)
            containers = SandboxContainers(provider, store, ReferredBlobs(MemoryBlobs(), store), clock)
            yield Subject(
                CodeInterpreter(containers, clock),
                '{"type": "code_interpreter", "container": {"type": "auto"}}',
                works='{"requirements": ["x"], "code": "print(1)"}',
                broken=BROKEN,
                waits=('{"code": "wait()"}', lambda: bool(provider.requests)),
                now=clock.monotonic(),
            )


BROKEN_COMMANDS = [
    "",
    "{",
    "[]",
    "{}",
    '{"commands": []}',
    '{"commands": "ls"}',
    '{"commands": ["ls", 1]}',
    '{"commands": ["ls"], "timeout_ms": 0}',
    '{"commands": ["a"], "commands": ["b"]}',
    '{"commands": ["\\ud800"]}',
    '{"commands": ["ls", "',
    "ls",
]


class TestShell(ToolKit):
    @pytest.fixture
    async def subject(self) -> AsyncGenerator[Subject]:
        clock = FakeClock()
        steps = [
            Step("ls", [Stdout("a.csv\n"), WriteFile("a.csv", b"x")]),
            Step("sleep 9", [Stdout("waiting\n"), asyncio.Event()]),
        ]
        async with ScriptedSandboxes(always=steps) as provider:
            store = MemoryStore(clock)
            containers = SandboxContainers(provider, store, ReferredBlobs(MemoryBlobs(), store), clock)
            yield Subject(
                Shell(containers, clock),
                '{"type": "shell", "environment": {"type": "container_auto"}}',
                works='{"timeout_ms": 5000, "commands": ["ls", "ls"]}',
                broken=BROKEN_COMMANDS,
                waits=('{"commands": ["ls", "sleep 9", "ls"]}', lambda: len(provider.requests) > 1),
                now=clock.monotonic(),
            )


class TestScriptedTool(ToolKit):
    @pytest.fixture
    async def subject(self) -> Subject:
        waits = '{"wait": true}'
        always = [Answer(arguments=waits, wait=asyncio.Event()), Answer("done")]
        tool = ScriptedTool(always=always)
        return Subject(
            tool,
            '{"type": "scripted"}',
            works='{"x": 1}',
            waits=(waits, lambda: bool(tool.calls)),
        )
