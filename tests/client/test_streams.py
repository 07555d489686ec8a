"""Events of streamed evaluations, and streams that end early."""

import asyncio
import contextlib
import gc
import json
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inline_snapshot import snapshot

from fumehood.client import Deadline, PromptEvaluationError, Session, ThrottleError
from fumehood.client.adapters.openai import CompactionConfig, OpenAICodeInterpreterTool
from fumehood.client.adapters.openai.compaction import Transcript
from fumehood.client.adapters.stream_events import (
    CitationAdded,
    CodeDelta,
    CodeImage,
    CodeOutputDelta,
    EvaluationEvent,
    EvaluationFinished,
    FileProduced,
    FunctionArguments,
    FunctionCallFinished,
    FunctionCallStarted,
    HostedCallFinished,
    HostedCallStarted,
    ReasoningDelta,
    RefusalText,
    TextDelta,
    TurnFinished,
    TurnRestarted,
)
from tests.client.conftest import GatewayServer, OpenAIStandIn
from tests.support.client_prompts import HOSTED, PATIENT, code_call, function_call, prompt, query_tool
from tests.support.evaluation_modes import ModalAdapter
from tests.support.gateway_process import code_call as model_code_call
from tests.support.gateway_process import text_answer
from tests.support.openai_server import Reply, error, message, response
from tests.support.raw_model_server import ReceivedRequest, chunk, stream
from tests.support.streamed_response import encode_stream
from tests.support.waiting import becomes_true

STREAMS = ("stream", "astream")
CITED = {
    "type": "container_file_citation",
    "file_id": "cfile_1",
    "container_id": "cntr_1",
    "filename": "a.csv",
}
PICTURE = {"type": "image", "url": "data:image/png;base64,AA=="}


def summarize(events: list[EvaluationEvent[Any]]) -> list[tuple[str, Any]]:
    """What the events tell, with deltas of one kind joined."""
    found: list[tuple[str, Any]] = []
    for event in events:
        name, value = describe(event)
        if found and found[-1][0] == name and hasattr(event, "delta"):
            value = found.pop()[1] + value
        found.append((name, value))
    return found


def describe(event: EvaluationEvent[Any]) -> tuple[str, Any]:
    name = type(event).__name__
    match event:
        case CodeOutputDelta():
            return event.stream, event.delta
        case ReasoningDelta():
            return f"{name} {event.kind}", event.delta
        case TextDelta() | CodeDelta() | FunctionArguments() | RefusalText():
            return name, event.delta
        case CodeImage():
            return name, event.url
        case FileProduced() | CitationAdded():
            return name, event.file and event.file.filename
        case HostedCallStarted() | FunctionCallStarted() | HostedCallFinished():
            return name, event.name
        case FunctionCallFinished():
            return name, event.output
        case TurnFinished() | TurnRestarted():
            return name, event.number
        case EvaluationFinished():
            return name, event.response.text


@pytest.fixture(params=STREAMS)
def streaming(openai_stand_in: OpenAIStandIn, request: pytest.FixtureRequest) -> ModalAdapter:
    """An adapter that streams from the stand-in."""
    return ModalAdapter(
        mode=request.param,
        loop=openai_stand_in.loop,
        model="gpt-4.1",
        client=openai_stand_in.client,
        async_client=openai_stand_in.async_client,
        hosted_tools=HOSTED,
        throttle=PATIENT,
    )


