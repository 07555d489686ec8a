"""Whole streams where the model is behind a server of Responses."""

from typing import Any

import pytest
from inline_snapshot import snapshot
from msgspec import Raw

from fumehood.protocol.model_turns import (
    ModelCitation,
    ModelMessageStarted,
    ModelPassthroughDelta,
    ModelPassthroughItem,
    ModelPassthroughStarted,
    ModelReasoningEnded,
    ModelReasoningStarted,
    ModelReasoningSummaryDelta,
    ModelTextDelta,
    ModelTurnEnded,
)
from fumehood.protocol.openai.items import UrlCitationAnnotation
from fumehood.protocol.openai.stream_events import ShellCallCommandDelta
from fumehood.testing import ScriptedModel, calls, says
from tests.support.echo_tool import EchoTool
from tests.support.engine_harness import EngineHarness
from tests.support.stream_checks import check_invariants, make_readable


async def test_what_a_server_of_responses_says_of_its_reasoning() -> None:
    model = ScriptedModel(
        [
            ModelReasoningStarted(),
            ModelReasoningSummaryDelta(0, "First"),
            ModelReasoningSummaryDelta(0, "ly."),
            ModelReasoningSummaryDelta(3, "Then."),
            ModelReasoningEnded("sealed"),
            ModelMessageStarted("final_answer"),
            ModelTextDelta("Yes"),
            ModelCitation(
                UrlCitationAnnotation(url="https://a.example", title="A", start_index=0, end_index=3)
            ),
        ]
    )
    events = await EngineHarness(model).stream()
    check_invariants(events)
    assert make_readable(events)[2:-1] == snapshot(
        [
            {
                "type": "response.output_item.added",
                "sequence_number": 2,
                "output_index": 0,
                "item": {"type": "reasoning", "id": "rs_1", "summary": []},
            },
            {
                "type": "response.reasoning_summary_part.added",
                "sequence_number": 3,
                "item_id": "rs_1",
                "output_index": 0,
                "summary_index": 0,
                "part": {"type": "summary_text", "text": ""},
            },
            {
                "type": "response.reasoning_summary_text.delta",
                "sequence_number": 4,
                "item_id": "rs_1",
                "output_index": 0,
                "summary_index": 0,
                "delta": "First",
            },
            {
                "type": "response.reasoning_summary_text.delta",
                "sequence_number": 5,
                "item_id": "rs_1",
                "output_index": 0,
                "summary_index": 0,
                "delta": "ly.",
            },
            {
                "type": "response.reasoning_summary_text.done",
                "sequence_number": 6,
                "item_id": "rs_1",
                "output_index": 0,
                "summary_index": 0,
                "text": "Firstly.",
            },
            {
                "type": "response.reasoning_summary_part.done",
                "sequence_number": 7,
                "item_id": "rs_1",
                "output_index": 0,
                "summary_index": 0,
                "part": {"type": "summary_text", "text": "Firstly."},
            },
            {
                "type": "response.reasoning_summary_part.added",
                "sequence_number": 8,
                "item_id": "rs_1",
                "output_index": 0,
                "summary_index": 1,
                "part": {"type": "summary_text", "text": ""},
            },
            {
                "type": "response.reasoning_summary_text.delta",
                "sequence_number": 9,
                "item_id": "rs_1",
                "output_index": 0,
                "summary_index": 1,
                "delta": "Then.",
            },
            {
                "type": "response.reasoning_summary_text.done",
                "sequence_number": 10,
                "item_id": "rs_1",
                "output_index": 0,
                "summary_index": 1,
                "text": "Then.",
            },
            {
                "type": "response.reasoning_summary_part.done",
                "sequence_number": 11,
                "item_id": "rs_1",
                "output_index": 0,
                "summary_index": 1,
                "part": {"type": "summary_text", "text": "Then."},
            },
            {
                "type": "response.output_item.done",
                "sequence_number": 12,
                "output_index": 0,
                "item": {
                    "type": "reasoning",
                    "id": "rs_1",
                    "summary": [
                        {"type": "summary_text", "text": "Firstly."},
                        {"type": "summary_text", "text": "Then."},
                    ],
                    "encrypted_content": "sealed",
                },
            },
            {
                "type": "response.output_item.added",
                "sequence_number": 13,
                "output_index": 1,
                "item": {
                    "type": "message",
                    "id": "msg_1",
                    "role": "assistant",
                    "status": "in_progress",
                    "content": [],
                    "phase": "final_answer",
                },
            },
            {
                "type": "response.content_part.added",
                "sequence_number": 14,
                "item_id": "msg_1",
                "output_index": 1,
                "content_index": 0,
                "part": {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
            },
            {
                "type": "response.output_text.delta",
                "sequence_number": 15,
                "item_id": "msg_1",
                "output_index": 1,
                "content_index": 0,
                "delta": "Yes",
                "logprobs": [],
            },
            {
                "type": "response.output_text.annotation.added",
                "sequence_number": 16,
                "item_id": "msg_1",
                "output_index": 1,
                "content_index": 0,
                "annotation_index": 0,
                "annotation": {
                    "type": "url_citation",
                    "url": "https://a.example",
                    "title": "A",
                    "start_index": 0,
                    "end_index": 3,
                },
            },
            {
                "type": "response.output_text.done",
                "sequence_number": 17,
                "item_id": "msg_1",
                "output_index": 1,
                "content_index": 0,
                "text": "Yes",
                "logprobs": [],
            },
            {
                "type": "response.content_part.done",
                "sequence_number": 18,
                "item_id": "msg_1",
                "output_index": 1,
                "content_index": 0,
                "part": {
                    "type": "output_text",
                    "text": "Yes",
                    "annotations": [
                        {
                            "type": "url_citation",
                            "url": "https://a.example",
                            "title": "A",
                            "start_index": 0,
                            "end_index": 3,
                        }
                    ],
                    "logprobs": [],
                },
            },
            {
                "type": "response.output_item.done",
                "sequence_number": 19,
                "output_index": 1,
                "item": {
                    "type": "message",
                    "id": "msg_1",
                    "role": "assistant",
                    "status": "completed",
                    "content": [
                        {
                            "type": "output_text",
                            "text": "Yes",
                            "annotations": [
                                {
                                    "type": "url_citation",
                                    "url": "https://a.example",
                                    "title": "A",
                                    "start_index": 0,
                                    "end_index": 3,
                                }
                            ],
                            "logprobs": [],
                        }
                    ],
                    "phase": "final_answer",
                },
            },
        ]
    )


@pytest.mark.parametrize("is_whole", [True, False])
async def test_parts_of_items_of_the_server_are_streamed(is_whole: bool) -> None:
    """One that is cut off ends as it began, without what was incomplete."""
    begun = Raw(b'{"type":"shell_call","id":"sh_1","call_id":"c","action":{"commands":[]},"future":1}')
    whole = Raw(b'{"type":"shell_call","id":"sh_1","call_id":"c","action":{"commands":["ls"]},"future":1}')
    written = ShellCallCommandDelta(output_index=-1, command_index=0, delta="ls")
    end: list[Any] = (
        [ModelPassthroughItem(whole, awaits_client=True, key=0)] if is_whole else [ModelTurnEnded("length")]
    )
    turn = [*says("a", deltas=1), ModelPassthroughStarted(0, begun), ModelPassthroughDelta(0, written), *end]
    async with ScriptedModel(turn) as model:
        events = await EngineHarness(model).stream()
    response = check_invariants(events)
    assert response.output[1:] == [whole if is_whole else begun]
    (delta,) = [event for event in events if isinstance(event, ShellCallCommandDelta)]
    assert (delta.output_index, delta.delta) == (1, "ls")
    assert written.output_index == -1


async def test_items_that_only_the_server_and_the_client_understand() -> None:
    searched = Raw(b'{"type":"web_search_call","id":"ws_1","status":"completed"}')
    patch = Raw(b'{"type":"apply_patch_call","id":"apc_1","call_id":"call_p"}')
    model = ScriptedModel(
        [
            *says("a", deltas=1),
            ModelPassthroughItem(searched),
            *calls("echo", {"text": "ran"}),
            ModelPassthroughItem(patch, awaits_client=True),
        ]
    )
    async with model:
        events = await EngineHarness(model, [EchoTool()]).stream(tools=[{"type": "echo"}])
    response = check_invariants(events)
    # The hosted call was run, and then it is the client's turn.
    kinds = [type(item).__name__ for item in response.output]
    assert kinds == ["OutputMessage", "Raw", "CodeInterpreterCall", "Raw"]
    assert (response.output[1], response.output[3]) == (searched, patch)
    assert response.status == "completed"
