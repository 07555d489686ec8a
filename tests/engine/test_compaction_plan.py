"""What a compaction keeps, how long it may be, and when it is not worth making."""

import itertools
import logging
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.engine.compaction_plan import (
    CompactionBudget,
    compute_max_threshold,
    compute_token_scale,
    make_plan,
    omit_middle,
    shorten_message,
    truncate_text,
)
from fumehood.engine.token_counter import estimate_entry, estimate_segment
from fumehood.interfaces import AcceptBatch, Caller, CompactedToolState
from fumehood.protocol.conversation import ConversationEntry, ConversationSegment
from fumehood.protocol.model_turns import AnyModelEvent, ModelProfile, ModelRequest, ModelTextDelta
from fumehood.protocol.openai.api_errors import ModelRateLimited
from fumehood.protocol.openai.items import CompactionItem
from fumehood.protocol.openai.responses import CreateResponse, Usage
from fumehood.testing import ScriptedModel, ScriptedTool, ScriptedToolAnswer, calls, says
from tests.support.conversations import hosted_call, message, segment
from tests.support.engine_harness import EngineHarness

THRESHOLD = 2000
MANAGED = [{"type": "compaction", "compact_threshold": THRESHOLD}]
HIDDEN = b""


def words(tokens: int, said: str = "") -> str:
    return said + "x" * (4 * tokens - len(said))


def is_summary(request: ModelRequest) -> bool:
    return b"Stop here and write a summary" in request.segments[-1].entries[-1].raw


def tokens_in(request: ModelRequest) -> int:
    return sum(map(estimate_segment, request.segments))


def roles(request: ModelRequest) -> list[str]:
    return [item["role"] for item in items(request)]


def items(request: ModelRequest) -> list[dict[str, Any]]:
    return [msgspec.json.decode(entry.raw) for segment in request.segments for entry in segment.entries]


def dumped(output: Sequence[Any]) -> list[Any]:
    return [msgspec.json.decode(msgspec.json.encode(item)) for item in output]


def answer_briefly(request: ModelRequest) -> list[ModelTextDelta]:
    return says("Sum." if is_summary(request) else "Noted.")


class Talk:
    """A conversation with a model that answers shortly, and sums up at as great a length as it may."""

    def __init__(
        self, model: ScriptedModel | None = None, *, summary: str = "s" * 100_000, managed: Any = MANAGED
    ) -> None:
        self.model = model or ScriptedModel()
        self.engine = EngineHarness(self.model)
        self._managed = managed
        self.compactions: list[int] = []
        self.windows: list[int] = []
        self._summary = summary
        self._previous: str | None = None
        self._turn = 0

    async def say(self, text: str, role: str = "user", **more: Any) -> Any:
        self.model.expect(*[self._answer] * 3)
        before = len(self.model.requests)
        response = await self.engine.create(
            input=[{"role": role, "content": text}],
            previous_response_id=self._previous,
            context_management=self._managed,
            **more,
        )
        asked = [request for request in self.model.requests[before:] if not is_summary(request)]
        self.windows += [tokens_in(request) for request in asked]
        self.compactions += [self._turn for item in response.output if isinstance(item, CompactionItem)]
        self._previous = response.id
        self._turn += 1
        return response

    def _answer(self, request: ModelRequest) -> Any:
        return says(self._summary if is_summary(request) else "Noted.")


# --- what is kept -------------------------------------------------------------------------------------


async def test_only_the_leading_instructions_are_kept_and_later_ones_are_summarised() -> None:
    talk = Talk(summary="A summary.")
    await talk.say("Be kind.", role="developer")
    for number in range(24):
        await talk.say(words(100, f"{number} "), role="system" if number % 2 else "developer")
    assert talk.compactions
    last = talk.model.requests[-1]
    shown = items(last)
    assert shown[0] == {"role": "developer", "content": "Be kind."}
    assert shown[1]["role"] == "assistant"
    assert "A summary." in shown[1]["content"][0]["text"]
    asked = next(request for request in talk.model.requests if is_summary(request))
    assert sum(role in ("system", "developer") for role in roles(asked)) > 10, "the summary is of all of them"


