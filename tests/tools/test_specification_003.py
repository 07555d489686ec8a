"""Specification 003, requirement by requirement, as far as the tool shows it.

Each test is named after what it shows: FR a functional requirement, US an acceptance scenario of a user story, EC an
edge case, SC a success criterion. What the whole gateway is needed for is in the file of this name in tests/e2e.
Sandboxes are real unless a test needs a server without room or one that loses sandboxes on command.
"""

import ast
import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from openai.types.responses import ResponseCodeInterpreterToolCall

from fumehood.containers.container_state import ContainerSettings
from fumehood.interfaces import SandboxProvider
from fumehood.protocol.openai.items import CodeInterpreterImage, CodeInterpreterLogs
from fumehood.protocol.openai.response_aggregation import aggregate_events
from fumehood.protocol.openai.response_projection import INCLUDE_CODE_OUTPUTS, INCLUDE_EXECUTION, project_item
from fumehood.protocol.openai.responses import Response
from fumehood.protocol.openai.stream_events import ResponseCreated
from fumehood.protocol.sandbox.sandbox_errors import SandboxGone
from fumehood.protocol.sandbox.sandbox_messages import Stdout
from fumehood.sandbox_client.local_provider import LocalSandboxProvider, LocalServerSettings
from fumehood.sandbox_client.remote_provider import RemoteSandboxProvider
from fumehood.testing import ExecutionStep
from fumehood.testing.kits.hosted_tool_kit import run_call
from fumehood.tools.interpreter_call import CodeInterpreterToolSettings
from tests.support.interpreter_harness import (
    SOMEBODY,
    InterpreterHarness,
    encode_arguments,
    make_tool_spec,
    outline,
    run_scripted,
)
from tests.support.package_index import FakePackageIndex, wheel
from tests.support.sandbox_runs import has_cgroups, settings
from tests.support.sandbox_server import run_server

