"""Runs the hosted calls of one turn, side by side."""

import asyncio
import contextlib
import logging

from fumehood.engine.response_output import ResponseOutput
from fumehood.engine.turn_assembler import HostedCall, TurnAssembler
from fumehood.interfaces import ToolCallResult

logger = logging.getLogger(__name__)


async def run_hosted_calls(turn: TurnAssembler, output: ResponseOutput) -> None:
    """Every call to its result; their events enter the log as they come. A tool that breaks fails its own call."""
    if len(turn.hosted_calls) == 1:
        await _run_hosted_call(turn, turn.hosted_calls[0], output)
        return
    async with asyncio.TaskGroup() as group:
        for call in turn.hosted_calls:
            group.create_task(_run_hosted_call(turn, call, output))


async def _run_hosted_call(turn: TurnAssembler, call: HostedCall, output: ResponseOutput) -> None:
    try:
        # Whatever ends this early closes the generator, which interrupts the code.
        async with contextlib.aclosing(call.session.run()) as steps:
            async for step in steps:
                if isinstance(step, ToolCallResult):
                    turn.record_result(call, step)
                    return
                output.emit(step)
    except Exception:
        logger.exception("a hosted tool broke in call %s", call.call_id)
    else:
        logger.error("a hosted tool ended call %s without a result", call.call_id)
    turn.record_result(call, call.session.abort("the tool failed; this is a fault of the server"))
