"""Chunks of a response of xAI's chat API, and the response without streaming."""

from typing import Any

type Object = dict[str, Any]


def call(number: int, kind: str, arguments: str, **more: Any) -> Object:
    made = {"id": f"call_{number}", "type": f"TOOL_CALL_TYPE_{kind}_TOOL"}
    return {**made, "function": {"name": kind.lower(), "arguments": arguments}, **more}


CODE = call(1, "CODE_EXECUTION", '{"code":"print(2)"}')
ENDED = {**CODE, "status": "TOOL_CALL_STATUS_COMPLETED"}
SEARCH = call(2, "WEB_SEARCH", '{"query":"q"}')
FAILED = {**SEARCH, "status": "TOOL_CALL_STATUS_FAILED", "error_message": "no network"}
CITED = {"id": "1", "start_index": 6, "web_citation": {"url": "https://e.x"}}


def output(index: int, reason: str | None = None, **delta: Any) -> Object:
    """Defaults are omitted, as in protobuf."""
    made: Object = {"delta": delta} if delta else {}
    return made | ({"index": index} if index else {}) | ({"finish_reason": reason} if reason else {})


def chunk(*outputs: Object, **more: Any) -> Object:
    return {"id": "x", "model": "grok-4", "created": "2026-01-12T10:30:45Z", "outputs": [*outputs], **more}


CHUNKS: list[Any] = [
    chunk(output(0, role="ROLE_ASSISTANT", reasoning_content="I com")),
    chunk(output(0, role="ROLE_ASSISTANT", reasoning_content="pute.")),
    chunk(output(0, role="ROLE_ASSISTANT", tool_calls=[CODE])),
    chunk(output(1, role="ROLE_TOOL", content="2\n", tool_calls=[ENDED])),
    chunk(output(2, role="ROLE_ASSISTANT", tool_calls=[SEARCH])),
    chunk(output(3, role="ROLE_TOOL", tool_calls=[FAILED])),
    chunk(output(4, role="ROLE_ASSISTANT", content="It is "), usage={"completion_tokens": 1}),
    chunk(output(4, role="ROLE_ASSISTANT", content="2.", citations=[CITED], encrypted_content="AA")),
    chunk(
        {
            **output(4, "REASON_STOP", role="ROLE_ASSISTANT", encrypted_content="A="),
            "logprobs": {"content": [{"token": "2."}]},
        },
        usage={"completion_tokens": 9},
        citations=["https://e.x"],
    ),
    {"id": "x", "citations": ["https://f.x"], "divination": {"by": "stars"}},
]
WHOLE: Any = {
    "id": "x",
    "model": "grok-4",
    "created": "2026-01-12T10:30:45Z",
    "outputs": [
        {"message": {"role": "ROLE_ASSISTANT", "reasoning_content": "I compute.", "tool_calls": [CODE]}},
        {"index": 1, "message": {"role": "ROLE_TOOL", "content": "2\n", "tool_calls": [ENDED]}},
        {"index": 2, "message": {"role": "ROLE_ASSISTANT", "tool_calls": [SEARCH]}},
        {"index": 3, "message": {"role": "ROLE_TOOL", "tool_calls": [FAILED]}},
        {
            "index": 4,
            "finish_reason": "REASON_STOP",
            "message": {
                "role": "ROLE_ASSISTANT",
                "content": "It is 2.",
                "citations": [CITED],
                "encrypted_content": "AAA=",
            },
            "logprobs": {"content": [{"token": "2."}]},
        },
    ],
    "usage": {"completion_tokens": 9},
    "citations": ["https://e.x", "https://f.x"],
    "divination": {"by": "stars"},
}
