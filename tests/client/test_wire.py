"""Tools, choices, messages and items as the Responses API has them."""

from collections.abc import Callable
from typing import Any

import pytest

from fumehood.client import FilteredOutputError, PromptEvaluationError, ToolResult
from fumehood.client.adapters.openai import (
    AutoContainerConfig,
    CodeInterpreterFile,
    CodeInterpreterResult,
    ExistingContainerRef,
    OpenAICodeInterpreterTool,
    wire,
)
from fumehood.client.adapters.openai.code_interpreter_tool import (
    build_code_interpreter_result,
    build_container_spec,
)
from fumehood.client.adapters.tool_execution import parse_tool_arguments, serialize_tool_message, tool_to_spec
from tests.support.client_prompts import Query, query_tool

CITATION: dict[str, Any] = {
    "type": "container_file_citation",
    "container_id": "cntr_1",
    "file_id": "cfile_1",
    "filename": "plot.png",
    "start_index": 3,
    "end_index": 9,
}


# --- tools and choices --------------------------------------------------------------------------------


def test_a_native_tool_is_sent_under_its_own_type() -> None:
    built_in = {"type": "built_in", "name": "file_search", "vector_store_ids": ["vs_1"]}
    assert wire.responses_tool_spec(built_in) == {"type": "file_search", "vector_store_ids": ["vs_1"]}
    assert wire.responses_tool_spec({"type": "web_search"}) == {"type": "web_search"}


@pytest.mark.parametrize(
    ("spec", "expected_error"),
    [
        ({"type": "built_in", "name": "teleport"}, "no native tool 'teleport'"),
        ({"type": "built_in"}, "no native tool None"),
        ({}, "no native tool None"),
        ({"type": "mcp", "server_label": "s"}, "no native tool 'mcp'"),
        ({"type": "built_in", "name": "web_search", "parameters": {}}, "takes no 'parameters'"),
        ({"type": "web_search", "strict": True}, "takes no 'strict'"),
        ({"type": "function", "name": "x"}, "needs a name and parameters"),
        ({"type": "function", "function": {"parameters": {}}}, "needs a name and parameters"),
    ],
)
def test_other_tools_are_refused(spec: dict[str, Any], expected_error: str) -> None:
    with pytest.raises(PromptEvaluationError, match=expected_error) as refused:
        wire.responses_tool_spec(spec, prompt_name="p")
    assert (refused.value.phase, refused.value.prompt_name) == ("configuration", "p")


def test_a_provider_tool_has_no_function_specification() -> None:
    with pytest.raises(PromptEvaluationError, match="provider's own"):
        tool_to_spec(OpenAICodeInterpreterTool())


TOOLS = [{"type": "function", "name": "run_query"}, {"type": "code_interpreter"}]


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        ("auto", "auto"),
        ("required", "required"),
        ("none", "none"),
        (None, None),
        ({"type": "function", "name": "run_query"}, {"type": "function", "name": "run_query"}),
        ({"type": "function", "function": {"name": "run_query"}}, {"type": "function", "name": "run_query"}),
        ({"type": "built_in", "name": "code_interpreter"}, {"type": "code_interpreter"}),
        ({"type": "code_interpreter"}, {"type": "code_interpreter"}),
    ],
)
def test_choices(choice: Any, sent: Any) -> None:
    assert wire.responses_tool_choice(choice, TOOLS) == sent


@pytest.mark.parametrize(
    "choice",
    [
        "sometimes",
        {"type": "function"},
        {"type": "function", "name": "other"},
        {"type": "built_in", "name": "web_search"},
        {"type": "built_in"},
        {"type": "teleport"},
        {},
    ],
)
def test_other_choices_are_refused(choice: Any) -> None:
    with pytest.raises(PromptEvaluationError, match="tool_choice"):
        wire.responses_tool_choice(choice, TOOLS)


