"""Shutdown of the egress proxy."""

import asyncio

import pytest

from fumehood.sandbox_server.egress.control_messages import ProxyConfiguration, ProxyLimits
from fumehood.sandbox_server.egress.proxy import EgressProxy, client_tls_context


@pytest.mark.timeout(20)
async def test_a_session_that_has_just_ended_does_not_hold_it_up() -> None:
    """Its callback has not run yet; waiting for what has ended gives nobody a turn, and would go on for ever."""
    proxy = EgressProxy(
        ProxyConfiguration(user=None, hosts={}, private=[], connections_total=1, limits=ProxyLimits()),
        client_tls_context(""),
        on_event=lambda _: None,
        on_change=lambda: None,
    )
    session = asyncio.ensure_future(asyncio.sleep(0))
    await session
    proxy.track_session(session)
    await proxy.close()
    assert session.done()
