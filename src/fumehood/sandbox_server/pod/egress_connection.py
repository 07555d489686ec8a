"""The server's connection to the container `egress` of its pod: packages, and the egress proxy."""

import asyncio
import itertools
import logging
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from fumehood.protocol.sandbox.sandbox_errors import InstallFailed
from fumehood.sandbox_server import structured_logging
from fumehood.sandbox_server.egress import control_messages
from fumehood.sandbox_server.egress.proxy_control import ProxyProcess, open_memory_file
from fumehood.sandbox_server.isolation_errors import IsolationUnavailable
from fumehood.sandbox_server.packages import requirements
from fumehood.sandbox_server.packages.installer import NO_PROVISION, InstallResult
from fumehood.sandbox_server.packages.layer_store import PinnedPackage
from fumehood.sandbox_server.packet_channel import PacketChannel
from fumehood.sandbox_server.pod import egress_messages
from fumehood.sandbox_server.pod.egress_messages import (
    AttachRequest,
    EgressAnswer,
    EgressReady,
    EgressRequest,
    ProvideRequest,
    ProvideResult,
    ProxyRequest,
    RequestFailed,
)

_READY_SECONDS = 60
_ENDED = "the container egress of this pod has ended"


class PodLayer:
    """A layer in the container `egress`, which keeps it while the pod lives."""

    def __init__(self, key: str) -> None:
        self.key = key

    def share(self) -> "PodLayer":
        return self

    def close(self) -> None:
        pass


class EgressConnection:
    """A `PackageInstaller`, and a starter of egress proxies; both work in the other container.

    Whatever that container says is checked for its form, and gives it no power over this process: it installs packages
    that anybody may publish.
    """

    def __init__(self, sock: socket.socket, *, install_timeout: float) -> None:
        self._install_timeout = install_timeout
        self._answers: dict[int, asyncio.Future[EgressAnswer]] = {}
        self._numbers = itertools.count(1)
        self._ready: asyncio.Future[EgressReady] = asyncio.get_running_loop().create_future()
        self._is_closed = False
        self.installed_count = self.failed_count = 0
        self._channel = PacketChannel(sock, on_packet=self._on_packet, on_close=self._on_close)

    @classmethod
    async def connect(cls, path: Path, *, install_timeout: float) -> "EgressConnection":
        """Connect, and wait for the container. Raises IsolationUnavailable."""
        advice = "Start it: `python -m fumehood.sandbox_server.pod.egress_entrypoint PATH`."
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            sock.connect(str(path))
        except OSError as error:
            sock.close()
            raise IsolationUnavailable(
                f"The container egress does not listen on {path}: {error.strerror}.", advice
            ) from error
        connection = cls(sock, install_timeout=install_timeout)
        try:
            async with asyncio.timeout(_READY_SECONDS):
                await asyncio.shield(connection._ready)
        except (TimeoutError, EOFError) as error:
            await connection.close()
            raise IsolationUnavailable(f"The container egress does not answer on {path}.", advice) from error
        return connection

    @property
    def versions(self) -> Mapping[str, str]:
        return self._ready.result().versions

    @property
    def problem(self) -> str:
        """Why no packages can be installed; empty if they can."""
        return self._ready.result().problem

    # ---- packages ---------------------------------------------------------------------------------------------

    async def provide(
        self, wanted: Sequence[str], present: Mapping[str, str], *, may_replace: bool, tenant: str = ""
    ) -> InstallResult:
        """As `Installer.provide`. Raises InstallFailed."""
        if not requirements.find_unmet(wanted, present):
            return NO_PROVISION
        try:
            answer = await self._ask(
                ProvideRequest(
                    number=next(self._numbers),
                    wanted=[*wanted],
                    present=dict(present),
                    may_replace=may_replace,
                ),
                # Resolving twice, then installing: the container itself stops each in time.
                4 * self._install_timeout,
            )
        except InstallFailed as error:
            self.failed_count += 1
            structured_logging.log_event(
                "packages_failed", level=logging.WARNING, reason=error.message, tenant=tenant
            )
            raise
        if not isinstance(answer, ProvideResult):
            raise InstallFailed("The container egress gave a wrong answer.", param="requirements")
        self.installed_count += 1
        pins = tuple(PinnedPackage(name, version) for name, version in answer.pins)
        layer = None if answer.layer is None else PodLayer(answer.layer)
        return InstallResult(layer, pins, answer.replaced)

    async def attach_layers(self, layers: list[str]) -> None:
        """Make the first of these layers visible to the code; the others are already. Raises InstallFailed."""
        await self._ask(AttachRequest(number=next(self._numbers), layer=layers[0]), self._install_timeout)

    # ---- the egress proxy -------------------------------------------------------------------------------------

    async def start_proxy(self, configuration: control_messages.ProxyConfiguration) -> ProxyProcess:
        """Start a proxy in the container. Raises OSError."""
        control, proxy_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with proxy_end, open_memory_file(control_messages.encode(configuration)) as content:
                await self._ask(
                    ProxyRequest(number=next(self._numbers)),
                    self._install_timeout,
                    [content, proxy_end.fileno()],
                )
        except InstallFailed as error:
            control.close()
            raise OSError(error.message) from error
        except BaseException:
            control.close()
            raise
        return ProxyProcess(control)

    # ---- messages ---------------------------------------------------------------------------------------------

    async def _ask(
        self, request: EgressRequest, seconds: float, fds: list[int] | None = None
    ) -> EgressAnswer:
        """Send a request and return its answer. Raises InstallFailed."""
        if self._is_closed:
            raise InstallFailed(f"Nothing can be installed: {_ENDED}.", param="requirements")
        answered = self._answers[request.number] = asyncio.get_running_loop().create_future()
        self._channel.send(egress_messages.encode(request), fds)
        try:
            async with asyncio.timeout(seconds):
                answer = await answered
        except TimeoutError:
            raise InstallFailed(
                f"The container egress did not answer within {seconds:g} s.", param="requirements"
            ) from None
        finally:
            del self._answers[request.number]
        if isinstance(answer, RequestFailed):
            raise InstallFailed(answer.message, param="requirements")
        return answer

    def _on_packet(self, body: bytes, fds: list[int]) -> None:
        del fds  # the channel accepts none
        try:
            answer = egress_messages.decode_answer(body)
        except msgspec.MsgspecError:
            self._channel.close()
            self._on_close()
            return
        if isinstance(answer, EgressReady):
            if not self._ready.done():
                self._ready.set_result(answer)
        elif (answered := self._answers.get(answer.number)) is not None and not answered.done():
            answered.set_result(answer)

    def _on_close(self) -> None:
        self._is_closed = True
        if not self._ready.done():
            self._ready.set_exception(EOFError(_ENDED))
            self._ready.exception()  # retrieved, even if nobody waits
        for number, answered in self._answers.items():
            if not answered.done():
                text = f"Nothing can be installed: {_ENDED}."
                answered.set_result(RequestFailed(number=number, message=text))

    async def close(self) -> None:
        """End the container, which ends with its connection."""
        self._on_close()
        self._channel.close()
