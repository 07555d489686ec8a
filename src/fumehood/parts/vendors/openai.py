"""OpenAI's Responses API: one item for call and outcome where OpenAI runs the tool; imports `fumehood.parts`."""

from fumehood.parts.canonical import (
    Blob,
    Execution,
    File,
    Json,
    JsonObject,
    Path,
    Reasoning,
    Text,
    Uri,
)
from fumehood.parts.lenses import at, text_at
from fumehood.parts.shapes import Claim, Field, Saying, Shape, Vendor, claims_of, fields

_CALL_ID = ("call_id",)


def _shell(item: JsonObject) -> Execution:
    """Only an environment that is a container is OpenAI's; none, or a local one, is the client's."""
    return "server" if (text_at(item, ("environment", "type")) or "").startswith("container") else "client"


def _searched(item: JsonObject) -> Execution:
    return "client" if item.get("execution") == "client" else "server"


SHAPES = (
    Shape(
        type="code_interpreter_call",
        kind="code_interpreter",
        call=fields(code="", container_id=""),
        result=fields(outputs=""),
        begins={
            "type": "code_interpreter_call",
            "status": "completed",
            "container_id": "",
            "code": None,
            "outputs": None,
        },
    ),
    Shape(
        type="file_search_call",
        kind="file_search",
        call=fields(queries=""),
        result=fields(results=""),
        begins={"type": "file_search_call", "status": "completed", "queries": [], "results": None},
    ),
    Shape(
        type="web_search_call",
        kind="web_search",
        call=(
            *fields(action="action.type", queries="action.queries", query="action.query"),
            *fields(url="action.url", pattern="action.pattern"),
        ),
        result=fields(results="action.sources"),
        begins={"type": "web_search_call", "status": "completed", "action": {"type": "search"}},
    ),
    Shape(
        type="image_generation_call",
        kind="image_generation",
        call=fields(prompt=""),
        result=fields(result="", revised_prompt=""),
        begins={"type": "image_generation_call", "status": "completed", "result": None},
    ),
    Shape(
        type="mcp_call",
        kind="mcp",
        call=fields(arguments="", server_label=""),
        result=fields(output="", error=""),
        name=("name",),
        failed=("error",),
        begins={"type": "mcp_call", "server_label": "", "name": "", "arguments": "{}"},
    ),
    Shape(
        type="function_call",
        kind="function",
        call=fields(arguments=""),
        call_id=_CALL_ID,
        name=("name",),
        execution="client",
        begins={"type": "function_call", "call_id": "", "name": "", "arguments": "{}"},
    ),
    Shape(
        type="function_call_output",
        kind="function",
        result=fields(result="output"),
        call_id=_CALL_ID,
        execution="client",
        begins={"type": "function_call_output", "call_id": "", "output": "", "status": "completed"},
    ),
    Shape(
        type="custom_tool_call",
        kind="function",
        call=fields(arguments="input"),
        call_id=_CALL_ID,
        name=("name",),
        execution="client",
    ),
    Shape(
        type="custom_tool_call_output",
        kind="function",
        result=fields(result="output"),
        call_id=_CALL_ID,
        execution="client",
    ),
    Shape(
        type="shell_call",
        kind="shell",
        call=(
            *fields(commands="action.commands", timeout_ms="action.timeout_ms"),
            *fields(container_id="environment.container_id"),
        ),
        call_id=_CALL_ID,
        execution=_shell,
        begins={"type": "shell_call", "status": "completed", "action": {"commands": []}},
    ),
    Shape(
        type="shell_call_output",
        kind="shell",
        result=fields(outputs="output|ran") + fields(outputs="output"),
        call_id=_CALL_ID,
        execution="client",
        begins={"type": "shell_call_output", "status": "completed", "max_output_length": None, "output": []},
    ),
    Shape(
        type="local_shell_call",
        kind="shell",
        call=(
            *fields(argv="action.command", working_directory="action.working_directory"),
            *fields(timeout_ms="action.timeout_ms"),
        ),
        call_id=_CALL_ID,
        execution="client",
    ),
    Shape(
        type="local_shell_call_output",
        kind="shell",
        result=fields(outputs="output|stdout"),
        call_id=_CALL_ID,
        execution="client",
    ),
    Shape(
        type="computer_call",
        kind="computer",
        call=fields(actions="", pending_safety_checks="") + fields(actions="action|one"),
        call_id=_CALL_ID,
        execution="client",
        begins={"type": "computer_call", "status": "completed", "pending_safety_checks": []},
    ),
    Shape(
        type="computer_call_output",
        kind="computer",
        result=fields(output="", acknowledged_safety_checks=""),
        call_id=_CALL_ID,
        execution="client",
        begins={"type": "computer_call_output"},
    ),
    Shape(
        type="apply_patch_call",
        kind="apply_patch",
        call=fields(operation=""),
        call_id=_CALL_ID,
        execution="client",
        begins={"type": "apply_patch_call", "status": "completed"},
    ),
    Shape(
        type="apply_patch_call_output",
        kind="apply_patch",
        result=fields(output=""),
        call_id=_CALL_ID,
        execution="client",
        begins={"type": "apply_patch_call_output", "status": "completed"},
    ),
    Shape(
        type="tool_search_call",
        kind="tool_search",
        call=fields(arguments=""),
        call_id=_CALL_ID,
        execution=_searched,
    ),
    Shape(
        type="tool_search_output",
        kind="tool_search",
        result=fields(tools=""),
        call_id=_CALL_ID,
        execution=_searched,
    ),
    Shape(type="program", kind="program", call=fields(code=""), call_id=_CALL_ID),
    Shape(type="program_output", kind="program", result=fields(result=""), call_id=_CALL_ID),
    Shape(
        type="mcp_list_tools",
        kind="mcp_list_tools",
        call=fields(server_label=""),
        result=fields(tools="", error=""),
        failed=("error",),
    ),
    Shape(
        type="mcp_approval_request",
        kind="mcp_approval",
        call=fields(server_label="", name="", arguments=""),
        execution="client",
    ),
    Shape(
        type="mcp_approval_response",
        kind="mcp_approval",
        result=fields(approve="", reason=""),
        call_id=("approval_request_id",),
        execution="client",
    ),
)
BY_TYPE = {shape.type: shape for shape in SHAPES}
_TEXTS = {"output_text": "text", "input_text": "text", "text": "text", "refusal": "refusal"}


