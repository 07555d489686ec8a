"""The packages of one sandbox: installs and attaches more while it runs."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from fumehood.protocol.sandbox.sandbox_errors import InstallFailed, SandboxGone
from fumehood.sandbox_server.packages import requirements
from fumehood.sandbox_server.packages.installer import (
    InstallResult,
    LayerHandle,
    PackageInstaller,
    ProgressCallback,
)
from fumehood.sandbox_server.packages.layer_store import PinnedPackage
from fumehood.sandbox_server.packages.pip_server import PipRequestServer

_MAX_LAYERS = 32
NO_INSTALLER = "This server installs no packages; use what is there."
NO_INSTALL_JAIL = (
    "Packages cannot be installed in mode {mode}: the installer needs namespaces. Put them into the image, or where "
    "the server's own packages are."
)
NO_EGRESS_CONTAINER = (
    "This pod installs no packages: it has no container for that (egress_socket). Put the packages into its image, or "
    "add the container `egress` to its template."
)

type AttachLayers = Callable[[list[str]], Awaitable[None]]


class SandboxPackageManager:
    """The packages of one sandbox; requests are served one at a time.

    attach: mounts these layers, the first on top, in the sandbox.
    unavailable: the error message if there is no installer.
    """

    def __init__(
        self, installer: PackageInstaller | None, attach: AttachLayers, *, unavailable: str = NO_INSTALLER
    ) -> None:
        self._installer = installer
        self._attach = attach
        self._unavailable = unavailable
        self._layers: list[LayerHandle] = []
        self._added_versions: dict[str, str] = {}
        self._install_lock = asyncio.Lock()
        self._attach_lock = asyncio.Lock()
        self._pip_server: PipRequestServer | None = None
        self._is_closed = False
        self.tenant = ""  # for the limits of the installer

    @property
    def versions(self) -> Mapping[str, str]:
        """Name and version of each package in the sandbox."""
        return (
            self._added_versions
            if self._installer is None
            else {**self._installer.versions, **self._added_versions}
        )

    async def install(self, lines: Sequence[str], on_progress: ProgressCallback) -> list[PinnedPackage]:
        """Install and attach what is missing; returns the added packages. Raises InstallFailed, SandboxGone.

        on_progress: called with a line of text now and then.
        """
        if self._installer is None:
            raise InstallFailed(self._unavailable, param="requirements")
        wanted = requirements.parse_requirements(lines)
        async with self._install_lock:
            present = self.versions
            missing = requirements.find_unmet(wanted, present)
            if not missing:
                return []
            on_progress(f"installing {requirements.summarise(missing)}")
            provision = await self._installer.provide(wanted, present, may_replace=False, tenant=self.tenant)
            # Not cancellable: an attached layer must be held.
            await asyncio.shield(self.attach_provision(provision))
            if provision.pins:
                on_progress(f"installed {requirements.summarise(provision.describe_pins())}")
            return list(provision.pins)

    async def attach_provision(self, provision: InstallResult) -> None:
        """Attach the layer of a provision and hold it until `close`. Raises InstallFailed, SandboxGone."""
        layer = provision.layer
        if layer is None:
            return
        async with self._attach_lock:
            try:
                await self._attach_layer(layer)
            except BaseException:
                layer.close()
                raise
            self._layers.append(layer)
            self._added_versions.update({pin.name: pin.version for pin in provision.pins})

    async def _attach_layer(self, layer: LayerHandle) -> None:
        if len(self._layers) >= _MAX_LAYERS:
            raise InstallFailed(
                f"Packages were installed {_MAX_LAYERS} times in this sandbox, the limit; use a new container.",
                param="requirements",
            )
        if not self._is_closed:
            names = [layer.key, *(attached.key for attached in reversed(self._layers))]
            await self._attach(list(dict.fromkeys(names)))
        if self._is_closed:
            raise SandboxGone("The sandbox ended while packages were installed.")

    def serve_pip(self, listener: int) -> None:
        """Serve the sandbox's `pip` on this listening descriptor, which this object owns from now on."""
        self._pip_server = PipRequestServer(listener, self.install)

    def close(self) -> None:
        """Stop serving `pip` and release the layers."""
        self._is_closed = True
        if self._pip_server is not None:
            self._pip_server.close()
            self._pip_server = None
        for layer in self._layers:
            layer.close()
        self._layers.clear()
