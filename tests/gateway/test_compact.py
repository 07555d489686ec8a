"""Counting and compacting over HTTP: what is answered, and what ends with the caller; imports the gateway's support."""

import asyncio

from fumehood.interfaces import Caller, TakeRoom
from fumehood.protocol.errors import ModelUnreachable
from fumehood.protocol.items import Compaction
from fumehood.protocol.responses import CompactedResponse, CreateResponse, InputTokens, Usage
from tests.support.gateway import PATIENCE, ScriptedRuns, serving_gateway


class Compacting(ScriptedRuns):
    """Compacts as soon as it may."""

    def reset(self) -> None:
        super().reset()
        self.begun = asyncio.Event()
        self.may = asyncio.Event()
        self.ended = asyncio.Event()

    async def count(
        self, request: CreateResponse, caller: Caller, *, take: TakeRoom | None = None
    ) -> InputTokens:
        return InputTokens(input_tokens=len(str(request.input)), exact=True)

    async def compact(
        self, request: CreateResponse, caller: Caller, *, take: TakeRoom | None = None
    ) -> CompactedResponse:
        if self.refusal is not None:
            raise self.refusal
        self.begun.set()
        try:
            await self.may.wait()
        finally:
            self.ended.set()
        item = Compaction(id="cmp_1", encrypted_content="sealed")
        return CompactedResponse(id="resp_1", created_at=1, output=[item], usage=Usage(input_tokens=3))


async def test_a_count_says_whether_it_is_exact() -> None:
    async with serving_gateway(runs=Compacting()) as gateway:
        answer = await gateway.ask("POST", "/v1/responses/input_tokens", {"model": "m", "input": "four"})
        assert answer.json == {
            "object": "response.input_tokens",
            "input_tokens": 4,
            "fumehood:exact": True,
        }
        wrong = await gateway.ask("POST", "/v1/responses/input_tokens", {"model": 7})
        assert wrong.error == (400, "invalid_type", "model")


async def test_compactions_count_among_the_responses_in_the_making() -> None:
    runs = Compacting()
    async with serving_gateway(runs=runs, total=1) as gateway, asyncio.timeout(PATIENCE):
        body = {"model": "m", "input": "Hi"}
        first = asyncio.ensure_future(gateway.ask("POST", "/v1/responses/compact", body))
        await runs.begun.wait()
        second = await gateway.ask("POST", "/v1/responses/compact", body)
        assert second.status == 429
        assert (await gateway.create()).status == 429
        runs.may.set()
        answer = await first
        assert answer.json["object"] == "response.compaction"
        assert answer.json["output"] == [{"type": "compaction", "id": "cmp_1", "encrypted_content": "sealed"}]
        runs.refusal = ModelUnreachable("It is gone.")
        third = await gateway.ask("POST", "/v1/responses/compact", body)
        assert third.status == 502
        runs.refusal = None
        assert (await gateway.ask("POST", "/v1/responses/compact", body)).status == 200


async def test_a_caller_who_leaves_ends_his_compaction() -> None:
    runs = Compacting()
    async with serving_gateway(runs=runs) as gateway, gateway.connected() as (_, writer):
        body = b'{"model":"m","input":"Hi"}'
        writer.write(
            b"POST /v1/responses/compact HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(body), body)
        )
        await runs.begun.wait()
        writer.close()
        await runs.ended.wait()
        assert not runs.may.is_set()