def claims(item: JsonObject) -> list[Claim]:
    kind = item.get("type")
    # A message in a request may go without its type.
    if kind == "message" or (kind is None and "role" in item):
        return _said(item)
    if kind == "reasoning":
        return _thought(item)
    shape = BY_TYPE.get(kind) if isinstance(kind, str) else None
    return [] if shape is None else claims_of(item, shape)


def _said(item: JsonObject) -> list[Claim]:
    role = text_at(item, ("role",)) or "assistant"
    content = item.get("content")
    if isinstance(content, str):
        return [Claim(Text(content="", role=role), fields(content=""))]
    made: list[Claim] = []
    for number, entry in enumerate(content if isinstance(content, list) else []):
        if isinstance(entry, dict):
            made += _content(entry, ("content", number), role)
    return made


def _content(entry: JsonObject, place: Path, role: str) -> list[Claim]:
    kind = entry.get("type")
    if isinstance(kind, str) and kind in _TEXTS:
        return [Claim(Text(content="", role=role), (Field("content", (*place, _TEXTS[kind])),))]
    if kind == "input_image":
        return picture(entry, place, "image_url") or _filed(entry, place, "image")
    if kind == "input_file":
        return _filed(entry, place, "file")
    return []


def picture(entry: JsonObject, place: Path, key: str) -> list[Claim]:
    """A picture by its address, or in it."""
    url = entry.get(key)
    if not isinstance(url, str):
        return []
    if url.startswith("data:"):
        mime = url.removeprefix("data:").partition(";")[0]
        part = Blob(content="", modality=mime.partition("/")[0] or "image", mime_type=mime or None)
        return [Claim(part, (Field("content", (*place, key), "data_url"),))]
    return [Claim(Uri(uri="", modality="image"), (Field("uri", (*place, key)),))]


def _filed(entry: JsonObject, place: Path, modality: str) -> list[Claim]:
    if not isinstance(entry.get("file_id"), str):
        return []
    return [Claim(File(file_id="", modality=modality), (Field("file_id", (*place, "file_id")),))]


def _thought(item: JsonObject) -> list[Claim]:
    made: list[Claim] = []
    for key in ("summary", "content"):
        entries = item.get(key)
        for number, entry in enumerate(entries if isinstance(entries, list) else []):
            if isinstance(entry, dict):
                made.append(Claim(Reasoning(content=""), (Field("content", (key, number, "text")),)))
    return made


def places(document: Json) -> list[Path]:
    """A whole response has its items in `output`, a request or a stored list in `input` or `data`."""
    if not isinstance(document, dict) or "type" in document:
        return []
    return [(key,) for key in ("input", "output", "data") if isinstance(at(document, (key,)), list)]


VENDOR = Vendor(
    name="openai",
    title="OpenAI Responses",
    shapes=SHAPES,
    claims=claims,
    text=Saying(
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": ""}]},
        ("content", 0, "text"),
    ),
    asked=Saying(
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": ""}]},
        ("content", 0, "text"),
    ),
    reasoning=Saying(
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": ""}]}, ("summary", 0, "text")
    ),
    places=places,
)
