"""The model that is none."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from inline_snapshot import snapshot
from msgspec import Raw

from fumehood.models.direct_execution import DirectExecutionBackend
from fumehood.protocol.conversation import ConversationEntry, ConversationSegment, ToolExchange
from fumehood.protocol.model_turns import (
    AnyModelEvent,
    ModelCallArgumentsDelta,
    ModelCallStarted,
    ModelRequest,
    ModelTextDelta,
    ModelTurnEnded,
)
from fumehood.protocol.openai.responses import Usage
from fumehood.protocol.openai.tool_specs import ModelToolDefinition
from tests.support.conversations import call, hosted_call, message, output, segment, shell_call

INTERPRETER = ModelToolDefinition(name="code_interpreter", description="", parameters=Raw(b"{}"))
OTHER = ModelToolDefinition(name="other", description="", parameters=Raw(b"{}"))


def request(*entries: ConversationEntry, **more: object) -> ModelRequest:
    fields: dict[str, object] = {
        "function_tools": [INTERPRETER],
        "segments": [ConversationSegment(entries)],
        **more,
    }
    return ModelRequest(model="direct", **fields)  # pyright: ignore[reportArgumentType]


async def turn(model_request: ModelRequest) -> list[AnyModelEvent]:
    return [event async for batch in DirectExecutionBackend().stream(model_request) for event in batch]


async def code(text: str) -> str | None:
    """What it would run."""
    events = await turn(request(message(text)))
    arguments = "".join(event.delta for event in events if isinstance(event, ModelCallArgumentsDelta))
    return msgspec.json.decode(arguments)["code"] if arguments else None


async def answer(model_request: ModelRequest) -> str:
    events = await turn(model_request)
    assert isinstance(events[-1], ModelTurnEnded)
    assert events[-1].reason == "stop"
    return "".join(event.delta for event in events if isinstance(event, ModelTextDelta))


async def test_a_call() -> None:
    started, *arguments, end = await turn(request(message("```python\nprint(1)\n```")))
    assert isinstance(started, ModelCallStarted)
    assert (started.key, started.name) == (0, "code_interpreter")
    assert 1 < len(arguments) <= 4
    assert isinstance(end, ModelTurnEnded)
    assert end == ModelTurnEnded("calls", Usage(input_tokens=17, output_tokens=5, total_tokens=22))


@pytest.mark.parametrize("output_text", ["42\n", [{"type": "input_text", "text": "42"}]])
async def test_a_call_that_the_client_has_answered(output_text: object) -> None:
    past = request(
        message("```\nprint(6 * 7)\n```"), call("c", name="code_interpreter"), output("c", output_text)
    )
    assert await answer(past) == "42"


@pytest.mark.parametrize(
    ("text", "run"),
    [
        ("```python\nprint(1)\n```", "print(1)"),
        ("Please:\n```py\na = 1\n```\nthen\n```\nprint(a)\n```\nthanks", "a = 1\nprint(a)"),
        ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''"),
        ("~~~Python title=x\n1\n~~~", "1"),
        ("```bash\nls\n```\n```python\n1\n```", "1"),
        ("print(1)", "print(1)"),
        ("  x = 1\n", "x = 1"),
        ("2 + 2", "2 + 2"),
        ("import os\nos.listdir()", "import os\nos.listdir()"),
        ("hello", None),
        ("hello, world", None),
        ("What is 2 + 2?", None),
        ("", None),
        ("# only a comment", None),
        ("(" * 10_000, None),
        ("x = '\0'", None),
    ],
)
async def test_code_detection(text: str, run: str | None) -> None:
    assert await code(text) == run


async def test_a_message_without_code_gets_a_hint() -> None:
    output_text = await answer(request(message("hello")))
    assert output_text == snapshot(
        "I am not a language model: I run the Python code of your message. Send code, best between ``` fences, "
        "and offer the code_interpreter tool. Commands between ```sh fences run in the shell tool."
    )
    assert await answer(request()) == output_text


@pytest.mark.parametrize(
    "more",
    [{"function_tools": []}, {"function_tools": [OTHER]}, {"tool_choice": "none"}, {"tool_choice": OTHER}],
    ids=range(4),
)
async def test_a_missing_tool_gets_a_hint(more: dict[str, object]) -> None:
    assert await answer(request(message("print(1)"), **more)) == snapshot(
        "I only run code, and this request does not let me: offer the code_interpreter tool."
    )


SHELL = ModelToolDefinition(name="shell", description="", parameters=Raw(b"{}"))
MIXED = "```sh\nls\n```\n```bash\npwd\n```\nthen\n```python\n1\n```\n```shell\nid\n```"


async def next_call(model_request: ModelRequest) -> tuple[str, object] | None:
    started, *rest = await turn(model_request)
    if not isinstance(started, ModelCallStarted):
        return None
    arguments = "".join(event.delta for event in rest if isinstance(event, ModelCallArgumentsDelta))
    return started.name, msgspec.json.decode(arguments)


def shell_result(call_id: str, output: str) -> list[ConversationEntry]:
    exchange = ToolExchange(call_id=call_id, name="shell", arguments="", output=output, half="result")
    said = ConversationEntry(type="shell_call_output", id=None, turn=1, raw=b"{}", exchange=exchange)
    return [shell_call(call_id, turn=1), said]


async def test_commands_run_in_the_shell_and_code_in_the_interpreter_one_after_another() -> None:
    both: dict[str, object] = {"function_tools": [INTERPRETER, SHELL]}
    past = [message(MIXED)]
    assert await next_call(request(*past, **both)) == ("shell", {"commands": ["ls\npwd"]})
    past += shell_result("a", "a.txt\n")
    assert await next_call(request(*past, **both)) == ("code_interpreter", {"code": "1"})
    past.append(hosted_call("b", "1", turn=2))
    assert await next_call(request(*past, **both)) == ("shell", {"commands": ["id"]})
    past += shell_result("c", "root\n")
    assert await answer(request(*past, **both)) == "a.txt\n1\nroot"


async def test_only_what_is_offered_runs() -> None:
    assert await next_call(request(message(MIXED))) == ("code_interpreter", {"code": "1"})
    assert await answer(request(message(MIXED), hosted_call("b", "1", turn=1))) == "1"
    commands = message("```sh\nls\n```")
    assert await next_call(request(commands, function_tools=[SHELL])) == ("shell", {"commands": ["ls"]})
    assert "offer the shell tool" in await answer(request(commands))
    assert "offer the shell and the code_interpreter tool" in await answer(
        request(message(MIXED), function_tools=[])
    )


async def test_a_forced_call_is_not_made_twice() -> None:
    past = [message(MIXED)]
    both: dict[str, object] = {"function_tools": [INTERPRETER, SHELL]}
    assert await next_call(request(*past, **both, tool_choice=INTERPRETER)) == (
        "code_interpreter",
        {"code": "1"},
    )
    past.append(hosted_call("b", "1", turn=1))
    assert await next_call(request(*past, **both)) == ("shell", {"commands": ["ls\npwd"]})


async def test_calls_that_the_client_has_answered_are_not_repeated() -> None:
    past = [message("```sh\nls\n```"), call("c", name="shell"), output("c", "a.txt")]
    assert await answer(request(*past, function_tools=[SHELL])) == "a.txt"


async def test_it_answers_with_the_output() -> None:
    model_request = message("print(1)")
    assert await answer(request(model_request, hosted_call("c", "1\n", turn=1))) == "1"
    assert (
        await answer(request(model_request, hosted_call("c", "", turn=1)))
        == "The code ran and printed nothing."
    )
    assert (
        await answer(request(model_request, hosted_call("c", "1\n", turn=1), hosted_call("d", "2\n", turn=2)))
        == "1\n2"
    )


async def test_in_several_segments() -> None:
    segments = [segment(message("print(1)")), segment(hosted_call("c", "1\n", turn=1))]
    assert await answer(request(segments=segments)) == "1"
    later = [*segments, segment(message("done", "assistant", 2)), segment(message("print(2)"))]
    assert isinstance((await turn(request(segments=later)))[0], ModelCallStarted)


async def test_it_links_the_files_that_are_named() -> None:
    output = "saved to /mnt/data/x.png.\nFiles: /mnt/data/a b.csv, /mnt/data/out/c.txt and 3 more\n"
    assert await answer(request(message("go()"), hosted_call("c", output, turn=1))) == snapshot("""\