def test_without_tools_there_is_nothing_to_choose() -> None:
    assert wire.responses_tool_choice("auto", []) is None
    with pytest.raises(PromptEvaluationError, match="no tools that could be required"):
        wire.responses_tool_choice("required", [])


def test_the_helpers_have_the_names_of_the_specification() -> None:
    for name in ("_responses_tool_spec", "_responses_tool_choice", "_normalize_input_messages"):
        assert getattr(wire, name) is getattr(wire, name.removeprefix("_"))


# --- arguments and results ----------------------------------------------------------------------------


def test_arguments_are_read_as_the_parameters() -> None:
    assert parse_tool_arguments(query_tool, '{"sql": "select 1"}') == Query("select 1")
    for wrong in ("", None, "[", '{"sql": 1}'):
        with pytest.raises(PromptEvaluationError, match="'run_query' do not fit") as refused:
            parse_tool_arguments(query_tool, wrong)
        assert refused.value.phase == "tool"


def test_results_are_shown_as_json() -> None:
    assert serialize_tool_message(ToolResult.ok(Query("x"), "ran")) == (
        '{"success":true,"message":"ran","payload":{"sql":"x"}}'
    )
    assert serialize_tool_message(ToolResult.error("no")) == '{"success":false,"message":"no"}'
    hidden = ToolResult("m", Query("x"), exclude_value_from_context=True)
    assert serialize_tool_message(hidden) == '{"success":true,"message":"m"}'


def test_results_without_json_are_rendered_by_repr() -> None:
    loop: list[Any] = []
    loop.append(loop)
    for value in ({(1, 2): "a"}, loop, "\ud800"):
        assert serialize_tool_message(ToolResult("half \ud800", value)).startswith(
            '{"success":true,"message":"half ?",'
        )


# --- messages -----------------------------------------------------------------------------------------


def test_messages_become_items_and_items_stay() -> None:
    native = {"type": "code_interpreter_call", "id": "ci_1", "code": "1", "outputs": None, "unknown": [1]}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Hi"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}},
                native,
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": {"ok": True}},
        {"role": "assistant", "content": "Well", "tool_calls": [{"id": "call_2", "function": {"name": "g"}}]},
        native,
        {"type": "reasoning", "id": "rs_1", "encrypted_content": "x"},
    ]
    assert wire.normalize_input_messages(messages) == [
        {"role": "system", "content": "Hi"},
        {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": '{"a":1}'},
        native,
        {"type": "function_call_output", "call_id": "call_1", "output": '{"ok":true}'},
        {"role": "assistant", "content": "Well"},
        {"type": "function_call", "call_id": "call_2", "name": "g", "arguments": "{}"},
        native,
        {"type": "reasoning", "id": "rs_1", "encrypted_content": "x"},
    ]


def message(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "message", "content": [*parts]}


def test_every_item_is_read_and_later_citations_belong_to_a_call() -> None:
    output = [
        message({"type": "output_text", "text": "Let me see."}),
        {
            "type": "code_interpreter_call",
            "id": "ci_1",
            "code": "plot()",
            "container_id": "cntr_1",
            "status": "completed",
        },
        {"type": "reasoning"},
        {"type": "web_search_call", "id": "ws_1", "call_id": "call_9", "status": "completed"},
        message({"type": "output_text", "text": "Here.", "annotations": [CITATION]}),
    ]
    first, second = wire.find_provider_calls(output)
    assert (first.name, first.type, first.id, first.call_id, first.code) == (
        "code_interpreter",
        "code_interpreter_call",
        "ci_1",
        "ci_1",
        "plot()",
    )
    assert first.annotations == (CITATION,)
    assert first.raw is output[1]
    assert (second.name, second.call_id) == ("web_search", "call_9")
    assert wire.read_last_message(output) == "Here."
    (file,) = wire.find_cited_files([CITATION, CITATION, {"type": "url_citation"}])
    assert (file.file_id, file.filename, file.start_index, file.end_index) == ("cfile_1", "plot.png", 3, 9)
    assert wire.find_cited_files([CITATION], "cntr_2") == ()


@pytest.mark.parametrize("part", ["output_text", "input_text"])
def test_calls_within_the_parts_of_a_message_are_found(part: str) -> None:
    nested = {
        "id": "call_1",
        "type": "code_interpreter",
        "code_interpreter": {
            "input": "1+1",
            "outputs": [{"type": "logs", "logs": "2"}],
            "container_id": "cntr_1",
        },
    }
    inner = {
        "type": part,
        "text": "",
        "tool_calls": [nested, {"type": "function"}],
        "annotations": [CITATION],
    }
    (found,) = wire.find_provider_calls([message(inner)])
    assert (found.name, found.code, found.container_id, found.call_id) == (
        "code_interpreter",
        "1+1",
        "cntr_1",
        "call_1",
    )
    assert found.outputs == ({"type": "logs", "logs": "2"},)
    assert found.annotations == (CITATION,)


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({"status": "completed"}, "stop"),
        ({"status": "incomplete", "incomplete_details": {"reason": "content_filter"}}, "content_filter"),
        ({"status": "incomplete", "incomplete_details": {}}, "incomplete"),
        ({"status": "failed"}, "failed"),
        ({"output": [message({"type": "refusal", "refusal": "No."})]}, "refusal"),
    ],
)
def test_how_a_response_ended(fields: dict[str, Any], end: str) -> None:
    assert wire.WireResponse(**fields).finish_reason == end


