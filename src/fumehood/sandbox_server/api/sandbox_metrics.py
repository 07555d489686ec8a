"""Counts and times what the sandbox server does, for Prometheus.

Every name begins with `fumehood_sandbox_`, so that a gateway can show these figures beside its own.
"""

from collections.abc import Callable, Iterator
from typing import override

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from fumehood.protocol.sandbox.sandbox_messages import ExecutionEnd
from fumehood.sandbox_server.api.api_sandbox import TransferDirection
from fumehood.sandbox_server.egress.control_messages import EgressEvent
from fumehood.sandbox_server.settings import Settings
from fumehood.sandbox_server.supervisor.sandbox_execution import SandboxExecution
from fumehood.sandbox_server.supervisor.supervisor import Supervisor

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_PHASES = ("create_warm", "create_cold", "first_output", "execute", "install", "destroy")
_BUCKETS = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300, 1800,
)  # fmt: skip
# What can happen, so that all of it is there from the beginning: a rate of what has just appeared is nothing. An
# execution that had to be killed, or took its sandbox with it, has lost the state.
_EXECUTION_OUTCOMES = (
    ("ok", "kept"), ("error", "kept"), ("timeout", "kept"), ("timeout", "lost"), ("interrupted", "kept"),
    ("interrupted", "lost"), ("out_of_memory", "lost"), ("lost", "lost"), ("install_failed", "kept"),
)  # fmt: skip
_ERROR_CODES = ("at_capacity", "quota_exceeded", "sandbox_start_failed", "install_failed")

disable_created_metrics()  # a further sample for each, which nobody reads


class SandboxMetrics:
    """One set of figures on a registry of its own, so that two servers in one process do not add up.

    running: how many executions have begun and not ended.
    """

    def __init__(self, supervisor: Supervisor, settings: Settings, count_running: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_GaugeCollector(supervisor, settings, count_running))
        phases = Histogram(
            "fumehood_sandbox_phase_duration_seconds",
            "What takes how long.",
            ["phase"],
            buckets=_BUCKETS,
            registry=self._registry,
        )
        starts = self._make_counter(
            "starts", "Sandboxes handed out: warm ones were waiting, cold ones were made on demand.", "kind"
        )
        self._executions = self._make_counter(
            "executions",
            "Executions that ended, by status and what became of the variables.",
            "status",
            "state",
        )
        self._errors = self._make_counter("refusals", "Requests refused, by error code.", "code")
        self._lost = self._make_counter("lost", "Sandboxes that ended unasked.")
        file_bytes = self._make_counter("file_bytes", "Bytes of files put in and taken out.", "direction")
        egress = self._make_counter(
            "egress_requests", "Requests of sandboxes to the network, by what became of them.", "verdict"
        )
        # Looking labels up is slower than everything else here.
        self._phase_seconds = {phase: phases.labels(phase) for phase in _PHASES}
        self._starts = {kind: starts.labels(kind) for kind in ("warm", "cold")}
        self._file_bytes = {direction: file_bytes.labels(direction) for direction in ("in", "out")}
        self._egress = {verdict: egress.labels(verdict) for verdict in ("allowed", "refused", "failed")}
        for status, state in _EXECUTION_OUTCOMES:
            self._executions.labels(status, state)
        for code in _ERROR_CODES:
            self._errors.labels(code)
        supervisor.egress.on_event = self._record_egress

    def _make_counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(f"fumehood_sandbox_{name}", documentation, labels, registry=self._registry)

    def record_created(self, *, warm: bool, seconds: float, with_packages: bool = False) -> None:
        """Where packages had to be there first, that is what the time was spent on."""
        kind = "warm" if warm else "cold"
        self._starts[kind].inc()
        self._phase_seconds["install" if with_packages else f"create_{kind}"].observe(seconds)

    def record_destroyed(self, seconds: float) -> None:
        self._phase_seconds["destroy"].observe(seconds)

    def record_lost(self) -> None:
        self._lost.inc()

    def record_execution(self, execution: SandboxExecution, end: ExecutionEnd) -> None:
        self._executions.labels(end.status, "kept" if end.state_kept else "lost").inc()
        self._phase_seconds["execute"].observe(end.duration_ms / 1000)
        if execution.install_seconds is not None:
            self._phase_seconds["install"].observe(execution.install_seconds)
        if execution.seconds_to_first_event is not None:
            self._phase_seconds["first_output"].observe(execution.seconds_to_first_event)

    def record_file_bytes(self, direction: TransferDirection, size: int) -> None:
        self._file_bytes[direction].inc(size)

    def record_error(self, code: str) -> None:
        self._errors.labels(code).inc()

    def _record_egress(self, event: EgressEvent) -> None:
        self._egress[event.verdict].inc()

    def render(self) -> bytes:
        return generate_latest(self._registry)


class _GaugeCollector(Collector):
    """What others know anyway is asked when somebody wants to know."""

    def __init__(self, supervisor: Supervisor, settings: Settings, count_running: Callable[[], int]) -> None:
        self._supervisor = supervisor
        self._settings = settings
        self._count_running = count_running

    @override
    def collect(self) -> Iterator[Metric]:
        supervisor, settings = self._supervisor, self._settings
        yield _make_gauge("live", "Sandboxes that exist, parked ones included.", supervisor.live_count)
        yield _make_gauge("parked", "Sandboxes that wait for a caller.", supervisor.pool_available)
        yield _make_gauge("waiting", "Callers that wait for a sandbox.", supervisor.pending_creations)
        yield _make_gauge("running", "Executions that have begun and not ended.", self._count_running())
        yield _make_gauge(
            "capacity", "As many sandboxes as may exist.", 1 if settings.mode == "pod" else settings.capacity
        )
        yield _make_gauge(
            "pool_size", "As many as should be parked.", 0 if settings.mode == "pod" else settings.pool
        )
        memory = supervisor.memory_current()
        if memory is not None:
            yield _make_gauge(
                "memory_bytes", "Memory of all sandboxes, with what they were forked from.", memory
            )
        yield _make_counter("pool_refills", "Sandboxes made for the pool.", supervisor.refills)
        yield _make_counter(
            "pool_failures", "Sandboxes that could not be made for the pool.", supervisor.refill_failures
        )
        installer = supervisor.installer
        installs = CounterMetricFamily(
            "fumehood_sandbox_package_installs", "Requests for packages, by outcome.", labels=["outcome"]
        )
        installs.add_metric(["installed"], 0 if installer is None else installer.installed_count)
        installs.add_metric(["failed"], 0 if installer is None else installer.failed_count)
        yield installs
        yield _make_counter(
            "zygote_restarts",
            "How often the process that makes sandboxes had to be started again.",
            supervisor.zygote_restarts,
        )


def _make_gauge(name: str, documentation: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"fumehood_sandbox_{name}", documentation, value)


def _make_counter(name: str, documentation: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"fumehood_sandbox_{name}", documentation, value)
