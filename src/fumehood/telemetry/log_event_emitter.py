"""Events: details of turns, failed turns, failed tool calls and lost sandboxes.

The first two are OpenTelemetry's GenAI events, the others are fumehood's own.
"""

from typing import override

from opentelemetry._logs import Logger, SeverityNumber
from opentelemetry.util.types import AnyValue

from fumehood.telemetry.operation_records import (
    RecordListener,
    SandboxPhaseRecord,
    SpanRecord,
    ToolCallRecord,
    TurnRecord,
)

INFERENCE_DETAILS = "gen_ai.client.inference.operation.details"
OPERATION_EXCEPTION = "gen_ai.client.operation.exception"
TOOL_FAILED = "fumehood.tool.failed"
SANDBOX_LOST = "fumehood.sandbox.lost"
_LOST_STATUSES = frozenset({"lost", "out_of_memory"})


class LogEventEmitter(RecordListener):
    """Emits an event for each failure, and on request for each turn.

    with_details: emit an event for every turn. with_content: add the captured content to it.
    """

    def __init__(self, logger: Logger, *, with_details: bool = False, with_content: bool = False) -> None:
        self._logger = logger
        self._with_details = with_details
        self._with_content = with_content

    @override
    def on_end(self, record: SpanRecord) -> None:
        match record:
            case TurnRecord():
                self._emit_turn(record)
            case ToolCallRecord(error=error) if error:
                failure: dict[str, AnyValue] = {
                    "gen_ai.operation.name": "execute_tool",
                    "gen_ai.tool.name": record.name,
                    "gen_ai.tool.call.id": record.call_id,
                    "error.type": error,
                }
                self._emit(TOOL_FAILED, record, failure, SeverityNumber.WARN)
            case SandboxPhaseRecord(timing=timing) if timing.attributes.get("status") in _LOST_STATUSES:
                lost: dict[str, AnyValue] = {
                    "gen_ai.tool.name": record.call.name,
                    "gen_ai.tool.call.id": record.call.call_id,
                    "error.type": str(timing.attributes["status"]),
                }
                self._emit(SANDBOX_LOST, record.call, lost, SeverityNumber.WARN)
            case _:
                pass

    def _emit_turn(self, turn: TurnRecord) -> None:
        if self._with_details:
            details: dict[str, AnyValue] = {**turn.start_attributes(), **turn.end_attributes()}
            if turn.error:
                details["error.type"] = turn.error
            if self._with_content:
                details |= turn.content
            self._emit(INFERENCE_DETAILS, turn, details, SeverityNumber.INFO)
        if turn.error and turn.error != "cancelled":
            self._emit(OPERATION_EXCEPTION, turn, {"exception.type": turn.error}, SeverityNumber.WARN)

    def _emit(
        self, name: str, record: SpanRecord, attributes: dict[str, AnyValue], severity: SeverityNumber
    ) -> None:
        self._logger.emit(
            timestamp=record.started_at_ns + record.duration_ns,
            context=record.as_context(),
            severity_number=severity,
            event_name=name,
            attributes=attributes,
        )
