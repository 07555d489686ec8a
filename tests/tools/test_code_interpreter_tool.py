"""The code interpreter as a tool, over sandboxes that follow a script."""

import asyncio
from contextlib import aclosing

import msgspec
import pytest
from inline_snapshot import snapshot

from fumehood.containers.container_settings import ContainerSettings
from fumehood.interfaces import ToolCallResult
from fumehood.protocol.openai.container_objects import ContainerSpec
from fumehood.protocol.sandbox.sandbox_messages import (
    ExecuteRequest,
    ExecutionEnd,
    ExpressionResult,
    Stderr,
    Stdout,
)
from fumehood.testing import ScriptedExecution, WriteFile
from tests.support.interpreter_harness import (
    SOMEBODY,
    InterpreterHarness,
    outline,
    run_scripted,
)


async def test_the_function_that_the_model_is_offered() -> None:
    async with run_scripted() as interpreter:
        assert interpreter.tool.types == {"code_interpreter"}
        function = (await interpreter.configure()).function
        assert function.name == "code_interpreter"
        schema = msgspec.json.decode(function.parameters)
        assert list(schema["properties"]) == ["code", "requirements"]
        assert schema["required"] == ["code"]
        assert schema["properties"]["requirements"]["type"] == "array"


# --- the stream -----------------------------------------------------------------------------------------


async def test_the_events_of_a_call() -> None:
    actions = [
        Stdout("a\n"),
        Stderr("careful\n"),
        Stdout("b\n"),
        WriteFile("t.csv", b"1,2"),
        ExpressionResult({"text/plain": "42"}),
    ]
    async with run_scripted(ScriptedExecution("print('a')\n42", actions)) as interpreter:
        called = await interpreter.run("print('a')\n42", fragment=10)
        assert called.readable_events == snapshot(
            [
                {
                    "type": "response.output_item.added",
                    "output_index": 0,
                    "item": {
                        "type": "code_interpreter_call",
                        "id": "ci_1",
                        "status": "in_progress",
                        "code": "",
                        "container_id": "cntr_1",
                        "outputs": [],
                    },
                },
                {"type": "response.code_interpreter_call.in_progress", "item_id": "ci_1", "output_index": 0},
                {
                    "type": "response.code_interpreter_call_code.delta",
                    "item_id": "ci_1",
                    "output_index": 0,
                    "delta": "p",
                },
                {
                    "type": "response.code_interpreter_call_code.delta",
                    "item_id": "ci_1",
                    "output_index": 0,
                    "delta": "rint('a')",
                },
                {
                    "type": "response.code_interpreter_call_code.delta",
                    "item_id": "ci_1",
                    "output_index": 0,
                    "delta": """\

42\
""",
                },
                {
                    "type": "response.code_interpreter_call_code.done",
                    "item_id": "ci_1",
                    "output_index": 0,
                    "code": """\
print('a')
42\
""",
                },
                {"type": "response.code_interpreter_call.interpreting", "item_id": "ci_1", "output_index": 0},
                {"type": "response.code_interpreter_call.completed", "item_id": "ci_1", "output_index": 0},
                {
                    "type": "response.output_item.done",
                    "output_index": 0,
                    "item": {
                        "type": "code_interpreter_call",
                        "id": "ci_1",
                        "status": "completed",
                        "code": """\
print('a')
42\
""",
                        "container_id": "cntr_1",
                        "outputs": [
                            {
                                "type": "logs",
                                "logs": """\
a
careful
b
42\
""",
                            }
                        ],
                        "fumehood:execution": {
                            "stdout": """\
a
b
42\
""",
                            "stderr": "careful\n",
                            "exit_code": 0,
                            "duration_ms": 0,
                            "files": [
                                {
                                    "file_id": "cfile_1",
                                    "container_id": "cntr_1",
                                    "filename": "t.csv",
                                    "path": "/mnt/data/t.csv",
                                    "bytes": 3,
                                    "mime_type": "text/csv",
                                    "sha256": "17f8af97ad4a7f7639a4c9171d5185cbafb85462877a4746c21bdb0a4f940ca0",
                                    "content": None,
                                }
                            ],
                            "files_complete": True,
                            "missing_files": [],
                            "truncated": False,
                        },
                    },
                },
            ]
        )
        assert called.result.exchange.arguments == '{"code":"print(\'a\')\\n42"}'
        assert called.model_text == snapshot("""\
a
careful
b
42
Files: /mnt/data/t.csv\
""")
        assert [file.path for file in called.result.files] == ["/mnt/data/t.csv"]


