"""Fields that only model servers understand reach them, and so do their refusals."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from urllib.request import Request, urlopen

import pytest
from openai import APIError, BadRequestError, OpenAI

from fumehood.protocol.openai.passthrough_fields import SAMPLING_FIELDS
from tests.e2e.conftest import make_client, make_settings_without_code
from tests.support import gateway_process
from tests.support.gateway_process import ScriptedModelServer, text_answer
from tests.support.raw_model_server import error

# As raw JSON: what is not Python's way of writing it has to arrive as it was sent.
RAW: dict[str, bytes] = {
    "seed": b"12345678901234567890123",
    "stop": b'["END",  "\\u00e9"]',
    "top_k": b"20",
    "min_p": b"5.0e-2",
    "chat_template_kwargs": b'{ "enable_thinking" : false }',
    "guided_json": b'{"type":"object","type":"object"}',
    "custom_field": b'{"a":[1,{"b":null}]}',
}
WAYS = ["blocking", "streaming", "websocket"]


@dataclass(frozen=True)
class Chain:
    """`near` asks the model's server itself for `scripted`, and the gateway `far` for `far`, over its Responses API."""

    near: gateway_process.GatewayProcess
    client: OpenAI
    model: ScriptedModelServer

    def ask(self, way: str, **fields: Any) -> Any:
        """The response that was made of a request in that way."""
        request: dict[str, Any] = {"model": "scripted", "input": "?", **fields}
        named = {name: request.pop(name) for name in ("model", "input", "store") if name in request}
        create: Any = self.client.responses.create
        if way == "blocking":
            return create(**named, extra_body=request)
        if way == "streaming":
            with create(**named, extra_body=request, stream=True) as events:
                return _end_of(events)
        with self.client.responses.connect() as connection:
            connection.send_raw(json.dumps({"type": "response.create", **named, **request}))
            return _end_of(connection)

    def sent(self) -> dict[str, Any]:
        """What the model's server was asked, the last time."""
        return self.model.requests[-1].json


def _end_of(events: Any) -> Any:
    ends = ("response.completed", "response.failed", "response.incomplete")
    return next(event.response for event in events if event.type in ends)


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chain]:
    with ExitStack() as stack:
        model = stack.enter_context(ScriptedModelServer())
        own = {"match": "scripted", "base_url": model.url, "pass_fields": ["custom_field"], "retries": 0}
        settings = {**make_settings_without_code(model), "models": [own]}
        far = stack.enter_context(gateway_process.run_gateway(tmp_path_factory.mktemp("far"), settings))
        behind = {
            "match": "far",
            "name": "scripted",
            "backend": "responses",
            "base_url": far.url,
            "pass_fields": ["custom_field"],
            "retries": 0,
        }
        plain = {"match": "plain", "name": "scripted", "base_url": model.url, "extra_body": {"seed": 7}}
        settings = {**settings, "models": [own, behind, plain]}
        near = stack.enter_context(gateway_process.run_gateway(tmp_path_factory.mktemp("near"), settings))
        yield Chain(near, stack.enter_context(make_client(near)), model)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", ["scripted", "far"])
def test_sampling_fields_reach_the_model_server(chain: Chain, model: str, way: str) -> None:
    chain.model.script(text_answer("yes"))
    fields: dict[str, Any] = dict.fromkeys(SAMPLING_FIELDS, 1) | {"custom_field": {"a": 1}}
    response = chain.ask(way, model=model, n=3, unknown=4, **fields)
    assert (response.status, response.output_text) == ("completed", "yes")
    sent = chain.sent()
    assert {name: sent.get(name) for name in fields} == fields
    assert not {"n", "unknown"} & set(sent)


@pytest.mark.parametrize("model", ["scripted", "far"])
def test_they_arrive_as_they_were_written(chain: Chain, model: str) -> None:
    chain.model.script(text_answer("yes"))
    body = b'{"model":"%b","input":"?","stream":true,%b}' % (
        model.encode(),
        b",".join(b'"%b":%b' % (name.encode(), value) for name, value in RAW.items()),
    )
    headers = {"content-type": "application/json"}
    request = Request(f"{chain.near.url}/responses", body, headers)
    with urlopen(request, timeout=60) as answered:
        assert b"response.completed" in answered.read()
    sent = chain.model.requests[-1].body
    for name, value in RAW.items():
        assert b'"%b":%b' % (name.encode(), value) in sent, name


def test_null_and_what_only_another_model_takes_are_not_sent(chain: Chain) -> None:
    chain.model.script(text_answer("yes"))
    chain.ask("blocking", model="plain", top_k=None, min_p=0.5, seed=1, custom_field=2)
    sent = chain.sent()
    assert sent["min_p"] == 0.5
    assert sent["seed"] == 7  # extra_body is the operator's word
    assert not {"top_k", "custom_field"} & set(sent)


@pytest.mark.parametrize("way", ["blocking", "streaming"])
def test_too_much_of_them_is_refused(chain: Chain, way: str) -> None:
    chain.model.script()
    with pytest.raises(BadRequestError) as refused:
        chain.ask(way, grammar="x" * 300_000, seed=1)
    assert refused.value.param == "grammar"
    assert refused.value.code == "invalid_value"


def test_an_idempotency_key_stands_for_them_too(chain: Chain) -> None:
    chain.model.script(text_answer("one"))
    keyed: Any = {"extra_headers": {"Idempotency-Key": "sampling"}}
    create: Any = chain.client.responses.create
    first = create(model="scripted", input="?", extra_body={"seed": 1}, **keyed)
    assert create(model="scripted", input="?", extra_body={"seed": 1}, **keyed).id == first.id
    with pytest.raises(Exception, match="Idempotency-Key") as refused:
        create(model="scripted", input="?", extra_body={"seed": 2}, **keyed)
    assert getattr(refused.value, "status_code", None) == 409


# --- reasoning.effort ---------------------------------------------------------------------------------


@pytest.mark.parametrize("effort", ["none", "xhigh", "ultra_think", "a" * 32])
@pytest.mark.parametrize("model", ["scripted", "far"])
def test_any_effort_reaches_the_model_server(chain: Chain, model: str, effort: str) -> None:
    chain.model.script(text_answer("yes"))
    response = chain.ask("blocking", model=model, reasoning={"effort": effort})
    assert response.status == "completed"
    assert chain.sent()["reasoning_effort"] == effort


@pytest.mark.parametrize("effort", ["", "High", "very high", "a" * 33, "low\n", "é"])
def test_what_is_no_effort_is_refused(chain: Chain, effort: str) -> None:
    chain.model.script()
    with pytest.raises(BadRequestError) as refused:
        chain.ask("blocking", reasoning={"effort": effort})
    assert (refused.value.param, refused.value.code) == ("reasoning.effort", "invalid_value")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", ["scripted", "far"])
@pytest.mark.parametrize("status", ["400 Bad Request", "422 Unprocessable Entity"])
def test_the_model_servers_refusal_is_handed_on(chain: Chain, model: str, way: str, status: str) -> None:
    told = "reasoning_effort must be one of low, medium, high"
    chain.model.script(error(status, {"error": {"message": told, "code": "invalid_effort"}}))
    if way != "websocket":  # in a stream it is an event, which the SDK raises
        kind = BadRequestError if way == "blocking" else APIError
        with pytest.raises(kind) as refused:
            chain.ask(way, model=model, reasoning={"effort": "enormous"})
        assert told in refused.value.message
    else:
        response = chain.ask(way, model=model, reasoning={"effort": "enormous"})
        assert response.status == "failed"
        assert told in response.error.message
