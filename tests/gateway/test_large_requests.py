"""Large requests: they block nobody, and their memory is limited."""

import asyncio
import threading
from typing import Any, override

import msgspec
import pytest
from msgspec import Raw

from fumehood.cpu_worker import WORKER_THRESHOLD_BYTES, run_in_worker
from fumehood.engine import compaction_plan, context_truncation, token_counter
from fumehood.engine.token_counter import estimate_entry
from fumehood.files.input_file_loader import InputFileLoader
from fumehood.gateway import idempotency
from fumehood.gateway.gateway_exchange import GatewayExchange
from fumehood.gateway.request_limiter import RequestLimiter
from fumehood.interfaces import Caller
from fumehood.protocol.conversation import ConversationEntry
from fumehood.protocol.model_turns import ModelProfile, ModelRequest
from fumehood.protocol.openai.api_errors import InvalidRequest
from fumehood.protocol.openai.responses import CreateResponse
from fumehood.testing import PlainSealer, ScriptedModel, says
from tests.support.engine_harness import EngineHarness
from tests.support.memory_uploads import InMemoryUploads
from tests.support.scripted_gateway import run_gateway, text_events
from tests.support.websocket_client import connect_websocket, error_of

PATIENCE = 60
BIG = "x" * 700_000


async def test_the_loop_goes_round_beside_long_work() -> None:
    went_round = threading.Event()

    async def go_round() -> None:
        for _ in range(100):
            await asyncio.sleep(0)
        went_round.set()

    going = asyncio.create_task(go_round())
    assert await run_in_worker(
        WORKER_THRESHOLD_BYTES, went_round.wait, PATIENCE
    )  # which would wait in vain on the loop itself
    await going


