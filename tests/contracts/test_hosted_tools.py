"""Every hosted tool passes its kit."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from fumehood.containers.container_service import SandboxContainerService
from fumehood.protocol.sandbox.sandbox_messages import Stdout
from fumehood.store.garbage_collected_blobs import GarbageCollectedBlobs
from fumehood.testing import (
    FakeClock,
    MemoryBlobStore,
    MemoryStore,
    ScriptedExecution,
    ScriptedSandboxProvider,
    ScriptedTool,
    ScriptedToolAnswer,
    WriteFile,
)
from fumehood.testing.conformance_kits.hosted_tool_kit import HostedToolKit, ToolSubject
from fumehood.tools.code_interpreter_tool import CodeInterpreterTool
from fumehood.tools.shell_tool import ShellTool


def make_containers(provider: ScriptedSandboxProvider, clock: FakeClock) -> SandboxContainerService:
    store = MemoryStore(clock)
    return SandboxContainerService(provider, store, GarbageCollectedBlobs(MemoryBlobStore(), store), clock)


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


class TestCodeInterpreter(HostedToolKit):
    @pytest.fixture
    async def subject(self) -> AsyncGenerator[ToolSubject]:
        clock = FakeClock()
        steps = [
            ScriptedExecution("print(1)", [Stdout("1\n"), WriteFile("a.csv", b"x")]),
            ScriptedExecution("wait()", [Stdout("waiting\n"), asyncio.Event()]),
        ]
        async with ScriptedSandboxProvider(repeatable=steps) as provider:
            containers = make_containers(provider, clock)
            yield ToolSubject(
                CodeInterpreterTool(containers, clock),
                '{"type": "code_interpreter", "container": {"type": "auto"}}',
                valid_arguments='{"requirements": ["x"], "code": "print(1)"}',
                invalid_arguments=BROKEN,
                hanging_call=('{"code": "wait()"}', lambda: bool(provider.requests)),
                monotonic_now=clock.monotonic(),
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


class TestShell(HostedToolKit):
    @pytest.fixture
    async def subject(self) -> AsyncGenerator[ToolSubject]:
        clock = FakeClock()
        steps = [
            ScriptedExecution("ls", [Stdout("a.csv\n"), WriteFile("a.csv", b"x")]),
            ScriptedExecution("sleep 9", [Stdout("waiting\n"), asyncio.Event()]),
        ]
        async with ScriptedSandboxProvider(repeatable=steps) as provider:
            containers = make_containers(provider, clock)
            yield ToolSubject(
                ShellTool(containers, clock),
                '{"type": "shell", "environment": {"type": "container_auto"}}',
                valid_arguments='{"timeout_ms": 5000, "commands": ["ls", "ls"]}',
                invalid_arguments=BROKEN_COMMANDS,
                hanging_call=('{"commands": ["ls", "sleep 9", "ls"]}', lambda: len(provider.requests) > 1),
                monotonic_now=clock.monotonic(),
            )


class TestScriptedTool(HostedToolKit):
    @pytest.fixture
    async def subject(self) -> ToolSubject:
        waits = '{"wait": true}'
        always = [ScriptedToolAnswer(arguments=waits, wait_for=asyncio.Event()), ScriptedToolAnswer("done")]
        tool = ScriptedTool(repeatable=always)
        return ToolSubject(
            tool,
            '{"type": "scripted"}',
            valid_arguments='{"x": 1}',
            hanging_call=(waits, lambda: bool(tool.calls)),
        )
