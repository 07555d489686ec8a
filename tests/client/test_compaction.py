"""Conversations that outgrow the context window, through the adapter and with the manager."""

import contextlib
import pickle
import threading
from itertools import pairwise
from typing import Any

import pytest

from fumehood.client import (
    CompactionError,
    Deadline,
    MarkdownSection,
    Prompt,
    Session,
    Tool,
    ToolContext,
    ToolResult,
)
from fumehood.client.adapters.openai import (
    CompactionConfig,
    CompactionManager,
    CompactionState,
)
from fumehood.client.adapters.openai.compaction import LastModel, Transcript
from fumehood.client.errors import DeadlineExceededError
from fumehood.client.prompt import AnyTool, NoParams
from tests.client.conftest import GatewayServer, OpenAIStandIn
from tests.support.client_prompts import HOSTED, function_call
from tests.support.code_word_model_server import CodeWordModel
from tests.support.gateway_process import code_call, reasoning_answer, text_answer
from tests.support.openai_server import Reply, error, message, response

ALL_MODES = {
    "test_a_compacted_conversation_is_replayed_and_continues_in_another_process",
    "test_a_long_turn_is_compacted_between_requests_and_keeps_its_prompt",
    "test_a_failed_compaction_leaves_everything_as_it_was",
    "test_a_compaction_ends_by_the_deadline",
    "test_requests_ask_for_no_storage_in_zdr_mode",
    "test_a_window_that_stays_large_is_not_compacted_every_time",
    "test_the_tokens_of_several_calls_are_not_counted_as_one_window",
}

THRESHOLD = 2500


def create_prompt(text: str, *tools: AnyTool) -> Prompt[None]:
    return Prompt(
        ns="tests",
        key="talk",
        sections=[MarkdownSection(title="Turn", key="turn", template=text, tools=tools)],
    )


def test_without_compaction_every_evaluation_starts_afresh(gateway_without_code: GatewayServer) -> None:
    reminder, question = create_prompt("Remember: the code word is heliotrope."), create_prompt("Which word?")
    for compaction, answer in ((None, "I do not know."), (CompactionConfig(enabled=False), "heliotrope")):
        session = Session()
        adapter = gateway_without_code.adapter(compaction=compaction)
        gateway_without_code.script(*[CodeWordModel().answer] * 3)
        adapter.evaluate(reminder, session=session)
        assert adapter.evaluate(question, session=session).text == answer


WINDOW: list[dict[str, Any]] = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "kept"}]},
    {"type": "compaction", "id": "cmp_1", "encrypted_content": "sealed"},
]


SMALL = CompactionConfig(threshold_tokens=100)
LOOK_CALL = function_call("c1", "{}", "look")


def look(params: NoParams, *, context: ToolContext) -> ToolResult[NoParams]:
    return ToolResult.ok(params)


look_tool = Tool[NoParams, NoParams](name="look", description="Look.", handler=look)


def large_response(output: str | dict[str, Any], tokens: int = 999) -> Any:
    """A response with a text, or with a call."""
    item = message(output) if isinstance(output, str) else output
    return response(item, usage={"input_tokens": tokens, "output_tokens": 0, "total_tokens": tokens})


def test_a_compacted_conversation_is_replayed_and_continues_in_another_process(
    openai_stand_in: OpenAIStandIn,
) -> None:
    adapter, session = openai_stand_in.adapter(compaction=SMALL), Session()
    openai_stand_in.script(
        error(400, "No"),
        large_response("one", 50),
        large_response("two"),
        response(*WINDOW),
        large_response("three", 50),
        large_response("four", 50),
    )
    with pytest.raises(Exception, match="No"):
        adapter.evaluate(create_prompt("0"), session=session)  # is not part of the conversation
    for text in ("1", "2", "3"):
        adapter.evaluate(create_prompt(text), session=session)
    other = Session()
    other.restore(pickle.loads(pickle.dumps(session.snapshot())))
    openai_stand_in.adapter(compaction=SMALL).evaluate(create_prompt("4"), session=other)
    failed, first, second, compact, third, fourth = openai_stand_in.server.asked
    assert failed["input"] == [{"role": "system", "content": "## 1. Turn\n\n0"}]
    assert first["input"] == [{"role": "system", "content": "## 1. Turn\n\n1"}]
    assert [item["role"] for item in second["input"]] == ["system", "assistant", "user"]
    assert "/v1/responses/compact" in openai_stand_in.server.calls[3]
    assert compact == {"model": "gpt-4.1", "input": [*second["input"], message("two")]}
    assert third["input"] == [*WINDOW, {"role": "user", "content": "## 1. Turn\n\n3"}]
    assert fourth["input"][:-1] == [*third["input"], message("three")]
    assert fourth["input"][-1]["role"] == "user"
    assert session[CompactionState].all() == (CompactionState(tuple(WINDOW), 999, 1),)
    assert other[CompactionState].all() == session[CompactionState].all()


