"""The OpenAPI document is complete, and the gateway conforms to it."""

import json
import re
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import GenerationMode
from schemathesis.config import GenerationConfig, ProjectConfig, ProjectsConfig, SchemathesisConfig

from fumehood.gateway.app import Gateway
from fumehood.gateway.openapi import EVENT_TYPES, OPERATIONS, build_document
from fumehood.protocol.openai.responses import CreateResponse
from tests.support.gateway_thread import run_in_thread
from tests.support.scripted_gateway import run_gateway
from tests.support.two_tenant_gateway import TenantGateway, TenantObjects, create_objects, two_tenants

_nothing: Any = None
ROUTES = Gateway(
    runs=_nothing, store=_nothing, models=_nothing, passthrough=_nothing, containers=_nothing, files=_nothing
).routes
DOCUMENT = build_document(ROUTES)

MAKES = {"method": "POST", "path": "/v1/responses"}


def bounded(examples: int) -> Any:
    return settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        suppress_health_check=[
            HealthCheck.function_scoped_fixture,
            HealthCheck.too_slow,
            HealthCheck.filter_too_much,
            HealthCheck.data_too_large,
        ],
    )


def _schema() -> Any:
    generation = GenerationConfig(modes=[GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
    config = SchemathesisConfig(projects=ProjectsConfig(default=ProjectConfig(generation=generation)))
    return schemathesis.openapi.from_dict(DOCUMENT, config=config)


schema = _schema()


# --- complete -----------------------------------------------------------------------------------------


def test_every_route_is_described_and_no_other() -> None:
    assert set(OPERATIONS) == set(ROUTES)
    described = {(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert described == {(method, path.replace(":path", "")) for method, path in ROUTES}


def test_every_operation_says_what_its_errors_are() -> None:
    for methods in DOCUMENT["paths"].values():
        for operation in methods.values():
            assert operation["summary"]
            for status, answer in operation["responses"].items():
                assert ("content" in answer) == (status not in ("101", "304"))
                if status >= "400":
                    (content,) = answer["content"].values()
                    assert content["schema"] == {"$ref": "#/components/schemas/ErrorBody"}


def test_every_reference_leads_somewhere() -> None:
    references = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(DOCUMENT)))
    assert references == set(DOCUMENT["components"]["schemas"])


def test_it_fits_the_types() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    fields = {field.encode_name for field in msgspec.structs.fields(CreateResponse)}
    assert set(schemas["CreateResponse"]["properties"]) == fields
    assert set(schemas["Response"]["properties"]) - set(schemas["Response"]["required"]) == {
        "user",
        "conversation",
        "fumehood:warnings",
    }
    content = DOCUMENT["paths"]["/v1/responses"]["post"]["responses"]["200"]["content"]
    told = content["text/event-stream"]["x-event-schema"]["discriminator"]["mapping"]
    assert set(told) == {kind.__struct_config__.tag for kind in EVENT_TYPES}
    assert {"error", "response.created", "response.completed"} < set(told)


async def test_it_is_served() -> None:
    async with run_gateway() as gateway:
        answer = await gateway.request("GET", "/openapi.json")
    assert answer.json == DOCUMENT
    async with run_gateway(serve_metrics=False) as gateway:
        assert "/metrics" not in (await gateway.request("GET", "/openapi.json")).json["paths"]


# --- kept ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    tenant_gateway: TenantGateway
    objects: TenantObjects


@asynccontextmanager
async def open_target(directory: Path) -> AsyncGenerator[Target]:
    """A gateway with keys, over the real engine and SQLite, and what one tenant has there."""
    async with two_tenants(directory, body_bytes=100_000) as tenant_gateway:
        yield Target(tenant_gateway, await create_objects(tenant_gateway.ann))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with run_in_thread(open_target(tmp_path_factory.mktemp("openapi"))) as target:
        yield target


# The time goes into inventing requests, 1 to 5 s of CPU: the generator walks sets, whose order differs between runs.
@pytest.mark.timeout(600)
@schema.include(**MAKES).parametrize()
@bounded(8)
def test_requests_for_responses(case: Any, target: Target) -> None:
    check(case, target)


@pytest.mark.timeout(600)
@schema.exclude(**MAKES).parametrize()
@bounded(5)
def test_all_other_requests(case: Any, target: Target) -> None:
    check(case, target)


@pytest.mark.slow
@schema.parametrize()
@bounded(400)
def test_very_many_requests(case: Any, target: Target) -> None:
    check(case, target)


def check(case: Any, target: Target) -> None:
    """What the description allows and what it does not: no answer is a 5xx or one that it does not have."""
    tenant_gateway, objects = target.tenant_gateway, target.objects
    parameters: dict[str, Any] = case.path_parameters or {}
    for name, value in parameters.items():  # half of the time something that is there
        if len(str(value)) % 2 and case.method != "DELETE":
            parameters[name] = getattr(objects, name, "scripted")
    body: Any = case.body
    if isinstance(body, dict) and isinstance(cast("dict[str, Any]", body).get("model"), str):
        body["model"] = "scripted"
    before = tenant_gateway.table_rows()
    headers: dict[str, str] = case.headers or {}
    answer = case.call(
        base_url=tenant_gateway.gateway.base,
        timeout=30,
        headers={**headers, "authorization": f"Bearer {tenant_gateway.ann.secret}"},
    )
    assert answer.status_code < 500, (case, answer.text)
    described = case.operation.definition.raw["responses"]
    assert str(answer.status_code) in described, (answer.status_code, answer.text)
    if answer.status_code >= 400:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert tenant_gateway.table_rows() == before, "a request that was refused has left something"
