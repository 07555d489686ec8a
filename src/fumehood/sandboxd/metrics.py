"""Counts and times what the sandbox server does, for Prometheus; imports prometheus_client and siblings.

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

from fumehood.protocol.sandbox import End
from fumehood.sandboxd.egress.orders import Event
from fumehood.sandboxd.executions import Execution
from fumehood.sandboxd.served import Direction
from fumehood.sandboxd.settings import Settings
from fumehood.sandboxd.supervisor import Supervisor

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_PHASES = ("create_warm", "create_cold", "first_output", "execute", "install", "destroy")
_BUCKETS = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300, 1800,
)  # fmt: skip
# What can happen, so that all of it is there from the beginning: a rate of what has just appeared is nothing. An
# execution that had to be killed, or took its sandbox with it, has lost the state.
_ENDS = (
    ("ok", "kept"), ("error", "kept"), ("timeout", "kept"), ("timeout", "lost"), ("interrupted", "kept"),
    ("interrupted", "lost"), ("out_of_memory", "lost"), ("lost", "lost"), ("install_failed", "kept"),
)  # fmt: skip
_REFUSALS = ("at_capacity", "quota_exceeded", "sandbox_start_failed", "install_failed")

disable_created_metrics()  # a further sample for each, which nobody reads


class Metrics:
    """One set of figures on a registry of its own, so that two servers in one process do not add up.

    running: how many executions have begun and not ended.
    """

    def __init__(self, supervisor: Supervisor, settings: Settings, running: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Load(supervisor, settings, running))
        phases = Histogram(
            "fumehood_sandbox_phase_seconds",
            "What takes how long.",
            ["phase"],
            buckets=_BUCKETS,
            registry=self._registry,
        )
        starts = self._counter(
            "starts", "Sandboxes handed out: warm ones were waiting, cold ones were made on demand.", "kind"
        )
        self._executions = self._counter(
            "executions",
            "Executions that ended, by status and what became of the variables.",
            "status",
            "state",
        )
        self._refusals = self._counter("refusals", "Requests refused, by error code.", "code")
        self._lost = self._counter("lost", "Sandboxes that ended unasked.")
        file_bytes = self._counter("file_bytes", "Bytes of files put in and taken out.", "direction")
        egress = self._counter(
            "egress_requests", "Requests of sandboxes to the network, by what became of them.", "verdict"
        )
        # Looking labels up is slower than everything else here.
        self._phases = {phase: phases.labels(phase) for phase in _PHASES}
        self._starts = {kind: starts.labels(kind) for kind in ("warm", "cold")}
        self._file_bytes = {direction: file_bytes.labels(direction) for direction in ("in", "out")}
        self._egress = {verdict: egress.labels(verdict) for verdict in ("allowed", "refused", "failed")}
        for status, state in _ENDS:
            self._executions.labels(status, state)
        for code in _REFUSALS:
            self._refusals.labels(code)
        supervisor.egress.on_event = self._reached_out

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(f"fumehood_sandbox_{name}", documentation, labels, registry=self._registry)

    def created(self, *, warm: bool, seconds: float, with_packages: bool = False) -> None:
        """Where packages had to be there first, that is what the time was spent on."""
        kind = "warm" if warm else "cold"
        self._starts[kind].inc()
        self._phases["install" if with_packages else f"create_{kind}"].observe(seconds)

    def destroyed(self, seconds: float) -> None:
        self._phases["destroy"].observe(seconds)

    def lost(self) -> None:
        self._lost.inc()

    def ended(self, execution: Execution, end: End) -> None:
        self._executions.labels(end.status, "kept" if end.state_kept else "lost").inc()
        self._phases["execute"].observe(end.duration_ms / 1000)
        if execution.install_seconds is not None:
            self._phases["install"].observe(execution.install_seconds)
        if execution.first_event_after is not None:
            self._phases["first_output"].observe(execution.first_event_after)

    def moved(self, direction: Direction, size: int) -> None:
        self._file_bytes[direction].inc(size)

    def refused(self, code: str) -> None:
        self._refusals.labels(code).inc()

    def _reached_out(self, event: Event) -> None:
        self._egress[event.verdict].inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Load(Collector):
    """What others know anyway is asked when somebody wants to know."""

    def __init__(self, supervisor: Supervisor, settings: Settings, running: Callable[[], int]) -> None:
        self._supervisor = supervisor
        self._settings = settings
        self._running = running

    @override
    def collect(self) -> Iterator[Metric]:
        supervisor, settings = self._supervisor, self._settings
        yield _gauge("live", "Sandboxes that exist, parked ones included.", supervisor.live)
        yield _gauge("parked", "Sandboxes that wait for a caller.", supervisor.parked)
        yield _gauge("waiting", "Callers that wait for a sandbox.", supervisor.waiting)
        yield _gauge("running", "Executions that have begun and not ended.", self._running())
        yield _gauge(
            "capacity", "As many sandboxes as may exist.", 1 if settings.mode == "pod" else settings.capacity
        )
        yield _gauge(
            "pool_size", "As many as should be parked.", 0 if settings.mode == "pod" else settings.pool
        )
        memory = supervisor.memory()
        if memory is not None:
            yield _gauge("memory_bytes", "Memory of all sandboxes, with what they were forked from.", memory)
        yield _count("pool_refills", "Sandboxes made for the pool.", supervisor.refills)
        yield _count(
            "pool_failures", "Sandboxes that could not be made for the pool.", supervisor.refill_failures
        )
        installer = supervisor.installer
        installs = CounterMetricFamily(
            "fumehood_sandbox_installs", "Requests for packages, by outcome.", labels=["outcome"]
        )
        installs.add_metric(["installed"], 0 if installer is None else installer.installed)
        installs.add_metric(["failed"], 0 if installer is None else installer.failed)
        yield installs
        yield _count(
            "zygote_restarts",
            "How often the process that makes sandboxes had to be started again.",
            supervisor.zygote_restarts,
        )


def _gauge(name: str, documentation: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"fumehood_sandbox_{name}", documentation, value)


def _count(name: str, documentation: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"fumehood_sandbox_{name}", documentation, value)
