"""Conversations as chat completions servers are shown them; imports pytest, hypothesis and fumehood."""

import base64
import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from inline_snapshot import snapshot

from fumehood.models.chat_rendering import ChatRenderer, Dialect
from fumehood.models.kept_renderings import render_all
from fumehood.protocol.attachments import LONGEST_TEXT, Attachment
from fumehood.protocol.conversation import Conversation, Entry, Segment, Stretch
from fumehood.protocol.errors import InvalidRequest
from tests.support.conversations import (
    call,
    entry,
    hosted,
    message,
    output,
    segment,
    shell_call,
    shell_output,
    thought,
)

PICTURE = "data:image/png;base64,AAAA"


def render(*segments: Segment, instructions: str | None = None, dialect: Dialect | None = None) -> list[Any]:
    renderer = ChatRenderer(dialect or Dialect())
    return msgspec.json.decode(b"[%b]" % b",".join(renderer.messages(instructions, segments)))


def rendered(conversation: Conversation, dialect: Dialect) -> list[Any]:
    return msgspec.json.decode(b"[%b]" % b",".join(ChatRenderer(dialect).messages(None, conversation)))


def shape(messages: list[Any]) -> list[str]:
    """Each message in a few words: its role, its text, its calls or the call it answers."""
    return [
        " ".join(
            filter(
                None,
                [
                    message["role"],
                    message["content"] if isinstance(message["content"], str) else None,
                    *(call["id"] for call in message.get("tool_calls", [])),
                    message.get("tool_call_id") and f"-> {message['tool_call_id']}",
                ],
            )
        )
        for message in messages
    ]


def refused(*segments: Segment) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        render(*segments)
    return caught.value


# --- messages -----------------------------------------------------------------------------------------


def test_roles_and_instructions() -> None:
    given = segment(
        message("s", "system"), message("d", "developer"), message("u"), message("a", "assistant")
    )
    assert render(given, instructions="Be brief.") == [
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": "s"},
        {"role": "system", "content": "d"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
    ]
    assert render(given, dialect=Dialect(developer_role=True))[1] == {"role": "developer", "content": "d"}


def test_text_alone_is_a_string() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    said = [{"type": "output_text", "text": "c", "logprobs": None}, {"type": "refusal", "refusal": "no"}]
    assert shape(render(segment(message(parts), message(said, "assistant")))) == [
        "user a\nb",
        "assistant cno",
    ]


def test_an_item_without_type_and_with_phase() -> None:
    easy = entry({"role": "user", "content": "hi"})
    phased = entry({"type": "message", "role": "assistant", "content": "yes", "phase": "final_answer"})
    assert render(segment(easy, phased)) == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
    ]


def test_images() -> None:
    parts = [
        {"type": "input_text", "text": "what is it?"},
        {"type": "input_image", "image_url": PICTURE, "detail": "high"},
        {"type": "input_image", "image_url": "https://example.org/x.png"},
        {"type": "input_image", "image_url": {"url": PICTURE, "detail": "low"}},
    ]
    (rendered,) = render(segment(message(parts)))
    assert rendered["content"] == [
        {"type": "text", "text": "what is it?"},
        {"type": "image_url", "image_url": {"url": PICTURE, "detail": "high"}},
        {"type": "image_url", "image_url": {"url": "https://example.org/x.png"}},
        {"type": "image_url", "image_url": {"url": PICTURE, "detail": "low"}},
    ]


def inline(content: bytes, mime: str | None = None) -> str:
    encoded = base64.b64encode(content).decode()
    return encoded if mime is None else f"data:{mime};base64,{encoded}"


@pytest.mark.parametrize(
    "data",
    [
        inline(b"a,b\n1,2\n", "text/csv"),
        inline(b"a,b\n1,2\n", "application/octet-stream"),
        inline(b"\xef\xbb\xbfa,b\n1,2\n"),
        "data:text/csv,a%2Cb%0A1%2C2%0A",
    ],
)
def test_files_of_text_are_text(data: str) -> None:
    part = {"type": "input_file", "filename": "t\u202e.csv", "file_data": data}
    assert shape(render(segment(message([part])))) == ["user The file t\ufffd.csv:\na,b\n1,2\n"]


