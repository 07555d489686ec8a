"""The packages of one sandbox: installs more while it lives, one request at a time; imports siblings and `protocol`."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence

from fumehood.protocol.sandbox_errors import InstallFailed, SandboxGone
from fumehood.sandboxd.packages import requirements
from fumehood.sandboxd.packages.installer import Installer, Provision
from fumehood.sandboxd.packages.pips import PipService
from fumehood.sandboxd.packages.store import Layer, Pin
from fumehood.sandboxd.zygotes import Zygote

_MOST_LAYERS = 32
_ATTACH_SECONDS = 30
NOT_OFFERED = "This server installs no packages; use what is there."
NO_JAIL = (
    "Packages cannot be installed in mode {mode}: the installer needs namespaces. Put them into the image, or where "
    "the server's own packages are."
)

type Attach = Callable[[list[str]], Awaitable[None]]
type Say = Callable[[str], None]


class SandboxPackages:
    """`attach` puts these layers, the first on top, where the sandbox has its packages."""

    def __init__(
        self, installer: Installer | None, attach: Attach, *, unavailable: str = NOT_OFFERED
    ) -> None:
        self._installer = installer
        self._attach = attach
        self._unavailable = unavailable
        self._layers: list[Layer] = []
        self._added: dict[str, str] = {}
        self._turn = asyncio.Lock()
        self._attaching = asyncio.Lock()
        self._pip: PipService | None = None
        self._closed = False
        self.tenant = ""  # on whose account more is built

    @property
    def versions(self) -> Mapping[str, str]:
        """What the sandbox has."""
        return self._added if self._installer is None else {**self._installer.base.versions, **self._added}

    async def install(self, lines: Sequence[str], say: Say) -> list[Pin]:
        """Bring what is missing in; raises InstallFailed, SandboxGone. `say` gets a line of progress now and then."""
        if self._installer is None:
            raise InstallFailed(self._unavailable, param="requirements")
        wanted = requirements.parse(lines)
        async with self._turn:
            present = self.versions
            missing = requirements.unmet(wanted, present)
            if not missing:
                return []
            say(f"installing {_few(missing)}")
            provision = await self._installer.provide(wanted, present, may_replace=False, tenant=self.tenant)
            # Whoever stops waiting here does not leave a layer behind that is attached and not held.
            await asyncio.shield(self.take(provision))
            if provision.pins:
                say(f"installed {_few([f'{pin.name} {pin.version}' for pin in provision.pins])}")
            return list(provision.pins)

    async def take(self, provision: Provision) -> None:
        """Attach a provision and hold its layer for as long as the sandbox lives."""
        layer = provision.layer
        if layer is None:
            return
        async with self._attaching:
            try:
                await self._put_on_top(layer)
            except BaseException:
                layer.close()
                raise
            self._layers.append(layer)
            self._added.update({pin.name: pin.version for pin in provision.pins})

    async def _put_on_top(self, layer: Layer) -> None:
        if len(self._layers) >= _MOST_LAYERS:
            raise InstallFailed(
                f"Packages were installed {_MOST_LAYERS} times in this sandbox; a new container is needed.",
                param="requirements",
            )
        if not self._closed:
            names = [layer.key, *(held.key for held in reversed(self._layers))]
            await self._attach(list(dict.fromkeys(names)))
        if self._closed:
            raise SandboxGone("The sandbox ended while packages were installed.")

    def listen(self, listener: int) -> None:
        """Answer `pip` inside on this listening descriptor, which becomes ours."""
        self._pip = PipService(listener, self.install)

    def close(self) -> None:
        self._closed = True
        if self._pip is not None:
            self._pip.close()
            self._pip = None
        for layer in self._layers:
            layer.close()
        self._layers.clear()


async def attach(zygote: Zygote, number: int, namespace: int, layers: list[str]) -> None:
    """Have a helper of the zygote put these layers, the first on top, into the mounts of a sandbox."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with mine:
        with theirs:
            zygote.request({"op": "attach", "number": number}, [theirs.fileno(), namespace])
        mine.setblocking(False)
        mine.send(json.dumps({"layers": layers}).encode())
        body = b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ATTACH_SECONDS):
                body = await asyncio.get_running_loop().sock_recv(mine, 65536)
    problem = json.loads(body).get("error") if body else "no answer"
    if problem:
        raise InstallFailed(f"The packages were installed, but could not be attached: {problem}.")


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
