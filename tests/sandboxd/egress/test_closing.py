"""The end of the egress proxy; imports `fumehood.sandboxd`."""

import asyncio

import pytest

from fumehood.sandboxd.egress.bounds import Bounds
from fumehood.sandboxd.egress.orders import Configuration
from fumehood.sandboxd.egress.proxy import Proxy, verifying_context


@pytest.mark.timeout(20)
async def test_a_session_that_has_just_ended_does_not_hold_it_up() -> None:
    """Its callback has not run yet; waiting for what has ended gives nobody a turn, and would go on for ever."""
    proxy = Proxy(
        Configuration(user=None, hosts={}, private=[], connections_total=1, bounds=Bounds()),
        verifying_context(""),
        on_event=lambda _: None,
        on_change=lambda: None,
    )
    session = asyncio.ensure_future(asyncio.sleep(0))
    await session
    proxy.watch(session)
    await proxy.close()
    assert session.done()
