"""Ours, as the benchmark sees it: make a sandbox, run code in it, delete it; imports fumehood.sandboxd and siblings."""

import os
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Self

from fumehood.protocol.sandbox import End, Stdout
from fumehood.sandboxd.sandbox import LocalSandbox
from fumehood.sandboxd.settings import Settings
from fumehood.sandboxd.supervisor import Supervisor


@dataclass(frozen=True)
class Call:
    """One call: the moments of its first output and of its end, what it printed, how it ended."""

    first: float
    ended: float
    text: str
    status: str
    state_kept: bool


class Subject(ABC):
    """Something that makes sandboxes and runs code in them; `pid` is the root of its processes."""

    name: str
    pid: int

    @abstractmethod
    async def create(self) -> Any:
        """A fresh sandbox."""

    @abstractmethod
    async def run(self, sandbox: Any, code: str, *, timeout: float = 60.0) -> Call:
        """Run code to its end."""

    @abstractmethod
    async def delete(self, sandbox: Any) -> None:
        """End the sandbox."""

    @abstractmethod
    async def parked(self) -> int:
        """How many sandboxes wait in the pool."""

    @abstractmethod
    async def close(self) -> None:
        """End everything."""


class InProcess(Subject):
    """The supervisor in this very process, without HTTP."""

    name = "in-process"

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self.pid = os.getpid()

    @classmethod
    async def start(cls, settings: Settings) -> Self:
        return cls(await Supervisor(settings).__aenter__())

    async def create(self) -> LocalSandbox:
        return await self.supervisor.create()

    async def run(self, sandbox: LocalSandbox, code: str, *, timeout: float = 60.0) -> Call:
        first, text = 0.0, ""
        async for event in sandbox.execute(code, timeout=timeout):
            if isinstance(event, Stdout):
                first = first or time.perf_counter()
                text += event.text
            elif isinstance(event, End):
                return Call(first, time.perf_counter(), text, event.status, event.state_kept)
        raise RuntimeError("the call had no end")

    async def delete(self, sandbox: LocalSandbox) -> None:
        await sandbox.destroy()

    async def parked(self) -> int:
        return len(self.supervisor._parked)

    async def close(self) -> None:
        await self.supervisor.close()
