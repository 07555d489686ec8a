"""How evaluations end: limits, filters, a provider that is busy or says no, what is logged; imports the support."""

import logging
from datetime import timedelta

import pytest

from fumehood.client import (
    Budget,
    BudgetTracker,
    Deadline,
    FilteredOutputError,
    InProcessDispatcher,
    PromptEvaluationError,
    PromptExecuted,
    PromptRendered,
    Session,
    ThrottlePolicy,
    Tool,
    ToolContext,
    ToolInvoked,
    ToolResult,
)
from fumehood.client.adapters.openai import (
    AutoContainerConfig,
    OpenAICodeInterpreterTool,
    OpenAIContainerWorkspaceSection,
    OpenAIModelConfig,
)
from fumehood.client.errors import (
    BudgetExceededError,
    DeadlineExceededError,
    ThrottleError,
)
from tests.client.conftest import Elsewhere
from tests.support.client_prompts import (
    HOSTED,
    PATIENT,
    Query,
    code_call,
    function_call,
    prompt,
    query_tool,
    typed,
)
from tests.support.openai_server import Reply, error, message, response

# --- events, limits, ends -----------------------------------------------------------------------------


def test_another_bus_hears_everything_once(elsewhere: Elsewhere) -> None:
    elsewhere.server.script(response(function_call("c1", '{"sql": "x"}')), response(message("done")))
    bus, heard = InProcessDispatcher(), list[str]()
    for kind in (PromptRendered, ToolInvoked, PromptExecuted):
        bus.subscribe(kind, lambda event: heard.append(type(event).__name__))
    elsewhere.adapter().evaluate(prompt(query_tool), session=Session(bus=bus), bus=bus)
    assert heard == ["PromptRendered", "ToolInvoked", "PromptExecuted"]
    elsewhere.server.script(response(message("done")))
    elsewhere.adapter().evaluate(prompt(), bus=bus)
    assert heard[3:] == ["PromptRendered", "PromptExecuted"]


def test_a_budget_ends_an_evaluation_before_the_next_request(elsewhere: Elsewhere) -> None:
    tracker = BudgetTracker(Budget(max_total_tokens=30))
    elsewhere.server.script(*[response(function_call("c1", '{"sql": "x"}'))] * 9)
    with pytest.raises(
        BudgetExceededError, match=r"30 of 30 total tokens were used before the tool 'run_query'"
    ):
        elsewhere.adapter().evaluate(prompt(query_tool), budget_tracker=tracker)
    assert len(elsewhere.server.asked) == 2
    with pytest.raises(BudgetExceededError, match="before the next request"):
        elsewhere.adapter().evaluate(prompt(query_tool), budget_tracker=tracker)
    assert len(elsewhere.server.asked) == 2


def test_a_deadline_ends_an_evaluation(elsewhere: Elsewhere) -> None:
    start = Deadline.after(0).expires_at
    time = [start]

    def late(params: Query, *, context: ToolContext) -> ToolResult[Query]:
        time[0] += timedelta(hours=1)
        return ToolResult.ok(params)

    slow = Tool[Query, Query](name="run_query", description="x", handler=late)
    deadline = Deadline(start + timedelta(minutes=5), clock=lambda: time[0])
    elsewhere.server.script(
        response(function_call("c1", '{"sql": "x"}'), function_call("c2", '{"sql": "x"}'))
    )
    with pytest.raises(DeadlineExceededError, match="before the tool"):
        elsewhere.adapter().evaluate(prompt(slow), budget=Budget(deadline=deadline))
    with pytest.raises(DeadlineExceededError, match="before the first request"):
        elsewhere.adapter(hosted_tools=HOSTED).evaluate(
            prompt(slow, sections=(OpenAIContainerWorkspaceSection(session=Session()),)), deadline=deadline
        )
    assert elsewhere.server.calls == ["POST /v1/responses"]


def test_an_evaluation_without_end_ends(elsewhere: Elsewhere) -> None:
    elsewhere.server.script(*[response(function_call("c1", '{"sql": "x"}'))] * 9)
    with pytest.raises(PromptEvaluationError, match="no answer after 3 turns"):
        elsewhere.adapter(max_turns=3).evaluate(prompt(query_tool))


@pytest.mark.parametrize(
    "reply",
    [
        response(status="incomplete", incomplete_details={"reason": "content_filter"}),
        response(
            message('{"value": 1}'), status="incomplete", incomplete_details={"reason": "content_filter"}
        ),
        response(message("", content=[{"type": "refusal", "refusal": "No."}])),
    ],
)
def test_a_filtered_answer_that_is_needed_raises(elsewhere: Elsewhere, reply: Reply) -> None:
    elsewhere.server.script(reply)
    with pytest.raises(FilteredOutputError) as withheld:
        elsewhere.adapter().evaluate(typed())
    assert isinstance(withheld.value, AssertionError)
    assert withheld.value.phase == "response"


