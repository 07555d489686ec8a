"""Rejects URLs in the content of chat messages that a model server would fetch and may not."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import msgspec
from msgspec import Raw

from fumehood.gateway.body_parsing import decode_json
from fumehood.protocol.openai.api_errors import InvalidRequest

# Returns why a URL may not be passed on to a model server, or None.
type FindUrlProblem = Callable[[str], str | None]

_URL = re.compile(r"\s*(?!data:)[a-z][a-z0-9+.-]*:", re.IGNORECASE)
_NO_URLS = frozenset(("text", "type", "id", "name", "filename", "detail"))


class _Message(msgspec.Struct):
    content: Raw = Raw(b"null")


_message_decoder = msgspec.json.Decoder(_Message)
_value_decoder: msgspec.json.Decoder[object] = msgspec.json.Decoder()


def reject_every_url(_url: str) -> str:
    """A `FindUrlProblem` that allows no URL."""
    return (
        "This server does not pass URLs on to the model server: send the content inline as a data: URL. The operator "
        "can allow URLs with inputs.pass_urls."
    )


def check_message_urls(messages: Sequence[Raw], find_problem: FindUrlProblem) -> None:
    """Raises InvalidRequest if a content part of a message has a URL that may not be passed on."""
    for number, message in enumerate(messages):
        content = bytes(decode_json(_message_decoder, bytes(message)).content)
        if content.startswith((b"[", b"{")):
            check_part_urls(f"messages[{number}].content", content, find_problem)


def check_part_urls(param: str, parts: bytes, find_problem: FindUrlProblem) -> None:
    """Raises InvalidRequest if an object of this JSON array, or this object, has a URL that may not be passed on."""
    decoded = decode_json(_value_decoder, parts)
    if isinstance(decoded, list):
        for number, part in enumerate(cast("list[object]", decoded)):
            _check_urls(f"{param}[{number}]", part, find_problem)
    else:
        _check_urls(param, decoded, find_problem)


def _check_urls(param: str, part: object, find_problem: FindUrlProblem) -> None:
    for url in _find_urls(part):
        if (problem := find_problem(url)) is not None:
            raise InvalidRequest(problem, param=param, code="invalid_value")


def _find_urls(value: object) -> Iterator[str]:
    """All URLs in an object, except in fields that hold text or names."""
    if isinstance(value, dict):
        for name, inner in cast("dict[str, object]", value).items():
            if isinstance(inner, str):
                if name not in _NO_URLS and _URL.match(inner) is not None:
                    yield inner
            else:
                yield from _find_urls(inner)
    elif isinstance(value, list):
        for inner in cast("list[object]", value):
            yield from _find_urls(inner)