async def test_the_events_of_a_call_that_fails() -> None:
    reason = "It ran longer than 60 s and was interrupted."
    end = ExecutionEnd(status="timeout", exit_code=-1, duration_ms=60_000, state_kept=True, reason=reason)
    async with run_scripted(ScriptedExecution("loop()", [Stdout("so far"), end])) as interpreter:
        called = await interpreter.run("loop()", fragment=100)
        assert called.readable_events == snapshot(
            [
                {
                    "type": "response.output_item.added",
                    "output_index": 0,
                    "item": {
                        "type": "code_interpreter_call",
                        "id": "ci_1",
                        "status": "in_progress",
                        "code": "",
                        "container_id": "cntr_1",
                        "outputs": [],
                    },
                },
                {"type": "response.code_interpreter_call.in_progress", "item_id": "ci_1", "output_index": 0},
                {
                    "type": "response.code_interpreter_call_code.delta",
                    "item_id": "ci_1",
                    "output_index": 0,
                    "delta": "loop()",
                },
                {
                    "type": "response.code_interpreter_call_code.done",
                    "item_id": "ci_1",
                    "output_index": 0,
                    "code": "loop()",
                },
                {"type": "response.code_interpreter_call.interpreting", "item_id": "ci_1", "output_index": 0},
                {"type": "response.code_interpreter_call.failed", "item_id": "ci_1", "output_index": 0},
                {
                    "type": "response.output_item.done",
                    "output_index": 0,
                    "item": {
                        "type": "code_interpreter_call",
                        "id": "ci_1",
                        "status": "failed",
                        "code": "loop()",
                        "container_id": "cntr_1",
                        "outputs": [
                            {
                                "type": "logs",
                                "logs": """\
so far
It ran longer than 60 s and was interrupted. Variables and files are kept.\
""",
                            }
                        ],
                        "fumehood:execution": {
                            "stdout": "so far",
                            "stderr": "It ran longer than 60 s and was interrupted. Variables and files are kept.",
                            "exit_code": -1,
                            "duration_ms": 60000,
                            "files": [],
                            "files_complete": True,
                            "missing_files": [],
                            "truncated": False,
                        },
                    },
                },
            ]
        )
        assert called.model_text == snapshot("""\
so far
It ran longer than 60 s and was interrupted. Variables and files are kept.
Exit code: -1\
""")


async def test_the_events_of_arguments_that_are_no_arguments() -> None:
    async with run_scripted() as interpreter:
        called = await interpreter.run_arguments('{"code": "print(1)", "requirements": "x"', fragment=100)
        assert outline(called.events) == snapshot(
            [
                "output_item.added in_progress",
                "ci.in_progress",
                "ci_code.delta print(1)",
                "ci_code.done print(1)",
                "ci.failed",
                "output_item.done failed",
            ]
        )
        assert called.model_text == snapshot("""\
Nothing ran: the arguments do not fit: Expected `array | null`, got `str` - at `$.requirements`.
Exit code: -1\
""")
        assert called.execution.exit_code == -1
        assert called.result.exchange.arguments == '{"code":"print(1)"}'


async def test_the_events_of_a_call_that_was_cut_off() -> None:
    async with run_scripted() as interpreter:
        offered = await interpreter.configure()
        session = offered.start_call(interpreter.make_context())
        events = [*session.open(), *session.feed(['{"code": "print('])]
        result = session.abort("the model's turn was cut off")
        assert outline([*events, *result.events]) == snapshot(
            [
                "output_item.added in_progress",
                "ci.in_progress",
                "ci_code.delta print(",
                "ci_code.done print(",
                "output_item.done incomplete",
            ]
        )
        assert result.exchange.output == snapshot("""\
The call was not finished: the model's turn was cut off.
Exit code: -1\
""")
        assert result.exchange.arguments == '{"code":"print("}'


