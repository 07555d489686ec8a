"""What the adapter rejects before a request, and what it accepts."""

import math
from typing import Any

import pytest
from openai import AsyncOpenAI

from fumehood.client import (
    ContainerExpiredError,
    ContainerNotFoundError,
    PromptEvaluationError,
    ProviderTool,
    Session,
    ToolResult,
)
from fumehood.client.adapters.openai import (
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
)
from fumehood.client.adapters.openai.native_tools.code_interpreter_section import CodeInterpreterParams
from fumehood.client.adapters.openai.native_tools.file_search_section import FileSearchParams
from fumehood.client.adapters.openai.native_tools.web_search_section import WebSearchParams
from fumehood.client.prompt import AnyTool, NoParams
from tests.client.conftest import OpenAIStandIn
from tests.support.client_prompts import (
    HOSTED,
    Answer,
    prompt,
    query_tool,
)
from tests.support.openai_server import message, response


def create_provider_tool(native_type: str, config: object, provider: str = "openai") -> AnyTool:
    return ProviderTool[NoParams, Answer, Any](
        name="python",
        description="x",
        provider=provider,
        native_type=native_type,
        config=config,
        handle_provider_output=lambda data, context, kind: ToolResult.ok(kind(1)),
    )


def code_interpreter_in(container: object) -> AnyTool:
    """A code interpreter whose settings nobody has checked yet."""
    return create_provider_tool("code_interpreter", {"container": container})


