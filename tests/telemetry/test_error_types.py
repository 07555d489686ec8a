"""How a call in a sandbox failed, on its spans and in metrics."""

from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from fumehood.containers.container_settings import ContainerSettings
from fumehood.protocol.sandbox.sandbox_errors import SandboxGone
from fumehood.protocol.sandbox.sandbox_messages import ExecutionEnd, ExecutionEndStatus
from fumehood.telemetry.instrumentation import InstrumentedHostedTool
from fumehood.telemetry.operation_records import RecordDispatcher
from fumehood.telemetry.otel_metrics import ModelNameLimiter, OtelMetrics
from fumehood.telemetry.span_emitter import SpanEmitter
from fumehood.telemetry.trace_context import TraceContextPropagator
from fumehood.testing import ScriptedExecution
from fumehood.testing.conformance_kits.hosted_tool_kit import run_call
from tests.support.interpreter_harness import (
    SOMEBODY,
    InterpreterHarness,
    encode_arguments,
    make_tool_spec,
    run_scripted,
)
from tests.telemetry.test_otel_metrics import read_values


def ended(status: ExecutionEndStatus, exit_code: int = -1, **more: Any) -> ScriptedExecution:
    end = ExecutionEnd(status=status, exit_code=exit_code, duration_ms=5, state_kept=True, **more)
    return ScriptedExecution("code()", [end])


class TracedCall:
    """One call of the code interpreter with its spans and metrics."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        emitter = SpanEmitter(provider.get_tracer("test"), TraceContextPropagator({}))
        self.metrics = OtelMetrics(ModelNameLimiter())
        self.dispatcher = RecordDispatcher([self.metrics, emitter], on_start=emitter.on_start)

    async def run(self, harness: InterpreterHarness) -> None:
        tool = InstrumentedHostedTool(harness.tool, self.dispatcher)
        configured = await tool.configure(make_tool_spec(), SOMEBODY, [])
        assert configured is not None
        await run_call(configured.start_call(harness.make_context()), encode_arguments("code()"))
        configured.close()
        self.dispatcher.flush()

    def spans(self, name: str) -> Sequence[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def error_of(self, name: str) -> tuple[str | None, bool]:
        """The error type of the only span of this name, and whether its status is ERROR."""
        (span,) = self.spans(name)
        error = (span.attributes or {}).get("error.type")
        return (None if error is None else str(error)), span.status.status_code is StatusCode.ERROR

    def metric_errors(self, name: str, **labels: str) -> set[str | None]:
        found = [each for each, _, _ in read_values(self.metrics, name)]
        return {each.get("error.type") for each in found if labels.items() <= each.items()}


RUN_PHASE = {"fumehood.sandbox.phase": "run"}


@pytest.mark.parametrize("status", ["timeout", "lost", "out_of_memory", "install_failed", "interrupted"])
async def test_each_failure_has_a_type_of_its_own(status: ExecutionEndStatus) -> None:
    traced = TracedCall()
    async with run_scripted(ended(status)) as harness:
        await traced.run(harness)
    assert traced.error_of("execute_tool code_interpreter") == (status, True)
    assert traced.error_of("sandbox run") == (status, True)
    assert traced.metric_errors("gen_ai.execute_tool.duration") == {status}
    assert traced.metric_errors("fumehood.sandbox.phase.duration", **RUN_PHASE) == {status}


@pytest.mark.parametrize(("status", "exit_code"), [("ok", 0), ("error", 1)])
async def test_code_that_ran_is_no_error_whatever_it_did(status: ExecutionEndStatus, exit_code: int) -> None:
    traced = TracedCall()
    async with run_scripted(ended(status, exit_code)) as harness:
        await traced.run(harness)
    for name in ("execute_tool code_interpreter", "sandbox run"):
        assert traced.error_of(name) == (None, False)
        (span,) = traced.spans(name)
        attributes = dict(span.attributes or {})
        assert attributes["process.exit.code"] == exit_code
        assert str(attributes["fumehood.container.id"]).startswith("cntr_")
    assert traced.metric_errors("gen_ai.execute_tool.duration") == {None}


async def test_a_failed_install_is_told_from_the_run() -> None:
    traced = TracedCall()
    async with run_scripted(ended("install_failed", packages_ms=1)) as harness:
        await traced.run(harness)
    assert traced.error_of("sandbox packages") == ("install_failed", True)


async def test_a_sandbox_that_is_gone_is_lost() -> None:
    traced = TracedCall()
    async with run_scripted(ScriptedExecution("code()", [SandboxGone("It died.")])) as harness:
        await traced.run(harness)
    assert {traced.error_of("execute_tool code_interpreter")[0]} == {"lost"}


async def test_a_call_without_a_sandbox_is_lost_and_says_why() -> None:
    traced = TracedCall()
    async with run_scripted(capacity=0, containers=ContainerSettings(claim_timeout=0)) as harness:
        await traced.run(harness)
    assert traced.error_of("execute_tool code_interpreter") == ("lost", True)
    assert traced.error_of("sandbox acquire") == ("SandboxServerAtCapacity", True)