def test_without_a_conversation_every_evaluation_is_the_first_turn(openai_stand_in: OpenAIStandIn) -> None:
    session = Session()
    for _ in range(2):
        openai_stand_in.evaluate(create_prompt("5"), large_response("five", 5), session=session)
        assert [item["role"] for item in openai_stand_in.server.asked[0]["input"]] == ["system"]


def test_a_long_turn_is_compacted_between_requests_and_keeps_its_prompt(
    openai_stand_in: OpenAIStandIn,
) -> None:
    replies = (large_response(LOOK_CALL), response(*WINDOW), large_response("done", 5))
    found = openai_stand_in.evaluate(create_prompt("Look.", look_tool), *replies, compaction=SMALL)
    _, compact, after = openai_stand_in.server.asked
    assert compact["input"][-1]["type"] == "function_call_output"
    assert after["input"] == [*WINDOW, {"role": "system", "content": "## 1. Turn\n\nLook."}]
    assert [item.get("type", "system") for item in found.transcript] == [
        "system",
        "function_call",
        "function_call_output",
        "message",
    ]


def test_a_failed_compaction_leaves_everything_as_it_was(openai_stand_in: OpenAIStandIn) -> None:
    session = Session()
    replies = (large_response("one"), error(400, "Too long"))
    with pytest.raises(CompactionError, match=r"999 tokens could not be compacted: .*Too long") as failed:
        openai_stand_in.evaluate(create_prompt("1"), *replies, session=session, compaction=SMALL)
    assert failed.value.token_count == 999
    assert isinstance(failed.value.original_error, Exception)
    answer: Any = failed.value.response
    assert answer.text == "one"
    assert session[CompactionState].all() == ()
    transcript = session[Transcript].latest()
    assert transcript is not None
    assert len(transcript.items) == 2
    openai_stand_in.evaluate(create_prompt("2"), large_response("two", 5), session=session, compaction=SMALL)
    assert len(openai_stand_in.server.asked[0]["input"]) == 3


@pytest.mark.parametrize("between_turns", [False, True])
def test_a_compaction_ends_by_the_deadline(openai_stand_in: OpenAIStandIn, between_turns: bool) -> None:
    """Which costs an answer that is there already nothing."""

    def hang(asked: dict[str, Any]) -> Reply:
        over.wait(60)
        return Reply(closes=True)

    over = threading.Event()
    session = Session()
    with pytest.raises(DeadlineExceededError) if between_turns else contextlib.nullcontext():
        found = openai_stand_in.evaluate(
            create_prompt("Look.", look_tool),
            large_response(LOOK_CALL if between_turns else "one"),
            hang,
            session=session,
            deadline=Deadline.after(1),
            compaction=SMALL,
        )
        assert found.text == "one"
    over.set()
    transcript = session[Transcript].latest()
    assert (0 if transcript is None else len(transcript.items)) == (0 if between_turns else 2)
    assert session[CompactionState].all() == ()


