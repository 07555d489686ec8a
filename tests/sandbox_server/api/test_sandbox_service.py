"""SandboxService in process with real sandboxes: idempotency, quotas, retention, one-shots."""

import asyncio
import base64
import secrets
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from fumehood.protocol.sandbox.sandbox_errors import (
    ExecutionNotFound,
    FileRefused,
    RetryLater,
    SandboxConflict,
    SandboxError,
    SandboxGone,
    SandboxNotFound,
    SandboxPayloadTooLarge,
    SandboxServerAtCapacity,
    SandboxServerUnreachable,
    TenantQuotaExceeded,
)
from fumehood.protocol.sandbox.sandbox_messages import (
    ExecuteRequest,
    OneShotRequest,
    OneShotResponse,
    SandboxSpec,
)
from fumehood.sandbox_server.api.sandbox_service import SandboxService
from fumehood.sandbox_server.inside.files.untrusted_files import MAX_ENTRIES
from fumehood.sandbox_server.supervisor.in_process_sandbox import iter_events
from fumehood.sandbox_server.supervisor.sandbox_execution import SandboxExecution
from fumehood.sandbox_server.supervisor.sandbox_instance import SandboxInstance
from tests.support.sandbox_runs import ExecutionOutcome, has_cgroups, settings, wait_for_outcome
from tests.support.waiting import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMITS: dict[str, Any] = {
    "preload": (),
    "capacity": 8,
    "tenant_sandboxes": 2,
    "tenant_memory": 5 << 30,
    "queued_executions": 2,
    "retained_executions": 3,
    "retained_output_bytes": 20_000,
    "max_tombstones": 3,
    "produced_files": 3,
    "produced_bytes": 1000,
}
WAITING = "import time\nprint('waiting', flush=True)\nwhile True: time.sleep(0.01)"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service() -> AsyncIterator[SandboxService]:
    async with SandboxService(settings(**LIMITS)) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(service: SandboxService) -> AsyncIterator[SandboxInstance]:
    made = await create(service, SandboxSpec())
    yield made
    await service.delete(made.name)


async def create(service: SandboxService, spec: SandboxSpec, name: str | None = None) -> SandboxInstance:
    sandbox, _ = await service.get_or_create(secrets.token_hex(8) if name is None else name, spec)
    return sandbox


async def run_code(
    sandbox: SandboxInstance, code: str, execution_id: str | None = None, **request: Any
) -> ExecutionOutcome:
    asked = ExecuteRequest(code=code, execution_id=execution_id, **request)
    return await wait_for_outcome(sandbox.executions.start_or_get(asked))


async def start_waiting(sandbox: SandboxInstance, execution_id: str) -> SandboxExecution:
    """A call that runs until it is interrupted, and has said so."""
    call = sandbox.executions.start_or_get(ExecuteRequest(code=WAITING, execution_id=execution_id))
    async for batch in call.event_batches():
        assert batch
        return call
    raise AssertionError("it ended")


# ---- sandboxes ------------------------------------------------------------------------------------------------


async def test_asked_at_once_for_one_name_all_get_the_same(service: SandboxService) -> None:
    found = await asyncio.gather(*(service.get_or_create("same", SandboxSpec(tenant="t")) for _ in range(5)))
    assert len({id(sandbox) for sandbox, _ in found}) == 1
    assert [new for _, new in found] == [True, False, False, False, False]
    with pytest.raises(SandboxConflict):
        await service.get_or_create("same", SandboxSpec(tenant="u"))
    await service.delete("same")


async def test_while_one_is_made_another_spec_is_a_conflict(service: SandboxService) -> None:
    first = asyncio.ensure_future(create(service, SandboxSpec(), "racing"))
    await asyncio.sleep(0)
    with pytest.raises(SandboxConflict):
        await create(service, SandboxSpec(memory="4g"), "racing")
    await first
    await service.delete("racing")


async def test_a_caller_who_leaves_does_not_take_the_sandbox_from_the_others(service: SandboxService) -> None:
    first = asyncio.ensure_future(create(service, SandboxSpec(), "left"))
    await asyncio.sleep(0)
    second = asyncio.ensure_future(create(service, SandboxSpec(), "left"))
    await asyncio.sleep(0)
    first.cancel()
    made = await second
    assert (await run_code(made, "1")).result == "1"
    await service.delete(made.name)


async def test_deleting_one_that_is_being_made(service: SandboxService) -> None:
    making = asyncio.ensure_future(create(service, SandboxSpec(), "unwanted"))
    await asyncio.sleep(0)
    await service.delete("unwanted")
    await making
    with pytest.raises(SandboxGone):
        service.get("unwanted")


