"""What can go wrong with sandboxes, by audience; imports nothing.

SandboxError                     the operator's or the caller's to know
├── IsolationUnavailable         this machine cannot isolate; nothing is started
├── SandboxStartFailed           one sandbox could not be made; the next may
├── AtCapacity                   as many sandboxes live as are allowed
├── SandboxGone                  the sandbox ended before or while it was asked for something
└── FileRefused                  a name, type or size that is not served
"""


class SandboxError(Exception):
    pass


class IsolationUnavailable(SandboxError):
    """`advice` says what to do about it."""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(f"{reason} {advice}")
        self.reason = reason
        self.advice = advice


class SandboxStartFailed(SandboxError):
    pass


class AtCapacity(SandboxError):
    pass


class SandboxGone(SandboxError):
    pass


class FileRefused(SandboxError):
    pass
