"""What the errors of a model server mean to whoever asked; imports msgspec, `protocol` and the standard library.

Whose fault it is decides the class: a request that the server cannot take is the caller's, a key that it does not know
is the operator's, and neither of them learns from the other. Of what a server says at most one sentence is passed on,
without anything that looks like a credential.
"""

import logging
import re
from collections.abc import Collection

import msgspec

from fumehood.protocol.errors import (
    ModelError,
    ModelRateLimited,
    ModelRefused,
    ModelTimeout,
    ModelUnreachable,
)

logger = logging.getLogger(__name__)

_LONGEST_SENTENCE = 300
_HIDDEN = "[hidden]"
_CREDENTIAL = re.compile(
    r"\b(?:sk|pk|rk|key|tok|hf|gsk|xai|nvapi|api[_-]?key)[-_=:][\w*.-]{6,}|\b(?:bearer|basic)\s+\S+",
    re.IGNORECASE,
)
_TOO_LONG = re.compile(
    r"context[ _](?:length|window|size)|maximum (?:context|prompt|model) length|too many tokens|"
    r"(?:prompt|input|request) (?:is )?too (?:long|large)",
    re.IGNORECASE,
)
_CODE = re.compile(r"[a-zA-Z][\w.-]{0,63}")
CONTEXT_CODE = "context_length_exceeded"
NO_CREDIT_CODE = "insufficient_quota"


class _Said(msgspec.Struct):
    """An error object in any of the shapes that are about."""

    error: "_Said | str | bool | None" = None
    detail: "_Said | str | list[_Detail] | None" = None
    message: str | None = None
    type: str | None = None
    code: str | int | None = None


class _Detail(msgspec.Struct):
    msg: str = ""


_said: msgspec.json.Decoder[_Said | list[_Said] | str] = msgspec.json.Decoder(_Said | list[_Said] | str)


class UpstreamErrors:
    """Errors of the server behind one model. `secrets` never appear in what is said about it.

    api: what it should speak, in words.
    """

    def __init__(self, model: str, secrets: Collection[str] = (), *, api: str = "chat completions") -> None:
        self._model = model
        self._secrets = secrets
        self._api = api

    @property
    def _server(self) -> str:
        return f"The server of the model {_sentence(self._model)!r}"

    def from_status(self, status: int, body: bytes, retry_after: float | None = None) -> ModelError:
        """What an answer other than 200 means."""
        if status in (401, 403):
            return ModelError(
                f"{self._server} does not accept the gateway's credentials (HTTP {status}); whoever runs the gateway "
                "has to check that model's api_key_env."
            )
        if 300 <= status < 400:
            return ModelError(
                f"{self._server} has moved (HTTP {status}); whoever runs the gateway has to correct its base_url."
            )
        said = _read(body)
        if status == 404 and (said is None or not said.message):
            return ModelError(
                f"{self._server} has no {self._api}; whoever runs the gateway has to check that model's base_url."
            )
        return self._judged(status, said or _Said(), retry_after, f" (HTTP {status})")

    def from_event(self, error: bytes) -> ModelError:
        """What an error in the middle of a stream means; a number as its code is taken for a status."""
        said = _read(error) or _Said()
        status = said.code if isinstance(said.code, int) and 400 <= said.code < 600 else 500
        if status in (401, 403):
            return self.from_status(status, b"")
        named = f"{said.code} {said.type}"
        if "rate_limit" in named or NO_CREDIT_CODE in named:
            status = 429
        elif said.type == "invalid_request_error" or str(said.code).startswith("invalid_"):
            status = 400
        return self._judged(status, said, None, "")

    def _judged(self, status: int, said: _Said, retry_after: float | None, where: str) -> ModelError:
        because = self._because(said.message)
        code = said.code if isinstance(said.code, str) and _CODE.fullmatch(said.code) else None
        if status in (400, 413, 422, 500) and _is_too_long(said):
            return ModelRefused(
                f"{self._server} cannot take that much{because}", code=CONTEXT_CODE, param="input"
            )
        if status == 429:
            code = NO_CREDIT_CODE if code == NO_CREDIT_CODE else None
            return ModelRateLimited(f"{self._server} is busy{because}", code=code, retry_after=retry_after)
        if status == 408:
            return ModelTimeout(f"{self._server} took too long{where}.")
        if status < 500:
            return ModelRefused(f"{self._server} refused the request{where}{because}", code=code)
        if status in (502, 503, 504, 529):
            message = f"{self._server} cannot be reached now{where}{because}"
            return ModelUnreachable(message, retry_after=retry_after)
        return ModelError(f"{self._server} failed{where}{because}")

    def _because(self, message: str | None) -> str:
        sentence = self.redacted(message or "")
        return f": {sentence}." if sentence else "."

    def redacted(self, text: str) -> str:
        """What a stranger said, as one short sentence without credentials."""
        for secret in sorted(filter(None, self._secrets), key=len, reverse=True):
            text = text.replace(secret, _HIDDEN)
        return _sentence(_CREDENTIAL.sub(_HIDDEN, text[: 10 * _LONGEST_SENTENCE]))

    # ---- what is wrong with the connection --------------------------------------------------------------------

    def unreachable(self, why: str) -> ModelUnreachable:
        return ModelUnreachable(f"{self._server} cannot be reached: {self.redacted(why)}.")

    def broke(self) -> ModelUnreachable:
        return ModelUnreachable(
            "The connection to the server of this model broke before its answer was complete."
        )

    def silent(self, seconds: float) -> ModelTimeout:
        return ModelTimeout(f"{self._server} was silent for {seconds:g} seconds.")

    def unreadable(self, what: str) -> ModelError:
        return ModelError(
            f"{self._server} does not speak as a {self._api} server does: {self.redacted(what)}."
        )

    def endless(self) -> ModelError:
        return self._misbehaved("answered without end, and was cut off")

    def barren(self, what: str) -> ModelError:
        """It sends, and says nothing."""
        return self._misbehaved(f"was cut off: it sent {what}")

    def _misbehaved(self, how: str) -> ModelError:
        """For what no honest server does: whoever runs the gateway is told, too."""
        message = f"{self._server} {how}."
        logger.warning("%s", message)
        return ModelError(message)


def _read(body: bytes) -> _Said | None:
    """The error in these bytes: `{"error": {…}}`, `{"error": "…"}`, `{"message": …}`, `{"detail": …}`, or a list."""
    try:
        said = _said.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    if isinstance(said, list):
        said = said[0] if said else ""
    if isinstance(said, _Said):
        inner = said.error or said.detail or said
        if isinstance(inner, list):
            inner = "; ".join(detail.msg for detail in inner)
        said = said if isinstance(inner, bool) else inner
    return _Said(message=said) if isinstance(said, str) else said


def _is_too_long(said: _Said) -> bool:
    return said.code == CONTEXT_CODE or bool(
        _TOO_LONG.search(f"{said.type or ''} {(said.message or '')[:4000]}")
    )


def _sentence(text: str) -> str:
    line = " ".join(text[: 4 * _LONGEST_SENTENCE].split())
    shown = "".join(char if char.isprintable() else "?" for char in line)
    return (shown if len(shown) <= _LONGEST_SENTENCE else shown[: _LONGEST_SENTENCE - 1] + "…").rstrip(".")
