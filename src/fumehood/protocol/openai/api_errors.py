"""Errors of the gateway's API and their JSON form.

ApiError                             `status`, `type`, `code`, `param` and `message` are sent to the client
├── InvalidRequest              400  an invalid parameter; `param` names it
│   ├── PreviousResponseNotFound     `previous_response_id` is unknown in this tenant
│   └── ContainerExpired             the container has expired
├── NotAuthenticated            401  a missing or wrong key
├── NotFound                    404  the id is unknown in this tenant
├── Conflict                    409  an idempotency key used for another request, or a state that forbids it
├── BodyTooLarge                413  more than a limit allows
├── RateLimited                 429  the same request may succeed later; `retry_after` seconds
├── InternalServerError         500  a fault of the gateway
│   └── StorageCorrupted             a stored row or blob cannot be read
├── ServiceUnavailable          503  something that the gateway needs is unavailable
│   └── StorageUnavailable           nothing can be written, for example because the disk is full
└── ModelError                  502  a model server rejected the request, failed, or broke its protocol
    ├── ModelRejectedRequest    400  too long, an unknown parameter, forbidden content
    ├── ModelRateLimited        429  it is busy
    ├── ModelUnreachable        502  no connection, or it broke
    └── ModelTimeout            504  it sent nothing for too long

Before the first byte of a response an error is an HTTP status with `to_error_body`; later it is an `error` event and
`response.failed`. Errors that the model should see are not exceptions, but text in a tool's result.
"""

import errno
from typing import ClassVar

import msgspec


class ApiError(Exception):
    """An error that is sent to the client.

    param: the invalid parameter. code: replaces the class's code. retry_after: seconds until a retry may help.
    may_have_run: whether code may have run, so that a client must not retry by itself.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str | None] = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.wire_code = code if code is not None else self.code
        self.retry_after = retry_after
        self.may_have_run = False

    @property
    def type(self) -> str:
        """The type that OpenAI has for errors of this status."""
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"


class InvalidRequest(ApiError):
    status = 400


class PreviousResponseNotFound(InvalidRequest):
    code = "previous_response_not_found"


class ContainerExpired(InvalidRequest):
    code = "container_expired"


class NotAuthenticated(ApiError):
    status = 401
    code = "invalid_api_key"


class NotFound(ApiError):
    status = 404


class Conflict(ApiError):
    status = 409


class BodyTooLarge(ApiError):
    status = 413
    code = "request_too_large"


class RateLimited(ApiError):
    status = 429
    code = "rate_limit_exceeded"


class InternalServerError(ApiError):
    code = "server_error"


class ServiceUnavailable(ApiError):
    status = 503
    code = "server_error"


class StorageCorrupted(InternalServerError):
    code = "storage_corrupted"


class StorageUnavailable(ServiceUnavailable):
    code = "storage_unavailable"


class ModelError(ApiError):
    status = 502
    code = "server_error"


class ModelRejectedRequest(ModelError):
    status = 400
    code = "invalid_prompt"


class ModelRateLimited(ModelError):
    status = 429
    code = "rate_limit_exceeded"


class ModelUnreachable(ModelError):
    pass


class ModelTimeout(ModelError):
    status = 504


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every error response."""

    error: ErrorDetail


def to_error_detail(error: ApiError) -> ErrorDetail:
    return ErrorDetail(message=error.message, type=error.type, param=error.param, code=error.wire_code)


def to_error_body(error: ApiError) -> ErrorBody:
    return ErrorBody(error=to_error_detail(error))


_RETRY_SECONDS = 5.0
_RESOURCE_BY_ERRNO = {
    errno.ENOMEM: "memory",
    errno.EMFILE: "file descriptors",
    errno.ENFILE: "file descriptors",
}


def detect_resource_exhaustion(error: BaseException) -> ServiceUnavailable | None:
    """Return the API error for exhausted memory or file descriptors; None for other errors."""
    if isinstance(error, MemoryError):
        resource = "memory"
    else:
        resource = _RESOURCE_BY_ERRNO.get(error.errno or 0) if isinstance(error, OSError) else None
    if resource is None:
        return None
    return ServiceUnavailable(
        f"The server is short of {resource}; try again later.", retry_after=_RETRY_SECONDS
    )
