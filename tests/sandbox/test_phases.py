"""The phases that calls in containers tell of; imports `phases`, `sandbox` and its doubles."""

import itertools
from collections.abc import Mapping

import pytest

from fumehood.phases import Phase, heard_by
from fumehood.protocol.sandbox import End
from fumehood.sandbox.container import ContainerSettings
from fumehood.testing import Step
from tests.support.containers import Host, host

NEW: Mapping[str, str] = {"start": "new"}
KEPT: Mapping[str, str] = {"start": "kept"}
OK: Mapping[str, str] = {"status": "ok"}


async def phases(running: Host, code: str, container_id: str | None = None) -> tuple[str, list[Phase]]:
    """The container, and what its call told."""
    told: list[Phase] = []
    container = await running.open(container_id)
    with heard_by(told.append):
        await running.run(container, code)
    return container.id, told


def facts(told: list[Phase]) -> list[tuple[str, Mapping[str, str]]]:
    return [(phase.name, phase.facts) for phase in told]


async def test_a_first_call_makes_a_sandbox_and_the_next_one_finds_it() -> None:
    async with host(Step(None), Step(None)) as running:
        container, told = await phases(running, "1")
        assert facts(told) == [("acquire", NEW), ("files", {}), ("run", OK), ("files", {})]
        for earlier, later in itertools.pairwise(told):
            assert earlier.took > 0
            assert earlier.began_at <= later.began_at
        _, told = await phases(running, "2", container)
        assert facts(told) == [("acquire", KEPT), ("run", OK), ("files", {})]


async def test_packages_are_a_phase_that_the_server_has_measured() -> None:
    end = End(status="ok", exit_code=0, duration_ms=1, state_kept=True, packages_ms=1)
    async with host(Step(None, [end])) as running:
        _, told = await phases(running, "1")
    (packages,) = [phase for phase in told if phase.name == "packages"]
    (run,) = [phase for phase in told if phase.name == "run"]
    assert 0 < packages.took <= 1_000_000
    assert packages.began_at + packages.took == run.began_at


@pytest.mark.parametrize("status", ["out_of_memory", "timeout", "lost"])
async def test_how_code_ended_is_told(status: str) -> None:
    end = End(status=status, exit_code=-1, duration_ms=1, state_kept=False)  # type: ignore[arg-type]
    async with host(Step(None, [end]), Step(None)) as running:
        container, told = await phases(running, "1")
        assert facts(told) == [("acquire", NEW), ("files", {}), ("run", {"status": status})]
        # The next one has another.
        _, told = await phases(running, "2", container)
        assert facts(told)[0] == ("acquire", NEW)


async def test_a_sandbox_for_every_call_is_acquired_every_time() -> None:
    settings = ContainerSettings(isolation="execution")
    async with host(Step(None), Step(None), settings=settings) as running:
        container, _ = await phases(running, "1")
        _, told = await phases(running, "2", container)
        assert facts(told) == [("acquire", NEW), ("files", {}), ("run", OK), ("files", {})]


async def test_one_that_is_not_to_be_had_is_told_too() -> None:
    settings = ContainerSettings(claim_timeout=0.01)
    async with host(settings=settings, capacity=0) as running:
        _, told = await phases(running, "1")
    assert [(phase.name, phase.error) for phase in told] == [("acquire", "AtCapacity")]
