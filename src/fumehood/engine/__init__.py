"""The loop: one run, one path."""

from fumehood.engine.event_log import LagLimits
from fumehood.engine.loop import LoopLimits
from fumehood.engine.run_service import EngineRunService

__all__ = [
    "EngineRunService",
    "LagLimits",
    "LoopLimits",
]