def test_requests_ask_for_no_storage_in_zdr_mode(openai_stand_in: OpenAIStandIn) -> None:
    config = CompactionConfig(threshold_tokens=100, zdr_mode=True)
    adapter = openai_stand_in.adapter(model="gpt-5.2", compaction=config, hosted_tools=HOSTED)
    session = Session()
    openai_stand_in.server.script(large_response("one"), response(*WINDOW), large_response("two", 5))
    adapter.evaluate(create_prompt("1"), session=session)
    adapter.evaluate(create_prompt("2"), session=session)
    one, compact, two = openai_stand_in.server.asked
    for request in (one, two):
        assert request["store"] is False
        assert "reasoning.encrypted_content" in request["include"]
        assert "previous_response_id" not in request
    assert "store" not in compact
    assert two["input"][:2] == WINDOW
    openai_stand_in.evaluate(
        create_prompt("3"), large_response("three", 5), model="gpt-4.1", compaction=config
    )
    (plain,) = openai_stand_in.server.asked
    assert (plain["store"], plain["include"]) == (False, [])  # it does not reason, and would refuse


def test_a_gateway_stores_no_content_in_zdr_mode(gateway_server: GatewayServer) -> None:
    def is_stored(word: str) -> bool:
        """Whether it is in any file of the gateway, or in what it logs."""
        files = [path for path in gateway_server.process.directory.rglob("*") if path.is_file()]
        return any(word.encode() in path.read_bytes() for path in files) or word in "".join(
            gateway_server.process.output
        )

    for word, zdr_mode in (("heliotrope", True), ("periwinkle", False)):
        config = CompactionConfig(threshold_tokens=1, zdr_mode=zdr_mode)
        adapter = gateway_server.adapter(compaction=config, hosted_tools=HOSTED)
        session = Session()
        for _ in range(2):
            gateway_server.model.script(
                code_call(f"print('{word}')"), text_answer(f"{word}, too"), text_answer(f"In short: {word}.")
            )
            assert adapter.evaluate(create_prompt(f"Say {word}."), session=session).text == f"{word}, too"
        assert session[CompactionState].all()[0].compaction_count == 2
        assert is_stored(word) is not zdr_mode


def test_reasoning_is_carried_in_zdr_mode(gateway_without_code: GatewayServer) -> None:
    """The gateway stores nothing; the session has the reasoning, and the model gets it back."""
    config, session = CompactionConfig(zdr_mode=True), Session()
    adapter = gateway_without_code.adapter(model="reasoning", compaction=config)
    gateway_without_code.script(reasoning_answer("Let me think.", "Yes"), text_answer("Still yes"))
    adapter.evaluate(create_prompt("Is it?"), session=session)
    transcript = session[Transcript].latest()
    assert transcript is not None
    (item,) = [item for item in transcript.items if item.get("type") == "reasoning"]
    assert item["encrypted_content"]
    assert adapter.evaluate(create_prompt("Sure?"), session=session).text == "Still yes"
    (past,) = [
        message
        for message in gateway_without_code.model.requests[-1].json["messages"]
        if message["role"] == "assistant"
    ]
    assert past == {"role": "assistant", "content": "Yes", "reasoning_content": "Let me think."}


def test_only_a_gateway_gets_the_threshold(
    openai_stand_in: OpenAIStandIn, gateway_without_code: GatewayServer
) -> None:
    """Thirty turns of 1,130 tokens at a threshold of 5,000: a window of 34,016 tokens, once."""
    gateway_server, thinker, session = gateway_without_code, CodeWordModel(), Session()
    gateway_server.model.script(*[thinker.answer] * 100)
    adapter = gateway_server.adapter(compaction=CompactionConfig(threshold_tokens=5000))
    adapter.evaluate(
        create_prompt("Remember: the code word is heliotrope. " + "more " * 890), session=session
    )
    for number in range(28):
        adapter.evaluate(create_prompt(f"{number}. " + "something else " * 296), session=session)
    assert adapter.evaluate(create_prompt("Which word was it?"), session=session).text == "heliotrope"
    assert max(thinker.turns) <= 5000 + 1250
    assert len(thinker.summaries) <= 28 * 1250 // 2500
    manager = CompactionManager(
        openai_stand_in.client, CompactionConfig(threshold_tokens=100), Session(), model="m"
    )
    openai_stand_in.server.script(response(*WINDOW))
    manager.compact([{"role": "user", "content": "hi"}])
    assert openai_stand_in.server.asked == [{"model": "m", "input": [{"role": "user", "content": "hi"}]}]


