"""Parses responses of servers with the Responses API, correct and odd ones."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from inline_snapshot import snapshot
from msgspec import Raw

from fumehood.models.responses_api.reasoning_origin import ReasoningOrigin
from fumehood.models.responses_api.responses_stream_parser import ResponsesStreamParser
from fumehood.models.upstream.upstream_errors import UpstreamErrorFactory
from fumehood.protocol.model_turns import (
    AnyModelEvent,
    ModelCallArgumentsDelta,
    ModelCallStarted,
    ModelCitation,
    ModelMessageStarted,
    ModelPassthroughDelta,
    ModelPassthroughItem,
    ModelPassthroughStarted,
    ModelReasoningDelta,
    ModelReasoningEnded,
    ModelReasoningStarted,
    ModelReasoningSummaryDelta,
    ModelRefusalDelta,
    ModelTextDelta,
    ModelTurnEnded,
)
from fumehood.protocol.openai.api_errors import (
    ModelError,
    ModelRateLimited,
    ModelRejectedRequest,
    ModelUnreachable,
)
from fumehood.protocol.openai.items import UrlCitationAnnotation
from fumehood.protocol.openai.responses import InputTokensDetails, OutputTokensDetails, Usage
from fumehood.protocol.openai.stream_events import (
    ApplyPatchDiffDelta,
    ApplyPatchDiffDone,
    ShellCallCommandAdded,
    ShellCallCommandDelta,
    ShellCallCommandDone,
)
from tests.support.responses_events import (
    added,
    call,
    created,
    delta,
    done,
    ended,
    event,
    message,
    response,
    says,
)

ORIGIN = ReasoningOrigin.for_model("http://x", "m")
RECORDED = Path(__file__).parents[4] / "shared" / "reference" / "recorded"
STREAMS = sorted(RECORDED.glob("*.chunks.txt"))


def new_parser() -> ResponsesStreamParser:
    ids = itertools.count(1)
    errors = UpstreamErrorFactory("m", api_name="Responses API")
    return ResponsesStreamParser(errors, ORIGIN, make_id=lambda prefix: f"{prefix}_made_{next(ids)}")


def parse(*chunks: bytes) -> list[AnyModelEvent]:
    """The events of a turn that ends well."""
    parser = new_parser()
    events = [event for chunk in chunks for event in parser.feed(chunk)] + parser.finish()
    assert parser.failure is None, parser.failure
    assert [isinstance(event, ModelTurnEnded) for event in events].count(True) == 1
    assert isinstance(events[-1], ModelTurnEnded)
    # Ids of the server are tested by themselves.
    return [*events[:-1], msgspec.structs.replace(events[-1], response_id=None, response_model=None)]


def test_the_servers_id_and_model_are_reported() -> None:
    reported: list[tuple[dict[str, Any], tuple[str | None, str | None]]] = [
        ({"model": "theirs-2026"}, ("resp_theirs", "theirs-2026")),
        ({"id": 7, "model": None}, (None, None)),
        ({"id": "x" * 1000, "model": ""}, (None, None)),
    ]
    for fields, expected in reported:
        parser = new_parser()
        events = [*parser.feed(created() + ended(**fields)), *parser.finish()]
        end = events[-1]
        assert isinstance(end, ModelTurnEnded)
        assert (end.response_id, end.response_model) == expected


def fail(*chunks: bytes) -> ModelError:
    parser = new_parser()
    events = [event for chunk in chunks for event in parser.feed(chunk)] + parser.finish()
    assert parser.failure is not None
    assert not any(isinstance(event, ModelTurnEnded) for event in events)
    return parser.failure


# --- turns that end well ------------------------------------------------------------------------------

LOGPROB: Any = {"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": []}
CITATION = {
    "type": "url_citation",
    "url": "https://a.example",
    "title": "A",
    "start_index": 0,
    "end_index": 1,
}
FILE_CITATION = {"type": "file_citation", "file_id": "file-theirs", "filename": "f", "index": 0}
REASONING: dict[str, Any] = {"type": "reasoning", "id": "rs_theirs", "summary": []}
FIRST_CALL: dict[str, Any] = {"type": "function_call", "call_id": "c1", "name": "f"}
SECOND_CALL: dict[str, Any] = {"type": "function_call", "call_id": "c1", "name": "g"}
CALL = {"type": "function_call", "id": "x", "call_id": "c", "name": "f"}
WHOLE_MESSAGE: dict[str, Any] = {"type": "message", "content": [{"type": "output_text", "text": "whole"}]}
WHOLE = [ModelMessageStarted(), ModelTextDelta("whole"), ModelTurnEnded("stop")]
OUTPUT = [
    {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "gist"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
    {"type": "message", "role": "assistant", "content": "b"},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": {"x": 1}},
    {"type": "function_call", "call_id": "d", "name": "g"},
]
OUTPUT_EVENTS = [
    ModelReasoningStarted(),
    ModelReasoningSummaryDelta(0, "gist"),
    ModelReasoningEnded(),
    ModelMessageStarted(),
    ModelTextDelta("a"),
    ModelMessageStarted(),
    ModelTextDelta("b"),
    ModelCallStarted(0, "c", "f"),
    ModelCallArgumentsDelta(0, '{"x":1}'),
    ModelCallStarted(1, "d", "g"),
    ModelCallArgumentsDelta(1, "{}"),
    ModelTurnEnded("calls"),
]
USAGE = {
    "input_tokens": 10,
    "input_tokens_details": {"cached_tokens": 4},
    "output_tokens": 5.0,
    "output_tokens_details": {"reasoning_tokens": -2},
    "total_tokens": 15,
}
USAGE_END = ModelTurnEnded(
    "stop",
    Usage(
        input_tokens=10,
        input_tokens_details=InputTokensDetails(cached_tokens=4),
        output_tokens=5,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=0),
        total_tokens=15,
    ),
)
TURNS: dict[str, tuple[Sequence[bytes], Sequence[AnyModelEvent]]] = {
    "text": (
        [says("Hel", "lo")],
        [ModelMessageStarted(), ModelTextDelta("Hel"), ModelTextDelta("lo"), ModelTurnEnded("stop")],
    ),
    "two messages with phases": (
        [created(), message("a", phase="commentary"), message("b", index=1, phase="final_answer"), ended()],
        [
            ModelMessageStarted("commentary"),
            ModelTextDelta("a"),
            ModelMessageStarted("final_answer"),
            ModelTextDelta("b"),
            ModelTurnEnded("stop"),
        ],
    ),
    "logprobs, citations and a refusal": (
        [
            added(0, type="message", role="assistant", content=[]),
            delta("output_text", 0, "a", logprobs=[LOGPROB]),
            event("response.output_text.annotation.added", output_index=0, annotation=CITATION),
            event("response.output_text.annotation.added", output_index=0, annotation=FILE_CITATION),
            delta("refusal", 0, "No."),
            ended(),
        ],
        [
            ModelMessageStarted(),
            ModelTextDelta("a", [Raw(msgspec.json.encode(LOGPROB))]),
            ModelCitation(
                UrlCitationAnnotation(url="https://a.example", title="A", start_index=0, end_index=1)
            ),
            ModelRefusalDelta("No."),
            ModelTurnEnded("stop"),
        ],
    ),
    "reasoning as summary, text and encrypted": (
        [
            added(0, **REASONING),
            delta("reasoning_summary_text", 0, "First", summary_index=0),
            delta("reasoning_summary_text", 0, "Second", summary_index=1),
            done(0, **REASONING, encrypted_content="gAAA"),
            added(1, **REASONING),
            delta("reasoning_text", 1, "hm", content_index=0),
            done(1, **REASONING),
            done(2, **REASONING, encrypted_content="gBBB"),
            ended(),
        ],
        [
            ModelReasoningStarted(),
            ModelReasoningSummaryDelta(0, "First"),
            ModelReasoningSummaryDelta(1, "Second"),
            ModelReasoningEnded(f"fh1:{ORIGIN.fingerprint}:rs_theirs:gAAA"),
            ModelReasoningStarted(),
            ModelReasoningDelta("hm"),
            ModelReasoningEnded(),
            ModelReasoningStarted(),
            ModelReasoningEnded(f"fh1:{ORIGIN.fingerprint}:rs_theirs:gBBB"),
            ModelTurnEnded("stop"),
        ],
    ),
    "parallel calls with one id": (
        [
            added(0, **FIRST_CALL, arguments=""),
            added(1, **SECOND_CALL, arguments=""),
            delta("function_call_arguments", 1, '{"y"'),
            delta("function_call_arguments", 0, '{"x":1}'),
            delta("function_call_arguments", 1, ":2}"),
            done(0, **FIRST_CALL, arguments='{"x":1}'),
            done(1, **SECOND_CALL, arguments='{"y":2}'),
            ended(),
        ],
        [
            ModelCallStarted(0, "c1", "f"),
            ModelCallStarted(1, "call_made_1", "g"),
            ModelCallArgumentsDelta(1, '{"y"'),
            ModelCallArgumentsDelta(0, '{"x":1}'),
            ModelCallArgumentsDelta(1, ":2}"),
            ModelTurnEnded("calls"),
        ],
    ),
    "usage": (
        [says("a", usage=USAGE)],
        [ModelMessageStarted(), ModelTextDelta("a"), USAGE_END],
    ),
    "output in the last event": ([created(), ended(output=OUTPUT)], OUTPUT_EVENTS),
    "a document": ([msgspec.json.encode(response(output=OUTPUT))], OUTPUT_EVENTS),
    "text at the end of its part": (
        [
            added(0, type="message"),
            event("response.output_text.done", output_index=0, text="whole"),
            done(0, **WHOLE_MESSAGE),
            ended(),
        ],
        WHOLE,
    ),
    "text at the end of its item": ([done(0, **WHOLE_MESSAGE), ended()], WHOLE),
    "arguments at their end": (
        [
            added(0, **CALL),
            event("response.function_call_arguments.done", output_index=0, arguments='{"x":1}'),
            ended(),
        ],
        [ModelCallStarted(0, "c", "f"), ModelCallArgumentsDelta(0, '{"x":1}'), ModelTurnEnded("calls")],
    ),
    "unknown events": (
        [
            created(),
            event("response.new.delta", delta={"x": 1}),
            event("response.other", item=[], text=5),
            message("a"),
            ended(),
        ],
        [ModelMessageStarted(), ModelTextDelta("a"), ModelTurnEnded("stop")],
    ),
    "neither output index nor end": (
        [
            event("response.output_item.added", item=CALL),
            event("response.function_call_arguments.delta", item_id="x", delta="{}"),
            b"data: [DONE]\n\n",
        ],
        [ModelCallStarted(0, "c", "f"), ModelCallArgumentsDelta(0, "{}"), ModelTurnEnded("calls")],
    ),
    **{
        f"unusable item {item_type[:20]!r}": (
            [done(0, type=item_type, id="cmp_1", encrypted_content="x"), ended()],
            [ModelTurnEnded("stop")],
        )
        # A compaction of the server would stand for everything before it, and nobody here could open it.
        for item_type in ("", "compaction", "a b", "x" * 100)
    },
}


@pytest.mark.parametrize(("chunks", "expected"), TURNS.values(), ids=TURNS)
def test_turn(chunks: Sequence[bytes], expected: Sequence[AnyModelEvent]) -> None:
    assert parse(*chunks) == expected


def test_a_custom_tool_call_becomes_a_function_call_with_one_field() -> None:
    whole = {"type": "custom_tool_call", "call_id": "c", "name": "sql"}
    events = parse(
        added(0, **whole, input=""),
        delta("custom_tool_call_input", 0, 'SELECT "a'),
        delta("custom_tool_call_input", 0, '"\n'),
        done(0, **whole, input='SELECT "a"\n'),
        ended(),
    )
    written = "".join(event.delta for event in events if isinstance(event, ModelCallArgumentsDelta))
    assert json.loads(written) == {"input": 'SELECT "a"\n'}
    assert parse(done(0, **whole, input=""), ended())[1:-1] == [
        ModelCallArgumentsDelta(0, '{"input":"'),
        ModelCallArgumentsDelta(0, '"}'),
    ]


@pytest.mark.parametrize(
    ("item", "awaits"),
    [
        ({"type": "web_search_call", "id": "ws_theirs", "action": {"type": "search"}}, False),
        ({"type": "apply_patch_call", "id": "apc_theirs", "call_id": "c"}, True),
        ({"type": "shell_call", "id": "sh_theirs", "environment": {"type": "container_reference"}}, False),
        ({"type": "shell_call", "id": "sh_theirs", "environment": None}, True),
        ({"type": "tool_search_call", "id": "tsc_theirs", "execution": "client"}, True),
        ({"type": "function_call", "id": "fc_theirs", "call_id": "c", "name": "f", "namespace": "n"}, True),
    ],
)
def test_passthrough_items_get_our_ids(item: dict[str, Any], awaits: bool) -> None:
    *started, passed, end = parse(added(0, **item), done(0, **item), ended())
    assert isinstance(passed, ModelPassthroughItem)
    if item["type"] in ("shell_call", "apply_patch_call"):
        assert started == [ModelPassthroughStarted(0, passed.item)]
        assert passed.key == 0
    assert passed.awaits_client == awaits
    assert json.loads(bytes(passed.item)) == item | {"id": item["id"].replace("theirs", "made_1")}
    assert end == ModelTurnEnded("stop")


def test_parts_of_commands_and_patches_are_passed_on() -> None:
    shell: dict[str, Any] = {"type": "shell_call", "id": "sh_theirs", "call_id": "c", "action": {}}
    patch = {"type": "apply_patch_call", "id": "apc_theirs", "call_id": "d"}
    command: dict[str, object] = {"output_index": 0, "command_index": 0}
    diff: dict[str, object] = {"output_index": 1, "item_id": "apc_theirs"}
    events = parse(
        added(0, **shell),
        event("response.shell_call_command.added", **command, command=""),
        event("response.shell_call_command.delta", **command, delta="ls"),
        event("response.shell_call_command.delta", output_index=7, command_index=0, delta="of nothing"),
        event("response.shell_call_command.delta", **command),
        event("response.shell_call_command.done", **command, command="ls"),
        done(0, **shell | {"action": {"commands": ["ls"]}}),
        added(1, **patch),
        event("response.apply_patch_call_operation_diff.delta", **diff, delta="+a"),
        event("response.apply_patch_call_operation_diff.done", **diff, diff="+a"),
        done(1, **patch),
        ended(),
    )
    parts = [part for part in events if isinstance(part, ModelPassthroughDelta)]
    assert [(part.key, part.event) for part in parts] == [
        (0, ShellCallCommandAdded(output_index=-1, command_index=0)),
        (0, ShellCallCommandDelta(output_index=-1, command_index=0, delta="ls")),
        (0, ShellCallCommandDone(output_index=-1, command_index=0, command="ls")),
        (1, ApplyPatchDiffDelta(item_id="apc_made_2", output_index=-1, delta="+a")),
        (1, ApplyPatchDiffDone(item_id="apc_made_2", output_index=-1, diff="+a")),
    ]


# --- ends and failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("details", "reason"),
    [
        ({"reason": "max_output_tokens"}, "length"),
        ({"reason": "content_filter"}, "content_filter"),
        ({"reason": "weariness"}, "length"),
        (None, "length"),
    ],
)
def test_incomplete(details: object, reason: Any) -> None:
    assert parse(message("a"), ended("incomplete", incomplete_details=details))[-1] == ModelTurnEnded(reason)


@pytest.mark.parametrize(
    ("chunk", "kind", "words"),
    [
        (
            ended("failed", error={"code": "server_error", "message": "oh"}),
            ModelError,
            "failed: oh.",
        ),
        (ended("failed", error={"code": "rate_limit_exceeded", "message": "slow"}), ModelRateLimited, "slow"),
        (ended("failed", error={"code": "invalid_prompt", "message": "no"}), ModelRejectedRequest, "no"),
        (ended("failed"), ModelError, "has the status failed"),
        (ended("cancelled"), ModelError, "has the status cancelled"),
        (event("error", error={"type": "insufficient_quota", "message": "pay"}), ModelRateLimited, "pay"),
        (event("error", code="server_error", message="flat", param=None), ModelError, "flat"),
        (event("error", code=429, message="flat"), ModelRateLimited, "flat"),
        (b'data: {"error":{"message":"bare"}}\n\n', ModelError, "bare"),
        (b'data: {"object":"error","message":"old","code":400}\n\n', ModelRejectedRequest, "old"),
        (added(0, type="function_call"), ModelError, "without naming it"),
        (b"data: rubbish\n\n", ModelError, "Expecting value"),
        (event("response.output_item.done", item=5), ModelError, "Expected `object`"),
        (b"", ModelUnreachable, "broke"),
        (b"".join(call("f", "{}", index=index) for index in range(129)), ModelError, "more than 128 calls"),
    ],
)
def test_failures(chunk: bytes, kind: type[ModelError], words: str) -> None:
    failure = fail(created(), chunk)
    assert type(failure) is kind
    assert words in failure.message


def test_bytes_that_are_not_utf_8_are_not_passed_on() -> None:
    passed = done(0, type="web_search_call", id="ws_1", query="\u00e9").replace(b"\xc3\xa9", b"\xe9")
    recorded_event = delta("output_text", 1, "a", logprobs=[{"token": "\u00e9"}]).replace(
        b"\xc3\xa9", b"\xe9"
    )
    (item, text, _) = parse(passed, recorded_event, ended())
    assert isinstance(item, ModelPassthroughItem)
    assert json.loads(bytes(item.item))["query"] == "\ufffd"
    assert text == ModelTextDelta("a", [Raw('{"token":"\ufffd"}'.encode())])


@pytest.mark.parametrize("body", [b"{}", b'{"object":"list"}', msgspec.json.encode(response("queued"))])
def test_documents_that_are_not_responses(body: bytes) -> None:
    assert "sent an invalid Responses API response" in fail(body).message


def test_a_response_that_is_too_large() -> None:
    parser = ResponsesStreamParser(UpstreamErrorFactory("m"), ORIGIN, max_bytes=10_000)
    for _ in range(100):
        assert not parser.feed(b": " + b"x" * 998 + b"\n")
        if parser.is_over:
            break
    assert parser.failure is not None
    assert parser.failure.message == snapshot(
        "The server of the model 'm' sent too large a response and was disconnected."
    )


@given(st.data())
def test_any_split_gives_the_same_events(data: st.DataObject) -> None:
    body = created() + message("Hé", "llo\n") + call("f", '{"x"', ":1}", index=1) + ended()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=6)))
    chunks = [body[start:end] for start, end in itertools.pairwise([0, *cuts, len(body)])]
    assert parse(*chunks) == parse(body)


# --- recorded streams -------------------------------------------------------------------------------


def turns(path: Path) -> list[list[dict[str, Any]]]:
    """The responses of a recording that are whole."""
    found: list[list[dict[str, Any]]] = []
    for line in path.read_bytes().splitlines():
        try:
            recorded_event = json.loads(line)
        except ValueError:
            continue  # cut off in the recording
        if recorded_event["type"] == "response.created" or not found:
            found.append([])
        found[-1].append(recorded_event)
    return [turn for turn in found if turn[-1]["type"] in ("response.completed", "response.failed")]


def is_plain_call(item: dict[str, Any]) -> bool:
    called = item["type"] in ("function_call", "custom_tool_call")
    return called and not item.get("namespace") and not item.get("caller")


@pytest.mark.skipif(not STREAMS, reason="the recorded streams are not here")
@pytest.mark.parametrize("path", STREAMS, ids=lambda path: path.name)
def test_recorded(path: Path) -> None:
    whole = turns(path)
    if not whole:
        pytest.skip("the recording ends before the response does")
    for turn in whole:
        body = b"".join(
            event(recorded_event["type"], **{k: v for k, v in recorded_event.items() if k != "type"})
            for recorded_event in turn
        )
        if turn[-1]["type"] == "response.failed":
            assert isinstance(fail(body), ModelRateLimited)
            continue
        events = parse(body)
        finished = [
            recorded_event["item"]
            for recorded_event in turn
            if recorded_event["type"] == "response.output_item.done"
        ]
        texts = [part["text"] for item in finished if item["type"] == "message" for part in item["content"]]
        deltas = [
            recorded_event["delta"]
            for recorded_event in turn
            if recorded_event["type"] == "response.output_text.delta"
        ]
        # Some recordings leave out most deltas.
        assert "".join(event.delta for event in events if isinstance(event, ModelTextDelta)) in (
            "".join(texts),
            "".join(deltas),
        )
        calls = [item for item in finished if is_plain_call(item)]
        started = [event.name for event in events if isinstance(event, ModelCallStarted)]
        assert started == [item["name"] for item in calls]
        passed = [
            json.loads(bytes(event.item)) for event in events if isinstance(event, ModelPassthroughItem)
        ]
        kinds = [item["type"] for item in finished if item not in calls]
        assert [item["type"] for item in passed] == [
            kind for kind in kinds if kind not in ("message", "reasoning", "compaction")
        ]
        assert kinds.count("reasoning") == sum(isinstance(event, ModelReasoningEnded) for event in events)
        theirs = {item.get("id") for item in finished}
        assert not any(item["id"] in theirs for item in passed)
        end = events[-1]
        assert isinstance(end, ModelTurnEnded)
        assert end.usage is not None
        assert end.usage.total_tokens == turn[-1]["response"]["usage"]["total_tokens"]
