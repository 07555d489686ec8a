"""Tools that this server does not have: which requests are refused, and what is said of those that run."""

import json
from typing import Any

import msgspec
import pytest

from fumehood.protocol.model_turns import ModelProfile
from fumehood.protocol.openai.api_errors import InvalidRequest
from fumehood.protocol.openai.tool_specs import ToolSpec
from fumehood.testing import ScriptedModel, says
from tests.support.echo_tool import EchoTool
from tests.support.engine_harness import ECHO, FUNCTION, EngineHarness, collect_events

SEARCH: dict[str, Any] = {"type": "web_search"}
CACHED: dict[str, Any] = {"type": "web_search", "external_web_access": False}
MCP: dict[str, Any] = {
    "type": "mcp",
    "server_label": "wiki",
    "server_url": "https://wiki.example",
    "headers": {},
}
TYPES = [
    "web_search",
    "web_search_preview",
    "web_search_2025_08_26",
    "file_search",
    "mcp",
    "image_generation",
    "computer",
    "computer_use_preview",
    "namespace",
    "of_tomorrow",
]


def make_engine(*turns: Any, **profile: Any) -> EngineHarness:
    return EngineHarness(ScriptedModel(*turns, profile=ModelProfile(**profile)), [EchoTool()])


@pytest.mark.parametrize("kind", TYPES)
async def test_the_only_tool_is_refused_and_one_beside_others_is_named(kind: str) -> None:
    engine = make_engine(says("ok"))
    with pytest.raises(InvalidRequest) as refused:
        await engine.start(tools=[{"type": kind}])
    assert (refused.value.param, refused.value.wire_code) == ("tools[0]", "unsupported_tool")
    assert f"tools[0] {kind} is not configured" in refused.value.message
    run = await engine.start(tools=[FUNCTION, {"type": kind}])
    assert run.warnings == [f"tools[1] {kind} is not configured"]
    response = await run.wait()
    assert response.warnings == run.warnings
    (request,) = engine.model.requests
    assert [function.name for function in request.function_tools] == ["f"]
    assert not request.server_tools


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "web_search"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}, {"type": "mcp"}]},
    ],
)
async def test_one_that_is_forced_is_refused(choice: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="web_search") as refused:
        await make_engine().start(tools=[SEARCH, MCP, FUNCTION], tool_choice=choice)
    assert refused.value.param == "tool_choice"


async def test_a_call_cannot_be_required_of_nothing_but_them() -> None:
    with pytest.raises(
        InvalidRequest, match=r"required, but .*web_search is not configured, .*mcp"
    ) as refused:
        await make_engine().start(tools=[SEARCH, MCP], tool_choice="required")
    assert refused.value.param == "tool_choice"


@pytest.mark.parametrize(
    "choice",
    [
        "auto",
        "none",
        "required",
        {"type": "function", "name": "f"},
        {"type": "allowed_tools", "mode": "required", "tools": [SEARCH, {"type": "function", "name": "f"}]},
        {"type": "allowed_tools", "mode": "auto", "tools": [SEARCH]},
    ],
)
async def test_a_choice_that_leaves_another_way_runs(choice: Any) -> None:
    response = await make_engine(says("ok")).create(tools=[SEARCH, FUNCTION], tool_choice=choice)
    assert response.warnings == ["tools[0] web_search is not configured"]


async def test_a_search_without_the_web_runs_even_alone() -> None:
    response = await make_engine(says("ok")).create(tools=[CACHED])
    assert response.warnings == ["tools[0] web_search is not configured"]
    with pytest.raises(InvalidRequest):
        await make_engine().create(tools=[CACHED | {"external_web_access": True}])
    with pytest.raises(InvalidRequest):
        await make_engine().create(tools=[CACHED], tool_choice={"type": "web_search"})


async def test_several_are_all_named_up_to_a_bound() -> None:
    engine = make_engine(says("a"), says("b"), says("c"))
    response = await engine.create(tools=[SEARCH, MCP])
    assert response.warnings == ["tools[0] web_search is not configured", "tools[1] mcp is not configured"]
    warnings = (await engine.create(tools=[ECHO, *[MCP] * 40])).warnings
    assert isinstance(warnings, list)
    assert len(warnings) == 17
    assert warnings[-1] == "24 more tools are not configured"
    assert (await engine.create(tools=[ECHO, FUNCTION])).warnings is msgspec.UNSET


async def test_no_type_can_forge_a_header() -> None:
    kind = "a\r\nset-cookie: x, tools[9] \u202e\u00e9" + "y" * 500
    warnings = (await make_engine(says("a")).create(tools=[ECHO, {"type": kind}])).warnings
    assert isinstance(warnings, list)
    (warning,) = warnings
    assert warning.isascii()
    assert warning.isprintable()
    assert "," not in warning
    assert len(warning) < 120


async def test_what_the_model_server_takes_is_served() -> None:
    engine = make_engine(says("a"), says("b"), says("c"), passed_tools=("web_search", "mcp"))
    response = await engine.create(tools=[SEARCH])
    assert response.warnings is msgspec.UNSET
    await engine.create(tools=[SEARCH, MCP, ECHO], tool_choice={"type": "mcp", "server_label": "wiki"})
    await engine.create(tools=[SEARCH], tool_choice="required")
    alone, beside, required = engine.model.requests
    assert [tool.type for tool in alone.server_tools] == ["web_search"]
    assert [tool.type for tool in beside.server_tools] == ["web_search", "mcp"]
    assert isinstance(beside.tool_choice, ToolSpec)
    assert beside.tool_choice.type == "mcp"
    assert required.tool_choice == "required"


async def test_counting_and_compacting_say_it_too() -> None:
    engine = make_engine(says("A summary."))
    body = {"model": "scripted", "input": "Hi", "tools": [SEARCH, FUNCTION]}
    counted = await engine.count_tokens(**body)
    assert counted.warnings == ["tools[0] web_search is not configured"]
    compacted = await engine.compact(**body)
    assert compacted.warnings == ["tools[0] web_search is not configured"]
    with pytest.raises(InvalidRequest):
        await engine.count_tokens(**body | {"tools": [SEARCH]})


async def test_credentials_of_an_mcp_server_reach_the_model_server_and_are_neither_repeated_nor_stored() -> (
    None
):
    mcp = {
        "type": "mcp",
        "server_label": "wiki",
        "server_url": "https://wiki.example/of-the-server",
        "headers": {"authorization": "Bearer of-the-server"},
        "authorization": "of-the-server",
    }
    for profile in ({}, {"passed_tools": ("mcp",)}):
        engine = make_engine(says("ok"), **profile)
        run = await engine.start(tools=[FUNCTION, mcp])
        events = await collect_events(run)
        response = await run.wait()
        stored = await engine.store.get_response("", response.id)
        for shown in (*events, response, stored):
            assert b"of-the-server" not in msgspec.json.encode(shown)
        assert json.loads(bytes(response.tools[1]))["headers"] == {"authorization": "<redacted>"}
        (request,) = engine.model.requests
        assert [json.loads(tool.raw) for tool in request.server_tools] == ([mcp] if profile else [])
