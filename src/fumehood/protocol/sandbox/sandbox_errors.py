"""What can go wrong with sandboxes, and its form on the wire.

SandboxError                     `code` and `status` are what a remote caller gets
├── RequestRefused          400  a parameter that cannot be served; `param` names it
│   ├── FileRefused         400  a name or type of file that is not served
│   ├── InstallFailed       400  packages that are refused, unknown, or in conflict; nothing ran
│   └── UnsupportedType     415  a body of a type that is not read here
├── NotAllowed              401  no token, or the wrong one
├── Forbidden               403  from a web page of another site, or by a name that is not the server's
├── NotThere                404  no such sandbox, execution or file
│   ├── SandboxNotFound
│   ├── ExecutionNotFound
│   └── FileNotFound
├── Conflict                409  the id is taken by something else
├── SandboxGone             410  the sandbox ended before or while it was asked for something
├── TooLarge                413  more than a limit allows
├── TryLater                429  the same request may be served later
│   ├── AtCapacity               as many sandboxes live as are allowed
│   └── QuotaExceeded            as many as this tenant may have
├── SandboxStartFailed      503  one sandbox could not be made; the next may
└── Unreachable             503  the caller cannot reach the sandbox server at all
"""

from typing import ClassVar

import msgspec


class SandboxError(Exception):
    """`param` names the parameter at fault, where there is one.

    refused: whether the server said so, or was never reached: then nothing of what it was asked for has begun.
    given_up: whether a broken connection was tried to be restored for as long as is worth it.
    broke_at: when that connection broke, by the event loop's clock; None where none did.
    """

    code: ClassVar[str] = "sandbox_error"
    status: ClassVar[int] = 500

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.nothing_started = False
        self.retries_exhausted = False
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


class SandboxAccessForbidden(SandboxError):
    code = "forbidden"
    status = 403


class SandboxResourceNotFound(SandboxError):
    code = "not_found"
    status = 404


class SandboxNotFound(SandboxResourceNotFound):
    code = "sandbox_not_found"


class ExecutionNotFound(SandboxResourceNotFound):
    code = "execution_not_found"


class FileNotFound(SandboxResourceNotFound):
    code = "file_not_found"


class SandboxConflict(SandboxError):
    code = "conflict"
    status = 409


class SandboxGone(SandboxError):
    code = "sandbox_gone"
    status = 410


class SandboxLimitExceeded(SandboxError):
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
    """The body of every answer that is not a success."""

    error: SandboxErrorDetail


def to_sandbox_error_body(error: SandboxError) -> SandboxErrorBody:
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return SandboxErrorBody(
        error=SandboxErrorDetail(message=error.message, type=kind, code=error.code, param=error.param)
    )


def from_sandbox_error_body(status: int, body: SandboxErrorBody) -> SandboxError:
    """The exception that a server raised; one that this version does not know keeps its message."""
    kind = _BY_CODE.get(body.error.code, SandboxError)
    if kind is SandboxError and 400 <= status < 500:
        kind = InvalidSandboxRequest
    return kind(body.error.message, param=body.error.param)


def _error_classes(kind: type[SandboxError]) -> list[type[SandboxError]]:
    return [kind, *(below for child in kind.__subclasses__() for below in _error_classes(child))]


_BY_CODE = {kind.code: kind for kind in _error_classes(SandboxError)}