def test_other_ends(elsewhere: Elsewhere) -> None:
    failed = {"message": "The server had an error", "code": "server_error"}
    elsewhere.server.script(response(status="failed", error=failed))
    with pytest.raises(PromptEvaluationError, match="The server had an error") as wrong:
        elsewhere.adapter().evaluate(typed())
    assert wrong.value.provider_payload == failed
    cut = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    elsewhere.server.script(response(message('{"val'), **cut), response(message("partly"), **cut))
    with pytest.raises(PromptEvaluationError, match=r"cut off \(max_output_tokens\)"):
        elsewhere.adapter().evaluate(typed())
    assert elsewhere.adapter().evaluate(prompt()).text == "partly"
    elsewhere.server.script(response(message("no JSON")))
    assert elsewhere.adapter().evaluate(typed(), parse_output=False).output is None


# --- a provider that is busy, or says no --------------------------------------------------------------


def test_a_busy_provider_is_asked_again_with_the_same_key(elsewhere: Elsewhere) -> None:
    elsewhere.server.script(
        error(429, "Slow down", "rate_limit_exceeded", retry_after="0"),
        error(500, "Oops", retry_after_ms="1"),
        Reply(closes=True),
        error(503, "Overloaded", retry_after="Thu, 01 Jan 1970 00:00:00 GMT"),
        response(message("at last")),
    )
    assert elsewhere.adapter(throttle=PATIENT).evaluate(prompt()).text == "at last"
    keys = {headers["idempotency-key"] for headers in elsewhere.server.headers}
    assert (len(elsewhere.server.headers), len(keys)) == (5, 1)
    elsewhere.server.script(response(message("again")))
    elsewhere.adapter().evaluate(prompt())
    assert elsewhere.server.headers[0]["idempotency-key"] not in keys


def test_patience_with_a_provider_ends(elsewhere: Elsewhere) -> None:
    elsewhere.server.script(*[error(429, "Slow down")] * 9)
    with pytest.raises(ThrottleError, match="2 attempts"):
        elsewhere.adapter(throttle=ThrottlePolicy(max_attempts=2, base_delay=0)).evaluate(prompt())
    assert len(elsewhere.server.asked) == 2


@pytest.mark.parametrize(
    "reply", [error(400, "Bad model", "model_not_found"), error(429, "No money", "insufficient_quota")]
)
def test_a_refusal_is_told_as_it_is_and_once(elsewhere: Elsewhere, reply: Reply) -> None:
    elsewhere.server.script(reply)
    with pytest.raises(PromptEvaluationError) as refused:
        elsewhere.adapter(throttle=PATIENT).evaluate(prompt())
    assert reply.body["error"]["message"] in str(refused.value)
    assert refused.value.phase == "request"
    assert refused.value.provider_payload == reply.body["error"]
    assert len(elsewhere.server.asked) == 1


@pytest.mark.parametrize("body", [b"<html>", b'{"output": [1]}', b"[]"])
def test_an_answer_that_is_none(elsewhere: Elsewhere, body: bytes) -> None:
    elsewhere.server.script(Reply(body))
    with pytest.raises(PromptEvaluationError, match="no response of the Responses API") as strange:
        elsewhere.adapter().evaluate(prompt())
    assert (strange.value.phase, strange.value.provider_payload) == ("response", body.decode())


def test_what_is_logged_has_ids_and_sizes_and_no_secrets(
    elsewhere: Elsewhere, caplog: pytest.LogCaptureFixture
) -> None:
    tool = OpenAICodeInterpreterTool(container=AutoContainerConfig(memory_limit="16g"))
    elsewhere.server.script(response(code_call(), message("the answer")))
    with caplog.at_level(logging.DEBUG, "fumehood"):
        elsewhere.adapter(model_config=OpenAIModelConfig(max_output_tokens=77)).evaluate(prompt(tool))
    (record,) = [record for record in caplog.records if hasattr(record, "fumehood")]
    assert vars(record)["fumehood"] == {
        "prompt": "task",
        "request_id": "req_1",
        "response_id": "resp_1",
        "model": "gpt-4.1",
        "max_output_tokens": 77,
        "container_ids": ["cntr_1"],
        "memory_limit": "16g",
        "input_tokens": 10,
        "output_tokens": 5,
    }
    for secret in ("sk-secret", "the answer", "Do it"):
        assert secret not in caplog.text
