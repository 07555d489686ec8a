"""Passthrough fields: request fields that only model servers understand, forwarded unchanged."""

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import cast

import msgspec
from msgspec import Raw

from fumehood.protocol.openai.api_errors import InvalidRequest
from fumehood.protocol.openai.responses import CreateResponse

SAMPLING_FIELDS = (
    # OpenAI's chat completions, and most servers
    "seed",
    "stop",
    "logit_bias",
    # vLLM, SGLang, llama.cpp
    "top_k",
    "min_p",
    "chat_template_kwargs",
    # vLLM, SGLang
    "repetition_penalty",
    "min_tokens",
    "stop_token_ids",
    # vLLM
    "include_stop_str_in_output",
    "bad_words",
    "allowed_token_ids",
    "structured_outputs",
    "structural_tag",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_whitespace_pattern",
    # SGLang
    "regex",
    "ebnf",
    "stop_regex",
    # llama.cpp
    "grammar",
    "json_schema",
    "typical_p",
    "repeat_penalty",
    "repeat_last_n",
    "dynatemp_range",
    "dynatemp_exponent",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "xtc_probability",
    "xtc_threshold",
    "mirostat",
    "mirostat_tau",
    "mirostat_eta",
    "min_keep",
    "samplers",
)
"""The fields that are forwarded to every model server."""

_RESERVED_FIELDS = (
    # Written by the gateway, in either API.
    *(
        "messages",
        "input",
        "prompt",
        "input_ids",
        "instructions",
        "model",
        "stream",
        "stream_options",
        "store",
    ),
    *("tools", "tool_choice", "functions", "function_call", "parallel_tool_calls", "response_format"),
    *("logprobs", "max_tokens", "max_completion_tokens", "n_predict", "max_new_tokens"),
    *("reasoning_effort", "verbosity", "previous_response_id", "conversation", "background", "include"),
    # More than one answer, or something other than an answer.
    *("n", "n_cmpl", "best_of", "use_beam_search", "echo", "continue_final_message", "add_generation_prompt"),
    # Which code the model server loads.
    *("logits_processors", "custom_logit_processor"),
)
# Template arguments that the server itself sets; in vLLM `chat_template_kwargs` would override them.
_TEMPLATE_ARGUMENTS = "chat_template_kwargs"
_RESERVED_TEMPLATE_ARGUMENTS = frozenset(
    (
        *(
            "chat_template",
            "conversation",
            "messages",
            "tools",
            "add_generation_prompt",
            "continue_final_message",
        ),
        *("tokenize", "tokenizer_kwargs", "return_dict", "return_tensors", "return_assistant_tokens_mask"),
        *("padding", "truncation", "max_length"),
    )
)
# Of all fields together: a grammar or a schema may be long.
_MAX_TOTAL_BYTES = 256 << 10
_ABSENT = Raw(b"")
_object_decoder = msgspec.json.Decoder(dict[str, Raw])


def reserved_fields() -> frozenset[str]:
    """Return the fields that are never forwarded, whatever the configuration says."""
    return frozenset(_RESERVED_FIELDS) | {
        field.encode_name for field in msgspec.structs.fields(CreateResponse) if field.encode_name
    }


def extend_request_type(names: Iterable[str]) -> type[CreateResponse]:
    """Return a `CreateResponse` that also decodes these fields, and returns them as `passthrough`."""
    attributes = {name: f"passthrough_{number}" for number, name in enumerate(dict.fromkeys(names))}

    get = cast("Callable[[CreateResponse], tuple[Raw, ...]]", attrgetter("model", *attributes.values()))

    def passthrough(request: CreateResponse) -> dict[str, Raw]:
        values = get(request)[1:]
        if values.count(_ABSENT) == len(values):  # as in nearly all requests
            return {}
        # Copied: a decoded Raw keeps the whole body alive.
        return {
            name: raw.copy()
            for name, raw in zip(attributes, values, strict=True)
            if raw is not _ABSENT and bytes(raw) != b"null"
        }

    kind = msgspec.defstruct(
        "CreateResponse",
        [
            (attribute, Raw, msgspec.field(name=name, default=_ABSENT))
            for name, attribute in attributes.items()
        ],
        bases=(CreateResponse,),
        namespace={"passthrough": property(passthrough)},
        kw_only=True,
    )
    return cast("type[CreateResponse]", kind)


def check_passthrough_fields(fields: dict[str, Raw]) -> None:
    """Raise InvalidRequest if the fields are too large, or contain reserved template arguments."""
    _check_size(fields)
    if _TEMPLATE_ARGUMENTS in fields:
        _check_template_arguments(fields[_TEMPLATE_ARGUMENTS])


def _check_template_arguments(arguments: Raw) -> None:
    try:
        names = _object_decoder.decode(arguments)
    except msgspec.ValidationError:
        return  # not an object; the server will say so
    for name in names:
        if name in _RESERVED_TEMPLATE_ARGUMENTS:
            raise InvalidRequest(
                f"'{_TEMPLATE_ARGUMENTS}' must not contain '{name}'.",
                param=_TEMPLATE_ARGUMENTS,
                code="invalid_value",
            )


def _check_size(fields: dict[str, Raw]) -> None:
    sizes = {name: len(raw) for name, raw in fields.items()}
    if sum(sizes.values()) > _MAX_TOTAL_BYTES:
        largest = max(sizes, key=lambda name: sizes[name])
        raise InvalidRequest(
            f"'{largest}' is too large: fields for the model server may have {_MAX_TOTAL_BYTES} bytes in all.",
            param=largest,
            code="invalid_value",
        )
