"""Errors of the sandbox protocol and their JSON form.

SandboxError                       `code` and `status` are sent to the client
├── InvalidSandboxRequest     400  an invalid parameter; `param` names it
│   ├── FileRefused           400  an invalid file name or type
│   ├── InstallFailed         400  packages that are not allowed, unknown or in conflict; nothing ran
│   └── UnsupportedMediaType  415  an unsupported content type
├── InvalidServerToken        401  a missing or wrong token
├── ForbiddenOrigin    403  from a web page of another origin, or with a foreign host name
├── SandboxResourceNotFound   404  no such sandbox, execution or file
│   ├── SandboxNotFound
│   ├── ExecutionNotFound
│   └── SandboxFileNotFound
├── SandboxConflict           409  the id belongs to something else
├── SandboxGone               410  the sandbox has ended
├── SandboxPayloadTooLarge      413  more than a limit allows
├── RetryLater                429  the same request may succeed later
│   ├── SandboxServerAtCapacity    the server's sandbox limit is reached
│   └── TenantQuotaExceeded        the tenant's quota is used up
├── SandboxStartFailed        503  one sandbox could not be made; another may
└── SandboxServerUnreachable  503  the client cannot reach the sandbox server
"""

from typing import ClassVar

import msgspec


class SandboxError(Exception):
    """An error of a sandbox or its server.

    param: the invalid parameter, if there is one.
    nothing_started: whether nothing of the request has started: the server rejected it, or was never reached.
    disconnected_at: when its connection broke first, by the event loop's clock; None if it did not.
    """

    code: ClassVar[str] = "sandbox_error"
    status: ClassVar[int] = 500

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.nothing_started = False
        self.disconnected_at: float | None = None


class InvalidSandboxRequest(SandboxError):
    code = "invalid_request"
    status = 400


class FileRefused(InvalidSandboxRequest):
    code = "file_refused"


class InstallFailed(InvalidSandboxRequest):
    code = "install_failed"


class UnsupportedMediaType(InvalidSandboxRequest):
    code = "unsupported_media_type"
    status = 415


class InvalidServerToken(SandboxError):
    code = "not_allowed"
    status = 401


class ForbiddenOrigin(SandboxError):
    code = "forbidden"
    status = 403


class SandboxResourceNotFound(SandboxError):
    code = "not_found"
    status = 404


class SandboxNotFound(SandboxResourceNotFound):
    code = "sandbox_not_found"


class ExecutionNotFound(SandboxResourceNotFound):
    code = "execution_not_found"


class SandboxFileNotFound(SandboxResourceNotFound):
    code = "file_not_found"


class SandboxConflict(SandboxError):
    code = "conflict"
    status = 409


class SandboxGone(SandboxError):
    code = "sandbox_gone"
    status = 410


class SandboxPayloadTooLarge(SandboxError):
    code = "too_large"
    status = 413


class RetryLater(SandboxError):
    code = "try_later"
    status = 429


class SandboxServerAtCapacity(RetryLater):
    code = "at_capacity"


class TenantQuotaExceeded(RetryLater):
    code = "quota_exceeded"


class SandboxStartFailed(SandboxError):
    code = "sandbox_start_failed"
    status = 503


class SandboxServerUnreachable(SandboxError):
    code = "unreachable"
    status = 503


class SandboxErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    code: str
    param: str | None = None


class SandboxErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every error response."""

    error: SandboxErrorDetail


def to_sandbox_error_body(error: SandboxError) -> SandboxErrorBody:
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return SandboxErrorBody(
        error=SandboxErrorDetail(message=error.message, type=kind, code=error.code, param=error.param)
    )


def from_sandbox_error_body(status: int, body: SandboxErrorBody) -> SandboxError:
    """Return the exception that the server raised; an unknown code keeps its message."""
    kind = _BY_CODE.get(body.error.code, SandboxError)
    if kind is SandboxError and 400 <= status < 500:
        kind = InvalidSandboxRequest
    return kind(body.error.message, param=body.error.param)


def _error_classes(kind: type[SandboxError]) -> list[type[SandboxError]]:
    return [kind, *(descendant for child in kind.__subclasses__() for descendant in _error_classes(child))]


_BY_CODE = {kind.code: kind for kind in _error_classes(SandboxError)}
