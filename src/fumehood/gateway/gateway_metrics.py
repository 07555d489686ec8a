"""Counts and times what the gateway does, for Prometheus.

Everything is counted in plain numbers, in one thread, and becomes metrics when somebody asks for them. No name begins
with `fumehood_sandbox_`: those are the sandbox server's, which are shown on the same page where it is our own.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Self, get_args, override

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from fumehood.metrics import BucketHistogram, ContainerStats, GatewayStats, ModelStats
from fumehood.protocol.openai.items import CodeInterpreterCall, CompactionItem, ShellCall
from fumehood.protocol.openai.responses import Response, Usage
from fumehood.protocol.sandbox.sandbox_errors import SandboxError
from fumehood.protocol.sandbox.sandbox_messages import ExecutionEndStatus

CONTENT_TYPE = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")


_SANDBOX_METRICS_TIMEOUT = 2.0


# What is there from the beginning, though it never happened: a rate of what has just appeared would be nothing.
_RESPONSE_STATUSES = ("completed", "incomplete", "failed", "cancelled")


_TURN_OUTCOMES = ("ended", "cancelled", "refused", "rate_limited", "unreachable", "timeout", "failed")


_CONTAINER_ENDS = ("idle", "old", "deleted", "evicted", "lost")


_CALL_STATUSES = (*get_args(ExecutionEndStatus.__value__), "abandoned")


_START_KINDS = ("warm", "cold")


_DROPPED_READER_REASONS = ("behind", "stalled")


_LIMIT_NAMES = ("rate", "key", "total", "key_bytes", "total_bytes")


_AUTH_REJECTION_REASONS = ("no_key", "wrong_key", "scope", "host")


_COMPACTION_TRIGGERS = ("asked", "automatic")


_DIRECTIONS = ("in", "out")


class GatewayMetrics(Collector):
    """One set of figures on a registry of its own, so that two gateways in one process do not add up.

    figures: what is counted behind the gateway.
    disks: directories whose file systems are told of, by what they are for.
    sandboxes: asks our own sandbox server for its figures; raises SandboxError.

    streams, sockets: how many answers are being streamed now, and how many WebSockets are open.
    limited: requests that were more than somebody may ask for, by the limit.
    loop_lag: how late the event loop was, every time that somebody looked.
    """

    def __init__(
        self,
        stats: GatewayStats | None = None,
        *,
        disk_paths: Mapping[str, Path] | None = None,
        fetch_sandbox_metrics: Callable[[], Awaitable[bytes]] | None = None,
    ) -> None:
        self.stats = stats or GatewayStats()
        self.open_streams = 0
        self.open_websockets = 0
        self.limit_rejections = Counter[str]()
        self.loop_lag = BucketHistogram()
        self._disk_paths = disk_paths or {}
        self._fetch_sandbox_metrics = fetch_sandbox_metrics
        self._is_sandbox_server_up = False
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._requests = Counter[tuple[str, int]]()
        self._durations: dict[str, BucketHistogram] = {}
        self._events = 0
        self._responses = Counter[str]()
        self._tokens = Counter[str]()
        self._tool_calls = Counter[tuple[str, str]]()
        self._uploads = 0
        self._file_bytes = Counter[str]()
        self._compactions = Counter[str]()
        self._auth_rejections = Counter[str]()

    def record_request(self, route: str, status: int, seconds: float) -> None:
        """`route` is the pattern, never what a caller wrote; 0 is a caller who left before any answer."""
        self._requests[route, status] += 1
        durations = self._durations.get(route)
        if durations is None:
            durations = self._durations[route] = BucketHistogram()
        durations.observe(seconds)

    def record_events(self, events: int) -> None:
        self._events += events

    def record_response(self, response: Response) -> None:
        self._responses[response.status] += 1
        if response.usage is not None:
            self.record_tokens(response.usage)
        for item in response.output:
            if isinstance(item, CodeInterpreterCall):
                self._tool_calls["code_interpreter", item.status] += 1
            elif isinstance(item, ShellCall):
                self._tool_calls["shell", item.status] += 1
            elif isinstance(item, CompactionItem):
                self._compactions["automatic"] += 1

    def record_compaction(self, usage: Usage) -> None:
        self._compactions["asked"] += 1
        self.record_tokens(usage)

    def record_tokens(self, usage: Usage) -> None:
        self._tokens["input"] += usage.input_tokens
        self._tokens["output"] += usage.output_tokens

    def record_upload(self, size: int) -> None:
        self._uploads += 1
        self._file_bytes["in"] += size

    def record_download(self, size: int) -> None:
        self._file_bytes["out"] += size

    def record_auth_rejection(self, reason: str) -> None:
        self._auth_rejections[reason] += 1

    def record_stalled_reader(self) -> None:
        self.stats.dropped_readers["stalled"] += 1

    # ---- what is shown ----------------------------------------------------------------------------------------

    async def render(self) -> bytes:
        """All of it, with the figures of our own sandbox server, unless it does not answer soon."""
        theirs = b""
        if self._fetch_sandbox_metrics is not None:
            try:
                async with asyncio.timeout(_SANDBOX_METRICS_TIMEOUT):
                    theirs = await self._fetch_sandbox_metrics()
            except (SandboxError, TimeoutError):
                theirs = b""
            self._is_sandbox_server_up = bool(theirs)
        return generate_latest(self._registry) + theirs

    @override
    def collect(self) -> Iterator[Metric]:
        yield from self._collect_requests()
        yield from self._collect_responses()
        yield from _collect_models(self.stats.models)
        yield from _collect_containers(self.stats.containers)
        yield from self._collect_process()

    def _collect_requests(self) -> Iterator[Metric]:
        requests = CounterMetricFamily("fumehood_requests", "Requests answered.", labels=["route", "status"])
        for (route, status), number in self._requests.items():
            requests.add_metric([route, str(status)], number)
        yield requests
        yield _labelled_histogram(
            "fumehood_request_duration_seconds",
            "From the head of a request to the end of its answer.",
            "route",
            self._durations,
        )
        yield _labelled_counter(
            "fumehood_auth_rejections",
            "Requests of nobody who may ask.",
            "reason",
            self._auth_rejections,
            _AUTH_REJECTION_REASONS,
        )
        yield _labelled_counter(
            "fumehood_limit_rejections",
            "Requests beyond a limit, by the limit.",
            "limit",
            self.limit_rejections,
            _LIMIT_NAMES,
        )
        yield GaugeMetricFamily("fumehood_open_streams", "Answers being streamed now.", self.open_streams)
        yield GaugeMetricFamily("fumehood_open_websockets", "WebSockets that are open.", self.open_websockets)
        yield CounterMetricFamily("fumehood_stream_events", "Events streamed.", self._events)
        yield _labelled_counter(
            "fumehood_dropped_readers",
            "Readers that were left.",
            "reason",
            self.stats.dropped_readers,
            _DROPPED_READER_REASONS,
        )
        yield CounterMetricFamily("fumehood_uploads", "Files uploaded.", self._uploads)
        yield _labelled_counter(
            "fumehood_file_bytes",
            "Bytes of files uploaded and downloaded.",
            "direction",
            self._file_bytes,
            _DIRECTIONS,
        )

    def _collect_responses(self) -> Iterator[Metric]:
        yield _labelled_counter(
            "fumehood_responses",
            "Responses that ended, by status.",
            "status",
            self._responses,
            _RESPONSE_STATUSES,
        )
        yield _labelled_counter(
            "fumehood_tokens",
            "Tokens that models read and wrote.",
            "direction",
            self._tokens,
            ("input", "output"),
        )
        calls = CounterMetricFamily(
            "fumehood_tool_calls", "Calls of hosted tools, by type and status.", labels=["type", "status"]
        )
        for labels, number in self._tool_calls.items():
            calls.add_metric([*labels], number)
        yield calls
        yield _labelled_counter(
            "fumehood_compactions",
            "Conversations made short.",
            "kind",
            self._compactions,
            _COMPACTION_TRIGGERS,
        )

    def _collect_process(self) -> Iterator[Metric]:
        store = self.stats.store
        yield _histogram(
            "fumehood_store_write_duration_seconds",
            "Of a transaction, until it is on the disk.",
            store.write_seconds,
        )
        yield _histogram("fumehood_store_batch_size", "Writes that shared a transaction.", store.batch_sizes)
        yield _histogram("fumehood_event_loop_lag_seconds", "How late the event loop is.", self.loop_lag)
        free = GaugeMetricFamily(
            "fumehood_disk_free_bytes", "What is left of a file system.", labels=["place"]
        )
        size = GaugeMetricFamily("fumehood_disk_size_bytes", "How large it is.", labels=["place"])
        for place, path in self._disk_paths.items():
            try:
                about = os.statvfs(path)
            except OSError:  # whoever needs it says more of that
                continue
            free.add_metric([place], about.f_bavail * about.f_frsize)
            size.add_metric([place], about.f_blocks * about.f_frsize)
        yield free
        yield size
        up = GaugeMetricFamily(
            "fumehood_local_sandbox_server_up",
            "Whether our own sandbox server has given its figures.",
            labels=[],
        )
        if self._fetch_sandbox_metrics is not None:
            up.add_metric([], self._is_sandbox_server_up)
        yield up


def _collect_models(stats_by_model: Mapping[str, ModelStats]) -> Iterator[Metric]:
    running = GaugeMetricFamily(
        "fumehood_model_turns_running", "Turns that models are asked for now.", labels=["model"]
    )
    ended = CounterMetricFamily(
        "fumehood_model_turns", "Turns that models were asked for, by outcome.", labels=["model", "outcome"]
    )
    retries = CounterMetricFamily("fumehood_model_turn_retries", "Tries after the first.", labels=["model"])
    errors = CounterMetricFamily(
        "fumehood_model_errors", "Errors of model servers, by kind.", labels=["model", "kind"]
    )
    for model, figures in stats_by_model.items():
        running.add_metric([model], figures.running_turns)
        retries.add_metric([model], figures.retries)
        for outcome in _TURN_OUTCOMES:
            ended.add_metric([model, outcome], figures.ended_turns[outcome])
        for kind in _TURN_OUTCOMES[2:]:
            errors.add_metric([model, kind], figures.errors[kind])
    yield from (running, ended, retries, errors)
    yield _labelled_histogram(
        "fumehood_model_turn_duration_seconds",
        "From asking for a turn to its end.",
        "model",
        {model: figures.turn_seconds for model, figures in stats_by_model.items()},
    )
    yield _labelled_histogram(
        "fumehood_model_turn_first_event_seconds",
        "From asking for a turn to its first piece.",
        "model",
        {model: figures.first_event_seconds for model, figures in stats_by_model.items()},
    )


def _collect_containers(stats: ContainerStats) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "fumehood_live_containers", "Containers that run, of all tenants.", stats.live_containers
    )
    yield CounterMetricFamily("fumehood_containers_started", "Containers that began here.", stats.created)
    yield _labelled_counter(
        "fumehood_containers_ended", "Containers that ended here.", "end", stats.ended, _CONTAINER_ENDS
    )
    yield CounterMetricFamily(
        "fumehood_containers_rejected",
        "Containers that did not begin, since their tenant had as many as it may have.",
        stats.rejected,
    )
    yield CounterMetricFamily(
        "fumehood_containers_purged",
        "Expired containers whose files had to make room before their time.",
        stats.purged,
    )
    yield GaugeMetricFamily(
        "fumehood_container_calls_running", "Calls of code that run or wait.", stats.running_calls
    )
    yield _labelled_counter(
        "fumehood_container_calls", "Calls of code, by end.", "end", stats.ended_calls, _CALL_STATUSES
    )
    yield _labelled_counter(
        "fumehood_container_sandbox_starts",
        "Sandboxes that were had.",
        "start",
        stats.sandbox_starts,
        _START_KINDS,
    )
    yield _labelled_histogram(
        "fumehood_container_phase_duration_seconds",
        "Until a sandbox is had, of the code, of its files.",
        "phase",
        {"acquire": stats.acquire_seconds, "run": stats.run_seconds, "files": stats.file_seconds},
    )


def _labelled_counter(
    name: str, documentation: str, label: str, counts: Counter[str], initial_values: Iterable[str]
) -> CounterMetricFamily:
    """`always`: what is shown also while there was none."""
    family = CounterMetricFamily(name, documentation, labels=[label])
    for value in dict.fromkeys((*initial_values, *counts)):
        family.add_metric([value], counts[value])
    return family


def _labelled_histogram(
    name: str, documentation: str, label: str, histograms: Mapping[str, BucketHistogram]
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, documentation, labels=[label])
    for value, distribution in histograms.items():
        family.add_metric([value], distribution.buckets(), distribution.sum)
    return family


def _histogram(name: str, documentation: str, histogram: BucketHistogram) -> HistogramMetricFamily:
    return HistogramMetricFamily(name, documentation, histogram.buckets(), histogram.sum)


_LAG_INTERVAL_SECONDS = 0.25


class EventLoopLagMonitor:
    """In a `with`: asks to be called every so often, and adds by how much later that happens."""

    def __init__(self, histogram: BucketHistogram, interval: float = _LAG_INTERVAL_SECONDS) -> None:
        self._histogram = histogram
        self._interval = interval
        self._loop = asyncio.get_running_loop()
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        self._schedule()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _schedule(self) -> None:
        self._due = self._loop.time() + self._interval
        self._timer = self._loop.call_at(self._due, self._measure)

    def _measure(self) -> None:
        self._histogram.observe(max(self._loop.time() - self._due, 0.0))
        self._schedule()
