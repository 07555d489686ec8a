"""Fakes of the seams in `fumehood.interfaces`, for tests of code that uses Fumehood.

`fumehood.testing.conformance_kits` has conformance tests for other implementations of the seams; they need pytest and
are not imported here. See docs/testing.md.
"""

from fumehood.testing.fakes.fake_clock import FakeClock
from fumehood.testing.fakes.memory_blob_store import MemoryBlobStore
from fumehood.testing.fakes.memory_store import MemoryStore
from fumehood.testing.fakes.plain_sealer import PlainSealer
from fumehood.testing.fakes.scripted_model import (
    ScriptedFunctionCall,
    ScriptedModel,
    ScriptedTurn,
    SingleBackendProvider,
    TurnStep,
    calls,
    refuses,
    says,
    thinks,
)
from fumehood.testing.fakes.scripted_sandbox import (
    DeleteFile,
    ExpectedCode,
    SandboxAction,
    ScriptedExecution,
    ScriptedSandbox,
    ScriptedSandboxProvider,
    WriteFile,
)
from fumehood.testing.fakes.scripted_tool import ScriptedTool, ScriptedToolAnswer

__all__ = [
    "DeleteFile",
    "ExpectedCode",
    "FakeClock",
    "MemoryBlobStore",
    "MemoryStore",
    "PlainSealer",
    "SandboxAction",
    "ScriptedExecution",
    "ScriptedFunctionCall",
    "ScriptedModel",
    "ScriptedSandbox",
    "ScriptedSandboxProvider",
    "ScriptedTool",
    "ScriptedToolAnswer",
    "ScriptedTurn",
    "SingleBackendProvider",
    "TurnStep",
    "WriteFile",
    "calls",
    "refuses",
    "says",
    "thinks",
]