async def test_long_instructions_are_shortened_with_a_word_and_not_shown_again() -> None:
    talk = Talk(summary="The end of the rules says: be brief.")
    rules = {"role": "system", "content": words(THRESHOLD, "Rules: ")}
    window: list[Any] = [rules]
    for number in range(12):
        window.append({"role": "user", "content": words(100, f"{number} ")})
        talk.model.expect(*[answer_briefly] * 3)
        response = await talk.engine.create(input=window, store=False, context_management=MANAGED)
        window += dumped(response.output)
    assert sum(item.get("type") == "compaction" for item in window) >= 1
    shown = items(talk.model.requests[-1])
    system = [item["content"] for item in shown if item["role"] == "system"]
    assert len(system) == 1, "the client sends the whole of them each time, and the model has what was kept"
    assert system[0].startswith("Rules: ")
    assert "tokens of this message are left out here; the summary has what matters" in system[0]
    assert len(system[0]) // 4 <= THRESHOLD // 4
    assert tokens_in(talk.model.requests[-1]) <= THRESHOLD


async def test_new_instructions_before_a_compaction_are_shown_and_others_there_are_not() -> None:
    async with ScriptedModel(says("Sum."), says("Yes.")) as model:
        engine = EngineHarness(model)
        request = msgspec.convert({"model": "m"}, CreateResponse)
        request.input = "Hi"
        answer = await engine.runs.compact(request, Caller())
        window = [
            {"role": "developer", "content": "New."},
            {"role": "user", "content": "Before"},
            {"role": "developer", "content": "On the way."},
            *dumped(answer.output),
            {"role": "user", "content": "Ho"},
        ]
        await engine.create(input=window)
    said = [item["content"] for item in items(model.requests[1]) if item["role"] == "developer"]
    assert said == ["New."]


async def test_a_turn_that_is_a_system_message_is_answered_before_it_is_summarised() -> None:
    talk = Talk(summary="A summary.")
    for number in range(18):
        await talk.say(words(100, f"{number} "), role="system")
    await talk.say(words(300, "The task."), role="system")
    assert talk.compactions == [18], "before the model was asked"
    assert items(talk.model.requests[-1])[-1]["content"].startswith("The task.")


async def test_a_first_turn_that_is_too_long_is_answered_as_it_is() -> None:
    talk = Talk(summary="A summary.")
    await talk.say(words(3 * THRESHOLD, "The task."), role="system")
    assert [is_summary(request) for request in talk.model.requests] == [False, True]
    assert len(items(talk.model.requests[0])[0]["content"]) == 12 * THRESHOLD


def test_a_message_that_was_sent_again_is_kept_once() -> None:
    task = message("Do it. " * 20)
    talk = [
        task,
        hosted_call("1", "out"),
        task,
        hosted_call("2", "out"),
        message("Other."),
        task,
        hosted_call("3", "out"),
    ]
    plan = make_plan([segment(*talk)], CompactionBudget.for_limit(1000), HIDDEN)
    assert [entry.raw for entry in plan.messages] == [task.raw, message("Other.").raw, task.raw]


def test_what_is_not_text_is_not_cut() -> None:
    picture = message(
        [{"type": "input_text", "text": "x" * 9000}, {"type": "input_image", "image_url": "data:,"}]
    )
    assert shorten_message(picture, 100) is None
    assert shorten_message(message(7), 100) is None
    assert shorten_message(message([{"type": "input_text", "text": "x" * 9000}]), 10) is None
    short = shorten_message(
        message([{"type": "input_text", "text": "é" * 9000}, {"type": "input_text", "text": "end"}]), 100
    )
    assert short is not None
    assert estimate_entry(short) <= 100
    assert msgspec.json.decode(short.raw)["content"].endswith("end")


# --- how much of it -----------------------------------------------------------------------------------


@st.composite
def conversations(draw: st.DrawFn) -> list[ConversationSegment]:
    made: list[ConversationEntry] = []
    for _ in range(draw(st.integers(1, 12))):
        role = draw(st.sampled_from(["user", "user", "assistant", "system", "developer"]))
        text = draw(st.sampled_from("aé漢")) * draw(st.sampled_from([1, 100, 900, 9000]))
        made.append(message(text, role=role, turn=int(role == "assistant")))
    return [segment(entry) for entry in made]