def test_everything_that_a_turn_has_is_an_event(
    openai_stand_in: OpenAIStandIn, streaming: ModalAdapter
) -> None:
    openai_stand_in.script(
        response(
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [{"type": "summary_text", "text": "I plan."}],
                "content": [{"type": "reasoning_text", "text": "Thinking hard."}],
            },
            code_call(outputs=[{"type": "logs", "logs": "2\n"}, PICTURE]),
            function_call("c1", '{"sql": "select"}'),
        ),
        response(message("See a.csv.", CITED)),
    )
    streaming.evaluate(prompt(query_tool))
    assert openai_stand_in.server.streamed == [True, True]
    assert summarize(streaming.events) == snapshot(
        [
            ("ReasoningDelta summary", "I plan."),
            ("ReasoningDelta text", "Thinking hard."),
            ("HostedCallStarted", "code_interpreter"),
            ("CodeDelta", "1+1"),
            ("stdout", "2\n"),
            ("CodeImage", "data:image/png;base64,AA=="),
            ("HostedCallFinished", "code_interpreter"),
            ("FunctionCallStarted", "run_query"),
            ("FunctionArguments", '{"sql": "select"}'),
            ("TurnFinished", 1),
            ("FunctionCallFinished", '{"success":true,"payload":{"sql":"select"}}'),
            ("TextDelta", "See a.csv."),
            ("CitationAdded", "a.csv"),
            ("TurnFinished", 2),
            ("EvaluationFinished", "See a.csv."),
        ]
    )


def test_streaming_asks_another_server_for_no_fields_of_ours(
    openai_stand_in: OpenAIStandIn, streaming: ModalAdapter
) -> None:
    openai_stand_in.script(response(message("done")))
    streaming.evaluate(prompt())
    assert openai_stand_in.server.asked[0]["include"] == ["code_interpreter_call.outputs"]


def test_a_turn_whose_stream_broke_is_restarted(
    openai_stand_in: OpenAIStandIn, streaming: ModalAdapter
) -> None:
    whole = response(message("the whole answer"))
    openai_stand_in.script(
        Reply(whole.body, breaks_after=4), Reply(closes=True), error(503, "Busy", retry_after="0"), whole
    )
    assert streaming.evaluate(prompt()).text == "the whole answer"
    assert summarize(streaming.events) == [
        ("TextDelta", "the whol"),
        ("TurnRestarted", 1),
        ("TextDelta", "the whole answer"),
        ("TurnFinished", 1),
        ("EvaluationFinished", "the whole answer"),
    ]
    assert len({headers["idempotency-key"] for headers in openai_stand_in.server.headers}) == 1


@pytest.mark.parametrize("nested", [True, False])
def test_an_error_event_is_treated_like_a_status(
    openai_stand_in: OpenAIStandIn, streaming: ModalAdapter, nested: bool
) -> None:
    def fail(code: str) -> Reply:
        details = {"code": code, "message": f"It is {code}."}
        body = b"data: " + _encode({"type": "error", **({"error": details} if nested else details)}) + b"\n\n"
        return Reply(body, headers={"content-type": "text/event-stream"})

    openai_stand_in.script(fail("server_error"), fail("rate_limit_exceeded"), response(message("at last")))
    assert streaming.evaluate(prompt()).text == "at last"
    openai_stand_in.script(fail("invalid_prompt"))
    with pytest.raises(PromptEvaluationError, match="refused the request: It is invalid_prompt") as refused:
        streaming.evaluate(prompt())
    assert refused.value.phase == "request"
    openai_stand_in.script(*[fail("server_error")] * 9)
    with pytest.raises(ThrottleError, match=r"answered server_error in 5 attempts: It is server_error\."):
        streaming.evaluate(prompt())


def _encode(value: object) -> bytes:
    return json.dumps(value).encode()


def test_a_server_that_does_not_stream_is_read_whole(
    openai_stand_in: OpenAIStandIn, streaming: ModalAdapter
) -> None:
    openai_stand_in.script(Reply(_encode(response(message("whole")).body)))
    assert streaming.evaluate(prompt()).text == "whole"
    assert summarize(streaming.events) == [("TurnFinished", 1), ("EvaluationFinished", "whole")]


