"""The table of HTTP operations: routes, OpenAPI and tests are generated from it."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from fumehood.protocol.sandbox.sandbox_messages import (
    ArchiveFormat,
    ExecuteRequest,
    FileEntry,
    FileListing,
    InterruptResponse,
    OneShotRequest,
    OneShotResponse,
    ReadFilesRequest,
    ResourceName,
    SandboxInfo,
    SandboxList,
    SandboxSpec,
    ServerHealth,
    Tenant,
    UnpackSummary,
    WriteFilesSummary,
)

type HttpMethod = Literal["GET", "PUT", "POST", "DELETE"]


@dataclass(frozen=True, slots=True)
class OperationParameter:
    """`schema` is a JSON schema, or a type to generate one from."""

    name: str
    location: Literal["path", "query"]
    description: str
    schema: object
    required: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiOperation:
    """One method on one path of the sandbox server.

    handler: the method of the application that serves it.
    body: a type for JSON, a media type for bytes, None for no body.
    responses: status and type of each success; a string is a media type, None no body.
    errors: the error statuses, besides those of every operation.
    accepts_metrics_token: whether the token for metrics is enough.
    """

    method: HttpMethod
    path: str
    handler: str
    summary: str
    parameters: tuple[OperationParameter, ...] = ()
    body: object = None
    body_optional: bool = False
    responses: dict[int, object] = field(default_factory=dict[int, object])
    errors: tuple[int, ...] = ()
    protected: bool = True
    accepts_metrics_token: bool = False


OCTET_STREAM = "application/octet-stream"
NDJSON = "application/x-ndjson"
PROMETHEUS = "text/plain"
ARCHIVE_FORMATS: tuple[ArchiveFormat, ...] = get_args(ArchiveFormat.__value__)

_ID = OperationParameter("id", "path", "The sandbox's name, chosen by the caller.", ResourceName)
_PATH = OperationParameter(
    "path",
    "path",
    "Percent-encoded UTF-8, below /mnt/data; slashes need no encoding.",
    {"type": "string", "minLength": 1},
)

OPERATIONS: tuple[ApiOperation, ...] = (
    ApiOperation(
        method="POST",
        path="/sandboxes/{id}/execute",
        handler="execute",
        summary="Run code in a sandbox and stream its events, one JSON object per line, the end last.",
        parameters=(_ID,),
        body=ExecuteRequest,
        responses={200: NDJSON},
        errors=(404, 408, 409, 410, 413, 429),
    ),
    ApiOperation(
        method="PUT",
        path="/sandboxes/{id}",
        handler="put_sandbox",
        summary="Create a sandbox, or return the one of that name and specification.",
        parameters=(_ID,),
        body=SandboxSpec,
        body_optional=True,
        responses={201: SandboxInfo, 200: SandboxInfo},
        errors=(408, 409, 413, 429),
    ),
    ApiOperation(
        method="GET",
        path="/sandboxes/{id}",
        handler="get_sandbox",
        summary="Read a live sandbox.",
        parameters=(_ID,),
        responses={200: SandboxInfo},
        errors=(404, 410),
    ),
    ApiOperation(
        method="DELETE",
        path="/sandboxes/{id}",
        handler="delete_sandbox",
        summary="Delete a sandbox and its files; a sandbox that does not exist is no error.",
        parameters=(_ID,),
        responses={204: None},
    ),
    ApiOperation(
        method="GET",
        path="/sandboxes",
        handler="list_sandboxes",
        summary="List live sandboxes, of all tenants or of one.",
        parameters=(OperationParameter("tenant", "query", "Only sandboxes of this tenant.", Tenant),),
        responses={200: SandboxList},
    ),
    ApiOperation(
        method="GET",
        path="/sandboxes/{id}/executions/{execution_id}",
        handler="follow",
        summary="Read the events of an execution again, all or from a given number on.",
        parameters=(
            _ID,
            OperationParameter("execution_id", "path", "The execution's id.", ResourceName),
            OperationParameter(
                "after",
                "query",
                "The number of the last event that is known already; they count from 0.",
                {"type": "integer", "minimum": -1, "default": -1},
            ),
        ),
        responses={200: NDJSON},
        errors=(404, 410),
    ),
    ApiOperation(
        method="POST",
        path="/sandboxes/{id}/interrupt",
        handler="interrupt",
        summary="Interrupt the running execution, or the given one, as Ctrl-C would.",
        parameters=(_ID, OperationParameter("execution_id", "query", "The execution to stop.", ResourceName)),
        responses={200: InterruptResponse},
        errors=(404, 410),
    ),
    ApiOperation(
        method="GET",
        path="/sandboxes/{id}/files",
        handler="list_files",
        summary="List regular files below /mnt/data, or what changed since an earlier listing.",
        parameters=(
            _ID,
            OperationParameter(
                "since", "query", "The mark of an earlier listing.", {"type": "string", "maxLength": 1024}
            ),
        ),
        responses={200: FileListing},
        errors=(404, 410),
    ),
    ApiOperation(
        method="GET",
        path="/sandboxes/{id}/files/{path}",
        handler="read_file",
        summary="Read a regular file.",
        parameters=(_ID, _PATH),
        responses={200: OCTET_STREAM},
        errors=(404, 410),
    ),
    ApiOperation(
        method="PUT",
        path="/sandboxes/{id}/files/{path}",
        handler="write_file",
        summary="Write a file atomically; missing directories are created.",
        parameters=(
            _ID,
            _PATH,
            OperationParameter(
                "executable",
                "query",
                "Whether the file may be executed.",
                {"type": "boolean", "default": False},
            ),
        ),
        body=OCTET_STREAM,
        body_optional=True,
        responses={200: FileEntry},
        errors=(404, 410, 413),
    ),
    ApiOperation(
        method="DELETE",
        path="/sandboxes/{id}/files/{path}",
        handler="delete_file",
        summary="Delete a file.",
        parameters=(_ID, _PATH),
        responses={204: None},
        errors=(404, 410),
    ),
    ApiOperation(
        method="POST",
        path="/sandboxes/{id}/read",
        handler="read_files",
        summary="Read many small files in one response; each is its content or an error.",
        parameters=(_ID,),
        body=ReadFilesRequest,
        responses={200: OCTET_STREAM},
        errors=(404, 408, 410, 413),
    ),
    ApiOperation(
        method="POST",
        path="/sandboxes/{id}/write",
        handler="write_files",
        summary="Write many files in one request; files that fail are reported, the others are written.",
        parameters=(_ID,),
        body=OCTET_STREAM,
        responses={200: WriteFilesSummary},
        errors=(404, 410, 413),
    ),
    ApiOperation(
        method="POST",
        path="/sandboxes/{id}/unpack",
        handler="unpack",
        summary="Unpack an archive below /mnt/data, all or nothing.",
        parameters=(
            _ID,
            OperationParameter("kind", "query", "The archive's format.", ArchiveFormat, required=True),
            OperationParameter(
                "into", "query", "The directory to unpack into.", {"type": "string", "default": ""}
            ),
        ),
        body=OCTET_STREAM,
        responses={200: UnpackSummary},
        errors=(404, 410, 413),
    ),
    ApiOperation(
        method="POST",
        path="/execute",
        handler="execute_once",
        summary="Run code in a fresh sandbox that ends with it: files in, output and files out.",
        body=OneShotRequest,
        responses={200: OneShotResponse},
        errors=(408, 413, 429),
    ),
    ApiOperation(
        method="GET",
        path="/health",
        handler="health",
        summary="Whether the server can create sandboxes; without the token only the status.",
        responses={200: ServerHealth},
        protected=False,
    ),
    ApiOperation(
        method="GET",
        path="/metrics",
        handler="metrics",
        summary="Metrics for Prometheus.",
        responses={200: PROMETHEUS},
        accepts_metrics_token=True,
    ),
    ApiOperation(
        method="GET",
        path="/openapi.json",
        handler="openapi",
        summary="This document.",
        responses={200: "application/json"},
    ),
)
