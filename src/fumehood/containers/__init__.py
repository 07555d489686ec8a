"""Containers: their identity, files and expiry, over the sandboxes of a provider.

`SandboxContainerService` is the entry point; tools and routes use it as a `ContainerService`.
"""

from fumehood.containers.container_service import SandboxContainerService
from fumehood.containers.container_settings import ContainerSettings
from fumehood.containers.file_sync import ContainerFileLimits

__all__ = [
    "ContainerFileLimits",
    "ContainerSettings",
    "SandboxContainerService",
]
