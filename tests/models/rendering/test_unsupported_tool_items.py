"""Items of other servers' tools as chat completions servers are shown them."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from inline_snapshot import snapshot

from fumehood.protocol.conversation import ConversationEntry
from tests.support.chat_messages import render, render_refused
from tests.support.conversations import entry, message, segment

RECORDED = Path(__file__).parents[4] / "shared" / "reference" / "recorded"
PICTURE = "data:image/png;base64," + "A" * 30_000


def render_items(*items: dict[str, Any]) -> list[Any]:
    return render(segment(*(entry(item) for item in items)))


def pair_calls_with_results(messages: list[Any]) -> list[Any]:
    """The calls, each with its result, which follows right after; and whatever else there is."""
    found: list[Any] = []
    waiting: dict[str, tuple[str, str]] = {}
    for one in messages:
        if one["role"] == "tool":
            found.append((*waiting.pop(one["tool_call_id"]), one["content"]))
            continue
        assert not waiting, "a call without a result"
        if one["content"]:
            found.append(one["content"])
        for call in one.get("tool_calls", ()):
            assert isinstance(json.loads(call["function"]["arguments"]), dict)
            waiting[call["id"]] = (call["function"]["name"], call["function"]["arguments"])
    assert not waiting, "a call without a result"
    return found


def test_calls_that_a_client_ran_are_rendered_with_their_results() -> None:
    rendered = render_items(
        {
            "type": "local_shell_call",
            "call_id": "c1",
            "action": {"type": "exec", "command": ["ls"], "env": {}},
        },
        {"type": "local_shell_call_output", "id": "c1", "output": "a.txt"},
        {
            "type": "shell_call",
            "id": "sh_1",
            "call_id": "c2",
            "status": "completed",
            "action": {"commands": ["pwd"]},
        },
        {
            "type": "shell_call_output",
            "call_id": "c2",
            "output": [{"stdout": "/\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}],
        },
        {"type": "apply_patch_call", "call_id": "c3", "operation": {"type": "delete_file", "path": "a.txt"}},
        {"type": "apply_patch_call_output", "call_id": "c3", "status": "failed"},
        {
            "type": "computer_call",
            "call_id": "c4",
            "action": {"type": "screenshot"},
            "pending_safety_checks": [],
        },
        {
            "type": "computer_call_output",
            "call_id": "c4",
            "output": {"type": "computer_screenshot", "image_url": PICTURE},
        },
        {
            "type": "tool_search_call",
            "call_id": "c5",
            "arguments": {"goal": "weather"},
            "execution": "client",
        },
        {"type": "tool_search_output", "call_id": "c5", "tools": [{"type": "function", "name": "rain"}]},
    )
    assert pair_calls_with_results(rendered) == snapshot(
        [
            ("local_shell", '{"command":["ls"]}', "a.txt"),
            (
                "shell",
                '{"commands":["pwd"]}',
                '[{"stdout":"/\\n","stderr":"","outcome":{"type":"exit","exit_code":0}}]',
            ),
            ("apply_patch", '{"type":"delete_file","path":"a.txt"}', "The patch was not applied."),
            (
                "computer",
                '{"action":{"type":"screenshot"},"pending_safety_checks":[]}',
                '{"type":"computer_screenshot","image_url":"(data)"}',
            ),
            ("tool_search", '{"goal":"weather"}', '[{"type":"function","name":"rain"}]'),
        ]
    )


def test_a_call_that_holds_its_own_result() -> None:
    rendered = render_items(
        {
            "type": "mcp_call",
            "id": "mcp_1",
            "name": "short.url",
            "server_label": "zip",
            "arguments": '{"url": "x"}',
            "output": "done",
            "error": None,
        },
        {
            "type": "mcp_call",
            "id": "mcp_2",
            "name": "broken",
            "arguments": "{}",
            "output": None,
            "error": {"type": "http_error", "code": 500},
        },
        {
            "type": "file_search_call",
            "id": "fs_1",
            "queries": ["q"],
            "results": [{"text": "found", "score": 1}],
        },
    )
    assert pair_calls_with_results(rendered) == snapshot(
        [
            ("short_url", '{"url": "x"}', "done"),
            ("broken", "{}", '{"type":"http_error","code":500}'),
            ("file_search", '{"queries":["q"]}', '[{"text":"found","score":1}]'),
        ]
    )


@pytest.mark.parametrize(
    "item",
    [
        {"type": "web_search_call", "id": "ws_1", "action": {"type": "search", "query": "q"}},
        {"type": "file_search_call", "id": "fs_1", "queries": ["q"], "results": None},
        {"type": "image_generation_call", "id": "ig_1", "result": "iVBORw0KGgo="},
        {"type": "mcp_list_tools", "id": "mcpl_1", "server_label": "zip", "tools": [{"name": "a"}]},
        {"type": "mcp_approval_request", "id": "mcpr_1", "name": "a", "arguments": "{}"},
        {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": True},
        {"type": "shell_call", "call_id": "c1", "action": {"commands": ["never", "answered"]}},
        {"type": "shell_call_output", "call_id": "nobody-called", "output": []},
        {"type": "additional_tools", "role": "developer", "tools": []},
        {"type": "from_the_future", "payload": [1, 2, 3]},
    ],
    ids=lambda item: item["type"],
)
def test_items_without_results_are_dropped(item: dict[str, Any]) -> None:
    rendered = render_items({"role": "user", "content": "before"}, item, {"role": "user", "content": "after"})
    assert pair_calls_with_results(rendered) == ["before", "after"]


def test_a_long_result_is_cut() -> None:
    rendered = render_items(
        {"type": "future_call", "call_id": "c", "action": {}},
        {"type": "future_call_output", "call_id": "c", "output": "x" * 1_000_000},
    )
    assert 20_000 <= len(pair_calls_with_results(rendered)[0][2]) < 21_000


def test_a_compaction_is_refused() -> None:
    sealed = entry({"type": "compaction", "encrypted_content": "?"})
    assert "compaction" in render_refused(segment(message("go"), sealed)).message


_json = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5) | st.just(PICTURE),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
_FIELDS = ("id", "call_id", "name", "arguments", "action", "output", "outputs", "results", "error", "status")
_items = st.fixed_dictionaries(
    {"type": st.sampled_from(["shell_call", "shell_call_output", "mcp_call", "odd"])},
    optional={field: st.sampled_from(["a", "b", ""]) | _json for field in _FIELDS},
)


@given(st.lists(_items, max_size=6))
def test_no_foreign_item_fails_a_request_or_leaves_a_call_open(items: list[dict[str, Any]]) -> None:
    entries = [
        ConversationEntry(type=item["type"], id=f"it_{number}", turn=0, raw=json.dumps(item).encode())
        for number, item in enumerate(items)
    ]
    pair_calls_with_results(render(segment(message("go"), *entries)))


@pytest.mark.skipif(not RECORDED.exists(), reason="the recordings are not here")
def test_every_recorded_output_of_openai_can_be_rendered() -> None:
    kinds: set[str] = set()
    for path in RECORDED.glob("*.json"):
        output = json.loads(path.read_text()).get("output", [])
        foreign = [
            item for item in output if item["type"] not in ("function_call", "custom_tool_call", "compaction")
        ]
        pair_calls_with_results(render_items({"role": "user", "content": "go"}, *foreign))
        kinds |= {item["type"] for item in foreign}
    assert len(kinds) > 8
