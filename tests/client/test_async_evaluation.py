"""Asynchronous evaluation: handlers, clients, and evaluations at once in one session."""

import asyncio
import contextvars
import gc
import threading
import time
import warnings
import weakref
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from fumehood.client import (
    Deadline,
    MarkdownSection,
    Prompt,
    PromptEvaluationError,
    PromptValidationError,
    Session,
    Tool,
    ToolContext,
    ToolResult,
)
from fumehood.client.adapters.openai import (
    CompactionConfig,
    CompactionState,
    OpenAIAdapter,
    OpenAIClientConfig,
    OpenAICodeInterpreterTool,
    OpenAIContainerWorkspaceSection,
)
from fumehood.client.adapters.openai.compaction import Transcript
from fumehood.client.errors import DeadlineExceededError
from tests.client.conftest import OpenAIStandIn
from tests.support.client_prompts import (
    HOSTED,
    Answer,
    Query,
    code_call,
    function_call,
    listen,
    prompt,
    query_tool,
)
from tests.support.evaluation_modes import MODES
from tests.support.openai_server import Reply, message, response
from tests.support.streamed_response import encode_stream

CALL = response(function_call("c1", '{"sql": "x"}'))
DONE = response(message("done"))
CONVERSATION = CompactionConfig(threshold_tokens=100)
place: contextvars.ContextVar[str] = contextvars.ContextVar("place", default="nowhere")


def make_tool(handler: Any) -> Tool[Query, Query]:
    return Tool[Query, Query](name="run_query", description="x", handler=handler)


def say(text: str) -> Prompt[None]:
    return Prompt(ns="tests", key="say", sections=[MarkdownSection(title="Turn", key="turn", template=text)])


# --- handlers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("evaluation_mode", ["aevaluate", "astream"])
def test_asynchronous_handlers_are_awaited_and_others_run_in_threads(openai_stand_in: OpenAIStandIn) -> None:
    threads: list[threading.Thread] = []
    session, events = listen()

    async def awaited(params: Query, *, context: ToolContext) -> ToolResult[Query]:
        await asyncio.sleep(0)
        threads.append(threading.current_thread())
        return ToolResult.ok(params, place.get())

    class AwaitedObject:
        async def __call__(self, params: Query, *, context: ToolContext) -> ToolResult[Query]:
            return await awaited(params, context=context)

    def blocking(params: Query, *, context: ToolContext) -> ToolResult[Query]:
        threads.append(threading.current_thread())
        return ToolResult.ok(params, place.get())

    def hidden(params: Query, *, context: ToolContext) -> Any:
        return awaited(params, context=context)

    place.set("here")
    for handler in (awaited, AwaitedObject(), blocking, hidden):
        openai_stand_in.evaluate(prompt(make_tool(handler)), CALL, DONE, session=session)
    assert [event.result.message for event in events] == ["here"] * 4
    loop_thread = threads[0]
    assert [thread is loop_thread for thread in threads] == [True, True, False, True]


@pytest.mark.parametrize("evaluation_mode", ["evaluate", "stream"])
def test_an_asynchronous_handler_is_an_error_in_a_blocking_evaluation(openai_stand_in: OpenAIStandIn) -> None:
    async def awaited(params: Query, *, context: ToolContext) -> ToolResult[Query]:
        return ToolResult.ok(params)

    async def report(data: Any, context: ToolContext, kind: Any) -> Any:
        return ToolResult.ok(data)

    refused = "handler of the tool '{}' is asynchronous; use aevaluate or astream"
    with pytest.raises(PromptValidationError, match=refused.format("run_query")):
        openai_stand_in.evaluate(prompt(make_tool(awaited)), CALL, DONE)
    with pytest.raises(PromptValidationError, match=refused.format("code_interpreter")):
        openai_stand_in.evaluate(prompt(OpenAICodeInterpreterTool(handle_provider_output=report)), DONE)
    assert openai_stand_in.server.calls == []
    session, events = listen()

    def hidden(params: Query, *, context: ToolContext) -> Any:
        return awaited(params, context=context)

    openai_stand_in.evaluate(prompt(make_tool(hidden)), CALL, DONE, session=session)
    assert "asynchronous; use aevaluate or astream" in events[0].result.message


