"""Nothing of a tenant's exists for another, on any route and in any body.

The cases are made from the gateway's own table of routes: a route, a parameter of a path or a field of a request that
nobody has thought about here fails a test.
"""

import json
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from fumehood.gateway.app import Gateway
from fumehood.protocol.openai.responses import CreateResponse
from tests.support.scripted_gateway import HttpResponse
from tests.support.two_tenant_gateway import (
    INTERPRETER,
    TenantClient,
    TenantGateway,
    TenantObjects,
    create_objects,
    two_tenants,
)
from tests.support.websocket_client import connect_websocket

pytestmark = pytest.mark.asyncio(loop_scope="module")

_nothing: Any = None
ROUTES = Gateway(
    runs=_nothing, store=_nothing, models=_nothing, passthrough=_nothing, containers=_nothing, files=_nothing
).routes
_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")

# Parameters of paths that name what all tenants share.
SHARED = {"model"}
# Routes that name nothing of a tenant's, neither in the path nor in a body.
NAMELESS = {
    ("GET", "/v1/models"),
    ("GET", "/healthz"),
    ("GET", "/readyz"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
}

# Lists of what a tenant has; that they hold nothing else is tested below.
LISTS = {("GET", "/v1/files"), ("GET", "/v1/containers")}
# Forms, which name nothing that there is.
# The gateway looks up nothing that is named in them, and the model server has no objects of tenants.
PASSED_THROUGH = {("POST", "/v1/chat/completions"), ("POST", "/v1/embeddings")}
FORMS = {("POST", "/v1/files")}

type Body = Callable[[TenantObjects], dict[str, Any]]

_REQUESTS: dict[str, Body] = {
    "previous_response_id": lambda own: {"previous_response_id": own.response_id},
    "input: reference": lambda own: {"input": [{"type": "item_reference", "id": own.item_id}]},
    "input: reference without a type": lambda own: {"input": [{"id": own.item_id}]},
    "tools: id": lambda own: {
        "tools": [{"type": "code_interpreter", "container": own.container_id}],
    },
    "tools: object": lambda own: {
        "tools": [{"type": "code_interpreter", "container": {"id": own.container_id}}],
    },
    "tools: file_ids": lambda own: {
        "tools": [{"type": "code_interpreter", "container": {"type": "auto", "file_ids": [own.upload_id]}}],
    },
    "input: a file": lambda own: {
        "input": [{"role": "user", "content": [{"type": "input_file", "file_id": own.upload_id}]}],
    },
}
# How a body can name something, by the route and the field; its owner is answered.
BODIES: dict[tuple[str, str], dict[str, Body]] = {
    ("POST", "/v1/responses"): _REQUESTS,
    ("GET", "/v1/responses"): _REQUESTS,  # over WebSocket
    ("POST", "/v1/responses/input_tokens"): _REQUESTS,
    ("POST", "/v1/responses/compact"): _REQUESTS,
    ("POST", "/v1/containers"): {"file_ids": lambda own: {"name": "x", "file_ids": [own.upload_id]}},
    ("POST", "/v1/containers/{container_id}/files"): {"file_id": lambda own: {"file_id": own.upload_id}},
}
# Fields of a request that can name what is kept; the others cannot.
NAMING = {"previous_response_id", "input", "tools"}
REFUSED = {"conversation", "prompt", "background"}  # 400 whatever they say, so far
HARMLESS = {
    *("model", "instructions", "tool_choice", "parallel_tool_calls", "max_tool_calls", "max_output_tokens"),
    *("temperature", "top_p", "presence_penalty", "frequency_penalty", "top_logprobs", "text", "reasoning"),
    *(
        "include",
        "metadata",
        "client_metadata",
        "store",
        "stream",
        "stream_options",
        "truncation",
        "context_management",
        "generate",
    ),
    *("service_tier", "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
}

with_parameters = [route for route in ROUTES if set(_PARAMETER.findall(route[1])) - SHARED]
bodies = [(route, name) for route, named in BODIES.items() for name in named]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tenant_gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TenantGateway]:
    async with two_tenants(tmp_path_factory.mktemp("tenants")) as tenant_gateway:
        yield tenant_gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ann(tenant_gateway: TenantGateway) -> TenantObjects:
    return await create_objects(tenant_gateway.ann)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ben(tenant_gateway: TenantGateway) -> TenantObjects:
    return await create_objects(tenant_gateway.ben)


def filled(path: str, objects: TenantObjects) -> str:
    return _PARAMETER.sub(lambda found: str(asdict(objects)[found[1]]), path)


def posted(route: tuple[str, str], own: TenantObjects) -> dict[str, Any] | None:
    """A body that names what is one's own."""
    if route[0] != "POST":
        return None
    named = BODIES.get(route)
    return next(iter(named.values()))(own) if named else {}


def invented(objects: TenantObjects) -> TenantObjects:
    """Ids of the same form that nobody was ever given."""
    return TenantObjects(**{name: value[:-8] + "00c0ffee" for name, value in asdict(objects).items()})


def rejection(answer: HttpResponse, objects: TenantObjects) -> tuple[int, str, list[str]]:
    """What somebody can learn from an answer, without the ids that he has sent himself."""
    text = answer.body.decode()
    for name, value in asdict(objects).items():
        text = text.replace(value, f"<{name}>")
    return answer.status, text, sorted(answer.headers)


# --- by construction ----------------------------------------------------------------------------------


async def test_every_route_was_thought_about() -> None:
    objects = set(TenantObjects.__dataclass_fields__)
    for route in ROUTES:
        parameters = set(_PARAMETER.findall(route[1])) - SHARED
        assert parameters <= objects, f"{route}: say in `Objects` whose {parameters - objects} is"
        has_body = route in BODIES
        without = not parameters and not has_body
        shared = bool(_PARAMETER.findall(route[1])) and not parameters
        assert without == (route in NAMELESS | LISTS | FORMS | PASSED_THROUGH or shared), (
            f"{route}: can it name something of a tenant's?"
        )
        # What is posted has a body, which may name something; unless the path says that it has none.
        assert route[0] != "POST" or has_body or parameters or route in FORMS | PASSED_THROUGH, (
            f"{route}: say in `BODIES` what can be in it"
        )


async def test_every_field_of_a_request_was_thought_about() -> None:
    fields = {field.encode_name for field in msgspec.structs.fields(CreateResponse)}
    assert fields == NAMING | REFUSED | HARMLESS
    assert {name.partition(":")[0] for name in BODIES["POST", "/v1/responses"]} == NAMING


# --- paths --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", with_parameters, ids=" ".join)
async def test_a_path_of_another_tenant_leads_nowhere(
    tenant_gateway: TenantGateway, ann: TenantObjects, ben: TenantObjects, route: tuple[str, str]
) -> None:
    method, path = route
    body = posted(route, ben)
    foreign = await tenant_gateway.ben.ask(method, filled(path, ann), body)
    nowhere = await tenant_gateway.ben.ask(method, filled(path, invented(ann)), body)
    assert foreign.status == 404
    assert rejection(foreign, ann) == rejection(nowhere, invented(ann))
    names = _PARAMETER.findall(path)
    for name in names if len(names) > 1 else ():  # one's own container, and a file in another's
        mixed = TenantObjects(**{**asdict(ben), name: asdict(ann)[name]})
        unknown = TenantObjects(**{**asdict(ben), name: asdict(invented(ann))[name]})
        foreign = await tenant_gateway.ben.ask(method, filled(path, mixed), body)
        nowhere = await tenant_gateway.ben.ask(method, filled(path, unknown), body)
        assert foreign.status == 404
        assert rejection(foreign, mixed) == rejection(nowhere, unknown)


@pytest.mark.parametrize("route", with_parameters, ids=" ".join)
async def test_the_same_path_leads_its_owner_somewhere(
    tenant_gateway: TenantGateway, route: tuple[str, str]
) -> None:
    own = await create_objects(tenant_gateway.ann)  # of its own: some routes delete it
    answer = await tenant_gateway.ann.ask(route[0], filled(route[1], own), posted(route, own))
    # Only background responses can be cancelled, and there are none; but it was found.
    assert answer.status == (400 if route[1].endswith("/cancel") else 200)


async def test_without_a_key_there_is_nothing(tenant_gateway: TenantGateway, ann: TenantObjects) -> None:
    for method, path in ROUTES:
        path = path.replace("{model:path}", "small")
        answer = await tenant_gateway.gateway.request(
            method, filled(path, ann), {} if method == "POST" else None
        )
        if path in ("/healthz", "/readyz", "/openapi.json"):
            assert answer.status == 200
        else:
            assert answer.error == (401, "invalid_api_key", None), (method, path)


# --- bodies -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("route", "name"), bodies)
async def test_a_body_that_names_what_is_anothers(
    tenant_gateway: TenantGateway, ann: TenantObjects, ben: TenantObjects, route: tuple[str, str], name: str
) -> None:
    method, path = route
    make = BODIES[route][name]

    async def ask(party: Any, objects: TenantObjects) -> HttpResponse:
        body = {"model": "scripted", "input": "hi", **make(objects)}
        if method == "GET":
            return await over_websocket(party, body)
        return await party.ask(method, filled(path, ann if party is tenant_gateway.ann else ben), body)

    before = tenant_gateway.table_rows()
    foreign, nowhere = await ask(tenant_gateway.ben, ann), await ask(tenant_gateway.ben, invented(ann))
    assert foreign.status in (400, 404)
    assert rejection(foreign, ann) == rejection(nowhere, invented(ann))
    assert tenant_gateway.table_rows() == before
    assert (await ask(tenant_gateway.ann, ann)).status == 200


async def over_websocket(party: TenantClient, body: dict[str, Any]) -> HttpResponse:
    """The answer as it would be over HTTP."""
    async with connect_websocket(party.gateway.port, additional_headers=party.headers) as socket:
        await socket.ask(**body)
        last = (await socket.read_response())[-1]
    shown = {"error": last["error"]} if last["type"] == "error" else last["response"]
    return HttpResponse(last.get("status", 200), {}, json.dumps(shown).encode())


async def test_what_a_connection_holds_is_nobody_elses(tenant_gateway: TenantGateway) -> None:
    async with (
        connect_websocket(tenant_gateway.gateway.port, additional_headers=tenant_gateway.ann.headers) as ann,
        connect_websocket(tenant_gateway.gateway.port, additional_headers=tenant_gateway.ben.headers) as ben,
    ):
        held = await ann.create_and_read(model="scripted")
        not_found = (400, "previous_response_not_found", "previous_response_id")
        assert await ben.read_error(model="scripted", previous_response_id=held["id"]) == not_found
        assert (await ann.create_and_read(model="scripted", previous_response_id=held["id"]))[
            "status"
        ] == "completed"


async def test_connections_of_a_tenant_hold_no_more_than_its_share(
    tenant_gateway: TenantGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenant_gateway.gateway.app.websockets.unstored, "max_tenant_bytes", 100_000)
    async with (
        connect_websocket(tenant_gateway.gateway.port, additional_headers=tenant_gateway.ben.headers) as ben,
        connect_websocket(tenant_gateway.gateway.port, additional_headers=tenant_gateway.ann.headers) as one,
        connect_websocket(tenant_gateway.gateway.port, additional_headers=tenant_gateway.ann.headers) as two,
    ):
        bens = await ben.create_and_read(input="x" * 40_000)
        oldest = await one.create_and_read(input="x" * 40_000)
        latest = await two.create_and_read(input="x" * 40_000)
        not_found = (400, "previous_response_not_found", "previous_response_id")
        assert await one.read_error(previous_response_id=latest["id"]) == not_found  # two holds it, not one
        assert await one.read_error(previous_response_id=oldest["id"]) == not_found
        assert (await two.create_and_read(previous_response_id=latest["id"]))["status"] == "completed"
        assert (await ben.create_and_read(previous_response_id=bens["id"]))["status"] == "completed"


async def test_a_call_that_is_given_back_does_not_open_its_container(
    tenant_gateway: TenantGateway, ann: TenantObjects
) -> None:
    """Who knows the ids of a call may write its item himself; the container stays its owner's."""
    call = {"type": "code_interpreter_call", "id": ann.call_id, "code": "x", "container_id": ann.container_id}
    body: dict[str, Any] = {"tools": [INTERPRETER], "input": [call, {"role": "user", "content": "go on"}]}
    asked = len(tenant_gateway.model.requests)
    mine = await tenant_gateway.ann.create(**body)
    other = await tenant_gateway.ben.create(**body)
    assert containers_in(mine) == {ann.container_id}
    assert containers_in(other).isdisjoint({ann.container_id})
    # Nor does he learn what the call has printed: the model of its owner is shown that, his is not.
    shown = [
        [entry.exchange.output for entry in request.segments[-1].entries if entry.exchange is not None]
        for request in tenant_gateway.model.requests[asked:]
        if any(entry.id == ann.call_id for entry in request.segments[-1].entries)
    ]
    assert ["made" in outputs[0] for outputs in shown] == [True, False]


def containers_in(answer: HttpResponse) -> set[str]:
    assert answer.status == 200, answer.body
    return {item["container_id"] for item in answer.json["output"] if item["type"] == "code_interpreter_call"}


async def test_lists_hold_only_what_is_ones_own(
    tenant_gateway: TenantGateway, ann: TenantObjects, ben: TenantObjects
) -> None:
    for party, own, other in ((tenant_gateway.ann, ann, ben), (tenant_gateway.ben, ben, ann)):
        for method, path in ROUTES:
            if method == "GET" and (method, path) not in NAMELESS | set(BODIES):
                answer = await party.ask(method, filled(path.replace("{model:path}", "small"), own))
                assert answer.status == 200, path
                for foreign in asdict(other).values():
                    assert foreign not in answer.body.decode("latin-1")


async def test_a_place_in_a_list_of_anothers(tenant_gateway: TenantGateway, ann: TenantObjects) -> None:
    for route, name in ((("GET", "/v1/files"), "upload_id"), (("GET", "/v1/containers"), "container_id")):
        assert route in LISTS
        for cursor in ("after", "before"):
            paths = [f"{route[1]}?{cursor}={getattr(objects, name)}" for objects in (ann, invented(ann))]
            foreign, nowhere = [await tenant_gateway.ben.ask("GET", path) for path in paths]
            assert foreign.error == (400, "invalid_value", cursor)
            assert rejection(foreign, ann) == rejection(nowhere, invented(ann))


async def test_an_idempotency_key_of_another_tenant_is_free(tenant_gateway: TenantGateway) -> None:
    key = {"idempotency-key": "shared"}
    mine, other = (
        await tenant_gateway.ann.create(key, input="mine"),
        await tenant_gateway.ben.create(key, input="other"),
    )
    assert (mine.status, other.status) == (200, 200)
    assert mine.json["id"] != other.json["id"]
    assert "idempotent-replayed" not in other.headers


async def test_keys_of_one_tenant_share_everything(tenant_gateway: TenantGateway, ann: TenantObjects) -> None:
    second = await tenant_gateway.add_tenant("ann")
    assert (await second.ask("GET", f"/v1/responses/{ann.response_id}")).status == 200
    assert json.loads((await second.ask("GET", f"/v1/containers/{ann.container_id}/files")).body)["data"]
