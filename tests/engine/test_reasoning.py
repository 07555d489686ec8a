"""Reasoning as summaries, and reasoning that clients carry."""

from typing import Any

import msgspec
import pytest

from fumehood.protocol.model_turns import (
    AnyModelEvent,
    ModelReasoningDelta,
    ModelReasoningEnded,
    ModelReasoningStarted,
    ModelReasoningSummaryDelta,
)
from fumehood.protocol.openai.api_errors import InvalidRequest
from fumehood.protocol.openai.items import ReasoningItem, ReasoningText, SummaryText
from fumehood.protocol.openai.responses import Response
from fumehood.store.aes_gcm_sealer import KEY_BYTES, AesGcmSealer
from fumehood.testing import ScriptedModel, says
from fumehood.testing import thinks as writes_reasoning
from tests.support.engine_harness import EngineHarness
from tests.support.stream_checks import check_invariants, event_types

ENCRYPTED = ["reasoning.encrypted_content"]


def find_reasoning(response: Response) -> ReasoningItem:
    (item,) = [item for item in response.output if isinstance(item, ReasoningItem)]
    return item


# --- summaries ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("summary", ["auto", "concise", "detailed"])
async def test_text_is_its_own_summary_for_those_who_ask(summary: str) -> None:
    model = ScriptedModel([*writes_reasoning("hm", deltas=2), *says("Yes", deltas=1)])
    events = await EngineHarness(model).stream(reasoning={"summary": summary})
    item = find_reasoning(check_invariants(events))
    assert item.summary == [SummaryText(text="hm")]
    assert item.content == [ReasoningText(text="hm")]
    assert event_types(events)[2:13] == [
        "response.output_item.added",
        "response.reasoning_summary_part.added",
        "response.content_part.added",
        "response.reasoning_summary_text.delta",
        "response.reasoning_text.delta",
        "response.reasoning_summary_text.delta",
        "response.reasoning_text.delta",
        "response.reasoning_summary_text.done",
        "response.reasoning_summary_part.done",
        "response.reasoning_text.done",
        "response.content_part.done",
    ]
    assert event_types(events)[13] == "response.output_item.done"


@pytest.mark.parametrize("reasoning", [None, {"effort": "low"}, {"summary": None}])
async def test_without_asking_there_is_no_summary(reasoning: object) -> None:
    model = ScriptedModel([*writes_reasoning("hm"), *says("Yes")])
    events = await EngineHarness(model).stream(reasoning=reasoning)
    assert find_reasoning(check_invariants(events)).summary == []
    assert not [kind for kind in event_types(events) if "summary" in kind]


@pytest.mark.parametrize(
    "written",
    [
        [ModelReasoningSummaryDelta(0, "gi"), ModelReasoningDelta("h"), ModelReasoningSummaryDelta(0, "st")],
        [ModelReasoningSummaryDelta(0, "gist"), ModelReasoningDelta("h")],
    ],
    ids=["in turns", "one after the other"],
)
async def test_a_server_that_writes_summaries_is_not_repeated(written: list[AnyModelEvent]) -> None:
    turn = [ModelReasoningStarted(), *written, ModelReasoningDelta("m"), ModelReasoningEnded(), *says("Yes")]
    events = await EngineHarness(ScriptedModel(turn)).stream(reasoning={"summary": "auto"})
    item = find_reasoning(check_invariants(events))
    assert item.summary == [SummaryText(text="gist")]
    assert item.content == [ReasoningText(text="hm")]


async def test_a_summary_after_the_text_is_not_lost() -> None:
    turn = [ModelReasoningDelta("hm"), ModelReasoningSummaryDelta(0, "gist"), ModelReasoningDelta(" so")]
    events = await EngineHarness(ScriptedModel([*turn, *says("Yes")])).stream(reasoning={"summary": "auto"})
    item = find_reasoning(check_invariants(events))
    assert item.summary == [SummaryText(text="hm"), SummaryText(text="gist")]
    assert item.content == [ReasoningText(text="hm so")]


# --- reasoning that clients carry ---------------------------------------------------------------------


def make_engine(*turns: Any, key: int = 0) -> EngineHarness:
    return EngineHarness(ScriptedModel(*turns), sealer=AesGcmSealer([bytes([key]) * KEY_BYTES]))