async def test_a_tenant_has_so_many_sandboxes_and_so_much_memory(service: SandboxService) -> None:
    one = await create(service, SandboxSpec(tenant="t"))
    two = await create(service, SandboxSpec(tenant="t"))
    with pytest.raises(TenantQuotaExceeded, match="'t' has reached its quota of 2 sandboxes"):
        await create(service, SandboxSpec(tenant="t"))
    with pytest.raises(TenantQuotaExceeded):
        await service.execute_once(OneShotRequest(code="1", tenant="t"))
    await service.delete(one.name)
    with pytest.raises(TenantQuotaExceeded, match="16g more would exceed") as caught:
        await create(service, SandboxSpec(tenant="t", memory="16g"))
    assert caught.value.param == "memory"
    await service.delete(two.name)
    assert (await service.execute_once(OneShotRequest(code="1", tenant="t"))).status == "success"
    both = [await create(service, SandboxSpec(tenant="t")) for _ in range(2)]
    for made in both:
        await service.delete(made.name)


async def test_a_failed_start_costs_no_quota() -> None:
    async with SandboxService(settings(preload=(), capacity=1, tenant_sandboxes=1)) as small:
        made = await create(small, SandboxSpec(tenant="a"))
        for _ in range(3):
            with pytest.raises(SandboxServerAtCapacity, match="1 sandboxes are alive"):
                await create(small, SandboxSpec(tenant="b"))
        await small.delete(made.name)
        await create(small, SandboxSpec(tenant="b"))


async def test_the_memory_of_the_departed_is_bounded(service: SandboxService) -> None:
    for number in range(4):
        made = await create(service, SandboxSpec(), f"late-{number}")
        await run_code(made, "print('x' * 9000)", "call")
        await service.delete(made.name)
    with pytest.raises(SandboxNotFound):
        service.get("late-0")
    for number in range(1, 4):
        with pytest.raises(SandboxGone, match="it was deleted"):
            service.get(f"late-{number}")
    # All of them together keep as much output as one may: that of two calls.
    with pytest.raises(ExecutionNotFound):
        service.get_live_or_ended("late-1").executions.get("call")
    assert service.get_live_or_ended("late-3").executions.get("call")


async def test_departed_are_forgotten_in_time() -> None:
    async with SandboxService(settings(preload=(), tombstone_seconds=0.0)) as short:
        await create(short, SandboxSpec(), "gone")
        await short.delete("gone")
        await asyncio.sleep(0.01)
        with pytest.raises(SandboxNotFound):
            short.get("gone")


async def test_one_that_nobody_uses_is_ended() -> None:
    async with SandboxService(settings(preload=(), idle_seconds=0.4)) as service:
        idle = await create(service, SandboxSpec(), "idle")
        busy = await create(service, SandboxSpec(), "busy")
        call = await start_waiting(busy, "long")
        await wait_until(lambda: idle.end_reason is not None)
        with pytest.raises(SandboxGone, match="it was idle"):
            service.get("idle")
        assert busy.end_reason is None
        assert busy.info().last_used_at > busy.created_at
        busy.executions.interrupt()
        assert (await wait_for_outcome(call)).end.status == "interrupted"


# ---- calls ----------------------------------------------------------------------------------------------------


async def test_an_execution_id_with_another_request_is_a_conflict(sandbox: SandboxInstance) -> None:
    await run_code(sandbox, "1", "once")
    for other in (
        ExecuteRequest(code="2", execution_id="once"),
        ExecuteRequest(code="1", execution_id="once", timeout_seconds=5),
    ):
        with pytest.raises(SandboxConflict) as caught:
            sandbox.executions.start_or_get(other)
        assert caught.value.param == "execution_id"


async def test_only_so_many_calls_wait(sandbox: SandboxInstance) -> None:
    running = await start_waiting(sandbox, "running")
    waiting = [
        sandbox.executions.start_or_get(ExecuteRequest(code="1", execution_id=f"w{number}"))
        for number in range(2)
    ]
    with pytest.raises(RetryLater, match="2 executions wait"):
        sandbox.executions.start_or_get(ExecuteRequest(code="1"))
    assert sandbox.executions.start_or_get(waiting[1].request) is waiting[1]
    assert sandbox.executions.interrupt("w0")
    assert sandbox.executions.interrupt()
    assert (await wait_for_outcome(running)).end.status == "interrupted"
    assert (await wait_for_outcome(waiting[0])).end.status == "interrupted"
    assert (await wait_for_outcome(waiting[1])).end.status == "ok"
    assert not sandbox.executions.interrupt()
    assert not sandbox.executions.interrupt("w1")
    assert not sandbox.executions.interrupt("unheard-of")


