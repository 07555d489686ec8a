"""Sandboxes in real pods pass the kit, as those of the API server of the tests do."""

import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fumehood.testing.conformance_kits.sandbox_kit import SandboxKit, SandboxSubject
from tests.support.cluster_sandboxes import install_4g_pool, install_sandboxes
from tests.support.kubectl import find_cluster, own_namespace

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


@pytest.mark.asyncio(loop_scope="class")
class TestInRealPods(SandboxKit):
    @staticmethod
    @asynccontextmanager
    async def open_subject() -> AsyncGenerator[SandboxSubject]:
        with own_namespace(find_cluster()) as kubectl, tempfile.TemporaryDirectory() as directory:
            sandboxes = install_sandboxes(kubectl, Path(directory), replicas=4)
            install_4g_pool(kubectl, Path(directory))
            async with sandboxes.make_provider() as provider:
                yield SandboxSubject(provider)
            assert sandboxes.claims() == set()
