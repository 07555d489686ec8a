"""A supervisor whose sandboxes may reach two made-up domains on loopback; imports `tests.support`."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from fumehood.protocol.sandbox import DomainSecret, NetworkAllowlist, SandboxSpec
from fumehood.sandboxd.egress.session import Event
from fumehood.sandboxd.sandbox import LocalSandbox
from fumehood.sandboxd.supervisor import Supervisor
from tests.support.sandboxes import settings
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

    async def create(
        self, *domains: str, secrets: list[DomainSecret] | None = None, **spec: Any
    ) -> LocalSandbox:
        network = NetworkAllowlist(allowed_domains=list(domains), domain_secrets=secrets or [])
        return await self.supervisor.create(SandboxSpec(network=network, **spec))


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
    for kept in (net.plain.seen, net.secure.seen, net.events):
        kept.clear()