async def test_a_call_that_is_stopped_keeps_what_it_said() -> None:
    started = asyncio.Event()

    async def tell(_: object) -> None:
        started.set()

    async with run_scripted(
        ScriptedExecution("wait()", [Stdout("so far\n"), tell, asyncio.Event()])
    ) as interpreter:
        offered = await interpreter.configure()
        session = offered.start_call(interpreter.make_context())
        session.feed(['{"code": "wait()"}'])
        async with aclosing(session.run()) as steps:
            written = await anext(steps)
            assert not isinstance(written, ToolCallResult)
            interpreting = await anext(steps)
            assert not isinstance(interpreting, ToolCallResult)
            running = asyncio.ensure_future(anext(steps))
            await started.wait()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        result = session.abort("it was cancelled")
        assert outline([*written, *interpreting, *result.events]) == snapshot(
            ["ci_code.done wait()", "ci.interpreting", "output_item.done incomplete"]
        )
        assert result.exchange.output == snapshot("""\
so far
The call was not finished: it was cancelled.
Exit code: -1\
""")
        await until_idle(interpreter)


async def until_idle(interpreter: InterpreterHarness) -> None:
    """Until no sandbox runs anything: what was interrupted has stopped."""
    while any(one.running for one in await interpreter.provider.list_sandboxes()):
        await asyncio.sleep(0)


# --- time -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seconds", "allowed"), [(600, 60), (10, 10)])
async def test_code_may_run_as_long_as_call_and_response_allow(seconds: float, allowed: float) -> None:
    def fits(request: ExecuteRequest) -> bool:
        return request.timeout_seconds == allowed

    async with run_scripted(ScriptedExecution(fits)) as interpreter:
        assert (await interpreter.run("x", seconds=seconds)).item.status == "completed"


async def test_nothing_runs_when_the_time_is_over() -> None:
    async with run_scripted() as interpreter:
        called = await interpreter.run("x", seconds=0)
        assert called.item.status == "failed"
        assert called.model_text == snapshot("""\
The time for this response was over before the code began.
Exit code: -1\
""")


# --- when there is no sandbox -----------------------------------------------------------------------------


async def test_requirements_are_passed_on() -> None:
    def fits(request: ExecuteRequest) -> bool:
        return request.requirements == ["humanize", "polars>=1.0"]

    async with run_scripted(ScriptedExecution(fits)) as interpreter:
        assert (await interpreter.run("x", "humanize", "polars>=1.0")).item.status == "completed"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("", "not valid JSON"),
        ("print(1)", "not valid JSON"),
        ('{"code": "print(1)"', "not valid JSON"),
        ('{"code": "\\ud800"}', "not valid JSON"),
        ("{}", "missing required field `code`"),
        ("[]", "Expected `object`"),
        ('{"code": null}', "Expected `str`"),
        ('{"code": "x", "requirements": "y"}', "requirements"),
        ('{"code": "x", "requirements": [1]}', "requirements"),
        ('{"code": "x", "requirements": [""]}', "requirements"),
        ('{"code": "x", "code": "y"}', "more than once"),
    ],
)
async def test_arguments_that_cannot_be_taken(arguments: str, problem: str) -> None:
    async with run_scripted() as interpreter:
        called = await interpreter.run_arguments(arguments)
        assert called.item.status == "failed"
        assert problem in called.model_text
        assert isinstance(msgspec.json.decode(called.result.exchange.arguments), dict)
        assert await interpreter.provider.list_sandboxes() == []


async def test_fields_that_nobody_knows_are_tolerated() -> None:
    async with run_scripted(ScriptedExecution("x")) as interpreter:
        called = await interpreter.run_arguments('{"language": "python", "code": "x", "requirements": null}')
        assert called.item.status == "completed"


async def test_as_many_containers_as_are_allowed() -> None:
    async with run_scripted(
        ScriptedExecution("x"), containers=ContainerSettings(containers_per_tenant=1)
    ) as interpreter:
        assert (await interpreter.run("x")).item.status == "completed"
        interpreter.segments.clear()
        await interpreter.containers.create_container(
            SOMEBODY, ContainerSpec()
        )  # in place of the one that nobody asked for
        called = await interpreter.run("y")
        assert called.item.status == "failed"
        assert called.model_text == snapshot("""\
The code did not run: Container limit reached (1): delete a container, or wait for one to expire.
Exit code: -1\
""")
