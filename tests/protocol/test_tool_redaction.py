"""What a response repeats of a tool that is not hosted here."""

import json
from typing import Any

import pytest
from msgspec import Raw

from fumehood.protocol.openai.tool_redaction import redact_tool
from fumehood.protocol.openai.tool_specs import parse_tool


def redact(**fields: Any) -> dict[str, Any]:
    return json.loads(
        redact_tool(parse_tool(Raw(json.dumps({"type": "mcp", **fields}).encode()), "tools[0]"))
    )


def test_other_tools_are_repeated_as_they_are() -> None:
    raw = b'{"type": "web_search",  "headers": {"a": "b"}}'
    assert redact_tool(parse_tool(Raw(raw), "tools[0]")) == raw


def test_credentials_are_left_out_and_everything_else_is_kept() -> None:
    tool = redact(
        server_label="wiki",
        server_url="https://wiki.example:8443",
        headers={"Authorization": "Bearer of-the-server", "X-Trace": None},
        authorization="of-the-server",
        allowed_tools=["search"],
        require_approval={"never": {"tool_names": ["search"]}},
    )
    assert tool == {
        "type": "mcp",
        "server_label": "wiki",
        "server_url": "https://wiki.example:8443",
        "headers": {"Authorization": "<redacted>", "X-Trace": "<redacted>"},
        "allowed_tools": ["search"],
        "require_approval": {"never": {"tool_names": ["search"]}},
    }


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (None, None),
        ("https://wiki.example", "https://wiki.example"),
        ("https://wiki.example/", "https://wiki.example/"),
        ("https://wiki.example/s/secret/mcp", "https://wiki.example/<redacted>"),
        ("https://wiki.example?key=secret", "https://wiki.example/<redacted>"),
        ("https://wiki.example/#secret", "https://wiki.example/<redacted>"),
        ("https://user:secret@wiki.example/", "https://wiki.example/"),
        ("https://[secret", "<redacted>"),
        ("secret", "<redacted>"),
        ("", "<redacted>"),
        (7, "<redacted>"),
    ],
)
def test_only_the_host_of_a_url_is_repeated(url: object, shown: object) -> None:
    assert redact(server_url=url)["server_url"] == shown


@pytest.mark.parametrize(
    ("headers", "shown"), [({}, {}), (None, None), ("secret", "<redacted>"), (["secret"], "<redacted>")]
)
def test_malformed_headers_are_not_repeated(headers: object, shown: object) -> None:
    assert redact(headers=headers)["headers"] == shown
