"""Runs the hosted calls of one turn, side by side; imports `interfaces`, `protocol` and siblings."""

import asyncio
import contextlib
import logging

from fumehood.engine.assembler import HostedCall, Turn
from fumehood.engine.output import Output
from fumehood.interfaces import ToolResult

logger = logging.getLogger(__name__)


async def run_calls(turn: Turn, output: Output) -> None:
    """Every call to its result; their events enter the log as they come. A tool that breaks fails its own call."""
    if len(turn.hosted) == 1:
        await _run_call(turn, turn.hosted[0], output)
        return
    async with asyncio.TaskGroup() as group:
        for call in turn.hosted:
            group.create_task(_run_call(turn, call, output))


async def _run_call(turn: Turn, call: HostedCall, output: Output) -> None:
    try:
        # Whatever ends this early closes the generator, which interrupts the code.
        async with contextlib.aclosing(call.session.run()) as steps:
            async for step in steps:
                if isinstance(step, ToolResult):
                    turn.settle(call, step)
                    return
                output.emit(step)
    except Exception:
        logger.exception("a hosted tool broke in call %s", call.call_id)
    else:
        logger.error("a hosted tool ended call %s without a result", call.call_id)
    turn.settle(call, call.session.abort("the tool failed; this is a fault of the server"))