def test_a_filtered_answer_is_an_assertion_error_too() -> None:
    assert issubclass(FilteredOutputError, AssertionError)
    assert issubclass(FilteredOutputError, PromptEvaluationError)


# --- the code interpreter -----------------------------------------------------------------------------


def build_result(
    logs: str = "", status: str = "completed", **execution: Any
) -> ToolResult[CodeInterpreterResult]:
    item: dict[str, Any] = {
        "type": "code_interpreter_call",
        "id": "ci_1",
        "code": "x",
        "container_id": "cntr_1",
        "status": status,
        "outputs": [{"type": "logs", "logs": logs}, {"type": "image", "url": "data:1"}],
        **({"fumehood:execution": execution} if execution else {}),
    }
    (data,) = wire.find_provider_calls([item, message({"type": "output_text", "annotations": [CITATION]})])
    context: Any = None
    return build_code_interpreter_result(data, context, CodeInterpreterResult)


def test_a_result_has_the_files_of_our_gateway() -> None:
    file = {
        "file_id": "cfile_1",
        "container_id": "cntr_1",
        "filename": "t.csv",
        "path": "/mnt/data/t.csv",
        "bytes": 3,
        "mime_type": "text/csv",
        "sha256": "ab" * 32,
        "content": "MSwy",
    }
    found = build_result(
        stdout="1\n",
        stderr="2\n",
        exit_code=0,
        files=[file, {**file, "file_id": "cfile_2", "content": None}, {**file, "content": "?"}],
        missing_files=[{"filename": "gone", "path": "/mnt/data/gone", "bytes": 1}],
        files_complete=False,
    ).value
    assert found is not None
    assert (found.stdout, found.stderr, found.exit_code) == ("1\n", "2\n", 0)
    assert found.produced_files[0] == CodeInterpreterFile(
        "cntr_1", "cfile_1", "t.csv", "/mnt/data/t.csv", 3, "text/csv", "ab" * 32, b"1,2"
    )
    assert [one.content for one in found.produced_files] == [b"1,2", None, None]
    assert found.missing_files == ("/mnt/data/gone",)


TRACEBACK = "before\nTraceback (most recent call last):\n  File x\nValueError: no\n"


def test_a_result_has_message_output_images_and_files() -> None:
    found = build_result("42\n")
    assert found.success
    assert found.message == "42\n"
    assert found.value is not None
    assert (found.value.stdout, found.value.stderr, found.value.exit_code) == ("42\n", "", None)
    assert found.value.images == ("data:1",)
    assert [file.filename for file in found.value.files] == ["plot.png"]
    assert (found.value.container_id, found.value.code) == ("cntr_1", "x")


