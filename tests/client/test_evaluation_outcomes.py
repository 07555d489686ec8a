"""How evaluations end: limits, filters, busy and rejecting providers, logs."""

import contextlib
import functools
import json
import logging
import operator
import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from time import monotonic
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fumehood.client import (
    Budget,
    BudgetTracker,
    Deadline,
    FilteredOutputError,
    FumehoodError,
    InProcessDispatcher,
    PromptEvaluationError,
    PromptExecuted,
    PromptRendered,
    Session,
    Tool,
    ToolContext,
    ToolInvoked,
    ToolResult,
)
from fumehood.client.adapters.openai import (
    AutoContainerConfig,
    ContainerManager,
    ExistingContainerRef,
    OpenAIAdapter,
    OpenAIClientConfig,
    OpenAICodeInterpreterSection,
    OpenAICodeInterpreterTool,
    OpenAIContainerWorkspaceSection,
    OpenAIModelConfig,
)
from fumehood.client.adapters.openai.native_tools.code_interpreter_section import CodeInterpreterParams
from fumehood.client.errors import (
    BudgetExceededError,
    DeadlineExceededError,
    ThrottleError,
)
from tests.client.conftest import OpenAIStandIn
from tests.support.client_prompts import (
    HOSTED,
    PATIENT,
    Query,
    code_call,
    function_call,
    listen,
    prompt,
    query_tool,
    typed,
)
from tests.support.evaluation_modes import MODES
from tests.support.openai_server import Reply, error, message, response

ALL_MODES = True

# --- events, limits, ends -----------------------------------------------------------------------------


def test_another_bus_gets_every_event_once(openai_stand_in: OpenAIStandIn) -> None:
    openai_stand_in.server.script(response(function_call("c1", '{"sql": "x"}')), response(message("done")))
    bus, events = InProcessDispatcher(), list[str]()
    for kind in (PromptRendered, ToolInvoked, PromptExecuted):
        bus.subscribe(kind, lambda event: events.append(type(event).__name__))
    openai_stand_in.adapter().evaluate(prompt(query_tool), session=Session(bus=bus), bus=bus)
    assert events == ["PromptRendered", "ToolInvoked", "PromptExecuted"]
    openai_stand_in.server.script(response(message("done")))
    openai_stand_in.adapter().evaluate(prompt(), bus=bus)
    assert events[3:] == ["PromptRendered", "PromptExecuted"]


def test_a_budget_ends_an_evaluation_before_the_next_request(openai_stand_in: OpenAIStandIn) -> None:
    tracker = BudgetTracker(Budget(max_total_tokens=30))
    openai_stand_in.server.script(*[response(function_call("c1", '{"sql": "x"}'))] * 9)
    with pytest.raises(
        BudgetExceededError, match=r"30 of 30 total tokens were used before the tool 'run_query'"
    ):
        openai_stand_in.adapter().evaluate(prompt(query_tool), budget_tracker=tracker)
    assert len(openai_stand_in.server.asked) == 2
    with pytest.raises(BudgetExceededError, match="before the next request"):
        openai_stand_in.adapter().evaluate(prompt(query_tool), budget_tracker=tracker)
    assert len(openai_stand_in.server.asked) == 2


def test_a_deadline_ends_an_evaluation(openai_stand_in: OpenAIStandIn) -> None:
    start = Deadline.after(0).expires_at
    time = [start]

    def late(params: Query, *, context: ToolContext) -> ToolResult[Query]:
        time[0] += timedelta(hours=1)
        return ToolResult.ok(params)

    slow = Tool[Query, Query](name="run_query", description="x", handler=late)
    deadline = Deadline(start + timedelta(minutes=5), clock=lambda: time[0])
    openai_stand_in.server.script(
        response(function_call("c1", '{"sql": "x"}'), function_call("c2", '{"sql": "x"}'))
    )
    with pytest.raises(DeadlineExceededError, match="before the tool"):
        openai_stand_in.adapter().evaluate(prompt(slow), budget=Budget(deadline=deadline))
    with pytest.raises(DeadlineExceededError, match="before the first request"):
        openai_stand_in.adapter(hosted_tools=HOSTED).evaluate(
            prompt(slow, sections=(OpenAIContainerWorkspaceSection(session=Session()),)), deadline=deadline
        )
    assert openai_stand_in.server.calls == ["POST /v1/responses"]


