"""Checks for `fumehood doctor --upstream`: whether a model server can serve the gateway, and what to do if not."""

import asyncio
import re
import struct
import zlib
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from fumehood.models.context_window_probe import probe_context_window
from fumehood.models.model_settings import ModelSettings, Secret
from fumehood.models.upstream.http1_client import PooledHttpClient
from fumehood.models.upstream.upstream_errors import UpstreamErrorFactory, is_versioned
from fumehood.models.upstream.upstream_probe import check_upstream
from fumehood.models.upstream.upstream_server import UpstreamServer, decode_model_list
from fumehood.protocol.openai.api_errors import ModelError, ModelUnreachable

type UpstreamFindingState = Literal["ok", "warning", "missing"]

_ENDPOINT = "/chat/completions"
_CONNECT_SECONDS = 5.0
_ANSWER_SECONDS = 120.0  # the server may have to load the model first
_SMALL_CONTEXT = 16_384
_MAX_NAMED = 8  # models in a sentence
_TOOL_NAME = "report_number"
_CALL_AS_TEXT = re.compile(rf"<\W*tool_?call|<function|\[TOOL_CALLS\]|{_TOOL_NAME}|```", re.IGNORECASE)
_TOOL_ADVICE = (
    "vLLM needs --enable-auto-tool-choice and the --tool-call-parser of the model; llama.cpp needs --jinja; Ollama and "
    "LM Studio need a model that is marked for tools. docs/models.md has a recipe for each."
)
_KEY_ADVICE = (
    "Name the variable that holds the server's key: --api-key-env NAME; in the settings, api_key_env."
)


@dataclass(frozen=True, slots=True)
class UpstreamFinding:
    """`missing` keeps the gateway from using the server, `warning` limits it; `advice` says what to do."""

    name: str
    state: UpstreamFindingState
    detail: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class UpstreamReport:
    """Everything that was found about a model server.

    model: the model that was tried. context_window: in tokens, if the server tells.
    """

    base_url: str
    is_usable: bool
    model: str | None
    models: Sequence[str]
    context_window: int | None
    findings: Sequence[UpstreamFinding]


class _Function(msgspec.Struct):
    name: str = ""
    arguments: Any = None


class _Call(msgspec.Struct):
    function: _Function


class _Message(msgspec.Struct):
    content: Any = None
    reasoning_content: Any = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    message: _Message


class _Completion(msgspec.Struct):
    choices: list[_Choice]


async def diagnose_upstream(
    base_url: str, api_key: Secret | None = None, model: str | None = None
) -> UpstreamReport:
    """Check a chat completions server: that it answers, its models, tool calls, context size and pictures.

    model: the one to try; by default the first that does not look like one for embeddings.
    Raises ValueError if the URL is invalid.
    """
    settings = ModelSettings(
        base_url=base_url, connect_timeout=_CONNECT_SECONDS, read_timeout=_ANSWER_SECONDS, api_key_env=None
    )
    client = PooledHttpClient()
    try:
        return await _Diagnosis(settings, UpstreamServer(settings, client, api_key), api_key).run(model)
    finally:
        await client.close()


