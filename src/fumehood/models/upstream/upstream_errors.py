"""Maps errors of a model server to ModelError.

The class depends on whose mistake it is: a rejected request is the client's, a rejected API key the operator's. At most
one sentence of the server's message is passed on, with credentials redacted.
"""

import logging
import re
from collections.abc import Collection
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

import msgspec

from fumehood.models.upstream.http1_client import (
    UpstreamConnectError,
    UpstreamDisconnected,
    UpstreamReadTimeout,
    UpstreamTransportError,
)
from fumehood.protocol.openai.api_errors import (
    ModelError,
    ModelRateLimited,
    ModelRejectedRequest,
    ModelTimeout,
    ModelUnreachable,
)

logger = logging.getLogger(__name__)

_MAX_MESSAGE_CHARS = 300
_MAX_RETRY_AFTER = 86_400.0
_REDACTED = "[hidden]"
_CREDENTIAL = re.compile(
    r"\b(?:sk|pk|rk|key|tok|hf|gsk|xai|nvapi|api[_-]?key)[-_=:][\w*.-]{6,}|\b(?:bearer|basic)\s+\S+",
    re.IGNORECASE,
)
_CONTEXT_OVERFLOW = re.compile(
    r"context[ _](?:length|window|size)|maximum (?:context|prompt|model) length|too many tokens|"
    r"(?:prompt|input|request) (?:is )?too (?:long|large)",
    re.IGNORECASE,
)
# How servers say that they do not know the path, rather than the model or something in the request.
_UNKNOWN_PATH = re.compile(
    r"(?:404\W*)?(?:(?:the )?(?:requested )?(?:page|file|url|path|route|endpoint|resource) (?:\"[^\"]*\" )?)?"
    r"(?:was )?not found\b"
    r"|unexpected endpoint|invalid url|unknown (?:request )?url|cannot (?:post|get) /|no (?:matching )?route"
    r"|method not allowed",
    re.IGNORECASE,
)
_VERSIONED_PATH = re.compile(r"/v\d+\w*(?:/|$)")
_ERROR_CODE = re.compile(r"[a-zA-Z][\w.-]{0,63}")
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
INSUFFICIENT_QUOTA = "insufficient_quota"


class _ErrorBody(msgspec.Struct):
    """An error object in any of the formats that servers use."""

    error: "_ErrorBody | str | bool | None" = None
    detail: "_ErrorBody | str | list[_ErrorDetail] | None" = None
    message: str | None = None
    type: str | None = None
    code: str | int | None = None


class _ErrorDetail(msgspec.Struct):
    msg: str = ""


_error_decoder: msgspec.json.Decoder[_ErrorBody | list[_ErrorBody] | str] = msgspec.json.Decoder(
    _ErrorBody | list[_ErrorBody] | str
)


