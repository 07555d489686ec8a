"""Calls and their results as chat completions servers are shown them."""

import pytest

from fumehood.models.rendering.server_features import ServerFeatures
from tests.support.chat_messages import IMAGE_URL, render, render_refused, summarize_messages
from tests.support.conversations import (
    call,
    entry,
    hosted_call,
    message,
    output,
    reasoning,
    segment,
    shell_call,
    shell_output,
)


def test_one_turn_is_one_message() -> None:
    rendered = render(
        segment(
            message("go"),
            reasoning("hm", turn=1),
            message("I ", "assistant", turn=1),
            hosted_call("h1", "1\n", turn=1),
            call("c1", '{"x":1}', turn=1),
            message("compute", "assistant", turn=1),
            hosted_call("h2", "2\n", turn=1, arguments='{"code":"2"}'),
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
            hosted_call("h1", "a", turn=1),
            hosted_call("h2", "b", turn=2),
            message("done", "assistant", turn=3),
        )
    )
    assert summarize_messages(rendered) == [
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
            reasoning("hm"),
            call("c4"),
            output("c4", "d"),
            message("done", "assistant"),
            message("really", "assistant"),
        )
    )
    assert summarize_messages(rendered) == [
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
    assert summarize_messages(rendered) == [
        "assistant c1 c2",
        "tool a -> c1",
        "tool b -> c2",
        "system wait",
        "user so?",
    ]


def test_results_of_the_last_response_come_first() -> None:
    before = segment(message("go"), call("c1", turn=1), call("c2", turn=1))
    after = segment(message("so?"), output("c2", "b"), output("c1", "a"))
    assert summarize_messages(render(before, after)) == [
        "user go",
        "assistant c1 c2",
        "tool a -> c1",
        "tool b -> c2",
        "user so?",
    ]


def test_hosted_calls_that_clients_give_back_come_before_the_text_after_them() -> None:
    rendered = render(segment(hosted_call("h1", "a"), hosted_call("h2", "b"), message("done", "assistant")))
    assert summarize_messages(rendered) == [
        "assistant h1 h2",
        "tool a -> h1",
        "tool b -> h2",
        "assistant done",
    ]


def test_ids_that_are_used_again() -> None:
    rendered = render(segment(call("c"), output("c", "a"), call("c"), output("c", "b")))
    assert summarize_messages(rendered) == ["assistant c", "tool a -> c", "assistant c", "tool b -> c"]


def test_custom_tools_are_functions_with_one_input() -> None:
    item = {"type": "custom_tool_call", "call_id": "c", "name": "grep", "input": "a\nb"}
    answer = {"type": "custom_tool_call_output", "call_id": "c", "output": "found"}
    rendered = render(segment(entry(item, 1)), segment(entry(answer)))
    assert rendered[0]["tool_calls"][0]["function"] == {"name": "grep", "arguments": '{"input":"a\\nb"}'}
    assert summarize_messages(rendered) == ["assistant c", "tool found -> c"]


def test_a_call_without_result_is_an_error() -> None:
    message_text = "No tool output found for function call c1."
    assert render_refused(segment(call("c1", turn=1))).message == message_text
    assert render_refused(segment(call("c1", turn=1)), segment(message("go on"))).message == message_text
    assert render_refused(segment(call("c1"), message("go on"))).message == message_text
    half = segment(call("c0", turn=1), call("c1", turn=1))
    assert render_refused(half, segment(output("c0", "a"))).message == message_text


def test_a_result_without_call_is_an_error() -> None:
    message_text = "No tool call found for function call output with call_id c9."
    assert render_refused(segment(message("go"), output("c9", "a"))).message == message_text


def test_a_call_that_was_cut_off_is_not_shown() -> None:
    before = segment(
        message("go"), message("I", "assistant", 1), call("c1", '{"x', turn=1, status="incomplete")
    )
    assert summarize_messages(render(before, segment(message("again")))) == [
        "user go",
        "assistant I",
        "user again",
    ]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("", "{}"),
        ('{"x', '{"invalid_json":"{\\"x"}'),
        ("[1]", '{"invalid_json":"[1]"}'),
        ('{"x": 1}', '{"x": 1}'),
    ],
)
def test_arguments_are_always_an_object(written: str, expected: str) -> None:
    for made in (call("c", written), hosted_call("c", "", arguments=written)):
        rendered = render(segment(made, *([output("c", "")] if made.exchange is None else [])))
        assert rendered[0]["tool_calls"][0]["function"]["arguments"] == expected


# --- calls whose results are items of their own ---------------------------------------------------------


def test_calls_and_results_that_are_two_items() -> None:
    turn = segment(
        message("go"),
        shell_call("a", turn=1),
        hosted_call("b", "two", turn=1),
        shell_output("a", "one", turn=1, images=[IMAGE_URL]),
        message("done", "assistant", turn=2),
    )
    expected = render(turn, features=ServerFeatures(takes_images=True))
    assert summarize_messages(expected)[:4] == ["user go", "assistant a b", "tool one -> a", "tool two -> b"]
    assert expected[4]["content"][1]["image_url"] == {"url": IMAGE_URL}


def test_shell_calls_that_a_client_sends_back() -> None:
    items = segment(
        message("go"),
        shell_call("a"),
        shell_output("a", "1"),
        shell_call("b"),
        shell_call("c"),
        shell_output("c", "3"),
    )
    assert summarize_messages(render(items)) == [
        "user go",
        "assistant a",
        "tool 1 -> a",
        "assistant c",
        "tool 3 -> c",
    ]
    assert summarize_messages(render(segment(message("go"), shell_output("a", "1")))) == ["user go"]
