"""The main program of the container `egress` of a pod: whatever needs the network on behalf of the code.

    python -m fumehood.sandbox_server.pod.egress_entrypoint /run/fumehood/egress/egress.sock

It installs packages and starts the egress proxy for one sandbox server, over one connection, and ends with it. It has
neither the server's token nor the socket of the code. Settings come from FUMEHOOD_SANDBOX_… variables, as those of the
server.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from fumehood.configuration import ConfigError
from fumehood.protocol.sandbox.sandbox_errors import InstallFailed
from fumehood.sandbox_server import structured_logging
from fumehood.sandbox_server.egress import proxy_control
from fumehood.sandbox_server.host.python_runtime import PythonRuntimeUnavailable
from fumehood.sandbox_server.inside import layout, syscalls
from fumehood.sandbox_server.isolation_errors import IsolationUnavailable
from fumehood.sandbox_server.packages.installer import Installer, InstallResult
from fumehood.sandbox_server.packages.installer_factory import open_container_installer
from fumehood.sandbox_server.packet_channel import PacketChannel
from fumehood.sandbox_server.pod import egress_messages, layer_publisher
from fumehood.sandbox_server.pod.egress_messages import (
    AttachRequest,
    EgressAnswer,
    EgressReady,
    EgressRequest,
    ProvideRequest,
    ProvideResult,
    ProxyRequest,
    RequestDone,
    RequestFailed,
)
from fumehood.sandbox_server.settings import SandboxServerSettings
from fumehood.sandbox_server.settings_loader import load_sandbox_config

logger = logging.getLogger(__name__)

_SOCKET_MODE = 0o660  # the containers share a group, not a user
_STORE = ".fumehood"  # below the volume of packages; other users cannot enter it
_DEFAULT_MAX_BYTES = 3 << 30  # of cache, layers and what is being built: below the size of the volume


class EgressContainer:
    """Serves the sandbox server until it closes its connection."""

    def __init__(self, server: socket.socket, installer: Installer | None, problem: str) -> None:
        self._installer = installer
        self._held: list[InstallResult] = []  # layers stay while the pod lives
        self._tasks: set[asyncio.Task[None]] = set()
        self._proxies: list[subprocess.Popen[bytes]] = []
        self.ended = asyncio.Event()
        self._channel = PacketChannel(
            server, on_packet=self._on_packet, on_close=self.ended.set, accept_fds=True
        )
        versions = {} if installer is None else dict(installer.versions)
        self._send(EgressReady(versions=versions, problem=problem))

    def _send(self, answer: EgressAnswer) -> None:
        self._channel.send(egress_messages.encode(answer))

    def _on_packet(self, body: bytes, fds: list[int]) -> None:
        task = asyncio.ensure_future(self._answer(egress_messages.decode_request(body), fds))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, request: EgressRequest, fds: list[int]) -> None:
        try:
            match request:
                case ProvideRequest():
                    self._send(await self._provide(request))
                case AttachRequest():
                    await self._attach(request)
                    self._send(RequestDone(number=request.number))
                case ProxyRequest():
                    # It answers to the server alone, and ends when the server closes its end.
                    configuration, control = fds
                    self._proxies.append(proxy_control.spawn_proxy(configuration, control))
                    self._send(RequestDone(number=request.number))
        except InstallFailed as error:
            self._send(RequestFailed(number=request.number, message=error.message))
        except OSError as error:
            logger.error("A request failed: %s", error)
            self._send(RequestFailed(number=request.number, message=str(error)))
        finally:
            for fd in fds:
                os.close(fd)

    async def _provide(self, request: ProvideRequest) -> ProvideResult:
        if self._installer is None:
            raise InstallFailed("The container egress of this pod cannot install packages; its log says why.")
        result = await self._installer.provide(
            request.wanted, request.present, may_replace=request.may_replace
        )
        self._held.append(result)
        return ProvideResult(
            number=request.number,
            layer=None if result.layer is None else result.layer.key,
            pins=[(pin.name, pin.version) for pin in result.pins],
            replaced=dict(result.replaced),
        )

    async def _attach(self, request: AttachRequest) -> None:
        if self._installer is None or request.layer not in [
            result.layer.key for result in self._held if result.layer is not None
        ]:
            raise InstallFailed("There is no such layer.")
        layer = self._installer.store.layers_directory / request.layer
        await asyncio.to_thread(layer_publisher.publish_layer, layer, Path(layout.ATTACHED_PACKAGES))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._installer is not None:
            await self._installer.close()
        for proxy in self._proxies:
            proxy.kill()
            await asyncio.to_thread(proxy.wait)
        self._channel.close()


def open_installer(settings: SandboxServerSettings) -> tuple[Installer | None, str]:
    """Return the installer, or why there is none."""
    try:
        directory = Path(layout.ATTACHED_PACKAGES) / _STORE
        return open_container_installer(directory, settings, max_bytes=settings.packages_bytes), ""
    except (OSError, PythonRuntimeUnavailable, IsolationUnavailable) as error:
        logger.error("Packages cannot be installed: %s", error)
        return None, str(error)


async def serve(path: str, settings: SandboxServerSettings) -> None:
    """Listen on the socket `path` and serve the server that connects."""
    installer, problem = await asyncio.to_thread(open_installer, settings)
    if installer is not None:
        await asyncio.to_thread(lambda: installer.versions)
    connection = await accept_once(path)
    container = EgressContainer(connection, installer, problem)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, container.ended.set)
    try:
        await container.ended.wait()
    finally:
        await container.close()


async def accept_once(path: str) -> socket.socket:
    """Create the socket, which is connectable as soon as it is there, and remove it after one connection."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as listener:
        unready = f"{path}.new"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unready)  # left by an earlier run in this container
        listener.bind(unready)
        os.chmod(unready, _SOCKET_MODE)
        listener.listen(1)
        listener.setblocking(False)
        os.rename(unready, path)
        connection, _ = await asyncio.get_running_loop().sock_accept(listener)
        os.unlink(path)
    return connection


def main(path: str) -> int:
    """Run until the server closes its connection; returns the exit status."""
    if os.geteuid() == 0:
        sys.exit("this container needs no root; set runAsUser in the pod's security context")
    structured_logging.configure_logging("json", logging.INFO)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)  # uv has the same user
    try:
        loaded = load_sandbox_config(None, os.environ, defaults={"packages_bytes": _DEFAULT_MAX_BYTES})
    except ConfigError as error:
        sys.exit(str(error))
    asyncio.run(serve(path, loaded.settings))
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m fumehood.sandbox_server.pod.egress_entrypoint SOCKET")
    sys.exit(main(sys.argv[1]))
