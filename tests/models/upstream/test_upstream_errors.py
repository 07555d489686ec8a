"""Errors of model servers as clients see them: a path that is unknown, and a model that is."""

import msgspec
import pytest

from fumehood.models.upstream.upstream_errors import UpstreamErrorFactory
from fumehood.protocol.openai.api_errors import ModelError, ModelRejectedRequest

WITHOUT_VERSION = "http://127.0.0.1:8000"
HINT = "which most servers expect to end in /v1"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"404 page not found",
        b"<html>",
        b'{"detail":"Not Found"}',
        b'{"error":{"code":404,"message":"File Not Found","type":"not_found_error"}}',
        b'{"error":"path \\"/chat/completions\\" not found"}',
        b'{"error":{"message":"Invalid URL (POST /chat/completions)"}}',
        b'{"error":{"message":"Unknown request URL: POST /chat/completions. Please check the URL for typos"}}',
        b'{"message":"Cannot POST /chat/completions"}',
    ],
)
def test_a_404_of_the_path_asks_for_the_base_url(body: bytes) -> None:
    for base_url, has_hint in ((WITHOUT_VERSION, True), (f"{WITHOUT_VERSION}/v1", False)):
        error = UpstreamErrorFactory("m", base_url=base_url).from_status(404, body)
        assert type(error) is ModelError
        assert "has no chat completions (HTTP 404)" in error.message
        assert "base_url" in error.message
        assert (HINT in error.message) is has_hint


@pytest.mark.parametrize(
    "message",
    ["The model `x` does not exist.", "model 'x' not found", "No such File object: file-1", "no"],
)
def test_a_404_of_something_else_is_the_clients(message: str) -> None:
    body = msgspec.json.encode({"error": {"message": message}})
    error = UpstreamErrorFactory("m", base_url=WITHOUT_VERSION).from_status(404, body)
    assert type(error) is ModelRejectedRequest
    assert message.removesuffix(".") in error.message


def test_a_method_that_is_not_allowed_is_a_wrong_url_too() -> None:
    error = UpstreamErrorFactory("m", base_url=WITHOUT_VERSION).from_status(405, b"Method Not Allowed")
    assert HINT in error.message


def test_lm_studio_says_it_with_the_status_200() -> None:
    body = b'{"error":"Unexpected endpoint or method. (POST /chat/completions)"}'
    error = UpstreamErrorFactory("m", base_url=WITHOUT_VERSION).from_event(body)
    assert HINT in error.message


@pytest.mark.parametrize("path", ["/v1", "/api/v1/", "/v1beta/openai", "/openai/v3"])
def test_paths_with_a_version(path: str) -> None:
    error = UpstreamErrorFactory("m", base_url=WITHOUT_VERSION + path).unknown_path(404)
    assert HINT not in error.message


@pytest.mark.parametrize("status", [201, 204, 206])
def test_a_success_without_the_response_is_the_servers_mistake(status: int) -> None:
    error = UpstreamErrorFactory("m").from_status(status, b"")
    assert type(error) is ModelError
    assert f"invalid chat completions response: it has the status {status}." in error.message
