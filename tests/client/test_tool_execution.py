"""Calls and their results, against a server that is not ours."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import pytest

from fumehood.client import (
    Deadline,
    ProviderTool,
    Section,
    Tool,
    ToolContext,
    ToolResult,
)
from fumehood.client.adapters.openai import (
    CodeInterpreterResult,
    OpenAICodeInterpreterTool,
    OpenAIFileSearchSection,
    OpenAIWebSearchSection,
    ProviderOutputHandler,
    ProviderToolCallData,
    build_code_interpreter_result,
    build_provider_result,
)
from fumehood.client.adapters.openai.native_tools.file_search_section import FileSearchParams
from fumehood.client.errors import (
    DeadlineExceededError,
)
from fumehood.client.prompt import AnyTool, NoParams
from tests.client.conftest import OpenAIStandIn
from tests.support.client_prompts import (
    HOSTED,
    Answer,
    Query,
    code_call,
    function_call,
    listen,
    prompt,
    query_tool,
)
from tests.support.openai_server import message, response

ALL_MODES = True


def test_every_call_has_an_output_and_an_event(openai_stand_in: OpenAIStandIn) -> None:
    session, events = listen()
    found = openai_stand_in.evaluate(
        prompt(query_tool),
        response(
            function_call("c1", '{"sql": "select"}'),
            function_call("c2", '{"sql": 1}'),
            function_call("c3", '{"sql": "raise"}'),
            function_call("c4", "{}", name="unknown"),
            function_call("c5", '{"sql": "nothing"}'),
        ),
        response(message("done")),
        session=session,
    )
    assert [(event.call_id, event.name, event.result.success) for event in events] == [
        ("c1", "run_query", True),
        ("c2", "run_query", False),
        ("c3", "run_query", False),
        ("c4", "unknown", False),
        ("c5", "run_query", False),
    ]
    outputs = openai_stand_in.server.asked[1]["input"][-5:]
    assert [item["call_id"] for item in outputs] == ["c1", "c2", "c3", "c4", "c5"]
    assert [item["output"] for item in outputs] == [event.rendered_output for event in events]
    assert "database is down" in outputs[2]["output"]
    assert "no tool 'unknown'" in outputs[3]["output"]
    assert "returned NoneType, not a ToolResult" in outputs[4]["output"]
    assert events[1].params == '{"sql": 1}'
    assert session[Answer].all() == ()  # what the handler that raised had written is undone
    assert [item.get("type", item.get("role")) for item in found.transcript] == [
        "system",
        *["function_call"] * 5,
        *["function_call_output"] * 5,
        "message",
    ]


def test_a_limit_exceeded_in_a_tool_ends_the_evaluation_after_its_event(
    openai_stand_in: OpenAIStandIn,
) -> None:
    session, events = listen()
    with pytest.raises(DeadlineExceededError, match="inner prompt"):
        openai_stand_in.evaluate(
            prompt(query_tool), response(function_call("c1", '{"sql": "nested"}')), session=session
        )
    assert [(event.call_id, event.result.success) for event in events] == [("c1", False)]
    assert session[Answer].all() == ()


class Shy:
    def __repr__(self) -> str:
        raise RuntimeError("not shown")


@pytest.mark.parametrize(
    ("result", "expected_error"),
    [
        (ToolResult[Query](5), "returned a message that is no text: 5"),  # pyright: ignore[reportArgumentType]
        (ToolResult[Query](None), "returned a message that is no text: None"),  # pyright: ignore[reportArgumentType]
        (ToolResult.ok(Shy()), "RuntimeError: not shown"),
        ("done", "returned str, not a ToolResult"),
    ],
)
def test_a_result_that_cannot_be_rendered_is_a_failure_of_the_tool(
    openai_stand_in: OpenAIStandIn, result: Any, expected_error: str
) -> None:
    def handler(params: Query, *, context: ToolContext) -> ToolResult[Any]:
        return result

    odd = Tool[Query, Any](name="run_query", description="x", handler=handler)
    session, events = listen()
    openai_stand_in.evaluate(
        prompt(odd), response(function_call("c1", '{"sql": "x"}')), response(message("done")), session=session
    )
    assert [event.result.success for event in events] == [False]
    assert expected_error in openai_stand_in.server.asked[1]["input"][-1]["output"]


def test_policies_are_asked_before_a_handler(openai_stand_in: OpenAIStandIn) -> None:
    openai_stand_in.server.script(response(function_call("c1", '{"sql": "drop"}')), response(message("done")))
    session, events = listen()

    def careful(tool: AnyTool, params: Any, context: ToolContext) -> str | None:
        return "it drops" if params.sql == "drop" else None

    openai_stand_in.adapter().evaluate(prompt(query_tool, policies=[careful]), session=session)
    assert events[0].result.message == "'run_query' may not be called now: it drops"


def test_reasoning_and_hosted_calls_are_replayed_as_they_came(openai_stand_in: OpenAIStandIn) -> None:
    output: list[dict[str, Any]] = [
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x", "new_field": {"a": [1]}},
        code_call(novelty=True),
        message("Look:", {"type": "container_file_citation", "file_id": "f", "container_id": "cntr_1"}),
        function_call("c1", '{"sql": "x"}'),
    ]
    found = openai_stand_in.evaluate(
        prompt(query_tool), response(*output), response(message("done")), hosted_tools=HOSTED
    )
    assert openai_stand_in.server.asked[1]["input"][1:5] == output
    assert [file.file_id for file in found.files] == ["f"]  # though it was cited before the last turn


NOTE = {
    "type": "container_file_citation",
    "file_id": "cfile_1",
    "container_id": "cntr_1",
    "filename": "a.csv",
}


def test_provider_output_goes_to_its_handler_first_with_the_same_context(
    openai_stand_in: OpenAIStandIn,
) -> None:
    seen: list[tuple[str, Any, ToolContext]] = []

    def from_provider(
        data: ProviderToolCallData, context: ToolContext, kind: type[CodeInterpreterResult]
    ) -> ToolResult[CodeInterpreterResult]:
        seen.append(("provider", data, context))
        assert kind is CodeInterpreterResult
        return ToolResult(data.code or "", kind(files=()))

    def handler(params: NoParams, *, context: ToolContext) -> ToolResult[CodeInterpreterResult]:
        seen.append(("handler", params, context))
        return ToolResult.ok(CodeInterpreterResult(stdout="from the handler"))

    both = OpenAICodeInterpreterTool(handler=handler, handle_provider_output=from_provider)

    def query(params: Query, *, context: ToolContext) -> ToolResult[Query]:
        seen.append(("function", params, context))
        return ToolResult.ok(params)

    session, events = listen()
    asking = Tool[Query, Query](name="run_query", description="x", handler=query)
    openai_stand_in.evaluate(
        prompt(both, asking),
        response(code_call(), function_call("c1", '{"sql": "x"}')),
        response(message("done", NOTE)),
        session=session,
    )
    assert [kind for kind, _, _ in seen] == ["provider", "function"]
    assert seen[0][2] is seen[1][2]  # one context, whoever is called

    seen.clear()
    events.clear()
    found = openai_stand_in.evaluate(
        prompt(both), response(code_call(), message("done", NOTE)), session=session
    )
    assert [kind for kind, _, _ in seen] == ["provider"]
    data = seen[0][1]
    assert (data.code, data.container_id, data.status, data.annotations) == (
        "1+1",
        "cntr_1",
        "completed",
        (NOTE,),
    )
    assert (events[0].name, events[0].call_id, events[0].result.message) == (
        "code_interpreter",
        "ci_1",
        "1+1",
    )
    assert found.annotations == (NOTE,)
    assert found.files[0].file_id == "cfile_1"

    seen.clear()
    openai_stand_in.evaluate(
        prompt(OpenAICodeInterpreterTool(handler=handler)),
        response(code_call(), code_call(id="ci_2"), message("done")),
        session=session,
    )
    assert [(kind, params) for kind, params, _ in seen] == [("handler", NoParams())] * 2
    assert seen[0][2] is seen[1][2]
    context = seen[0][2]
    assert (context.prompt.name, context.session, context.adapter.provider) == ("task", session, "openai")
    assert events[-1].result.value == CodeInterpreterResult(stdout="from the handler")


def test_a_handler_of_the_providers_output_fails_as_any_other(openai_stand_in: OpenAIStandIn) -> None:
    def handle(data: Any, context: ToolContext, kind: Any) -> Any:
        context.session[Answer].append(Answer(1))
        if data.code == "late":
            raise DeadlineExceededError("the inner prompt was late", phase="deadline")
        return data.code

    session, events = listen()
    tool = OpenAICodeInterpreterTool(handle_provider_output=handle)
    openai_stand_in.evaluate(prompt(tool), response(code_call(), message("done")), session=session)
    assert "returned str, not a ToolResult" in events[0].result.message
    with pytest.raises(DeadlineExceededError, match="inner prompt"):
        openai_stand_in.evaluate(
            prompt(tool), response(code_call(code="late"), message("done")), session=session
        )
    assert [(event.call_id, event.result.success) for event in events] == [("ci_1", False)] * 2
    assert session[Answer].all() == ()


def test_a_handler_of_the_providers_output_can_use_its_context(openai_stand_in: OpenAIStandIn) -> None:
    """It evaluates a prompt of its own within the same deadline, and publishes an event."""
    contexts: list[ToolContext] = []

    def summarize(
        data: ProviderToolCallData, context: ToolContext, kind: type[CodeInterpreterResult]
    ) -> ToolResult[CodeInterpreterResult]:
        contexts.append(context)
        inner = context.adapter.evaluate(prompt(), session=context.session, deadline=context.deadline)
        context.event_bus.publish(Answer(len(data.outputs)))
        return ToolResult.ok(kind(stdout=inner.text or ""))

    session, events = listen()
    published: list[Answer] = []
    session.bus.subscribe(Answer, published.append)
    deadline = Deadline.after(60)
    openai_stand_in.evaluate(
        prompt(OpenAICodeInterpreterTool(handle_provider_output=summarize)),
        response(code_call(), message("done")),
        response(message("in short")),
        session=session,
        deadline=deadline,
    )
    assert [event.result.value for event in events] == [CodeInterpreterResult(stdout="in short")]
    assert published == [Answer(1)]
    (context,) = contexts
    assert (context.prompt.name, context.rendered_prompt.text) == ("task", "## 1. Task\n\nDo it.")
    assert (context.session, context.deadline) == (session, deadline)


def test_a_handler_of_ones_own_wraps_the_default_one(openai_stand_in: OpenAIStandIn) -> None:
    def shout(
        data: ProviderToolCallData, context: ToolContext, kind: type[CodeInterpreterResult]
    ) -> ToolResult[CodeInterpreterResult]:
        result = build_code_interpreter_result(data, context, kind)
        return ToolResult(result.message.upper(), result.value, success=result.success)

    def cite(data: ProviderToolCallData, context: ToolContext, kind: type[Any]) -> ToolResult[Any]:
        result = build_provider_result(data, context, kind)
        return ToolResult(f"searched: {result.message}", result.value)

    search = ProviderTool[NoParams, ProviderToolCallData, NoParams](
        name="search",
        description="Search.",
        provider="openai",
        native_type="web_search",
        config=NoParams(),
        handle_provider_output=cite,
    )
    handler: ProviderOutputHandler[CodeInterpreterResult] = shout
    session, events = listen()
    openai_stand_in.evaluate(
        prompt(OpenAICodeInterpreterTool(handle_provider_output=handler), search),
        response(
            code_call(outputs=[{"type": "logs", "logs": "done\n"}]),
            {"type": "web_search_call", "id": "ws_1", "status": "completed"},
            message("done"),
        ),
        session=session,
    )
    (ran, output), (searched, report) = ((event.result, cast(Any, event.result.value)) for event in events)
    assert (ran.message, output.stdout, ran.success) == ("DONE\n", "done\n", True)
    assert searched.message == "searched: web_search: completed"
    assert report.id == "ws_1"


def test_without_a_handler_for_it_the_report_is_decoded_into_the_parameters(
    openai_stand_in: OpenAIStandIn,
) -> None:
    @dataclass(frozen=True)
    class Ran:
        code: str
        status: str

    def handler(params: Ran, *, context: ToolContext) -> ToolResult[Answer]:
        if params.code == "fail":
            raise RuntimeError("oops")
        return ToolResult.ok(Answer(len(params.code)))

    tool = ProviderTool[Ran, Answer, Mapping[str, object]](
        name="python",
        description="x",
        provider="openai",
        native_type="code_interpreter",
        config={"container": {"type": "auto"}},
        handler=handler,
    )
    session, events = listen()
    openai_stand_in.evaluate(
        prompt(tool),
        response(code_call(), code_call(code=5), code_call(code="fail"), message("done")),
        session=session,
    )
    assert [(event.name, event.result.success) for event in events] == [
        ("python", True),
        ("python", False),
        ("python", False),
    ]
    assert (events[0].params, events[0].result.value) == (Ran("1+1", "completed"), Answer(3))


@pytest.mark.parametrize(
    ("section", "item"),
    [
        (
            OpenAIFileSearchSection(default_params=FileSearchParams(("vs_1",))),
            {
                "type": "file_search_call",
                "id": "fs_1",
                "status": "completed",
                "queries": ["q"],
                "results": [{"file_id": "f"}],
            },
        ),
        (
            OpenAIWebSearchSection(),
            {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {}},
        ),
    ],
)
def test_searches_are_published_like_any_tool(
    openai_stand_in: OpenAIStandIn, section: Section[Any], item: dict[str, Any]
) -> None:
    name = str(item["type"]).removesuffix("_call")
    session, events = listen()
    found = openai_stand_in.evaluate(
        prompt(query_tool, sections=(section,)), response(item, message("found")), session=session
    )
    assert [(event.name, event.call_id, event.result.success) for event in events] == [
        (name, item["id"], True)
    ]
    assert isinstance(events[0].params, ProviderToolCallData)
    assert list(found.transcript)[1] == item
    assert found.transcript[2]["type"] == "message"
