"""A supervisor whose sandboxes may reach two made-up domains on loopback; imports `tests.support`."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from fumehood.protocol.sandbox import DomainSecret, NetworkAllowlist, SandboxSpec
from fumehood.sandboxd.egress.control import Egress, ProxyProcess
from fumehood.sandboxd.egress.orders import Configuration, Event
from fumehood.sandboxd.egress.proxy import verifying_context
from fumehood.sandboxd.egress.worker import Worker
from fumehood.sandboxd.sandbox import LocalSandbox
from fumehood.sandboxd.supervisor import Supervisor
from fumehood.serving.resolver import ResolveFailed, Resolver
from tests.support.sandboxes import run, settings
from tests.support.websites import Authority, Website

PLAIN = "data.test"
SECURE = "secure.test"
OTHER = "other.test"


@dataclass
class Net:
    """The websites, the supervisor and what its proxy reported."""

    supervisor: Supervisor
    plain: Website
    secure: Website
    authority: Authority
    events: list[Event] = field(default_factory=list[Event])

    async def reported(self, count: int) -> list[Event]:
        """What the proxy reported, once there is so much of it: it is another process."""
        async with asyncio.timeout(20):
            while len(self.events) < count:
                await asyncio.sleep(0.01)
        return self.events

    async def create(
        self, *domains: str, secrets: list[DomainSecret] | None = None, **spec: Any
    ) -> LocalSandbox:
        network = NetworkAllowlist(allowed_domains=list(domains), domain_secrets=secrets or [])
        return await self.supervisor.create(SandboxSpec(network=network, **spec))


async def raw(box: LocalSandbox, *pieces: bytes, half_close: bool = False) -> bytes:
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


async def proxied(box: LocalSandbox, url: str, **more: str) -> str:
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


class Names(Resolver):
    """Answers from a table, a list of answers after another for each name; `asked` counts."""

    def __init__(self, table: dict[str, list[list[str]]]) -> None:
        super().__init__({}, timeout=5)
        self._table = table
        self.asked: list[str] = []

    async def addresses(self, name: str) -> list[str]:
        self.asked.append(name)
        if name not in self._table:
            raise ResolveFailed
        answers = self._table[name]
        return answers.pop(0) if len(answers) > 1 else answers[0]


class InProcess:
    """Runs the proxy in this process, over the same messages, so that a test can answer for its name server."""

    def __init__(self) -> None:
        self.worker: Worker | None = None
        self._running: asyncio.Task[None] | None = None

    async def start(self, configuration: Configuration) -> ProxyProcess:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.worker = Worker(theirs, configuration, verifying_context(configuration.trust))
        self._running = asyncio.ensure_future(self.worker.run())
        return ProxyProcess(mine)

    async def end(self) -> None:
        if self._running is not None:
            await self._running


@dataclass
class Named:
    """A sandbox whose names are looked up where a test says so."""

    box: LocalSandbox
    worker: Worker


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def named(net: "Net", authority: Authority) -> AsyncIterator[Named]:
    chosen = net_settings(authority, net.plain, net.secure)
    proxy = InProcess()
    supervisor = Supervisor(chosen)
    supervisor.egress = Egress(chosen, start=proxy.start)
    async with supervisor:
        network = NetworkAllowlist(allowed_domains=[PLAIN, SECURE])
        box = await supervisor.create(SandboxSpec(network=network))
        assert proxy.worker is not None
        yield Named(box, proxy.worker)
    await proxy.end()


@pytest.fixture
def named_box(named: Named) -> LocalSandbox:
    return named.box


@pytest.fixture
def names(named: Named, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, list[list[str]]]], Names]:
    def install(table: dict[str, list[list[str]]]) -> Names:
        made = Names(table)
        monkeypatch.setattr(named.worker.proxy.connector, "resolver", made)
        return made

    return install


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def net_settings(authority: Authority, *sites: Website, **changes: Any) -> Any:
    defaults: dict[str, Any] = {
        "egress": "allowlist",
        "egress_hosts": dict.fromkeys((PLAIN, SECURE, OTHER), "127.0.0.1"),
        "egress_private": ("127.0.0.0/8",),
        "egress_ports": tuple(site.port for site in sites),
        "egress_ca_file": Path(authority.file),
        "preload": (),
    }
    return settings(**{**defaults, **changes})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def net(authority: Authority) -> AsyncIterator[Net]:
    async with (
        Website() as plain,
        Website(tls=authority.context(SECURE)) as secure,
        Supervisor(net_settings(authority, plain, secure)) as supervisor,
    ):
        made = Net(supervisor, plain, secure, authority)
        supervisor.egress.on_event = made.events.append
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box(net: Net) -> AsyncIterator[LocalSandbox]:
    """One sandbox for the tests that leave nothing in it."""
    made = await net.create(PLAIN, SECURE)
    yield made
    await made.destroy()


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def _forget(net: Net) -> None:
    await asyncio.sleep(0.05)  # for what is still to be said of the test before
    for kept in (net.plain.seen, net.secure.seen, net.events):
        kept.clear()
