"""Hosts one supervisor behind newline-delimited JSON on standard input and output.

    {"id": 1, "op": "create", "memory": "1g"}   ->  {"id": 1, "done": {"sandbox": "…"}}
    {"id": 2, "op": "execute", "sandbox": "…"}  ->  {"id": 2, "event": {…}}…, {"id": 2, "done": null}
    anything that fails                         ->  {"id": 3, "error": "FileRefused", "text": "…"}

A process of its own, so that tests can run it as another user, look for its secrets, and kill it.
"""

import argparse
import asyncio
import base64
import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from fumehood.protocol.sandbox.sandbox_errors import SandboxError, SandboxGone
from fumehood.protocol.sandbox.sandbox_messages import (
    ArchiveFormat,
    ExecuteRequest,
    ExecutionLanguage,
    SandboxSpec,
)
from fumehood.sandbox_server.settings import SandboxServerSettings
from fumehood.sandbox_server.supervisor.in_process_sandbox import InProcessSandbox
from fumehood.sandbox_server.supervisor.sandbox_instance import SandboxInstance
from fumehood.sandbox_server.supervisor.supervisor import Supervisor


class SupervisorDriver:
    def __init__(self, supervisor: Supervisor, secret: str) -> None:
        self._supervisor = supervisor
        self._secret = secret  # only here to be found in this process's memory
        self._sandboxes: dict[str, SandboxInstance] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        reader = asyncio.StreamReader(limit=64 << 20)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            task = asyncio.create_task(self._answer(json.loads(line)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, request: dict[str, Any]) -> None:
        number, op = request.pop("id"), request.pop("op")
        try:
            answer = await getattr(self, f"do_{op}")(number, **request)
        except (SandboxError, OSError, ValueError) as error:
            write_message({"id": number, "error": type(error).__name__, "text": str(error)})
        else:
            write_message({"id": number, "done": answer})

    def _find(self, name: str) -> SandboxInstance:
        if name not in self._sandboxes:
            raise SandboxGone("The driver knows no such sandbox.")
        return self._sandboxes[name]

    async def do_create(self, number: int, **spec: Any) -> dict[str, Any]:
        sandbox = await self._supervisor.create(msgspec.convert(spec, SandboxSpec))
        self._sandboxes[sandbox.id] = sandbox
        return {"sandbox": sandbox.id}

    async def do_execute(
        self,
        number: int,
        sandbox: str,
        code: str,
        timeout: float,
        requirements: list[str],
        language: ExecutionLanguage,
    ) -> None:
        request = ExecuteRequest(
            code=code, timeout_seconds=timeout, requirements=requirements, language=language
        )
        async for event in InProcessSandbox(self._find(sandbox)).execute(request):
            write_message({"id": number, "event": msgspec.to_builtins(event)})

    async def do_interrupt(self, number: int, sandbox: str) -> None:
        self._find(sandbox).executions.interrupt()

    async def do_list_files(self, number: int, sandbox: str) -> dict[str, Any]:
        listing = await self._find(sandbox).files.list()
        return {"files": [msgspec.to_builtins(entry) for entry in listing.files], "cut": listing.truncated}

    async def do_read_file(self, number: int, sandbox: str, path: str, limit: int) -> str:
        content = await self._find(sandbox).files.read(path, limit=limit)
        return base64.b64encode(content).decode()

    async def do_write_file(self, number: int, sandbox: str, path: str, content: str) -> None:
        await self._find(sandbox).files.write(path, base64.b64decode(content))

    async def do_unpack(
        self, number: int, sandbox: str, content: str, kind: ArchiveFormat, into: str
    ) -> dict[str, Any]:
        done = await self._find(sandbox).files.unpack(base64.b64decode(content), kind=kind, into=into)
        return msgspec.to_builtins(done)

    async def do_delete_file(self, number: int, sandbox: str, path: str) -> None:
        await self._find(sandbox).files.delete(path)

    async def do_destroy(self, number: int, sandbox: str) -> None:
        await self._find(sandbox).destroy()
        del self._sandboxes[sandbox]

    async def do_gone(self, number: int, sandbox: str) -> str | None:
        return self._find(sandbox).end_reason

    async def do_members(self, number: int, sandbox: str) -> list[int]:
        """The sandbox's processes by their pids here; none where there is no cgroup."""
        cgroup = self._find(sandbox).resources.cgroup
        return [] if cgroup is None else await asyncio.to_thread(cgroup.processes)

    async def do_info(self, number: int) -> dict[str, Any]:
        tree = self._supervisor._resource_allocator.cgroup_tree  # pyright: ignore[reportPrivateUsage]
        users = self._supervisor._resource_allocator.uid_range  # pyright: ignore[reportPrivateUsage]
        return {
            "supervisor": os.getpid(),
            "zygote": self._supervisor.zygote.pid,
            "zygote_alive": self._supervisor.zygote.is_alive,
            "live": len(self._supervisor.claimed_sandboxes()),
            "open_files": len(os.listdir("/proc/self/fd")),
            "cgroups": [] if tree is None else [str(path) for path in tree.paths],
            "user_each": users is not None,
        }


def write_message(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--settings", type=json.loads, default={})
    settings: dict[str, Any] = parser.parse_args().settings
    if "preload" in settings:
        settings["preload"] = tuple(settings["preload"])
    for name in ("disk_dir", "packages_dir"):
        if name in settings:
            settings[name] = Path(settings[name])
    try:
        async with Supervisor(SandboxServerSettings(**settings)) as supervisor:
            driver = SupervisorDriver(
                supervisor, "-".join(["heap", os.environ.get("FUMEHOOD_TEST_SECRET", "none")])
            )
            write_message({"id": 0, "done": await driver.do_info(0)})
            await driver.serve()
    except SandboxError as error:
        write_message({"id": 0, "error": type(error).__name__, "text": str(error)})


if __name__ == "__main__":
    asyncio.run(main())
