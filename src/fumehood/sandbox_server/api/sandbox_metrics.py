"""Prometheus metrics of the sandbox server."""

from collections.abc import Callable, Iterator
from typing import Literal, override

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
from fumehood.sandbox_server.egress.control_messages import EgressEvent
from fumehood.sandbox_server.settings import SandboxServerSettings
from fumehood.sandbox_server.supervisor.sandbox_execution import SandboxExecution
from fumehood.sandbox_server.supervisor.supervisor import Supervisor

type TransferDirection = Literal["in", "out"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_PHASES = ("create_warm", "create_cold", "first_output", "execute", "install", "destroy")
_BUCKETS = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300, 1800,
)  # fmt: skip
# Label values that exist from the start: rate() of a series that has just appeared is 0.
_EXECUTION_OUTCOMES = (
    ("ok", "kept"), ("error", "kept"), ("timeout", "kept"), ("timeout", "lost"), ("interrupted", "kept"),
    ("interrupted", "lost"), ("out_of_memory", "lost"), ("lost", "lost"), ("install_failed", "kept"),
)  # fmt: skip
_ERROR_CODES = ("at_capacity", "quota_exceeded", "sandbox_start_failed", "install_failed")

disable_created_metrics()  # one more sample per counter, which nobody reads


class SandboxMetrics:
    """Counters and timings of one server, on a registry of their own.

    count_running: returns how many executions have started and not ended.
    """

    def __init__(
        self, supervisor: Supervisor, settings: SandboxServerSettings, count_running: Callable[[], int]
    ) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_GaugeCollector(supervisor, settings, count_running))
        phases = Histogram(
            "fumehood_sandbox_phase_duration_seconds",
            "Duration of each phase.",
            ["phase"],
            buckets=_BUCKETS,
            registry=self._registry,
        )
        starts = self._make_counter(
            "fumehood_sandbox_starts",
            "Sandboxes created: warm ones came from the pool, cold ones were started on demand.",
            "kind",
        )
        self._executions = self._make_counter(
            "fumehood_sandbox_executions",
            "Executions that ended, by status and whether the interpreter's state was kept.",
            "status",
            "state",
        )
        self._errors = self._make_counter(
            "fumehood_sandbox_errors", "Requests answered with an error, by error code.", "code"
        )
        self._lost = self._make_counter(
            "fumehood_sandbox_unexpected_exits", "Sandboxes that ended without being deleted."
        )
        file_bytes = self._make_counter(
            "fumehood_sandbox_file_transfer_bytes", "Bytes of files written and read by callers.", "direction"
        )
        egress = self._make_counter(
            "fumehood_sandbox_egress_requests", "Network requests of sandboxes, by verdict.", "verdict"
        )
        # Looking up labels costs more than everything else here.
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
        return Counter(name, documentation, labels, registry=self._registry)

    def record_created(self, *, warm: bool, seconds: float, with_packages: bool = False) -> None:
        """With packages the time counts as `install`, which dominates it."""
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
    """Reads values from the supervisor at scrape time."""

    def __init__(
        self, supervisor: Supervisor, settings: SandboxServerSettings, count_running: Callable[[], int]
    ) -> None:
        self._supervisor = supervisor
        self._settings = settings
        self._count_running = count_running

    @override
    def collect(self) -> Iterator[Metric]:
        supervisor, settings = self._supervisor, self._settings
        is_pod = settings.mode == "pod"
        gauges = [
            (
                "fumehood_sandbox_instances",
                "Sandboxes that exist, pooled ones included.",
                supervisor.live_count,
            ),
            ("fumehood_sandbox_pool_available", "Sandboxes ready in the pool.", supervisor.pool_available),
            (
                "fumehood_sandbox_pending_creations",
                "Callers waiting for a sandbox.",
                supervisor.pending_creations,
            ),
            (
                "fumehood_sandbox_running_executions",
                "Executions started and not ended.",
                self._count_running(),
            ),
            ("fumehood_sandbox_capacity", "Maximum number of sandboxes.", 1 if is_pod else settings.capacity),
            ("fumehood_sandbox_pool_size", "Configured size of the pool.", 0 if is_pod else settings.pool),
        ]
        if (memory := supervisor.memory_current()) is not None:
            gauges.append(("fumehood_sandbox_memory_bytes", "Memory of all sandboxes and zygotes.", memory))
        for name, documentation, value in gauges:
            yield GaugeMetricFamily(name, documentation, value)
        yield CounterMetricFamily(
            "fumehood_sandbox_pool_refills", "Sandboxes started for the pool.", supervisor.refills
        )
        yield CounterMetricFamily(
            "fumehood_sandbox_pool_refill_failures",
            "Sandboxes for the pool that failed to start.",
            supervisor.refill_failures,
        )
        installer = supervisor.installer
        installs = CounterMetricFamily(
            "fumehood_sandbox_package_installs", "Package installs, by outcome.", labels=["outcome"]
        )
        installs.add_metric(["installed"], 0 if installer is None else installer.installed_count)
        installs.add_metric(["failed"], 0 if installer is None else installer.failed_count)
        yield installs
        yield CounterMetricFamily(
            "fumehood_sandbox_zygote_restarts", "Restarts of zygotes.", supervisor.zygote_restarts
        )
