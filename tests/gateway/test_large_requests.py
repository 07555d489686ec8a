"""Large requests: others go on meanwhile, and there is an end to how many are held; imports `fumehood.gateway`."""

import asyncio
import threading
from typing import Any, override

import pytest

from fumehood.aside import LARGE, aside
from fumehood.engine.runs import EngineRuns
from fumehood.gateway.limits import Limits
from fumehood.protocol.errors import InvalidRequest
from fumehood.protocol.models import ModelRequest
from fumehood.testing import FakeClock, MemoryStore, ScriptedModel, ScriptedModels, says
from tests.support.gateway import serving_gateway, text_events

PATIENCE = 60
BIG = "x" * 700_000


async def test_the_loop_goes_round_beside_long_work() -> None:
    went_round = threading.Event()

    async def go_round() -> None:
        for _ in range(100):
            await asyncio.sleep(0)
        went_round.set()

    going = asyncio.create_task(go_round())
    assert await aside(LARGE, went_round.wait, PATIENCE)  # which would wait in vain on the loop itself
    await going


async def test_short_work_is_done_at_once_and_long_work_raises_what_it_raises() -> None:
    assert await aside(LARGE - 1, threading.get_ident) == threading.get_ident()
    assert await aside(LARGE, threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        await aside(LARGE, lambda: 1 / 0)


class CheckingModel(ScriptedModel):
    """Remembers where it was asked whether a request can be shown."""

    def __init__(self) -> None:
        super().__init__(says("yes"), says("yes"))
        self.threads: list[int] = []

    @override
    def check(self, request: ModelRequest) -> None:
        self.threads.append(threading.get_ident())


def message(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def test_ten_thousand_items_leave_the_loop_free() -> None:
    clock, model = FakeClock(), CheckingModel()
    store = MemoryStore(clock)
    runs = EngineRuns(ScriptedModels(model), [], store, clock)
    async with serving_gateway(runs=runs, store=store, body_bytes=32 << 20) as served:
        few = await served.create(input=[message("one")])
        many = await served.create(input=[message(f"number {number}") for number in range(10_000)])
        wrong = await served.create(input=[*[message("right")] * 5000, {"content": "whose?"}])
    assert (few.status, many.status) == (200, 200)
    assert model.threads[0] == threading.get_ident()
    assert model.threads[1] != threading.get_ident()
    assert wrong.error == (400, None, "input[5000]")
    kept = await store.input_entries("", many.json["id"])
    assert kept is not None
    assert len(kept) == 10_000


async def test_only_so_much_of_all_bodies_is_held() -> None:
    async with serving_gateway(limits=Limits(body_bytes_total=1_000_000)) as served:
        served.runs.script = lambda response: [text_events(response)[:2]]
        async with served.posted(stream=True, input=BIG) as (reader, _):
            await reader.readuntil(b"\r\n\r\n")
            served.runs.script = lambda response: [text_events(response)]
            refused = await served.create(input=BIG)
            small = await served.create(input="hi")
            run = served.runs.runs[0]
            run.say(*text_events(run.response)[2:])
            await reader.readuntil(b"0\r\n\r\n")
        again = await served.create(input=BIG)
    assert refused.error == (503, "server_error", None)
    assert refused.headers["retry-after"] == "1"
    assert (small.status, again.status) == (200, 200)


async def test_what_was_refused_holds_nothing() -> None:
    async with serving_gateway(limits=Limits(body_bytes_total=1_000_000)) as served:
        served.runs.refusal = InvalidRequest("No.")
        for _ in range(3):
            assert (await served.create(input=BIG)).status == 400
            assert (await served.create(input=BIG, include=["nothing"])).status == 400
        served.runs.refusal = None
        assert (await served.create(input=BIG)).status == 200
