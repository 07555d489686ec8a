"""Checks for `fumehood doctor`: whether this host can isolate code, and what to do if not."""

from dataclasses import replace

from fumehood.sandbox_server.diagnostics.findings import HostFinding, HostReport, InspectedHost
from fumehood.sandbox_server.diagnostics.host_checks import check_host
from fumehood.sandbox_server.diagnostics.smoke_test import run_smoke_test
from fumehood.sandbox_server.settings import SandboxServerSettings

__all__ = ["HostFinding", "HostReport", "InspectedHost", "diagnose"]


async def diagnose(settings: SandboxServerSettings, host: InspectedHost | None = None) -> HostReport:
    """Check what can be read about the host, then run one real sandbox."""
    found = check_host(settings, host)
    tried = await run_smoke_test(settings)
    is_usable = all(finding.state != "missing" for finding in tried)
    if is_usable:
        # A check can be wrong where a real sandbox works; but a sandbox that works does not show what isolates it.
        found = [item if _is_decisive(item, settings) else _downgrade_to_warning(item) for item in found]
        is_usable = all(finding.state != "missing" for finding in found)
    return HostReport(settings.mode, is_usable, [*found, *tried])


def _is_decisive(finding: HostFinding, settings: SandboxServerSettings) -> bool:
    """In this mode only Landlock keeps code from the host's files."""
    return settings.mode == "unsafe-degraded" and finding.name == "Landlock"


def _downgrade_to_warning(finding: HostFinding) -> HostFinding:
    return replace(finding, state="warning") if finding.state == "missing" else finding
