"""Sandboxes in pods under gVisor pass the kit (`make test-gvisor`)."""

import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from fumehood.testing.conformance_kits.sandbox_kit import SandboxKit, SandboxSubject
from tests.support.gvisor_pods import GvisorPod, find_obstacle
from tests.support.pod_provider import PodProvider
from tests.support.pods import TOKEN, PodOptions

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_obstacle() is not None, reason=find_obstacle() or ""),
]


@asynccontextmanager
async def _open_provider() -> AsyncGenerator[PodProvider]:
    with tempfile.TemporaryDirectory(prefix="fh-gvisor", dir="/tmp") as name:
        directory = Path(name)
        directory.chmod(0o755)

        async def start_pod() -> GvisorPod:
            return await GvisorPod(directory, PodOptions()).start()

        provider = PodProvider(start_pod, TOKEN, warm=2)
        try:
            yield provider
        finally:
            await provider.close()


@pytest_asyncio.fixture(loop_scope="class", scope="class")
async def subject() -> AsyncGenerator[SandboxSubject]:
    async with _open_provider() as provider, _open_provider() as second:

        async def make_provider() -> PodProvider:
            return second

        yield SandboxSubject(provider, make_provider=make_provider)


@pytest.mark.asyncio(loop_scope="class")
class TestInGvisor(SandboxKit):
    pass
