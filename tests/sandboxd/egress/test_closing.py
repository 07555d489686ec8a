"""The end of the egress proxy; imports `fumehood.sandboxd`."""

import asyncio

import pytest

from fumehood.sandboxd.egress.proxy import Egress
from tests.support.sandboxes import settings


@pytest.mark.timeout(20)
async def test_a_session_that_has_just_ended_does_not_hold_it_up() -> None:
    """Its callback has not run yet; waiting for what has ended gives nobody a turn, and would go on for ever."""
    egress = Egress(settings())
    session = asyncio.ensure_future(asyncio.sleep(0))
    await session
    egress.watch(session)
    await egress.close()
    assert session.done()
