"""What the errors of a model server mean to whoever asked.

Whose fault it is decides the class: a request that the server cannot take is the caller's, a key that it does not know
is the operator's, and neither of them learns from the other. Of what a server says at most one sentence is passed on,
without anything that looks like a credential.
"""

import logging
import re
from collections.abc import Collection

import msgspec

from fumehood.protocol.openai.api_errors import (
    ModelError,
    ModelRateLimited,
    ModelRejectedRequest,
    ModelTimeout,
    ModelUnreachable,
)

logger = logging.getLogger(__name__)

_MAX_MESSAGE_CHARS = 300
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
_ERROR_CODE = re.compile(r"[a-zA-Z][\w.-]{0,63}")
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
INSUFFICIENT_QUOTA = "insufficient_quota"


class _ErrorBody(msgspec.Struct):
    """An error object in any of the shapes that are about."""

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
    """Errors of the server behind one model. `secrets` never appear in what is said about it.

    api: what it should speak, in words.
    """

    def __init__(
        self, model: str, secrets: Collection[str] = (), *, api_name: str = "chat completions"
    ) -> None:
        self._model = model
        self._secrets = secrets
        self._api_name = api_name

    @property
    def _server_label(self) -> str:
        return f"The server of the model {_shorten_to_line(self._model)!r}"

    def from_status(self, status: int, body: bytes, retry_after: float | None = None) -> ModelError:
        """What an answer other than 200 means."""
        if status in (401, 403):
            return ModelError(
                f"{self._server_label} does not accept the gateway's credentials (HTTP {status}); whoever runs the gateway "
                "has to check that model's api_key_env."
            )
        if 300 <= status < 400:
            return ModelError(
                f"{self._server_label} has moved (HTTP {status}); whoever runs the gateway has to correct its base_url."
            )
        said = _decode_error(body)
        if status == 404 and (said is None or not said.message):
            return ModelError(
                f"{self._server_label} has no {self._api_name}; whoever runs the gateway has to check that model's base_url."
            )
        return self._classify(status, said or _ErrorBody(), retry_after, f" (HTTP {status})")

    def from_event(self, error: bytes) -> ModelError:
        """What an error in the middle of a stream means; a number as its code is taken for a status."""
        said = _decode_error(error) or _ErrorBody()
        status = said.code if isinstance(said.code, int) and 400 <= said.code < 600 else 500
        if status in (401, 403):
            return self.from_status(status, b"")
        named = f"{said.code} {said.type}"
        if "rate_limit" in named or INSUFFICIENT_QUOTA in named:
            status = 429
        elif said.type == "invalid_request_error" or str(said.code).startswith("invalid_"):
            status = 400
        return self._classify(status, said, None, "")

    def _classify(
        self, status: int, body: _ErrorBody, retry_after: float | None, status_note: str
    ) -> ModelError:
        because = self._format_reason(body.message)
        code = body.code if isinstance(body.code, str) and _ERROR_CODE.fullmatch(body.code) else None
        if status in (400, 413, 422, 500) and _is_context_overflow(body):
            return ModelRejectedRequest(
                f"{self._server_label} cannot take that much{because}",
                code=CONTEXT_LENGTH_EXCEEDED,
                param="input",
            )
        if status == 429:
            code = INSUFFICIENT_QUOTA if code == INSUFFICIENT_QUOTA else None
            return ModelRateLimited(
                f"{self._server_label} is busy{because}", code=code, retry_after=retry_after
            )
        if status == 408:
            return ModelTimeout(f"{self._server_label} took too long{status_note}.")
        if status < 500:
            return ModelRejectedRequest(
                f"{self._server_label} refused the request{status_note}{because}", code=code
            )
        if status in (502, 503, 504, 529):
            message = f"{self._server_label} cannot be reached now{status_note}{because}"
            return ModelUnreachable(message, retry_after=retry_after)
        return ModelError(f"{self._server_label} failed{status_note}{because}")

    def _format_reason(self, message: str | None) -> str:
        sentence = self.redact(message or "")
        return f": {sentence}." if sentence else "."

    def redact(self, text: str) -> str:
        """What a stranger said, as one short sentence without credentials."""
        for secret in sorted(filter(None, self._secrets), key=len, reverse=True):
            text = text.replace(secret, _REDACTED)
        return _shorten_to_line(_CREDENTIAL.sub(_REDACTED, text[: 10 * _MAX_MESSAGE_CHARS]))

    # ---- what is wrong with the connection --------------------------------------------------------------------

    def unreachable(self, reason: str) -> ModelUnreachable:
        return ModelUnreachable(f"{self._server_label} cannot be reached: {self.redact(reason)}.")

    def disconnected(self) -> ModelUnreachable:
        return ModelUnreachable(
            "The connection to the server of this model broke before its answer was complete."
        )

    def read_timeout(self, seconds: float) -> ModelTimeout:
        return ModelTimeout(f"{self._server_label} was silent for {seconds:g} seconds.")

    def invalid_response(self, reason: str) -> ModelError:
        return ModelError(
            f"{self._server_label} does not speak as a {self._api_name} server does: {self.redact(reason)}."
        )

    def response_too_large(self) -> ModelError:
        return self._log_misbehaviour("answered without end, and was cut off")

    def no_progress(self, reason: str) -> ModelError:
        """It sends, and says nothing."""
        return self._log_misbehaviour(f"was cut off: it sent {reason}")

    def _log_misbehaviour(self, behaviour: str) -> ModelError:
        """For what no honest server does: whoever runs the gateway is told, too."""
        message = f"{self._server_label} {behaviour}."
        logger.warning("%s", message)
        return ModelError(message)


def _decode_error(body: bytes) -> _ErrorBody | None:
    """The error in these bytes: `{"error": {…}}`, `{"error": "…"}`, `{"message": …}`, `{"detail": …}`, or a list."""
    try:
        said = _error_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    if isinstance(said, list):
        said = said[0] if said else ""
    if isinstance(said, _ErrorBody):
        inner = said.error or said.detail or said
        if isinstance(inner, list):
            inner = "; ".join(detail.msg for detail in inner)
        said = said if isinstance(inner, bool) else inner
    return _ErrorBody(message=said) if isinstance(said, str) else said


def _is_context_overflow(body: _ErrorBody) -> bool:
    return body.code == CONTEXT_LENGTH_EXCEEDED or bool(
        _CONTEXT_OVERFLOW.search(f"{body.type or ''} {(body.message or '')[:4000]}")
    )


def _shorten_to_line(text: str) -> str:
    line = " ".join(text[: 4 * _MAX_MESSAGE_CHARS].split())
    shown = "".join(char if char.isprintable() else "?" for char in line)
    return (shown if len(shown) <= _MAX_MESSAGE_CHARS else shown[: _MAX_MESSAGE_CHARS - 1] + "…").rstrip(".")
