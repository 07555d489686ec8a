"""Sandbox providers: clients of a sandbox server.

`LocalServerProvider` starts a server on this host; `RemoteSandboxProvider` connects to one over TCP or a unix socket.
"""

from fumehood.sandbox_client.local_server_provider import LocalServerProvider, LocalServerSettings
from fumehood.sandbox_client.remote_provider import RemoteSandboxProvider
from fumehood.sandbox_client.sandbox_readiness import SandboxReadiness

__all__ = [
    "LocalServerProvider",
    "LocalServerSettings",
    "RemoteSandboxProvider",
    "SandboxReadiness",
]
