"""The backend for servers with the Responses API.

Every request contains the whole conversation, and the server stores nothing. It sees hosted tools as functions.
"""

import msgspec
from msgspec import Raw

from fumehood.models.model_settings import RequestFields
from fumehood.models.responses_api.reasoning_origin import ReasoningOrigin
from fumehood.models.responses_api.responses_renderer import render_input
from fumehood.models.responses_api.responses_stream_parser import ResponsesStreamParser
from fumehood.models.upstream.http_backend import HttpModelBackend
from fumehood.models.upstream.upstream_errors import UpstreamErrorFactory
from fumehood.protocol.model_turns import GenerationParameters, ModelRequest
from fumehood.protocol.openai.response_projection import INCLUDE_ENCRYPTED_REASONING, INCLUDE_LOGPROBS
from fumehood.protocol.openai.tool_specs import ModelToolDefinition

_COPIED_FIELDS = (
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "top_logprobs",
    "max_output_tokens",
    "service_tier",
    "prompt_cache_key",
    "safety_identifier",
    "user",
)
# Fields of a request that the token-counting endpoint accepts.
_COUNT_FIELDS = ("model", "instructions", "tools", "tool_choice", "parallel_tool_calls", "reasoning", "text")


class _Function(msgspec.Struct, tag_field="type", tag="function"):
    """`strict` is always explicit: servers default to true."""

    name: str
    description: str
    parameters: Raw
    strict: bool


class ResponsesApiBackend(HttpModelBackend):
    """A `ModelBackend` for a server with the Responses API."""

    api_name = "Responses API"
    endpoint = "/responses"
    conversation_field = "input"

    def _build_fields(self, request: ModelRequest) -> RequestFields:
        fields = self._build_common_fields(request)
        include: list[str] = []
        if self._settings.encrypted_reasoning:
            include.append(INCLUDE_ENCRYPTED_REASONING)
        if request.sampling.logprobs:
            include.append(INCLUDE_LOGPROBS)
        if include:
            fields["include"] = include
        self._settings.add_passthrough_fields(fields, request.sampling.passthrough)
        self._settings.apply_extra_body(fields)
        return fields

    def _build_count_fields(self, request: ModelRequest) -> RequestFields:
        fields = self._build_common_fields(request)
        return {name: value for name, value in fields.items() if name in _COUNT_FIELDS}

    def _render_conversation(self, request: ModelRequest) -> list[bytes]:
        return render_input(self._features, request.segments, self._get_origin(request))

    def _get_origin(self, request: ModelRequest) -> ReasoningOrigin:
        return ReasoningOrigin.for_model(self._settings.base_url or "", self._settings.name or request.model)

    def _build_common_fields(self, request: ModelRequest) -> RequestFields:
        fields: RequestFields = {
            "model": self._settings.name or request.model,
            "stream": request.streamed,
            "store": False,
        }
        if request.instructions:
            fields["instructions"] = request.instructions
        tools: list[object] = [self._render_tool(spec) for spec in request.function_tools]
        tools += [Raw(spec.raw) for spec in request.server_tools]
        self._add_tools(fields, request, tools)
        _add_sampling(fields, request.sampling)
        return fields

    def _render_tool_choice(self, spec: ModelToolDefinition) -> object:
        tool_type = "custom" if spec.custom and self._features.custom_tools else "function"
        return {"type": tool_type, "name": spec.name}

    def _render_tool(self, spec: ModelToolDefinition) -> object:
        if spec.custom and self._features.custom_tools:
            return Raw(spec.custom)
        return _Function(spec.name, spec.description, spec.parameters, spec.strict)

    def _create_parser(self, request: ModelRequest, errors: UpstreamErrorFactory) -> ResponsesStreamParser:
        return ResponsesStreamParser(errors, self._get_origin(request), request.used_call_ids)


def _add_sampling(fields: RequestFields, sampling: GenerationParameters) -> None:
    for name in _COPIED_FIELDS:
        value = getattr(sampling, name)
        if value is not None:
            fields[name] = value
    for name in ("text", "reasoning"):
        config = getattr(sampling, name)
        if config is not None:
            values = {
                key: value for key, value in msgspec.structs.asdict(config).items() if value is not None
            }
            if values:
                fields[name] = values
