"""Projects stored input items to the form in which OpenAI lists them.

Clients may send items without ids and statuses, and with a plain string as content. They are stored unchanged; lists
show them completed with defaults.
"""

from collections.abc import Collection, Iterator

import msgspec
from msgspec import Raw

from fumehood.protocol.attachments import Attachment, is_file_part
from fumehood.protocol.conversation import ConversationEntry
from fumehood.protocol.openai.response_projection import (
    INCLUDE_CODE_OUTPUTS,
    INCLUDE_ENCRYPTED_REASONING,
    INCLUDE_EXECUTION,
    INCLUDE_IMAGE_URLS,
)

type Fields = dict[str, Raw]

# Fields that are shown only with an `include` value, by item type.
_INCLUDE_ONLY_FIELDS = {
    "code_interpreter_call": {"outputs": INCLUDE_CODE_OUTPUTS, INCLUDE_EXECUTION: INCLUDE_EXECUTION},
    "shell_call_output": {INCLUDE_EXECUTION: INCLUDE_EXECUTION},
    "reasoning": {"encrypted_content": INCLUDE_ENCRYPTED_REASONING},
}
_NULL = Raw(b"null")
_COMPLETED = Raw(b'"completed"')
_EMPTY_LIST = Raw(b"[]")
# Values of fields that are missing or null, by item type.
_DEFAULT_FIELDS: dict[str, Fields] = {
    "message": {"status": _COMPLETED, "role": Raw(b'"user"'), "content": _EMPTY_LIST},
    "function_call": {"status": _COMPLETED},
    "function_call_output": {"status": _COMPLETED},
    "custom_tool_call": {"status": _COMPLETED},
    "custom_tool_call_output": {"status": _COMPLETED},
    "code_interpreter_call": {"status": _COMPLETED, "container_id": Raw(b'""')},
    "shell_call": {"status": _COMPLETED},
    "shell_call_output": {"status": _COMPLETED, "output": _EMPTY_LIST},
    "local_shell_call": {"status": _COMPLETED},
    "local_shell_call_output": {"status": _COMPLETED},
    "apply_patch_call": {"status": _COMPLETED},
    "apply_patch_call_output": {"status": _COMPLETED},
    "reasoning": {"summary": _EMPTY_LIST},
    "output_text": {"annotations": _EMPTY_LIST},
    "input_image": {"detail": Raw(b'"auto"')},
}

_object_decoder = msgspec.json.Decoder(Fields)
_list_decoder = msgspec.json.Decoder(list[Raw])
_encode = msgspec.json.Encoder().encode


class _TypeTag(msgspec.Struct):
    type: str = ""


_tag_decoder = msgspec.json.Decoder(_TypeTag)


def project_item(entry: ConversationEntry, include: Collection[str]) -> Raw:
    """The item with the defaults of its type, without fields that need an `include` value."""
    fields: Fields = {"id": Raw(_encode(entry.id)), "type": Raw(_encode(entry.type))}
    fields |= _object_decoder.decode(entry.raw)
    if _is_null(fields["id"]):
        fields["id"] = Raw(_encode(entry.id))
    _fill_defaults(fields, entry.type)
    if entry.type == "message":
        by_assistant = bytes(fields["role"]) == b'"assistant"'
        fields["content"] = _project_content(
            fields["content"], by_assistant, entry, INCLUDE_IMAGE_URLS in include
        )
    for field, name in _INCLUDE_ONLY_FIELDS.get(entry.type, {}).items():
        if field in fields and name not in include:
            fields[field] = _NULL
    if INCLUDE_EXECUTION in fields and INCLUDE_EXECUTION not in include:
        del fields[INCLUDE_EXECUTION]
    return Raw(_encode(fields))


def _fill_defaults(fields: Fields, kind: str) -> None:
    for name, default in _DEFAULT_FIELDS.get(kind, {}).items():
        if name not in fields or _is_null(fields[name]):
            fields[name] = default


def _project_content(content: Raw, by_assistant: bool, entry: ConversationEntry, with_images: bool) -> Raw:
    """The content parts of a message; a string becomes one text part."""
    start = bytes(content)[:1]
    if start == b'"':
        kind = Raw(b'"output_text"' if by_assistant else b'"input_text"')
        part: Fields = {"type": kind, "text": content}
        if by_assistant:
            _fill_defaults(part, "output_text")
        return Raw(_encode([part]))
    if start != b"[":
        return content
    files = iter(entry.attachments)
    return Raw(_encode([_project_part(part, files, with_images) for part in _list_decoder.decode(content)]))


def _project_part(part: Raw, files: Iterator[Attachment], with_images: bool) -> Raw:
    if bytes(part)[:1] != b"{":
        return part
    kind = _tag_decoder.decode(part).type
    attachment = next(files, None) if is_file_part(kind) else None
    if kind not in _DEFAULT_FIELDS:
        return part
    fields = _object_decoder.decode(part)
    _fill_defaults(fields, kind)
    if kind == "input_image":
        if not with_images:
            fields["image_url"] = _NULL
        elif attachment is not None and attachment.data is not None:
            fields["image_url"] = Raw(_encode(attachment.data))
    return Raw(_encode(fields))


def _is_null(value: Raw) -> bool:
    return bytes(value) == b"null"
