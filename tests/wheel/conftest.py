"""The installations that tests in this directory use, made in the background; imports pytest and tests.support."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import pytest

from tests.support.index import Index, wheel
from tests.support.wheels import Installation, Kind, PythonMissing, Wheels, build, install, kinds

_AT_ONCE = 2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/wheel/" in item.path.as_posix():
            item.add_marker(pytest.mark.wheel)
            item.add_marker(pytest.mark.timeout(900))  # the first test of an installation waits for it


@pytest.fixture(scope="session")
def wheels() -> Iterator[Wheels]:
    with build() as built:
        yield built


@pytest.fixture(scope="session")
def index() -> Iterator[Index]:
    """A package index with one package that no installation has."""
    with Index() as made:
        made.add(wheel("humanize", "4.9.0", {"humanize.py": "def intcomma(n): return f'{n:,}'"}))
        yield made


def _asked_kinds(items: list[pytest.Item]) -> list[Kind]:
    """The installations of the selected tests, in their order."""
    params = [
        item.callspec.params for item in items if isinstance(item, pytest.Function) and "[" in item.name
    ]
    return list(dict.fromkeys(kind for each in params if isinstance(kind := each.get("installation"), Kind)))


@pytest.fixture(scope="session")
def installing(
    request: pytest.FixtureRequest, wheels: Wheels
) -> Iterator[Callable[[Kind], Future[Installation]]]:
    """Begins the installations that the selected tests need, two at a time, in the order of the tests."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        asked = _asked_kinds(request.session.items)
        fetched = {
            version: pool.submit(wheels.fetch, version) for version in sorted({kind.python for kind in asked})
        }

        def begin(kind: Kind) -> Installation:
            return install(wheels, kind, fetched[kind.python].result())

        begun = {kind: pool.submit(partial(begin, kind)) for kind in asked}
        yield begun.__getitem__
        for future in begun.values():
            future.cancel()


@pytest.fixture(scope="session", params=kinds(), ids=str)
def installation(
    request: pytest.FixtureRequest, installing: Callable[[Kind], Future[Installation]]
) -> Installation:
    try:
        return installing(request.param).result()
    except PythonMissing as error:
        pytest.skip(str(error))
