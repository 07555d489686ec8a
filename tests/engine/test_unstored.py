"""Responses that were made and could not be stored; imports `fumehood.engine` and the support."""

from collections.abc import Sequence

import pytest

from fumehood.interfaces import Fenced, Lease
from fumehood.protocol.conversation import Entry
from fumehood.protocol.errors import ApiError, StorageCorrupted, StorageUnavailable
from fumehood.protocol.responses import Response
from fumehood.testing import Answer, MemoryStore, ScriptedModel, ScriptedTool, calls, says
from tests.support.engines import Engine


class Failing(MemoryStore):
    """A store in which no response can be ended."""

    error: Exception = StorageCorrupted("A page is damaged.")

    async def commit(
        self, lease: Lease | None, tenant: str, response: Response, entries: Sequence[Entry]
    ) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (StorageCorrupted("A page is damaged."), 500, "storage_corrupted"),
        (StorageUnavailable("The disk is full."), 503, "storage_unavailable"),
        (Fenced("resp_1"), 500, None),
        (ValueError("odd"), 500, None),
    ],
)
async def test_whoever_waits_is_told_that_code_may_have_run(
    error: Exception, status: int, code: str | None
) -> None:
    store = Failing()
    store.error = error
    model = ScriptedModel(calls("scripted", {}), says("Done."))
    engine = Engine(model, [ScriptedTool(always=[Answer("4")])], before=store)
    with pytest.raises(ApiError) as caught:
        await engine.block(input="2 + 2", tools=[{"type": "scripted"}])
    assert caught.value.may_have_run
    assert caught.value.status == status
    if code is not None:
        assert caught.value.wire_code == code


async def test_a_model_that_refused_has_run_nothing() -> None:
    with pytest.raises(ApiError) as caught:
        await Engine(ScriptedModel(StorageUnavailable("not now"))).block(input="?")
    assert not caught.value.may_have_run