@pytest.mark.parametrize(
    ("content", "mime"),
    [(b"%PDF-1.4", None), (b"%PDF-1.4", "application/pdf"), (b"\xff\xfe\x00", None), (b"a\0b", "text/plain")],
)
def test_other_files_are_files_to_models_that_take_them(content: bytes, mime: str | None) -> None:
    part = {"type": "input_file", "filename": "x", "file_data": inline(content, mime)}
    given = segment(message([part]))
    (rendered,) = render(given, dialect=Dialect(takes_files=True))
    data = inline(content, mime or "application/octet-stream")
    assert rendered["content"] == [{"type": "file", "file": {"filename": "x", "file_data": data}}]
    (told,) = render(given)
    assert told["content"] == (
        f"The file x ({mime or 'of unknown type'}, {len(content)} bytes) cannot be shown here. "
        "If there is a code interpreter, it finds it as /mnt/data/x."
    )


def test_what_an_id_stands_for_was_found_before() -> None:
    """One attachment for each part, wherever text stands between."""
    parts = [
        {"type": "input_file", "file_id": "file-1"},
        {"type": "input_text", "text": "between"},
        {"type": "input_image", "file_id": "file-2", "detail": "low"},
        {"type": "input_file", "file_id": "file-3"},
        {"type": "input_file", "file_id": "file-4"},
        {"type": "input_image", "file_id": "file-5"},
        {"type": "input_image", "image_url": "https://example.org/x.png"},
    ]
    found = (
        Attachment(name="t-2.csv", kind="text", text="a,b\n", left_out=1234),
        Attachment(name="x.png", kind="picture", data=PICTURE),
        Attachment(name="x.pdf", media_type="application/pdf", bytes=12345),
        Attachment(name="y.pdf", media_type="application/pdf", data=inline(b"%PDF", "application/pdf")),
        Attachment(name="z.png", kind="picture", gone=True),
        Attachment(),
    )
    given = Segment((msgspec.structs.replace(message(parts), attachments=found),))
    (rendered,) = render(given, dialect=Dialect(takes_files=True))
    assert rendered["content"] == [
        {
            "type": "text",
            "text": "The file t-2.csv:\na,b\n\n[About 1,234 more characters are left out here. "
            "If there is a code interpreter, it finds it as /mnt/data/t-2.csv.]",
        },
        {"type": "text", "text": "between"},
        {"type": "image_url", "image_url": {"url": PICTURE, "detail": "low"}},
        {
            "type": "text",
            "text": "The file x.pdf (application/pdf, 12,345 bytes) cannot be shown here. "
            "If there is a code interpreter, it finds it as /mnt/data/x.pdf.",
        },
        {
            "type": "file",
            "file": {"filename": "y.pdf", "file_data": inline(b"%PDF", "application/pdf")},
        },
        {"type": "text", "text": "The picture z.png is not there any more."},
        {"type": "image_url", "image_url": {"url": "https://example.org/x.png"}},
    ]


def test_of_a_long_text_the_beginning_is_shown() -> None:
    text = "x" * (LONGEST_TEXT + 1000)
    part = {"type": "input_file", "filename": "x.txt", "file_data": inline(text.encode(), "text/plain")}
    (rendered,) = render(segment(message([part])))
    assert rendered["content"] == (
        "The file x.txt:\n" + "x" * LONGEST_TEXT + "\n[About 1,000 more characters are left out here. "
        "If there is a code interpreter, it finds it as /mnt/data/x.txt.]"
    )


@pytest.mark.parametrize(
    ("part", "told"),
    [
        ({"type": "input_hologram"}, "Content of type 'input_hologram' cannot be shown"),
        ({"type": "input_image", "file_id": "file-1"}, "An input_image needs an image_url"),
        ({"type": "input_image", "image_url": "file:///etc/passwd"}, "An input_image needs an image_url"),
        ({"type": "input_file", "filename": "x", "file_id": "file-1"}, "'x' has no file_data"),
        ({"type": "input_file", "file_data": "data:text/plain;base64,***"}, "is not base64"),
        ({"type": "input_text", "text": 5}, "cannot be read"),
        ({}, "cannot be read"),
    ],
)
def test_parts_that_cannot_be_shown(part: dict[str, object], told: str) -> None:
    error = refused(segment(message([part])))
    assert told in error.message
    assert (error.status, error.param) == (400, "input")


