"""Whole streams of the engine, as they are."""

from inline_snapshot import snapshot

from fumehood.testing import ScriptedModel, calls, refuses, says, thinks
from tests.support.engine_harness import EngineHarness
from tests.support.stream_checks import check_invariants, make_readable

WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


async def test_text() -> None:
    events = await EngineHarness(ScriptedModel([*says("Hello you", deltas=2)])).stream()
    check_invariants(events)
    assert make_readable(events) == snapshot(
        [
            {
                "type": "response.created",
                "sequence_number": 0,
                "response": {"id": "resp_1", "status": "in_progress"},
            },
            {
                "type": "response.in_progress",
                "sequence_number": 1,
                "response": {"id": "resp_1", "status": "in_progress"},
            },
            {
                "type": "response.output_item.added",
                "sequence_number": 2,
                "output_index": 0,
                "item": {
                    "type": "message",
                    "id": "msg_1",
                    "role": "assistant",
                    "status": "in_progress",
                    "content": [],
                },
            },
            {
                "type": "response.content_part.added",
                "sequence_number": 3,
                "item_id": "msg_1",
                "output_index": 0,
                "content_index": 0,
                "part": {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
            },
            {
                "type": "response.output_text.delta",
                "sequence_number": 4,
                "item_id": "msg_1",
                "output_index": 0,
                "content_index": 0,
                "delta": "Hell",
                "logprobs": [],
            },
            {
                "type": "response.output_text.delta",
                "sequence_number": 5,
                "item_id": "msg_1",
                "output_index": 0,
                "content_index": 0,
                "delta": "o you",
                "logprobs": [],
            },
            {
                "type": "response.output_text.done",
                "sequence_number": 6,
                "item_id": "msg_1",
                "output_index": 0,
                "content_index": 0,
                "text": "Hello you",
                "logprobs": [],
            },
            {
                "type": "response.content_part.done",
                "sequence_number": 7,
                "item_id": "msg_1",
                "output_index": 0,
                "content_index": 0,
                "part": {"type": "output_text", "text": "Hello you", "annotations": [], "logprobs": []},
            },
            {
                "type": "response.output_item.done",
                "sequence_number": 8,
                "output_index": 0,
                "item": {
                    "type": "message",
                    "id": "msg_1",
                    "role": "assistant",
                    "status": "completed",
                    "content": [
                        {"type": "output_text", "text": "Hello you", "annotations": [], "logprobs": []}
                    ],
                },
            },
            {
                "type": "response.completed",
                "sequence_number": 9,
                "response": {
                    "id": "resp_1",
                    "status": "completed",
                    "error": None,
                    "incomplete_details": None,
                    "usage": None,
                    "output": ["msg_1"],
                },
            },
        ]
    )


async def test_reasoning_then_text() -> None:
    events = await EngineHarness(ScriptedModel([*thinks("hm", deltas=1), *says("Yes", deltas=1)])).stream()
    check_invariants(events)
    assert make_readable(events)[2:-1] == snapshot(
        [
            {
                "type": "response.output_item.added",
                "sequence_number": 2,
                "output_index": 0,
                "item": {"type": "reasoning", "id": "rs_1", "summary": [], "content": []},
            },
            {
                "type": "response.content_part.added",
                "sequence_number": 3,
                "item_id": "rs_1",
                "output_index": 0,
                "content_index": 0,
                "part": {"type": "reasoning_text", "text": ""},
            },
            {
                "type": "response.reasoning_text.delta",
                "sequence_number": 4,
                "item_id": "rs_1",
                "output_index": 0,
                "content_index": 0,
                "delta": "hm",
            },
            {
                "type": "response.reasoning_text.done",
                "sequence_number": 5,
                "item_id": "rs_1",
                "output_index": 0,
                "content_index": 0,
                "text": "hm",
            },
            {
                "type": "response.content_part.done",
                "sequence_number": 6,
                "item_id": "rs_1",
                "output_index": 0,
                "content_index": 0,
                "part": {"type": "reasoning_text", "text": "hm"},
            },
            {
                "type": "response.output_item.done",
                "sequence_number": 7,
                "output_index": 0,
                "item": {
                    "type": "reasoning",
                    "id": "rs_1",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "hm"}],
                },
            },
            {
                "type": "response.output_item.added",
                "sequence_number": 8,
                "output_index": 1,
                "item": {
                    "type": "message",
                    "id": "msg_1",
                    "role": "assistant",
                    "status": "in_progress",
                    "content": [],
                },
            },
            {
                "type": "response.content_part.added",
                "sequence_number": 9,
                "item_id": "msg_1",
                "output_index": 1,
                "content_index": 0,
                "part": {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
            },
            {
                "type": "response.output_text.delta",
                "sequence_number": 10,
                "item_id": "msg_1",
                "output_index": 1,
                "content_index": 0,
                "delta": "Yes",
                "logprobs": [],
            },
            {
                "type": "response.output_text.done",
                "sequence_number": 11,
                "item_id": "msg_1",
                "output_index": 1,
                "content_index": 0,
                "text": "Yes",
                "logprobs": [],
            },
            {
                "type": "response.content_part.done",
                "sequence_number": 12,
                "item_id": "msg_1",
                "output_index": 1,
                "content_index": 0,
                "part": {"type": "output_text", "text": "Yes", "annotations": [], "logprobs": []},
            },
            {
                "type": "response.output_item.done",
                "sequence_number": 13,
                "output_index": 1,
                "item": {
                    "type": "message",
                    "id": "msg_1",
                    "role": "assistant",
                    "status": "completed",
                    "content": [{"type": "output_text", "text": "Yes", "annotations": [], "logprobs": []}],
                },
            },
        ]
    )