@pytest.mark.parametrize(
    ("settings", "asked", "expected_error"),
    [
        (
            {},
            lambda: prompt(create_provider_tool("web_search", NoParams(), "anthropic")),
            "'python' is anthropic's; this adapter is openai's",
        ),
        (
            {},
            lambda: prompt(create_provider_tool("teleport", {})),
            "does not advertise the native tool 'teleport'",
        ),
        (
            {"model": "local"},
            lambda: prompt(create_provider_tool("teleport", {})),
            "no native tool 'teleport'",
        ),
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
        ({"tool_choice": "required"}, prompt, "no tools that could be required"),
        ({"tool_choice": "none"}, lambda: prompt(OpenAICodeInterpreterTool()), "'none' forbids them"),
        (
            {},
            lambda: prompt(sections=(OpenAIContainerWorkspaceSection(session=Session()),)),
            "needs the code interpreter",
        ),
        *[
            (
                {},
                lambda container=container: prompt(
                    code_interpreter_in(container),
                    sections=(OpenAIContainerWorkspaceSection(session=Session()),),
                ),
                expected_error,
            )
            for container, expected_error in (
                ("cntr_1", "names the container 'cntr_1', and the workspace has its own"),
                ({"type": "auto", "memory_limit": "16g"}, "memory_limit '16g', and the workspace '4g'"),
                ({"type": "auto", "network_policy": {"type": "disabled"}}, "sets 'network_policy'"),
            )
        ],
        *[
            ({}, lambda container=container: prompt(code_interpreter_in(container)), expected_error)
            for container, expected_error in (
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
            lambda: prompt(
                OpenAICodeInterpreterTool(), code_interpreter_in({"type": "auto", "memory_limit": "1g"})
            ),
            "'code_interpreter' and 'python' are both code_interpreter",
        ),
        ({}, lambda: prompt(create_provider_tool("web_search", 5)), "config of the tool 'python' is 5"),
        *[
            ({"tool_choice": choice}, lambda: prompt(query_tool), "tool_choice")
            for choice in ({"type": "function", "name": ["a"]}, {"type": "allowed_tools"})
        ],
        ({}, lambda: prompt(OpenAICodeInterpreterTool()).bind, "is no prompt; of a template, make Prompt"),
    ],
)
def test_invalid_prompts_and_settings_are_rejected_before_a_request(
    openai_stand_in: OpenAIStandIn, settings: dict[str, Any], asked: Any, expected_error: str
) -> None:
    with pytest.raises(PromptEvaluationError, match=expected_error) as refused:
        openai_stand_in.adapter(**settings).evaluate(asked())
    assert refused.value.phase == "configuration"
    assert refused.value.prompt_name == ("" if expected_error.startswith("is no prompt") else "task")
    assert openai_stand_in.server.calls == []


@pytest.mark.parametrize(
    ("limit", "expected_error"),
    [({"deadline": 5}, r"Deadline\.after\(5\)"), ({"budget": 1000}, "Budget\\(max_total")],
)
def test_limits_have_their_types(
    openai_stand_in: OpenAIStandIn, limit: dict[str, Any], expected_error: str
) -> None:
    with pytest.raises(PromptEvaluationError, match=expected_error):
        openai_stand_in.adapter().evaluate(prompt(), **limit)
    assert openai_stand_in.server.calls == []


def test_containers_are_understood_however_they_are_written(openai_stand_in: OpenAIStandIn) -> None:
    alive = ContainerManager(openai_stand_in.client).create()
    for container, sent in (
        ({"id": alive, "memory_limit": "4g"}, alive),
        (alive, alive),
        (
            {"type": "auto", "network_policy": {"type": "disabled"}},
            {"type": "auto", "network_policy": {"type": "disabled"}},
        ),
    ):
        openai_stand_in.evaluate(prompt(code_interpreter_in(container)), response(message("done")))
        assert openai_stand_in.server.asked[0]["tools"] == [{"type": "code_interpreter", "container": sent}]


@pytest.mark.parametrize("model", ["gpt-4o", "gpt-4.1", "gpt-5.2-codex", "o3", "o4-mini"])
def test_models_that_the_specification_names_have_all_native_tools(
    openai_stand_in: OpenAIStandIn, model: str
) -> None:
    hosted = OpenAIHostedToolsConfig(
        code_interpreter=True, file_search=FileSearchConfig(("vs_1",)), web_search=True
    )
    openai_stand_in.evaluate(
        prompt(), response(message("done")), model=model, hosted_tools=hosted, strict=True
    )
    (request,) = openai_stand_in.server.asked
    assert [tool["type"] for tool in request["tools"]] == ["code_interpreter", "file_search", "web_search"]


def test_unknown_models_may_use_native_tools(openai_stand_in: OpenAIStandIn) -> None:
    config = OpenAIModelConfig(extra={"seed": 7, "chat_template_kwargs": {"thinking": False}})
    openai_stand_in.evaluate(prompt(), response(message("done")), model_config=config)
    (request,) = openai_stand_in.server.asked
    assert (request["seed"], request["chat_template_kwargs"]) == (7, {"thinking": False})


@pytest.mark.parametrize(
    ("make", "expected_error"),
    [
        (lambda: OpenAIAdapter(model=" "), "model is ' '"),
        (lambda: OpenAIAdapter(model="m", client=AsyncOpenAI(api_key="k")), "asynchronous"),  # pyright: ignore[reportArgumentType]
        (
            lambda: OpenAIAdapter(model="m", openai_native_tools={"m": {"teleport"}}),
            r"openai_native_tools\['m'\] has teleport",
        ),
        (
            lambda: OpenAIAdapter(model="m", openai_native_tools={"m": "web_search"}),
            "openai_native_tools is {'m': 'web_search'}; it has to be a mapping of a text to several",
        ),
        (lambda: OpenAIAdapter(model="m", openai_native_tools=["m"]), "openai_native_tools is"),  # pyright: ignore[reportArgumentType]
        (lambda: OpenAIAdapter(model="m", tool_choice="sometimes"), "tool_choice is 'sometimes'"),  # pyright: ignore[reportArgumentType]
        (lambda: OpenAIAdapter(model="m", tool_choice=["auto"]), "tool_choice is"),  # pyright: ignore[reportArgumentType]
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
def test_malformed_settings_are_rejected_at_construction(make: Any, expected_error: str) -> None:
    with pytest.raises(PromptEvaluationError, match=expected_error):
        make()


def test_client_and_client_config_exclude_each_other(openai_stand_in: OpenAIStandIn) -> None:
    with pytest.raises(PromptEvaluationError, match="client and client_config exclude each other"):
        openai_stand_in.adapter(client_config=OpenAIClientConfig())


def test_a_client_is_created_from_its_settings(
    openai_stand_in: OpenAIStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    openai_stand_in.server.script(response(message("made")))
    config = OpenAIClientConfig(api_key="k", base_url=openai_stand_in.server.url, timeout=5)
    with OpenAIAdapter(model="gpt-4.1", client_config=config) as adapter:
        assert adapter.evaluate(prompt()).text == "made"
        client = adapter.client
    assert client.is_closed()
    openai_stand_in.adapter().close()
    assert not openai_stand_in.client.is_closed()
    assert "'k'" not in repr(config)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(PromptEvaluationError, match="No client of OpenAI could be made"):
        OpenAIAdapter(model="gpt-4.1").evaluate(prompt())


def test_an_existing_container_is_looked_up_first(openai_stand_in: OpenAIStandIn) -> None:
    expired = ContainerManager(openai_stand_in.client).create()
    openai_stand_in.server.expire()
    openai_stand_in.server.script()
    tool = OpenAICodeInterpreterTool(container=ExistingContainerRef(expired))
    with pytest.raises(ContainerExpiredError, match=f"'{expired}' has expired; make another one") as gone:
        openai_stand_in.adapter().evaluate(prompt(tool))
    assert (gone.value.container_id, gone.value.phase) == (expired, "configuration")
    assert isinstance(gone.value.original_error, Exception)
    assert openai_stand_in.server.calls == [f"GET /v1/containers/{expired}"]


def test_an_unknown_container_is_not_called_expired(openai_stand_in: OpenAIStandIn) -> None:
    tool = OpenAICodeInterpreterTool(container=ExistingContainerRef("cntr_unknown"))
    with pytest.raises(ContainerNotFoundError, match="has no container 'cntr_unknown'") as unknown:
        openai_stand_in.adapter().evaluate(prompt(tool))
    assert "expired" not in str(unknown.value)
    assert (unknown.value.container_id, unknown.value.phase) == ("cntr_unknown", "configuration")
    assert isinstance(unknown.value, PromptEvaluationError)
    assert "not found" in str(unknown.value.provider_payload)
    assert openai_stand_in.server.calls == ["GET /v1/containers/cntr_unknown"]
    with pytest.raises(ContainerNotFoundError, match="'cntr_unknown'"):
        ContainerManager(openai_stand_in.client).list_files("cntr_unknown")
