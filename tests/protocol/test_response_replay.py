"""A response as a stream, and back."""

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from fumehood.protocol.openai.items import (
    CodeInterpreterCall,
    CodeInterpreterLogs,
    ContainerFileCitationAnnotation,
    ContainerReference,
    CustomToolCall,
    FunctionCall,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Refusal,
    ShellAction,
    ShellCall,
    ShellCallOutput,
    ShellCallOutputContent,
    ShellExit,
    ShellTimeout,
    SummaryText,
)
from fumehood.protocol.openai.response_aggregation import aggregate_events
from fumehood.protocol.openai.response_replay import replay_response
from fumehood.protocol.openai.responses import IncompleteDetails, Response, ResponseError, Usage

text = st.text(max_size=10)
citation = ContainerFileCitationAnnotation(
    container_id="cntr_1", file_id="cfile_1", filename="a", start_index=0, end_index=1
)
parts = st.one_of(
    st.builds(OutputText, text=text, annotations=st.lists(st.just(citation), max_size=2)),
    st.builds(Refusal, refusal=text),
)
ended: Any = st.sampled_from(["completed", "incomplete"])
items = st.one_of(
    st.builds(OutputMessage, id=st.just("msg_1"), status=ended, content=st.lists(parts, max_size=3)),
    st.builds(
        ReasoningItem,
        id=st.just("rs_1"),
        summary=st.lists(st.builds(SummaryText, text=text), max_size=2),
        content=st.lists(st.builds(ReasoningText, text=text), max_size=2) | st.just(msgspec.UNSET),
    ),
    st.builds(FunctionCall, id=st.just("fc_1"), call_id=text, name=text, arguments=text, status=ended),
    st.builds(CustomToolCall, id=st.just("ctc_1"), call_id=text, name=text, input=text, status=ended),
    st.builds(
        CodeInterpreterCall,
        id=st.just("ci_1"),
        status=st.sampled_from(["completed", "failed", "incomplete"]),
        code=text,
        container_id=st.just("cntr_1"),
        outputs=st.none() | st.lists(st.builds(CodeInterpreterLogs, logs=text), max_size=2),
    ),
    st.builds(
        ShellCall,
        id=st.just("sh_1"),
        call_id=text,
        status=ended,
        action=st.builds(ShellAction, commands=st.lists(text, max_size=3), timeout_ms=st.none() | st.just(5)),
        environment=st.just(ContainerReference(container_id="cntr_1")),
    ),
    st.builds(
        ShellCallOutput,
        id=st.just("sho_1"),
        call_id=text,
        status=ended,
        max_output_length=st.none() | st.just(5),
        output=st.lists(
            st.builds(
                ShellCallOutputContent,
                stdout=text,
                stderr=text,
                outcome=st.builds(ShellExit, exit_code=st.integers(-1, 255)) | st.just(ShellTimeout()),
            ),
            max_size=3,
        ),
    ),
    st.just(msgspec.Raw(b'{"type":"web_search_call","id":"ws_1"}')),
)
ends = st.sampled_from(
    [
        {"status": "completed", "completed_at": 2},
        {"status": "failed", "error": ResponseError(code="server_error", message="no")},
        {"status": "incomplete", "incomplete_details": IncompleteDetails(reason="max_output_tokens")},
        {"status": "cancelled"},
    ]
)


@given(st.lists(items, max_size=4), ends)
def test_a_stream_of_a_response_adds_up_to_it(output: list[Any], end: dict[str, Any]) -> None:
    response = Response(id="resp_1", created_at=1, model="m", output=output, usage=Usage(), **end)
    before = msgspec.json.encode(response)
    events = replay_response(response)
    assert aggregate_events(events) == response
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert msgspec.json.encode(response) == before


@given(items)
def test_items_add_up_before_they_are_done(item: Any) -> None:
    """What their own events say is all of them but how they ended."""
    events = replay_response(
        Response(id="resp_1", created_at=1, model="m", output=[item], status="completed")
    )
    (grown,) = aggregate_events(events[:-2]).output
    if isinstance(item, msgspec.Raw):
        assert grown == item
        return
    done = msgspec.structs.asdict(item)
    built = msgspec.structs.asdict(grown)  # type: ignore[arg-type]
    late = {"status", "outputs", "execution", "encrypted_content"}
    for name in done.keys() - late:
        assert built[name] == done[name] or (not built[name] and not done[name]), name
