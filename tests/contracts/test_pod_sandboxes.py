"""Sandboxes in pods pass the kit: claimed from an API server of the tests, run by a real sandbox server."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from fumehood.interfaces import SandboxProvider
from fumehood.testing.conformance_kits.sandbox_kit import SandboxKit, SandboxSubject
from tests.support.kubernetes.cluster import run_cluster


@pytest.mark.asyncio(loop_scope="class")
class TestInPods(SandboxKit):
    @staticmethod
    @asynccontextmanager
    async def open_subject() -> AsyncGenerator[SandboxSubject]:
        async def make_provider() -> SandboxProvider:
            provider = cluster.make_provider(replica="replica-2")
            await provider.start()
            return provider

        async with run_cluster(replicas=3) as cluster, cluster.make_provider() as provider:
            yield SandboxSubject(provider, make_provider=make_provider)
