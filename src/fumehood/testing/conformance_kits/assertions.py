"""Assertions that several kits share."""

from collections.abc import Awaitable

import pytest


async def assert_each_raises(
    expected: type[BaseException] | tuple[type[BaseException], ...], *attempts: Awaitable[object]
) -> None:
    """Await the attempts one after another. Fails unless each raises `expected`."""
    for attempt in attempts:
        with pytest.raises(expected):
            await attempt
