"""Generates the OpenAPI 3.1 document of the sandbox server from its operations and types."""

from collections.abc import Iterable
from importlib import metadata
from typing import Any

import msgspec

from fumehood.protocol.sandbox.sandbox_errors import SandboxErrorBody
from fumehood.protocol.sandbox.sandbox_messages import ExecutionEvent
from fumehood.sandbox_server.api.http_operations import NDJSON, OPERATIONS, ApiOperation, OperationParameter
from fumehood.sandbox_server.api.sandbox_http_exchange import EXECUTION_HEADER, PROTOCOL_HEADER
from fumehood.sandbox_server.settings import SandboxServerSettings

type JsonObject = dict[str, Any]

_REF = "#/components/schemas/{name}"
_ERROR_DESCRIPTIONS = {
    400: "An invalid parameter or body; `param` names it.",
    401: "No token, or the wrong one.",
    403: "Sent by a web page of another site, or to a name that is not the server's.",
    404: "No such sandbox, execution or file.",
    405: "The path does not support this method.",
    408: "The body took too long to arrive.",
    409: "The id is in use with another specification or request.",
    410: "The sandbox has ended; the message says why.",
    413: "More than a limit allows.",
    415: "An unsupported Content-Type.",
    429: "Capacity or a quota is exhausted; retry later.",
    500: "The server failed.",
    503: "The server is starting or stopping, or a sandbox failed to start.",
}


def build_document(settings: SandboxServerSettings, *, protected: bool) -> JsonObject:
    """The whole document; `protected` says whether a token is required."""
    schemas, components = _build_schemas()
    paths: dict[str, JsonObject] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _describe_operation(
            operation, schemas, settings, protected=protected
        )
    document: JsonObject = {
        "openapi": "3.1.0",
        "info": {
            "title": "Fumehood sandbox server",
            "version": metadata.version("fumehood"),
            "description": "Runs Python in isolated sandboxes. docs/sandbox-protocol.md has the rules in words.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {"schemas": components},
    }
    if protected:
        document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    return document


def _list_types() -> list[Any]:
    kinds: list[Any] = [ExecutionEvent, SandboxErrorBody]
    for operation in OPERATIONS:
        kinds += [operation.body, *operation.responses.values()]
        kinds += [parameter.schema for parameter in operation.parameters]
    return [kind for kind in kinds if kind is not None and not isinstance(kind, str | dict)]


def _build_schemas() -> tuple[dict[int, JsonObject], JsonObject]:
    """The schema of each type by its `id`, and the schemas they refer to."""
    kinds = _list_types()
    generated, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    return {id(kind): schema for kind, schema in zip(kinds, generated, strict=True)}, components


def _describe_operation(
    operation: ApiOperation,
    schemas: dict[int, JsonObject],
    settings: SandboxServerSettings,
    *,
    protected: bool,
) -> JsonObject:
    description: JsonObject = {
        "operationId": operation.handler,
        "summary": operation.summary,
        "parameters": [
            *(_describe_parameter(parameter, schemas) for parameter in operation.parameters),
            _describe_version_header(),
        ],
        "responses": dict(_describe_responses(operation, schemas, protected=protected)),
    }
    if operation.body is not None:
        description["requestBody"] = _describe_body(operation, schemas, settings)
    if protected:
        description["security"] = [{"token": []}] if operation.protected else [{}, {"token": []}]
    return description


def _describe_parameter(parameter: OperationParameter, schemas: dict[int, JsonObject]) -> JsonObject:
    return {
        "name": parameter.name,
        "in": parameter.location,
        "description": parameter.description,
        "required": parameter.location == "path" or parameter.required,
        "schema": schemas.get(id(parameter.schema), parameter.schema),
    }


def _describe_version_header() -> JsonObject:
    return {
        "name": PROTOCOL_HEADER,
        "in": "header",
        "description": "The protocol version of the caller; must be the server's.",
        "required": False,
        "schema": {"type": "string", "const": "1"},
    }


def _describe_body(
    operation: ApiOperation, schemas: dict[int, JsonObject], settings: SandboxServerSettings
) -> JsonObject:
    if isinstance(operation.body, str):
        content: JsonObject = {operation.body: {"schema": {"type": "string", "format": "binary"}}}
        limit = settings.file_bytes
    else:
        content = {"application/json": {"schema": schemas[id(operation.body)]}}
        limit = settings.one_shot_bytes if operation.handler == "execute_once" else settings.request_bytes
    return {
        "required": not operation.body_optional,
        "description": f"At most {limit} bytes.",
        "content": content,
    }


def _describe_responses(
    operation: ApiOperation, schemas: dict[int, JsonObject], *, protected: bool
) -> Iterable[tuple[str, JsonObject]]:
    headers = {PROTOCOL_HEADER: {"schema": {"type": "string"}}}
    for status, kind in operation.responses.items():
        response: JsonObject = {"description": operation.summary, "headers": headers}
        if isinstance(kind, str):
            response["content"] = {kind: {"schema": _schema_of_media_type(kind)}}
        elif kind is not None:
            response["content"] = {"application/json": {"schema": schemas[id(kind)]}}
        if kind == NDJSON:
            response["description"] = "One event per line; empty lines are keepalives."
            response["headers"] = {**headers, EXECUTION_HEADER: {"schema": {"type": "string"}}}
            response["x-ndjson-schema"] = {"anyOf": schemas[id(ExecutionEvent)]["anyOf"]}
        yield str(status), response
    if operation.handler == "health":
        yield (
            "503",
            {
                "description": "The server is starting or stopping.",
                "content": {"application/json": {"schema": schemas[id(operation.responses[200])]}},
            },
        )
    statuses = {400, *operation.errors}
    if not protected:
        statuses.add(403)
    elif operation.protected:
        statuses.add(401)
    if operation.body is not None and (operation.method == "POST" or not isinstance(operation.body, str)):
        statuses.add(415)
    if operation.handler not in ("health", "metrics", "openapi"):
        statuses |= {500, 503}
    for status in sorted(statuses):
        extra: JsonObject = {"retry-after": {"schema": {"type": "integer"}}} if status == 429 else {}
        yield (
            str(status),
            {
                "description": _ERROR_DESCRIPTIONS[status],
                "headers": {**headers, **extra},
                "content": {"application/json": {"schema": schemas[id(SandboxErrorBody)]}},
            },
        )


def _schema_of_media_type(kind: str) -> JsonObject:
    return {"type": "object"} if kind == "application/json" else {"type": "string"}
