"""Asks a model server for the size of a model's context window, in the ways of the servers that tell."""

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from fumehood.models.upstream.http1_client import UpstreamAddress
from fumehood.models.upstream.upstream_errors import UpstreamErrorFactory
from fumehood.models.upstream.upstream_server import UpstreamServer
from fumehood.protocol.openai.api_errors import ModelError

_VERSION_SUFFIX = re.compile(r"/v\d+\w*/?$")
_NUM_CTX = re.compile(r"^num_ctx\s+(\d+)", re.MULTILINE)
_MAX_TOKENS = 1 << 40
_OLLAMA_ADVICE = "Start Ollama with OLLAMA_CONTEXT_LENGTH=32768, or set num_ctx in a Modelfile."


@dataclass(frozen=True, slots=True)
class ContextWindow:
    """In tokens; who says so, and how an operator changes it."""

    tokens: int
    source: str
    advice: str


class _ModelEntry(msgspec.Struct):
    id: str = ""
    max_model_len: Any = None  # vLLM, SGLang
    context_length: Any = None  # OpenRouter, Together
    loaded_context_length: Any = None  # LM Studio
    max_context_length: Any = None


class _ModelEntries(msgspec.Struct):
    data: list[_ModelEntry] = []


class _GenerationSettings(msgspec.Struct):
    n_ctx: Any = None


class _Props(msgspec.Struct):
    """llama.cpp's /props."""

    default_generation_settings: _GenerationSettings


class _LoadedModel(msgspec.Struct):
    name: str = ""
    model: str = ""
    context_length: Any = None


class _LoadedModels(msgspec.Struct):
    """Ollama's /api/ps."""

    models: list[_LoadedModel]


class _ShownModel(msgspec.Struct):
    """Ollama's /api/show."""

    model_info: dict[str, Any]
    parameters: str = ""


type _Fetch = Callable[[str, bytes | None], Awaitable[bytes]]


async def probe_context_window(
    server: UpstreamServer, base_url: str, model: str, errors: UpstreamErrorFactory
) -> ContextWindow | None:
    """Return the size of the context window that the server gives this model; None if it does not tell."""
    root = UpstreamAddress.parse(_VERSION_SUFFIX.sub("", base_url.rstrip("/")))

    async def fetch(path: str, body: bytes | None) -> bytes:
        """A response of the server, b"" if there is none. Paths below `base_url` begin with a dot."""
        try:
            if path.startswith("."):
                status, content = await server.fetch(path[1:], errors, body)
            else:
                status, content = await server.fetch(path, errors, body, address=root)
        except ModelError:
            return b""
        return content if status == 200 else b""

    for find in (_read_model_list, _ask_lm_studio, _ask_llama_cpp, _ask_ollama):
        if (found := await find(fetch, model)) is not None:
            return found
    return None


async def _read_model_list(fetch: _Fetch, model: str) -> ContextWindow | None:
    for entry in _decode(await fetch("./models", None), _ModelEntries, _ModelEntries()).data:
        if entry.id == model and (tokens := _read_tokens(entry.max_model_len, entry.context_length)):
            return ContextWindow(
                tokens, "list of models", "With vLLM, start it with a larger --max-model-len."
            )
    return None


async def _ask_lm_studio(fetch: _Fetch, model: str) -> ContextWindow | None:
    for entry in _decode(await fetch("/api/v0/models", None), _ModelEntries, _ModelEntries()).data:
        if entry.id == model and (
            tokens := _read_tokens(entry.loaded_context_length, entry.max_context_length)
        ):
            return ContextWindow(tokens, "LM Studio", "Load the model with a larger context length.")
    return None


async def _ask_llama_cpp(fetch: _Fetch, _model: str) -> ContextWindow | None:
    props = _decode(await fetch("/props", None), _Props, None)
    tokens = None if props is None else _read_tokens(props.default_generation_settings.n_ctx)
    return (
        None if tokens is None else ContextWindow(tokens, "llama.cpp", "Start llama-server with a larger -c.")
    )


async def _ask_ollama(fetch: _Fetch, model: str) -> ContextWindow | None:
    """What the loaded model has, else what its parameters set, else what it was trained with."""
    loaded = _decode(await fetch("/api/ps", None), _LoadedModels, _LoadedModels([]))
    for entry in loaded.models:
        is_same = model in (entry.name, entry.model, entry.name.removesuffix(":latest"))
        if is_same and (tokens := _read_tokens(entry.context_length)):
            return ContextWindow(tokens, "Ollama, as loaded", _OLLAMA_ADVICE)
    shown = _decode(await fetch("/api/show", msgspec.json.encode({"model": model})), _ShownModel, None)
    if shown is None:
        return None
    if (found := _NUM_CTX.search(shown.parameters)) and (tokens := _read_tokens(int(found[1][:12]))):
        return ContextWindow(tokens, "Ollama, num_ctx", _OLLAMA_ADVICE)
    trained = [value for name, value in shown.model_info.items() if name.endswith(".context_length")]
    tokens = _read_tokens(*trained)
    return None if tokens is None else ContextWindow(tokens, "Ollama, at most", _OLLAMA_ADVICE)


def _read_tokens(*values: object) -> int | None:
    """The first value that is a plausible number."""
    return next((value for value in values if isinstance(value, int) and 0 < value <= _MAX_TOKENS), None)


def _decode[T, D](content: bytes, kind: type[T], default: D) -> T | D:
    try:
        return msgspec.json.decode(content, type=kind)
    except (ValueError, RecursionError):
        return default
