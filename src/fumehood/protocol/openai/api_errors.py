"""What a caller of the gateway can get wrong or be refused, and its form on the wire.

ApiError                          `status`, `type`, `code`, `param` and `message` are what the caller gets
├── InvalidRequest           400  a parameter that cannot be served; `param` names it
│   ├── PreviousNotFound     400  `previous_response_id` names nothing of this tenant
│   └── ContainerExpired     400  the container that is named has expired
├── NotAuthenticated         401  no key, or the wrong one
├── NotFound                 404  nothing of this tenant has that id
├── Conflict                 409  the same key for another request, or a state that forbids it
├── BodyTooLarge             413  more than a limit allows
├── RateLimited              429  the same request may be served later; `retry_after` seconds
├── ServerFault              500  ours
│   └── StorageCorrupted     500  something that is stored cannot be read
├── Unavailable              503  something that the gateway needs is not there now
│   └── StorageUnavailable   503  nothing can be written now, e.g. because the disk is full
└── ModelError               502  a model server refused, failed or lied
    ├── ModelRefused         400  it refused the request: too long, unknown parameter, content
    ├── ModelRateLimited     429  it is busy
    ├── ModelUnreachable     502  it could not be reached, or the connection broke
    └── ModelTimeout         504  it was silent for too long

An error before the first byte is an HTTP status with `to_body`; after it, an `error` event and `response.failed`.
What the model may learn is never an exception: it is the text of a tool's result.
"""

import errno
from typing import ClassVar

import msgspec


class ApiError(Exception):
    """`param` names the parameter at fault, `retry_after` the seconds after which trying again may help.

    may_have_run: whether code may have run for the request, so that nobody should repeat it without being asked.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
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


class InvalidRequest(ApiError):
    status = 400
    type = "invalid_request_error"


class PreviousResponseNotFound(InvalidRequest):
    code = "previous_response_not_found"


class ContainerExpired(InvalidRequest):
    code = "container_expired"


class NotAuthenticated(ApiError):
    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


class NotFound(ApiError):
    status = 404
    type = "invalid_request_error"


class Conflict(ApiError):
    status = 409
    type = "invalid_request_error"


class BodyTooLarge(ApiError):
    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class RateLimited(ApiError):
    status = 429
    type = "rate_limit_error"
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
    type = "invalid_request_error"
    code = "invalid_prompt"


class ModelRateLimited(ModelError):
    status = 429
    type = "rate_limit_error"
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
    """The body of every answer that is not a success."""

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
    """What a caller of the gateway is told of it: the same request may be served later. None for other errors."""
    if isinstance(error, MemoryError):
        lacking = "memory"
    else:
        lacking = _RESOURCE_BY_ERRNO.get(error.errno or 0) if isinstance(error, OSError) else None
    if lacking is None:
        return None
    return ServiceUnavailable(
        f"The server is short of {lacking}; try again later.", retry_after=_RETRY_SECONDS
    )
