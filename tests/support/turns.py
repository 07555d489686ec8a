"""Turns of models as telemetry sees them, without a model; imports `protocol` and `telemetry`."""

from array import array

from fumehood.protocol.models import ModelRequest
from fumehood.telemetry.seen import TurnSeen


def turn_of(request: ModelRequest, server: tuple[str, int] | None = None) -> TurnSeen:
    """One that begins now. When its pieces come is noted, as it is where metrics are sent."""
    seen = TurnSeen.of(request, server)
    seen.moments = array("q") if request.streamed else None
    return seen