async def test_ended_calls_are_forgotten_by_number(sandbox: SandboxInstance) -> None:
    for number in range(4):
        await run_code(sandbox, str(number), f"call-{number}")
    with pytest.raises(ExecutionNotFound, match="no longer retained"):
        sandbox.executions.get("call-0")
    with pytest.raises(ExecutionNotFound, match="no longer retained"):  # nothing runs twice
        sandbox.executions.start_or_get(ExecuteRequest(code="0", execution_id="call-0"))
    for number in range(1, 4):
        assert sandbox.executions.get(f"call-{number}").has_ended
    with pytest.raises(ExecutionNotFound, match="no execution"):
        sandbox.executions.get("call-4")


async def test_ended_calls_are_forgotten_by_size(sandbox: SandboxInstance) -> None:
    await run_code(sandbox, "print('x' * 15000)", "large")
    last = await run_code(sandbox, "print('x' * 30000)", "larger")
    with pytest.raises(ExecutionNotFound):
        sandbox.executions.get("large")
    # The last one can be read whatever its size.
    assert [event async for event in iter_events(sandbox.executions.get("larger"), after=-1)] == last.events
    assert [
        event async for event in iter_events(sandbox.executions.get("larger"), after=len(last.events))
    ] == []


async def test_output_counts_as_the_memory_it_takes(sandbox: SandboxInstance) -> None:
    """One character beyond the usual ones, and Python keeps all of the text in four bytes each."""
    await run_code(sandbox, "display({'text/html': '\\U0001f600' + 'x' * 99_999}, raw=True)", "wide")
    assert sandbox.executions.retained_bytes > 400_000


async def test_all_sandboxes_together_keep_a_bounded_output(
    service: SandboxService, sandbox: SandboxInstance
) -> None:
    """The least recently used lets go, also of its last call; the newest one stays readable."""
    other = await create(service, SandboxSpec())
    await run_code(sandbox, "print('x' * 200_000)", "first")
    await run_code(other, "print('x' * 200_000)", "second")
    with pytest.raises(ExecutionNotFound, match="no longer retained"):
        sandbox.executions.get("first")
    assert other.executions.get("second").has_ended
    assert (sandbox.executions.retained_bytes, other.executions.retained_bytes > 200_000) == (0, True)
    await service.delete(other.name)


async def test_a_call_that_is_read_is_not_lost_when_it_is_forgotten(sandbox: SandboxInstance) -> None:
    first = await run_code(sandbox, "print(1)\nprint(2)", "first")
    events = iter_events(sandbox.executions.get("first"))
    assert await anext(events) == first.events[0]
    for _ in range(4):
        await run_code(sandbox, "0")
    assert [event async for event in events] == first.events[1:]


# ---- one shots ------------------------------------------------------------------------------------------------


async def run_once(
    service: SandboxService, code: str, files: dict[str, bytes] | None = None, **request: Any
) -> OneShotResponse:
    encoded = {name: base64.b64encode(content).decode() for name, content in (files or {}).items()}
    return await service.execute_once(OneShotRequest(code=code, files=encoded, **request))


def decode_produced(response: OneShotResponse) -> dict[str, bytes]:
    return {name: base64.b64decode(text) for name, text in response.files_produced.items()}


async def test_one_shot_gives_back_what_is_new_or_changed(service: SandboxService) -> None:
    response = await run_once(
        service,
        "import os\nos.makedirs('new/deep')\n"
        "open('new/deep/a', 'w').write(open('in/same').read() * 2)\nopen('in/changed', 'a').write('!')\n"
        "os.symlink('/etc/passwd', 'link'); os.mkfifo('fifo')\nprint(os.environ['OUTPUT_DIR'])\n6 * 7",
        {"in/same": b"ab", "in/changed": b"cd"},
    )
    assert (response.status, response.exit_code, response.stderr) == ("success", 0, "")
    assert response.stdout == "/mnt/data\n42\n"
    assert decode_produced(response) == {"new/deep/a": b"abab", "in/changed": b"cd!"}


@pytest.mark.parametrize(
    ("code", "exit_code", "said"),
    [
        ("1/0", 1, "ZeroDivisionError: division by zero\n"),
        ("import sys; print('e', file=sys.stderr); sys.exit(3)", 3, "e\n"),
        (
            "while True: pass",
            -1,
            "The code ran longer than 0.5 s and was interrupted.\n",
        ),
        ("import os; os._exit(1)", -1, "The sandbox was lost: the interpreter exited with code 1.\n"),
    ],
)
async def test_one_shot_that_fails(service: SandboxService, code: str, exit_code: int, said: str) -> None:
    response = await run_once(service, code, timeout_seconds=0.5 if "while" in code else 20)
    assert (response.status, response.exit_code) == ("error", exit_code)
    assert response.stderr.endswith(said)


