"""The agent loop: turns requests into runs.

A run asks the model for turns, executes hosted tool calls between them, compacts long conversations, and stores the
response. `EngineRunService` starts runs.
"""

from fumehood.engine.agent_loop import LoopLimits
from fumehood.engine.run_event_log import ReaderLagLimits
from fumehood.engine.run_service import EngineRunService

__all__ = [
    "EngineRunService",
    "LoopLimits",
    "ReaderLagLimits",
]
