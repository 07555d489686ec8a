"""Conversations that are made short: within a request, on demand, again and again."""

import asyncio
import base64
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw

from fumehood.engine.token_counter import TokenCounter, estimate_entry, estimate_segment
from fumehood.interfaces import AcceptBatch, Caller
from fumehood.models.chat_completions.chat_renderer import render_messages
from fumehood.models.rendering.server_features import ServerFeatures
from fumehood.protocol.conversation import ConversationSegment
from fumehood.protocol.model_turns import AnyModelEvent, ModelPassthroughItem, ModelProfile, ModelRequest
from fumehood.protocol.openai.api_errors import (
    InvalidRequest,
    ModelError,
    ModelUnreachable,
    ServiceUnavailable,
)
from fumehood.protocol.openai.items import CompactionItem, OutputMessage
from fumehood.protocol.openai.response_aggregation import aggregate_events
from fumehood.protocol.openai.responses import CreateResponse, Usage
from fumehood.store.aes_gcm_sealer import AesGcmSealer
from fumehood.testing import ScriptedModel, ScriptedTool, ScriptedToolAnswer, calls, says, thinks
from tests.support.conversations import hosted_call, message
from tests.support.engine_harness import EngineHarness
from tests.support.stream_checks import check_invariants

MANAGED = [{"type": "compaction", "compact_threshold": 1000}]
LONG = "a long story " * 400
SEALER = AesGcmSealer([b"k" * 32])
SEALED = SEALER.seal("", b'{"messages":[],"summary":"s"}')
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}


def texts(request: ModelRequest) -> list[tuple[str, str]]:
    """Who says what in a request; calls are called by their result."""
    found: list[tuple[str, str]] = []
    for segment in request.segments:
        for entry in segment.entries:
            item = msgspec.json.decode(entry.raw)
            if entry.exchange is not None:
                found.append(("tool", entry.exchange.output))
                continue
            content = item.get("content", item.get("output", ""))
            text = content if isinstance(content, str) else "".join(part["text"] for part in content)
            found.append((item.get("role") or entry.type, text))
    return found


def dumped(*items: Any) -> list[Any]:
    return [msgspec.json.decode(msgspec.json.encode(item)) for item in items]


async def compacted(engine: EngineHarness, tenant: str = "", **body: Any) -> Any:
    request = msgspec.json.decode(msgspec.json.encode({"model": "m", **body}), type=CreateResponse)
    return await engine.runs.compact(request, Caller(tenant))


async def counted(engine: EngineHarness, **body: Any) -> Any:
    request = msgspec.json.decode(msgspec.json.encode({"model": "m", **body}), type=CreateResponse)
    return await engine.runs.count_tokens(request, Caller())


# --- within a request ---------------------------------------------------------------------------------


async def test_after_the_answer_the_conversation_is_compacted_and_the_next_turn_starts_there() -> None:
    async with ScriptedModel(
        says("Fine. " + LONG), says("We spoke of stories."), says("Hello again."), usage=None
    ) as model:
        engine = EngineHarness(model)
        events = await engine.stream(
            input=[{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "Hi"}],
            context_management=MANAGED,
        )
        check_invariants(events)
        response = aggregate_events(events)
        answer, compaction = response.output
        assert isinstance(answer, OutputMessage)
        assert isinstance(compaction, CompactionItem)
        assert compaction.id.startswith("cmp_")
        assert [type(event).__name__ for event in events[-4:]] == [
            "OutputItemDone",
            "OutputItemAdded",
            "OutputItemDone",
            "ResponseCompleted",
        ]
        await engine.create(
            input="And now?", previous_response_id=response.id, context_management=MANAGED, model="m"
        )
    shown = texts(model.requests[2])
    assert [who for who, _ in shown] == ["developer", "user", "assistant", "user"]
    assert shown[0][1] == "Be kind."
    assert shown[1][1] == "Hi"
    assert "We spoke of stories." in shown[2][1]
    assert shown[3][1] == "And now?"
    assert "story" not in str(shown)
    kept = await engine.store.list_input_items("", response.id)
    assert kept is not None
    assert [entry.type for entry in kept] == ["message", "message"]


