"""Describes the gateway as OpenAPI 3.1, from its own routes and types."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Union, get_args

import msgspec
from msgspec import UNSET

from fumehood import __version__
from fumehood.http_server.route_suggestions import format_path
from fumehood.protocol.file_types import OCTET_STREAM
from fumehood.protocol.model_turns import ModelCard, ModelList
from fumehood.protocol.openai import stream_events
from fumehood.protocol.openai.api_errors import ErrorBody
from fumehood.protocol.openai.container_objects import (
    ContainerFileObject,
    ContainerObject,
    CreateContainer,
    CreateContainerFile,
)
from fumehood.protocol.openai.file_objects import FileObject, UploadPurpose
from fumehood.protocol.openai.passthrough_requests import CreateChatCompletion, CreateEmbeddings
from fumehood.protocol.openai.response_projection import INCLUDE_VALUES
from fumehood.protocol.openai.responses import (
    CompactedResponse,
    CreateResponse,
    DeletedObject,
    InputTokenCount,
    ListPage,
    Response,
)

type JsonObject = dict[str, Any]

_SCHEMA_REF = "#/components/schemas/{name}"
_PATH_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
_ERROR_DESCRIPTIONS = {
    400: "Invalid parameter or body; `param` names it.",
    401: "Missing or unknown API key.",
    403: "Unknown `Host` (without keys), a web page that is not allowed, or a key without the required scope.",
    404: "This tenant has no object with that id.",
    405: "Method not allowed on this path.",
    408: "Request body timeout.",
    409: "The Idempotency-Key was used for another request, or its response is gone.",
    413: "The body is too large.",
    416: "The requested range is outside the file.",
    426: "The request needs an upgrade to WebSocket.",
    429: "Limit reached; retry later.",
    500: "Internal server error.",
    502: "The model server failed.",
    503: "The gateway, or something that it needs, is unavailable.",
    504: "The model server did not answer in time.",
}
_COMMON_ERRORS = (400, 401, 403, 405, 500, 503)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenApiOperation:
    """The description of one route.

    response: a type, or a media type.
    form: fields of a multipart form; those without a default are required. With a `body`, either can be sent.
    supports_range: the response supports Range.
    errors: statuses besides `_COMMON_ERRORS`.
    can_stream: creates a response: supports `stream` and Idempotency-Key.
    relays_stream: with `stream`, sends the model server's events.
    is_websocket: upgrades the connection to WebSocket.
    is_public: needs no key.
    """

    summary: str
    response: Any = "application/json"
    body: type[msgspec.Struct] | None = None
    form: JsonObject | None = None
    supports_range: bool = False
    query: Sequence[str] = ()
    errors: Sequence[int] = ()
    can_stream: bool = False
    relays_stream: bool = False
    is_websocket: bool = False
    is_public: bool = False


_MODEL_ERRORS = (404, 408, 413, 429, 502, 504)
_PAGE_PARAMETERS = ("after", "before", "limit", "order")
_UPLOAD_FORM: JsonObject = {
    "file": {"type": "string", "contentMediaType": OCTET_STREAM},
    "purpose": {"type": "string", "enum": [*get_args(UploadPurpose.__value__)]},
    "expires_after[anchor]": {"type": "string", "const": "created_at"},
    "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2_592_000},
}
_CONTAINER_FILE_FORM: JsonObject = {
    "file": {"type": "string", "contentMediaType": OCTET_STREAM},
    "unpack": {"type": "string", "enum": ["true", "false"], "default": "false"},
}
OPERATIONS: dict[tuple[str, str], OpenApiOperation] = {
    ("POST", "/v1/responses"): OpenApiOperation(
        summary="Create a response; with `stream`, as events.",
        body=CreateResponse,
        response=Response,
        errors=(*_MODEL_ERRORS, 409),
        can_stream=True,
    ),
    ("GET", "/v1/responses"): OpenApiOperation(
        summary="Create many responses on one WebSocket connection.", is_websocket=True, errors=(426,)
    ),
    ("POST", "/v1/responses/input_tokens"): OpenApiOperation(
        summary="Count the input tokens of a request.",
        body=CreateResponse,
        response=InputTokenCount,
        errors=_MODEL_ERRORS,
    ),
    ("POST", "/v1/responses/compact"): OpenApiOperation(
        summary="Compact a conversation.",
        body=CreateResponse,
        response=CompactedResponse,
        errors=_MODEL_ERRORS,
    ),
    ("GET", "/v1/responses/{response_id}"): OpenApiOperation(
        summary="Get a stored response.", response=Response, query=("include", "stream"), errors=(404,)
    ),
    ("DELETE", "/v1/responses/{response_id}"): OpenApiOperation(
        summary="Delete a response.", response=DeletedObject, errors=(404,)
    ),
    ("POST", "/v1/responses/{response_id}/cancel"): OpenApiOperation(
        summary="Cancel a background response.", response=Response, errors=(404,)
    ),
    ("GET", "/v1/responses/{response_id}/input_items"): OpenApiOperation(
        summary="List the input items of a response.",
        response=ListPage,
        query=("include", *_PAGE_PARAMETERS),
        errors=(404,),
    ),
    ("POST", "/v1/chat/completions"): OpenApiOperation(
        summary="Create a chat completion; passed through to the model server.",
        body=CreateChatCompletion,
        errors=_MODEL_ERRORS,
        relays_stream=True,
    ),
    ("POST", "/v1/embeddings"): OpenApiOperation(
        summary="Create embeddings; passed through to the model server.",
        body=CreateEmbeddings,
        errors=_MODEL_ERRORS,
    ),
    ("GET", "/v1/models"): OpenApiOperation(summary="List models.", response=ModelList),
    ("GET", "/v1/models/{model:path}"): OpenApiOperation(
        summary="Get a model.", response=ModelCard, errors=(404,)
    ),
    ("POST", "/v1/containers"): OpenApiOperation(
        summary="Create a container.",
        body=CreateContainer,
        response=ContainerObject,
        errors=(408, 413, 429),
    ),
    ("GET", "/v1/containers"): OpenApiOperation(
        summary="List containers, including expired ones.",
        response=ListPage,
        query=(*_PAGE_PARAMETERS, "name"),
    ),
    ("GET", "/v1/containers/{container_id}"): OpenApiOperation(
        summary="Get a container.", response=ContainerObject, errors=(404,)
    ),
    ("DELETE", "/v1/containers/{container_id}"): OpenApiOperation(
        summary="Delete a container with its files; stop what runs in it.",
        response=DeletedObject,
        errors=(404,),
    ),
    ("POST", "/v1/containers/{container_id}/files"): OpenApiOperation(
        summary="Add a file to a container: from the request, or an uploaded one.",
        body=CreateContainerFile,
        form=_CONTAINER_FILE_FORM,
        response=ContainerFileObject,
        errors=(404, 408, 413, 429),
    ),
    ("GET", "/v1/containers/{container_id}/files"): OpenApiOperation(
        summary="List the files of a container; with `unlisted=true`, also what no page shows.",
        response=ListPage,
        query=(*_PAGE_PARAMETERS, "unlisted"),
        errors=(404,),
    ),
    ("GET", "/v1/containers/{container_id}/files/{file_id}"): OpenApiOperation(
        summary="Get a file of a container.", response=ContainerFileObject, errors=(404,)
    ),
    ("DELETE", "/v1/containers/{container_id}/files/{file_id}"): OpenApiOperation(
        summary="Delete a file of a container.", response=DeletedObject, errors=(404,)
    ),
    ("GET", "/v1/containers/{container_id}/files/{file_id}/content"): OpenApiOperation(
        summary="Download a file of a container.",
        response=OCTET_STREAM,
        errors=(404, 416),
        supports_range=True,
    ),
    ("POST", "/v1/files"): OpenApiOperation(
        summary="Upload a file.", form=_UPLOAD_FORM, response=FileObject, errors=(408, 413, 429)
    ),
    ("GET", "/v1/files"): OpenApiOperation(
        summary="List uploaded files.", response=ListPage, query=(*_PAGE_PARAMETERS, "purpose")
    ),
    ("GET", "/v1/files/{upload_id}"): OpenApiOperation(
        summary="Get an uploaded file.", response=FileObject, errors=(404,)
    ),
    ("DELETE", "/v1/files/{upload_id}"): OpenApiOperation(
        summary="Delete an uploaded file; copies in containers stay.", response=DeletedObject, errors=(404,)
    ),
    ("GET", "/v1/files/{upload_id}/content"): OpenApiOperation(
        summary="Download an uploaded file.",
        response=OCTET_STREAM,
        errors=(404, 416),
        supports_range=True,
    ),
    ("GET", "/healthz"): OpenApiOperation(summary="Liveness.", is_public=True),
    ("GET", "/readyz"): OpenApiOperation(summary="Readiness.", is_public=True),
    ("GET", "/metrics"): OpenApiOperation(summary="Prometheus metrics.", response="text/plain"),
    ("GET", "/openapi.json"): OpenApiOperation(summary="This OpenAPI document.", is_public=True),
}
PUBLIC_PATHS = frozenset(path for (_, path), operation in OPERATIONS.items() if operation.is_public)
"""Paths that need no key: health checks have none."""

_QUERY_PARAMETERS: dict[str, tuple[str, JsonObject]] = {
    "after": ("The id after which the page starts.", {"type": "string"}),
    "before": ("The id before which the page ends.", {"type": "string"}),
    "limit": ("Page size.", {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}),
    "order": ("Sort order by creation time.", {"type": "string", "enum": ["asc", "desc"], "default": "desc"}),
    "include": (
        "Additional fields to return.",
        {"type": "array", "items": {"type": "string", "enum": sorted(INCLUDE_VALUES)}},
    ),
    "name": ("Filter by name.", {"type": "string"}),
    "purpose": ("Filter by purpose.", {"type": "string"}),
    "unlisted": (
        "Add links, and files that no page shows.",
        {"type": "string", "enum": ["true", "false"], "default": "false"},
    ),
    "stream": ("Only for background responses.", {"type": "boolean"}),
}

EVENT_TYPES: Sequence[type[stream_events.StreamEvent]] = [
    kind
    for kind in vars(stream_events).values()
    if isinstance(kind, type)
    and issubclass(kind, stream_events.StreamEvent)
    and kind.__struct_config__.tag not in (None, kind.__name__)
]


def build_document(routes: Iterable[tuple[str, str]]) -> JsonObject:
    """The OpenAPI document of these routes; one that is not in OPERATIONS has no summary."""
    described = [
        (method, path, OPERATIONS.get((method, path), OpenApiOperation(summary="")))
        for method, path in routes
    ]
    schemas, components = _build_schemas([operation for _, _, operation in described])
    paths: dict[str, JsonObject] = {}
    for method, path, operation in described:
        paths.setdefault(format_path(path), {})[method.lower()] = _describe_operation(
            path, operation, schemas
        )
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Fumehood gateway",
            "version": __version__,
            "description": "OpenAI's Responses API with a hosted code interpreter; see docs/gateway.md. API keys are "
            "required once the operator has created one.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _build_schemas(operations: Sequence[OpenApiOperation]) -> tuple[dict[Any, JsonObject], JsonObject]:
    """The schema of each type, and the components that they refer to."""
    named = {kind for one in operations for kind in (one.body, one.response) if isinstance(kind, type)}
    kinds: list[Any] = [*sorted(named, key=lambda kind: kind.__name__), ErrorBody, Union[tuple(EVENT_TYPES)]]  # noqa: UP007
    made, components = msgspec.json.schema_components(kinds, ref_template=_SCHEMA_REF)
    for kind in (Response, *EVENT_TYPES):
        # msgspec omits fields with defaults from `required`, but they are always sent.
        always = [each.encode_name for each in msgspec.structs.fields(kind) if each.default is not UNSET]
        required = components[kind.__name__].setdefault("required", [])
        required += [name for name in always if name not in required]
    schemas = dict(zip(kinds[:-1], made, strict=False))
    schemas[stream_events.StreamEvent] = made[-1]
    return schemas, components


def _describe_operation(path: str, operation: OpenApiOperation, schemas: dict[Any, JsonObject]) -> JsonObject:
    described: JsonObject = {
        "summary": operation.summary,
        "parameters": list(_describe_parameters(path, operation)),
        "responses": {str(status): answer for status, answer in _describe_responses(operation, schemas)},
    }
    bodies: JsonObject = {}
    if operation.body is not None:
        bodies["application/json"] = {"schema": schemas[operation.body]}
    if operation.form is not None:
        required = [
            name for name, field in operation.form.items() if "[" not in name and "default" not in field
        ]
        form = {"type": "object", "properties": operation.form, "required": required}
        bodies["multipart/form-data"] = {"schema": form}
    if bodies:
        described["requestBody"] = {"required": True, "content": bodies}
    if operation.is_public:
        described["security"] = []
    return described


def _describe_parameters(path: str, operation: OpenApiOperation) -> Iterator[JsonObject]:
    for name in _PATH_PARAMETER.findall(path):
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    for name in operation.query:
        description, schema = _QUERY_PARAMETERS[name]
        yield {"name": name, "in": "query", "description": description, "schema": schema}
    if operation.can_stream:
        yield {
            "name": "Idempotency-Key",
            "in": "header",
            "description": "A retry with the same key and body within a day gets the same response.",
            "schema": {"type": "string", "pattern": "^[!-~]{1,255}$"},
        }


def _describe_responses(
    operation: OpenApiOperation, schemas: dict[Any, JsonObject]
) -> Iterator[tuple[int, JsonObject]]:
    if operation.is_websocket:
        yield 101, {"description": operation.summary}
    else:
        yield 200, {"description": operation.summary, "content": _describe_content(operation, schemas)}
    if operation.supports_range:
        yield (
            206,
            {
                "description": "The requested range.",
                "content": _describe_content(operation, schemas),
            },
        )
        yield 304, {"description": "Not modified."}
    refused = {"application/json": {"schema": schemas[ErrorBody]}}
    for status in sorted(
        {*_COMMON_ERRORS, *operation.errors} - ({401, 403} if operation.is_public else set())
    ):
        answer: JsonObject = {"description": _ERROR_DESCRIPTIONS[status], "content": refused}
        if status == 429:
            answer["headers"] = {"retry-after": {"schema": {"type": "integer"}}}
        yield status, answer


def _describe_content(operation: OpenApiOperation, schemas: dict[Any, JsonObject]) -> JsonObject:
    content: JsonObject
    if isinstance(operation.response, str):
        plain = operation.response.startswith("application/json")
        content = {operation.response: {"schema": {"type": "object"} if plain else {"type": "string"}}}
    else:
        content = {"application/json": {"schema": schemas[operation.response]}}
    if operation.can_stream:
        content["text/event-stream"] = {
            "schema": {
                "type": "string",
                "description": "Server-sent events; `x-event-schema` describes their data.",
            },
            "x-event-schema": schemas[stream_events.StreamEvent],
        }
    elif operation.relays_stream:
        content["text/event-stream"] = {
            "schema": {"type": "string", "description": "Server-sent events as the model server writes them."}
        }
    return content
