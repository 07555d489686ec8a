"""What is rendered once, and in whatever pieces: the invariants."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.models.chat_completions.chat_renderer import render_messages
from fumehood.models.rendering.rendering_cache import render_segments
from fumehood.models.rendering.server_features import ServerFeatures
from fumehood.protocol.conversation import Conversation, ConversationEntry, ConversationSegment, SegmentGroup
from fumehood.protocol.openai.api_errors import InvalidRequest
from tests.support.chat_messages import IMAGE_URL, render, render_conversation, summarize_messages
from tests.support.conversations import (
    call,
    hosted_call,
    message,
    output,
    reasoning,
    segment,
)


def test_a_segment_is_rendered_once() -> None:
    first, second = segment(message("a"), call("c1", turn=1)), segment(output("c1", "b"))
    once = b",".join(render_messages(ServerFeatures(), None, [first, second]))
    for part in (first, second):
        for key, (text, carry) in part.renderings.items():
            part.renderings[key] = (text.replace(b'"a"', b'"A"').replace(b'"b"', b'"B"'), carry)
    again = b",".join(render_messages(ServerFeatures(), None, [first, second]))
    assert again == once.replace(b'"a"', b'"A"').replace(b'"b"', b'"B"')


def test_servers_with_other_features_have_their_own_renderings() -> None:
    conversation_segment = segment(message("d", "developer"), hosted_call("h", "x", images=[IMAGE_URL]))
    flags = itertools.product([False, True], repeat=3)
    all_features = [ServerFeatures(developer_role=a, takes_images=b, replay_reasoning=c) for a, b, c in flags]
    assert len({features.cache_key for features in all_features}) == 8
    fresh = [render(segment(*conversation_segment.entries), features=features) for features in all_features]
    assert [render(conversation_segment, features=features) for features in all_features] == fresh
    assert len(conversation_segment.renderings) == 8


def test_cached_renderings_are_limited_in_size() -> None:
    large = tuple(segment(message(text * 20_000)) for text in "abc")
    run = SegmentGroup(large)
    for name in map(str, range(20)):
        for conversation in (Conversation((run,)), large):
            render_segments(conversation, name, lambda entries, _: (entries[0].raw, b"left"))
            for one in (run, *large):
                held = sum(len(text) + len(carry) for text, carry in one.renderings.values())
                assert held <= 3 * one.size
    assert all(one.renderings for one in (run, *large))


def test_the_same_call_left_open_by_another_conversation() -> None:
    answer = segment(output("c1", "a"), output("c2", "b"))
    one = render(segment(call("c1", turn=1), call("c2", turn=1)), answer)
    other = render(segment(call("c2", turn=1), call("c1", turn=1)), answer)
    assert summarize_messages(one) == ["assistant c1 c2", "tool a -> c1", "tool b -> c2"]
    assert summarize_messages(other) == ["assistant c2 c1", "tool b -> c2", "tool a -> c1"]


@st.composite
def responses(draw: st.DrawFn) -> list[list[ConversationEntry]]:
    """Responses of one conversation, each its input and its turns; calls of clients are answered in the next."""
    ids = itertools.count()
    open_calls: list[str] = []
    entry_lists: list[list[ConversationEntry]] = []
    for _ in range(draw(st.integers(1, 4))):
        entries = draw(st.permutations([message("u"), *(output(call_id, "r") for call_id in open_calls)]))
        open_calls = []
        turns = draw(st.integers(1, 3))
        for turn in range(1, turns + 1):
            kinds = draw(st.lists(st.sampled_from(["text", "thought", "hosted", "client"]), max_size=4))
            for kind in kinds:
                call_id = f"c{next(ids)}"
                if kind == "text":
                    entries.append(message("t", "assistant", turn))
                elif kind == "thought":
                    entries.append(reasoning("h", turn))
                elif kind == "hosted":
                    entries.append(hosted_call(call_id, "r", turn=turn, images=[IMAGE_URL]))
                elif turn == turns:
                    open_calls.append(call_id)
                    entries.append(call(call_id, turn=turn))
        entry_lists.append(entries)
    entry_lists.append([message("u"), *(output(call_id, "r") for call_id in open_calls)])
    return entry_lists


@given(responses(), st.booleans())
def test_every_call_is_answered_in_order(
    entry_lists: list[list[ConversationEntry]], takes_images: bool
) -> None:
    features = ServerFeatures(takes_images=takes_images)
    messages = render(*(ConversationSegment(tuple(entries)) for entries in entry_lists), features=features)
    expected: list[str] = []
    for message_ in messages:
        if message_["role"] == "tool":
            assert message_["tool_call_id"] == expected.pop(0)
        else:
            assert expected == []
            expected = [made_call["id"] for made_call in message_.get("tool_calls", [])]
    assert expected == []


@given(responses())
def test_a_response_split_by_turn_renders_the_same(entry_lists: list[list[ConversationEntry]]) -> None:
    """While it runs, each of its turns is a segment; once it is kept, it is one."""
    whole = render(*(ConversationSegment(tuple(entries)) for entries in entry_lists))
    parts = [
        ConversationSegment(tuple(group))
        for entries in entry_lists
        for _, group in itertools.groupby(entries, key=lambda item: item.turn)
    ]
    assert render(*parts) == whole


@given(responses(), st.data())
def test_a_conversation_renders_the_same_in_any_pieces(
    entry_lists: list[list[ConversationEntry]], data: st.DataObject
) -> None:
    """Also where a part of it was rendered before, alone or in other runs, and for models of all kinds."""
    segments = [ConversationSegment(tuple(entries)) for entries in entry_lists]
    expected = {
        flag: render(
            *map(ConversationSegment, map(tuple, entry_lists)), features=ServerFeatures(takes_images=flag)
        )
        for flag in (False, True)
    }
    for _ in range(3):
        begin = data.draw(st.integers(0, len(segments) - 1))
        end = data.draw(st.integers(begin, len(segments)))
        run = SegmentGroup(tuple(segments[begin:end]))
        whole = Conversation((*segments[:begin], run, *segments[end:]))
        for flag in data.draw(st.permutations([False, True])):
            features = ServerFeatures(takes_images=flag)
            assert render(*whole, features=features) == expected[flag]
            for _ in range(2):
                assert render_conversation(whole, features) == expected[flag]
            assert render(*segments, features=features) == expected[flag]


def test_a_run_is_rendered_once_and_its_segments_cache_nothing() -> None:
    segments = tuple(segment(message(text), message(text.upper(), "assistant", turn=1)) for text in "abc")
    run, features = SegmentGroup(segments), ServerFeatures()
    once = render_conversation(Conversation((segments[0], SegmentGroup(segments[1:]))), features)
    assert render_conversation(Conversation((run,)), features) == once
    assert [one.renderings for one in segments] == [{}, {}, {}]
    ((name, (text, carry)),) = run.renderings.items()
    run.renderings[name] = (text.replace(b'"b"', b'"x"'), carry)
    assert [message_["content"] for message_ in render_conversation(Conversation((run,)), features)] == [
        "a",
        "A",
        "x",
        "B",
        "c",
        "C",
    ]


def test_a_call_at_the_end_of_a_run_is_answered_after_it() -> None:
    open_call, closed = segment(message("a"), call("c1", turn=1)), segment(output("c1", "r"))
    for pieces in (
        (SegmentGroup((open_call,)), SegmentGroup((closed,))),
        (SegmentGroup((open_call,)), closed),
        (open_call, SegmentGroup((closed,))),
    ):
        for _ in range(2):
            assert summarize_messages(render_conversation(Conversation(pieces), ServerFeatures())) == [
                "user a",
                "assistant c1",
                "tool r -> c1",
            ]
    with pytest.raises(InvalidRequest, match="c1"):
        render_conversation(Conversation((SegmentGroup((open_call,)),)), ServerFeatures())


def test_a_large_run_is_rendered_by_segment() -> None:
    segments = tuple(segment(message("a" * 400_000)) for _ in range(3))
    parts = render_messages(
        ServerFeatures(), None, Conversation((SegmentGroup(segments), segment(message("b"))))
    )
    assert [len(part) > 400_000 for part in parts] == [True, True, True, False]
    assert all(one.renderings for one in segments)