saved to /mnt/data/x.png.
Files: /mnt/data/a b.csv, /mnt/data/out/c.txt and 3 more

[a b.csv](sandbox:/mnt/data/a b.csv)
[c.txt](sandbox:/mnt/data/out/c.txt)\
""")
    loose = "wrote '/mnt/data/x.png' and (/mnt/data/y.csv), see /mnt/data/x.png."
    assert await answer(request(message("go()"), hosted_call("c", loose, turn=1))) == snapshot("""\
wrote '/mnt/data/x.png' and (/mnt/data/y.csv), see /mnt/data/x.png.

[x.png](sandbox:/mnt/data/x.png)
[y.csv](sandbox:/mnt/data/y.csv)\
""")


async def test_messages_in_parts_and_other_roles() -> None:
    parts = [{"type": "input_text", "text": "```python\n1\n```"}, {"type": "input_image", "image_url": "x"}]
    events = await turn(request(message(parts), message("be brief", "developer"), message("ok", "assistant")))
    assert isinstance(events[0], ModelCallStarted)


async def test_without_a_user_message_the_system_message_is_run() -> None:
    prompt = message("## 1. Task\n\n```python\nprint(6 * 7)\n```", "system")
    assert await next_call(request(prompt)) == ("code_interpreter", {"code": "print(6 * 7)"})
    earlier = [message("```\n1\n```", "system"), hosted_call("a", "1\n")]
    assert await next_call(request(*earlier, prompt)) == ("code_interpreter", {"code": "print(6 * 7)"})
    assert await answer(request(*earlier, prompt, hosted_call("b", "42\n"))) == "42"
    files = message([{"type": "input_file", "file_id": "file-1"}])
    assert await next_call(request(prompt, files)) == ("code_interpreter", {"code": "print(6 * 7)"})
    assert await answer(request(prompt, files, hosted_call("b", "42\n"))) == "42"


@given(st.text())
async def test_it_always_answers(text: str) -> None:
    assert isinstance((await turn(request(message(text))))[-1], ModelTurnEnded)
