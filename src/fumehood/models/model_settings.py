"""Settings of one model route, validated when they are loaded."""

import re
from collections.abc import Mapping
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Raw

from fumehood.configuration import Seconds
from fumehood.protocol.openai.passthrough_fields import SAMPLING_FIELDS, reserved_fields

_EXAMPLE_URL = "http://127.0.0.1:8000/v1"
_FIELD_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.:-]{0,63}")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")

# Request fields that `extra_body` may not set, because the gateway depends on them.
_RESERVED_FIELDS = {
    "chat_completions": ("messages", "stream"),
    "responses": ("input", "stream", "store", "previous_response_id", "conversation", "background"),
}

type RequestFields = dict[str, object]


class Secret:
    """A value that `repr`, logs and pickles do not reveal."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        return self._value

    def __repr__(self) -> str:
        return "Secret(…)"

    def __reduce__(self) -> str:
        raise TypeError("a Secret cannot be pickled")


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of `models`: which model names it serves, and how.

    match: model names that clients use; may contain `*`, `?` and `[…]` as in a shell.
    backend: `chat_completions`, `responses` for a server with the Responses API, or `direct`, which runs the code of
        the user's message and needs no model.
    base_url: the server's URL up to `/chat/completions` or `/responses`.
    name: the server's name for the model; by default the client's name.
    api_key_env: the environment variable with the API key.
    api_key_header: the header that carries the key; `Bearer` is added in `Authorization` only.
    headers: additional headers of every request.
    context_window: in tokens.
    tokenize_url: an endpoint that counts tokens: vLLM's /tokenize, or /v1/responses/input_tokens for `responses`.
        Without it the gateway estimates.
    takes_images: send images that code produced. Images in user messages are always sent.
    takes_files: send PDFs and other binary files, as `file` or `input_file` parts. Default: yes for `responses`; for
        others only if the request has no tool that can open the file.
    developer_role: the server accepts the role `developer`; otherwise such messages are sent as `system`.
    replay_reasoning: send the text of earlier reasoning back to the model.
    max_tokens_field: the name of the token limit in Chat Completions.
    encrypted_reasoning: ask a `responses` server for encrypted reasoning and send it back.
    pass_tools: tool types that a `responses` server receives unchanged, `*` for all. Of the others, tools that the
        client runs are sent as functions, and the rest is not served.
    pass_fields: request fields that are sent to the server unchanged, in addition to `SAMPLING_FIELDS`.
    connect_timeout: seconds until the connection is established.
    read_timeout: seconds without a byte from the server. Without streaming, the first byte comes at the end.
    retries: how often a turn that has not started is requested again.
    trace_context: send `traceparent` and `tracestate` if tracing is on.
    provider_name: who runs the server, as telemetry names it; by default the vendor of a known host.
    extra_body: fields that override those of the request; null removes one.
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
    connect_timeout: Seconds = 10.0
    read_timeout: Seconds = 600.0
    retries: Annotated[int, Meta(ge=0, le=10)] = 2
    trace_context: bool = True
    provider_name: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    extra_body: RequestFields = {}

    def __post_init__(self) -> None:
        if self.backend == "direct":
            if self.base_url or self.api_key_env or self.name or self.tokenize_url or self.pass_fields:
                raise ValueError(
                    "the backend `direct` has no server: remove base_url, tokenize_url, api_key_env, name and "
                    "pass_fields"
                )
            return
        if self.base_url is None:
            raise ValueError(
                f"base_url is missing: set it to the URL of the model server, such as {_EXAMPLE_URL}"
            )
        check_url("base_url", self.base_url, _EXAMPLE_URL)
        if self.tokenize_url is not None:
            check_url("tokenize_url", self.tokenize_url, "http://127.0.0.1:8000/tokenize")
        for name, value in [*self.headers.items(), (self.api_key_header, "")]:
            if not _HEADER_NAME.fullmatch(name) or not _is_header_value(value):
                raise ValueError(f"{name!r} is not a valid header")
        if self.backend == "chat_completions" and (self.pass_tools or not self.encrypted_reasoning):
            raise ValueError("pass_tools and encrypted_reasoning work with the backend `responses` only")
        self._check_pass_fields()
        for name in _RESERVED_FIELDS[self.backend]:
            if name in self.extra_body:
                raise ValueError(f"extra_body cannot set `{name}`")

    def _check_pass_fields(self) -> None:
        for name in self.pass_fields:
            if _FIELD_NAME.fullmatch(name) is None:
                raise ValueError(f"pass_fields: {name!r} is not a field name")
            if name in reserved_fields():
                raise ValueError(f"pass_fields cannot contain `{name}`: the gateway sets it")

    def __repr__(self) -> str:
        return f"<ModelSettings {self.match!r} {self.backend} {self.base_url or ''}>"

    def passes_tool(self, tool_type: str) -> bool:
        """Whether tools of this type are sent to the server unchanged."""
        return tool_type in self.pass_tools or "*" in self.pass_tools

    def add_passthrough_fields(self, fields: RequestFields, passthrough: Mapping[str, Raw]) -> None:
        """Copy the client's additional fields that the server may receive."""
        for name, value in passthrough.items():
            if name in SAMPLING_FIELDS or name in self.pass_fields:
                fields[name] = value

    def apply_extra_body(self, fields: RequestFields) -> None:
        """Override fields of a request with `extra_body`."""
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
        """Read the API key, if one is configured. Raises ValueError, without the key in its text."""
        if self.api_key_env is None:
            return None
        try:
            return Secret(read_secret(environment, self.api_key_env))
        except KeyError:
            raise ValueError(
                f"the environment variable {self.api_key_env} for the models {self.match!r} is not set"
            ) from None


# --- shared with other settings ---


def read_secret(environment: Mapping[str, str], variable: str) -> str:
    """Read a secret from a variable. Raises KeyError if it is not set, ValueError if it is not printable ASCII."""
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
    """Check that a setting is an http(s) URL without credentials. Raises ValueError, without a password in its text."""
    try:
        parts = urlsplit(url)
        is_server = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        parts, is_server = urlsplit(""), False
    if parts.username is not None or parts.password is not None:
        raise ValueError(
            f"{setting} contains a user or a password: put the secret into an environment variable"
        )
    is_clean = url.isascii() and url.isprintable() and " " not in url
    if not is_server or not is_clean or parts.query or parts.fragment:
        quoted = "" if "@" in url else f" {url!r}"  # it may contain a password
        raise ValueError(f"{setting}{quoted} is not the URL of a server, such as {example}")
