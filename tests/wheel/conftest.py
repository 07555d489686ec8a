"""The installations that the tests in this directory use, made in the background."""

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.support.package_index import FakePackageIndex, wheel
from tests.support.wheels import (
    PYTHONS,
    Fetched,
    Installation,
    Kind,
    PythonMissing,
    Wheels,
    base_kinds,
    build,
    install,
    kinds,
)

_AT_ONCE = 2


def pytest_report_header() -> str | None:
    if os.geteuid() == 0:
        return None
    return "wheel: not root, so installations for root are not tested"


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
def index() -> Iterator[FakePackageIndex]:
    """A package index with one package that no installation has."""
    with FakePackageIndex() as made:
        made.add(wheel("humanize", "4.9.0", {"humanize.py": "def intcomma(n): return f'{n:,}'"}))
        yield made


def _asked_kinds(items: list[pytest.Item]) -> list[Kind]:
    """The installations of the selected tests, in their order."""
    params = [
        item.callspec.params for item in items if isinstance(item, pytest.Function) and "[" in item.name
    ]
    return list(dict.fromkeys(kind for each in params if isinstance(kind := each.get("installation"), Kind)))


@pytest.fixture(scope="session")
def pool() -> Iterator[ThreadPoolExecutor]:
    executor = ThreadPoolExecutor(_AT_ONCE)
    yield executor
    executor.shutdown(cancel_futures=True)


@pytest.fixture(scope="session")
def fetched(wheels: Wheels, pool: ThreadPoolExecutor) -> dict[str, Future[Fetched]]:
    """The locked packages, by the version of Python."""
    return {version: pool.submit(wheels.fetch, version) for version in PYTHONS}


@pytest.fixture(scope="session")
def begun(
    request: pytest.FixtureRequest,
    wheels: Wheels,
    pool: ThreadPoolExecutor,
    fetched: dict[str, Future[Fetched]],
) -> dict[Kind, Future[Installation]]:
    """The installations that the selected tests need, two at a time, in the order of the tests."""

    def begin(kind: Kind) -> Installation:
        return install(wheels, kind, fetched[kind.python].result())

    return {kind: pool.submit(begin, kind) for kind in _asked_kinds(request.session.items)}


@pytest.fixture(scope="session", params=kinds(), ids=str)
def installation(request: pytest.FixtureRequest, begun: dict[Kind, Future[Installation]]) -> Installation:
    return _result(begun[request.param])


@pytest.fixture(scope="session", params=base_kinds(), ids=str)
def base_installation(
    request: pytest.FixtureRequest, wheels: Wheels, fetched: dict[str, Future[Fetched]]
) -> Installation:
    """Without any extra."""
    return install(wheels, request.param, _result(fetched[request.param.python]), extra="")


def _result[T](future: Future[T]) -> T:
    try:
        return future.result()
    except PythonMissing as error:
        pytest.skip(str(error))
