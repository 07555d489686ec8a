"""Responses that were made and could not be stored."""

from collections.abc import Sequence

import pytest

from fumehood.interfaces import ResponseLease, ResponseLeaseLost
from fumehood.protocol.conversation import ConversationEntry
from fumehood.protocol.openai.api_errors import ApiError, StorageCorrupted, StorageUnavailable
from fumehood.protocol.openai.responses import Response
from fumehood.testing import MemoryStore, ScriptedModel, ScriptedTool, ScriptedToolAnswer, calls, says
from tests.support.engine_harness import EngineHarness


class Failing(MemoryStore):
    """A store in which no response can be ended."""

    error: Exception = StorageCorrupted("A page is damaged.")

    async def commit_response(
        self,
        lease: ResponseLease | None,
        tenant: str,
        response: Response,
        entries: Sequence[ConversationEntry],
    ) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (StorageCorrupted("A page is damaged."), 500, "storage_corrupted"),
        (StorageUnavailable("The disk is full."), 503, "storage_unavailable"),
        (ResponseLeaseLost("resp_1"), 500, None),
        (ValueError("odd"), 500, None),
    ],
)
async def test_whoever_waits_is_told_that_code_may_have_run(
    error: Exception, status: int, code: str | None
) -> None:
    store = Failing()
    store.error = error
    model = ScriptedModel(calls("scripted", {}), says("Done."))
    engine = EngineHarness(model, [ScriptedTool(repeatable=[ScriptedToolAnswer("4")])], existing_store=store)
    with pytest.raises(ApiError) as caught:
        await engine.create(input="2 + 2", tools=[{"type": "scripted"}])
    assert caught.value.may_have_run
    assert caught.value.status == status
    if code is not None:
        assert caught.value.wire_code == code


async def test_a_model_that_refused_has_run_nothing() -> None:
    with pytest.raises(ApiError) as caught:
        await EngineHarness(ScriptedModel(StorageUnavailable("not now"))).create(input="?")
    assert not caught.value.may_have_run