def test_a_server_that_keeps_the_stream_open_is_not_waited_for(
    openai_stand_in: OpenAIStandIn, streaming: ModalAdapter
) -> None:
    answered, was_answered = threading.Event(), list[bool]()

    def wait() -> None:
        was_answered.append(answered.wait(30))

    events = encode_stream(response(message("done")).body)
    openai_stand_in.script(Reply((*events, wait), headers={"content-type": "text/event-stream"}))
    assert streaming.evaluate(prompt()).text == "done"
    answered.set()
    assert becomes_true(lambda: was_answered)
    assert was_answered == [True]


def test_events_that_are_not_json_are_refused(
    openai_stand_in: OpenAIStandIn, streaming: ModalAdapter
) -> None:
    openai_stand_in.script(Reply(b"data: <html>\n\n", headers={"content-type": "text/event-stream"}))
    with pytest.raises(PromptEvaluationError, match="no event of the Responses API") as strange:
        streaming.evaluate(prompt())
    assert (strange.value.phase, strange.value.provider_payload) == ("response", "<html>")


# --- how a stream is used -----------------------------------------------------------------------------


def test_a_stream_has_to_be_opened_and_read(openai_stand_in: OpenAIStandIn) -> None:
    openai_stand_in.script(response(message("done")))
    events = openai_stand_in.adapter().stream(prompt())
    with pytest.raises(PromptEvaluationError, match=r"write `with adapter.stream\(…\) as events:`"):
        next(events)
    with events:
        with pytest.raises(PromptEvaluationError, match="not read to its end yet"):
            _ = events.response
        assert events.get_final_response().text == "done"
        assert [*events] == []
    assert events.response.text == "done"


def test_a_dropped_stream_releases_the_conversation(openai_stand_in: OpenAIStandIn) -> None:
    openai_stand_in.script(*[response(message("done"))] * 2)
    session, adapter = Session(), openai_stand_in.adapter(compaction=CompactionConfig())
    events = adapter.stream(prompt(), session=session)
    events.__enter__()
    next(events)
    del events
    gc.collect()  # what the garbage collector cannot raise is an error of this test
    assert adapter.evaluate(prompt(), session=session, deadline=Deadline.after(20)).text == "done"


def test_an_asynchronous_stream_has_to_be_opened_and_read(openai_stand_in: OpenAIStandIn) -> None:
    async def read() -> None:
        events = openai_stand_in.adapter().astream(prompt())
        with pytest.raises(PromptEvaluationError, match=r"`async with adapter.astream\(…\) as events:`"):
            await anext(events)
        async with events:
            assert (await events.get_final_response()).text == "done"
            assert [event async for event in events] == []
        assert events.response.text == "done"

    openai_stand_in.script(response(message("done")))
    openai_stand_in.loop.run(read())


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.text(max_size=60).map(message),
            st.builds(code_call, code=st.text(max_size=30)),
            st.just({"type": "reasoning", "id": "rs_1", "summary": []}),
        ),
        max_size=4,
    ),
    st.text(min_size=1, max_size=40),
    st.integers(1, 50),
)
def test_the_response_of_a_stream_is_that_of_evaluate(
    shared_stand_in: OpenAIStandIn, items: list[dict[str, Any]], last: str, size: int
) -> None:
    """Whatever was scripted, and however its bytes are split."""
    scripted = response(*items, message(last))
    found: list[Any] = []
    body = b"".join(encode_stream(scripted.body))
    pieces = tuple(body[start : start + size] for start in range(0, len(body), size))
    streamed = Reply(pieces, headers={"content-type": "text/event-stream", "x-request-id": "req_1"})
    adapter = ModalAdapter(
        mode="stream", loop=shared_stand_in.loop, model="gpt-4.1", client=shared_stand_in.client
    )
    for reply in (scripted, streamed):
        shared_stand_in.server.script(reply)
        with adapter.stream(prompt()) as events:
            seen = [*events]
        found.append((events.response, seen[:-1]))
    shared_stand_in.server.script(scripted)
    found.append((shared_stand_in.adapter().evaluate(prompt()), found[0][1]))
    assert found[0] == found[1] == found[2]
    texts = [event.delta for event in found[0][1] if isinstance(event, TextDelta)]
    assert "".join(texts) == "".join(
        str(part["text"]) for item in (*items, message(last)) for part in item.get("content", ())
    )