@pytest.mark.parametrize(
    ("found", "success"),
    [
        (build_result("fine"), True),
        (build_result(TRACEBACK), False),
        (build_result(TRACEBACK + "and it went on\n"), True),
        (build_result("KeyboardInterrupt"), True),
        (build_result("Traceback (most recent call last):\nKeyboardInterrupt\n"), False),
        (build_result(status="failed"), False),
        (build_result(status="incomplete"), False),
        (build_result("x", stdout="x", stderr="", exit_code=3), False),
        (build_result(TRACEBACK, stdout="x", stderr="", exit_code=0), True),
    ],
)
def test_which_results_are_failures(found: ToolResult[CodeInterpreterResult], success: bool) -> None:
    assert found.success is success


def test_a_failure_has_its_traceback_and_still_its_files() -> None:
    found = build_result(TRACEBACK)
    assert found.success is False
    assert found.value is not None
    assert found.value.stderr.startswith("Traceback")
    assert found.value.files
    assert build_result(status="failed").message == "The call of the code interpreter is failed."
    long = build_result("Traceback (most recent call last):\n" + "x" * 9000 + "\nE: x")
    assert long.value is not None
    assert len(long.value.stderr) == 4000


def test_containers_are_sent_as_the_wire_has_them() -> None:
    assert build_container_spec(AutoContainerConfig()) == {"type": "auto", "memory_limit": "1g"}
    assert build_container_spec(AutoContainerConfig(memory_limit="64g").attach("file-1", "file-2")) == {
        "type": "auto",
        "memory_limit": "64g",
        "file_ids": ["file-1", "file-2"],
    }
    assert build_container_spec(ExistingContainerRef("cntr_1", "4g")) == "cntr_1"


TIER_ERROR = r"container\.memory_limit is .* one of 1g, 4g, 16g, 64g"


@pytest.mark.parametrize(
    ("kind", "settings", "expected_error"),
    [
        (AutoContainerConfig, {"type": "existing"}, r"container\.type is 'existing'"),
        (AutoContainerConfig, {"file_ids": "file-1"}, r"container\.file_ids is 'file-1'"),
        (AutoContainerConfig, {"file_ids": [""]}, r"container\.file_ids is \[''\]"),
        *((AutoContainerConfig, {"memory_limit": tier}, TIER_ERROR) for tier in ("8g", "", "1G", "2g")),
        (
            AutoContainerConfig,
            {"memory_limit": None},
            r"container\.memory_limit is None; it has to be a text",
        ),
        *(
            (ExistingContainerRef, {"id": "c", "memory_limit": tier}, TIER_ERROR)
            for tier in ("8g", "", "1G", "2g")
        ),
        *((ExistingContainerRef, {"id": name}, r"container\.id is") for name in (" ", None, 5)),
        (OpenAICodeInterpreterTool, {"container": 5}, "container is 5"),
    ],
)
def test_malformed_containers_are_rejected(
    kind: Callable[..., object], settings: dict[str, Any], expected_error: str
) -> None:
    with pytest.raises(PromptEvaluationError, match=expected_error):
        kind(**settings)


def test_files_are_attached_to_the_tool() -> None:
    tool = OpenAICodeInterpreterTool().attach("file-1")
    assert tool.envelope()["container"] == {"type": "auto", "memory_limit": "1g", "file_ids": ["file-1"]}
    with pytest.raises(PromptEvaluationError, match=r"ContainerManager\.attach"):
        OpenAICodeInterpreterTool(container=ExistingContainerRef("cntr_1")).attach("file-1")


def test_the_tool_takes_no_parameters_and_says_so() -> None:
    tool = OpenAICodeInterpreterTool()
    assert tool.parameters.body["properties"] == {}
    assert "model writes" in tool.description
    assert (tool.provider, tool.native_type) == ("openai", "code_interpreter")
