"""Counts and times what the sandbox server does, for Prometheus; imports prometheus_client and siblings."""

from collections.abc import Iterator
from typing import get_args, override

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from fumehood.protocol.sandbox import End, EndStatus
from fumehood.sandboxd.executions import Execution
from fumehood.sandboxd.supervisor import Supervisor

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_PHASES = ("create_warm", "create_cold", "first_output", "execute", "install", "destroy")
_BUCKETS = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300, 1800,
)  # fmt: skip
_STATUSES: tuple[EndStatus, ...] = get_args(EndStatus.__value__)


class Metrics:
    """One set of figures on a registry of its own, so that two servers in one process do not add up."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Load(supervisor))
        phases = Histogram(
            "fumehood_phase_seconds",
            "What takes how long.",
            ["phase"],
            buckets=_BUCKETS,
            registry=self._registry,
        )
        starts = Counter(
            "fumehood_sandbox_starts",
            "Sandboxes handed out: warm ones were waiting, cold ones were made on demand.",
            ["kind"],
            registry=self._registry,
        )
        executions = Counter(
            "fumehood_executions", "Executions that ended, by status.", ["status"], registry=self._registry
        )
        self._refusals = Counter(
            "fumehood_refusals", "Requests refused, by error code.", ["code"], registry=self._registry
        )
        self._lost = Counter(
            "fumehood_sandboxes_lost", "Sandboxes that ended unasked.", registry=self._registry
        )
        # Looking labels up is slower than everything else here.
        self._phases = {phase: phases.labels(phase) for phase in _PHASES}
        self._starts = {kind: starts.labels(kind) for kind in ("warm", "cold")}
        self._executions = {status: executions.labels(status) for status in _STATUSES}

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
        self._executions[end.status].inc()
        self._phases["execute"].observe(end.duration_ms / 1000)
        if execution.install_seconds is not None:
            self._phases["install"].observe(execution.install_seconds)
        if execution.first_event_after is not None:
            self._phases["first_output"].observe(execution.first_event_after)

    def refused(self, code: str) -> None:
        self._refusals.labels(code).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Load(Collector):
    """What the supervisor knows anyway is asked when somebody wants to know."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    @override
    def collect(self) -> Iterator[Metric]:
        supervisor = self._supervisor
        yield GaugeMetricFamily(
            "fumehood_sandboxes_live", "Sandboxes that exist, parked ones included.", supervisor.live
        )
        yield GaugeMetricFamily(
            "fumehood_sandboxes_parked", "Sandboxes that wait for a caller.", supervisor.parked
        )
        yield CounterMetricFamily(
            "fumehood_zygote_restarts",
            "How often the process that makes sandboxes had to be started again.",
            max(supervisor.zygote_starts - 1, 0),
        )
