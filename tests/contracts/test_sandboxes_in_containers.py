"""Sandboxes in pods pass the kit: server and code in separate containers, a pod for each sandbox."""

import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fumehood.interfaces import SandboxProvider
from fumehood.testing.conformance_kits.sandbox_kit import SandboxKit, SandboxSubject
from tests.support.pod_provider import PodProvider
from tests.support.pods import TOKEN, Pod, make_pod


@pytest.mark.slow  # 90 pods of three processes; tests/sandbox_server/pod has what is particular to pods
@pytest.mark.asyncio(loop_scope="class")
class TestInContainersOfPods(SandboxKit):
    @staticmethod
    @asynccontextmanager
    async def open_subject() -> AsyncGenerator[SandboxSubject]:
        with tempfile.TemporaryDirectory(prefix="fh-pods", dir="/tmp") as name:
            directory = Path(name)
            directory.chmod(0o755)

            async def start_pod() -> Pod:
                return await make_pod(directory).start()

            async def make_provider() -> SandboxProvider:
                return PodProvider(start_pod, TOKEN)

            provider = PodProvider(start_pod, TOKEN, warm=2)
            try:
                yield SandboxSubject(provider, make_provider=make_provider)
            finally:
                await provider.close()
