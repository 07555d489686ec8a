"""What an operator says about a model, checked before it is used."""

import re
from collections.abc import Mapping
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Raw

from fumehood.protocol.openai.passthrough_fields import SAMPLING_FIELDS, reserved_fields

_EXAMPLE_URL = "http://127.0.0.1:8000/v1"
_FIELD_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.:-]{0,63}")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")

# Fields of a request without which nothing would hold.
_RESERVED_FIELDS = {
    "chat_completions": ("messages", "stream"),
    "responses": ("input", "stream", "store", "previous_response_id", "conversation", "background"),
}

type RequestFields = dict[str, object]
type TimeoutSeconds = Annotated[float, Meta(gt=0, le=86_400)]


class Secret:
    """A value that shows itself only when it is asked to."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        return self._value

    def __repr__(self) -> str:
        return "Secret(…)"

    def __reduce__(self) -> str:
        raise TypeError("a Secret does not leave its process")


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of `models`: the names it serves, and by whom.

    match: names that clients use, with `*`, `?` and `[…]` as in a shell.
    backend: `chat_completions`, or `responses` for a server that speaks the Responses API itself, or `direct`, which
        runs the code of the user's message and needs no model.
    base_url: of the server, up to what comes before `/chat/completions` or `/responses`.
    name: the server's own name for it; without it, the client's is passed on.
    api_key_env: the environment variable that holds the key; api_key_header: where the server wants it, `Bearer` being
        put before it in `Authorization` alone.
    headers: more of them, for every request.
    context_window: in tokens.
    tokenize_url: where the server counts tokens: as vLLM's /tokenize does, or for `responses` as
        /v1/responses/input_tokens does. Without it they are estimated.
    takes_images: whether pictures that code made are shown to it. Those in a user's message always are.
    takes_files: whether PDFs and the like are sent to it, as `file` parts or `input_file`. Without a word, to a
        `responses` server they are, and to others only where the request has no tool that could open them.
    developer_role: whether it knows that role; else developers' messages are sent as the system's.
    replay_reasoning: whether it is shown the text of its earlier reasoning.
    max_tokens_field: by which name a chat completions server knows a limit of tokens.
    encrypted_reasoning: whether a `responses` server is asked for its reasoning under seal, and given it back.
    pass_tools: types of tools that a `responses` server is told of as they are, `*` for all; others are left out, but
        for custom tools, which are sent as functions then.
    pass_fields: fields of requests that the server is given as clients sent them, besides `SAMPLING_FIELDS`.
    connect_timeout, read_timeout: seconds until there is a connection, and seconds in which not one byte comes: before
        the first one, which of an answer in one piece is when the model is done, and between two.
    retries: how often a turn that has not begun is asked for again.
    trace_context: whether the server is told which trace a turn is part of, where traces are made.
    extra_body: fields of the request, over those that would be sent; null leaves one out.
    """

    match: Annotated[str, Meta(min_length=1, max_length=256)] = "*"
    backend: Literal["chat_completions", "responses", "direct"] = "chat_completions"
    base_url: str | None = None
    name: Annotated[str, Meta(min_length=1)] | None = None
    api_key_env: str | None = None
    api_key_header: str = "Authorization"
    headers: dict[str, str] = {}
    context_window: Annotated[int, Meta(gt=0)] | None = None
    tokenize_url: str | None = None
    takes_images: bool = False
    takes_files: bool | None = None
    developer_role: bool = False
    replay_reasoning: bool = False
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    encrypted_reasoning: bool = True
    pass_tools: list[str] = []
    pass_fields: Annotated[list[str], Meta(max_length=100)] = []
    connect_timeout: TimeoutSeconds = 10.0
    read_timeout: TimeoutSeconds = 600.0
    retries: Annotated[int, Meta(ge=0, le=10)] = 2
    trace_context: bool = True
    extra_body: RequestFields = {}

    def __post_init__(self) -> None:
        if self.backend == "direct":
            if self.base_url or self.api_key_env or self.name or self.tokenize_url or self.pass_fields:
                raise ValueError(
                    "the backend `direct` has no server: leave out base_url, tokenize_url, api_key_env, name and "
                    "pass_fields"
                )
            return
        if self.base_url is None:
            raise ValueError(f"base_url is missing: it says where the model server is, as {_EXAMPLE_URL}")
        check_url("base_url", self.base_url, _EXAMPLE_URL)
        if self.tokenize_url is not None:
            check_url("tokenize_url", self.tokenize_url, "http://127.0.0.1:8000/tokenize")
        for name, value in [*self.headers.items(), (self.api_key_header, "")]:
            if not _HEADER_NAME.fullmatch(name) or not _is_header_value(value):
                raise ValueError(f"{name!r} is not a header that can be sent")
        if self.backend == "chat_completions" and (self.pass_tools or not self.encrypted_reasoning):
            raise ValueError("pass_tools and encrypted_reasoning are for the backend `responses` only")
        self._check_pass_fields()
        for name in _RESERVED_FIELDS[self.backend]:
            if name in self.extra_body:
                raise ValueError(f"extra_body cannot set `{name}`")

    def _check_pass_fields(self) -> None:
        for name in self.pass_fields:
            if _FIELD_NAME.fullmatch(name) is None:
                raise ValueError(f"pass_fields: {name!r} is not the name of a field")
            if name in reserved_fields():
                raise ValueError(f"pass_fields cannot have `{name}`: the gateway decides about it")

    def __repr__(self) -> str:
        return f"<ModelSettings {self.match!r} {self.backend} {self.base_url or ''}>"

    def passes_tool(self, tool_type: str) -> bool:
        """Whether the server is told of tools of that type as they are."""
        return tool_type in self.pass_tools or "*" in self.pass_tools

    def add_passthrough_fields(self, fields: RequestFields, passthrough: Mapping[str, Raw]) -> None:
        """Those fields of a request that only the server understands, and may have."""
        for name, value in passthrough.items():
            if name in SAMPLING_FIELDS or name in self.pass_fields:
                fields[name] = value

    def apply_extra_body(self, fields: RequestFields) -> None:
        """`extra_body` over the fields of a request."""
        for name, value in self.extra_body.items():
            if value is None:
                fields.pop(name, None)
            else:
                fields[name] = value

    @property
    def sends_files(self) -> bool | None:
        return True if self.takes_files is None and self.backend == "responses" else self.takes_files

    @property
    def is_pattern(self) -> bool:
        return any(mark in self.match for mark in "*?[")

    def read_api_key(self, environment: Mapping[str, str]) -> Secret | None:
        """The key; raises ValueError, which does not show it."""
        if self.api_key_env is None:
            return None
        try:
            return Secret(read_secret(environment, self.api_key_env))
        except KeyError:
            raise ValueError(
                f"the environment variable {self.api_key_env} for the models {self.match!r} is not set"
            ) from None


# --- what other settings have, too ---


def read_secret(environment: Mapping[str, str], variable: str) -> str:
    """What a variable holds; raises KeyError if that is nothing, ValueError, which shows nothing, if it is no key."""
    value = environment.get(variable, "").strip()
    if not value:
        raise KeyError(variable)
    if not _is_header_value(value):
        raise ValueError(
            f"the environment variable {variable} does not hold a key: it is not printable ASCII"
        )
    return value


def _is_header_value(value: str) -> bool:
    return value.isascii() and value.isprintable()


def check_url(setting: str, url: str, example: str) -> None:
    """Raises ValueError, which shows no password."""
    try:
        parts = urlsplit(url)
        served = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        parts, served = urlsplit(""), False
    if parts.username is not None or parts.password is not None:
        raise ValueError(
            f"{setting} holds a user or a password: put the secret into a variable, and name that"
        )
    sendable = url.isascii() and url.isprintable() and " " not in url
    if not served or not sendable or parts.query or parts.fragment:
        shown = "" if "@" in url else f" {url!r}"  # or a password would be
        raise ValueError(f"{setting}{shown} is not the address of a server, as {example}")