@given(conversations(), st.integers(1000, 100_000), st.integers(0, 5000), st.sampled_from([1.0, 1.5, 4.0]))
def test_what_is_kept_has_its_bounds(
    segments: list[ConversationSegment], limit: int, fixed: int, scale: float
) -> None:
    budget = CompactionBudget.for_limit(limit, fixed=fixed, scale=scale)
    plan = make_plan(segments, budget, HIDDEN)
    entries = [entry for one in segments for entry in one.entries]
    assert sum(map(estimate_entry, plan.instructions)) <= limit / scale / 4
    used = sum(map(estimate_entry, plan.instructions)) + sum(map(estimate_entry, plan.messages))
    parts = used + budget.summary + budget.notes
    if fixed <= limit / scale / 4:
        assert parts + fixed <= limit / scale * 3 / 4 + limit / scale / 8 + 2
    # The last message is never cut or lost if nobody has answered it.
    last = entries[-1]
    if b'"assistant"' not in last.raw:
        assert plan.unanswered[-1] is last
    assert not {id(entry) for entry in plan.unanswered} & {id(entry) for entry in plan.kept_entries}


@given(st.text(max_size=400), st.integers(0, 60))
def test_texts_are_cut_by_what_they_weigh(text: str, tokens: int) -> None:
    cut = truncate_text(text, tokens)
    assert text.encode(errors="replace").decode().startswith(cut) or cut == text
    assert len(cut.encode(errors="replace")) <= 4 * tokens or cut == text == ""
    short = omit_middle(text, tokens)
    assert short == text or len(short.encode()) <= max(4 * tokens, len(" […] ".encode()))


def test_a_model_with_shorter_tokens_than_estimated_gets_less() -> None:
    assert compute_token_scale(1000, 2000) == 1
    assert compute_token_scale(1500, 1000) == 1.5
    assert compute_token_scale(9000, 1000) == 4
    assert CompactionBudget.for_limit(3000, scale=1.5).pool == CompactionBudget.for_limit(2000).pool


