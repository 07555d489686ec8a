"""The seams of the server; every implementation passes the kit of its seam (`fumehood.testing.kits`)."""

from fumehood.interfaces.blobs import BlobRef, BlobStore, ReferencedBlobs
from fumehood.interfaces.callers import Caller
from fumehood.interfaces.clock import Clock
from fumehood.interfaces.containers import (
    CollectedFiles,
    Container,
    ContainerEvent,
    ContainerService,
    ExecutionStarted,
)
from fumehood.interfaces.files import AttachmentLoader, FileService
from fumehood.interfaces.models import AcceptBatch, ModelBackend, ModelEventStream, ModelProvider
from fumehood.interfaces.runs import ReserveMemory, Run, RunEventReader, RunService
from fumehood.interfaces.sandboxes import Sandbox, SandboxProvider, SandboxRef
from fumehood.interfaces.sealing import InvalidSeal, Sealer
from fumehood.interfaces.store import FileTotals, IdempotencyClaim, Lease, LeaseLost, Store
from fumehood.interfaces.tools import (
    AdditionalItem,
    ConfiguredTool,
    HostedTool,
    ToolCallContext,
    ToolCallResult,
    ToolCallSession,
    ToolCallStep,
    ToolStateSnapshot,
)

__all__ = [
    "AcceptBatch",
    "AdditionalItem",
    "AttachmentLoader",
    "BlobRef",
    "BlobStore",
    "Caller",
    "Clock",
    "CollectedFiles",
    "ConfiguredTool",
    "Container",
    "ContainerEvent",
    "ContainerService",
    "ExecutionStarted",
    "FileService",
    "FileTotals",
    "HostedTool",
    "IdempotencyClaim",
    "InvalidSeal",
    "Lease",
    "LeaseLost",
    "ModelBackend",
    "ModelEventStream",
    "ModelProvider",
    "ReferencedBlobs",
    "ReserveMemory",
    "Run",
    "RunEventReader",
    "RunService",
    "Sandbox",
    "SandboxProvider",
    "SandboxRef",
    "Sealer",
    "Store",
    "ToolCallContext",
    "ToolCallResult",
    "ToolCallSession",
    "ToolCallStep",
    "ToolStateSnapshot",
]
