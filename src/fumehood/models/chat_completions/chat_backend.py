"""The backend for Chat Completions servers."""

from typing import Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType

from fumehood.models.chat_completions.chat_renderer import render_messages
from fumehood.models.chat_completions.chat_stream_parser import ChatStreamParser
from fumehood.models.model_settings import RequestFields
from fumehood.models.upstream.http_backend import HttpModelBackend
from fumehood.models.upstream.upstream_errors import UpstreamErrorFactory
from fumehood.protocol.model_turns import GenerationParameters, ModelRequest
from fumehood.protocol.openai.responses import TextFormat
from fumehood.protocol.openai.tool_specs import ModelToolDefinition

_COPIED_FIELDS = (
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "service_tier",
    "prompt_cache_key",
    "safety_identifier",
    "user",
)
# Fields that change how a server turns messages into tokens.
_TEMPLATE_FIELDS = ("chat_template", "chat_template_kwargs", "add_special_tokens")
_DEFAULT_SAMPLING = GenerationParameters()


class _Function(msgspec.Struct):
    name: str
    description: str
    parameters: Raw
    strict: Literal[True] | UnsetType = UNSET


class _Tool(msgspec.Struct, tag_field="type", tag="function"):
    function: _Function


class ChatCompletionsBackend(HttpModelBackend):
    """A `ModelBackend` for a Chat Completions server. It renders each segment of a conversation once."""

    api_name = "chat completions"
    endpoint = "/chat/completions"
    conversation_field = "messages"

    def _create_parser(self, request: ModelRequest, errors: UpstreamErrorFactory) -> ChatStreamParser:
        functions = [spec.name for spec in request.function_tools]
        return ChatStreamParser(errors, functions, request.used_call_ids)

    def _build_fields(self, request: ModelRequest) -> RequestFields:
        fields: RequestFields = {"model": self._settings.name or request.model, "stream": request.streamed}
        if request.streamed:
            fields["stream_options"] = {"include_usage": True}
        self._add_tools(fields, request, _render_tools(request))
        self._add_sampling(fields, request.sampling)
        self._settings.apply_extra_body(fields)
        if not request.streamed:
            fields.pop("stream_options", None)
        return fields

    def _build_count_fields(self, request: ModelRequest) -> RequestFields:
        fields: RequestFields = {"model": self._settings.name or request.model, "add_generation_prompt": True}
        if request.function_tools:
            fields["tools"] = _render_tools(request)
        extra: RequestFields = {}
        self._settings.add_passthrough_fields(extra, request.sampling.passthrough)
        self._settings.apply_extra_body(extra)
        fields |= {name: extra[name] for name in _TEMPLATE_FIELDS if name in extra}
        return fields

    def _render_conversation(self, request: ModelRequest) -> list[bytes]:
        return render_messages(self._features, request.instructions, request.segments)

    def _render_tool_choice(self, spec: ModelToolDefinition) -> object:
        return {"type": "function", "function": {"name": spec.name}}

    def _add_sampling(self, fields: RequestFields, sampling: GenerationParameters) -> None:
        if sampling == _DEFAULT_SAMPLING:
            return
        for name in _COPIED_FIELDS:
            value = getattr(sampling, name)
            if value is not None:
                fields[name] = value
        if sampling.max_output_tokens is not None:
            fields[self._settings.max_tokens_field] = sampling.max_output_tokens
        if sampling.logprobs or sampling.top_logprobs is not None:
            fields["logprobs"] = True
        if sampling.top_logprobs is not None:
            fields["top_logprobs"] = sampling.top_logprobs
        if sampling.reasoning is not None and sampling.reasoning.effort is not None:
            fields["reasoning_effort"] = sampling.reasoning.effort
        self._settings.add_passthrough_fields(fields, sampling.passthrough)
        text = sampling.text
        if text is not None and text.verbosity is not None:
            fields["verbosity"] = text.verbosity
        if text is not None and text.format is not None:
            _add_format(fields, text.format)


def _render_tools(request: ModelRequest) -> list[_Tool]:
    return [
        _Tool(_Function(spec.name, spec.description, spec.parameters, True if spec.strict else UNSET))
        for spec in request.function_tools
    ]


def _add_format(fields: RequestFields, text_format: TextFormat) -> None:
    if text_format.type == "json_object":
        fields["response_format"] = {"type": "json_object"}
    elif text_format.type == "json_schema":
        schema: RequestFields = {"name": text_format.name or "answer", "schema": text_format.schema or {}}
        if text_format.description is not None:
            schema["description"] = text_format.description
        if text_format.strict is not None:
            schema["strict"] = text_format.strict
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
