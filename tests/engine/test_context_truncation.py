"""What is left out of a conversation that is too long, and what never is."""

from collections.abc import Sequence
from itertools import pairwise, takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fumehood.engine.context_truncation import compute_input_token_limit, drop_oldest, read_role
from fumehood.engine.token_counter import estimate_entry, estimate_segment
from fumehood.models.chat_completions.chat_renderer import render_messages
from fumehood.models.rendering.server_features import ServerFeatures
from fumehood.protocol.conversation import ConversationEntry, ConversationSegment
from fumehood.protocol.model_turns import ModelProfile, ModelRequest, ModelTurnEnded
from fumehood.protocol.openai.api_errors import InvalidRequest
from fumehood.protocol.openai.responses import Usage
from fumehood.testing import ScriptedModel, says
from tests.support.conversations import (
    entry,
    hosted_call,
    message,
    reasoning,
    segment,
    shell_call,
    shell_output,
)
from tests.support.engine_harness import EngineHarness


def entries(segments: Sequence[ConversationSegment]) -> list[ConversationEntry]:
    return [entry for one in segments for entry in one.entries]


# --- the cut ------------------------------------------------------------------------------------------


def answered(kind: str, call_id: str, length: int) -> ConversationEntry:
    return entry({"type": f"{kind}_output", "call_id": call_id, "output": "done " * length})


@st.composite
def conversations(draw: st.DrawFn) -> list[ConversationSegment]:
    """One as the engine has them: calls of a turn are answered by the next request, hosted ones at once."""
    segments: list[ConversationSegment] = []
    pending: list[str] = []
    kind = ""
    for number in range(draw(st.integers(1, 6))):
        made: list[ConversationEntry] = [
            answered(kind, call_id, draw(st.integers(0, 9))) for call_id in pending
        ]
        if number == 0:
            made += [message("be kind", role="system") for _ in range(draw(st.integers(0, 2)))]
        if not pending or draw(st.booleans()):
            made.append(message("words " * draw(st.integers(1, 40))))
        if draw(st.integers(0, 5)) == 0:
            made.append(message("be brief", role=draw(st.sampled_from(["system", "developer"]))))
        if draw(st.booleans()):  # of an earlier response, given back
            made += [shell_call(f"r{number}"), shell_output(f"r{number}", "out " * draw(st.integers(0, 20)))]
        for turn in range(1, draw(st.integers(1, 3)) + 1):
            if draw(st.booleans()):
                made.append(reasoning("hm", turn))
            made.append(hosted_call(f"h{number}.{turn}", "out " * draw(st.integers(0, 20)), turn=turn))
            if draw(st.booleans()):
                call_id = f"s{number}.{turn}"
                made += [shell_call(call_id, turn=turn), shell_output(call_id, "out", turn=turn)]
        pending = [f"c{number}.{one}" for one in range(draw(st.integers(0, 2)))]
        kind = draw(st.sampled_from(["function_call", "shell_call"]))
        made += [entry({"type": kind, "call_id": one, "name": "f", "arguments": "{}"}, 9) for one in pending]
        if not pending:
            made.append(message("answer " * draw(st.integers(1, 20)), role="assistant", turn=9))
        segments.append(ConversationSegment(tuple(made)))
    segments.append(
        ConversationSegment(
            (*(answered(kind, one, 1) for one in pending), *([] if pending else [message("last")]))
        )
    )
    return segments


def is_system(entry: ConversationEntry) -> bool:
    return b'"system"' in entry.raw or b'"developer"' in entry.raw


@settings(max_examples=200)
@given(conversations(), st.integers(1, 800))
def test_a_shorter_conversation_is_still_one(segments: list[ConversationSegment], tokens: int) -> None:
    shorter = drop_oldest(segments, tokens)
    # A server takes it: no call without its result, no result without its call.
    assert render_messages(ServerFeatures(), None, shorter)
    before, after = entries(segments), entries(shorter)
    kept = {id(entry) for entry in after}
    assert [entry for entry in before if id(entry) in kept] == after
    for one in takewhile(is_system, before):
        assert id(one) in kept
    # Without those that are pinned, the end of it.
    assert after[-1] is before[-1]
    said = [entry for entry in before if b'"role":"user"' in entry.raw]
    assert not said or id(said[-1]) in kept
    assert [entry.raw for entry in entries(drop_oldest(segments, tokens))] == [e.raw for e in after]