class _Diagnosis:
    """One examination of a server."""

    def __init__(self, settings: ModelSettings, server: UpstreamServer, api_key: Secret | None) -> None:
        self._base_url = settings.base_url or ""
        self._server = server
        self._has_key = api_key is not None
        self._findings: list[UpstreamFinding] = []
        self._models: list[str] = []

    async def run(self, model: str | None) -> UpstreamReport:
        context: int | None = None
        errors = self._create_errors(model or "*")
        if await self._check_reachable(errors):
            model = self._choose_model(model)
            if model is not None:
                errors = self._create_errors(model)
                await self._check_tool_call(model, errors)
                context = await self._check_context(model, errors)
                await self._check_vision(model, errors)
        is_usable = all(finding.state != "missing" for finding in self._findings)
        return UpstreamReport(self._base_url, is_usable, model, self._models, context, self._findings)

    def _create_errors(self, model: str) -> UpstreamErrorFactory:
        return self._server.create_error_factory(model, f"{_ENDPOINT} endpoint")

    def _add(self, name: str, state: UpstreamFindingState, detail: str, advice: str = "") -> None:
        self._findings.append(UpstreamFinding(name, state, detail, advice))

    # ---- reachability and models --------------------------------------------------------------------------------

    async def _check_reachable(self, errors: UpstreamErrorFactory) -> bool:
        try:
            async with asyncio.timeout(_CONNECT_SECONDS * 2):
                content = await check_upstream(self._server, errors, _ENDPOINT)
        except TimeoutError:
            self._add(
                "reachable", "missing", f"No answer within {_CONNECT_SECONDS * 2:g} seconds.", _START_ADVICE
            )
            return False
        except ModelError as error:
            self._add("reachable", "missing", error.message, await self._advise_on(error, errors))
            return False
        self._add("reachable", "ok", f"{self._base_url} answers.")
        if content is not None:
            self._models = [card.id for card in decode_model_list(content, errors)]
        return True

    async def _advise_on(self, error: ModelError, errors: UpstreamErrorFactory) -> str:
        if isinstance(error, ModelUnreachable):
            return _START_ADVICE
        if "credentials" in error.message:
            return "The server rejects the key: check its value." if self._has_key else _KEY_ADVICE
        if not is_versioned(self._base_url) and await self._answers_below("/v1", errors):
            return f"Use {self._base_url.rstrip('/')}/v1 as the URL: the server answers there."
        return "Check the URL: it is what stands before /chat/completions, mostly http://HOST:PORT/v1."

    async def _answers_below(self, path: str, errors: UpstreamErrorFactory) -> bool:
        try:
            status, body = await self._server.fetch(f"{path}/models", errors)
            decode_model_list(body, errors)
        except ModelError:
            return False
        return status == 200

    def _choose_model(self, wanted: str | None) -> str | None:
        named = ", ".join(self._models[:_MAX_NAMED]) + (", …" if len(self._models) > _MAX_NAMED else "")
        if not self._models:
            if wanted is None:
                self._add(
                    "models",
                    "missing",
                    "The server lists no model.",
                    "Load one, or name one with --model NAME.",
                )
            else:
                self._add(
                    "models", "warning", "The server lists no model.", "Clients must name one themselves."
                )
            return wanted
        if wanted is not None and wanted not in self._models:
            self._add(
                "models",
                "warning",
                f"The server does not list {wanted!r}, but {named}.",
                "Use a name of the list, or load the model.",
            )
            return wanted
        self._add("models", "ok", named)
        return wanted or next((name for name in self._models if "embed" not in name.lower()), self._models[0])

    # ---- what the model can do ----------------------------------------------------------------------------------

    async def _complete(self, errors: UpstreamErrorFactory, **fields: object) -> _Message:
        """The answer to a request. Raises ModelError."""
        body = msgspec.json.encode({"stream": False, **fields})
        status, content = await self._server.fetch(_ENDPOINT, errors, body)
        if status != 200:
            raise errors.from_status(status, content)
        try:
            choices = msgspec.json.decode(content, type=_Completion).choices
        except (ValueError, RecursionError):
            raise errors.from_event(content) from None
        if not choices:
            raise errors.invalid_response("it has no choices")
        return choices[0].message

    async def _check_tool_call(self, model: str, errors: UpstreamErrorFactory) -> None:
        parameters = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
        function = {"name": _TOOL_NAME, "description": "Report a number.", "parameters": parameters}
        question = f"Call the tool {_TOOL_NAME} with the number 42. Do not answer in words."
        try:
            message = await self._complete(
                errors,
                model=model,
                messages=[{"role": "user", "content": question}],
                tools=[{"type": "function", "function": function}],
            )
        except ModelError as error:
            self._add("tool call", "missing", error.message, _TOOL_ADVICE)
            return
        calls = message.tool_calls or []
        if calls and calls[0].function.name == _TOOL_NAME:
            self._add("tool call", "ok", f"{model} called the tool.")
        elif isinstance(message.content, str) and _CALL_AS_TEXT.search(message.content):
            detail = f"{model} wrote the call as text: the server does not parse calls of this model."
            self._add("tool call", "missing", detail, _TOOL_ADVICE)
        else:
            self._add(
                "tool call",
                "warning",
                f"{model} answered without calling the tool.",
                f"Try it again; a model that rarely calls tools rarely runs code. {_TOOL_ADVICE}",
            )

    async def _check_context(self, model: str, errors: UpstreamErrorFactory) -> int | None:
        found = await probe_context_window(self._server, self._base_url, model, errors)
        if found is None:
            self._add(
                "context size",
                "warning",
                "The server does not tell.",
                "Set context_window in the settings of the model, so that long conversations are compacted in time.",
            )
            return None
        detail = f"{found.tokens} tokens ({found.source}); set context_window: {found.tokens}."
        if found.tokens >= _SMALL_CONTEXT:
            self._add("context size", "ok", detail)
        else:
            self._add(
                "context size", "warning", detail, f"That is little for code and its output. {found.advice}"
            )
        return found.tokens

    async def _check_vision(self, model: str, errors: UpstreamErrorFactory) -> None:
        content = [
            {"type": "text", "text": "What colour is this picture? Answer with one word."},
            {"type": "image_url", "image_url": {"url": make_picture()}},
        ]
        advice = "Leave takes_images false; use another model for pictures."
        try:
            message = await self._complete(
                errors, model=model, messages=[{"role": "user", "content": content}]
            )
        except ModelError as error:
            self._add("vision", "warning", f"{model} takes no pictures: {error.message}", advice)
            return
        if "red" in str(message.content).lower():
            self._add("vision", "ok", f"{model} sees pictures; set takes_images: true.")
        else:
            self._add("vision", "warning", f"{model} did not see the colour of a picture.", advice)


_START_ADVICE = (
    "Start the server, or correct host and port. Inside a container, 127.0.0.1 is the container itself: use the host's "
    "address, and let the server listen on it."
)


def make_picture() -> str:
    """A red picture as a data: URL; some models reject smaller ones."""
    size = 64
    rows = (b"\0" + b"\xff\x00\x00" * size) * size

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    png = (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )
    return f"data:image/png;base64,{b64encode(png).decode()}"