class UpstreamErrorFactory:
    """Creates the errors of one model's server.

    secrets: values that are redacted in every message.
    api_name: the API that the server should speak, for messages.
    input_field: the field of the client's request that is too long if the input is.
    base_url: the server's URL as configured.
    """

    def __init__(
        self,
        model: str,
        secrets: Collection[str] = (),
        *,
        api_name: str = "chat completions",
        input_field: str = "input",
        base_url: str = "",
    ) -> None:
        self._model = model
        self._secrets = secrets
        self._api_name = api_name
        self._input_field = input_field
        self._base_url = base_url

    @property
    def _server_label(self) -> str:
        return f"The server of the model {_shorten_to_line(self._model)!r}"

    def from_status(self, status: int, body: bytes, retry_after: float | None = None) -> ModelError:
        """The error for a response with a status other than 200."""
        if status in (401, 403):
            return ModelError(
                f"{self._server_label} does not accept the gateway's credentials (HTTP {status}); "
                "the operator of the gateway must check the model's api_key_env."
            )
        if status < 300:
            return self.invalid_response(f"it has the status {status}")
        if 300 <= status < 400:
            return ModelError(
                f"{self._server_label} has moved (HTTP {status}); "
                "the operator of the gateway must correct the model's base_url."
            )
        decoded = _decode_error(body)
        if status in (404, 405) and (
            decoded is None or not decoded.message or _UNKNOWN_PATH.match(decoded.message.strip())
        ):
            return self.unknown_path(status)
        return self._classify(status, decoded or _ErrorBody(), retry_after, f" (HTTP {status})")

    def from_event(self, error: bytes) -> ModelError:
        """The error for an error event within a stream; a numeric code counts as HTTP status."""
        body = _decode_error(error) or _ErrorBody()
        if body.message and _UNKNOWN_PATH.match(
            body.message.strip()
        ):  # LM Studio sends it with the status 200
            return self.unknown_path(404)
        status = body.code if isinstance(body.code, int) and 400 <= body.code < 600 else 500
        if status in (401, 403):
            return self.from_status(status, b"")
        named = f"{body.code} {body.type}"
        if "rate_limit" in named or INSUFFICIENT_QUOTA in named:
            status = 429
        elif body.type == "invalid_request_error" or str(body.code).startswith("invalid_"):
            status = 400
        return self._classify(status, body, None, "")

    def unknown_path(self, status: int) -> ModelError:
        """The server does not have the endpoint."""
        hint = "" if is_versioned(self._base_url) else ", which most servers expect to end in /v1"
        return ModelError(
            f"{self._server_label} has no {self._api_name} (HTTP {status}); "
            f"the operator of the gateway must check the model's base_url{hint}."
        )

    def _classify(
        self, status: int, body: _ErrorBody, retry_after: float | None, status_note: str
    ) -> ModelError:
        reason = self._format_reason(body.message)
        code = body.code if isinstance(body.code, str) and _ERROR_CODE.fullmatch(body.code) else None
        if status in (400, 413, 422, 500) and _is_context_overflow(body):
            return ModelRejectedRequest(
                f"{self._server_label} rejected the request as too long{reason}",
                code=CONTEXT_LENGTH_EXCEEDED,
                param=self._input_field,
            )
        if status == 429:
            code = INSUFFICIENT_QUOTA if code == INSUFFICIENT_QUOTA else None
            return ModelRateLimited(
                f"{self._server_label} is busy{reason}", code=code, retry_after=retry_after
            )
        if status == 408:
            return ModelTimeout(f"{self._server_label} timed out{status_note}.")
        if status < 500:
            return ModelRejectedRequest(
                f"{self._server_label} refused the request{status_note}{reason}", code=code
            )
        if status in (502, 503, 504, 529):
            message = f"{self._server_label} is unavailable{status_note}{reason}"
            return ModelUnreachable(message, retry_after=retry_after)
        return ModelError(f"{self._server_label} failed{status_note}{reason}")

    def _format_reason(self, message: str | None) -> str:
        sentence = self.redact(message or "")
        return f": {sentence}." if sentence else "."

    def redact(self, text: str) -> str:
        """Untrusted text as one short line without credentials."""
        for secret in sorted(filter(None, self._secrets), key=len, reverse=True):
            text = text.replace(secret, _REDACTED)
        return _shorten_to_line(_CREDENTIAL.sub(_REDACTED, text[: 10 * _MAX_MESSAGE_CHARS]))

    # ---- transport errors -------------------------------------------------------------------------------------

    def from_transport(self, error: UpstreamTransportError, read_timeout: float) -> ModelError:
        match error:
            case UpstreamConnectError():
                return ModelUnreachable(f"{self._server_label} cannot be reached: {self.redact(str(error))}.")
            case UpstreamReadTimeout():
                return ModelTimeout(f"{self._server_label} sent nothing for {read_timeout:g} seconds.")
            case UpstreamDisconnected():
                return self.disconnected()
            case _:
                return self.invalid_response("its response is not valid HTTP")

    def no_answer(self, seconds: float) -> ModelTimeout:
        return ModelTimeout(f"{self._server_label} did not answer within {seconds:g} seconds.")

    def disconnected(self) -> ModelUnreachable:
        return ModelUnreachable(
            "The connection to the server of this model broke before its response was complete."
        )

    def invalid_response(self, reason: str) -> ModelError:
        return ModelError(
            f"{self._server_label} sent an invalid {self._api_name} response: {self.redact(reason)}."
        )

    def response_too_large(self) -> ModelError:
        return self._log_misbehaviour("sent too large a response and was disconnected")

    def no_progress(self, reason: str) -> ModelError:
        """The server sends data that contains no events."""
        return self._log_misbehaviour(f"was disconnected: it sent {reason}")

    def _log_misbehaviour(self, behaviour: str) -> ModelError:
        """Also log it, for the operator: no well-behaved server does this."""
        message = f"{self._server_label} {behaviour}."
        logger.warning("%s", message)
        return ModelError(message)


def is_versioned(base_url: str) -> bool:
    """Whether the path of a URL has a version, such as /v1. An unknown URL counts as versioned."""
    return not base_url or _VERSIONED_PATH.search(urlsplit(base_url).path) is not None


def _decode_error(body: bytes) -> _ErrorBody | None:
    """Decode `{"error": {…}}`, `{"error": "…"}`, `{"message": …}`, `{"detail": …}`, or the first of a list."""
    try:
        decoded = _error_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    if isinstance(decoded, list):
        decoded = decoded[0] if decoded else ""
    if isinstance(decoded, _ErrorBody):
        inner = decoded.error or decoded.detail or decoded
        if isinstance(inner, list):
            inner = "; ".join(detail.msg for detail in inner)
        decoded = decoded if isinstance(inner, bool) else inner
    return _ErrorBody(message=decoded) if isinstance(decoded, str) else decoded


def _is_context_overflow(body: _ErrorBody) -> bool:
    return body.code == CONTEXT_LENGTH_EXCEEDED or bool(
        _CONTEXT_OVERFLOW.search(f"{body.type or ''} {(body.message or '')[:4000]}")
    )


def _shorten_to_line(text: str) -> str:
    line = " ".join(text[: 4 * _MAX_MESSAGE_CHARS].split())
    printable = "".join(char if char.isprintable() else "?" for char in line)
    return (
        printable if len(printable) <= _MAX_MESSAGE_CHARS else printable[: _MAX_MESSAGE_CHARS - 1] + "…"
    ).rstrip(".")


def parse_retry_after(value: str, now: str) -> float | None:
    """Seconds until the retry. A date is compared with the server's own Date header, if there is one."""
    try:
        seconds = float(value)
    except ValueError:
        date_time = _parse_http_date(value)
        if date_time is None:
            return None
        seconds = max(0.0, (date_time - (_parse_http_date(now) or datetime.now(UTC))).total_seconds())
    return seconds if 0 <= seconds <= _MAX_RETRY_AFTER else None


def _parse_http_date(date: str) -> datetime | None:
    try:
        parsed = parsedate_to_datetime(date)
    except (ValueError, OverflowError):
        return None
    return parsed if parsed.tzinfo is not None else parsed.replace(tzinfo=UTC)