@pytest.mark.skipif(not has_cgroups(), reason="memory cannot be bounded as this user")
async def test_one_shot_out_of_memory(service: SandboxService) -> None:
    response = await run_once(
        service, "import mmap\nm = mmap.mmap(-1, 2 << 30)\nfor i in range(0, 2 << 30, 4096): m[i] = 1"
    )
    assert (response.status, response.exit_code) == ("error", -1)
    assert "out of memory (1g)" in response.stderr


async def test_one_shot_gives_back_only_so_much(service: SandboxService) -> None:
    response = await run_once(service, "for n in range(5): open(f'{n}', 'w').write('x')")
    assert sorted(response.files_produced) == ["0", "1", "2"]
    assert response.status == "success"
    assert "2 files that the code wrote are left out: at most 3 files of 1000 bytes" in response.stderr
    response = await run_once(
        service, "open('a', 'w').write('x' * 900); open('b', 'w').write('x' * 101); open('c','w')"
    )
    assert sorted(response.files_produced) == ["a", "c"]
    assert "1 files" in response.stderr


@pytest.mark.parametrize(
    ("files", "error", "said"),
    [
        ({"../x": "eA=="}, FileRefused, "a path is relative"),
        ({"/x": "eA=="}, FileRefused, "a path is relative"),
        ({"a//b": "eA=="}, FileRefused, "a path is relative"),
        ({"a\0b": "eA=="}, FileRefused, "a path is relative"),
        ({"": "eA=="}, FileRefused, "a path is relative"),
        ({"x": "eA="}, FileRefused, "not base64"),
        ({"x": "e A=="}, FileRefused, "not base64"),
        ({"x": "ä"}, FileRefused, "not base64"),
        (dict.fromkeys(map(str, range(172)), "A" * (4 << 20)), SandboxPayloadTooLarge, "do not fit"),
        ({f"f{n}": "" for n in range(MAX_ENTRIES + 1)}, SandboxPayloadTooLarge, f"{MAX_ENTRIES + 1} files"),
        ({"a": "", "a/b": ""}, FileRefused, "a/b"),
    ],
    ids=[
        "parent",
        "absolute",
        "empty part",
        "nul",
        "no name",
        "length",
        "space",
        "letter",
        "large",
        "many",
        "clash",
    ],
)
async def test_one_shot_refuses_files(
    service: SandboxService, files: dict[str, str], error: type[SandboxError], said: str
) -> None:
    with pytest.raises(error, match=said) as caught:
        await service.execute_once(OneShotRequest(code="1", files=files))
    assert caught.value.param == "files"


async def test_one_shot_is_destroyed_when_its_caller_leaves(service: SandboxService) -> None:
    before = service.supervisor.live_count
    work = asyncio.ensure_future(run_once(service, WAITING))
    await wait_until(lambda: service.health().running)
    assert service.supervisor.live_count == before + 1
    work.cancel()
    async with asyncio.timeout(20):
        await asyncio.gather(work, return_exceptions=True)
    assert work.cancelled()
    assert (service.supervisor.live_count, service.health().running) == (before, 0)


# ---- stopping -------------------------------------------------------------------------------------------------


async def test_stopping_lets_calls_end_and_then_interrupts_them() -> None:
    async with SandboxService(settings(preload=())) as service:
        short, long = [await create(service, SandboxSpec()) for _ in range(2)]
        quick = service.start_execution(short, ExecuteRequest(code="import time; time.sleep(0.3); 5"))
        slow = await start_waiting(long, "slow")
        shot = asyncio.ensure_future(run_once(service, WAITING))
        await wait_until(lambda: service.health().running >= 3)
        stopping = asyncio.ensure_future(service.stop(grace_seconds=1.0))
        await asyncio.sleep(0)
        assert service.health().status == "stopping"
        for new in (
            create(service, SandboxSpec()),
            service.execute_once(OneShotRequest(code="1")),
        ):
            with pytest.raises(SandboxServerUnreachable, match="stopping"):
                await new
        with pytest.raises(SandboxServerUnreachable, match="stopping"):
            service.start_execution(short, ExecuteRequest(code="1"))
        await stopping
        assert (await wait_for_outcome(quick)).end.status == "ok"
        assert (await wait_for_outcome(slow)).end.status == "interrupted"
        answer = await shot
        assert (answer.status, answer.stdout) == ("error", "waiting\n")
        assert "interrupted" in answer.stderr
    assert service.supervisor.live_count == 0


async def test_closing_ends_what_does_not_stop() -> None:
    async with SandboxService(settings(preload=())) as service:
        sandbox = await create(service, SandboxSpec())
        call = await start_waiting(sandbox, "long")
    assert (await wait_for_outcome(call)).end.status == "lost"
    with pytest.raises(SandboxServerUnreachable):
        await create(service, SandboxSpec())
