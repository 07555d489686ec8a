"""Items of a conversation as lists show them: complete, whatever their author left out; imports msgspec, `protocol`.

Clients write items in short forms, without ids and states, and with plain strings for content. They are kept as they
came; but whoever lists them expects OpenAI's long form, and finds the next page by the last id.
"""

from collections.abc import Collection, Iterator

import msgspec
from msgspec import Raw

from fumehood.protocol.attachments import Attachment, is_file
from fumehood.protocol.conversation import Entry
from fumehood.protocol.folding import ENCRYPTED_REASONING, EXECUTION, IMAGE_URLS, OUTPUTS

type Fields = dict[str, Raw]

# What an item shows only to those who ask, by the name of its field.
_ON_REQUEST = {
    "code_interpreter_call": {"outputs": OUTPUTS, EXECUTION: EXECUTION},
    "shell_call_output": {EXECUTION: EXECUTION},
    "reasoning": {"encrypted_content": ENCRYPTED_REASONING},
}
_NULL = Raw(b"null")
_COMPLETED = Raw(b'"completed"')
_NOTHING = Raw(b"[]")
# What is said for a field that is missing or null.
_USUAL: dict[str, Fields] = {
    "message": {"status": _COMPLETED, "role": Raw(b'"user"'), "content": _NOTHING},
    "function_call": {"status": _COMPLETED},
    "function_call_output": {"status": _COMPLETED},
    "custom_tool_call": {"status": _COMPLETED},
    "custom_tool_call_output": {"status": _COMPLETED},
    "code_interpreter_call": {"status": _COMPLETED, "container_id": Raw(b'""')},
    "shell_call": {"status": _COMPLETED},
    "shell_call_output": {"status": _COMPLETED, "output": _NOTHING},
    "reasoning": {"summary": _NOTHING},
    "output_text": {"annotations": _NOTHING},
    "input_image": {"detail": Raw(b'"auto"')},
}

_objects = msgspec.json.Decoder(Fields)
_lists = msgspec.json.Decoder(list[Raw])
_encode = msgspec.json.Encoder().encode


class _Tag(msgspec.Struct):
    type: str = ""


_tags = msgspec.json.Decoder(_Tag)


def shown(entry: Entry, include: Collection[str]) -> Raw:
    """The item without what was not asked for, and with everything that its type must have."""
    fields: Fields = {"id": Raw(_encode(entry.id)), "type": Raw(_encode(entry.type))}
    fields |= _objects.decode(entry.raw)
    if _is_null(fields["id"]):
        fields["id"] = Raw(_encode(entry.id))
    _complete(fields, entry.type)
    if entry.type == "message":
        by_assistant = bytes(fields["role"]) == b'"assistant"'
        fields["content"] = _content(fields["content"], by_assistant, entry, IMAGE_URLS in include)
    for field, name in _ON_REQUEST.get(entry.type, {}).items():
        if field in fields and name not in include:
            fields[field] = _NULL
    if EXECUTION in fields and EXECUTION not in include:
        del fields[EXECUTION]
    return Raw(_encode(fields))


def _complete(fields: Fields, kind: str) -> None:
    for name, usual in _USUAL.get(kind, {}).items():
        if name not in fields or _is_null(fields[name]):
            fields[name] = usual


def _content(content: Raw, by_assistant: bool, entry: Entry, with_images: bool) -> Raw:
    """The parts of a message; a text alone is one."""
    start = bytes(content)[:1]
    if start == b'"':
        kind = Raw(b'"output_text"' if by_assistant else b'"input_text"')
        part: Fields = {"type": kind, "text": content}
        if by_assistant:
            _complete(part, "output_text")
        return Raw(_encode([part]))
    if start != b"[":
        return content
    files = iter(entry.attachments)
    return Raw(_encode([_part(part, files, with_images) for part in _lists.decode(content)]))


def _part(part: Raw, files: Iterator[Attachment], with_images: bool) -> Raw:
    if bytes(part)[:1] != b"{":
        return part
    kind = _tags.decode(part).type
    found = next(files, None) if is_file(kind) else None
    if kind not in _USUAL:
        return part
    fields = _objects.decode(part)
    _complete(fields, kind)
    if kind == "input_image":
        if not with_images:
            fields["image_url"] = _NULL
        elif found is not None and found.data is not None:
            fields["image_url"] = Raw(_encode(found.data))
    return Raw(_encode(fields))


def _is_null(value: Raw) -> bool:
    return bytes(value) == b"null"
