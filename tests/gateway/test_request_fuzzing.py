"""Fuzzed requests with the real engine: no response is a 5xx."""

import json
import string
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fumehood.protocol.openai.responses import CreateResponse
from tests.gateway.conftest import Target

FIELDS = [field.encode_name for field in msgspec.structs.fields(CreateResponse)]
bounded = settings(
    max_examples=150,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def check(status: int, body: bytes) -> None:
    """A success, or a refusal in OpenAI's words."""
    assert 200 <= status < 500, body
    if status >= 400:
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] in ("invalid_request_error", "rate_limit_error")
    elif body.startswith(b"event:"):
        assert b"event: response.failed" not in body


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
parts: st.SearchStrategy[Any] = st.fixed_dictionaries(
    {"type": st.sampled_from(["input_text", "input_image", "input_file", "output_text", "refusal"])},
    optional={"text": json_values, "image_url": json_values, "file_data": json_values},
)
kinds = (
    *("message", "function_call", "function_call_output", "code_interpreter_call", "reasoning"),
    *("item_reference", "custom_tool_call", "compaction", "x"),
)
members: dict[str, st.SearchStrategy[Any]] = {
    "type": st.sampled_from(kinds),
    "role": st.sampled_from(["user", "assistant", "system", "developer", "tool"]) | json_values,
    "id": st.text(max_size=70) | st.none(),
    "call_id": st.text(max_size=10),
    "name": st.text(max_size=10),
    "content": json_values | st.lists(parts, max_size=3),
    **dict.fromkeys(
        ("output", "arguments", "code", "outputs", "summary", "container_id", "status"), json_values
    ),
}
items: st.SearchStrategy[Any] = st.fixed_dictionaries({}, optional=members)
tools = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(
            ["function", "custom", "code_interpreter", "file_search", "built_in", "mcp", "namespace", "x"]
        )
        | json_values,
        "name": st.text(max_size=8) | json_values,
        "parameters": json_values,
        "container": json_values,
        "format": json_values,
    },
)
requests = st.fixed_dictionaries(
    {"model": st.just("scripted")},
    optional={
        "input": st.text(max_size=20) | st.lists(items, max_size=4) | json_values,
        "tools": st.lists(tools, max_size=3) | json_values,
        "tool_choice": st.sampled_from(["none", "auto", "required"]) | tools | json_values,
        "instructions": st.text(max_size=10) | st.lists(items, max_size=2) | json_values,
        "include": st.lists(st.sampled_from(["fumehood:execution", "x"]) | st.text(max_size=5), max_size=2),
        "text": json_values | st.fixed_dictionaries({"format": tools}),
        "metadata": st.dictionaries(st.text(max_size=5), st.text(max_size=5)) | json_values,
        "previous_response_id": st.text(max_size=70) | json_values,
        "conversation": json_values,
        "prompt": json_values,
        "stream": st.booleans(),
        "store": st.booleans(),
        "background": st.booleans() | json_values,
        "context_management": json_values,
        "max_output_tokens": json_values,
        "temperature": json_values,
    },
)


@bounded
@given(requests)
@example({"model": "scripted", "input": "x", "max_output_tokens": 10**30, "stream": True})
@example({"model": "scripted", "input": "\0", "stream": True})
@example({"model": "scripted", "input": "x", "tools": [{"type": "function"}]})
@example({"model": "scripted", "input": [{"role": "user", "content": None}]})
def test_requests_that_look_almost_right(target: Target, request: dict[str, Any]) -> None:
    check(*target.ask("POST", "/v1/responses", json.dumps(request).encode()))


@bounded
@given(st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=4))
def test_any_value_for_any_field(target: Target, fields: dict[str, Any]) -> None:
    body = {"model": "scripted", "input": "hi", **fields}
    check(*target.ask("POST", "/v1/responses", json.dumps(body).encode()))


@bounded
@given(st.binary(max_size=200) | st.text(max_size=100).map(lambda text: text.encode("utf-8", "replace")))
@example(b"")
@example(b"null")
@example(b"\xef\xbb\xbf{}")
def test_any_bytes(target: Target, body: bytes) -> None:
    check(*target.ask("POST", "/v1/responses", body))


@bounded
@given(
    st.sampled_from([b'{"model":"scripted","input":"hi"}', b'{"input":[{"role":"user","content":"x"}]}']),
    st.integers(0, 40),
    st.binary(max_size=4),
)
def test_bytes_in_the_middle_of_a_request(target: Target, body: bytes, place: int, inserted: bytes) -> None:
    check(*target.ask("POST", "/v1/responses", body[:place] + inserted + body[place:]))


@pytest.mark.parametrize("depth", [50, 500, 900, 1500, 50_000])
@pytest.mark.parametrize(
    "field", ["input", "tools", "tool_choice", "metadata", "conversation", "unknown", "text"]
)
def test_nesting_without_end(target: Target, field: str, depth: int) -> None:
    for begin, end in (("[", "]"), ('{"a":', "}")):
        nested = begin * depth + "1" + end * depth
        body = f'{{"model":"scripted","input":"hi","{field}":{nested}}}'.encode()
        check(*target.ask("POST", "/v1/responses", body[:200_000]))
        items = f'{{"model":"scripted","input":[{{"type":"message","role":"user","content":{nested}}}]}}'
        check(*target.ask("POST", "/v1/responses", items.encode()[:200_000]))


paths = st.lists(
    st.sampled_from(
        [
            *("v1", "responses", "input_items", "cancel", "models", "containers", "files", "content"),
            *("%00", "%ff", "..", "{response_id}"),
        ]
    )
    | st.text(string.ascii_letters + string.digits + "_-.~%", max_size=8),
    max_size=6,
).map(lambda parts: "/" + "/".join(parts))
queries = st.text(string.ascii_letters + string.digits + "=&%[]-_.", max_size=30)


@bounded
@given(st.sampled_from(["GET", "POST", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS"]), paths, queries)
@example("GET", "/v1/responses/resp_1/input_items", "limit=%C2%B2&order[]=asc")
@example("GET", "/v1/responses/resp_1", "include[]=x&" + "&".join(["a=b"] * 40))
@example("DELETE", "/v1/responses/%00", "")
@example("GET", "/v1/containers/%00/files/%2e%2e/content", "")
def test_paths_and_queries(target: Target, method: str, path: str, query: str) -> None:
    status, body = target.ask(method, f"{path}?{query}" if query else path)
    if method == "HEAD":
        assert status in (400, 404, 405)
    else:
        check(status, body)
