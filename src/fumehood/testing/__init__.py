"""Doubles for the tests of whoever builds on Fumehood.

docs/testing.md shows how they are used. The conformance kits for implementations of one's own are the modules whose
names end in `_kit`, which need pytest and are not imported here.
"""

from fumehood.testing.fakes.fake_clock import FakeClock
from fumehood.testing.fakes.memory_blob_store import MemoryBlobStore
from fumehood.testing.fakes.memory_store import MemoryStore
from fumehood.testing.fakes.plain_sealer import PlainSealer
from fumehood.testing.fakes.scripted_model import (
    ScriptedFunctionCall,
    ScriptedModel,
    ScriptedModelProvider,
    ScriptedTurn,
    TurnStep,
    calls,
    refuses,
    says,
    thinks,
)
from fumehood.testing.fakes.scripted_sandbox import (
    DeleteFile,
    ExecutionStep,
    ExpectedCode,
    SandboxAction,
    ScriptedSandbox,
    ScriptedSandboxProvider,
    WriteFile,
)
from fumehood.testing.fakes.scripted_tool import ScriptedTool, ToolAnswer

__all__ = [
    "DeleteFile",
    "ExecutionStep",
    "ExpectedCode",
    "FakeClock",
    "MemoryBlobStore",
    "MemoryStore",
    "PlainSealer",
    "SandboxAction",
    "ScriptedFunctionCall",
    "ScriptedModel",
    "ScriptedModelProvider",
    "ScriptedSandbox",
    "ScriptedSandboxProvider",
    "ScriptedTool",
    "ScriptedTurn",
    "ToolAnswer",
    "TurnStep",
    "WriteFile",
    "calls",
    "refuses",
    "says",
    "thinks",
]