def test_an_evaluation_ends_after_max_turns(openai_stand_in: OpenAIStandIn) -> None:
    with pytest.raises(PromptEvaluationError, match="no answer after 3 turns"):
        openai_stand_in.evaluate(
            prompt(query_tool), *[response(function_call("c1", '{"sql": "x"}'))] * 9, max_turns=3
        )


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
def test_a_filtered_answer_that_is_required_raises(openai_stand_in: OpenAIStandIn, reply: Reply) -> None:
    with pytest.raises(FilteredOutputError) as withheld:
        openai_stand_in.evaluate(typed(), reply)
    assert isinstance(withheld.value, AssertionError)
    assert withheld.value.phase == "response"


def test_other_ends_of_a_response(openai_stand_in: OpenAIStandIn, caplog: pytest.LogCaptureFixture) -> None:
    failed = {"message": "The server had an error", "code": "server_error"}
    with pytest.raises(PromptEvaluationError, match="The server had an error") as wrong:
        openai_stand_in.evaluate(typed(), response(status="failed", error=failed))
    assert wrong.value.provider_payload == failed
    cut: dict[str, Any] = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    with pytest.raises(PromptEvaluationError, match=r"cut off \(max_output_tokens\)"):
        openai_stand_in.evaluate(typed(), response(message('{"val'), **cut))
    for reason in ("content_filter", "max_output_tokens"):
        cut["incomplete_details"] = {"reason": reason}
        openai_stand_in.server.script(response(message("partly"), **cut))
        caplog.clear()
        assert openai_stand_in.adapter().evaluate(prompt()).text == "partly"
        assert f"The answer to task was cut off: {reason}" in caplog.text
    for status in ("queued", "in_progress", "cancelled"):
        with pytest.raises(PromptEvaluationError, match=f"its status is {status}"):
            openai_stand_in.evaluate(prompt(), response(status=status))
    thought: dict[str, Any] = {"type": "reasoning", "id": "rs_1", "summary": []}
    for reply in (response(thought, **cut), Reply({}), Reply({"id": "resp_1"})):
        with pytest.raises(PromptEvaluationError, match="cut off"):
            openai_stand_in.evaluate(prompt(), reply)
    for reply in (response(), response(message("")), response(thought), response(code_call())):
        for asked in (prompt(), typed()):
            with pytest.raises(PromptEvaluationError, match="The answer is empty") as empty:
                openai_stand_in.evaluate(asked, reply)
            assert empty.value.phase == "response"
            assert empty.value.provider_payload == [*reply.body["output"]]
    openai_stand_in.server.script(response(message("no JSON")))
    assert openai_stand_in.adapter().evaluate(typed(), parse_output=False).output is None


# --- a provider that is busy, or says no --------------------------------------------------------------


def test_a_busy_provider_is_retried_with_the_same_idempotency_key(openai_stand_in: OpenAIStandIn) -> None:
    assert (
        openai_stand_in.evaluate(
            prompt(),
            error(429, "Slow down", "rate_limit_exceeded", retry_after="0"),
            error(500, "Oops", retry_after_ms="1"),
            Reply(closes=True),
            error(503, "Overloaded", retry_after="Thu, 01 Jan 1970 00:00:00 GMT"),
            response(message("at last")),
            throttle=PATIENT,
        ).text
        == "at last"
    )
    keys = {headers["idempotency-key"] for headers in openai_stand_in.server.headers}
    assert (len(openai_stand_in.server.headers), len(keys)) == (5, 1)
    openai_stand_in.evaluate(prompt(), response(message("again")))
    assert openai_stand_in.server.headers[0]["idempotency-key"] not in keys


