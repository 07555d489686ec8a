"""What a response repeats of a tool that is not hosted here: nothing that may be a credential."""

from typing import cast
from urllib.parse import urlsplit

import msgspec
from msgspec import Raw

from fumehood.protocol.openai.tool_specs import ToolSpec

REDACTED = "<redacted>"


def redact_tool(spec: ToolSpec) -> bytes:
    """Return a tool; one of the type `mcp` without `authorization`, values of headers, and the path of its URL, which
    often has a token. OpenAI's API does the same, so clients send them with every request.
    """
    if spec.type != "mcp":
        return spec.raw
    tool = msgspec.json.decode(spec.raw, type=dict[str, Raw])
    tool.pop("authorization", None)
    if "headers" in tool:
        tool["headers"] = Raw(msgspec.json.encode(_redact_values(msgspec.json.decode(tool["headers"]))))
    if "server_url" in tool:
        tool["server_url"] = Raw(msgspec.json.encode(_redact_url(msgspec.json.decode(tool["server_url"]))))
    return msgspec.json.encode(tool)


def _redact_values(headers: object) -> object:
    if isinstance(headers, dict):
        return dict.fromkeys(cast("dict[str, object]", headers), REDACTED)
    return None if headers is None else REDACTED


def _redact_url(url: object) -> object:
    if url is None:
        return None
    try:
        parts = urlsplit(url if isinstance(url, str) else "")
    except ValueError:
        return REDACTED
    host = parts.netloc.rpartition("@")[2]
    if not parts.scheme or not host:
        return REDACTED
    secret = parts.path.strip("/") or parts.query or parts.fragment
    return f"{parts.scheme}://{host}" + (f"/{REDACTED}" if secret else parts.path)
