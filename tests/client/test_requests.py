"""Requests that the adapter sends to a server that is not ours."""

import pytest
from inline_snapshot import snapshot

from fumehood.client import (
    MarkdownSection,
    Prompt,
)
from fumehood.client.adapters.openai import (
    AutoContainerConfig,
    FileSearchConfig,
    OpenAICodeInterpreterSection,
    OpenAICodeInterpreterTool,
    OpenAIFileSearchSection,
    OpenAIHostedToolsConfig,
    OpenAIModelConfig,
    OpenAIWebSearchSection,
)
from fumehood.client.adapters.openai.native_tools.file_search_section import FileSearchParams
from fumehood.client.adapters.openai.native_tools.web_search_section import WebSearchParams
from fumehood.client.errors import (
    PromptValidationError,
)
from tests.client.conftest import OpenAIStandIn
from tests.support.client_prompts import (
    Answer,
    function_call,
    prompt,
    query_tool,
)
from tests.support.openai_server import message, response

ALL_MODES = True


def test_a_whole_request(openai_stand_in: OpenAIStandIn) -> None:
    openai_stand_in.server.script(response(message('{"value": 7}')))
    adapter = openai_stand_in.adapter(
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
    (request,) = openai_stand_in.server.asked
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


def test_a_forced_choice_is_for_the_first_call(openai_stand_in: OpenAIStandIn) -> None:
    openai_stand_in.evaluate(
        prompt(query_tool),
        response(function_call("c1", '{"sql": "x"}')),
        response(message("done")),
        tool_choice="required",
    )
    assert [request["tool_choice"] for request in openai_stand_in.server.asked] == ["required", "auto"]


def test_the_tool_choice_of_a_prompt_precedes_that_of_the_adapter(openai_stand_in: OpenAIStandIn) -> None:
    openai_stand_in.server.script(response(message("done")))
    chosen = {"type": "built_in", "name": "code_interpreter"}
    adapter = openai_stand_in.adapter(
        hosted_tools=OpenAIHostedToolsConfig(code_interpreter=True), tool_choice="none"
    )
    adapter.evaluate(prompt(tool_choice=chosen))
    assert openai_stand_in.server.asked[0]["tool_choice"] == {"type": "code_interpreter"}


def test_the_three_ways_to_ask_for_python_are_one(openai_stand_in: OpenAIStandIn) -> None:
    openai_stand_in.server.script(response(message("done")))
    adapter = openai_stand_in.adapter(hosted_tools=OpenAIHostedToolsConfig(code_interpreter=True))
    asks = prompt(OpenAICodeInterpreterTool(), sections=(OpenAICodeInterpreterSection(),))
    assert len(asks.render().native_tools) == 1
    adapter.evaluate(asks)
    assert openai_stand_in.server.asked[0]["tools"] == [
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


def test_without_hosted_tools_none_are_sent(openai_stand_in: OpenAIStandIn) -> None:
    for hosted in (None, OpenAIHostedToolsConfig()):
        openai_stand_in.evaluate(prompt(query_tool), response(message("done")), hosted_tools=hosted)
        (request,) = openai_stand_in.server.asked
        assert [tool["type"] for tool in request["tools"]] == ["function"]


def test_a_native_section_can_be_cloned_with_changes() -> None:
    section = OpenAIFileSearchSection(default_params=FileSearchParams(("vs_1",)), model="gpt-4.1")
    same, other = section.clone(), section.clone(default_params=FileSearchParams(("vs_2",)))
    assert (type(same), same.key, same.model) == (OpenAIFileSearchSection, section.key, "gpt-4.1")
    assert same.default_params == section.default_params
    assert prompt(sections=(other,)).render().native_tools[0]["vector_store_ids"] == ["vs_2"]


def test_settings_of_a_native_section_can_be_bound(openai_stand_in: OpenAIStandIn) -> None:
    openai_stand_in.server.script(response(message("done")))
    openai_stand_in.adapter().evaluate(
        prompt(sections=(OpenAIFileSearchSection(),)),
        FileSearchParams(vector_store_ids=("vs_2",), max_results=7),
    )
    assert openai_stand_in.server.asked[0]["tools"] == [
        {"type": "file_search", "vector_store_ids": ["vs_2"], "max_num_results": 7}
    ]
