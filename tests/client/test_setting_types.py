"""Settings and arguments of wrong types: an error of the client that names them, whatever they are."""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import OpenAI

from fumehood.client import (
    Budget,
    BudgetTracker,
    Deadline,
    HostFilesystem,
    HostMount,
    HostWorkspaceSection,
    InputFile,
    InputImage,
    MarkdownSection,
    Prompt,
    PromptEvaluationError,
    PromptTemplate,
    PromptValidationError,
    ProviderTool,
    ResourceRegistry,
    Session,
    ThrottlePolicy,
    Tool,
)
from fumehood.client.adapters.openai import (
    AutoContainerConfig,
    CodeInterpreterConfig,
    CompactionConfig,
    CompactionManager,
    ContainerConfig,
    ContainerFilesystem,
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
    build_code_interpreter_result,
)
from fumehood.client.adapters.openai.native_tools.code_interpreter_section import CodeInterpreterParams
from fumehood.client.adapters.openai.native_tools.file_search_section import FileSearchParams
from fumehood.client.adapters.openai.native_tools.web_search_section import WebSearchParams
from fumehood.client.prompt import NoParams
from tests.client.conftest import OpenAIStandIn
from tests.support.client_prompts import prompt

# Every class of settings, with the fields that it needs.
CONFIGS: dict[type[Any], dict[str, Any]] = {
    AutoContainerConfig: {},
    Budget: {},
    CodeInterpreterConfig: {},
    CodeInterpreterParams: {},
    CompactionConfig: {},
    ContainerConfig: {},
    Deadline: {"expires_at": datetime.now(UTC)},
    ExistingContainerRef: {"id": "cntr_1"},
    FileSearchConfig: {},
    FileSearchParams: {},
    HostMount: {"host_path": "/nowhere"},
    InputFile: {"content": b"x", "filename": "x.txt"},
    InputImage: {"content": b"GIF89a"},
    OpenAIClientConfig: {},
    OpenAIHostedToolsConfig: {},
    OpenAIModelConfig: {},
    ThrottlePolicy: {},
    WebSearchParams: {},
}
CLIENT = OpenAI(api_key="k")
# Everything else that takes settings.
CONSTRUCTORS: dict[Callable[..., Any], dict[str, Any]] = {
    BudgetTracker: {"budget": Budget()},
    CompactionManager: {"client": CLIENT, "config": CompactionConfig(), "session": Session()},
    ContainerFilesystem: {"client": lambda: None, "container_config": ContainerConfig()},
    ContainerManager: {"client": CLIENT},
    Deadline.after: {"seconds": 1},
    HostFilesystem: {"root": "/nowhere"},
    HostWorkspaceSection: {"session": Session()},
    MarkdownSection: {"title": "t", "key": "k", "template": "x"},
    OpenAIAdapter: {"model": "m"},
    OpenAICodeInterpreterSection: {},
    OpenAICodeInterpreterTool: {},
    OpenAIContainerWorkspaceSection: {"session": Session()},
    OpenAIFileSearchSection: {},
    OpenAIWebSearchSection: {},
    PromptTemplate: {"ns": "n", "key": "k"},
    ProviderTool[NoParams, NoParams, Any]: {
        "name": "n",
        "description": "d",
        "provider": "openai",
        "native_type": "web_search",
        "config": {},
        "handle_provider_output": build_code_interpreter_result,
    },
    ResourceRegistry.build: {"resources": {}},
    Session: {},
    Tool[NoParams, NoParams]: {"name": "n", "description": "d", "handler": None},
}
FIELDS = [(kind, one.name) for kind in CONFIGS for one in dataclasses.fields(kind)]
ARGUMENTS = [
    (make, name)
    for make in CONSTRUCTORS
    for name, parameter in inspect.signature(make).parameters.items()
    if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    if name != "config" or not getattr(make, "__name__", "").startswith("ProviderTool")  # anything is allowed
]


