"""The one error that only whoever starts a sandbox server meets."""

from fumehood.protocol.sandbox.sandbox_errors import SandboxError


class IsolationUnavailable(SandboxError):
    """This machine cannot isolate, nothing is started; `advice` says what to do about it."""

    code = "isolation_unavailable"
    status = 503

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(f"{reason} {advice}")
        self.reason = reason
        self.advice = advice