def test_messages_of_nobody() -> None:
    assert "the role 'critic'" in refused(segment(message("a", "critic"))).message


# --- turns --------------------------------------------------------------------------------------------


def test_one_turn_is_one_message() -> None:
    rendered = render(
        segment(
            message("go"),
            thought("hm", turn=1),
            message("I ", "assistant", turn=1),
            hosted("h1", "1\n", turn=1),
            call("c1", '{"x":1}', turn=1),
            message("compute", "assistant", turn=1),
            hosted("h2", "2\n", turn=1, arguments='{"code":"2"}'),
        ),
        segment(output("c1", "one"), message("next")),
    )
    assert rendered == [
        {"role": "user", "content": "go"},
        {
            "role": "assistant",
            "content": "I compute",
            "tool_calls": [
                {
                    "type": "function",
                    "id": "h1",
                    "function": {"name": "code_interpreter", "arguments": '{"code":"1"}'},
                },
                {"type": "function", "id": "c1", "function": {"name": "f", "arguments": '{"x":1}'}},
                {
                    "type": "function",
                    "id": "h2",
                    "function": {"name": "code_interpreter", "arguments": '{"code":"2"}'},
                },
            ],
        },
        {"role": "tool", "tool_call_id": "h1", "content": "1\n"},
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "h2", "content": "2\n"},
        {"role": "user", "content": "next"},
    ]


def test_turns_one_after_another() -> None:
    rendered = render(
        segment(
            message("go"),
            hosted("h1", "a", turn=1),
            hosted("h2", "b", turn=2),
            message("done", "assistant", turn=3),
        )
    )
    assert shape(rendered) == [
        "user go",
        "assistant h1",
        "tool a -> h1",
        "assistant h2",
        "tool b -> h2",
        "assistant done",
    ]
    assert rendered[1]["content"] is None


def test_what_clients_give_back_is_grouped_by_adjacency() -> None:
    rendered = render(
        segment(
            message("go"),
            message("two calls", "assistant"),
            call("c1"),
            call("c2"),
            output("c2", "b"),
            output("c1", "a"),
            call("c3"),
            output("c3", "c"),
            thought("hm"),
            call("c4"),
            output("c4", "d"),
            message("done", "assistant"),
            message("really", "assistant"),
        )
    )
    assert shape(rendered) == [
        "user go",
        "assistant two calls c1 c2",
        "tool a -> c1",
        "tool b -> c2",
        "assistant c3",
        "tool c -> c3",
        "assistant c4",
        "tool d -> c4",
        "assistant done",
        "assistant really",
    ]


def test_results_come_right_after_their_calls() -> None:
    rendered = render(
        segment(
            call("c1"),
            call("c2"),
            message("wait", "developer"),
            output("c2", "b"),
            message("so?"),
            output("c1", "a"),
        )
    )
    assert shape(rendered) == ["assistant c1 c2", "tool a -> c1", "tool b -> c2", "system wait", "user so?"]


def test_results_of_the_last_response_come_first() -> None:
    before = segment(message("go"), call("c1", turn=1), call("c2", turn=1))
    after = segment(message("so?"), output("c2", "b"), output("c1", "a"))
    assert shape(render(before, after)) == [
        "user go",
        "assistant c1 c2",
        "tool a -> c1",
        "tool b -> c2",
        "user so?",
    ]


def test_hosted_calls_that_clients_give_back_come_before_the_text_after_them() -> None:
    rendered = render(segment(hosted("h1", "a"), hosted("h2", "b"), message("done", "assistant")))
    assert shape(rendered) == ["assistant h1 h2", "tool a -> h1", "tool b -> h2", "assistant done"]


def test_ids_that_are_used_again() -> None:
    rendered = render(segment(call("c"), output("c", "a"), call("c"), output("c", "b")))
    assert shape(rendered) == ["assistant c", "tool a -> c", "assistant c", "tool b -> c"]


