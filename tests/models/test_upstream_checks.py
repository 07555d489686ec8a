"""What `fumehood doctor --upstream` finds out about model servers."""

from typing import Any

import pytest

from fumehood.models.model_settings import Secret
from fumehood.models.upstream_checks import UpstreamFinding, UpstreamReport, diagnose_upstream
from tests.support.raw_model_server import Responder, document, error, open_raw_model_server
from tests.support.small_model_server import KEY, run_small_model_server

LISTED = error("200 OK", {"data": [{"id": "m"}]})


def findings(report: UpstreamReport) -> dict[str, UpstreamFinding]:
    return {finding.name: finding for finding in report.findings}


async def diagnose_small(model: str | None = None, **options: Any) -> UpstreamReport:
    with run_small_model_server(**options) as server:
        return await diagnose_upstream(server.url, Secret(KEY), model)


async def test_a_good_server_is_usable() -> None:
    report = await diagnose_small(flavor="vllm")
    assert report.is_usable
    assert {name: finding.state for name, finding in findings(report).items()} == {
        "reachable": "ok",
        "models": "ok",
        "tool call": "ok",
        "context size": "ok",
        "vision": "ok",
    }
    assert (report.model, report.models) == ("small-chat", ["small-chat", "small-embed"])
    assert "takes_images: true" in findings(report)["vision"].detail


@pytest.mark.parametrize("flavor", ["vllm", "llama.cpp", "ollama", "lm-studio"])
@pytest.mark.parametrize(("context", "state"), [(4096, "warning"), (32_768, "ok")])
async def test_the_context_size_is_read_from_each_server(flavor: str, context: int, state: str) -> None:
    report = await diagnose_small(flavor=flavor, context=context)
    found = findings(report)["context size"]
    assert (report.context_window, found.state) == (context, state)
    assert f"context_window: {context}" in found.detail
    assert bool(found.advice) is (state == "warning")


async def test_a_server_that_does_not_tell_its_context_size() -> None:
    report = await diagnose_small(flavor="plain")
    assert report.context_window is None
    assert "context_window" in findings(report)["context size"].advice
    assert report.is_usable


async def test_a_model_that_is_not_listed() -> None:
    report = await diagnose_small(model="other")
    assert (
        findings(report)["models"].detail == "The server does not list 'other', but small-chat, small-embed."
    )
    assert "does not exist" in findings(report)["tool call"].detail
    assert not report.is_usable


async def test_a_model_that_does_not_call_or_see() -> None:
    report = await diagnose_small(calls_tools=False, sees_images=False)
    assert findings(report)["tool call"].state == "missing", "it repeats the question, which names the tool"
    assert findings(report)["vision"].state == "warning"
    assert "--enable-auto-tool-choice" in findings(report)["tool call"].advice
    assert "--jinja" in findings(report)["tool call"].advice
    rejecting = await diagnose_small(rejects_images=True)
    assert "does not support image input" in findings(rejecting)["vision"].detail
    assert rejecting.is_usable


async def test_a_missing_and_a_wrong_key() -> None:
    with run_small_model_server() as server:
        without = await diagnose_upstream(server.url)
        wrong = await diagnose_upstream(server.url, Secret("sk-wrong-key-0123456789"))
    assert "--api-key-env" in findings(without)["reachable"].advice
    assert "check its value" in findings(wrong)["reachable"].advice
    assert "sk-wrong" not in str(wrong)
    assert not without.is_usable
    assert [finding.name for finding in wrong.findings] == ["reachable"]


async def test_a_url_without_v1_is_corrected() -> None:
    with run_small_model_server() as server:
        base = server.url.removesuffix("/v1")
        report = await diagnose_upstream(base, Secret(KEY))
    assert findings(report)["reachable"].advice == f"Use {base}/v1 as the URL: the server answers there."


async def test_a_dead_server() -> None:
    async with open_raw_model_server() as server:
        url = server.url
    found = findings(await diagnose_upstream(url))["reachable"]
    assert "Connection refused" in found.detail
    assert "Start the server" in found.advice


@pytest.mark.parametrize(
    ("answer", "state", "words"),
    [
        (error("200 OK", {"choices": [{"message": {"content": "<tool_call>{}"}}]}), "missing", "as text"),
        (error("200 OK", {"choices": [{"message": {"content": "Hello"}}]}), "warning", "without calling"),
        (error("200 OK", {"choices": []}), "missing", "no choices"),
        (document(b"<html>"), "missing", "failed"),
        (error("400 Bad", {"error": {"message": '"auto" tool choice requires'}}), "missing", "auto"),
    ],
)
async def test_a_trial_call_that_fails_says_how(answer: Responder, state: str, words: str) -> None:
    others = [error("404 No", {})] * 6
    async with open_raw_model_server(LISTED, answer, *others) as server:
        report = await diagnose_upstream(server.url)
    found = findings(report)["tool call"]
    assert (found.state, words in found.detail) == (state, True)
    assert "docs/models.md" in found.advice


async def test_a_server_without_models() -> None:
    report = await diagnose_small(models=[])
    assert findings(report)["models"].state == "missing"
    assert [finding.name for finding in report.findings] == ["reachable", "models"]


async def test_an_invalid_url_is_an_error() -> None:
    with pytest.raises(ValueError, match="password"):
        await diagnose_upstream("http://user:secret@host/v1")