async def test_what_is_too_long_already_is_compacted_before_the_model_answers() -> None:
    async with ScriptedModel(
        says("Noted."), says("The user told a story."), says("It was long."), says("Yes."), usage=None
    ) as model:
        engine = EngineHarness(model)
        first = await engine.create(input=[{"role": "user", "content": LONG}])
        second = await engine.create(
            input="How was it?", previous_response_id=first.id, context_management=MANAGED
        )
        third = await engine.create(input="Sure?", previous_response_id=second.id)
    assert [type(item).__name__ for item in second.output] == ["CompactionItem", "OutputMessage"]
    assert texts(model.requests[2])[-1] == ("user", "How was it?")
    shown = texts(model.requests[3])
    assert [who for who, _ in shown] == ["user", "assistant", "user", "assistant", "user"]
    assert "are left out here; the summary has what matters" in shown[0][1]
    assert len(shown[0][1]) < 600
    assert shown[2:] == [
        ("user", "How was it?"),
        ("assistant", "It was long."),
        ("user", "Sure?"),
    ]
    assert third.status == "completed"


async def test_a_long_errand_is_compacted_on_its_way() -> None:
    tool = ScriptedTool(ScriptedToolAnswer(LONG), ScriptedToolAnswer("short"))
    async with ScriptedModel(
        calls("scripted", {}), says("The first call told a story."), calls("scripted", {}), says("Done.")
    ) as model:
        engine = EngineHarness(model, [tool])
        response = await engine.create(
            input="Do it", tools=[{"type": "scripted"}], context_management=MANAGED
        )
    tool.assert_consumed()
    kinds = [msgspec.json.decode(msgspec.json.encode(item))["type"] for item in response.output]
    assert kinds == ["scripted_call", "compaction", "scripted_call", "message"]
    shown = texts(model.requests[2])
    assert [who for who, _ in shown] == ["user", "assistant", "user"]
    assert "scripted was used." in shown[1][1]
    assert shown[2][1].startswith("Go on")


async def test_calls_that_the_client_must_answer_stay_in_sight() -> None:
    async with ScriptedModel(
        [*says(LONG), *calls("f", {}, call_id="call_f")], says("f was called."), says("Thanks.")
    ) as model:
        engine = EngineHarness(model)
        first = await engine.create(input="Hi", tools=[FUNCTION], context_management=MANAGED)
        assert [type(item).__name__ for item in first.output] == ["OutputMessage", "FunctionCall"]
        second = await engine.create(
            input=[{"type": "function_call_output", "call_id": "call_f", "output": "42"}],
            previous_response_id=first.id,
            tools=[FUNCTION],
            context_management=MANAGED,
        )
    assert [type(item).__name__ for item in second.output] == ["CompactionItem", "OutputMessage"]
    assert [who for who, _ in texts(model.requests[2])] == ["user", "assistant", "user"]


@pytest.mark.parametrize("trouble", [ModelUnreachable("gone"), []], ids=["fails", "writes nothing"])
async def test_a_summary_that_cannot_be_had_costs_nothing(trouble: Any) -> None:
    async with ScriptedModel(says(LONG), trouble) as model:
        response = await EngineHarness(model).create(input="Hi", context_management=MANAGED)
    assert response.status == "completed"
    assert [type(item).__name__ for item in response.output] == ["OutputMessage"]


async def test_a_short_conversation_is_left_alone_and_so_is_one_that_cannot_become_shorter() -> None:
    async with ScriptedModel(says("short"), says("answer")) as model:
        engine = EngineHarness(model)
        await engine.create(input="Hi", context_management=MANAGED)
        await engine.create(input="Hi", instructions="x" * 10_000, context_management=MANAGED)
    assert len(model.requests) == 2


