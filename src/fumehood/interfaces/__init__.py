"""The seams of Fumehood: Protocols between its packages, each small enough to implement or fake.

Every implementation passes the kit of its seam in `fumehood.testing.conformance_kits`. Services raise `ApiError`,
sandboxes raise `SandboxError`; the docstring of each method says which.
"""

# isort: off

# Requests and time
from fumehood.interfaces.callers import Caller  # who sends a request
from fumehood.interfaces.clock import Clock  # time, as tests control it

# The engine, as the gateway uses it
from fumehood.interfaces.response_runs import (
    ReadableRun,  # a run as a request reads it
    ReserveMemory,  # callback that accounts for memory
    Run,  # a response in progress
    RunEventReader,  # a position in the event log of a run
    RunService,  # starts runs
)

# Models, as the engine uses them
from fumehood.interfaces.models import (
    AcceptBatch,  # callback that consumes events as they arrive
    DegradedUpstream,  # a model server that cannot serve now
    ModelBackend,  # a model server
    ModelEventStream,  # the events of one turn
    ModelProvider,  # backends by model name
)

# Models, as the gateway passes requests through to them
from fumehood.interfaces.passthrough import (
    PassthroughEndpoint,  # an endpoint of a model server
    PassthroughProvider,  # sends requests to the server of their model
    PassthroughRequest,  # a request as the client sent it
    PassthroughResponse,  # the server's response
)

# Hosted tools, as the engine uses them
from fumehood.interfaces.tools import (
    AdditionalItem,  # a further item of a call
    ConfiguredTool,  # a tool as one request configures it
    HostedTool,  # a tool that the gateway runs
    ToolCallContext,  # circumstances of a call
    ToolCallResult,  # end of a call
    ToolCallSession,  # one call
    ToolCallStep,  # events, or the result
    CompactedToolState,  # what survives compaction
)

# Containers and sandboxes
from fumehood.interfaces.containers import (
    CollectedFiles,  # files that executions changed
    Container,  # an open container
    ContainerEvent,  # events of an execution
    ContainerService,  # containers, their files and their expiry
    ExecutionStarted,  # the sandbox has accepted the execution
    UnlistedFiles,  # what a sandbox has besides the listed files
)
from fumehood.interfaces.sandboxes import (
    Sandbox,  # runs code
    SandboxProvider,  # creates and finds sandboxes
    SandboxRef,  # how to find a sandbox again
)

# Files
from fumehood.interfaces.files import (
    AttachmentLoader,  # files and images of inputs
    FileService,  # the Files API
)

# Storage
from fumehood.interfaces.blobs import (
    BeforeCommit,  # called before blobs become visible
    BlobRef,  # name and size of a blob
    BlobStore,  # contents by hash
    GarbageCollectedBlobStore,  # blobs that live while a record refers to them
)
from fumehood.interfaces.sealing import (
    MAX_SEALED_BYTES,  # the longest content of a seal
    InvalidSeal,  # raised by `Sealer.unseal`
    Sealer,  # encrypts state that clients carry
)
from fumehood.interfaces.store import (
    ApiKeyStore,  # API keys
    UnreferencedBlobFinder,  # which blobs records refer to
    ContainerFileRecordStore,  # files in containers
    ContainerStore,  # containers
    ConversationStore,  # conversations
    FileTotals,  # number and size of files
    IdempotencyClaim,  # what an idempotency key stands for
    IdempotencyStore,  # idempotency keys
    ResponseLease,  # the right to write to a response
    ResponseLeaseLost,  # raised when a lease is not valid any more
    ResponseStore,  # responses and leases
    Store,  # all of them, in one database
    UploadedFileRecordStore,  # uploaded files
)

__all__ = [
    "MAX_SEALED_BYTES",
    "AcceptBatch",
    "AdditionalItem",
    "ApiKeyStore",
    "AttachmentLoader",
    "BeforeCommit",
    "BlobRef",
    "BlobStore",
    "Caller",
    "Clock",
    "CollectedFiles",
    "CompactedToolState",
    "ConfiguredTool",
    "Container",
    "ContainerEvent",
    "ContainerFileRecordStore",
    "ContainerService",
    "ContainerStore",
    "ConversationStore",
    "DegradedUpstream",
    "ExecutionStarted",
    "FileService",
    "FileTotals",
    "GarbageCollectedBlobStore",
    "HostedTool",
    "IdempotencyClaim",
    "IdempotencyStore",
    "InvalidSeal",
    "ModelBackend",
    "ModelEventStream",
    "ModelProvider",
    "PassthroughEndpoint",
    "PassthroughProvider",
    "PassthroughRequest",
    "PassthroughResponse",
    "ReadableRun",
    "ReserveMemory",
    "ResponseLease",
    "ResponseLeaseLost",
    "ResponseStore",
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
    "UnlistedFiles",
    "UnreferencedBlobFinder",
    "UploadedFileRecordStore",
]
