"""Files of a call that cannot be fetched from its sandbox: who is told what."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

import pytest

from fumehood.containers.container_settings import IsolationScope
from fumehood.interfaces import Sandbox, SandboxRef
from fumehood.protocol.sandbox.sandbox_messages import ExecutionEnd, FileListing
from fumehood.sandbox_client.local_server_provider import LocalServerProvider
from tests.support.interpreter_harness import InterpreterHarness

pytestmark = pytest.mark.asyncio(loop_scope="module")
WRITES = "for name in 'abc': open(f'{name}.txt', 'w').write(name)\nprint('written')"
LARGE = "open('large.bin', 'wb').write(bytes(3 << 20))\nprint('written')"
ISOLATIONS = ("container", "execution")

type Interference = Callable[[SandboxRef], Awaitable[None]]


class _Disturbed:
    """A real sandbox, to which something happens once, before it is asked for the given thing."""

    def __init__(self, sandbox: Sandbox, disturbed: "Disturbed", ref: SandboxRef) -> None:
        self._sandbox = sandbox
        self._disturbed = disturbed
        self._ref = ref

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sandbox, name)

    async def list_files(self, since: str | None = None) -> FileListing:
        if self._disturbed.ran:
            await self._disturbed.disturb("list", self._ref)
        return await self._sandbox.list_files(since)

    async def read_files(self, paths: Sequence[str]) -> AsyncGenerator[Any]:
        await self._disturbed.disturb("read", self._ref)
        async for piece in self._sandbox.read_files(paths):
            yield piece

    async def read_file(self, path: str) -> AsyncGenerator[bytes]:
        await self._disturbed.disturb("read", self._ref)
        async for piece in self._sandbox.read_file(path):
            yield piece

    async def execute(self, request: Any) -> AsyncGenerator[Any]:
        async for event in self._sandbox.execute(request):
            self._disturbed.ran = isinstance(event, ExecutionEnd)
            yield event


class Disturbed:
    """Real sandboxes; before the first `what` after a call, `interference` happens to the sandbox."""

    def __init__(
        self, provider: LocalServerProvider, what: str, interference: Interference | None = None
    ) -> None:
        self._provider = provider
        self._what = what
        self._interference: Interference | None = interference or provider.destroy
        self.ran = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._provider, name)

    async def attach(self, ref: SandboxRef) -> Any:
        return _Disturbed(await self._provider.attach(ref), self, ref)

    async def disturb(self, what: str, ref: SandboxRef) -> None:
        if what == self._what and self._interference is not None:
            interference, self._interference = self._interference, None
            await interference(ref)


def interpreter(
    provider: Any, isolation: IsolationScope = "container", seconds: float = 60
) -> InterpreterHarness:
    return InterpreterHarness.with_isolation(provider, isolation, sync_timeout=seconds)


async def hang(_: SandboxRef) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(("code", "names"), [(WRITES, ["a.txt", "b.txt", "c.txt"]), (LARGE, ["large.bin"])])
@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_a_sandbox_that_dies_while_its_files_are_fetched(
    provider: LocalServerProvider, isolation: IsolationScope, code: str, names: list[str]
) -> None:
    here = interpreter(Disturbed(provider, "read"), isolation)
    called = await here.run(code)
    assert called.item.status == "failed"
    assert called.execution.exit_code == 0  # what the code itself left
    assert called.execution.stdout == "written\n"
    assert not called.execution.files_complete
    assert [file.filename for file in called.execution.missing_files] == names
    assert [file.path for file in called.execution.missing_files] == [f"/mnt/data/{name}" for name in names]
    assert called.execution.files == []
    assert called.result.files == []
    lost = f"The sandbox was lost while the files of this call were fetched, and with it: {', '.join(names)}."
    assert lost in called.model_text
    assert lost in called.execution.stderr
    after = await here.run("import os; print(os.listdir())")
    assert after.item.status == "completed"
    assert after.logs.endswith("[]\n")
    assert after.execution.files_complete


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_a_sandbox_that_dies_before_its_files_are_listed(
    provider: LocalServerProvider, isolation: IsolationScope
) -> None:
    here = interpreter(Disturbed(provider, "list"), isolation)
    called = await here.run(WRITES)
    assert called.item.status == "failed"
    assert (called.execution.files_complete, called.execution.missing_files) == (False, [])
    assert "lost before the files of this call could be listed" in called.model_text
    assert (await here.run("print(1)")).item.status == "completed"


async def test_files_that_take_too_long_are_fetched_after_the_next_call(
    provider: LocalServerProvider,
) -> None:
    here = interpreter(Disturbed(provider, "read", hang), seconds=1.5)
    called = await here.run(WRITES + "\nx = 5")
    assert called.item.status == "completed"
    assert not called.execution.files_complete
    assert [file.filename for file in called.execution.missing_files] == ["a.txt", "b.txt", "c.txt"]
    assert (
        "These files could not be fetched yet, and are looked for again after the next call: a.txt, b.txt, c.txt."
    ) in called.model_text
    after = await here.run("print(x)")
    assert after.execution.stdout == "5\n"
    assert [file.filename for file in after.execution.files] == ["a.txt", "b.txt", "c.txt"]
    assert after.execution.files_complete


async def test_files_that_take_too_long_end_with_a_sandbox_of_one_call(
    provider: LocalServerProvider,
) -> None:
    called = await interpreter(Disturbed(provider, "read", hang), "execution", seconds=1.5).run(WRITES)
    assert called.item.status == "failed"
    assert [file.filename for file in called.execution.missing_files] == ["a.txt", "b.txt", "c.txt"]