@pytest.mark.parametrize("evaluation_mode", ["aevaluate", "astream"])
def test_an_asynchronous_handler_of_the_providers_output_is_awaited(openai_stand_in: OpenAIStandIn) -> None:
    async def report(data: Any, context: ToolContext, kind: Any) -> Any:
        await asyncio.sleep(0)
        return ToolResult.ok(kind(stdout="awaited"))

    session, events = listen()
    openai_stand_in.evaluate(
        prompt(OpenAICodeInterpreterTool(handle_provider_output=report)),
        response(code_call(), message("done")),
        session=session,
    )
    assert events[0].result.value is not None
    assert events[0].result.value.stdout == "awaited"


@pytest.mark.parametrize("is_async", [True, False])
def test_a_tool_that_is_cancelled_leaves_the_session_as_it_was(
    openai_stand_in: OpenAIStandIn, is_async: bool
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    session = Session()

    def write(context: ToolContext) -> None:
        context.session[Answer].append(Answer(1))
        begun.set()

    async def awaited(params: Query, *, context: ToolContext) -> ToolResult[Query]:
        write(context)
        await asyncio.Event().wait()
        raise AssertionError("cancelled before")

    def blocking(params: Query, *, context: ToolContext) -> ToolResult[Query]:
        write(context)
        assert go_on.wait(20)
        context.session[Answer].append(Answer(2))
        return ToolResult.ok(params)

    async def cancel() -> None:
        adapter = openai_stand_in.adapter(compaction=CONVERSATION)
        tool = make_tool(awaited if is_async else blocking)
        task = asyncio.create_task(adapter.aevaluate(prompt(tool), session=session))
        assert await asyncio.to_thread(begun.wait, 20)
        task.cancel()
        asyncio.get_running_loop().call_later(0.05, go_on.set)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert session[Answer].all() == ()  # also what the blocking handler wrote after the cancellation

    openai_stand_in.script(CALL)
    openai_stand_in.loop.run(cancel())
    assert session[Transcript].all() == ()


def test_the_event_loop_stays_free(openai_stand_in: OpenAIStandIn) -> None:
    """While the server is slow and a handler blocks, two evaluations go on together."""
    both = threading.Barrier(2, timeout=20)

    def wait_for_the_other(_: Any) -> Reply:
        both.wait()
        return CALL

    def handler(params: Query, *, context: ToolContext) -> ToolResult[Query]:
        both.wait()
        return ToolResult.ok(params)

    async def evaluate_both() -> list[str | None]:
        adapter = openai_stand_in.adapter()
        asked = [adapter.aevaluate(prompt(make_tool(handler))) for _ in range(2)]
        return [found.text for found in await asyncio.gather(*asked)]

    openai_stand_in.script(wait_for_the_other, wait_for_the_other, DONE, DONE)
    assert openai_stand_in.loop.run(evaluate_both()) == ["done", "done"]


def test_a_deadline_ends_a_silent_stream_in_time(openai_stand_in: OpenAIStandIn) -> None:
    over = threading.Event()

    def hang(_: Any) -> Reply:
        over.wait(20)
        return Reply(closes=True)

    for mode in MODES:
        openai_stand_in.script(hang)
        started = time.monotonic()
        adapter = replace(openai_stand_in, mode=mode).adapter()
        with pytest.raises(DeadlineExceededError):
            adapter.evaluate(prompt(), deadline=Deadline.after(0.3))
        assert time.monotonic() - started < 10
    over.set()


@pytest.mark.parametrize("evaluation_mode", ["stream", "astream"])
def test_a_stream_that_falls_silent_ends_by_the_deadline(openai_stand_in: OpenAIStandIn) -> None:
    """By the time that is left then, not by what was left when the request was sent."""
    over, passed = threading.Event(), [timedelta()]

    def begin(_: Any) -> Reply:
        passed[0] = timedelta(seconds=59.5)
        first = encode_stream(DONE.body)[0]
        return Reply((first, lambda: over.wait(50)), headers={"content-type": "text/event-stream"})

    deadline = Deadline(
        datetime.now(UTC) + timedelta(seconds=60), clock=lambda: datetime.now(UTC) + passed[0]
    )
    started = time.monotonic()
    with pytest.raises(DeadlineExceededError):
        openai_stand_in.evaluate(prompt(), begin, deadline=deadline)
    over.set()
    assert time.monotonic() - started < 40


# --- clients ------------------------------------------------------------------------------------------


def test_each_event_loop_has_a_client_that_is_closed_with_the_adapter(openai_stand_in: OpenAIStandIn) -> None:
    adapter = OpenAIAdapter(
        model="gpt-4.1", client_config=OpenAIClientConfig(api_key="k", base_url=openai_stand_in.server.url)
    )

    async def evaluate() -> Any:
        async with adapter:
            assert (await adapter.aevaluate(prompt())).text == "done"
            client = adapter.async_client
            assert adapter.async_client is client
        assert client.is_closed()
        return client

    openai_stand_in.script(DONE, DONE, DONE)
    assert asyncio.run(evaluate()) is not asyncio.run(evaluate())
    with adapter:
        assert adapter.evaluate(prompt()).text == "done"


def test_an_adapter_without_an_end_keeps_the_connections_of_one_event_loop(
    openai_stand_in: OpenAIStandIn,
) -> None:
    """As in programs that call asyncio.run for each evaluation."""
    config = OpenAIClientConfig(api_key="k", base_url=openai_stand_in.server.url)
    adapter = OpenAIAdapter(model="gpt-4.1", client_config=config)
    clients: list[weakref.ref[Any]] = []

    async def evaluate() -> None:
        assert (await adapter.aevaluate(prompt())).text == "done"
        clients.append(weakref.ref(adapter.async_client))

    openai_stand_in.script(*[DONE] * 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # of asyncio, for sockets of a loop that is closed
        for _ in range(4):
            asyncio.run(evaluate())
        gc.collect()
        assert [client() is None for client in clients] == [True, True, True, False]
        asyncio.run(adapter.aclose())
        gc.collect()


def test_a_missing_client_is_named(openai_stand_in: OpenAIStandIn) -> None:
    blocking = OpenAIAdapter(model="m", client=openai_stand_in.client)
    asynchronous = OpenAIAdapter(model="m", async_client=openai_stand_in.async_client)
    with pytest.raises(PromptValidationError, match=r"pass async_client=AsyncOpenAI\(…\), too"):
        openai_stand_in.loop.run(blocking.aevaluate(prompt()))
    with pytest.raises(PromptValidationError, match=r"pass client=OpenAI\(…\), too"):
        asynchronous.evaluate(prompt())
    with pytest.raises(PromptValidationError, match="async_client is a blocking one"):
        OpenAIAdapter(model="m", async_client=openai_stand_in.client)  # pyright: ignore[reportArgumentType]
    with pytest.raises(PromptValidationError, match="exclude each other"):
        OpenAIAdapter(
            model="m", client_config=OpenAIClientConfig(), async_client=openai_stand_in.async_client
        )
    workspace = OpenAIContainerWorkspaceSection(session=Session())
    hosted = OpenAIAdapter(model="m", async_client=openai_stand_in.async_client, hosted_tools=HOSTED)
    with pytest.raises(PromptValidationError, match="container workspaces need a blocking one"):
        openai_stand_in.loop.run(hosted.aevaluate(prompt(sections=(workspace,))))
    workspace.cleanup()


# --- evaluations at once in one session ---------------------------------------------------------------


def test_evaluations_at_once_continue_one_conversation_and_lose_no_turn(
    openai_stand_in: OpenAIStandIn,
) -> None:
    """Threads and tasks wait for each other: each request has all turns before it."""
    session, adapter = Session(), openai_stand_in.adapter(compaction=CompactionConfig())
    openai_stand_in.script(*[DONE] * 8)

    async def evaluate_all() -> None:
        await asyncio.gather(*(adapter.aevaluate(say(str(n)), session=session) for n in range(4)))

    threads = [
        threading.Thread(target=adapter.evaluate, args=(say(str(n)),), kwargs={"session": session})
        for n in range(4, 8)
    ]
    for thread in threads:
        thread.start()
    openai_stand_in.loop.run(evaluate_all())
    for thread in threads:
        thread.join()
    transcript = session[Transcript].latest()
    assert transcript is not None
    turns = [str(item["content"])[-1] for item in transcript.items if item.get("role") in ("system", "user")]
    assert sorted(turns) == [str(n) for n in range(8)]
    assert len(transcript.items) == 16
    assert sorted(len(asked["input"]) for asked in openai_stand_in.server.asked) == [*range(1, 17, 2)]


def test_waiting_for_another_evaluation_ends_by_the_deadline(openai_stand_in: OpenAIStandIn) -> None:
    session = Session()
    adapter = openai_stand_in.adapter(compaction=CompactionConfig())
    openai_stand_in.script(DONE, DONE)
    with adapter.stream(say("one"), session=session) as events:
        next(events)
        late = "while another evaluation continued the session's conversation"
        with pytest.raises(DeadlineExceededError, match=late):
            openai_stand_in.loop.run(
                adapter.aevaluate(say("two"), session=session, deadline=Deadline.after(1.0))
            )
        assert len(openai_stand_in.server.asked) == 1
        events.get_final_response()
    assert openai_stand_in.loop.run(adapter.aevaluate(say("two"), session=session)).text == "done"


@pytest.mark.parametrize("evaluation_mode", MODES)
def test_an_evaluation_that_could_never_begin_is_refused(openai_stand_in: OpenAIStandIn) -> None:
    """A handler continues the conversation that its own evaluation holds."""
    session = Session()
    outcomes: list[str | None] = []

    def nested(params: Query, *, context: ToolContext) -> ToolResult[Query]:
        try:
            context.adapter.evaluate(say("inner"), session=context.session)
        except PromptEvaluationError as error:
            outcomes.append(error.message)
        outcomes.append(context.adapter.evaluate(say("inner"), session=Session()).text)
        return ToolResult.ok(params)

    openai_stand_in.evaluate(
        prompt(make_tool(nested)),
        CALL,
        response(message("inner answer")),
        DONE,
        session=session,
        compaction=CompactionConfig(),
    )
    refused, answer = outcomes
    assert "give this evaluation a session of its own" in str(refused)
    assert answer == "inner answer"
    transcript = session[Transcript].latest()
    assert transcript is not None
    assert len(transcript.items) == 4


def test_the_consumer_of_an_open_stream_cannot_wait_for_itself(openai_stand_in: OpenAIStandIn) -> None:
    adapter, session = openai_stand_in.adapter(compaction=CompactionConfig()), Session()
    openai_stand_in.script(DONE)
    with adapter.stream(say("one"), session=session) as events:
        next(events)
        with pytest.raises(PromptEvaluationError, match="a stream that is still open"):
            adapter.evaluate(say("two"), session=session)
        assert events.get_final_response().text == "done"


@pytest.mark.parametrize("evaluation_mode", MODES)
def test_an_evaluation_without_an_answer_leaves_no_turn_behind(openai_stand_in: OpenAIStandIn) -> None:
    """Not even in a conversation that it has compacted."""
    window = {"type": "compaction", "id": "cmp_1", "encrypted_content": "sealed"}
    large = {"input_tokens": 999, "output_tokens": 0, "total_tokens": 999}
    adapter, session = openai_stand_in.adapter(compaction=CONVERSATION), Session()
    openai_stand_in.script(
        DONE, response(function_call("c1", '{"sql": "x"}'), usage=large), response(window), Reply({}, 400)
    )
    adapter.evaluate(say("one"), session=session)
    before = session[Transcript].all()
    with pytest.raises(PromptEvaluationError):
        adapter.evaluate(prompt(query_tool), session=session)
    assert len(openai_stand_in.server.asked) == 4
    assert session[Transcript].all() == before
    assert session[CompactionState].all() == ()


def test_a_failing_tool_keeps_the_turns_of_others(openai_stand_in: OpenAIStandIn) -> None:
    session = Session()
    keeper = openai_stand_in.adapter(compaction=CompactionConfig())

    def fail(params: Query, *, context: ToolContext) -> ToolResult[Query]:
        context.session[Answer].append(Answer(1))
        keeper.evaluate(say("other"), session=session)
        raise RuntimeError

    openai_stand_in.evaluate(prompt(make_tool(fail)), CALL, response(message("kept")), DONE, session=session)
    assert session[Answer].all() == ()
    transcript = session[Transcript].latest()
    assert transcript is not None
    assert len(transcript.items) == 2
