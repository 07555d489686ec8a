"""Settings for all tests."""

import os
import tempfile

import pytest
from hypothesis import settings

# Machines are shared: a slow example is not a failure, the suite's own time limit is enough.
# No database: a checkout may be read-only, and a failure prints what reproduces it.
settings.register_profile("fumehood", deadline=None, print_blob=True, database=None)
settings.load_profile("fumehood")


# The kits are tests, though they are shipped.
pytest.register_assert_rewrite("fumehood.testing.conformance_kits")


def pytest_configure(config: pytest.Config) -> None:
    # What tests install is theirs alone, and gone with them.
    directory = tempfile.TemporaryDirectory(prefix="fumehood-packages-", ignore_cleanup_errors=True)
    os.environ["FUMEHOOD_PACKAGES_DIR"] = directory.name
    config.add_cleanup(directory.cleanup)
    data = tempfile.TemporaryDirectory(prefix="fumehood-data-", ignore_cleanup_errors=True)
    os.environ["XDG_DATA_HOME"] = data.name  # nothing is written to the data of this user
    config.add_cleanup(data.cleanup)
    os.environ["FUMEHOOD_INDEX_URL"] = (
        "http://127.0.0.1:9/nobody-listens/"  # tests that want one bring their own
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.geteuid() == 0:
        return
    skip = pytest.mark.skip(reason="needs uid 0")
    for item in items:
        if item.get_closest_marker("root"):
            item.add_marker(skip)
