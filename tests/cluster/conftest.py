"""What tests in a real cluster share. They run in its network: `make test-kubernetes`."""

from collections.abc import Generator
from pathlib import Path

import pytest

from tests.support.kubectl import Kubectl, find_cluster, own_namespace

# Pods start slowly on a busy machine, and each module makes its own.
_TIMEOUT = 900


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.cluster)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(_TIMEOUT))


@pytest.fixture(scope="module")
def kubectl() -> Generator[Kubectl]:
    """For a namespace of the module's own."""
    with own_namespace(find_cluster()) as kubectl:
        yield kubectl
