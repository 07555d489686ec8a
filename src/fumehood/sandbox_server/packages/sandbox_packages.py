"""The packages of one sandbox: installs and attaches more while it runs."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence

from fumehood.protocol.sandbox.sandbox_errors import InstallFailed, SandboxGone
from fumehood.protocol.sandbox.sandbox_messages import ExecutionEndStatus
from fumehood.sandbox_server.packages import requirements
from fumehood.sandbox_server.packages.installer import Installer, PackageProvision
from fumehood.sandbox_server.packages.layer_store import PackageLayer, PinnedPackage
from fumehood.sandbox_server.packages.pip_server import PipServer
from fumehood.sandbox_server.supervisor.sandbox_execution import SandboxExecution
from fumehood.sandbox_server.supervisor.zygote_connection import ZygoteConnection

_MAX_LAYERS = 32
_ATTACH_SECONDS = 30
NO_INSTALLER = "This server installs no packages; use what is there."
NO_INSTALL_JAIL = (
    "Packages cannot be installed in mode {mode}: the installer needs namespaces. Put them into the image, or where "
    "the server's own packages are."
)
_INTERRUPTED_MESSAGE = "The call was interrupted while packages were installed; the code did not run."

type AttachLayers = Callable[[list[str]], Awaitable[None]]
type ProgressCallback = Callable[[str], None]


class SandboxPackages:
    """The packages of one sandbox; requests are served one at a time.

    attach: mounts these layers, the first on top, in the sandbox.
    unavailable: the error message if there is no installer.
    """

    def __init__(
        self, installer: Installer | None, attach: AttachLayers, *, unavailable: str = NO_INSTALLER
    ) -> None:
        self._installer = installer
        self._attach = attach
        self._unavailable = unavailable
        self._layers: list[PackageLayer] = []
        self._added_versions: dict[str, str] = {}
        self._install_lock = asyncio.Lock()
        self._attach_lock = asyncio.Lock()
        self._pip_server: PipServer | None = None
        self._is_closed = False
        self.tenant = ""  # for the limits of the installer

    @property
    def versions(self) -> Mapping[str, str]:
        """Name and version of each package in the sandbox."""
        return (
            self._added_versions
            if self._installer is None
            else {**self._installer.base.versions, **self._added_versions}
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
            on_progress(f"installing {_summarise(missing)}")
            provision = await self._installer.provide(wanted, present, may_replace=False, tenant=self.tenant)
            # Not cancellable: an attached layer must be held.
            await asyncio.shield(self.attach_provision(provision))
            if provision.pins:
                on_progress(
                    f"installed {_summarise([f'{pin.name} {pin.version}' for pin in provision.pins])}"
                )
            return list(provision.pins)

    async def attach_provision(self, provision: PackageProvision) -> None:
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

    async def _attach_layer(self, layer: PackageLayer) -> None:
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
        self._pip_server = PipServer(listener, self.install)

    def close(self) -> None:
        """Stop serving `pip` and release the layers."""
        self._is_closed = True
        if self._pip_server is not None:
            self._pip_server.close()
            self._pip_server = None
        for layer in self._layers:
            layer.close()
        self._layers.clear()


async def attach_layers(
    zygote: ZygoteConnection, number: int, mount_namespace: int, layers: list[str]
) -> None:
    """Let a helper mount these layers, the first on top, in a sandbox. Raises InstallFailed."""
    sock, helper_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with sock:
        with helper_end:
            zygote.send_request({"op": "attach", "number": number}, [helper_end.fileno(), mount_namespace])
        sock.setblocking(False)
        sock.send(json.dumps({"layers": layers}).encode())
        body = b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ATTACH_SECONDS):
                body = await asyncio.get_running_loop().sock_recv(sock, 65536)
    problem = json.loads(body).get("error") if body else "no answer"
    if problem:
        raise InstallFailed(f"The packages were installed, but could not be attached: {problem}.")


def _summarise(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


async def install_requirements(
    execution: SandboxExecution, packages: SandboxPackages
) -> tuple[ExecutionEndStatus, str] | None:
    """Install the requirements of an execution before its code runs.

    Returns None if the code may run, otherwise the status and the reason of the execution's end.
    """
    if not execution.requirements:
        return None
    loop = asyncio.get_running_loop()
    started_at = loop.time()
    install = asyncio.ensure_future(packages.install(execution.requirements, execution.append_note))
    try:
        await asyncio.wait(
            {install, execution.interrupt_requested, execution.lost}, return_when=asyncio.FIRST_COMPLETED
        )
        if execution.lost.done():
            return "lost", f"The sandbox was lost: {execution.lost.result()}."
        if not install.done():
            return "interrupted", _INTERRUPTED_MESSAGE
        install.result()
    except InstallFailed as error:
        return "install_failed", error.message
    except SandboxGone as error:
        return "lost", error.message
    finally:
        install.cancel()
        await asyncio.gather(install, return_exceptions=True)
        execution.install_seconds = loop.time() - started_at
    execution.start_clock()  # the timeout of the code starts here
    return None