@pytest.mark.parametrize("window", [2000, 4096, 8192, 32_768, 131_072, 1_000_000])
def test_a_conversation_at_the_threshold_can_be_summarised_whole(window: int) -> None:
    limit = compute_max_threshold(window)
    assert limit >= window // 2
    if window > 4000:
        thinking = min(2048, window // 8)
        turn = window // 16
        assert limit + turn + CompactionBudget.for_limit(limit).summary + thinking + 300 <= window


async def test_the_request_for_a_summary_fits_into_the_window_and_loses_nothing() -> None:
    model = ScriptedModel(profile=ModelProfile(context_window=8192))
    talk = Talk(model, summary="Sum.", managed=[{"type": "compaction"}])
    for number in range(40):
        await talk.say(words(400, f"{number} "))
    asked = [request for request in model.requests if is_summary(request)]
    assert len(asked) >= 2
    for request in asked:
        assert tokens_in(request) + (request.sampling.max_output_tokens or 0) <= 8192
    assert items(asked[0])[0]["content"].startswith("0 "), "nothing was left out"


async def test_a_summary_of_what_does_not_fit_says_so(caplog: pytest.LogCaptureFixture) -> None:
    profile = ModelProfile(context_window=4000)
    async with ScriptedModel(says("Sum."), profile=profile) as model:
        request = msgspec.convert({"model": "m"}, CreateResponse)
        request.input = [
            msgspec.Raw(message(words(500, f"{number} "), role="user" if number % 2 else "assistant").raw)
            for number in range(12)
        ]
        await EngineHarness(model).runs.compact(request, Caller())
    assert tokens_in(model.requests[0]) + (model.requests[0].sampling.max_output_tokens or 0) <= 4000
    (line,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "is summarised without about" in line.getMessage()


async def test_a_summary_in_any_script_is_cut_to_its_share() -> None:
    talk = Talk(summary="漢" * 100_000)
    for number in range(25):
        await talk.say(words(100, f"{number} "))
    (summary,) = [item for item in items(talk.model.requests[-1]) if item["role"] == "assistant"][:1]
    assert len(summary["content"][0]["text"].encode()) <= THRESHOLD + 200
    assert max(talk.windows) <= THRESHOLD


class Hoarder(ScriptedTool):
    """A tool that has a lot to tell of its calls."""

    async def snapshot_state(
        self,
        caller: Caller,
        past: Sequence[ConversationSegment],
        kept_items: Sequence[ConversationEntry] = (),
    ) -> CompactedToolState | None:
        memory = await super().snapshot_state(caller, past, kept_items)
        return memory and CompactedToolState(
            memory.items, "Container c1 holds: " + "file.txt, " * 5000 + "last.txt"
        )


async def test_what_tools_tell_is_bounded() -> None:
    tool = Hoarder(repeatable=[ScriptedToolAnswer("out")])
    engine = EngineHarness(
        ScriptedModel(calls("scripted", {}), says("Noted."), says("Sum."), says("Yes.")), [tool]
    )
    first = await engine.create(input="Do it", tools=[{"type": "scripted"}])
    request = msgspec.convert({"model": "m", "previous_response_id": first.id}, CreateResponse)
    request.context_management = [msgspec.Raw(msgspec.json.encode(MANAGED[0]))]
    answer = await engine.runs.compact(request, Caller())
    await engine.create(input=[*dumped(answer.output), {"role": "user", "content": "And?"}])
    note = items(engine.model.requests[-1])[1]["content"][0]["text"]
    assert "Container c1 holds" in note
    assert note.endswith("last.txt")
    assert len(note) < THRESHOLD


# --- when it is not worth it --------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.6, 0.9, 1.5, 4.0])
@pytest.mark.parametrize("role", ["user", "system"])
@pytest.mark.parametrize("place", [0, 8])
async def test_a_turn_larger_than_half_the_threshold_causes_no_loop_and_one_line(
    share: float, role: str, place: int, caplog: pytest.LogCaptureFixture
) -> None:
    talk = Talk()
    large = int(THRESHOLD * share)
    for number in range(40):
        if number == place:
            await talk.say(words(large, f"{number} "), role=role)
        else:
            await talk.say(words(THRESHOLD // 20 - 10, f"{number} "))
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == 1, lines
    assert "more than half of the compaction threshold of 2000" in lines[0]
    # One before it is answered, where that helps, and one after.
    at_once = [turn for turn in talk.compactions if turn in (place, place + 1)]
    assert len(at_once) <= 2
    later = [turn for turn in talk.compactions if turn > place + 1]
    assert all(two - one >= 5 for one, two in itertools.pairwise(later))
    assert len(talk.compactions) <= 8
    assert max(talk.windows[place + 2 :]) <= THRESHOLD
    assert max(talk.windows) <= THRESHOLD + large


async def test_tools_larger_than_the_threshold_cause_no_loop() -> None:
    function = {
        "type": "function",
        "name": "f",
        "description": "d" * 4 * 3 * THRESHOLD,
        "parameters": {"type": "object"},
    }
    talk = Talk()
    for number in range(60):
        await talk.say(words(THRESHOLD // 20, f"{number} "), tools=[function])
    assert 1 <= len(talk.compactions) <= 12
    assert all(two - one >= 5 for one, two in itertools.pairwise(talk.compactions))
    assert max(talk.windows) <= THRESHOLD, "of the conversation itself"


@pytest.mark.parametrize(
    ("first_summary", "further_turns", "summaries"),
    [
        ([], [calls("scripted", {}), calls("scripted", {}), says("Done.")], 1),
        (ModelRateLimited("busy"), [calls("scripted", {}), says("Short."), says("Done.")], 2),
    ],
    ids=["writes nothing", "is busy"],
)
async def test_only_a_model_that_was_busy_is_asked_for_a_summary_again(
    first_summary: Any, further_turns: Sequence[Any], summaries: int, caplog: pytest.LogCaptureFixture
) -> None:
    tool = ScriptedTool(repeatable=[ScriptedToolAnswer("x" * 8000)])
    async with ScriptedModel(calls("scripted", {}), first_summary, *further_turns) as model:
        response = await EngineHarness(model, [tool]).create(
            input="Do it", tools=[{"type": "scripted"}], context_management=MANAGED
        )
    assert response.status == "completed"
    assert sum(map(is_summary, model.requests)) == summaries
    assert sum(isinstance(item, CompactionItem) for item in response.output) == summaries - 1
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "was not compacted" in line


async def test_usage_that_is_larger_than_estimated_is_what_counts() -> None:
    """A model whose tokens are half as long as estimated: what is kept is half as much."""

    class Model(ScriptedModel):
        async def stream(
            self, request: ModelRequest, accept_batch: AcceptBatch | None = None
        ) -> AsyncGenerator[Sequence[AnyModelEvent]]:
            self._usage = Usage(input_tokens=2 * tokens_in(request), output_tokens=4)
            async for batch in super().stream(request, accept_batch):
                yield batch

    talk = Talk(Model())
    for number in range(80):
        await talk.say(words(THRESHOLD // 40, f"{number} "))
    assert max(2 * tokens for tokens in talk.windows) <= THRESHOLD + THRESHOLD // 20
    assert len(talk.compactions) >= 3
    assert all(two - one >= 5 for one, two in itertools.pairwise(talk.compactions))
