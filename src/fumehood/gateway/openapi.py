"""Describes the gateway as OpenAPI 3.1, from its own routes and types; imports msgspec, `protocol` and siblings."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Union, get_args

import msgspec
from msgspec import UNSET

from fumehood import __version__
from fumehood.gateway.models import ModelList
from fumehood.protocol import events
from fumehood.protocol.containers import (
    ContainerFile,
    ContainerObject,
    CreateContainer,
    CreateContainerFile,
)
from fumehood.protocol.errors import ErrorBody
from fumehood.protocol.file_types import BINARY
from fumehood.protocol.files import FileObject, UploadPurpose
from fumehood.protocol.folding import INCLUDABLE
from fumehood.protocol.models import ModelCard
from fumehood.protocol.responses import (
    CompactedResponse,
    CreateResponse,
    Deleted,
    InputTokens,
    Page,
    Response,
)

type Json = dict[str, Any]

_REF = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
_ERRORS = {
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
_ALWAYS = (400, 401, 403, 405, 500, 503)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
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
    answer: Any = "application/json"
    body: type[msgspec.Struct] | None = None
    form: Json | None = None
    ranged: bool = False
    query: Sequence[str] = ()
    errors: Sequence[int] = ()
    streams: bool = False
    upgrades: bool = False
    public: bool = False


_MODEL = (404, 408, 413, 429, 502, 504)
_PAGE = ("after", "before", "limit", "order")
_FILE_FORM: Json = {
    "file": {"type": "string", "contentMediaType": BINARY},
    "purpose": {"type": "string", "enum": [*get_args(UploadPurpose.__value__)]},
    "expires_after[anchor]": {"type": "string", "const": "created_at"},
    "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2_592_000},
}
_CONTAINER_FILE_FORM: Json = {
    "file": {"type": "string", "contentMediaType": BINARY},
    "unpack": {"type": "string", "enum": ["true", "false"], "default": "false"},
}
OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/responses"): Operation(
        summary="Make a response; with `stream` as it comes.",
        body=CreateResponse,
        answer=Response,
        errors=(*_MODEL, 409),
        streams=True,
    ),
    ("GET", "/v1/responses"): Operation(
        summary="Many responses on one connection, by WebSocket.", upgrades=True, errors=(426,)
    ),
    ("POST", "/v1/responses/input_tokens"): Operation(
        summary="How many tokens a request for a response has; nothing is made.",
        body=CreateResponse,
        answer=InputTokens,
        errors=_MODEL,
    ),
    ("POST", "/v1/responses/compact"): Operation(
        summary="Make a conversation short.", body=CreateResponse, answer=CompactedResponse, errors=_MODEL
    ),
    ("GET", "/v1/responses/{response_id}"): Operation(
        summary="A response that is kept.", answer=Response, query=("include", "stream"), errors=(404,)
    ),
    ("DELETE", "/v1/responses/{response_id}"): Operation(
        summary="Forget a response.", answer=Deleted, errors=(404,)
    ),
    ("POST", "/v1/responses/{response_id}/cancel"): Operation(
        summary="End a response that is made in the background.", answer=Response, errors=(404,)
    ),
    ("GET", "/v1/responses/{response_id}/input_items"): Operation(
        summary="What stood before the output of a response.",
        answer=Page,
        query=("include", *_PAGE),
        errors=(404,),
    ),
    ("GET", "/v1/models"): Operation(summary="The models that can be asked for.", answer=ModelList),
    ("GET", "/v1/models/{model:path}"): Operation(summary="One of them.", answer=ModelCard, errors=(404,)),
    ("POST", "/v1/containers"): Operation(
        summary="Make a container before it is used.",
        body=CreateContainer,
        answer=ContainerObject,
        errors=(408, 413, 429),
    ),
    ("GET", "/v1/containers"): Operation(
        summary="Containers, expired ones too.", answer=Page, query=(*_PAGE, "name")
    ),
    ("GET", "/v1/containers/{container_id}"): Operation(
        summary="One of them.", answer=ContainerObject, errors=(404,)
    ),
    ("DELETE", "/v1/containers/{container_id}"): Operation(
        summary="End a container, with its files and what runs in it.", answer=Deleted, errors=(404,)
    ),
    ("POST", "/v1/containers/{container_id}/files"): Operation(
        summary="Put a file into a container: one that comes with the request, or one that was uploaded.",
        body=CreateContainerFile,
        form=_CONTAINER_FILE_FORM,
        answer=ContainerFile,
        errors=(404, 408, 413, 429),
    ),
    ("GET", "/v1/containers/{container_id}/files"): Operation(
        summary="The files of a container.", answer=Page, query=_PAGE, errors=(404,)
    ),
    ("GET", "/v1/containers/{container_id}/files/{file_id}"): Operation(
        summary="One of them.", answer=ContainerFile, errors=(404,)
    ),
    ("DELETE", "/v1/containers/{container_id}/files/{file_id}"): Operation(
        summary="Delete a file of a container.", answer=Deleted, errors=(404,)
    ),
    ("GET", "/v1/containers/{container_id}/files/{file_id}/content"): Operation(
        summary="The content of a file, as a download.", answer=BINARY, errors=(404, 416), ranged=True
    ),
    ("POST", "/v1/files"): Operation(
        summary="Upload a file.", form=_FILE_FORM, answer=FileObject, errors=(408, 413, 429)
    ),
    ("GET", "/v1/files"): Operation(
        summary="The files that were uploaded.", answer=Page, query=(*_PAGE, "purpose")
    ),
    ("GET", "/v1/files/{upload_id}"): Operation(summary="One of them.", answer=FileObject, errors=(404,)),
    ("DELETE", "/v1/files/{upload_id}"): Operation(
        summary="Delete a file; copies in containers stay.", answer=Deleted, errors=(404,)
    ),
    ("GET", "/v1/files/{upload_id}/content"): Operation(
        summary="The content of a file, as a download.", answer=BINARY, errors=(404, 416), ranged=True
    ),
    ("GET", "/healthz"): Operation(summary="Whether the process lives.", public=True),
    ("GET", "/readyz"): Operation(summary="Whether it serves.", public=True),
    ("GET", "/metrics"): Operation(summary="Figures for Prometheus.", answer="text/plain"),
    ("GET", "/openapi.json"): Operation(summary="This description.", public=True),
}
PUBLIC = frozenset(path for (_, path), operation in OPERATIONS.items() if operation.public)
"""Paths for which nobody needs a key: those who watch over a server have none."""

_QUERIES: dict[str, tuple[str, Json]] = {
    "after": ("The id after which the page begins.", {"type": "string"}),
    "before": ("The id before which it ends.", {"type": "string"}),
    "limit": ("How many are on it.", {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}),
    "order": ("By the time they were made.", {"type": "string", "enum": ["asc", "desc"], "default": "desc"}),
    "include": (
        "What to show besides the usual.",
        {"type": "array", "items": {"type": "string", "enum": sorted(INCLUDABLE)}},
    ),
    "name": ("Only those of this name.", {"type": "string"}),
    "purpose": ("Only files for this.", {"type": "string"}),
    "stream": ("Only for responses that are made in the background.", {"type": "boolean"}),
}

EVENTS: Sequence[type[events.StreamEvent]] = [
    kind
    for kind in vars(events).values()
    if isinstance(kind, type)
    and issubclass(kind, events.StreamEvent)
    and kind.__struct_config__.tag not in (None, kind.__name__)
]


def document(routes: Iterable[tuple[str, str]]) -> Json:
    """The whole description; a route that has none in OPERATIONS is only named."""
    described = [
        (method, path, OPERATIONS.get((method, path), Operation(summary=""))) for method, path in routes
    ]
    schemas, components = _schemas([operation for _, _, operation in described])
    paths: dict[str, Json] = {}
    for method, path, operation in described:
        plain = _PARAMETER.sub(r"{\1}", path)
        paths.setdefault(plain, {})[method.lower()] = _operation(path, operation, schemas)
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


def _schemas(operations: Sequence[Operation]) -> tuple[dict[Any, Json], Json]:
    """The schema of each type, and what they refer to."""
    named = {kind for one in operations for kind in (one.body, one.answer) if isinstance(kind, type)}
    kinds: list[Any] = [*sorted(named, key=lambda kind: kind.__name__), ErrorBody, Union[tuple(EVENTS)]]  # noqa: UP007
    made, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    for kind in (Response, *EVENTS):
        # Every field is sent, whatever it holds; a schema of what may be received would say otherwise.
        always = [each.encode_name for each in msgspec.structs.fields(kind) if each.default is not UNSET]
        required = components[kind.__name__].setdefault("required", [])
        required += [name for name in always if name not in required]
    schemas = dict(zip(kinds[:-1], made, strict=False))
    schemas[events.StreamEvent] = made[-1]
    return schemas, components


def _operation(path: str, operation: Operation, schemas: dict[Any, Json]) -> Json:
    described: Json = {
        "summary": operation.summary,
        "parameters": list(_parameters(path, operation)),
        "responses": {str(status): answer for status, answer in _answers(operation, schemas)},
    }
    bodies: Json = {}
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
    if operation.public:
        described["security"] = []
    return described


def _parameters(path: str, operation: Operation) -> Iterator[Json]:
    for name in _PARAMETER.findall(path):
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    for name in operation.query:
        description, schema = _QUERIES[name]
        yield {"name": name, "in": "query", "description": description, "schema": schema}
    if operation.streams:
        yield {
            "name": "Idempotency-Key",
            "in": "header",
            "description": "The same key and body give the same response for a day.",
            "schema": {"type": "string", "pattern": "^[!-~]{1,255}$"},
        }


def _answers(operation: Operation, schemas: dict[Any, Json]) -> Iterator[tuple[int, Json]]:
    if operation.upgrades:
        yield 101, {"description": operation.summary}
    else:
        yield 200, {"description": operation.summary, "content": _content(operation, schemas)}
    if operation.ranged:
        yield 206, {"description": "The part that `Range` asks for.", "content": _content(operation, schemas)}
        yield 304, {"description": "What `If-None-Match` names is what there is."}
    refused = {"application/json": {"schema": schemas[ErrorBody]}}
    for status in sorted({*_ALWAYS, *operation.errors} - ({401, 403} if operation.public else set())):
        answer: Json = {"description": _ERRORS[status], "content": refused}
        if status == 429:
            answer["headers"] = {"retry-after": {"schema": {"type": "integer"}}}
        yield status, answer


def _content(operation: Operation, schemas: dict[Any, Json]) -> Json:
    content: Json
    if isinstance(operation.answer, str):
        plain = operation.answer.startswith("application/json")
        content = {operation.answer: {"schema": {"type": "object"} if plain else {"type": "string"}}}
    else:
        content = {"application/json": {"schema": schemas[operation.answer]}}
    if operation.streams:
        content["text/event-stream"] = {
            "schema": {"type": "string", "description": "Events, each with one of these as its data."},
            "x-event-schema": schemas[events.StreamEvent],
        }
    return content