async def test_refusal_after_text() -> None:
    events = await EngineHarness(ScriptedModel([*says("Well", deltas=1), *refuses("No", deltas=1)])).stream()
    check_invariants(events)
    assert make_readable(events)[2:-1] == snapshot(
        [
            {
                "type": "response.output_item.added",
                "sequence_number": 2,
                "output_index": 0,
                "item": {
                    "type": "message",
                    "id": "msg_1",
                    "role": "assistant",
                    "status": "in_progress",
                    "content": [],
                },
            },
            {
                "type": "response.content_part.added",
                "sequence_number": 3,
                "item_id": "msg_1",
                "output_index": 0,
                "content_index": 0,
                "part": {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
            },
            {
                "type": "response.output_text.delta",
                "sequence_number": 4,
                "item_id": "msg_1",
                "output_index": 0,
                "content_index": 0,
                "delta": "Well",
                "logprobs": [],
            },
            {
                "type": "response.output_text.done",
                "sequence_number": 5,
                "item_id": "msg_1",
                "output_index": 0,
                "content_index": 0,
                "text": "Well",
                "logprobs": [],
            },
            {
                "type": "response.content_part.done",
                "sequence_number": 6,
                "item_id": "msg_1",
                "output_index": 0,
                "content_index": 0,
                "part": {"type": "output_text", "text": "Well", "annotations": [], "logprobs": []},
            },
            {
                "type": "response.content_part.added",
                "sequence_number": 7,
                "item_id": "msg_1",
                "output_index": 0,
                "content_index": 1,
                "part": {"type": "refusal", "refusal": ""},
            },
            {
                "type": "response.refusal.delta",
                "sequence_number": 8,
                "item_id": "msg_1",
                "output_index": 0,
                "content_index": 1,
                "delta": "No",
            },
            {
                "type": "response.refusal.done",
                "sequence_number": 9,
                "item_id": "msg_1",
                "output_index": 0,
                "content_index": 1,
                "refusal": "No",
            },
            {
                "type": "response.content_part.done",
                "sequence_number": 10,
                "item_id": "msg_1",
                "output_index": 0,
                "content_index": 1,
                "part": {"type": "refusal", "refusal": "No"},
            },
            {
                "type": "response.output_item.done",
                "sequence_number": 11,
                "output_index": 0,
                "item": {
                    "type": "message",
                    "id": "msg_1",
                    "role": "assistant",
                    "status": "completed",
                    "content": [
                        {"type": "output_text", "text": "Well", "annotations": [], "logprobs": []},
                        {"type": "refusal", "refusal": "No"},
                    ],
                },
            },
        ]
    )


async def test_function_calls_one_after_another() -> None:
    turn = [
        *says("Let me see", deltas=1),
        calls("weather", {"city": "Bonn"}),
        calls("weather", {"city": "Ulm"}),
    ]
    events = await EngineHarness(ScriptedModel(turn)).stream(tools=[WEATHER])
    check_invariants(events)
    assert make_readable(events)[2:-1] == snapshot(
        [
            {
                "type": "response.output_item.added",
                "sequence_number": 2,
                "output_index": 0,
                "item": {
                    "type": "message",
                    "id": "msg_1",
                    "role": "assistant",
                    "status": "in_progress",
                    "content": [],
                },
            },
            {
                "type": "response.content_part.added",
                "sequence_number": 3,
                "item_id": "msg_1",
                "output_index": 0,
                "content_index": 0,
                "part": {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
            },
            {
                "type": "response.output_text.delta",
                "sequence_number": 4,
                "item_id": "msg_1",
                "output_index": 0,
                "content_index": 0,
                "delta": "Let me see",
                "logprobs": [],
            },
            {
                "type": "response.output_text.done",
                "sequence_number": 5,
                "item_id": "msg_1",
                "output_index": 0,
                "content_index": 0,
                "text": "Let me see",
                "logprobs": [],
            },
            {
                "type": "response.content_part.done",
                "sequence_number": 6,
                "item_id": "msg_1",
                "output_index": 0,
                "content_index": 0,
                "part": {"type": "output_text", "text": "Let me see", "annotations": [], "logprobs": []},
            },
            {
                "type": "response.output_item.done",
                "sequence_number": 7,
                "output_index": 0,
                "item": {
                    "type": "message",
                    "id": "msg_1",
                    "role": "assistant",
                    "status": "completed",
                    "content": [
                        {"type": "output_text", "text": "Let me see", "annotations": [], "logprobs": []}
                    ],
                },
            },
            {
                "type": "response.output_item.added",
                "sequence_number": 8,
                "output_index": 1,
                "item": {
                    "type": "function_call",
                    "id": "fc_1",
                    "call_id": "call_1",
                    "name": "weather",
                    "arguments": "",
                    "status": "in_progress",
                },
            },
            {
                "type": "response.function_call_arguments.delta",
                "sequence_number": 9,
                "item_id": "fc_1",
                "output_index": 1,
                "delta": '{"cit',
            },
            {
                "type": "response.function_call_arguments.delta",
                "sequence_number": 10,
                "item_id": "fc_1",
                "output_index": 1,
                "delta": 'y":"B',
            },
            {
                "type": "response.function_call_arguments.delta",
                "sequence_number": 11,
                "item_id": "fc_1",
                "output_index": 1,
                "delta": 'onn"}',
            },
            {
                "type": "response.function_call_arguments.done",
                "sequence_number": 12,
                "item_id": "fc_1",
                "output_index": 1,
                "arguments": '{"city":"Bonn"}',
            },
            {
                "type": "response.output_item.done",
                "sequence_number": 13,
                "output_index": 1,
                "item": {
                    "type": "function_call",
                    "id": "fc_1",
                    "call_id": "call_1",
                    "name": "weather",
                    "arguments": '{"city":"Bonn"}',
                    "status": "completed",
                },
            },
            {
                "type": "response.output_item.added",
                "sequence_number": 14,
                "output_index": 2,
                "item": {
                    "type": "function_call",
                    "id": "fc_2",
                    "call_id": "call_2",
                    "name": "weather",
                    "arguments": "",
                    "status": "in_progress",
                },
            },
            {
                "type": "response.function_call_arguments.delta",
                "sequence_number": 15,
                "item_id": "fc_2",
                "output_index": 2,
                "delta": '{"ci',
            },
            {
                "type": "response.function_call_arguments.delta",
                "sequence_number": 16,
                "item_id": "fc_2",
                "output_index": 2,
                "delta": 'ty":"',
            },
            {
                "type": "response.function_call_arguments.delta",
                "sequence_number": 17,
                "item_id": "fc_2",
                "output_index": 2,
                "delta": 'Ulm"}',
            },
            {
                "type": "response.function_call_arguments.done",
                "sequence_number": 18,
                "item_id": "fc_2",
                "output_index": 2,
                "arguments": '{"city":"Ulm"}',
            },
            {
                "type": "response.output_item.done",
                "sequence_number": 19,
                "output_index": 2,
                "item": {
                    "type": "function_call",
                    "id": "fc_2",
                    "call_id": "call_2",
                    "name": "weather",
                    "arguments": '{"city":"Ulm"}',
                    "status": "completed",
                },
            },
        ]
    )


async def test_a_custom_tool() -> None:
    turn = [calls("patch", {"input": "a\nb"})]
    events = await EngineHarness(ScriptedModel(turn)).stream(tools=[{"type": "custom", "name": "patch"}])
    check_invariants(events)
    assert make_readable(events)[2:-1] == snapshot(
        [
            {
                "type": "response.output_item.added",
                "sequence_number": 2,
                "output_index": 0,
                "item": {
                    "type": "custom_tool_call",
                    "id": "ctc_1",
                    "call_id": "call_1",
                    "name": "patch",
                    "input": "",
                    "status": "in_progress",
                },
            },
            {
                "type": "response.custom_tool_call_input.delta",
                "sequence_number": 3,
                "item_id": "ctc_1",
                "output_index": 0,
                "delta": """\
a
b\
""",
            },
            {
                "type": "response.custom_tool_call_input.done",
                "sequence_number": 4,
                "item_id": "ctc_1",
                "output_index": 0,
                "input": """\
a
b\
""",
            },
            {
                "type": "response.output_item.done",
                "sequence_number": 5,
                "output_index": 0,
                "item": {
                    "type": "custom_tool_call",
                    "id": "ctc_1",
                    "call_id": "call_1",
                    "name": "patch",
                    "input": """\
a
b\
""",
                    "status": "completed",
                },
            },
        ]
    )
