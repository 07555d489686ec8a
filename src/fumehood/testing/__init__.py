"""Doubles for the tests of whoever builds on Fumehood; imports `interfaces`, `protocol` and the standard library.

docs/testing.md shows how they are used. The conformance kit for implementations of one's own is in
`fumehood.testing.sandbox_kit`, which needs pytest and is not imported here.
"""

from fumehood.testing.clock import FakeClock
from fumehood.testing.memory_store import MemoryBlobs, MemoryStore
from fumehood.testing.scripted import (
    Action,
    DeleteFile,
    Expected,
    ScriptedSandbox,
    ScriptedSandboxes,
    Step,
    WriteFile,
)

__all__ = [
    "Action",
    "DeleteFile",
    "Expected",
    "FakeClock",
    "MemoryBlobs",
    "MemoryStore",
    "ScriptedSandbox",
    "ScriptedSandboxes",
    "Step",
    "WriteFile",
]
