"""Containers: identity, files, expiry, and the sandboxes behind them."""

from fumehood.containers.container_service import SandboxContainerService
from fumehood.containers.container_state import ContainerSettings
from fumehood.containers.file_sync import ContainerFileLimits

__all__ = [
    "ContainerFileLimits",
    "ContainerSettings",
    "SandboxContainerService",
]