@pytest.mark.parametrize(
    "reply", [error(400, "Bad model", "model_not_found"), error(429, "No money", "insufficient_quota")]
)
def test_a_rejected_request_raises_the_providers_error_without_retries(
    openai_stand_in: OpenAIStandIn, reply: Reply
) -> None:
    with pytest.raises(PromptEvaluationError) as refused:
        openai_stand_in.evaluate(prompt(), reply, throttle=PATIENT)
    assert reply.body["error"]["message"] in str(refused.value)
    assert refused.value.phase == "request"
    assert refused.value.provider_payload == reply.body["error"]
    assert len(openai_stand_in.server.asked) == 1


@pytest.mark.parametrize(
    ("status", "code"), [(429, "rate_limit_exceeded"), (500, "server_error"), (503, None)]
)
def test_a_provider_that_answers_was_reached(
    openai_stand_in: OpenAIStandIn, status: int, code: str | None
) -> None:
    with pytest.raises(ThrottleError) as busy:
        openai_stand_in.evaluate(prompt(), *[error(status, "Too much to do.", code)] * 9, throttle=PATIENT)
    assert str(busy.value) == f"task: The provider answered {status} in 5 attempts: Too much to do."
    assert busy.value.phase == "request"
    assert busy.value.provider_payload == error(status, "Too much to do.", code).body["error"]


def test_the_deadline_covers_the_probe_of_the_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        config = OpenAIClientConfig(api_key="k", base_url=url)
        started = monotonic()
        with (
            OpenAIAdapter(model="gpt-4.1", client_config=config) as adapter,
            pytest.raises(DeadlineExceededError),
        ):
            adapter.evaluate(prompt(OpenAICodeInterpreterTool()), deadline=Deadline.after(0.2))
        assert monotonic() - started < 5


def test_a_provider_that_forbids_retries_is_not_retried(openai_stand_in: OpenAIStandIn) -> None:
    with pytest.raises(PromptEvaluationError, match="Broken for good"):
        openai_stand_in.evaluate(
            prompt(),
            error(500, "Broken for good", x_should_retry="false"),
            response(message("never")),
            throttle=PATIENT,
        )
    assert len(openai_stand_in.server.asked) == 1


def test_a_truncated_body_is_requested_again(openai_stand_in: OpenAIStandIn) -> None:
    assert (
        openai_stand_in.evaluate(
            prompt(),
            Reply(b'{"id"', headers={"content-length": "99", "connection": "close"}),
            response(message("whole")),
            throttle=PATIENT,
        ).text
        == "whole"
    )
    assert len(openai_stand_in.server.asked) == 2


def test_checking_a_container_has_a_deadline(openai_stand_in: OpenAIStandIn) -> None:
    now = Deadline.after(0).expires_at
    deadline = Deadline(now + timedelta(seconds=5), clock=lambda: now)
    openai_stand_in.server.script()
    openai_stand_in.server.broken = error(503, "Busy", retry_after="60")
    tool = OpenAICodeInterpreterTool(container=ExistingContainerRef("cntr_1"))
    with pytest.raises(ThrottleError, match="the deadline comes before the next one"):
        openai_stand_in.adapter().evaluate(prompt(tool), deadline=deadline)
    assert openai_stand_in.server.calls == ["GET /v1/containers/cntr_1"]


@pytest.mark.parametrize("body", [b"<html>", b'{"output": [1]}', b"[]"])
def test_a_body_that_is_no_response_raises(openai_stand_in: OpenAIStandIn, body: bytes) -> None:
    with pytest.raises(PromptEvaluationError, match="no response of the Responses API") as strange:
        openai_stand_in.evaluate(prompt(), Reply(body))
    assert (strange.value.phase, strange.value.provider_payload) == ("response", body.decode())


def test_logs_have_ids_and_sizes_and_no_secrets(
    openai_stand_in: OpenAIStandIn, caplog: pytest.LogCaptureFixture
) -> None:
    tool = OpenAICodeInterpreterTool(container=AutoContainerConfig(memory_limit="16g"))
    with caplog.at_level(logging.DEBUG, "fumehood"):
        openai_stand_in.evaluate(
            prompt(tool),
            response(code_call(), message("the answer")),
            model_config=OpenAIModelConfig(max_output_tokens=77),
        )
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


