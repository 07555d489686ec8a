"""Subjects that all tests of a class share, because they are slow to open."""

from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest
import pytest_asyncio


@pytest_asyncio.fixture(loop_scope="class", scope="class")
async def subject(request: pytest.FixtureRequest) -> AsyncGenerator[Any]:
    """What the `open_subject` of the class opens."""
    kit = cast("type[Any]", request.cls)  # pyright: ignore[reportUnknownMemberType]
    async with kit.open_subject() as subject:
        yield subject