@pytest.mark.parametrize("large_turn", [0, 5])
def test_a_prompt_larger_than_half_the_threshold_causes_no_loop_and_one_warning(
    gateway_without_code: GatewayServer, large_turn: int, caplog: pytest.LogCaptureFixture
) -> None:
    gateway_server, thinker, session = gateway_without_code, CodeWordModel(), Session()
    gateway_server.model.script(*[thinker.answer] * 200)
    adapter = gateway_server.adapter(compaction=CompactionConfig(threshold_tokens=THRESHOLD))
    compacted: list[int] = []
    for number in range(30):
        large = 1.5 if number == large_turn else 0.02
        adapter.evaluate(create_prompt(f"{number}. " + "x" * int(4 * THRESHOLD * large)), session=session)
        state = session[CompactionState].latest()
        if state is not None and state.compaction_count > len(compacted):
            compacted.append(number)
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "more than half of threshold_tokens (2500)" in line
    assert compacted[0] == large_turn
    assert all(two - one >= 5 for one, two in pairwise(compacted))
    assert max(thinker.turns[large_turn + 1 :]) <= THRESHOLD + 150


def test_a_window_that_stays_large_is_not_compacted_every_time(
    openai_stand_in: OpenAIStandIn, caplog: pytest.LogCaptureFixture
) -> None:
    """A provider that returns nearly everything: compacting again gains nothing, until there is more to compact."""
    adapter, session = openai_stand_in.adapter(compaction=CompactionConfig(threshold_tokens=1000)), Session()
    turns, compactions = 24, 0
    for number in range(turns):
        openai_stand_in.server.script(large_response(f"{number}", 1500 + 50 * number), response(*WINDOW))
        adapter.evaluate(create_prompt("x" * 200), session=session)
        compactions += len(openai_stand_in.server.asked) - 1
    assert 2 <= compactions <= turns // 5 + 1
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert 1 <= len(lines) <= compactions, "one for each compaction at most"
    assert all("right after its compaction, more than threshold_tokens (1000)" in line for line in lines)


def test_the_tokens_of_several_calls_are_not_counted_as_one_window(gateway_server: GatewayServer) -> None:
    """The usage of a response is that of all turns of the model; the conversation is only the last of them."""
    thinker, session = CodeWordModel(), Session()
    adapter = gateway_server.adapter(
        compaction=CompactionConfig(threshold_tokens=4000),
        hosted_tools=HOSTED,
    )
    for number in range(4):
        called = [code_call(f"print({number})", prompt_tokens=1500) for _ in range(5)]
        gateway_server.model.script(*called, thinker.answer)
        found = adapter.evaluate(create_prompt(f"{number}"), session=session)
        assert found.usage.total_tokens > 4000
        assert gateway_server.model.unused_answers == 0
    assert session[CompactionState].latest() is None
    assert thinker.summaries == []


# --- by hand ------------------------------------------------------------------------------------------


def test_a_manager_alone(openai_stand_in: OpenAIStandIn) -> None:
    session = Session()
    manager = CompactionManager(openai_stand_in.client, CompactionConfig(threshold_tokens=100), session)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    assert manager.inject_encrypted_items(messages) == messages
    assert not manager.should_compact(100)
    assert manager.should_compact(101)
    with pytest.raises(CompactionError, match="no model is known: pass model="):
        manager.compact(messages)
    session[LastModel].append(LastModel("gpt-4o"))
    openai_stand_in.server.script(response(*WINDOW), response(*WINDOW))
    compacted = manager.compact(messages)
    assert compacted == WINDOW
    assert openai_stand_in.server.asked[0] == {"model": "gpt-4o", "input": messages}
    assert manager.inject_encrypted_items(compacted) == WINDOW  # not twice
    assert manager.inject_encrypted_items(messages) == [*WINDOW, *messages]
    manager.compact([*compacted, *messages])
    assert openai_stand_in.server.asked[1]["input"] == [*WINDOW, *messages]
    assert manager.state.compaction_count == 2


def test_compaction_can_be_off(openai_stand_in: OpenAIStandIn) -> None:
    manager = CompactionManager(openai_stand_in.client, CompactionConfig(enabled=False), Session(), model="m")
    assert not manager.should_compact(10**9)
    openai_stand_in.server.script(response())
    with pytest.raises(CompactionError, match="empty window"):
        manager.compact([])