def carry(item: ReasoningItem, **changes: object) -> list[dict[str, Any]]:
    """As most clients send it back: with the encrypted content, without the text."""
    sent = msgspec.to_builtins(item) | changes
    del sent["content"]
    return [sent, {"role": "assistant", "content": "Yes"}, {"role": "user", "content": "Sure?"}]


def read_sent_reasoning(engine: EngineHarness) -> dict[str, Any]:
    """The reasoning item in the last request to the model."""
    (entry,) = [
        entry
        for segment in engine.model.requests[-1].segments
        for entry in segment.entries
        if entry.type == "reasoning"
    ]
    return msgspec.json.decode(entry.raw)


async def test_encrypted_content_is_there_for_those_who_ask() -> None:
    turn = [*writes_reasoning("secret"), *says("Yes")]
    engine = make_engine(turn, turn)
    plain = find_reasoning(await engine.create())
    assert plain.encrypted_content is msgspec.UNSET
    events = await engine.stream(include=ENCRYPTED)
    sealed = find_reasoning(check_invariants(events)).encrypted_content
    assert isinstance(sealed, str)
    assert "secret" not in sealed


@pytest.mark.parametrize("store", [False, True])
async def test_the_model_gets_its_reasoning_back(store: bool) -> None:
    engine = make_engine([*writes_reasoning("hm"), *says("Yes")], says("Sure"))
    first = await engine.create(include=ENCRYPTED, store=store)
    await engine.create(input=carry(find_reasoning(first)), store=store)
    assert read_sent_reasoning(engine)["content"] == [{"type": "reasoning_text", "text": "hm"}]


async def test_reasoning_without_text_is_carried_too() -> None:
    turn = [
        ModelReasoningStarted(),
        ModelReasoningSummaryDelta(0, "gist"),
        ModelReasoningEnded(),
        *says("Yes"),
    ]
    engine = make_engine(turn, says("Sure"))
    item = find_reasoning(await engine.create(include=ENCRYPTED, store=False))
    sent = msgspec.to_builtins(item)
    await engine.create(input=[sent, {"role": "user", "content": "Sure?"}], store=False)
    assert read_sent_reasoning(engine) == sent


async def test_what_a_model_server_encrypted_is_kept() -> None:
    turn = [*writes_reasoning("hm"), ModelReasoningEnded("fh1:origin:rs_1:gAAA"), *says("Yes")]
    engine = make_engine(turn, says("Sure"))
    item = find_reasoning(await engine.create(include=ENCRYPTED, store=False))
    assert item.encrypted_content == "fh1:origin:rs_1:gAAA"
    await engine.create(input=carry(item), store=False)
    sent = read_sent_reasoning(engine)
    assert sent["encrypted_content"] == "fh1:origin:rs_1:gAAA"
    assert "content" not in sent


@pytest.mark.parametrize("store", [False, True])
async def test_content_that_was_not_sealed_here_is_rejected(store: bool) -> None:
    engine = make_engine([*writes_reasoning("hm"), *says("Yes")])
    item = find_reasoning(await engine.create(include=ENCRYPTED, store=store))
    sealed = str(item.encrypted_content)
    changed = sealed[:-5] + ("A" if sealed[-5] != "A" else "B") + sealed[-4:]
    of_another_key = AesGcmSealer([bytes([1]) * KEY_BYTES]).seal("", b'{"type":"reasoning","texts":[]}')
    of_a_compaction = engine.sealer.seal("", b'{"messages":[],"summary":"s"}')
    for value in (changed, "gAAAAABo", of_another_key, of_a_compaction):
        with pytest.raises(InvalidRequest) as raised:
            await engine.create(input=carry(item, encrypted_content=value), store=store)
        assert raised.value.param == "input[0].encrypted_content"
        assert raised.value.wire_code == "invalid_encrypted_content"
    with pytest.raises(InvalidRequest, match=r"belongs to another tenant") as raised:
        await engine.start("other", input=carry(item), store=store)
    assert raised.value.param == "input[0].encrypted_content"


async def test_reasoning_that_is_too_long_has_no_encrypted_content(caplog: pytest.LogCaptureFixture) -> None:
    texts = [ModelReasoningDelta("é" * 1_000_000)] * 4
    engine = make_engine([texts, *says("Yes")])
    item = find_reasoning(await engine.create(include=ENCRYPTED))
    assert item.encrypted_content is msgspec.UNSET
    assert "has no encrypted_content" in caplog.text
