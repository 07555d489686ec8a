"""Decodes request bodies, and says in OpenAI's words what is wrong with one; imports msgspec, `protocol` and
`serving`.
"""

import re
from collections.abc import Callable, Iterable

import msgspec
from msgspec import Raw

from fumehood.aside import LARGE, aside
from fumehood.gateway.exchange import Exchange
from fumehood.protocol.errors import InvalidRequest
from fumehood.protocol.folding import INCLUDABLE
from fumehood.protocol.json_limits import MOST_VALUES, has_too_many_values
from fumehood.protocol.passed_fields import SAMPLING_FIELDS, check_passed, request_type
from fumehood.protocol.responses import CreateResponse, ReasoningConfig
from fumehood.serving.browsers import decode_header, is_json, media_type
from fumehood.serving.json_bodies import explain_json_fault

_PLACE = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")
_GOT = re.compile(r"^Expected `([^`]*)`, got `([^`]*)`")
_ABSENT = re.compile(r"^Object missing required field `([^`]*)`")

_MESSAGES = b'"messages"'
_NUL = rb"\u0000"  # JSON knows no other way to write one

_EFFORT = re.compile("[a-z_]{1,32}")


class RequestReader:
    """Reads requests for responses.

    pass_fields: what some model's server is given as it comes, besides `SAMPLING_FIELDS`.
    """

    def __init__(self, pass_fields: Iterable[str] = ()) -> None:
        self._decoder = msgspec.json.Decoder(request_type((*SAMPLING_FIELDS, *pass_fields)))

    async def read(
        self, exchange: Exchange, limit: int, take: Callable[[int], None]
    ) -> tuple[CreateResponse, bytes]:
        """The body of POST /v1/responses, read and as it came; raises InvalidRequest, BodyTooLarge, Unavailable.

        take: see `Exchange.body`.
        """
        check_json(exchange)
        body = await exchange.body(limit, take)
        return await aside(len(body), self.decode, body), body

    def decode(self, body: bytes) -> CreateResponse:
        """Raises InvalidRequest."""
        request = decode(self._decoder, body)
        if request.include:
            check_include(request.include)
        if _MESSAGES in body:
            _check_api(body)
        if _NUL in body:
            _check_texts(request)
        if request.reasoning is not None:
            _check_effort(request.reasoning)
        if passed := request.passed:
            check_passed(passed)
        return request


def check_json(exchange: Exchange) -> None:
    """A web page may post plain text to any address without asking first, but not JSON."""
    kind = media_type(exchange.headers)
    if not kind and not exchange.has_body:
        raise InvalidRequest("The body is empty; send a JSON object.", code="invalid_json")
    if not is_json(kind):
        shown = decode_header(kind)[:100]
        raise InvalidRequest(f"Unsupported content type: {shown!r}. Send Content-Type: application/json.")
    if exchange.headers.get(b"content-encoding", b"").lower() not in (b"", b"identity"):
        raise InvalidRequest("A compressed body is not understood; send it as it is.")


def decode[T](decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Raises InvalidRequest, whose `param` names what is at fault."""
    if len(body) >= LARGE and has_too_many_values(body):
        raise InvalidRequest(
            f"The body has more than {MOST_VALUES} values; send fewer at a time, or a file.",
            code="invalid_json",
        )
    try:
        if not body.isascii():
            body.decode()  # what stays Raw is passed on as it came, so it has to be text
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _refused(str(error)) from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise InvalidRequest(explain_json_fault(body, error), code="invalid_json") from None
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply.", code="invalid_json") from None


def check_include(include: list[str] | tuple[str, ...]) -> None:
    for number, value in enumerate(include):
        if value not in INCLUDABLE:
            known = ", ".join(f"'{name}'" for name in sorted(INCLUDABLE))
            raise InvalidRequest(
                f"Invalid value: {value[:100]!r}. Supported values are: {known}.",
                param=f"include[{number}]",
                code="invalid_value",
            )


class _ChatRequest(msgspec.Struct):
    messages: Raw = Raw(b"")


_chat_requests = msgspec.json.Decoder(_ChatRequest)


def _check_api(body: bytes) -> None:
    """Raises InvalidRequest for what was meant for chat completions."""
    if bytes(_chat_requests.decode(body).messages) not in (b"", b"null"):
        raise InvalidRequest(
            "Unsupported parameter: 'messages'. It belongs to chat completions, which this server does not serve; the "
            "Responses API takes the conversation as 'input'.",
            param="messages",
            code="unsupported_parameter",
        )


def _check_effort(reasoning: ReasoningConfig) -> None:
    if reasoning.effort is not None and _EFFORT.fullmatch(reasoning.effort) is None:
        raise InvalidRequest(
            f"Invalid value for 'reasoning.effort': {reasoning.effort[:100]!r}; it has 1 to 32 lower-case letters and "
            "underscores, such as 'low', 'medium' or 'high'.",
            param="reasoning.effort",
            code="invalid_value",
        )


def _check_texts(request: CreateResponse) -> None:
    """No database keeps a NUL in a name; what the model is told may hold one."""
    for name in ("model", "previous_response_id", "user", "safety_identifier", "prompt_cache_key"):
        value: str | None = getattr(request, name)
        if value is not None and "\0" in value:
            raise InvalidRequest(f"'{name}' holds a NUL character.", param=name, code="invalid_value")
    for key, value in (request.metadata or {}).items():
        if "\0" in key or "\0" in value:
            raise InvalidRequest("'metadata' holds a NUL character.", param="metadata", code="invalid_value")


def _refused(text: str) -> InvalidRequest:
    place = _PLACE.search(text)
    param = place[1].replace("[...]", "") or None if place else None
    text = text if place is None else text[: place.start()]
    subject = f"'{param}'" if param else "the body"
    if (got := _GOT.match(text)) is not None:
        wanted = got[1].replace(" | null", "").replace(" | ", " or ")
        return InvalidRequest(
            f"Invalid type for {subject}: expected {wanted}, but got {got[2]} instead.",
            param=param,
            code="invalid_type",
        )
    if (absent := _ABSENT.match(text)) is not None:
        full = f"{param}.{absent[1]}" if param else absent[1]
        return InvalidRequest(
            f"Missing required parameter: '{full}'.", param=full, code="missing_required_parameter"
        )
    return InvalidRequest(
        f"Invalid value for {subject}: {text.replace('`', '')}.", param=param, code="invalid_value"
    )
