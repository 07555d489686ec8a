"""Events of what was seen: what models were asked and said, and what went wrong; imports the API and siblings.

The conventions know an event for a turn and one for a turn that failed. A tool that failed and a sandbox that was lost
have events of our own beside them.
"""

from typing import override

from opentelemetry._logs import Logger, SeverityNumber
from opentelemetry.util.types import AnyValue

from fumehood.telemetry.seen import CallSeen, Listener, PhaseSeen, Seen, TurnSeen

DETAILS = "gen_ai.client.inference.operation.details"
EXCEPTION = "gen_ai.client.operation.exception"
TOOL_FAILED = "fumehood.tool.failed"
SANDBOX_LOST = "fumehood.sandbox.lost"
_LOST = frozenset({"lost", "out_of_memory"})


class Events(Listener):
    """Tells of turns that were asked for, and of what went wrong.

    with_details: whether there is an event for every turn; with_content: whether it has what was said in it.
    """

    def __init__(self, logger: Logger, *, with_details: bool = False, with_content: bool = False) -> None:
        self._logger = logger
        self._with_details = with_details
        self._with_content = with_content

    @override
    def ended(self, seen: Seen) -> None:
        if isinstance(seen, TurnSeen):
            if self._with_details or seen.error:
                self._turn(seen)
            return
        match seen:
            case CallSeen(error=error) if error:
                told: dict[str, AnyValue] = {
                    "gen_ai.operation.name": "execute_tool",
                    "gen_ai.tool.name": seen.name,
                    "gen_ai.tool.call.id": seen.call_id,
                    "error.type": error,
                }
                self._emit(TOOL_FAILED, seen, told, SeverityNumber.WARN)
            case PhaseSeen(phase=phase) if phase.facts.get("status") in _LOST:
                lost: dict[str, AnyValue] = {
                    "gen_ai.tool.name": seen.call.name,
                    "gen_ai.tool.call.id": seen.call.call_id,
                    "error.type": phase.facts["status"],
                }
                self._emit(SANDBOX_LOST, seen.call, lost, SeverityNumber.WARN)
            case _:
                pass

    def _turn(self, turn: TurnSeen) -> None:
        if self._with_details:
            told: dict[str, AnyValue] = {**turn.known().attributes(), **turn.told()}
            if turn.error:
                told["error.type"] = turn.error
            if self._with_content:
                told |= turn.content
            self._emit(DETAILS, turn, told, SeverityNumber.INFO)
        if turn.error and turn.error != "cancelled":
            self._emit(EXCEPTION, turn, {"exception.type": turn.error}, SeverityNumber.WARN)

    def _emit(self, name: str, seen: Seen, told: dict[str, AnyValue], severity: SeverityNumber) -> None:
        self._logger.emit(
            timestamp=seen.began_at + seen.took,
            context=seen.within(),
            severity_number=severity,
            event_name=name,
            attributes=told,
        )