@pytest.mark.parametrize("as_section", [False, True])
def test_the_memory_limit_of_an_existing_container_is_logged_as_given(
    openai_stand_in: OpenAIStandIn, caplog: pytest.LogCaptureFixture, as_section: bool
) -> None:
    container = ExistingContainerRef(ContainerManager(openai_stand_in.client).create(), "64g")
    section = OpenAICodeInterpreterSection(default_params=CodeInterpreterParams(container))
    asked = (
        prompt(sections=(section,)) if as_section else prompt(OpenAICodeInterpreterTool(container=container))
    )
    with caplog.at_level(logging.INFO, "fumehood"):
        openai_stand_in.evaluate(asked, response(message("done")))
    (record,) = [record for record in caplog.records if hasattr(record, "fumehood")]
    assert vars(record)["fumehood"]["memory_limit"] == "64g"
    assert openai_stand_in.server.asked[0]["tools"] == [
        {"type": "code_interpreter", "container": container.id}
    ]


# --- what is not as it should be ----------------------------------------------------------------------

_NESTED: dict[str, Any] = {
    "id": "call_9",
    "type": "code_interpreter",
    "code_interpreter": {"input": "1", "outputs": []},
}
_CITED = {"type": "container_file_citation", "file_id": "f", "container_id": "cntr_1", "start_index": 1}
_RAN = {"stdout": "", "exit_code": 0, "files": [{"container_id": "cntr_1", "file_id": "f", "filename": "f"}]}
_WHOLE = response(
    {"type": "reasoning", "id": "rs_1", "summary": []},
    code_call(**{"fumehood:execution": _RAN}),
    {"type": "file_search_call", "id": "fs_1", "status": "completed", "results": [{"file_id": "f"}]},
    message(
        "Look",
        _CITED,
        content=[{"type": "output_text", "text": "x", "tool_calls": [_NESTED], "annotations": [_CITED]}],
    ),
    function_call("c1", '{"sql": "x"}'),
).body


def iter_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to everything in it."""
    names: Any = ()
    if isinstance(value, dict):
        names = [*cast(dict[str, Any], value)]
    elif isinstance(value, list | tuple):
        names = range(len(cast(Sequence[Any], value)))
    for name in names:
        yield (*path, name)
        yield from iter_paths(value[name], (*path, name))


_JUNK: list[Any] = [
    None,
    5,
    True,
    -1.5,
    "x",
    "",
    [],
    [5],
    [None],
    {},
    {"type": "message"},
    [[{}]],
    {"x": [1]},
]
_CHANGES = st.tuples(st.sampled_from([*iter_paths(_WHOLE)]), st.sampled_from(_JUNK))


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(MODES), st.lists(_CHANGES, min_size=1, max_size=3))
def test_a_malformed_response_is_read_as_far_as_it_goes_or_refused(
    shared_stand_in: OpenAIStandIn, mode: str, changes: list[tuple[tuple[Any, ...], Any]]
) -> None:
    """Nothing that a provider sends ends in an error that is not ours."""
    body = json.loads(json.dumps(_WHOLE))
    for path, junk in changes:
        with contextlib.suppress(TypeError, LookupError):  # an earlier change has taken this place away
            inner = functools.reduce(operator.getitem, path[:-1], body)
            inner[path[-1]] = junk
    shared_stand_in.server.script(Reply(body), response(message("done")))
    session, events = listen()
    stand_in = replace(shared_stand_in, mode=mode)
    with contextlib.suppress(FumehoodError):
        stand_in.adapter(hosted_tools=HOSTED).evaluate(prompt(query_tool), session=session)
    assert shared_stand_in.server.asked
    for event in events:
        assert isinstance(event.result.message, str)
        assert isinstance(event.call_id, str | None)
