"""Span records without a model, and those that are still alive."""

import gc
from array import array

from fumehood.protocol.model_turns import ModelRequest
from fumehood.telemetry.operation_records import SpanRecord, TurnRecord


def start_turn(request: ModelRequest, server: tuple[str, int] | None = None) -> TurnRecord:
    """Start a turn that records when its events arrive, as it does where metrics are exported."""
    record = TurnRecord.start(request, server)
    record.chunk_times = array("q") if request.streamed else None
    return record


def live_records() -> list[SpanRecord]:
    gc.collect()
    return [found for found in gc.get_objects() if isinstance(found, SpanRecord)]