# --- through the gateway ------------------------------------------------------------------------------


@pytest.mark.parametrize("evaluation_mode", STREAMS)
def test_code_and_its_output_are_streamed_by_the_gateway(gateway_server: GatewayServer) -> None:
    adapter = gateway_server.adapter()
    gateway_server.script(
        model_code_call(
            "import sys; open('a.csv', 'w').write('1'); print(6 * 7); print('no', file=sys.stderr)"
        ),
        text_answer("It is ", "42: sandbox:/mnt/data/a.csv"),
    )
    found = adapter.evaluate(prompt(OpenAICodeInterpreterTool()))
    assert summarize(adapter.events) == snapshot(
        [
            ("HostedCallStarted", "code_interpreter"),
            (
                "CodeDelta",
                "import sys; open('a.csv', 'w').write('1'); print(6 * 7); print('no', file=sys.stderr)",
            ),
            ("stdout", "42\n"),
            ("stderr", "no\n"),
            ("FileProduced", "a.csv"),
            ("HostedCallFinished", "code_interpreter"),
            ("TextDelta", "It is 42: sandbox:/mnt/data/a.csv"),
            ("CitationAdded", "a.csv"),
            ("TurnFinished", 1),
            ("EvaluationFinished", "It is 42: sandbox:/mnt/data/a.csv"),
        ]
    )
    assert [file.filename for file in found.files] == ["a.csv"]


@pytest.mark.parametrize("raises", [False, True])
def test_a_stream_that_is_closed_early_cancels_its_request(
    gateway_without_code: GatewayServer, raises: bool
) -> None:
    server, session = gateway_without_code, Session()
    never, _ = server.model.event()
    server.script(stream(chunk({"role": "assistant", "content": "one"}), never))
    events = server.adapter(compaction=CompactionConfig()).stream(prompt(), session=session)
    with pytest.raises(RuntimeError) if raises else contextlib.nullcontext(), events:
        assert isinstance(next(events), TextDelta)
        if raises:
            raise RuntimeError
    server.model.wait_for_disconnect()
    assert [*events] == []
    with pytest.raises(PromptEvaluationError, match="closed or failed before its end"):
        _ = events.response
    assert session[Transcript].all() == ()
    server.script(text_answer("two"))  # and nothing keeps another evaluation of the session waiting
    assert server.adapter(compaction=CompactionConfig()).evaluate(prompt(), session=session).text == "two"


@pytest.mark.parametrize("mode", ["aevaluate", "astream"])
def test_a_cancelled_task_cancels_its_request(gateway_without_code: GatewayServer, mode: str) -> None:
    server, session = gateway_without_code, Session()
    never, _ = server.model.event()
    received = threading.Event()

    async def answer(request: ReceivedRequest, writer: asyncio.StreamWriter) -> bool:
        received.set()
        return await stream(chunk({"role": "assistant", "content": "one"}), never)(request, writer)

    async def cancel() -> None:
        adapter = server.adapter(compaction=CompactionConfig())

        async def read() -> None:
            if mode == "aevaluate":
                await adapter.aevaluate(prompt(), session=session)
            async with adapter.astream(prompt(), session=session) as events:
                await events.get_final_response()

        task = asyncio.create_task(read())
        assert await asyncio.to_thread(received.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    server.script(answer)
    server.loop.run(cancel())
    server.model.wait_for_disconnect()
    assert session[Transcript].all() == ()
    server.script(text_answer("two"))
    assert server.adapter(compaction=CompactionConfig()).evaluate(prompt(), session=session).text == "two"