async def test_a_compaction_of_another_server_is_none() -> None:
    theirs = ModelPassthroughItem(
        Raw(b'{"type":"compaction","id":"cmp_1","encrypted_content":"theirs"}'), False
    )
    async with ScriptedModel([theirs, *says("Hello.")], says("Yes.")) as model:
        engine = EngineHarness(model)
        first = await engine.create(input="Hi")
        assert [type(item).__name__ for item in first.output] == ["OutputMessage"]
        await engine.create(input="Ho", previous_response_id=first.id)
    assert [text for _, text in texts(model.requests[1])] == ["Hi", "Hello.", "Ho"]


async def test_usage_tells_of_summaries_too_and_is_what_counts() -> None:
    told = Usage(input_tokens=990, output_tokens=20, total_tokens=1010)
    async with ScriptedModel(says("y" * 800), says("Nothing."), usage=told) as model:
        response = await EngineHarness(model).create(input="Hi", context_management=MANAGED)
    assert response.usage is not None
    assert response.usage.total_tokens == 2020


@pytest.mark.parametrize(
    "managed",
    [
        [{"type": "clearing"}],
        [{"type": "compaction", "compact_threshold": 999}],
        [{"type": "compaction", "compact_threshold": "much"}],
        ["compaction"],
        [MANAGED[0], MANAGED[0]],
    ],
)
async def test_wrong_settings_are_refused(managed: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await EngineHarness(ScriptedModel()).create(input="Hi", context_management=managed)
    assert (refused.value.param or "").startswith("context_management[")


# --- on demand ----------------------------------------------------------------------------------------


async def test_a_window_is_given_back_and_goes_on() -> None:
    async with ScriptedModel(says("All of it."), says("Yes."), usage=Usage(input_tokens=7)) as model:
        engine = EngineHarness(model)
        answer = await compacted(
            engine,
            instructions="Be brief.",
            input=[
                {"role": "system", "content": "Be kind."},
                {"role": "user", "content": "My name is Ada."},
                {"type": "message", "role": "assistant", "content": "Hello Ada."},
            ],
        )
        assert answer.object == "response.compaction"
        assert answer.id.startswith("resp_")
        assert answer.usage.input_tokens == 7
        window = dumped(*answer.output)
        assert window[-1]["type"] == "compaction"
        await engine.create(input=[*window, {"role": "user", "content": "Who am I?"}])
    assert model.requests[0].instructions == "Be brief."
    assert texts(model.requests[0])[-1][1].startswith("Stop here and write a summary")
    assert [who for who, _ in texts(model.requests[1])] == ["system", "user", "assistant", "user"]
    assert texts(model.requests[1])[1] == ("user", "My name is Ada.")
    assert engine.store.commit_count == 1


async def test_a_stored_conversation_is_compacted_by_its_id_and_without_a_new_message_goes_on() -> None:
    async with ScriptedModel(says("Hello."), says("A greeting."), says("Well?")) as model:
        engine = EngineHarness(model)
        first = await engine.create(input="Hi")
        answer = await compacted(engine, previous_response_id=first.id)
        await engine.create(input=dumped(*answer.output))
    assert texts(model.requests[2])[0] == ("user", "Hi")
    assert texts(model.requests[2])[-1][1].startswith("Go on")


async def test_a_compaction_of_a_compaction_keeps_what_both_kept() -> None:
    async with ScriptedModel(says("One."), says("One and two."), says("Yes.")) as model:
        engine = EngineHarness(model)
        first = await compacted(engine, input="The first message")
        second = await compacted(
            engine,
            input=[
                *dumped(*first.output),
                {"type": "message", "role": "assistant", "content": "Well."},
                {"role": "user", "content": "The second message"},
            ],
        )
        assert "One." in str(texts(model.requests[1]))
        await engine.create(input=[*dumped(*second.output), {"role": "user", "content": "Now"}])
    shown = texts(model.requests[2])
    assert [text for who, text in shown if who == "user"] == [
        "The first message",
        "The second message",
        "Now",
    ]
    assert "One and two." in str(shown)


async def test_instructions_that_come_anew_are_shown_once() -> None:
    async with ScriptedModel(says("Sum."), says("Yes.")) as model:
        engine = EngineHarness(model)
        old, new = {"role": "developer", "content": "Old."}, {"role": "developer", "content": "New."}
        answer = await compacted(engine, input=[old, {"role": "user", "content": "Hi"}])
        await engine.create(input=[old, new, *dumped(*answer.output), {"role": "user", "content": "Ho"}])
    said = [text for who, text in texts(model.requests[1]) if who == "developer"]
    assert sorted(said) == ["New.", "Old."]


async def test_only_the_latest_messages_are_kept_and_the_summary_is_bounded() -> None:
    profile = ModelProfile(context_window=4000)
    async with ScriptedModel(says("s" * 100_000, deltas=50), says("Yes."), profile=profile) as model:
        engine = EngineHarness(model)
        asked = [{"role": "user", "content": f"{number} " + "x" * 1000} for number in range(10)]
        answer = await compacted(
            engine, input=[*asked, {"type": "message", "role": "assistant", "content": "Well."}]
        )
        await engine.create(input=[*dumped(*answer.output), {"role": "user", "content": "Now"}])
    assert estimate_segment(ConversationSegment(model.requests[0].segments[0].entries)) < 3500, (
        "the past itself has to fit"
    )
    shown = texts(model.requests[1])
    assert [text.split()[0] for who, text in shown if who == "user"] == ["8", "9", "Now"]
    assert sum(map(estimate_segment, model.requests[1].segments)) < 2400
    assert len(answer.output[0].encrypted_content) < 16_000


async def test_a_server_that_stops_ends_compactions_and_says_so() -> None:
    begun = asyncio.Event()

    def waits(_: ModelRequest) -> list[asyncio.Event]:
        begun.set()
        return [asyncio.Event()]

    model = ScriptedModel(waits)
    engine = EngineHarness(model)
    task = asyncio.create_task(compacted(engine, input="Hi"))
    await begun.wait()
    await engine.runs.drain(0)
    with pytest.raises(ServiceUnavailable):
        await task
    assert model.aborted_requests == model.requests
    with pytest.raises(ServiceUnavailable):
        await compacted(engine, input="Hi")


async def test_a_window_of_messages_that_nobody_answered_becomes_short_too() -> None:
    profile = ModelProfile(context_window=4000)
    async with ScriptedModel(says("Sum."), says("Yes."), profile=profile) as model:
        engine = EngineHarness(model)
        asked = [{"role": "user", "content": f"{number} " + "x" * 1000} for number in range(10)]
        answer = await compacted(engine, input=asked)
        await engine.create(input=dumped(*answer.output))
    assert [text.split()[0] for _, text in texts(model.requests[1])] == ["6", "7", "Summary", "8", "9"]


async def test_a_model_that_thinks_without_end_is_not_waited_for() -> None:
    endless = [*says("A summary.", deltas=1), *thinks("hm " * 50_000, deltas=30), asyncio.Event()]
    model = ScriptedModel(endless)
    answer = await compacted(EngineHarness(model), input="Hi")
    assert len(answer.output) == 1
    assert model.aborted_requests == model.requests


@pytest.mark.parametrize("body", [{"input": "Hi", "model": None}, {}])
async def test_what_is_missing_is_named(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await compacted(EngineHarness(ScriptedModel()), **body)
    assert refused.value.param == ("model" if "input" in body else "input")


@pytest.mark.parametrize("megabytes", [4, 8])
async def test_what_is_sealed_can_be_opened_and_what_is_too_large_is_refused(megabytes: int) -> None:
    picture = {"type": "input_image", "image_url": "data:image/png;base64," + "A" * (megabytes << 20)}
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": LONG}]
    body: dict[str, Any] = {"input": [*turns, {"role": "user", "content": [picture]}]}
    profile = ModelProfile(takes_images=True)
    async with ScriptedModel(says("Long."), says("ok"), profile=profile) as model:
        engine = EngineHarness(model, sealer=SEALER)
        if megabytes == 8:
            with pytest.raises(InvalidRequest, match="too large to be compacted"):
                await compacted(engine, **body)
            await engine.create(input="Bye")
            return
        window = (await compacted(engine, **body)).output
        another = EngineHarness(model, sealer=SEALER)  # as after a restart
        assert (await another.create(input=[*dumped(*window), turns[0]])).status == "completed"


async def test_a_model_that_writes_no_summary_is_an_error_of_its_own() -> None:
    with pytest.raises(ModelError, match="summary"):
        await compacted(EngineHarness(ScriptedModel([*thinks("hm")])), input="Hi")


# --- items that are not ours --------------------------------------------------------------------------


def sealed(state: Any, tenant: str = "") -> dict[str, str]:
    content = state if isinstance(state, bytes) else msgspec.json.encode(state)
    text = base64.b64encode(f"{tenant}\0".encode() + content).decode()
    return {"type": "compaction", "encrypted_content": text}


@pytest.mark.parametrize(
    "item",
    [
        {"type": "compaction"},
        {"type": "compaction", "encrypted_content": 7},
        {"type": "compaction", "encrypted_content": "?"},
        sealed({"messages": [], "summary": "s"}, tenant="another"),
        sealed(b"no state"),
        sealed({"version": 2, "messages": [], "summary": "s"}),
        sealed({"messages": [7], "summary": "s"}),
        sealed({"messages": [], "summary": "s", "tools": [{}]}),
        sealed(b'{"messages":[' + b"[" * 5000 + b"]" * 5000 + b'],"summary":"s"}'),
    ],
)
async def test_others_are_refused_by_their_place_wherever_they_stand(item: dict[str, Any]) -> None:
    engine = EngineHarness(ScriptedModel())
    good = sealed({"messages": [], "summary": "s"})
    for window, place in (([item], 0), ([{"role": "user", "content": "Hi"}, item, good], 1)):
        with pytest.raises(InvalidRequest) as refused:
            await engine.create(input=window)
        assert refused.value.param == f"input[{place}].encrypted_content"
    assert engine.store.commit_count == 0


async def test_nobody_else_can_use_one_and_a_stored_one_needs_its_key() -> None:
    model = ScriptedModel(says("Sum."), says(LONG), says("Sum."), says("Fine."))
    engine = EngineHarness(model, sealer=AesGcmSealer([b"k" * 32]))
    window = dumped(*(await compacted(engine, tenant="one", input="Hi")).output)
    with pytest.raises(InvalidRequest) as refused:
        await engine.start(tenant="two", input=window)
    assert refused.value.param == "input[0].encrypted_content"
    assert refused.value.wire_code == "invalid_encrypted_content"
    first = await engine.create(tenant="one", input=window, context_management=MANAGED)
    assert isinstance(first.output[-1], CompactionItem)
    await engine.create(tenant="one", input="Go on", previous_response_id=first.id)
    model.assert_consumed()
    other = EngineHarness(ScriptedModel(), sealer=AesGcmSealer([b"o" * 32]), existing_store=engine.store)
    with pytest.raises(InvalidRequest) as refused:
        await other.start(tenant="one", input="Go on", previous_response_id=first.id)
    assert refused.value.param == "previous_response_id"


@settings(max_examples=60)
@given(st.data())
def test_one_that_was_changed_anywhere_is_refused_by_its_place(data: st.DataObject) -> None:
    bit = data.draw(st.integers(0, len(SEALED) * 8 - 1))
    changed = bytearray(SEALED.encode())
    changed[bit // 8] ^= 1 << bit % 8
    item = {"type": "compaction", "encrypted_content": changed.decode("latin-1")}
    engine = EngineHarness(ScriptedModel(), sealer=SEALER)
    with pytest.raises(InvalidRequest) as refused:
        asyncio.run(engine.start(input=[{"role": "user", "content": "Hi"}, item]))
    assert refused.value.param == "input[1].encrypted_content"


# --- whatever happens ---------------------------------------------------------------------------------


@st.composite
def answers(draw: st.DrawFn) -> list[Any]:
    """A turn: some text, perhaps calls, of the hosted tool or of the client's."""
    said = says("word " * draw(st.sampled_from([1, 50, 400, 1500])), deltas=1)
    kind = draw(st.sampled_from(["text", "text", "hosted", "client", "both"]))
    if kind in ("hosted", "both"):
        said = [*said, *calls("scripted", {})]
    if kind in ("client", "both"):
        said = [*said, *calls("f", {})]
    return said


@settings(max_examples=40)
@given(st.lists(st.lists(answers(), min_size=1, max_size=3), min_size=1, max_size=6), st.booleans())
def test_the_model_is_never_shown_half_a_call(scripts: list[list[Any]], replayed: bool) -> None:
    asyncio.run(converse(scripts, replayed))


async def converse(scripts: list[list[Any]], replayed: bool) -> None:
    """A client's whole conversation: each script has the model's turns for one request, as far as it goes."""

    class Model(ScriptedModel):
        async def stream(
            self, request: ModelRequest, accept_batch: AcceptBatch | None = None
        ) -> AsyncGenerator[Sequence[AnyModelEvent]]:
            assert render_messages(ServerFeatures(), None, request.segments)
            asked = texts(request)[-1][1].startswith("Stop here")
            self.expect(says("Sum.") if asked or not queue else queue.pop(0))
            async for batch in super().stream(request, accept_batch):
                yield batch

    queue: list[Any] = []
    tool = ScriptedTool(repeatable=[ScriptedToolAnswer("x" * 900)])
    engine = EngineHarness(Model(), [tool])
    window: list[Any] = []
    previous: str | None = None
    added: list[Any] = [{"role": "user", "content": "Hi"}]
    for script in scripts:
        queue[:] = script
        window += added
        events = await engine.stream(
            input=window if replayed else added,
            previous_response_id=None if replayed else previous,
            tools=[FUNCTION, {"type": "scripted"}],
            context_management=MANAGED,
            store=not replayed,
            max_tool_calls=4,
        )
        response = aggregate_events(events)
        assert response.status == "completed", response.error
        previous = response.id
        items = dumped(*response.output)
        window += items
        open_calls = [item["call_id"] for item in items if item["type"] == "function_call"]
        added = [{"type": "function_call_output", "call_id": one, "output": "y" * 500} for one in open_calls]
        added = added or [{"role": "user", "content": "And then? " * 30}]


# --- counting -----------------------------------------------------------------------------------------


async def test_a_count_stands_on_the_last_usage_and_on_what_is_new() -> None:
    told = Usage(input_tokens=500, output_tokens=50, total_tokens=550)
    async with ScriptedModel(says("Hello."), usage=told) as model:
        engine = EngineHarness(model)
        first = await engine.create(input="Hi", model="m")
        count = await counted(engine, previous_response_id=first.id, input="x" * 400)
        assert (count.input_tokens, count.exact) == (550 + 104, False)
        # The same for a client that gives everything back.
        replayed = [{"role": "user", "content": "Hi"}, *dumped(*first.output)]
        count = await counted(engine, input=[*replayed, {"role": "user", "content": "x" * 400}])
        assert count.input_tokens == 550 + 104
        # Nobody else's numbers, and not for another model.
        count = await counted(engine, model="other", input=[*replayed, {"role": "user", "content": "x"}])
        assert count.input_tokens < 100
    assert len(model.requests) == 1


def test_pictures_and_calls_are_estimated_by_what_a_model_sees() -> None:
    picture = "data:image/png;base64," + "A" * 1_000_000
    seen = message([{"type": "input_text", "text": "x" * 40}, {"type": "input_image", "image_url": picture}])
    assert 500 < estimate_entry(seen) < 2000
    assert 100 <= estimate_entry(hosted_call("h", "x" * 400)) < 130


async def test_what_is_remembered_of_usages_is_bounded() -> None:
    tokens = TokenCounter()
    made = [[msgspec.structs.replace(message("x"), id=f"msg_{number}")] for number in range(10_001)]
    for entries in made:
        tokens.record_usage(Caller(), ModelRequest(model="m"), Usage(input_tokens=900), entries)
    first, last = (
        ModelRequest(model="m", segments=[ConversationSegment(tuple(made[place]))]) for place in (0, -1)
    )
    assert await tokens.estimate(Caller(), last) == 900
    assert await tokens.estimate(Caller("another"), last) < 10
    assert await tokens.estimate(Caller(), first) < 10
