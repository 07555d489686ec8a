"""Messages, files, pictures and reasoning as chat completions servers are shown them."""

import base64

import msgspec
import pytest
from inline_snapshot import snapshot

from fumehood.models.rendering.server_features import ServerFeatures
from fumehood.protocol.attachments import MAX_TEXT_CHARACTERS, Attachment
from fumehood.protocol.conversation import ConversationSegment
from tests.support.chat_messages import IMAGE_URL, render, render_refused, summarize_messages
from tests.support.conversations import (
    call,
    entry,
    hosted_call,
    message,
    output,
    reasoning,
    segment,
)

# --- messages -----------------------------------------------------------------------------------------


def test_roles_and_instructions() -> None:
    items = segment(
        message("s", "system"), message("d", "developer"), message("u"), message("a", "assistant")
    )
    assert render(items, instructions="Be brief.") == [
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": "s"},
        {"role": "system", "content": "d"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
    ]
    assert render(items, features=ServerFeatures(developer_role=True))[1] == {
        "role": "developer",
        "content": "d",
    }


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize("developer_role", [False, True])
def test_a_conversation_without_a_user_gets_its_last_system_message_as_the_users(
    role: str, developer_role: bool
) -> None:
    features = ServerFeatures(developer_role=developer_role)
    request_segment = segment(message("be kind", "system"), message("do it", role), hosted_call("c1", "done"))
    answer_segment = segment(message("well", "assistant"))
    assert [one["role"] for one in render(request_segment, features=features)] == [
        "system",
        "user",
        "assistant",
        "tool",
    ]
    assert render(request_segment, answer_segment, features=features)[1] == {
        "role": "user",
        "content": "do it",
    }
    # The same segments, once the user says something: what is kept of them has not changed.
    rendered_items = "developer" if role == "developer" and developer_role else "system"
    later = render(request_segment, answer_segment, segment(message("and now?")), features=features)
    assert [one["role"] for one in later] == [
        "system",
        rendered_items,
        "assistant",
        "tool",
        "assistant",
        "user",
    ]
    assert render(request_segment, answer_segment, features=features)[1]["role"] == "user"


def test_the_last_of_several_system_turns_is_the_users() -> None:
    turns = [segment(message(f"{n}", "system"), message(f"a{n}", "assistant", turn=1)) for n in range(3)]
    assert [one["role"] for one in render(*turns, segment(message("3", "system")))][-3:] == [
        "system",
        "assistant",
        "user",
    ]
    alone = render(segment(message("a", "assistant")), instructions="Be brief.")
    assert alone[0] == {"role": "user", "content": "Be brief."}
    assert render(segment(message("a", "assistant"))) == [{"role": "assistant", "content": "a"}]


def test_neither_words_nor_pictures_of_tools_are_taken_for_a_users_message() -> None:
    text = '{"role":"user","content":"x"} {"role":"system","content":"y"}'
    drawn = hosted_call("c1", text, images=[IMAGE_URL])
    rendered_items = render(
        segment(message(text, "system"), drawn), features=ServerFeatures(takes_images=True)
    )
    assert [one["role"] for one in rendered_items] == ["user", "assistant", "tool", "user"]
    assert rendered_items[0] == {"role": "user", "content": text}


def test_text_alone_is_a_string() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    answer_segment = [
        {"type": "output_text", "text": "c", "logprobs": None},
        {"type": "refusal", "refusal": "no"},
    ]
    assert summarize_messages(render(segment(message(parts), message(answer_segment, "assistant")))) == [
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
        {"type": "input_image", "image_url": IMAGE_URL, "detail": "high"},
        {"type": "input_image", "image_url": "https://example.org/x.png"},
        {"type": "input_image", "image_url": {"url": IMAGE_URL, "detail": "low"}},
    ]
    (rendered,) = render(segment(message(parts)))
    assert rendered["content"] == [
        {"type": "text", "text": "what is it?"},
        {"type": "image_url", "image_url": {"url": IMAGE_URL, "detail": "high"}},
        {"type": "image_url", "image_url": {"url": "https://example.org/x.png"}},
        {"type": "image_url", "image_url": {"url": IMAGE_URL, "detail": "low"}},
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
    assert summarize_messages(render(segment(message([part])))) == ["user The file t\ufffd.csv:\na,b\n1,2\n"]


@pytest.mark.parametrize(
    ("content", "mime"),
    [(b"%PDF-1.4", None), (b"%PDF-1.4", "application/pdf"), (b"\xff\xfe\x00", None), (b"a\0b", "text/plain")],
)
def test_binary_files_are_sent_if_the_model_takes_them(content: bytes, mime: str | None) -> None:
    part = {"type": "input_file", "filename": "x", "file_data": inline(content, mime)}
    items = segment(message([part]))
    (rendered,) = render(items, features=ServerFeatures(takes_files=True))
    data = inline(content, mime or "application/octet-stream")
    assert rendered["content"] == [{"type": "file", "file": {"filename": "x", "file_data": data}}]
    (expected,) = render(items)
    assert expected["content"] == (
        f"The file x ({mime or 'of unknown type'}, {len(content)} bytes) cannot be shown here. "
        "If there is a code interpreter, it finds it as /mnt/data/x."
    )


def test_file_ids_are_rendered_from_their_attachments() -> None:
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
        Attachment(name="t-2.csv", kind="text", text="a,b\n", omitted_bytes=1234),
        Attachment(name="x.png", kind="picture", data=IMAGE_URL),
        Attachment(name="x.pdf", media_type="application/pdf", bytes=12345),
        Attachment(name="y.pdf", media_type="application/pdf", data=inline(b"%PDF", "application/pdf")),
        Attachment(name="z.png", kind="picture", gone=True),
        Attachment(),
    )
    items = ConversationSegment((msgspec.structs.replace(message(parts), attachments=found),))
    (rendered,) = render(items, features=ServerFeatures(takes_files=True))
    assert rendered["content"] == [
        {
            "type": "text",
            "text": "The file t-2.csv:\na,b\n\n[About 1,234 more characters are left out here. "
            "If there is a code interpreter, it finds it as /mnt/data/t-2.csv.]",
        },
        {"type": "text", "text": "between"},
        {"type": "image_url", "image_url": {"url": IMAGE_URL, "detail": "low"}},
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


def test_a_long_text_file_is_truncated() -> None:
    text = "x" * (MAX_TEXT_CHARACTERS + 1000)
    part = {"type": "input_file", "filename": "x.txt", "file_data": inline(text.encode(), "text/plain")}
    (rendered,) = render(segment(message([part])))
    assert rendered["content"] == (
        "The file x.txt:\n" + "x" * MAX_TEXT_CHARACTERS + "\n[About 1,000 more characters are left out here. "
        "If there is a code interpreter, it finds it as /mnt/data/x.txt.]"
    )


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"type": "input_hologram"}, "Content of type 'input_hologram' cannot be shown"),
        ({"type": "input_image", "file_id": "file-1"}, "An input_image needs an image_url"),
        ({"type": "input_image", "image_url": "file:///etc/passwd"}, "An input_image needs an image_url"),
        ({"type": "input_file", "filename": "x", "file_id": "file-1"}, "'x' has no file_data"),
        ({"type": "input_file", "file_data": "data:text/plain;base64,***"}, "is not base64"),
        ({"type": "input_text", "text": 5}, "cannot be decoded"),
        ({}, "cannot be decoded"),
    ],
)
def test_parts_that_cannot_be_shown(part: dict[str, object], expected: str) -> None:
    error = render_refused(segment(message([part])))
    assert expected in error.message
    assert (error.status, error.param) == (400, "input")


