"""The body of a request to a chat completions server; imports msgspec, siblings and `protocol`."""

from typing import Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType

from fumehood.models.chat_rendering import ChatRenderer, Dialect
from fumehood.models.kept_renderings import with_list
from fumehood.models.settings import Fields, ModelSettings
from fumehood.protocol.models import ModelRequest, Sampling
from fumehood.protocol.responses import TextFormat
from fumehood.protocol.tools import FunctionSpec

_PASSED_ON = (
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "service_tier",
    "prompt_cache_key",
    "safety_identifier",
    "user",
)
# What of a body decides how a conversation becomes tokens.
_TEMPLATE = ("chat_template", "chat_template_kwargs", "add_special_tokens")

_PLAIN = Sampling()


class _Function(msgspec.Struct):
    name: str
    description: str
    parameters: Raw
    strict: Literal[True] | UnsetType = UNSET


class _Tool(msgspec.Struct, tag_field="type", tag="function"):
    function: _Function


class RequestWriter:
    """Writes requests for one model as its settings say. The past is not encoded again, only put in place."""

    def __init__(self, settings: ModelSettings) -> None:
        self._settings = settings
        self._renderer = ChatRenderer(
            Dialect(
                takes_images=settings.takes_images,
                developer_role=settings.developer_role,
                replay_reasoning=settings.replay_reasoning,
                takes_files=bool(settings.shows_files),
            )
        )

    def messages(self, request: ModelRequest) -> list[bytes]:
        """Raises InvalidRequest."""
        return self._renderer.messages(request.instructions, request.segments)

    def tokenization(self, request: ModelRequest) -> list[bytes]:
        """The body of a request to count the tokens of another; raises InvalidRequest."""
        fields: Fields = {"model": self._settings.name or request.model, "add_generation_prompt": True}
        if request.functions:
            fields["tools"] = _tools(request)
        said: Fields = {}
        self._settings.put_passed(said, request.sampling.passed)
        self._settings.put_extra(said)
        fields |= {name: said[name] for name in _TEMPLATE if name in said}
        return self._with_messages(request, fields)

    def body(self, request: ModelRequest) -> list[bytes]:
        """Raises InvalidRequest."""
        fields: Fields = {"model": self._settings.name or request.model, "stream": request.streamed}
        if request.streamed:
            fields["stream_options"] = {"include_usage": True}
        _add_functions(fields, request)
        self._add_sampling(fields, request.sampling)
        self._settings.put_extra(fields)
        if not request.streamed:
            fields.pop("stream_options", None)
        return self._with_messages(request, fields)

    def _with_messages(self, request: ModelRequest, fields: Fields) -> list[bytes]:
        return with_list("messages", self.messages(request), fields)

    def _add_sampling(self, fields: Fields, sampling: Sampling) -> None:
        if sampling == _PLAIN:
            return
        for name in _PASSED_ON:
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
        self._settings.put_passed(fields, sampling.passed)
        text = sampling.text
        if text is not None and text.verbosity is not None:
            fields["verbosity"] = text.verbosity
        if text is not None and text.format is not None:
            _add_format(fields, text.format)


def _add_functions(fields: Fields, request: ModelRequest) -> None:
    if not request.functions:
        return
    fields["tools"] = _tools(request)
    choice = request.choice
    if isinstance(choice, FunctionSpec):
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif choice != "auto":  # the default; some servers refuse it when it is said
        fields["tool_choice"] = choice
    if not request.parallel_calls:
        fields["parallel_tool_calls"] = False


def _tools(request: ModelRequest) -> list[_Tool]:
    return [
        _Tool(_Function(spec.name, spec.description, spec.parameters, True if spec.strict else UNSET))
        for spec in request.functions
    ]


def _add_format(fields: Fields, wanted: TextFormat) -> None:
    if wanted.type == "json_object":
        fields["response_format"] = {"type": "json_object"}
    elif wanted.type == "json_schema":
        schema: Fields = {"name": wanted.name or "answer", "schema": wanted.schema or {}}
        if wanted.description is not None:
            schema["description"] = wanted.description
        if wanted.strict is not None:
            schema["strict"] = wanted.strict
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
