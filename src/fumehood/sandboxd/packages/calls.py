"""Installs what a call needs before its code runs; imports only siblings and the sandbox protocol."""

import asyncio

from fumehood.protocol.sandbox import EndStatus
from fumehood.protocol.sandbox_errors import InstallFailed, SandboxGone
from fumehood.sandboxd.executions import Execution
from fumehood.sandboxd.packages.attached import SandboxPackages

_INTERRUPTED = "The call was interrupted while packages were installed; the code did not run."


async def install_for(execution: Execution, packages: SandboxPackages) -> tuple[EndStatus, str] | None:
    """None when all is there and the code may run; else how the call ended, and why."""
    if not execution.requirements:
        return None
    loop = asyncio.get_running_loop()
    began = loop.time()
    work = asyncio.ensure_future(packages.install(execution.requirements, execution.note))
    try:
        await asyncio.wait({work, execution.wake, execution.lost}, return_when=asyncio.FIRST_COMPLETED)
        if execution.lost.done():
            return "lost", f"The sandbox was lost: {execution.lost.result()}."
        if not work.done():
            return "interrupted", _INTERRUPTED
        work.result()
    except InstallFailed as error:
        return "install_failed", error.message
    except SandboxGone as error:
        return "lost", error.message
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        execution.install_seconds = loop.time() - began
    execution.begin()  # the time that the code has begins here
    return None
