"""What the HTTP server offers, as a table: routes, OpenAPI and tests are made from it; imports `fumehood.protocol`."""

from dataclasses import dataclass, field
from typing import Literal, get_args

import msgspec

from fumehood.protocol.sandbox import (
    ArchiveFormat,
    ExecuteRequest,
    FileEntry,
    FileListing,
    Health,
    Name,
    OneShotRequest,
    OneShotResponse,
    ReadRequest,
    SandboxInfo,
    SandboxSpec,
    Tenant,
    Unpacked,
    Written,
)

type Method = Literal["GET", "PUT", "POST", "DELETE"]


class SandboxList(msgspec.Struct, frozen=True, kw_only=True):
    """Every sandbox that lives."""

    sandboxes: list[SandboxInfo]


class Interrupted(msgspec.Struct, frozen=True, kw_only=True):
    """Whether there was something to stop."""

    interrupted: bool


@dataclass(frozen=True, slots=True)
class Parameter:
    """`schema` is a JSON schema, or a type to make one from."""

    name: str
    place: Literal["path", "query"]
    description: str
    schema: object
    required: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method on one path of the sandbox server.

    handler: the method of the application that serves it.
    body: a type for JSON, a media type for bytes, None for no body.
    answers: status and type of each success; a string is a media type, None no body.
    errors: the statuses of refusals, besides those that every operation may give.
    for_metrics: whether the token for metrics is enough.
    """

    method: Method
    path: str
    handler: str
    summary: str
    parameters: tuple[Parameter, ...] = ()
    body: object = None
    body_optional: bool = False
    answers: dict[int, object] = field(default_factory=dict[int, object])
    errors: tuple[int, ...] = ()
    protected: bool = True
    for_metrics: bool = False


BYTES = "application/octet-stream"
NDJSON = "application/x-ndjson"
PROMETHEUS = "text/plain"
ARCHIVES: tuple[ArchiveFormat, ...] = get_args(ArchiveFormat.__value__)

_ID = Parameter("id", "path", "The sandbox's name, chosen by the caller.", Name)
_PATH = Parameter(
    "path",
    "path",
    "Percent-encoded UTF-8, below /mnt/data; slashes may stand as they are.",
    {"type": "string", "minLength": 1},
)

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        method="POST",
        path="/sandboxes/{id}/execute",
        handler="execute",
        summary="Run code in a sandbox and stream its events, one JSON object a line, the end last.",
        parameters=(_ID,),
        body=ExecuteRequest,
        answers={200: NDJSON},
        errors=(404, 408, 409, 410, 413, 429),
    ),
    Operation(
        method="PUT",
        path="/sandboxes/{id}",
        handler="put_sandbox",
        summary="Make a sandbox, or find the one of that name and specification.",
        parameters=(_ID,),
        body=SandboxSpec,
        body_optional=True,
        answers={201: SandboxInfo, 200: SandboxInfo},
        errors=(408, 409, 413, 429),
    ),
    Operation(
        method="GET",
        path="/sandboxes/{id}",
        handler="get_sandbox",
        summary="A sandbox that lives.",
        parameters=(_ID,),
        answers={200: SandboxInfo},
        errors=(404, 410),
    ),
    Operation(
        method="DELETE",
        path="/sandboxes/{id}",
        handler="delete_sandbox",
        summary="End a sandbox with all its files; one that is not there is no error.",
        parameters=(_ID,),
        answers={204: None},
    ),
    Operation(
        method="GET",
        path="/sandboxes",
        handler="list_sandboxes",
        summary="All sandboxes that live, or those of one tenant.",
        parameters=(Parameter("tenant", "query", "Only this tenant's.", Tenant),),
        answers={200: SandboxList},
    ),
    Operation(
        method="GET",
        path="/sandboxes/{id}/executions/{execution_id}",
        handler="follow",
        summary="The events of an execution again, or from a certain one on.",
        parameters=(
            _ID,
            Parameter("execution_id", "path", "The execution's id.", Name),
            Parameter(
                "after",
                "query",
                "The number of the last event that is known already; they count from 0.",
                {"type": "integer", "minimum": -1, "default": -1},
            ),
        ),
        answers={200: NDJSON},
        errors=(404, 410),
    ),
    Operation(
        method="POST",
        path="/sandboxes/{id}/interrupt",
        handler="interrupt",
        summary="Stop the execution that runs, or a certain one, as a keyboard interrupt would.",
        parameters=(_ID, Parameter("execution_id", "query", "The execution to stop.", Name)),
        answers={200: Interrupted},
        errors=(404, 410),
    ),
    Operation(
        method="GET",
        path="/sandboxes/{id}/files",
        handler="list_files",
        summary="The regular files below /mnt/data, or what changed since an earlier listing.",
        parameters=(
            _ID,
            Parameter(
                "since", "query", "The mark of an earlier listing.", {"type": "string", "maxLength": 1024}
            ),
        ),
        answers={200: FileListing},
        errors=(404, 410),
    ),
    Operation(
        method="GET",
        path="/sandboxes/{id}/files/{path}",
        handler="read_file",
        summary="The content of one regular file.",
        parameters=(_ID, _PATH),
        answers={200: BYTES},
        errors=(404, 410),
    ),
    Operation(
        method="PUT",
        path="/sandboxes/{id}/files/{path}",
        handler="write_file",
        summary="Put a file in place, whole or not at all; directories are made as needed.",
        parameters=(
            _ID,
            _PATH,
            Parameter(
                "executable",
                "query",
                "Whether the file may be executed.",
                {"type": "boolean", "default": False},
            ),
        ),
        body=BYTES,
        body_optional=True,
        answers={200: FileEntry},
        errors=(404, 410, 413),
    ),
    Operation(
        method="DELETE",
        path="/sandboxes/{id}/files/{path}",
        handler="delete_file",
        summary="Remove one file.",
        parameters=(_ID, _PATH),
        answers={204: None},
        errors=(404, 410),
    ),
    Operation(
        method="POST",
        path="/sandboxes/{id}/read",
        handler="read_files",
        summary="The content of many small files, one after another, or why one has none.",
        parameters=(_ID,),
        body=ReadRequest,
        answers={200: BYTES},
        errors=(404, 408, 410, 413),
    ),
    Operation(
        method="POST",
        path="/sandboxes/{id}/write",
        handler="write_files",
        summary="Put many files in place; one that cannot be is told, and the rest is there.",
        parameters=(_ID,),
        body=BYTES,
        answers={200: Written},
        errors=(404, 410, 413),
    ),
    Operation(
        method="POST",
        path="/sandboxes/{id}/unpack",
        handler="unpack",
        summary="Unpack an archive below /mnt/data, all of it or nothing.",
        parameters=(
            _ID,
            Parameter("kind", "query", "The archive's format.", ArchiveFormat, required=True),
            Parameter("into", "query", "The directory to unpack into.", {"type": "string", "default": ""}),
        ),
        body=BYTES,
        answers={200: Unpacked},
        errors=(404, 410, 413),
    ),
    Operation(
        method="POST",
        path="/execute",
        handler="execute_once",
        summary="Run code in a fresh sandbox that ends with it: files in, output and files out.",
        body=OneShotRequest,
        answers={200: OneShotResponse},
        errors=(408, 413, 429),
    ),
    Operation(
        method="GET",
        path="/health",
        handler="health",
        summary="Whether sandboxes can be made; without the token only the status is told.",
        answers={200: Health},
        protected=False,
    ),
    Operation(
        method="GET",
        path="/metrics",
        handler="metrics",
        summary="Figures for Prometheus.",
        answers={200: PROMETHEUS},
        for_metrics=True,
    ),
    Operation(
        method="GET",
        path="/openapi.json",
        handler="openapi",
        summary="This description.",
        answers={200: "application/json"},
    ),
)
