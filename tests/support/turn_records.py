"""Turns of models as telemetry sees them, without a model."""

from array import array

from fumehood.protocol.model_turns import ModelRequest
from fumehood.telemetry.span_records import TurnRecord


def start_turn(request: ModelRequest, server: tuple[str, int] | None = None) -> TurnRecord:
    """One that begins now. When its pieces come is noted, as it is where metrics are sent."""
    seen = TurnRecord.start(request, server)
    seen.chunk_times = array("q") if request.streamed else None
    return seen
