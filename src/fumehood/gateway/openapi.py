"""Describes the gateway as OpenAPI 3.1, from its own routes and types."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Union, get_args

import msgspec
from msgspec import UNSET

from fumehood import __version__
from fumehood.gateway.routes.model_routes import ModelList
from fumehood.protocol.file_types import OCTET_STREAM
from fumehood.protocol.model_turns import ModelCard
from fumehood.protocol.openai import stream_events
from fumehood.protocol.openai.api_errors import ErrorBody
from fumehood.protocol.openai.container_objects import (
    ContainerFileObject,
    ContainerObject,
    CreateContainer,
    CreateContainerFile,
)
from fumehood.protocol.openai.file_objects import FileObject, UploadPurpose
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
    400: "A parameter or body that cannot be served; `param` names it.",
    401: "No API key, or one that is not known.",
    403: "The server is not known by the name in `Host`, where no keys are needed; a page may not use it; the key "
    "has not the scope that the message names.",
    404: "Nothing of this tenant's has that id.",
    405: "The path does not know this method.",
    408: "The body took too long to arrive.",
    409: "The Idempotency-Key stands for another request, or for a response that is gone.",
    413: "A body larger than a limit allows.",
    416: "The part that is asked for is not in the file.",
    426: "The request asks for no upgrade to WebSocket.",
    429: "The same request may be served later.",
    500: "The server failed.",
    502: "The model server failed.",
    503: "Something that the gateway needs is not there now.",
    504: "The model server was silent for too long.",
}
_COMMON_ERRORS = (400, 401, 403, 405, 500, 503)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenApiOperation:
    """What one route does.

    answer: a type, or the name of a media type.
    form: the fields of a form; it must have those that are not part of another and have no default. Where there is a
        body as well, either can be sent.
    ranged: a part of the answer may be asked for.
    errors: statuses besides those that every route may have.
    streams: it makes a response, which may come as events and be asked for with an Idempotency-Key.
    upgrades: it makes a WebSocket of the connection, and knows no other answer.
    public: nobody needs a key for it.
    """

    summary: str
    response: Any = "application/json"
    body: type[msgspec.Struct] | None = None
    form: JsonObject | None = None
    supports_range: bool = False
    query: Sequence[str] = ()
    errors: Sequence[int] = ()
    can_stream: bool = False
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
        summary="Make a response; with `stream` as it comes.",
        body=CreateResponse,
        response=Response,
        errors=(*_MODEL_ERRORS, 409),
        can_stream=True,
    ),
    ("GET", "/v1/responses"): OpenApiOperation(
        summary="Many responses on one connection, by WebSocket.", is_websocket=True, errors=(426,)
    ),
    ("POST", "/v1/responses/input_tokens"): OpenApiOperation(
        summary="How many tokens a request for a response has; nothing is made.",
        body=CreateResponse,
        response=InputTokenCount,
        errors=_MODEL_ERRORS,
    ),
    ("POST", "/v1/responses/compact"): OpenApiOperation(
        summary="Make a conversation short.",
        body=CreateResponse,
        response=CompactedResponse,
        errors=_MODEL_ERRORS,
    ),
    ("GET", "/v1/responses/{response_id}"): OpenApiOperation(
        summary="A response that is kept.", response=Response, query=("include", "stream"), errors=(404,)
    ),
    ("DELETE", "/v1/responses/{response_id}"): OpenApiOperation(
        summary="Forget a response.", response=DeletedObject, errors=(404,)
    ),
    ("POST", "/v1/responses/{response_id}/cancel"): OpenApiOperation(
        summary="End a response that is made in the background.", response=Response, errors=(404,)
    ),
    ("GET", "/v1/responses/{response_id}/input_items"): OpenApiOperation(
        summary="What stood before the output of a response.",
        response=ListPage,
        query=("include", *_PAGE_PARAMETERS),
        errors=(404,),
    ),
    ("GET", "/v1/models"): OpenApiOperation(summary="The models that can be asked for.", response=ModelList),
    ("GET", "/v1/models/{model:path}"): OpenApiOperation(
        summary="One of them.", response=ModelCard, errors=(404,)
    ),
    ("POST", "/v1/containers"): OpenApiOperation(
        summary="Make a container before it is used.",
        body=CreateContainer,
        response=ContainerObject,
        errors=(408, 413, 429),
    ),
    ("GET", "/v1/containers"): OpenApiOperation(
        summary="Containers, expired ones too.", response=ListPage, query=(*_PAGE_PARAMETERS, "name")
    ),
    ("GET", "/v1/containers/{container_id}"): OpenApiOperation(
        summary="One of them.", response=ContainerObject, errors=(404,)
    ),
    ("DELETE", "/v1/containers/{container_id}"): OpenApiOperation(
        summary="End a container, with its files and what runs in it.", response=DeletedObject, errors=(404,)
    ),
    ("POST", "/v1/containers/{container_id}/files"): OpenApiOperation(
        summary="Put a file into a container: one that comes with the request, or one that was uploaded.",
        body=CreateContainerFile,
        form=_CONTAINER_FILE_FORM,
        response=ContainerFileObject,
        errors=(404, 408, 413, 429),
    ),
    ("GET", "/v1/containers/{container_id}/files"): OpenApiOperation(
        summary="The files of a container.", response=ListPage, query=_PAGE_PARAMETERS, errors=(404,)
    ),
    ("GET", "/v1/containers/{container_id}/files/{file_id}"): OpenApiOperation(
        summary="One of them.", response=ContainerFileObject, errors=(404,)
    ),
    ("DELETE", "/v1/containers/{container_id}/files/{file_id}"): OpenApiOperation(
        summary="Delete a file of a container.", response=DeletedObject, errors=(404,)
    ),
    ("GET", "/v1/containers/{container_id}/files/{file_id}/content"): OpenApiOperation(
        summary="The content of a file, as a download.",
        response=OCTET_STREAM,
        errors=(404, 416),
        supports_range=True,
    ),
    ("POST", "/v1/files"): OpenApiOperation(
        summary="Upload a file.", form=_UPLOAD_FORM, response=FileObject, errors=(408, 413, 429)
    ),
    ("GET", "/v1/files"): OpenApiOperation(
        summary="The files that were uploaded.", response=ListPage, query=(*_PAGE_PARAMETERS, "purpose")
    ),
    ("GET", "/v1/files/{upload_id}"): OpenApiOperation(
        summary="One of them.", response=FileObject, errors=(404,)
    ),
    ("DELETE", "/v1/files/{upload_id}"): OpenApiOperation(
        summary="Delete a file; copies in containers stay.", response=DeletedObject, errors=(404,)
    ),
    ("GET", "/v1/files/{upload_id}/content"): OpenApiOperation(
        summary="The content of a file, as a download.",
        response=OCTET_STREAM,
        errors=(404, 416),
        supports_range=True,
    ),
    ("GET", "/healthz"): OpenApiOperation(summary="Whether the process lives.", is_public=True),
    ("GET", "/readyz"): OpenApiOperation(summary="Whether it serves.", is_public=True),
    ("GET", "/metrics"): OpenApiOperation(summary="Figures for Prometheus.", response="text/plain"),
    ("GET", "/openapi.json"): OpenApiOperation(summary="This description.", is_public=True),
}
PUBLIC_PATHS = frozenset(path for (_, path), operation in OPERATIONS.items() if operation.is_public)
"""Paths for which nobody needs a key: those who watch over a server have none."""

_QUERY_PARAMETERS: dict[str, tuple[str, JsonObject]] = {
    "after": ("The id after which the page begins.", {"type": "string"}),
    "before": ("The id before which it ends.", {"type": "string"}),
    "limit": ("How many are on it.", {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}),
    "order": ("By the time they were made.", {"type": "string", "enum": ["asc", "desc"], "default": "desc"}),
    "include": (
        "What to show besides the usual.",
        {"type": "array", "items": {"type": "string", "enum": sorted(INCLUDE_VALUES)}},
    ),
    "name": ("Only those of this name.", {"type": "string"}),
    "purpose": ("Only files for this.", {"type": "string"}),
    "stream": ("Only for responses that are made in the background.", {"type": "boolean"}),
}

EVENT_TYPES: Sequence[type[stream_events.StreamEvent]] = [
    kind
    for kind in vars(stream_events).values()
    if isinstance(kind, type)
    and issubclass(kind, stream_events.StreamEvent)
    and kind.__struct_config__.tag not in (None, kind.__name__)
]


def build_document(routes: Iterable[tuple[str, str]]) -> JsonObject:
    """The whole description; a route that has none in OPERATIONS is only named."""
    described = [
        (method, path, OPERATIONS.get((method, path), OpenApiOperation(summary="")))
        for method, path in routes
    ]
    schemas, components = _build_schemas([operation for _, _, operation in described])
    paths: dict[str, JsonObject] = {}
    for method, path, operation in described:
        plain = _PATH_PARAMETER.sub(r"{\1}", path)
        paths.setdefault(plain, {})[method.lower()] = _describe_operation(path, operation, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Fumehood gateway",
            "version": __version__,
            "description": "OpenAI's Responses API with a code interpreter of its own. docs/gateway.md has the rules "
            "in words. Keys are needed where the operator has made any.",
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
    """The schema of each type, and what they refer to."""
    named = {kind for one in operations for kind in (one.body, one.response) if isinstance(kind, type)}
    kinds: list[Any] = [*sorted(named, key=lambda kind: kind.__name__), ErrorBody, Union[tuple(EVENT_TYPES)]]  # noqa: UP007
    made, components = msgspec.json.schema_components(kinds, ref_template=_SCHEMA_REF)
    for kind in (Response, *EVENT_TYPES):
        # Every field is sent, whatever it holds; a schema of what may be received would say otherwise.
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
            "description": "The same key and body give the same response for a day.",
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
                "description": "The part that `Range` asks for.",
                "content": _describe_content(operation, schemas),
            },
        )
        yield 304, {"description": "What `If-None-Match` names is what there is."}
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
            "schema": {"type": "string", "description": "Events, each with one of these as its data."},
            "x-event-schema": schemas[stream_events.StreamEvent],
        }
    return content
