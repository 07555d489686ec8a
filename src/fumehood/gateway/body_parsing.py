"""Decodes and validates request bodies, with errors in OpenAI's format."""

import re
from collections.abc import Callable, Iterable

import msgspec
from msgspec import Raw

from fumehood.cpu_worker import WORKER_THRESHOLD_BYTES, run_in_worker
from fumehood.gateway.gateway_exchange import GatewayExchange
from fumehood.http_server.cross_site_protection import content_media_type, decode_header, is_json_type
from fumehood.http_server.json_decode_errors import explain_json_error
from fumehood.protocol.json_limits import MAX_VALUES, has_too_many_values
from fumehood.protocol.openai.api_errors import InvalidRequest
from fumehood.protocol.openai.passthrough_fields import (
    SAMPLING_FIELDS,
    check_passthrough_fields,
    extend_request_type,
)
from fumehood.protocol.openai.response_projection import INCLUDE_VALUES
from fumehood.protocol.openai.responses import CreateResponse, ReasoningConfig

_ERROR_LOCATION = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")
_WRONG_TYPE = re.compile(r"^Expected `([^`]*)`, got `([^`]*)`")
_MISSING_FIELD = re.compile(r"^Object missing required field `([^`]*)`")

_MESSAGES_KEY = b'"messages"'
_ESCAPED_NUL = rb"\u0000"  # the only way to write NUL in JSON

_EFFORT_PATTERN = re.compile("[a-z_]{1,32}")


class CreateResponseParser:
    """Parses requests for responses.

    pass_fields: fields that are passed to model servers unchanged, besides `SAMPLING_FIELDS`.
    """

    def __init__(self, pass_fields: Iterable[str] = ()) -> None:
        self._decoder = msgspec.json.Decoder(extend_request_type((*SAMPLING_FIELDS, *pass_fields)))

    async def read_request(
        self, exchange: GatewayExchange, limit: int, reserve_memory: Callable[[int], None]
    ) -> tuple[CreateResponse, bytes]:
        """The body, parsed and as bytes. Raises InvalidRequest and what `GatewayExchange.read_body` raises."""
        check_json_body(exchange)
        body = await exchange.read_body(limit, reserve_memory)
        return await run_in_worker(len(body), self.parse, body), body

    def parse(self, body: bytes) -> CreateResponse:
        """Raises InvalidRequest."""
        request = decode_json(self._decoder, body)
        if request.include:
            check_include(request.include)
        if _MESSAGES_KEY in body:
            _reject_chat_completions(body)
        if _ESCAPED_NUL in body:
            _reject_nul_characters(request)
        if request.reasoning is not None:
            _check_reasoning_effort(request.reasoning)
        if passed := request.passthrough:
            check_passthrough_fields(passed)
        return request


def check_json_body(exchange: GatewayExchange) -> None:
    """Require JSON: browsers send no JSON to another site without a preflight. Raises InvalidRequest."""
    kind = content_media_type(exchange.headers)
    if not kind and not exchange.has_body:
        raise InvalidRequest("The body is empty; send a JSON object.", code="invalid_json")
    if not is_json_type(kind):
        shown = decode_header(kind)[:100]
        raise InvalidRequest(f"Unsupported content type: {shown!r}. Send Content-Type: application/json.")
    if exchange.headers.get(b"content-encoding", b"").lower() not in (b"", b"identity"):
        raise InvalidRequest("Compressed bodies are not supported; send the body uncompressed.")


def decode_json[T](decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Raises InvalidRequest, whose `param` names the invalid field."""
    if len(body) >= WORKER_THRESHOLD_BYTES and has_too_many_values(body):
        raise InvalidRequest(
            f"The body has more than {MAX_VALUES} JSON values; send fewer, or upload a file.",
            code="invalid_json",
        )
    try:
        if not body.isascii():
            body.decode()  # the decoder does not check the text of Raw fields
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _validation_error(str(error)) from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise InvalidRequest(explain_json_error(body, error), code="invalid_json") from None
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply.", code="invalid_json") from None


def check_include(include: list[str] | tuple[str, ...]) -> None:
    for number, value in enumerate(include):
        if value not in INCLUDE_VALUES:
            known = ", ".join(f"'{name}'" for name in sorted(INCLUDE_VALUES))
            raise InvalidRequest(
                f"Invalid value: {value[:100]!r}. Supported values are: {known}.",
                param=f"include[{number}]",
                code="invalid_value",
            )


class _ChatRequest(msgspec.Struct):
    messages: Raw = Raw(b"")


_chat_request_decoder = msgspec.json.Decoder(_ChatRequest)


def _reject_chat_completions(body: bytes) -> None:
    """Raises InvalidRequest for a chat completions request."""
    if bytes(_chat_request_decoder.decode(body).messages) not in (b"", b"null"):
        raise InvalidRequest(
            "Unsupported parameter: 'messages'. The Responses API takes the conversation as 'input'; chat completions "
            "are at /v1/chat/completions.",
            param="messages",
            code="unsupported_parameter",
        )


def _check_reasoning_effort(reasoning: ReasoningConfig) -> None:
    if reasoning.effort is not None and _EFFORT_PATTERN.fullmatch(reasoning.effort) is None:
        raise InvalidRequest(
            f"Invalid value for 'reasoning.effort': {reasoning.effort[:100]!r}; use 1 to 32 lower-case letters and "
            "underscores, such as 'low', 'medium' or 'high'.",
            param="reasoning.effort",
            code="invalid_value",
        )


def _reject_nul_characters(request: CreateResponse) -> None:
    """Reject NUL in fields that are stored as text; the input for the model may contain it."""
    for name in ("model", "previous_response_id", "user", "safety_identifier", "prompt_cache_key"):
        value: str | None = getattr(request, name)
        if value is not None and "\0" in value:
            raise InvalidRequest(f"'{name}' contains a NUL character.", param=name, code="invalid_value")
    for key, value in (request.metadata or {}).items():
        if "\0" in key or "\0" in value:
            raise InvalidRequest(
                "'metadata' contains a NUL character.", param="metadata", code="invalid_value"
            )


def _validation_error(text: str) -> InvalidRequest:
    location = _ERROR_LOCATION.search(text)
    param = location[1].replace("[...]", "") or None if location else None
    text = text if location is None else text[: location.start()]
    subject = f"'{param}'" if param else "the body"
    if (got := _WRONG_TYPE.match(text)) is not None:
        wanted = got[1].replace(" | null", "").replace(" | ", " or ")
        return InvalidRequest(
            f"Invalid type for {subject}: expected {wanted}, but got {got[2]} instead.",
            param=param,
            code="invalid_type",
        )
    if (absent := _MISSING_FIELD.match(text)) is not None:
        full = f"{param}.{absent[1]}" if param else absent[1]
        return InvalidRequest(
            f"Missing required parameter: '{full}'.", param=full, code="missing_required_parameter"
        )
    return InvalidRequest(
        f"Invalid value for {subject}: {text.replace('`', '')}.", param=param, code="invalid_value"
    )