class Stranger:
    """A value that is right nowhere, and cannot even be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


JUNK: list[Any] = [
    None,
    True,
    0,
    -1,
    3,
    1.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    b"x",
    (),
    ("x",),
    [5],
    [None],
    {},
    {"x": 1},
    {5: 5},
    {"x"},
    object(),
    int,
    len,
    Stranger(),
]


def test_every_class_of_settings_is_tested() -> None:
    import fumehood.client
    import fumehood.client.adapters.openai

    public: dict[str, Any] = {
        name: getattr(module, name)
        for module in (fumehood.client, fumehood.client.adapters.openai)
        for name in module.__all__
        if name.endswith(("Config", "Ref", "Policy", "Budget", "Deadline", "Mount"))
        or name.startswith("Input")
    }
    assert {*filter(dataclasses.is_dataclass, public.values())} - CONFIGS.keys() == set()


@pytest.mark.parametrize(("kind", "name"), FIELDS)
def test_a_field_of_a_wrong_type_is_named(kind: type[Any], name: str) -> None:
    with pytest.raises(PromptValidationError, match=name) as refused:
        kind(**{**CONFIGS[kind], name: Stranger()})
    assert refused.value.phase == "configuration"


@pytest.mark.parametrize(("make", "name"), ARGUMENTS)
def test_an_argument_of_a_wrong_type_is_named(make: Callable[..., Any], name: str) -> None:
    with pytest.raises(PromptValidationError, match=name) as refused:
        make(**{**CONSTRUCTORS[make], name: Stranger()})
    assert refused.value.phase == "configuration"


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(FIELDS), st.sampled_from(JUNK))
def test_no_field_raises_anything_else(field: tuple[type[Any], str], junk: Any) -> None:
    kind, name = field
    with contextlib.suppress(PromptValidationError):
        made = kind(**{**CONFIGS[kind], name: junk})
        assert getattr(made, name) is junk or name == "path"


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(ARGUMENTS), st.sampled_from(JUNK))
def test_no_argument_raises_anything_else(argument: tuple[Callable[..., Any], str], junk: Any) -> None:
    make, name = argument
    with contextlib.suppress(PromptValidationError):
        made = make(**{**CONSTRUCTORS[make], name: junk})
        assert made is not None
        if isinstance(made, HostWorkspaceSection | OpenAIContainerWorkspaceSection):
            made.sync_on_cleanup = False
            made.cleanup()


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(["session", "bus", "parse_output", "deadline", "budget", "budget_tracker", "resources"]),
    st.sampled_from([junk for junk in JUNK if junk is not None and not isinstance(junk, bool | Mapping)]),
)
def test_arguments_of_an_evaluation_are_named(shared_stand_in: OpenAIStandIn, name: str, junk: Any) -> None:
    shared_stand_in.server.script()
    with pytest.raises(PromptValidationError, match=name):
        shared_stand_in.adapter().evaluate(prompt(), **{name: junk})
    assert shared_stand_in.server.calls == []


@given(st.sampled_from([junk for junk in JUNK if junk != {}]))
def test_tool_choices_of_prompts_are_named(junk: Any) -> None:
    if junk is None or isinstance(junk, Mapping):
        return
    with pytest.raises(PromptValidationError, match="tool_choice"):
        Prompt(ns="n", key="k", tool_choice=junk)


def test_a_secret_of_a_wrong_type_is_not_shown() -> None:
    with pytest.raises(PromptEvaluationError) as refused:
        OpenAIClientConfig(api_key=b"sk-secret")  # pyright: ignore[reportArgumentType]
    assert str(refused.value) == "api_key is bytes; it has to be a text or None."


def test_missing_and_unknown_arguments_stay_errors_of_python() -> None:
    with pytest.raises(TypeError, match="model"):
        OpenAIAdapter()  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="modle"):
        OpenAIAdapter(modle="m")  # pyright: ignore[reportCallIssue]