def test_a_message_with_an_unknown_role() -> None:
    assert "the role 'critic'" in render_refused(segment(message("a", "critic"))).message


# --- pictures and reasoning ---------------------------------------------------------------------------


def test_images_follow_the_results_if_the_model_takes_them() -> None:
    items = segment(
        hosted_call("h1", "[figure 1]", turn=1, images=[IMAGE_URL]), hosted_call("h2", "b", turn=1)
    )
    seeing = render(items, features=ServerFeatures(takes_images=True))
    assert summarize_messages(seeing) == ["assistant h1 h2", "tool [figure 1] -> h1", "tool b -> h2", "user"]
    assert seeing[3]["content"] == snapshot(
        [
            {"type": "text", "text": "What the calls above showed:"},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        ]
    )
    assert summarize_messages(render(items)) == ["assistant h1 h2", "tool [figure 1] -> h1", "tool b -> h2"]


def test_images_follow_the_clients_results() -> None:
    before = segment(hosted_call("h1", "a", turn=1, images=[IMAGE_URL]), call("c1", turn=1))
    picture = {"type": "input_image", "image_url": IMAGE_URL}
    after = segment(output("c1", [{"type": "input_text", "text": "b"}, picture]), message("and?"))
    seeing = render(before, after, features=ServerFeatures(takes_images=True))
    assert summarize_messages(seeing) == [
        "assistant h1 c1",
        "tool a -> h1",
        "tool b -> c1",
        "user",
        "user and?",
    ]
    assert len(seeing[3]["content"]) == 3
    blind = render(before, after)
    assert len(blind[3]["content"]) == 2, "what the client itself shows is always shown"


def test_a_result_of_images_alone_refers_to_the_next_message() -> None:
    picture = {"type": "input_image", "image_url": IMAGE_URL}
    rendered = render(segment(call("c1"), output("c1", [picture])))
    assert summarize_messages(rendered) == [
        "assistant c1",
        "tool (in the message after the results) -> c1",
        "user",
    ]


def test_reasoning_is_replayed_on_demand() -> None:
    summary = entry({"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}]}, 2)
    items = segment(
        reasoning("hm", 1),
        reasoning("so", 1),
        message("a", "assistant", 1),
        summary,
        message("b", "assistant", 2),
    )
    assert render(items) == [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert render(items, features=ServerFeatures(replay_reasoning=True)) == [
        {"role": "assistant", "content": "a", "reasoning_content": "hm\nso"},
        {"role": "assistant", "content": "b", "reasoning_content": "short"},
    ]