def test_custom_tools_are_functions_with_one_input() -> None:
    item = {"type": "custom_tool_call", "call_id": "c", "name": "grep", "input": "a\nb"}
    answer = {"type": "custom_tool_call_output", "call_id": "c", "output": "found"}
    rendered = render(segment(entry(item, 1)), segment(entry(answer)))
    assert rendered[0]["tool_calls"][0]["function"] == {"name": "grep", "arguments": '{"input":"a\\nb"}'}
    assert shape(rendered) == ["assistant c", "tool found -> c"]


def test_a_call_without_result_is_an_error() -> None:
    told = "No tool output found for function call c1."
    assert refused(segment(call("c1", turn=1))).message == told
    assert refused(segment(call("c1", turn=1)), segment(message("go on"))).message == told
    assert refused(segment(call("c1"), message("go on"))).message == told
    half = segment(call("c0", turn=1), call("c1", turn=1))
    assert refused(half, segment(output("c0", "a"))).message == told


def test_a_result_without_call_is_an_error() -> None:
    told = "No tool call found for function call output with call_id c9."
    assert refused(segment(message("go"), output("c9", "a"))).message == told


def test_a_call_that_was_cut_off_is_not_shown() -> None:
    before = segment(
        message("go"), message("I", "assistant", 1), call("c1", '{"x', turn=1, status="incomplete")
    )
    assert shape(render(before, segment(message("again")))) == ["user go", "assistant I", "user again"]


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("", "{}"),
        ('{"x', '{"invalid_json":"{\\"x"}'),
        ("[1]", '{"invalid_json":"[1]"}'),
        ('{"x": 1}', '{"x": 1}'),
    ],
)
def test_arguments_are_always_an_object(written: str, shown: str) -> None:
    for made in (call("c", written), hosted("c", "", arguments=written)):
        rendered = render(segment(made, *([output("c", "")] if made.exchange is None else [])))
        assert rendered[0]["tool_calls"][0]["function"]["arguments"] == shown


# --- pictures and reasoning ---------------------------------------------------------------------------


def test_pictures_follow_the_results_where_the_model_sees() -> None:
    given = segment(hosted("h1", "[figure 1]", turn=1, images=[PICTURE]), hosted("h2", "b", turn=1))
    seeing = render(given, dialect=Dialect(takes_images=True))
    assert shape(seeing) == ["assistant h1 h2", "tool [figure 1] -> h1", "tool b -> h2", "user"]
    assert seeing[3]["content"] == snapshot(
        [
            {"type": "text", "text": "What the calls above showed:"},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        ]
    )
    assert shape(render(given)) == ["assistant h1 h2", "tool [figure 1] -> h1", "tool b -> h2"]


def test_pictures_wait_for_the_clients_results() -> None:
    before = segment(hosted("h1", "a", turn=1, images=[PICTURE]), call("c1", turn=1))
    picture = {"type": "input_image", "image_url": PICTURE}
    after = segment(output("c1", [{"type": "input_text", "text": "b"}, picture]), message("and?"))
    seeing = render(before, after, dialect=Dialect(takes_images=True))
    assert shape(seeing) == ["assistant h1 c1", "tool a -> h1", "tool b -> c1", "user", "user and?"]
    assert len(seeing[3]["content"]) == 3
    blind = render(before, after)
    assert len(blind[3]["content"]) == 2, "what the client itself shows is always shown"


def test_a_result_of_pictures_alone_says_where_they_are() -> None:
    picture = {"type": "input_image", "image_url": PICTURE}
    rendered = render(segment(call("c1"), output("c1", [picture])))
    assert shape(rendered) == ["assistant c1", "tool (in the message after the results) -> c1", "user"]


