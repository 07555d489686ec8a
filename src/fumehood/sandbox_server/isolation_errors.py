"""The error for what the host cannot provide."""

from fumehood.protocol.sandbox.sandbox_errors import SandboxError


class IsolationUnavailable(SandboxError):
    """This host lacks what sandboxes need: `reason` says what, `advice` what the operator can do."""

    code = "isolation_unavailable"
    status = 503

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(f"{reason} {advice}")
        self.reason = reason
        self.advice = advice
