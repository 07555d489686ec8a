"""Doubles for the tests of whoever builds on Fumehood; imports `interfaces`, `protocol` and the standard library.

docs/testing.md shows how they are used. The conformance kits for implementations of one's own are the modules whose
names end in `_kit`, which need pytest and are not imported here.
"""

from fumehood.testing.clock import FakeClock
from fumehood.testing.memory_blobs import MemoryBlobs
from fumehood.testing.memory_store import MemoryStore
from fumehood.testing.scripted import (
    Action,
    DeleteFile,
    Expected,
    ScriptedSandbox,
    ScriptedSandboxes,
    Step,
    WriteFile,
)
from fumehood.testing.scripted_model import (
    Beat,
    Call,
    ScriptedModel,
    ScriptedModels,
    Turn,
    calls,
    refuses,
    says,
    thinks,
)
from fumehood.testing.scripted_tool import Answer, ScriptedTool
from fumehood.testing.sealing import PlainSealer

__all__ = [
    "Action",
    "Answer",
    "Beat",
    "Call",
    "DeleteFile",
    "Expected",
    "FakeClock",
    "MemoryBlobs",
    "MemoryStore",
    "PlainSealer",
    "ScriptedModel",
    "ScriptedModels",
    "ScriptedSandbox",
    "ScriptedSandboxes",
    "ScriptedTool",
    "Step",
    "Turn",
    "WriteFile",
    "calls",
    "refuses",
    "says",
    "thinks",
]
