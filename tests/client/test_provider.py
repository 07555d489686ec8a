"""The adapter against a server that is not ours: requests, tools, what is refused before; imports the support."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from inline_snapshot import snapshot
from openai import AsyncOpenAI

from fumehood.client import (
    ContainerExpiredError,
    MarkdownSection,
    Prompt,
    PromptEvaluationError,
    ProviderTool,
    Section,
    Session,
    Tool,
    ToolContext,
    ToolResult,
)
from fumehood.client.adapters.openai import (
    AutoContainerConfig,
    CodeInterpreterResult,
    CompactionConfig,
    ContainerConfig,
    ContainerManager,
    ExistingContainerRef,
    FileSearchConfig,
    OpenAIAdapter,
    OpenAIClientConfig,
    OpenAICodeInterpreterSection,
    OpenAICodeInterpreterTool,
    OpenAIContainerWorkspaceSection,
    OpenAIFileSearchSection,
    OpenAIHostedToolsConfig,
    OpenAIModelConfig,
    OpenAIWebSearchSection,
    ProviderToolCallData,
)
from fumehood.client.adapters.openai.native_tools.code_interpreter_section import CodeInterpreterParams
from fumehood.client.adapters.openai.native_tools.file_search_section import FileSearchParams
from fumehood.client.adapters.openai.native_tools.web_search_section import WebSearchParams
from fumehood.client.errors import (
    DeadlineExceededError,
    PromptValidationError,
)
from fumehood.client.prompt import AnyTool, NoParams
from tests.client.conftest import Elsewhere
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

# --- requests -----------------------------------------------------------------------------------------


def test_a_whole_request(elsewhere: Elsewhere) -> None:
    elsewhere.server.script(response(message('{"value": 7}')))
    adapter = elsewhere.adapter(
        model_config=OpenAIModelConfig(temperature=0.5, max_output_tokens=99, extra={"user": "u"}),
        hosted_tools=OpenAIHostedToolsConfig(
            code_interpreter=True, file_search=FileSearchConfig(("vs_1",)), web_search=True
        ),
    )
    found = adapter.evaluate(
        Prompt[Answer](
            ns="tests",
            key="whole",
            sections=[MarkdownSection(title="Task", key="task", template="Do it.", tools=[query_tool])],
        )
    )
    assert found.output == Answer(7)
    (request,) = elsewhere.server.asked
    assert request == snapshot(
        {
            "include": [
                "code_interpreter_call.outputs",
                "file_search_call.results",
                "web_search_call.action.sources",
            ],
            "input": [{"role": "system", "content": "## 1. Task\n\nDo it."}],
            "max_output_tokens": 99,
            "model": "gpt-4.1",
            "temperature": 0.5,
            "text": {
                "format": {
                    "type": "json_schema",
                    "name": "answer",
                    "schema": {
                        "title": "Answer",
                        "type": "object",
                        "properties": {"value": {"type": "integer"}},
                        "required": ["value"],
                        "additionalProperties": False,
                    },
                    "strict": True,
                }
            },
            "tool_choice": "auto",
            "tools": [
                {
                    "type": "function",
                    "name": "run_query",
                    "description": "Run it.",
                    "parameters": {
                        "title": "Query",
                        "type": "object",
                        "properties": {"sql": {"type": "string"}},
                        "required": ["sql"],
                        "additionalProperties": False,
                    },
                    "strict": True,
                },
                {"type": "code_interpreter", "container": {"type": "auto"}},
                {"type": "file_search", "vector_store_ids": ["vs_1"], "max_num_results": 20},
                {"type": "web_search"},
            ],
            "user": "u",
        }
    )


def test_a_forced_choice_is_for_the_first_call(elsewhere: Elsewhere) -> None:
    elsewhere.server.script(response(function_call("c1", '{"sql": "x"}')), response(message("done")))
    elsewhere.adapter(tool_choice="required").evaluate(prompt(query_tool))
    assert [request["tool_choice"] for request in elsewhere.server.asked] == ["required", "auto"]


def test_a_prompts_choice_goes_before_the_adapters(elsewhere: Elsewhere) -> None:
    elsewhere.server.script(response(message("done")))
    chosen = {"type": "built_in", "name": "code_interpreter"}
    adapter = elsewhere.adapter(
        hosted_tools=OpenAIHostedToolsConfig(code_interpreter=True), tool_choice="none"
    )
    adapter.evaluate(prompt(tool_choice=chosen))
    assert elsewhere.server.asked[0]["tool_choice"] == {"type": "code_interpreter"}


def test_the_three_ways_to_ask_for_python_are_one(elsewhere: Elsewhere) -> None:
    elsewhere.server.script(response(message("done")))
    adapter = elsewhere.adapter(hosted_tools=OpenAIHostedToolsConfig(code_interpreter=True))
    asks = prompt(OpenAICodeInterpreterTool(), sections=(OpenAICodeInterpreterSection(),))
    assert len(asks.render().native_tools) == 1
    adapter.evaluate(asks)
    assert elsewhere.server.asked[0]["tools"] == [
        {"type": "code_interpreter", "container": {"type": "auto", "memory_limit": "1g"}}
    ]
    larger = OpenAICodeInterpreterTool(container=AutoContainerConfig(memory_limit="4g"))
    with pytest.raises(PromptValidationError, match="asked for twice, with different settings"):
        prompt(larger, sections=(OpenAICodeInterpreterSection(),)).render()


def test_native_sections_are_silent_and_listed() -> None:
    rendered = prompt(
        sections=(
            OpenAIFileSearchSection(default_params=FileSearchParams(corpus_ids=("vs_1",))),
            OpenAIWebSearchSection(default_params=WebSearchParams("low", ("example.com",))),
            OpenAICodeInterpreterSection(),
        )
    ).render()
    assert rendered.text == "## 1. Task\n\nDo it."
    assert rendered.tools == ()
    assert [section.accepts_overrides for section in rendered.sections] == [False, False, False, True]
    assert rendered.native_tools == snapshot(
        (
            {"type": "built_in", "name": "file_search", "vector_store_ids": ["vs_1"], "max_num_results": 5},
            {
                "type": "built_in",
                "name": "web_search",
                "search_context_size": "low",
                "filters": {"allowed_domains": ["example.com"]},
            },
            {
                "type": "built_in",
                "name": "code_interpreter",
                "container": {"type": "auto", "memory_limit": "1g"},
            },
        )
    )


def test_settings_of_a_native_section_can_be_bound(elsewhere: Elsewhere) -> None:
    elsewhere.server.script(response(message("done")))
    elsewhere.adapter().evaluate(
        prompt(sections=(OpenAIFileSearchSection(),)),
        FileSearchParams(vector_store_ids=("vs_2",), max_results=7),
    )
    assert elsewhere.server.asked[0]["tools"] == [
        {"type": "file_search", "vector_store_ids": ["vs_2"], "max_num_results": 7}
    ]


# --- what is refused before a request -----------------------------------------------------------------


def provided(native_type: str, config: object, provider: str = "openai") -> AnyTool:
    return ProviderTool[NoParams, Answer, Any](
        name="python",
        description="x",
        provider=provider,
        native_type=native_type,
        config=config,
        handle_provider_output=lambda data, context, kind: ToolResult.ok(kind(1)),
    )


def python_with(container: object) -> AnyTool:
    """A code interpreter whose settings nobody has checked yet."""
    return provided("code_interpreter", {"container": container})


@pytest.mark.parametrize(
    ("settings", "asked", "said"),
    [
        (
            {},
            lambda: prompt(provided("web_search", NoParams(), "anthropic")),
            "'python' is anthropic's; this adapter is openai's",
        ),
        ({}, lambda: prompt(provided("teleport", {})), "does not advertise the native tool 'teleport'"),
        ({"model": "local"}, lambda: prompt(provided("teleport", {})), "no native tool 'teleport'"),
        ({}, lambda: prompt(sections=(OpenAIFileSearchSection(),)), "file_search has no vector_store_ids"),
        (
            {"openai_native_tools": {"gpt-4.1": {"file_search"}}, "hosted_tools": HOSTED},
            prompt,
            "'gpt-4.1' does not advertise the native tool 'code_interpreter' .it has: file_search",
        ),
        ({"model": "local", "strict": True, "hosted_tools": HOSTED}, prompt, "it has: none"),
        (
            {"tool_choice": {"type": "web_search"}},
            lambda: prompt(query_tool),
            "does not ask for 'web_search'",
        ),
        ({"tool_choice": "sometimes"}, lambda: prompt(query_tool), "'sometimes'"),
        ({"tool_choice": "required"}, prompt, "no tools that could be required"),
        ({"tool_choice": "none"}, lambda: prompt(OpenAICodeInterpreterTool()), "'none' forbids them"),
        (
            {},
            lambda: prompt(sections=(OpenAIContainerWorkspaceSection(session=Session()),)),
            "needs the code interpreter",
        ),
        (
            {},
            lambda: prompt(
                OpenAICodeInterpreterTool(), sections=(OpenAIContainerWorkspaceSection(session=Session()),)
            ),
            "container of its own besides",
        ),
        *[
            ({}, lambda container=container: prompt(python_with(container)), said)
            for container, said in (
                ({"type": "auto", "memory_limit": "8g"}, r"container\.memory_limit is '8g'"),
                ({"type": "other"}, r"container\.type is 'other'"),
                ({}, r"container\.type is None"),
                ({"type": "auto", "file_ids": "file-1"}, r"container\.file_ids is 'file-1'"),
                ({"id": ""}, r"container\.id is ''"),
                (" ", r"container\.id is ' '"),
                (None, "container is None"),
                (5, "container is 5"),
            )
        ],
        (
            {},
            lambda: prompt(OpenAICodeInterpreterTool(), python_with({"type": "auto", "memory_limit": "1g"})),
            "'code_interpreter' and 'python' are both code_interpreter",
        ),
        ({}, lambda: prompt(provided("web_search", 5)), "config of the tool 'python' is 5"),
        *[
            ({"tool_choice": choice}, lambda: prompt(query_tool), "tool_choice")
            for choice in (5, ["auto"], {"type": "function", "name": ["a"]}, {"type": "allowed_tools"})
        ],
        ({}, lambda: prompt(OpenAICodeInterpreterTool()).bind, "is no prompt; of a template, make Prompt"),
    ],
)
def test_what_is_wrong_is_found_before_a_request(
    elsewhere: Elsewhere, settings: dict[str, Any], asked: Any, said: str
) -> None:
    with pytest.raises(PromptEvaluationError, match=said) as refused:
        elsewhere.adapter(**settings).evaluate(asked())
    assert refused.value.phase == "configuration"
    assert refused.value.prompt_name in ("task", "")  # "" is of what is no prompt
    assert elsewhere.server.calls == []


@pytest.mark.parametrize(
    ("limit", "said"), [({"deadline": 5}, r"Deadline\.after\(5\)"), ({"budget": 1000}, "Budget\\(max_total")]
)
def test_limits_have_their_types(elsewhere: Elsewhere, limit: dict[str, Any], said: str) -> None:
    with pytest.raises(PromptEvaluationError, match=said):
        elsewhere.adapter().evaluate(prompt(), **limit)
    assert elsewhere.server.calls == []


def test_containers_are_understood_however_they_are_written(elsewhere: Elsewhere) -> None:
    alive = ContainerManager(elsewhere.client).create()
    for container, sent in (
        ({"id": alive, "memory_limit": "4g"}, alive),
        (alive, alive),
        (
            {"type": "auto", "network_policy": {"type": "disabled"}},
            {"type": "auto", "network_policy": {"type": "disabled"}},
        ),
    ):
        elsewhere.server.script(response(message("done")))
        elsewhere.adapter().evaluate(prompt(python_with(container)))
        assert elsewhere.server.asked[0]["tools"] == [{"type": "code_interpreter", "container": sent}]


def test_what_openai_does_not_know_is_sent_all_the_same(elsewhere: Elsewhere) -> None:
    elsewhere.server.script(response(message("done")))
    config = OpenAIModelConfig(extra={"seed": 7, "chat_template_kwargs": {"thinking": False}})
    elsewhere.adapter(model_config=config).evaluate(prompt())
    (request,) = elsewhere.server.asked
    assert (request["seed"], request["chat_template_kwargs"]) == (7, {"thinking": False})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: OpenAIAdapter(model=" "), "model is ' '"),
        (lambda: OpenAIAdapter(model="m", client=AsyncOpenAI(api_key="k")), "asynchronous"),  # pyright: ignore[reportArgumentType]
        (
            lambda: OpenAIAdapter(model="m", openai_native_tools={"m": {"teleport"}}),
            r"openai_native_tools\['m'\] has teleport",
        ),
        (
            lambda: OpenAIAdapter(model="m", openai_native_tools={"m": "web_search"}),
            r"openai_native_tools\['m'\] is 'web_search'",
        ),
        (lambda: OpenAIAdapter(model="m", openai_native_tools=["m"]), "has to map models"),  # pyright: ignore[reportArgumentType]
        (lambda: OpenAIClientConfig(base_url="localhost:8080"), "base_url is 'localhost:8080'"),
        (lambda: OpenAIClientConfig(timeout=0), "timeout is 0"),
        (lambda: ContainerConfig(memory_limit=None), r"container_config\.memory_limit is None"),  # pyright: ignore[reportArgumentType]
        (lambda: OpenAIAdapter(model="m", max_turns=0), "max_turns"),
        (lambda: ContainerConfig(memory_limit="8g"), r"container_config\.memory_limit is '8g'"),
        (lambda: ContainerConfig(mode="other"), "mode is 'other'"),  # pyright: ignore[reportArgumentType]
        (lambda: CompactionConfig(threshold_tokens=0), "threshold_tokens is 0"),
        (lambda: FileSearchConfig(max_results=0), "max_results is 0"),
        (lambda: FileSearchConfig(max_results="5"), "max_results is '5'"),  # pyright: ignore[reportArgumentType]
        (lambda: FileSearchConfig("vs_1"), "vector_store_ids is 'vs_1'"),  # pyright: ignore[reportArgumentType]
        (lambda: FileSearchConfig(("",)), "vector_store_ids is"),
        (
            lambda: OpenAIFileSearchSection(default_params=FileSearchParams(max_results=51)),
            "max_results is 51",
        ),
        (lambda: OpenAIFileSearchSection(default_params=FileSearchParams(("a",), 5, ("b",))), "two names"),
        (
            lambda: OpenAIFileSearchSection(default_params=WebSearchParams()),  # pyright: ignore[reportArgumentType]
            r"takes .*FileSearchParams.*; default_params is WebSearchParams",
        ),
        (
            lambda: OpenAIFileSearchSection(model="m-1", openai_native_tools={"m": {"web_search"}}),
            "'m-1' does not advertise the native tool 'file_search' .it has: web_search",
        ),
        (
            lambda: OpenAIWebSearchSection(model="gpt-4.1-nano"),
            "'gpt-4.1-nano' does not advertise .* 'web_search'",
        ),
        (
            lambda: OpenAICodeInterpreterSection(default_params=CodeInterpreterParams(None)),  # pyright: ignore[reportArgumentType]
            "container is None",
        ),
        (
            lambda: OpenAIWebSearchSection(default_params=WebSearchParams("huge")),  # pyright: ignore[reportArgumentType]
            "search_context_size is 'huge'",
        ),
        (
            lambda: OpenAIWebSearchSection(default_params=WebSearchParams(allowed_domains="x.org")),  # pyright: ignore[reportArgumentType]
            "allowed_domains is 'x.org'",
        ),
        (
            lambda: OpenAIWebSearchSection(default_params=WebSearchParams(allowed_domains=("http://x",))),
            "allowed_domains",
        ),
        (lambda: OpenAIModelConfig(max_output_tokens=0), "max_output_tokens is 0"),
        (lambda: OpenAIModelConfig(temperature=math.nan), "temperature is nan"),
        (lambda: OpenAIModelConfig(top_p=1.1), r"top_p is 1\.1"),
        (lambda: OpenAIModelConfig(reasoning="high"), "reasoning is 'high'"),  # pyright: ignore[reportArgumentType]
        (lambda: OpenAIModelConfig(extra={"input": 1}), "'input', which is set elsewhere"),
        (lambda: OpenAIModelConfig(extra={"background": True}), "'background', which is set elsewhere"),
        (lambda: OpenAIModelConfig(top_p=1, extra={"top_p": 0}), "'top_p', which is set elsewhere"),
    ],
)
def test_malformed_settings_are_refused_where_they_are_made(make: Any, said: str) -> None:
    with pytest.raises(PromptEvaluationError, match=said):
        make()


def test_client_and_client_config_exclude_each_other(elsewhere: Elsewhere) -> None:
    with pytest.raises(PromptEvaluationError, match="client and client_config exclude each other"):
        elsewhere.adapter(client_config=OpenAIClientConfig())


def test_a_client_is_made_of_its_settings(elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere.server.script(response(message("made")))
    config = OpenAIClientConfig(api_key="k", base_url=elsewhere.server.url, timeout=5)
    with OpenAIAdapter(model="gpt-4.1", client_config=config) as adapter:
        assert adapter.evaluate(prompt()).text == "made"
        client = adapter.client
    assert client.is_closed()
    elsewhere.adapter().close()
    assert not elsewhere.client.is_closed()
    assert "'k'" not in repr(config)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(PromptEvaluationError, match="No client of OpenAI could be made"):
        OpenAIAdapter(model="gpt-4.1").evaluate(prompt())


def test_an_existing_container_is_looked_up_first(elsewhere: Elsewhere) -> None:
    tool = OpenAICodeInterpreterTool(container=ExistingContainerRef("cntr_gone"))
    with pytest.raises(ContainerExpiredError, match="'cntr_gone' has expired; make another one") as gone:
        elsewhere.adapter().evaluate(prompt(tool))
    assert gone.value.container_id == "cntr_gone"
    assert isinstance(gone.value.original_error, Exception)
    assert elsewhere.server.calls == ["GET /v1/containers/cntr_gone"]


# --- tools --------------------------------------------------------------------------------------------


def test_calls_are_always_answered_and_told(elsewhere: Elsewhere) -> None:
    elsewhere.server.script(
        response(
            function_call("c1", '{"sql": "select"}'),
            function_call("c2", '{"sql": 1}'),
            function_call("c3", '{"sql": "raise"}'),
            function_call("c4", "{}", name="unknown"),
            function_call("c5", '{"sql": "nothing"}'),
        ),
        response(message("done")),
    )
    session, heard = listen()
    found = elsewhere.adapter().evaluate(prompt(query_tool), session=session)
    assert [(event.call_id, event.name, event.result.success) for event in heard] == [
        ("c1", "run_query", True),
        ("c2", "run_query", False),
        ("c3", "run_query", False),
        ("c4", "unknown", False),
        ("c5", "run_query", False),
    ]
    outputs = elsewhere.server.asked[1]["input"][-5:]
    assert [item["call_id"] for item in outputs] == ["c1", "c2", "c3", "c4", "c5"]
    assert [item["output"] for item in outputs] == [event.rendered_output for event in heard]
    assert "database is down" in outputs[2]["output"]
    assert "no tool 'unknown'" in outputs[3]["output"]
    assert "returned NoneType, not a ToolResult" in outputs[4]["output"]
    assert heard[1].params == '{"sql": 1}'
    assert session[Answer].all() == ()  # what the handler that raised had written is undone
    assert [item.get("type", item.get("role")) for item in found.transcript] == [
        "system",
        *["function_call"] * 5,
        *["function_call_output"] * 5,
        "message",
    ]


def test_a_limit_that_a_tool_meets_ends_the_evaluation_and_is_told(elsewhere: Elsewhere) -> None:
    elsewhere.server.script(response(function_call("c1", '{"sql": "nested"}')))
    session, heard = listen()
    with pytest.raises(DeadlineExceededError, match="inner prompt"):
        elsewhere.adapter().evaluate(prompt(query_tool), session=session)
    assert [(event.call_id, event.result.success) for event in heard] == [("c1", False)]
    assert session[Answer].all() == ()


class Shy:
    def __repr__(self) -> str:
        raise RuntimeError("not shown")


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (ToolResult[Query](5), "returned a message that is no text: 5"),  # pyright: ignore[reportArgumentType]
        (ToolResult[Query](None), "returned a message that is no text: None"),  # pyright: ignore[reportArgumentType]
        (ToolResult.ok(Shy()), "RuntimeError: not shown"),
        ("done", "returned str, not a ToolResult"),
    ],
)
def test_a_result_that_cannot_be_shown_is_a_failure_of_the_tool(
    elsewhere: Elsewhere, result: Any, said: str
) -> None:
    def handler(params: Query, *, context: ToolContext) -> ToolResult[Any]:
        return result

    odd = Tool[Query, Any](name="run_query", description="x", handler=handler)
    elsewhere.server.script(response(function_call("c1", '{"sql": "x"}')), response(message("done")))
    session, heard = listen()
    elsewhere.adapter().evaluate(prompt(odd), session=session)
    assert [event.result.success for event in heard] == [False]
    assert said in elsewhere.server.asked[1]["input"][-1]["output"]


def test_policies_are_asked_before_a_handler(elsewhere: Elsewhere) -> None:
    elsewhere.server.script(response(function_call("c1", '{"sql": "drop"}')), response(message("done")))
    session, heard = listen()

    def careful(tool: AnyTool, params: Any, context: ToolContext) -> str | None:
        return "it drops" if params.sql == "drop" else None

    elsewhere.adapter().evaluate(prompt(query_tool, policies=[careful]), session=session)
    assert heard[0].result.message == "'run_query' may not be called now: it drops"


def test_reasoning_and_hosted_calls_are_replayed_as_they_came(elsewhere: Elsewhere) -> None:
    output: list[dict[str, Any]] = [
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x", "new_field": {"a": [1]}},
        code_call(novelty=True),
        message("Look:", {"type": "container_file_citation", "file_id": "f", "container_id": "cntr_1"}),
        function_call("c1", '{"sql": "x"}'),
    ]
    elsewhere.server.script(response(*output), response(message("done")))
    found = elsewhere.adapter(hosted_tools=HOSTED).evaluate(prompt(query_tool))
    assert elsewhere.server.asked[1]["input"][1:5] == output
    assert [file.file_id for file in found.files] == ["f"]  # though it was cited before the last turn


NOTE = {
    "type": "container_file_citation",
    "file_id": "cfile_1",
    "container_id": "cntr_1",
    "filename": "a.csv",
}


def test_provider_output_goes_to_its_handler_first_with_the_same_context(elsewhere: Elsewhere) -> None:
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

    session, heard = listen()
    elsewhere.server.script(
        response(code_call(), function_call("c1", '{"sql": "x"}')), response(message("done", NOTE))
    )
    asking = Tool[Query, Query](name="run_query", description="x", handler=query)
    elsewhere.adapter().evaluate(prompt(both, asking), session=session)
    assert [kind for kind, _, _ in seen] == ["provider", "function"]
    assert seen[0][2] is seen[1][2]  # one context, whoever is called

    seen.clear()
    heard.clear()
    elsewhere.server.script(response(code_call(), message("done", NOTE)))
    found = elsewhere.adapter().evaluate(prompt(both), session=session)
    assert [kind for kind, _, _ in seen] == ["provider"]
    data = seen[0][1]
    assert (data.code, data.container_id, data.status, data.annotations) == (
        "1+1",
        "cntr_1",
        "completed",
        (NOTE,),
    )
    assert (heard[0].name, heard[0].call_id, heard[0].result.message) == ("code_interpreter", "ci_1", "1+1")
    assert found.annotations == (NOTE,)
    assert found.files[0].file_id == "cfile_1"

    seen.clear()
    elsewhere.server.script(response(code_call(), code_call(id="ci_2"), message("done")))
    elsewhere.adapter().evaluate(prompt(OpenAICodeInterpreterTool(handler=handler)), session=session)
    assert [(kind, params) for kind, params, _ in seen] == [("handler", NoParams())] * 2
    assert seen[0][2] is seen[1][2]
    context = seen[0][2]
    assert (context.prompt.name, context.session, context.adapter.provider) == ("task", session, "openai")
    assert heard[-1].result.value == CodeInterpreterResult(stdout="from the handler")


def test_a_handler_of_the_providers_output_fails_as_any_other(elsewhere: Elsewhere) -> None:
    def handle(data: Any, context: ToolContext, kind: Any) -> Any:
        context.session[Answer].append(Answer(1))
        if data.code == "late":
            raise DeadlineExceededError("the inner prompt was late", phase="deadline")
        return data.code

    session, heard = listen()
    tool = OpenAICodeInterpreterTool(handle_provider_output=handle)
    elsewhere.server.script(response(code_call(), message("done")))
    elsewhere.adapter().evaluate(prompt(tool), session=session)
    assert "returned str, not a ToolResult" in heard[0].result.message
    elsewhere.server.script(response(code_call(code="late"), message("done")))
    with pytest.raises(DeadlineExceededError, match="inner prompt"):
        elsewhere.adapter().evaluate(prompt(tool), session=session)
    assert [(event.call_id, event.result.success) for event in heard] == [("ci_1", False)] * 2
    assert session[Answer].all() == ()


def test_without_a_handler_for_it_the_report_is_decoded_into_the_parameters(elsewhere: Elsewhere) -> None:
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
    session, heard = listen()
    elsewhere.server.script(response(code_call(), code_call(code=5), code_call(code="fail"), message("done")))
    elsewhere.adapter().evaluate(prompt(tool), session=session)
    assert [(event.name, event.result.success) for event in heard] == [
        ("python", True),
        ("python", False),
        ("python", False),
    ]
    assert (heard[0].params, heard[0].result.value) == (Ran("1+1", "completed"), Answer(3))


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
def test_searches_are_told_like_any_tool(
    elsewhere: Elsewhere, section: Section[Any], item: dict[str, Any]
) -> None:
    name = str(item["type"]).removesuffix("_call")
    elsewhere.server.script(response(item, message("found")))
    session, heard = listen()
    found = elsewhere.adapter().evaluate(prompt(query_tool, sections=(section,)), session=session)
    assert [(event.name, event.call_id, event.result.success) for event in heard] == [
        (name, item["id"], True)
    ]
    assert isinstance(heard[0].params, ProviderToolCallData)
    assert list(found.transcript)[1] == item
    assert found.transcript[2]["type"] == "message"
