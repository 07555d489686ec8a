"""Conversion between the client's types and the JSON of the Responses API. No I/O.

`_responses_tool_spec`, `_responses_tool_choice` and `_normalize_input_messages` are aliases that the specification
names.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec

from fumehood.client import serde
from fumehood.client.adapters.provider_adapter import CitedFile, ToolChoice
from fumehood.client.budget import TokenUsage
from fumehood.client.dbc import require
from fumehood.client.prompt.tool import ProviderToolCallData
from fumehood.client.runtime.evaluation_observer import ModelResponseReceived

type Item = dict[str, Any]

NATIVE_NAMES = ("code_interpreter", "file_search", "web_search")
FILE_CITATION_TYPE = "container_file_citation"
EXECUTION_FIELD = "fumehood:execution"


# --- requests -----------------------------------------------------------------------------------------


def responses_tool_spec(spec: Mapping[str, Any], *, prompt_name: str = "") -> dict[str, Any]:
    """Convert a tool to the form of the Responses API: a flat function, or a native tool under its own type.

    Accepts the output of `tool_to_spec`, `{"type": "built_in", "name": …}`, and native tools by their type. Raises
    PromptValidationError for anything else.
    """
    kind = spec.get("type")
    if kind == "function":
        function = cast(Mapping[str, Any], spec.get("function") or spec)
        require(
            function.get("name") and isinstance(function.get("parameters"), Mapping),
            f"A function tool needs a name and parameters: {dict(spec)!r}.",
            prompt_name=prompt_name,
            payload=spec,
        )
        names = ("name", "description", "parameters", "strict")
        return {"type": "function", **{name: function[name] for name in names if name in function}}
    native = spec.get("name") if kind == "built_in" else kind
    require(
        native in NATIVE_NAMES,
        f"There is no native tool {native!r}; there is: {', '.join(NATIVE_NAMES)}.",
        prompt_name=prompt_name,
        payload=spec,
    )
    for name in ("parameters", "strict"):
        require(
            name not in spec,
            f"The native tool {native!r} takes no {name!r}: only functions have a schema.",
            prompt_name=prompt_name,
            payload=spec,
        )
    settings = {name: value for name, value in spec.items() if name not in ("type", "name")}
    return {"type": native, **serde.to_builtins(settings)}


def responses_tool_choice(
    choice: ToolChoice | None, tools: Sequence[Mapping[str, Any]], *, prompt_name: str = ""
) -> str | dict[str, Any] | None:
    """Return the `tool_choice` for these tools; None to send none.

    Raises PromptValidationError for an invalid choice, and for a tool that is not among them.
    """

    def check(holds: object, message: str) -> None:
        require(holds, f"tool_choice {choice!r}: {message}", prompt_name=prompt_name, payload=choice)

    if choice is None or isinstance(choice, str):
        check(
            choice in (None, "auto", "required", "none"), "it has to be auto, required, none or name a tool."
        )
        check(choice != "required" or tools, "the prompt has no tools that could be required.")
        return choice if tools else None
    check(isinstance(cast(object, choice), Mapping), "it has to be a word or a mapping.")
    kind = choice.get("type")
    if kind == "function":
        nested = choice.get("function")
        name = (
            cast(Mapping[str, object], nested).get("name")
            if isinstance(nested, Mapping)
            else choice.get("name")
        )
        check(name and isinstance(name, str), "a function is chosen by its name.")
        known = {tool.get("name") for tool in tools if tool["type"] == "function"}
        check(name in known, f"the prompt has no function {name!r}.")
        return {"type": "function", "name": name}
    native = choice.get("name") if kind == "built_in" else kind
    check(native in NATIVE_NAMES, "this shape is not supported.")
    check(any(tool["type"] == native for tool in tools), f"the prompt does not ask for {native!r}.")
    return {"type": native}


def normalize_input_messages(messages: Sequence[Mapping[str, Any]]) -> list[Item]:
    """Convert messages to items of an `input` array.

    An assistant's `tool_calls` become function_call items, a tool message becomes function_call_output; native calls
    and items of the Responses API stay exactly as they are.
    """
    items: list[Item] = []
    for message in messages:
        role = message.get("role")
        if role == "tool":
            output = message.get("content")
            text = output if isinstance(output, str) else serde.encode(output)
            items.append(
                {"type": "function_call_output", "call_id": message.get("tool_call_id"), "output": text}
            )
            continue
        calls = cast(Sequence[Mapping[str, Any]], message.get("tool_calls") or ())
        plain = {name: value for name, value in message.items() if name != "tool_calls"}
        if role != "assistant" or not calls or plain.get("content"):
            items.append(plain)
        items += [_input_call(call) for call in calls]
    return items


def _input_call(call: Mapping[str, Any]) -> Item:
    if call.get("type") not in ("function", None):
        return dict(call)
    function = cast(Mapping[str, Any], call.get("function") or call)
    arguments = function.get("arguments", "{}")
    return {
        "type": "function_call",
        "call_id": call.get("id") or call.get("call_id"),
        "name": function.get("name"),
        "arguments": arguments if isinstance(arguments, str) else serde.encode(arguments),
    }


_responses_tool_spec = responses_tool_spec
_responses_tool_choice = responses_tool_choice
_normalize_input_messages = normalize_input_messages


# --- responses ----------------------------------------------------------------------------------------


class WireUsage(msgspec.Struct):
    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0
    input_tokens_details: dict[str, Any] | None = None

    def as_token_usage(self) -> TokenUsage:
        cached = _int_or_zero((self.input_tokens_details or {}).get("cached_tokens"))
        return TokenUsage(self.input_tokens, self.output_tokens, cached, self.total_tokens)


class WireResponse(msgspec.Struct):
    """The fields of a response that are used; items are kept unchanged, so that they can be sent back."""

    id: str = ""
    model: str = ""
    status: str | None = None
    output: list[Item] = []
    usage: WireUsage | None = None
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, Any] | None = None
    request_id: str | None = None

    @property
    def finish_reason(self) -> str:
        """ "stop", or why it ended otherwise: "content_filter", "max_output_tokens", "refusal", …"""
        if self.incomplete_details:
            return str(self.incomplete_details.get("reason") or "incomplete")
        if self.status not in ("completed", None):
            return str(self.status)
        if self.status is None and not self.output:
            return "empty"
        return (
            "refusal"
            if any(part.get("type") == "refusal" for part in _iter_content_parts(self.output))
            else "stop"
        )


def build_response_event(response: WireResponse) -> ModelResponseReceived:
    """Build the event for observers."""
    return ModelResponseReceived(
        id=response.id,
        model=response.model,
        request_id=response.request_id,
        finish_reason=response.finish_reason,
        usage=response.usage.as_token_usage() if response.usage else None,
        output=response.output,
        container_ids=find_container_ids(response.output),
    )


def find_provider_calls(output: Sequence[Item]) -> list[ProviderToolCallData]:
    """Return the native tool calls of a response in order.

    Besides items of their own, there is an older form: `tool_calls` in the parts of a message.
    """
    found: list[ProviderToolCallData] = []
    for path, item in enumerate(output):
        later = tuple(iter_annotations(output[path + 1 :]))
        if _native_name(item):
            found.append(_build_call_data(item, later))
            continue
        for part in _iter_content_parts([item]):
            here = tuple(only_objects(part.get("annotations")))
            nested = only_objects(part.get("tool_calls"))
            found += [_build_call_data(call, (*here, *later)) for call in nested if _native_name(call)]
    return found


def find_container_ids(output: Sequence[Item]) -> list[str]:
    """Return the containers in which the provider has run calls."""
    return sorted({data.container_id for data in find_provider_calls(output) if data.container_id})


def find_function_calls(output: Sequence[Item]) -> list[Item]:
    return [item for item in output if item.get("type") == "function_call"]


def read_last_message(output: Sequence[Item]) -> str:
    """Return the text of the last message."""
    messages = [item for item in output if item.get("type") == "message"]
    return "".join(
        str(part.get("text") or "")
        for part in _iter_content_parts(messages[-1:])
        if part.get("type") == "output_text"
    )


def iter_annotations(output: Sequence[Item]) -> Iterator[Mapping[str, Any]]:
    """Yield all annotations of messages."""
    for part in _iter_content_parts(output):
        yield from only_objects(part.get("annotations"))


def find_cited_files(
    found: Sequence[Mapping[str, Any]], container_id: str | None = None
) -> tuple[CitedFile, ...]:
    """Return the produced files among annotations, each once; with a container id, those of that container."""
    files: dict[str, CitedFile] = {}
    for note in found:
        container, file_id = _string_or_none(note.get("container_id")), _string_or_none(note.get("file_id"))
        if note.get("type") != FILE_CITATION_TYPE or not (container and file_id):
            continue
        if container_id in (None, container):
            name = _string_or_none(note.get("filename")) or ""
            start, end = _int_or_zero(note.get("start_index")), _int_or_zero(note.get("end_index"))
            files.setdefault(file_id, CitedFile(container, file_id, name, start, end))
    return tuple(files.values())


# Responses are untrusted: a value of the wrong type counts as missing.


def only_objects(value: object) -> list[Item]:
    """Return the objects of an array."""
    return [one for one in cast(list[Any], value) if isinstance(one, dict)] if isinstance(value, list) else []


def _string_or_none(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _int_or_zero(value: object) -> int:
    return value if isinstance(value, int) else 0


def _iter_content_parts(output: Sequence[Item]) -> Iterator[Item]:
    for item in output:
        if item.get("type") == "message":
            yield from only_objects(item.get("content"))


def _native_name(item: Mapping[str, Any]) -> str | None:
    """Return the native tool of a call item."""
    kind = str(item.get("type") or "")
    kind = str(item.get("name") or "") if kind == "built_in" else kind
    name = kind.removesuffix("_call")
    return name if name in NATIVE_NAMES else None


def _build_call_data(item: Item, later: tuple[Mapping[str, Any], ...]) -> ProviderToolCallData:
    name = _native_name(item) or ""
    detail = item.get(name)  # nested in the older form
    inner: Item = {**item, **cast(Item, detail)} if isinstance(detail, dict) else item
    arguments = inner.get("arguments")
    return ProviderToolCallData(
        type=str(item.get("type")),
        name=name,
        id=_string_or_none(item.get("id")),
        call_id=_string_or_none(item.get("call_id")) or _string_or_none(item.get("id")),
        arguments=arguments if isinstance(arguments, str | None) else serde.encode(arguments),
        code=_string_or_none(inner.get("code")) or _string_or_none(inner.get("input")),
        container_id=_string_or_none(inner.get("container_id")),
        outputs=tuple(only_objects(inner.get("outputs")) or only_objects(inner.get("results"))),
        status=_string_or_none(inner.get("status")),
        annotations=later,
        raw=item,
    )
