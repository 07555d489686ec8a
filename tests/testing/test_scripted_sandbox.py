"""`ScriptedSandboxProvider` follows its script and reports deviations."""

import subprocess
import sys

import pytest

from fumehood.protocol.sandbox.sandbox_errors import (
    FileRefused,
    SandboxGone,
    SandboxPayloadTooLarge,
    SandboxServerAtCapacity,
    SandboxServerUnreachable,
)
from fumehood.protocol.sandbox.sandbox_messages import (
    ExceptionRaised,
    ExecuteRequest,
    ExecutionEnd,
    ExecutionEvent,
    SandboxSpec,
    Stdout,
)
from fumehood.testing import (
    DeleteFile,
    ScriptedExecution,
    ScriptedSandbox,
    ScriptedSandboxProvider,
    WriteFile,
)
from fumehood.testing.conformance_kits.payloads import build_archive
from fumehood.testing.fakes.memory_sandbox_files import MemorySandboxFiles


async def create_only_sandbox(provider: ScriptedSandboxProvider) -> ScriptedSandbox:
    return await provider.attach(await provider.create(SandboxSpec()))


async def run(sandbox: ScriptedSandbox, code: str) -> list[ExecutionEvent]:
    return [event async for event in sandbox.execute(ExecuteRequest(code=code))]


async def test_steps_in_order() -> None:
    async with ScriptedSandboxProvider(
        ScriptedExecution("x = 1"),
        ScriptedExecution(lambda request: "print" in request.code, [Stdout("1\n")]),
        ScriptedExecution(None, [ExceptionRaised("NameError", "y", "NameError: y\n")]),
    ) as provider:
        sandbox = await create_only_sandbox(provider)
        (end,) = await run(sandbox, "x = 1")
        assert isinstance(end, ExecutionEnd)
        assert (end.status, end.exit_code) == ("ok", 0)
        assert (await run(sandbox, "print(x)"))[0] == Stdout("1\n")
        *_, end = await run(sandbox, "y")
        assert isinstance(end, ExecutionEnd)
        assert (end.status, end.exit_code) == ("error", 1)
        assert [request.code for _, request in provider.requests] == ["x = 1", "print(x)", "y"]
        assert provider.specs == {sandbox.id: SandboxSpec()}


async def test_what_was_not_expected_fails_there_and_at_the_end() -> None:
    provider = ScriptedSandboxProvider(ScriptedExecution("expected"))
    sandbox = await create_only_sandbox(provider)
    with pytest.raises(AssertionError, match=r"was asked to run 'other'; expected the code 'expected'"):
        await run(sandbox, "other")
    await run(sandbox, "expected")
    with pytest.raises(AssertionError, match="expected nothing more"):
        await run(sandbox, "expected")
    await provider.close()
    with pytest.raises(AssertionError, match="'other'"):
        provider.assert_consumed()


async def test_unused_steps_fail_at_the_end() -> None:
    def asks_for_a_plot(request: ExecuteRequest) -> bool:
        return "plot" in request.code

    with pytest.raises(AssertionError) as caught:
        async with ScriptedSandboxProvider(ScriptedExecution("a"), ScriptedExecution(asks_for_a_plot)):
            pass
    assert str(caught.value).splitlines() == [
        "Not used: the code 'a'.",
        "Not used: a request that 'asks_for_a_plot' accepts.",
    ]
    with pytest.raises(KeyError):  # an error of the test is not hidden
        async with ScriptedSandboxProvider(ScriptedExecution("a")):
            raise KeyError


async def test_files_that_the_code_writes_and_deletes() -> None:
    step = ScriptedExecution("work", [DeleteFile("in.csv"), WriteFile("out.csv", b"1,2\n")])
    async with ScriptedSandboxProvider(step) as provider:
        sandbox = await create_only_sandbox(provider)
        await sandbox.write_file("in.csv", b"x")
        mark = (await sandbox.list_files()).mark
        await run(sandbox, "work")
        changes = await sandbox.list_files(mark)
        assert ([file.path for file in changes.files], changes.deleted) == (["out.csv"], ["in.csv"])


async def test_failing_actions_are_reported() -> None:
    provider = ScriptedSandboxProvider(ScriptedExecution("work", [DeleteFile("none.csv")]))
    sandbox = await create_only_sandbox(provider)
    with pytest.raises(Exception, match=r"none\.csv"):
        await run(sandbox, "work")
    with pytest.raises(AssertionError, match="The actions of"):
        provider.assert_consumed()
    await provider.close()


async def test_errors_and_lost_sandboxes() -> None:
    lost = ExecutionEnd(
        status="out_of_memory", exit_code=-1, duration_ms=1, state_kept=False, reason="Too much."
    )
    steps = [
        ScriptedExecution("vanish", [Stdout("x"), SandboxGone("It fell over.")]),
        ScriptedExecution("grow", [lost]),
    ]
    async with ScriptedSandboxProvider(*steps, capacity=1) as provider:
        first = await create_only_sandbox(provider)
        with pytest.raises(SandboxServerAtCapacity):
            await provider.create(SandboxSpec())
        events = first.execute(ExecuteRequest(code="vanish"))
        assert await anext(events) == Stdout("x")
        with pytest.raises(SandboxGone, match="It fell over"):
            await anext(events)
        with pytest.raises(SandboxGone):
            await first.list_files()
        second = await create_only_sandbox(provider)
        assert await run(second, "grow") == [lost]
        with pytest.raises(SandboxGone, match="Too much"):
            await second.list_files()
        provider.error = SandboxServerUnreachable("The network is down.")
        with pytest.raises(SandboxServerUnreachable, match="down"):
            await provider.list_sandboxes()
        provider.error = None
        assert await provider.list_sandboxes() == []


def test_files_have_limits() -> None:
    files = MemorySandboxFiles(limit=10)
    with pytest.raises(SandboxPayloadTooLarge):
        files.write_file("a", b"x" * 11)
    with pytest.raises(SandboxPayloadTooLarge):
        files.unpack_archive(build_archive("zip", {"a": b"x" * 6, "b": b"x" * 6}), "zip", "")
    with pytest.raises(FileRefused):
        files.unpack_archive(build_archive("tar", {"a": b"", "a/b": b""}), "tar", "")
    assert files.list_files().files == []


def test_pytest_is_needed_for_the_kit_only() -> None:
    code = "import sys, fumehood.testing; print('pytest' in sys.modules, 'aiohttp' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"
