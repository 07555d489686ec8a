"""Token counts and compaction over HTTP."""

import asyncio

from fumehood.interfaces import Caller, ReserveMemory
from fumehood.protocol.openai.api_errors import ModelUnreachable
from fumehood.protocol.openai.items import CompactionItem
from fumehood.protocol.openai.responses import CompactedResponse, CreateResponse, InputTokenCount, Usage
from tests.support.scripted_gateway import TIMEOUT, ScriptedRuns, run_gateway


class CompactingRuns(ScriptedRuns):
    """Compacts as soon as it may."""

    def reset(self) -> None:
        super().reset()
        self.begun = asyncio.Event()
        self.may = asyncio.Event()
        self.ended = asyncio.Event()

    async def count_tokens(
        self, request: CreateResponse, caller: Caller, *, reserve_memory: ReserveMemory | None = None
    ) -> InputTokenCount:
        return InputTokenCount(input_tokens=len(str(request.input)), exact=True)

    async def compact(
        self, request: CreateResponse, caller: Caller, *, reserve_memory: ReserveMemory | None = None
    ) -> CompactedResponse:
        if self.rejection is not None:
            raise self.rejection
        self.begun.set()
        try:
            await self.may.wait()
        finally:
            self.ended.set()
        item = CompactionItem(id="cmp_1", encrypted_content="sealed")
        return CompactedResponse(id="resp_1", created_at=1, output=[item], usage=Usage(input_tokens=3))


async def test_a_count_says_whether_it_is_exact() -> None:
    async with run_gateway(runs=CompactingRuns()) as gateway:
        answer = await gateway.request("POST", "/v1/responses/input_tokens", {"model": "m", "input": "four"})
        assert answer.json == {
            "object": "response.input_tokens",
            "input_tokens": 4,
            "fumehood:exact": True,
        }
        wrong = await gateway.request("POST", "/v1/responses/input_tokens", {"model": 7})
        assert wrong.error == (400, "invalid_type", "model")


async def test_compactions_count_among_the_responses_in_the_making() -> None:
    runs = CompactingRuns()
    async with run_gateway(runs=runs, max_concurrent=1) as gateway, asyncio.timeout(TIMEOUT):
        body = {"model": "m", "input": "Hi"}
        first = asyncio.ensure_future(gateway.request("POST", "/v1/responses/compact", body))
        await runs.begun.wait()
        second = await gateway.request("POST", "/v1/responses/compact", body)
        assert second.status == 429
        refused = await gateway.create_response()
        assert refused.error == (429, "rate_limit_exceeded", None)
        assert refused.headers["retry-after"] == "1"
        runs.may.set()
        answer = await first
        assert answer.json["object"] == "response.compaction"
        assert answer.json["output"] == [{"type": "compaction", "id": "cmp_1", "encrypted_content": "sealed"}]
        runs.rejection = ModelUnreachable("It is gone.")
        third = await gateway.request("POST", "/v1/responses/compact", body)
        assert third.status == 502
        runs.rejection = None
        assert (await gateway.request("POST", "/v1/responses/compact", body)).status == 200


async def test_a_caller_who_leaves_ends_his_compaction() -> None:
    runs = CompactingRuns()
    async with run_gateway(runs=runs) as gateway, gateway.open_connection() as (_, writer):
        body = b'{"model":"m","input":"Hi"}'
        writer.write(
            b"POST /v1/responses/compact HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(body), body)
        )
        await runs.begun.wait()
        writer.close()
        await runs.ended.wait()
        assert not runs.may.is_set()