ALONE = ContainerSettings(isolation="execution")
PNG = (
    "import base64\nopen('plot.png', 'wb').write(base64.b64decode("
    "'iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=='))\n"
)
KUBERNETES = {
    "FR-010": "a claim for each sandbox",
    "FR-011": "waiting for a claim; what the tool does meanwhile is US3-3 here",
    "FR-012": "deleting the claim; that every sandbox is released is SC-003 here",
    "US3-1": "a claim for each sandbox",
    "US3-2": "deleting the claim; that every sandbox is released is SC-003 here",
}
"""What needs a cluster, and has no test yet."""
IDS = {
    *(f"FR-{number:03}" for number in range(1, 17)),
    *("US1-1", "US1-2", "US1-3", "US1-4", "US2-1", "US2-2", "US3-1", "US3-2", "US3-3", "US4-1", "US4-2"),
    *(f"EC-{number}" for number in range(1, 5)),
    *(f"SC-{number:03}" for number in range(1, 6)),
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def provider() -> AsyncGenerator[SandboxProvider]:
    limits = "enforced" if has_cgroups() else "best-effort"
    with FakePackageIndex() as index:
        index.add(wheel("greeting", "1.0", {"greeting.py": "text = 'hello from a wheel'"}))
        chosen = LocalServerSettings(
            limits=limits, pool=1, options=("--preload", ""), environment={"FUMEHOOD_INDEX_URL": index.url}
        )
        async with LocalSandboxProvider(chosen) as provider:
            yield provider


@pytest.fixture
def interpreter(provider: SandboxProvider) -> InterpreterHarness:
    return InterpreterHarness(provider)


def test_every_requirement_is_somewhere() -> None:
    here = Path(__file__)
    files = (here, here.parents[1] / "e2e" / here.name)
    functions = [
        node.name
        for file in files
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    ]
    named = re.findall(r"(fr_\d+|us\d_\d|ec_\d|sc_\d+)", " ".join(functions))
    tested = {name.upper().replace("_", "-") for name in named}
    assert tested | set(KUBERNETES) == IDS
    assert not tested & set(KUBERNETES)


# --- what the model is offered ------------------------------------------------------------------------------


async def test_fr_001_the_tool_is_registered() -> None:
    async with run_scripted() as interpreter:
        assert interpreter.tool.types == {"code_interpreter"}
        offered = await interpreter.tool.configure(make_tool_spec(), SOMEBODY, [])
        assert offered.function.name == "code_interpreter"


async def test_fr_002_it_takes_code_and_requirements() -> None:
    async with run_scripted() as interpreter:
        offered = await interpreter.tool.configure(make_tool_spec(), SOMEBODY, [])
        schema = msgspec.json.decode(offered.function.parameters)
        assert list(schema["properties"]) == ["code", "requirements"]
        assert schema["required"] == ["code"]
        assert schema["properties"]["requirements"]["type"] == "array"


# --- execution ----------------------------------------------------------------------------------------------


@pytest.mark.asyncio(loop_scope="module")
async def test_fr_003_and_us1_1_code_runs_in_an_isolated_sandbox_and_stdout_comes_back(
    interpreter: InterpreterHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUMEHOOD_TEST_CANARY", "seen")
    called = await interpreter.run(
        "import os\nprint(6 * 7, 'FUMEHOOD_TEST_CANARY' in os.environ, os.getcwd())"
    )
    assert called.model_text == "42 False /mnt/data"
    (record,) = await interpreter.store.find_containers()
    assert record.sandbox in [one.id for one in await interpreter.provider.list_sandboxes()]


@pytest.mark.asyncio(loop_scope="module")
async def test_fr_004_and_us1_3_requirements_are_installed_before_the_code_runs(
    interpreter: InterpreterHarness,
) -> None:
    called = await interpreter.run("import greeting\nprint(greeting.text)", "greeting")
    assert called.logs.endswith("hello from a wheel\n")


@pytest.mark.asyncio(loop_scope="module")
async def test_fr_005_and_us1_4_code_that_takes_too_long_is_stopped_and_the_model_told(
    provider: SandboxProvider,
) -> None:
    interpreter = InterpreterHarness(provider, CodeInterpreterToolSettings(execution_timeout=0.3))
    called = await interpreter.run("while True: pass")
    assert called.item.status == "failed"
    assert "ran longer than 0.3 s" in called.model_text
    assert (await interpreter.run("print('free again')")).model_text == "free again"


@pytest.mark.asyncio(loop_scope="module")
async def test_fr_006_stdout_stderr_and_exit_code_are_the_result(interpreter: InterpreterHarness) -> None:
    code = "import sys\nprint('out', flush=True)\nprint('err', file=sys.stderr, flush=True)\nsys.exit(3)"
    called = await interpreter.run(code)
    assert called.model_text == "out\nerr\nExit code: 3"
    execution = called.execution
    assert (execution.stdout, execution.stderr, execution.exit_code) == ("out\n", "err\n", 3)


# --- the item -----------------------------------------------------------------------------------------------


@pytest.mark.asyncio(loop_scope="module")
async def test_fr_007_the_item_is_a_code_interpreter_call(interpreter: InterpreterHarness) -> None:
    called = await interpreter.run(f"{PNG}print('done')")
    for include in ((), (INCLUDE_CODE_OUTPUTS,), (INCLUDE_CODE_OUTPUTS, INCLUDE_EXECUTION)):
        item = msgspec.json.decode(msgspec.json.encode(project_item(called.item, include)))
        read = ResponseCodeInterpreterToolCall.model_validate(item, strict=True)
        assert (read.type, read.status) == ("code_interpreter_call", "completed")
        assert read.container_id.startswith("cntr_")
        assert (read.outputs is None) == (INCLUDE_CODE_OUTPUTS not in include)


@pytest.mark.asyncio(loop_scope="module")
async def test_fr_008_text_is_logs(interpreter: InterpreterHarness) -> None:
    called = await interpreter.run("print('one')\n'two'")
    assert called.item.outputs == [CodeInterpreterLogs(logs="one\n'two'")]


@pytest.mark.asyncio(loop_scope="module")
async def test_fr_009_and_us2_1_files_are_references(interpreter: InterpreterHarness) -> None:
    called = await interpreter.run(f"{PNG}open('table.csv', 'w').write('a,b')\nNone")
    assert [type(output) for output in called.item.outputs or []] == [CodeInterpreterImage]
    picture, table = called.execution.files
    assert (picture.filename, table.filename, table.path) == ("plot.png", "table.csv", "/mnt/data/table.csv")
    assert table.file_id.startswith("cfile_")
    async with aclosing(
        interpreter.containers.read_file(SOMEBODY, table.container_id, table.file_id)
    ) as pieces:
        assert b"".join([piece async for piece in pieces]) == b"a,b"


@pytest.mark.asyncio(loop_scope="module")
async def test_us2_2_and_sc_002_text_and_files_together(interpreter: InterpreterHarness) -> None:
    called = await interpreter.run(f"{PNG}print('plotted')")
    assert [type(output) for output in called.item.outputs or []] == [
        CodeInterpreterLogs,
        CodeInterpreterImage,
    ]
    assert [file.filename for file in called.result.files] == ["plot.png"]
    assert called.model_text == "plotted\nFiles: /mnt/data/plot.png"


# --- events -------------------------------------------------------------------------------------------------


@pytest.mark.asyncio(loop_scope="module")
async def test_fr_014_and_us1_2_lifecycle_events(interpreter: InterpreterHarness) -> None:
    completed = await interpreter.run("print(1)", fragment=100)
    assert outline(completed.events) == [
        "output_item.added in_progress",
        "ci.in_progress",
        "ci_code.delta print(1)",
        "ci_code.done print(1)",
        "ci.interpreting",
        "ci.completed",
        "output_item.done completed",
    ]
    failed = await interpreter.run("import os\nos._exit(1)", fragment=100)
    assert outline(failed.events)[-3:] == ["ci.interpreting", "ci.failed", "output_item.done failed"]


@pytest.mark.asyncio(loop_scope="module")
async def test_ec_2_and_sc_004_without_streaming_there_is_the_same_item(
    interpreter: InterpreterHarness,
) -> None:
    called = await interpreter.run("print(1)")
    beginning = ResponseCreated(response=Response(id="resp_1", created_at=0, model="m"))
    assert aggregate_events([beginning, *called.events]).output == [called.item]


# --- sandboxes ----------------------------------------------------------------------------------------------


async def test_fr_013_and_us4_1_and_sc_005_a_static_url() -> None:
    token = "a-token-of-some-length"
    async with (
        run_server(settings(preload=()), token=token) as server,
        RemoteSandboxProvider(server.where, token) as remote,
    ):
        called = await InterpreterHarness(remote).run("print('over there')")
        assert called.model_text == "over there"


async def test_us3_3_an_exhausted_pool_is_waited_for_and_then_told() -> None:
    containers = ContainerSettings(claim_timeout=2)
    async with run_scripted(capacity=0, containers=containers) as interpreter:
        running = asyncio.ensure_future(interpreter.run("x"))
        while not running.done():
            assert interpreter.clock.monotonic() < 5
            for _ in range(10):
                await asyncio.sleep(0)
            interpreter.clock.advance(0.1)
        assert interpreter.clock.monotonic() > 1
        called = await running
        assert called.item.status == "failed"
        assert called.model_text.startswith("No sandbox is free at the moment")


async def test_ec_1_a_sandbox_that_crashes() -> None:
    gone = SandboxGone("The pod has crashed.")
    async with run_scripted(ExecutionStep("x", [Stdout("so far\n"), gone]), containers=ALONE) as interpreter:
        called = await interpreter.run("x")
        assert called.item.status == "failed"
        assert called.model_text.startswith("so far\nThe sandbox was lost")
        assert await interpreter.provider.list_sandboxes() == []


async def test_ec_4_calls_of_one_turn_each_have_a_sandbox() -> None:
    began = [asyncio.Event(), asyncio.Event()]

    def step(number: int) -> ExecutionStep:
        async def tell(_: object) -> None:
            began[number].set()

        # Each waits for the other: one after another they would never end.
        return ExecutionStep(str(number), [tell, began[1 - number], Stdout(f"{number}\n")])

    async with run_scripted(step(0), step(1), containers=ALONE) as interpreter:
        offered = await interpreter.tool.configure(make_tool_spec(), SOMEBODY, [])
        sessions = [offered.start_call(interpreter.make_context(number)) for number in range(2)]
        done = await asyncio.gather(
            *(run_call(session, encode_arguments(str(number))) for number, session in enumerate(sessions))
        )
        assert [result.exchange.output for _, result in done] == ["0", "1"]
        assert await interpreter.provider.list_sandboxes() == []


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_sc_003_a_hundred_calls_leave_no_sandbox(provider: SandboxProvider) -> None:
    interpreter = InterpreterHarness(provider, CodeInterpreterToolSettings(execution_timeout=0.5), ALONE)
    codes = ["print(1)", "1 / 0", "import os\nos._exit(1)", "open('x', 'a').write('x')\nNone"]
    ends = [(await interpreter.run(codes[number % len(codes)])).execution.exit_code for number in range(100)]
    assert ends == [0, 1, -1, 0] * 25
    own = [record.id for record in await interpreter.store.find_containers()]
    assert len(own) == 1
    assert [one.id for one in await provider.list_sandboxes() if one.id.rpartition("-")[0] in own] == []