async def test_short_work_is_done_at_once_and_long_work_raises_what_it_raises() -> None:
    assert await run_in_worker(WORKER_THRESHOLD_BYTES - 1, threading.get_ident) == threading.get_ident()
    assert await run_in_worker(WORKER_THRESHOLD_BYTES, threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        await run_in_worker(WORKER_THRESHOLD_BYTES, lambda: 1 / 0)


class CheckingModel(ScriptedModel):
    """Remembers where it was asked whether a request can be shown."""

    def __init__(self) -> None:
        super().__init__(says("yes"), says("yes"))
        self.threads: list[int] = []

    @override
    def validate_request(self, request: ModelRequest) -> None:
        self.threads.append(threading.get_ident())


def message(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def test_ten_thousand_items_leave_the_loop_free() -> None:
    model = CheckingModel()
    engine = EngineHarness(model)
    async with run_gateway(runs=engine.runs, store=engine.store, body_bytes=32 << 20) as gateway:
        few = await gateway.create_response(input=[message("one")])
        many = await gateway.create_response(input=[message(f"number {number}") for number in range(10_000)])
        wrong = await gateway.create_response(input=[*[message("right")] * 5000, {"content": "whose?"}])
    assert (few.status, many.status) == (200, 200)
    assert model.threads[0] == threading.get_ident()
    assert model.threads[1] != threading.get_ident()
    assert wrong.error == (400, None, "input[5000]")
    assert len(await engine.store.list_input_items("", many.json["id"]) or ()) == 10_000


class RenderingModel(ScriptedModel):
    """Renders as real ones do, also to count, and remembers where."""

    def __init__(self) -> None:
        super().__init__(says("yes"), profile=ModelProfile(context_window=1_000_000, counts_tokens=True))
        self.threads: list[int] = []

    @override
    def validate_request(self, request: ModelRequest) -> None:
        for segment in request.segments:
            if "dialect" not in segment.renderings:
                segment.renderings["dialect"] = (b"", b"")
                self.threads.append(threading.get_ident())

    @override
    async def count_tokens(self, request: ModelRequest) -> tuple[int, bool]:
        self.validate_request(request)
        return 1, True


async def test_what_is_counted_before_it_is_shown_leaves_the_loop_free() -> None:
    model = RenderingModel()
    run = await EngineHarness(model).runs.start(
        CreateResponse(model="scripted", input="x" * 3_000_000), Caller()
    )
    assert (await run.wait()).status == "completed"
    assert len(model.threads) == 1
    assert model.threads[0] != threading.get_ident()


@pytest.mark.parametrize(
    "options",
    [
        {"truncation": "auto"},
        {"context_management": [Raw(b'{"type":"compaction","compact_threshold":1000}')]},
    ],
    ids=["truncation", "compaction"],
)
async def test_what_is_too_long_is_looked_at_beside_the_loop(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = threading.get_ident()
    looked: list[bool] = []

    def looking(entry: ConversationEntry) -> int:
        looked.append(threading.get_ident() != here or len(entry.raw) < WORKER_THRESHOLD_BYTES)
        return estimate_entry(entry)

    for module in (token_counter, context_truncation, compaction_plan):
        monkeypatch.setattr(module, "estimate_entry", looking)
    # The last message is compacted, too, once it is answered.
    answers = [says("a summary"), says("yes"), says("a summary")]
    model = ScriptedModel(*answers, profile=ModelProfile(context_window=4000))
    runs = EngineHarness(model).runs
    long = [Raw(msgspec.json.encode(message(text))) for text in ("one", BIG, "two", BIG)]
    request = CreateResponse(model="scripted", input=long, **options)
    assert (await runs.count_tokens(request, Caller())).input_tokens > 1000
    run = await runs.start(request, Caller())
    assert (await run.wait()).status == "completed"
    assert len(looked) > 4
    assert all(looked)


class OpeningSealer(PlainSealer):
    """Remembers where it was asked to open something."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    @override
    def unseal(self, tenant: str, sealed: str) -> bytes:
        self.threads.append(threading.get_ident())
        return super().unseal(tenant, sealed)


async def test_a_large_compaction_is_opened_beside_the_loop() -> None:
    sealer = OpeningSealer()
    runs = EngineHarness(ScriptedModel(), sealer=sealer).runs
    for summary in ("short", BIG):
        sealed = sealer.seal("", msgspec.json.encode({"messages": [], "summary": summary}))
        item = msgspec.json.encode({"type": "compaction", "encrypted_content": sealed})
        for _ in range(2):  # the second time it is known
            await runs.count_tokens(CreateResponse(model="scripted", input=[Raw(item)]), Caller())
    assert [thread == threading.get_ident() for thread in sealer.threads] == [True, False]


async def test_only_so_much_of_all_bodies_is_held() -> None:
    async with run_gateway(limits=RequestLimiter(max_memory_bytes=1_000_000)) as gateway:
        gateway.runs.script = lambda response: [text_events(response)[:2]]
        async with gateway.post_response(stream=True, input=BIG) as (reader, _):
            await reader.readuntil(b"\r\n\r\n")
            gateway.runs.script = lambda response: [text_events(response)]
            answer = await gateway.create_response(input=BIG)
            small = await gateway.create_response(input="hi")
            gateway.runs.runs[0].finish()
            await reader.readuntil(b"0\r\n\r\n")
        again = await gateway.create_response(input=BIG)
    assert answer.error == (503, "server_error", None)
    assert answer.headers["retry-after"] == "1"
    assert (small.status, again.status) == (200, 200)


async def test_a_run_that_may_be_asked_for_again_holds_its_body_when_nobody_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(idempotency, "DISCONNECT_GRACE_SECONDS", 600.0)
    key = {"idempotency-key": "one"}
    async with run_gateway(limits=RequestLimiter(max_memory_bytes=1_000_000)) as gateway:
        gateway.runs.script = lambda response: [text_events(response)[:2]]
        async with gateway.post_response(key, stream=True, input=BIG) as (reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.transport.abort()
        async with asyncio.timeout(PATIENCE):
            while b"\nfumehood_open_streams 0.0\n" not in (await gateway.request("GET", "/metrics")).body:
                await asyncio.sleep(0)
        gateway.runs.script = lambda response: [text_events(response)]
        meanwhile = await gateway.create_response(input=BIG)
        gateway.runs.runs[0].finish()
        async with asyncio.timeout(PATIENCE):
            while (again := await gateway.create_response(input=BIG)).status == 503:
                pass
        refused = await gateway.create_response(
            headers={"idempotency-key": "two"}, input=BIG, include=["nothing"]
        )
        last = await gateway.create_response(headers={"idempotency-key": "three"}, input=BIG)
    assert (meanwhile.status, again.status, refused.status, last.status) == (503, 200, 400, 200)


async def test_what_was_refused_holds_nothing() -> None:
    async with run_gateway(limits=RequestLimiter(max_memory_bytes=1_000_000)) as gateway:
        gateway.runs.rejection = InvalidRequest("No.")
        for _ in range(3):
            assert (await gateway.create_response(input=BIG)).status == 400
            assert (await gateway.create_response(input=BIG, include=["nothing"])).status == 400
        gateway.runs.rejection = None
        assert (await gateway.create_response(input=BIG)).status == 200


async def test_what_a_short_request_refers_to_is_held_like_a_body() -> None:
    async with run_gateway(limits=RequestLimiter(max_memory_bytes=1_000_000)) as gateway:
        gateway.runs.refers_to = 700_000
        gateway.runs.script = lambda response: [text_events(response)[:2]]
        async with gateway.post_response(stream=True) as (reader, _):
            await reader.readuntil(b"\r\n\r\n")
            answers = [
                await gateway.create_response(),
                await gateway.create_response(headers={"idempotency-key": "one"}),
                await gateway.create_response(input=BIG),
            ]
            async with connect_websocket(gateway.port) as socket:
                await socket.ask()
                over_socket = error_of((await socket.read_response())[-1])
            gateway.runs.script = lambda response: [text_events(response)]
            gateway.runs.runs[0].finish()
            await reader.readuntil(b"0\r\n\r\n")
        again = [
            await gateway.create_response(),
            await gateway.create_response(headers={"idempotency-key": "one"}),
        ]
    assert [answer.error for answer in answers] == [(503, "server_error", None)] * 3
    assert over_socket == (503, "server_error", None)
    assert [answer.status for answer in again] == [200, 200]


async def test_uploads_that_an_input_names_are_held_until_the_response_is_there() -> None:
    uploads = InMemoryUploads()
    picture = {
        "type": "input_image",
        "file_id": uploads.add("x.png", b"\x89PNG\r\n\x1a\n" + bytes(BIG, "ascii"), ""),
    }
    asked = [{"role": "user", "content": [picture]}]
    engine = EngineHarness(ScriptedModel(says("one"), says("two")), attachments=InputFileLoader(uploads))
    limits = RequestLimiter(max_memory_bytes=1_000_000)
    async with run_gateway(runs=engine.runs, store=engine.store, limits=limits) as gateway:
        first = await gateway.create_response(input=asked)
        paths = ("", "/input_tokens", "/compact")
        with limits.memory_budget(Caller()) as budget:
            budget.reserve(100_000)
            refusals = [
                await gateway.request("POST", f"/v1/responses{path}", {"model": "small", "input": asked})
                for path in paths
            ]
        again = await gateway.create_response(input=asked)
    assert (first.status, again.status) == (200, 200)
    assert [rejection.error for rejection in refusals] == [(503, "server_error", None)] * 3


async def test_the_conversation_that_a_short_request_continues_is_held_like_a_body() -> None:
    engine = EngineHarness(ScriptedModel(*[says("yes")] * 8))
    limits = RequestLimiter(max_memory_bytes=1_000_000)
    paths = ("", "/input_tokens", "/compact")
    async with run_gateway(runs=engine.runs, store=engine.store, limits=limits) as gateway:
        large, small = [(await gateway.create_response(input=said)).json["id"] for said in (BIG, "hi")]
        [item, *_] = (await gateway.request("GET", f"/v1/responses/{large}/input_items")).json["data"]
        continued: list[Any] = [
            {"model": "small", "input": "and?", "previous_response_id": large},
            {"model": "small", "input": [{"type": "item_reference", "id": item["id"]}]},
        ]
        async with connect_websocket(gateway.port) as socket:
            held = await socket.create_and_read(input=BIG)  # which is not stored, but here
            with limits.memory_budget(Caller()) as budget:
                budget.reserve(500_000)
                answers = [
                    await gateway.request("POST", f"/v1/responses{path}", body)
                    for path in paths
                    for body in continued
                ]
                of_small = await gateway.create_response(previous_response_id=small)
                over_socket = await socket.read_error(previous_response_id=held["id"])
        again = [await gateway.request("POST", "/v1/responses", body) for body in continued]
        with limits.memory_budget(Caller()) as budget:  # all of it was given back
            budget.reserve(1_000_000)
    assert [answer.error for answer in answers] == [(503, "server_error", None)] * 6
    assert over_socket == (503, "server_error", None)
    assert [answer.status for answer in (of_small, *again)] == [200] * 3


async def test_what_can_never_be_held_is_not_to_come_again() -> None:
    engine = EngineHarness(ScriptedModel(says(BIG)))
    limits = RequestLimiter(max_memory_bytes=1_000_000)
    async with run_gateway(runs=engine.runs, store=engine.store, limits=limits) as gateway:
        first = await gateway.create_response(input=BIG)  # which is more with its answer
        answer = await gateway.create_response(previous_response_id=first.json["id"])
    assert answer.error == (413, "request_too_large", None)
    assert "retry-after" not in answer.headers


async def test_what_is_read_from_the_store_is_held_while_it_is_sent() -> None:
    engine = EngineHarness(ScriptedModel(says(BIG), says("short"), says(BIG), says(BIG)))
    limits = RequestLimiter(max_memory_bytes=2_000_000)  # which is less than a stream of it
    keys: list[Any] = [
        {"stream": stream, "headers": {"idempotency-key": f"{stream}"}} for stream in (False, True)
    ]
    async with run_gateway(runs=engine.runs, store=engine.store, limits=limits) as gateway:
        large, small = [
            f"/v1/responses/{(await gateway.create_response(input=said)).json['id']}" for said in (BIG, "hi")
        ]
        paths = [f"{of}{what}" for of in (large, small) for what in ("", "/input_items")]
        with limits.memory_budget(Caller()) as budget:
            budget.reserve(1_500_000)
            answers = [await gateway.request("GET", path) for path in paths]
        again = [await gateway.request("GET", path) for path in paths]
        replayed = [await gateway.create_response(**key) for key in keys]
        with limits.memory_budget(Caller()) as budget:
            budget.reserve(1_500_000)
            replayed += [await gateway.create_response(**key) for key in keys]
        replayed += [await gateway.create_response(**key) for key in keys]
        with limits.memory_budget(Caller()) as budget:  # all of it was given back
            budget.reserve(2_000_000)
    assert [answer.status for answer in answers] == [503, 503, 200, 200]
    assert [answer.status for answer in again] == [200] * 4
    assert [answer.status for answer in replayed] == [200, 200, 503, 503, 200, 200]
    assert len(engine.model.requests) == 4
    assert again[1].json["data"][0]["content"][0]["text"] == BIG


@pytest.mark.parametrize("size", [0, 1, 256 << 10, (256 << 10) + 1, 3 << 20])
async def test_a_long_answer_waits_for_its_reader_piece_by_piece(size: int) -> None:
    body = bytes(size)
    parts: list[Any] = []

    async def send(part: Any) -> None:
        parts.append(part)

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    scope: Any = {"method": "GET", "path": "/", "query_string": b"", "headers": ()}
    await GatewayExchange(scope, receive, send).respond(body)
    pieces = [part["body"] for part in parts[1:]]
    assert b"".join(pieces) == body
    assert max(map(len, pieces)) <= 256 << 10
    assert [part["more_body"] for part in parts[1:]] == [*[True] * (len(pieces) - 1), False]
    assert all(pieces) or not size


async def test_messages_are_held_from_when_they_wait_until_they_are_answered_or_forgotten() -> None:
    async with run_gateway(limits=RequestLimiter(max_memory_bytes=1_000_000)) as gateway:
        gateway.runs.script = lambda response: [text_events(response)[:2]]
        async with connect_websocket(gateway.port) as socket:
            await socket.ask()
            await socket.ask(input=BIG)  # waits in the lane
            await socket.ask(stream_id="other", input=BIG)
            assert error_of((await socket.read_response())[-1]) == (503, "server_error", None)
            assert (await gateway.create_response(input=BIG)).status == 503
            gateway.runs.script = lambda response: [text_events(response)]
            gateway.runs.runs[0].finish()
            for _ in range(2):
                assert (await socket.read_response())[-1]["type"] == "response.completed"
            assert (await gateway.create_response(input=BIG)).status == 200

            gateway.runs.script = lambda response: [text_events(response)[:2]]
            await socket.ask()
            await socket.ask(input=BIG)
            await socket.ask(stream_id="other", input=BIG)
            assert error_of((await socket.read_response())[-1]) == (503, "server_error", None)
        async with asyncio.timeout(PATIENCE):
            await gateway.runs.runs[-1].ended.wait()
        gateway.runs.script = lambda response: [text_events(response)]
        assert (await gateway.create_response(input=BIG)).status == 200


async def test_a_body_of_too_many_values_is_refused() -> None:
    """Decoding them would keep everybody waiting for seconds, be it in another thread."""
    start = b'{"model":"small","input":'
    async with run_gateway(body_bytes=32 << 20) as gateway:
        few = await gateway.request("POST", "/v1/responses", start + b'"' + b"1," * 510_000 + b'"}')
        many = await gateway.request("POST", "/v1/responses", start + b"[" + b"1," * 510_000 + b"1]}")
    assert few.status == 200
    assert many.error == (400, "invalid_json", None)
    assert "more than 500000 JSON values" in many.json["error"]["message"]