def test_reasoning_is_replayed_on_demand() -> None:
    summary = entry({"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}]}, 2)
    given = segment(
        thought("hm", 1),
        thought("so", 1),
        message("a", "assistant", 1),
        summary,
        message("b", "assistant", 2),
    )
    assert render(given) == [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert render(given, dialect=Dialect(replay_reasoning=True)) == [
        {"role": "assistant", "content": "a", "reasoning_content": "hm\nso"},
        {"role": "assistant", "content": "b", "reasoning_content": "short"},
    ]


# --- what is kept -------------------------------------------------------------------------------------


def test_a_segment_is_rendered_once() -> None:
    first, second = segment(message("a"), call("c1", turn=1)), segment(output("c1", "b"))
    renderer = ChatRenderer(Dialect())
    once = b",".join(renderer.messages(None, [first, second]))
    for part in (first, second):
        for key in part.renderings:
            part.renderings[key] = part.renderings[key].replace(b'"a"', b'"A"').replace(b'"b"', b'"B"')
    again = b",".join(renderer.messages(None, [first, second]))
    assert again == once.replace(b'"a"', b'"A"').replace(b'"b"', b'"B"')


def test_dialects_do_not_share() -> None:
    given = segment(message("d", "developer"), hosted("h", "x", images=[PICTURE]))
    flags = itertools.product([False, True], repeat=3)
    dialects = [Dialect(developer_role=a, takes_images=b, replay_reasoning=c) for a, b, c in flags]
    assert len({dialect.name for dialect in dialects}) == 8
    fresh = [render(segment(*given.entries), dialect=dialect) for dialect in dialects]
    assert [render(given, dialect=dialect) for dialect in dialects] == fresh
    assert len(given.renderings) <= 17


@pytest.mark.parametrize("lost", ["", ">"])
def test_half_of_what_was_kept_is_as_good_as_nothing(lost: str) -> None:
    """Somebody beside the loop may have let go of it, and be about to keep it again."""
    given, dialect = segment(message("a"), call("c1", turn=1)), Dialect()
    expected = render(given, segment(output("c1", "b")), dialect=dialect)
    del given.renderings[dialect.name + lost]
    assert render(given, segment(output("c1", "b")), dialect=dialect) == expected


def test_whoever_names_many_models_does_not_have_as_many_copies_kept() -> None:
    large = tuple(segment(message(text * 20_000)) for text in "abc")
    stretch = Stretch(large)
    for name in map(str, range(20)):
        for conversation in (Conversation((stretch,)), large):
            render_all(conversation, name, lambda entries, _: (entries[0].raw, b"left"))
            kept = [sum(map(len, one.renderings.values())) for one in large]
            assert all(held <= 3 * one.size for held, one in zip(kept, large, strict=True))
            assert (
                sum(len(said) + len(left) for said, left in stretch.renderings.values()) <= 3 * stretch.size
            )
    assert all(one.renderings for one in (stretch, *large))


def test_the_same_call_left_open_by_another_conversation() -> None:
    answer = segment(output("c1", "a"), output("c2", "b"))
    one = render(segment(call("c1", turn=1), call("c2", turn=1)), answer)
    other = render(segment(call("c2", turn=1), call("c1", turn=1)), answer)
    assert shape(one) == ["assistant c1 c2", "tool a -> c1", "tool b -> c2"]
    assert shape(other) == ["assistant c2 c1", "tool b -> c2", "tool a -> c1"]


@st.composite
def responses(draw: st.DrawFn) -> list[list[Entry]]:
    """Responses of one conversation, each its input and its turns; calls of clients are answered in the next."""
    ids = itertools.count()
    open_calls: list[str] = []
    made: list[list[Entry]] = []
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
                    entries.append(thought("h", turn))
                elif kind == "hosted":
                    entries.append(hosted(call_id, "r", turn=turn, images=[PICTURE]))
                elif turn == turns:
                    open_calls.append(call_id)
                    entries.append(call(call_id, turn=turn))
        made.append(entries)
    made.append([message("u"), *(output(call_id, "r") for call_id in open_calls)])
    return made


@given(responses(), st.booleans())
def test_every_call_is_answered_in_order(made: list[list[Entry]], takes_images: bool) -> None:
    dialect = Dialect(takes_images=takes_images)
    messages = render(*(Segment(tuple(entries)) for entries in made), dialect=dialect)
    expected: list[str] = []
    for said in messages:
        if said["role"] == "tool":
            assert said["tool_call_id"] == expected.pop(0)
        else:
            assert expected == []
            expected = [made_call["id"] for made_call in said.get("tool_calls", [])]
    assert expected == []


@given(responses())
def test_a_response_in_parts_is_the_response(made: list[list[Entry]]) -> None:
    """While it runs, each of its turns is a segment; once it is kept, it is one."""
    whole = render(*(Segment(tuple(entries)) for entries in made))
    parts = [
        Segment(tuple(group))
        for entries in made
        for _, group in itertools.groupby(entries, key=lambda item: item.turn)
    ]
    assert render(*parts) == whole


@given(responses(), st.data())
def test_in_whatever_pieces_a_conversation_is_the_same(made: list[list[Entry]], data: st.DataObject) -> None:
    """Also where a part of it was rendered before, alone or in other stretches, and for models of all kinds."""
    segments = [Segment(tuple(entries)) for entries in made]
    expected = {
        flag: render(*map(Segment, map(tuple, made)), dialect=Dialect(takes_images=flag))
        for flag in (False, True)
    }
    for _ in range(3):
        begin = data.draw(st.integers(0, len(segments) - 1))
        end = data.draw(st.integers(begin, len(segments)))
        stretch = Stretch(tuple(segments[begin:end]))
        whole = Conversation((*segments[:begin], stretch, *segments[end:]))
        for flag in data.draw(st.permutations([False, True])):
            dialect = Dialect(takes_images=flag)
            assert render(*whole, dialect=dialect) == expected[flag]
            for _ in range(2):
                assert rendered(whole, dialect) == expected[flag]
            assert render(*segments, dialect=dialect) == expected[flag]


def test_a_stretch_is_rendered_once_and_its_segments_keep_nothing() -> None:
    segments = tuple(segment(message(text), message(text.upper(), "assistant", turn=1)) for text in "abc")
    stretch, dialect = Stretch(segments), Dialect()
    once = rendered(Conversation((segments[0], Stretch(segments[1:]))), dialect)
    assert rendered(Conversation((stretch,)), dialect) == once
    assert [one.renderings for one in segments] == [{}, {}, {}]
    ((name, (text, left)),) = stretch.renderings.items()
    stretch.renderings[name] = (text.replace(b'"b"', b'"x"'), left)
    assert [said["content"] for said in rendered(Conversation((stretch,)), dialect)] == [
        "a",
        "A",
        "x",
        "B",
        "c",
        "C",
    ]


def test_what_a_stretch_leaves_open_is_answered_after_it() -> None:
    open_call, closed = segment(message("a"), call("c1", turn=1)), segment(output("c1", "r"))
    for pieces in (
        (Stretch((open_call,)), Stretch((closed,))),
        (Stretch((open_call,)), closed),
        (open_call, Stretch((closed,))),
    ):
        for _ in range(2):
            assert shape(rendered(Conversation(pieces), Dialect())) == [
                "user a",
                "assistant c1",
                "tool r -> c1",
            ]
    with pytest.raises(InvalidRequest, match="c1"):
        rendered(Conversation((Stretch((open_call,)),)), Dialect())


def test_a_large_stretch_stays_in_its_parts() -> None:
    segments = tuple(segment(message("a" * 400_000)) for _ in range(3))
    parts = ChatRenderer(Dialect()).messages(None, Conversation((Stretch(segments), segment(message("b")))))
    assert [len(part) > 400_000 for part in parts] == [True, True, True, False]
    assert all(one.renderings for one in segments)


# --- calls whose results are items of their own ---------------------------------------------------------


def test_calls_and_results_that_are_two_items() -> None:
    turn = segment(
        message("go"),
        shell_call("a", turn=1),
        hosted("b", "two", turn=1),
        shell_output("a", "one", turn=1, images=[PICTURE]),
        message("done", "assistant", turn=2),
    )
    shown = render(turn, dialect=Dialect(takes_images=True))
    assert shape(shown)[:4] == ["user go", "assistant a b", "tool one -> a", "tool two -> b"]
    assert shown[4]["content"][1]["image_url"] == {"url": PICTURE}


def test_two_items_that_a_client_gives_back() -> None:
    given = segment(
        message("go"),
        shell_call("a"),
        shell_output("a", "1"),
        shell_call("b"),
        shell_call("c"),
        shell_output("c", "3"),
    )
    assert shape(render(given)) == ["user go", "assistant a", "tool 1 -> a", "assistant c", "tool 3 -> c"]
    assert shape(render(segment(message("go"), shell_output("a", "1")))) == ["user go"]
