"""The OpenAI SDK gives its own history back, in every form that people give it."""

from collections.abc import Callable
from typing import Any

import pytest
from openai.types.responses import Response

from tests.e2e.conftest import INTERPRETER, RunningGateway
from tests.support import client_conversation
from tests.support.gateway_process import reasoning_answer, text_answer


def as_they_are(response: Response) -> list[Any]:
    return list(response.output)


def dumped(response: Response) -> list[Any]:
    """With null for everything that is not there."""
    return [item.model_dump() for item in response.output]


def without(*names: str) -> Callable[[Response], list[Any]]:
    def stripped(response: Response) -> list[Any]:
        return [
            {name: value for name, value in item.items() if name not in names} for item in dumped(response)
        ]

    return stripped


def with_more(response: Response) -> list[Any]:
    """What other servers and newer clients add."""
    more = {"created_by": "somebody", "x_unknown": {"a": [1]}}
    parts = [item | more for item in dumped(response)]
    parts[-1]["content"][0] |= more
    return parts


def referred_to(response: Response) -> list[Any]:
    return [{"type": "item_reference", "id": item["id"]} for item in dumped(response)]


@pytest.mark.parametrize(
    ("form", "past"),
    [
        (as_they_are, client_conversation.SQUARED),
        (dumped, client_conversation.SQUARED),
        (without("outputs"), client_conversation.SQUARED),
        (without("outputs", "status"), client_conversation.SQUARED),
        (without("id"), client_conversation.FORGOTTEN),
        (without("id", "status", "outputs"), client_conversation.FORGOTTEN),
        (with_more, client_conversation.SQUARED),
        (referred_to, client_conversation.SQUARED),
    ],
    ids=["objects", "dumped", "no outputs", "no status", "no id", "bare", "more", "references"],
)
def test_history(gateway: RunningGateway, form: Callable[[Response], list[Any]], past: str) -> None:
    client_conversation.script(gateway.model, 1)
    first = gateway.client.responses.create(model="scripted", input="Square", tools=[INTERPRETER])
    history: Any = [{"role": "user", "content": "Square"}, *form(first), {"role": "user", "content": "Add"}]
    with gateway.strict.responses.stream(
        model="scripted", input=history, tools=[INTERPRETER], store=False
    ) as stream:
        code = "".join(
            event.delta for event in stream if event.type == "response.code_interpreter_call_code.delta"
        )
        second = stream.get_final_response()
    assert code == client_conversation.ADD
    assert second.output_text == client_conversation.SUM
    client_conversation.check(gateway.model, [past])


@pytest.mark.parametrize("store", [True, False], ids=["stored", "unstored"])
def test_reasoning_arrives_and_goes_back(gateway: RunningGateway, store: bool) -> None:
    """The strict SDK takes reasoning with a summary and encrypted content, and gives it back without its text."""
    gateway.model.script(reasoning_answer("Let me think.", "Yes"), text_answer("Still yes"))
    options: Any = {"model": "scripted-reasoning", "store": store, "include": ["reasoning.encrypted_content"]}
    with gateway.strict.responses.stream(input="Is it?", reasoning={"summary": "auto"}, **options) as stream:
        shown = "".join(
            event.delta for event in stream if event.type == "response.reasoning_summary_text.delta"
        )
        first = stream.get_final_response()
    assert shown == "Let me think."
    items: Any = [
        item.model_dump(exclude={"content"} if item.type == "reasoning" else None) for item in first.output
    ]
    gateway.strict.responses.create(
        input=[{"role": "user", "content": "Is it?"}, *items, {"role": "user", "content": "Sure?"}], **options
    )
    assert gateway.model.requests[1].json["messages"][1] == {
        "role": "assistant",
        "content": "Yes",
        "reasoning_content": "Let me think.",
    }


def test_a_call_that_fails_by_the_helper_of_the_sdk(gateway: RunningGateway) -> None:
    """Python's helper passes on events that it does not know."""
    gateway.model.script(*client_conversation.lost_sandbox())
    with gateway.client.responses.stream(model="scripted", input="Square", tools=[INTERPRETER]) as stream:
        types = [event.type for event in stream]
        final: Any = stream.get_final_response()
    assert "response.code_interpreter_call.failed" in types
    assert "response.code_interpreter_call.completed" not in types
    assert [item.status for item in final.output if item.type == "code_interpreter_call"] == ["failed"]
    assert final.output_text == client_conversation.LOST


def test_items_of_tools_that_are_not_ours(gateway: RunningGateway) -> None:
    """A conversation that began elsewhere goes on here."""
    client_conversation.script(gateway.model, 0)
    elsewhere: Any = [
        {"role": "user", "content": "News?"},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {
            "type": "web_search_call",
            "id": "ws_1",
            "status": "completed",
            "action": {"type": "search", "query": "n"},
        },
        {"type": "mcp_list_tools", "id": "mcpl_1", "server_label": "s", "tools": []},
        {"type": "image_generation_call", "id": "ig_1", "status": "completed", "result": "iVBORw0KGgo="},
        {
            "type": "local_shell_call",
            "id": "lsh_1",
            "call_id": "c1",
            "status": "completed",
            "action": {"type": "exec"},
        },
        {"type": "local_shell_call_output", "id": "c1", "output": "ok"},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "None."}],
        },
        {"type": "from_next_year", "surprise": True},
        {"role": "user", "content": "Square"},
    ]
    unknown: Any = [
        {"type": "web_search", "external_web_access": False},
        {"type": "namespace", "name": "n", "description": "d", "tools": []},
    ]
    body = {"client_metadata": {"thread_id": "t"}, "safety_identifier": None, "unheard_of": 1}
    response = gateway.strict.responses.create(
        model="scripted", input=elsewhere, tools=[*unknown, INTERPRETER], extra_body=body
    )
    assert response.output_text == client_conversation.LINK
    messages = gateway.model.requests[0].json["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant", "user"]
    assert [tool.type for tool in response.tools] == ["web_search", "namespace", "code_interpreter"]
    assert [tool["function"]["name"] for tool in gateway.model.requests[0].json["tools"]] == [
        "code_interpreter"
    ]
    listed = [item.type for item in gateway.client.responses.input_items.list(response.id, order="asc")]
    assert listed == [item.get("type", "message") for item in elsewhere]