@given(conversations(), st.integers(1, 800))
def test_so_much_is_left_out_as_was_asked_for_if_it_can_be(
    segments: list[ConversationSegment], tokens: int
) -> None:
    shorter = entries(drop_oldest(segments, tokens))
    gone = sum(map(estimate_segment, segments)) - sum(map(estimate_entry, shorter))
    may_be_pinned = sum(
        estimate_entry(entry) for entry in shorter if read_role(entry) not in (None, "assistant")
    )
    assert gone + may_be_pinned >= tokens or shorter == entries(drop_oldest(segments, 1 << 30))


def test_turns_that_were_sent_as_system_messages_are_left_out_like_others() -> None:
    first = segment(message("be kind", role="system"), message("hello", role="assistant", turn=1))
    turns = [
        segment(message("x" * 400, role="system"), message("y" * 400, role="assistant", turn=1))
        for _ in range(6)
    ]
    assert entries(drop_oldest([first, *turns], 900)) == [first.entries[0], *entries(turns[-1:])]


def test_whole_segments_stay_the_same_objects() -> None:
    turns = [segment(message("x" * 400), message("y" * 400, role="assistant", turn=1)) for _ in range(6)]
    assert drop_oldest(turns, 500) == turns[3:]
    assert drop_oldest(turns, 1)[0] is turns[1]


def test_the_last_turns_of_a_long_errand_stay_with_what_was_asked() -> None:
    made = [hosted_call(f"h{turn}", "x" * 400, turn=turn) for turn in range(1, 9)]
    errand = segment(message("do it"), *made)
    assert entries(drop_oldest([errand], 300)) == [errand.entries[0], *made[3:]]


# --- in a request -------------------------------------------------------------------------------------

SMALL = ModelProfile(context_window=2000)


def usage(request: ModelRequest) -> Usage:
    tokens = sum(map(estimate_segment, request.segments))
    return Usage(input_tokens=tokens, output_tokens=100, total_tokens=tokens + 100)


async def test_a_conversation_goes_on_for_ever_and_the_cut_seldom_moves() -> None:
    seen: list[ModelRequest] = []

    def turn(request: ModelRequest) -> list[object]:
        seen.append(request)
        return [*says("y" * 400), ModelTurnEnded("stop", usage(request))]

    engine = EngineHarness(ScriptedModel(*[turn] * 40, profile=SMALL))  # pyright: ignore[reportArgumentType]
    previous = None
    for number in range(40):
        response = await engine.create(
            input=f"{number} " + "x" * 400,
            previous_response_id=previous,
            instructions="Be brief.",
            truncation="auto",
            max_output_tokens=200,
        )
        assert response.truncation == "auto"
        previous = response.id
    lengths = [sum(map(estimate_segment, request.segments)) for request in seen]
    assert max(lengths) <= 1800
    assert min(lengths[20:]) > 900
    firsts = [request.segments[0].entries[0].raw for request in seen]
    moves = sum(before != after for before, after in pairwise(firsts))
    assert 0 < moves <= 40 * 200 // (1800 // 4) + 1
    assert all(request.instructions == "Be brief." for request in seen)


class Counting(ScriptedModel):
    """Its server counts: a token for every character."""

    asked = 0

    async def count_tokens(self, request: ModelRequest) -> tuple[int, bool]:
        self.asked += 1
        return sum(len(entry.raw) for one in request.segments for entry in one.entries), True


async def test_what_is_known_to_be_too_long_is_refused_unless_it_may_be_cut() -> None:
    profile = ModelProfile(context_window=2000, counts_tokens=True)
    model = Counting([*says("ok")], [*says("ok")], profile=profile)
    engine = EngineHarness(model)
    long = [{"role": "user", "content": "x" * 4000}, {"role": "user", "content": "and now?"}]
    with pytest.raises(InvalidRequest) as refused:
        await engine.create(input=long)
    assert (refused.value.wire_code, refused.value.param) == ("context_length_exceeded", "input")
    assert engine.store.commit_count == 0
    assert (await engine.create(input=long, truncation="auto")).status == "completed"
    assert len(entries(model.requests[0].segments)) == 1
    # Nobody is asked about what is short.
    model.asked = 0
    await engine.create(input="hi")
    assert model.asked == 0


async def test_where_nobody_can_count_the_server_says_so_itself() -> None:
    model = ScriptedModel([*says("ok")], profile=SMALL)
    assert (await EngineHarness(model).create(input="x" * 100_000)).status == "completed"


def test_room_is_what_the_answer_leaves() -> None:
    assert compute_input_token_limit(8000, 1000) == 7000
    assert compute_input_token_limit(8000, None) == 7000
    assert compute_input_token_limit(128_000, None) == 126_976
    assert compute_input_token_limit(100, 1000) == 0
