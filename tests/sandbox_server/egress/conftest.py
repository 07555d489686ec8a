"""A supervisor whose sandboxes may reach two fake domains on loopback."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from fumehood.http_server.dns_resolver import DnsResolutionFailed, DnsResolver
from fumehood.protocol.sandbox.sandbox_messages import DomainSecret, NetworkAllowlist, SandboxSpec
from fumehood.sandbox_server.egress.control_messages import EgressEvent, ProxyConfiguration
from fumehood.sandbox_server.egress.proxy import client_tls_context
from fumehood.sandbox_server.egress.proxy_control import EgressController, ProxyProcess
from fumehood.sandbox_server.egress.proxy_worker import ProxyWorker
from fumehood.sandbox_server.supervisor.sandbox_instance import SandboxInstance
from fumehood.sandbox_server.supervisor.supervisor import Supervisor
from tests.support.sandbox_runs import run, settings
from tests.support.waiting import wait_until
from tests.support.websites import Website, WebsiteAuthority

PLAIN = "data.test"
SECURE = "secure.test"
OTHER = "other.test"
METADATA = "metadata.test"  # of an address that nobody may reach


@dataclass
class EgressNetwork:
    """The websites, the supervisor and what its proxy reported."""

    supervisor: Supervisor
    plain: Website
    secure: Website
    authority: WebsiteAuthority
    events: list[EgressEvent] = field(default_factory=list[EgressEvent])

    async def wait_for_events(self, count: int) -> list[EgressEvent]:
        """What the proxy reported, once there is so much of it: it is another process."""
        await wait_until(lambda: len(self.events) >= count)
        return self.events

    async def create(
        self, *domains: str, secrets: list[DomainSecret] | None = None, **spec: Any
    ) -> SandboxInstance:
        network = NetworkAllowlist(allowed_domains=list(domains), domain_secrets=secrets or [])
        return await self.supervisor.create(SandboxSpec(network=network, **spec))


async def send_raw_bytes(box: SandboxInstance, *pieces: bytes, half_close: bool = False) -> bytes:
    """What the proxy answers to these bytes, sent one after the other from inside; b"" for a mere end."""
    outcome = await run(
        box,
        f"""
import socket
with socket.create_connection(("127.0.0.1", 3128), 30) as s:
    answer = b""
    try:
        for piece in {pieces!r}:
            s.sendall(piece)
        if {half_close!r}:
            s.shutdown(socket.SHUT_WR)
        while data := s.recv(65536):
            answer += data
    except ConnectionResetError:
        pass
print(answer.hex())
""",
    )
    assert outcome.end.status == "ok", outcome
    return bytes.fromhex(outcome.stdout)


async def fetch_through_proxy(box: SandboxInstance, url: str, **more: str) -> str:
    """What urllib gets inside, as it stands: the body, or `HTTPError 403: …`, or another error's name."""
    outcome = await run(
        box,
        f"""
import urllib.request, urllib.error
try:
    request = urllib.request.Request({url!r}, headers={more!r})
    print(urllib.request.urlopen(request, timeout=30).read().decode())
except urllib.error.HTTPError as error:
    with error:
        print(f"HTTPError {{error.code}}: {{error.read().decode()}}")
except OSError as error:
    print(f"{{type(error).__name__}}: {{error}}")
""",
    )
    assert outcome.end.status == "ok", outcome
    return outcome.stdout.strip()


class TableResolver(DnsResolver):
    """Answers from a table, a list of answers after another for each name; `asked` counts."""

    def __init__(self, table: dict[str, list[list[str]]]) -> None:
        super().__init__({}, timeout=5)
        self._table = table
        self.asked: list[str] = []

    async def resolve(self, name: str) -> list[str]:
        self.asked.append(name)
        if name not in self._table:
            raise DnsResolutionFailed
        answers = self._table[name]
        return answers.pop(0) if len(answers) > 1 else answers[0]


class InProcessProxy:
    """Runs the proxy in this process, over the same messages, so that a test can answer for its name server."""

    def __init__(self) -> None:
        self.worker: ProxyWorker | None = None
        self._running: asyncio.Task[None] | None = None

    async def start(self, configuration: ProxyConfiguration) -> ProxyProcess:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.worker = ProxyWorker(theirs, configuration, client_tls_context(configuration.ca_certificates))
        self._running = asyncio.ensure_future(self.worker.run())
        return ProxyProcess(mine)

    async def end(self) -> None:
        if self._running is not None:
            await self._running


@dataclass
class NamedSandbox:
    """A sandbox whose names are looked up where a test says so."""

    box: SandboxInstance
    worker: ProxyWorker


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def named(net: "EgressNetwork", authority: WebsiteAuthority) -> AsyncIterator[NamedSandbox]:
    chosen = net_settings(authority, net.plain, net.secure)
    proxy = InProcessProxy()
    supervisor = Supervisor(chosen)
    supervisor.egress = EgressController(chosen, start_proxy=proxy.start)
    async with supervisor:
        network = NetworkAllowlist(allowed_domains=[PLAIN, SECURE])
        box = await supervisor.create(SandboxSpec(network=network))
        assert proxy.worker is not None
        yield NamedSandbox(box, proxy.worker)
    await proxy.end()


@pytest.fixture
def named_box(named: NamedSandbox) -> SandboxInstance:
    return named.box


@pytest.fixture
def names(
    named: NamedSandbox, monkeypatch: pytest.MonkeyPatch
) -> Callable[[dict[str, list[list[str]]]], TableResolver]:
    def install(table: dict[str, list[list[str]]]) -> TableResolver:
        made = TableResolver(table)
        monkeypatch.setattr(named.worker.proxy.connector, "resolver", made)
        return made

    return install


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> WebsiteAuthority:
    return WebsiteAuthority(tmp_path_factory.mktemp("authority"))


def net_settings(authority: WebsiteAuthority, *sites: Website, **changes: Any) -> Any:
    defaults: dict[str, Any] = {
        "egress": "allowlist",
        "egress_hosts": {**dict.fromkeys((PLAIN, SECURE, OTHER), "127.0.0.1"), METADATA: "169.254.169.254"},
        "egress_private_networks": ("127.0.0.0/8",),
        "egress_ports": tuple(site.port for site in sites),
        "egress_ca_file": Path(authority.file),
        "preload": (),
    }
    return settings(**{**defaults, **changes})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def net(authority: WebsiteAuthority) -> AsyncIterator[EgressNetwork]:
    async with (
        Website() as plain,
        Website(tls=authority.context(SECURE)) as secure,
        Supervisor(net_settings(authority, plain, secure)) as supervisor,
    ):
        made = EgressNetwork(supervisor, plain, secure, authority)
        supervisor.egress.on_event = made.events.append
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box(net: EgressNetwork) -> AsyncIterator[SandboxInstance]:
    """One sandbox for the tests that leave nothing in it."""
    made = await net.create(PLAIN, SECURE)
    yield made
    await made.destroy()


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def _forget(net: EgressNetwork) -> None:
    await asyncio.sleep(0.05)  # for what is still to be said of the test before
    for kept in (net.plain.seen, net.secure.seen, net.events):
        kept.clear()
