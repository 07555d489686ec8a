"""The gateway's Prometheus metrics.

Counters are plain numbers; Prometheus families are built on each scrape. Names that begin with `fumehood_sandbox_`
belong to the sandbox server, whose page is appended when the gateway runs its own.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Self, get_args, override

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from fumehood.gateway_stats import BucketHistogram, ClaimStats, ContainerStats, GatewayStats, ModelStats
from fumehood.protocol.openai.items import (
    CodeInterpreterCall,
    CompactionItem,
    ContainerReference,
    ShellCall,
)
from fumehood.protocol.openai.responses import Response, Usage
from fumehood.protocol.sandbox.sandbox_errors import SandboxError
from fumehood.protocol.sandbox.sandbox_messages import ExecutionEndStatus

CONTENT_TYPE = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
_SANDBOX_METRICS_TIMEOUT = 2.0
_LAG_INTERVAL_SECONDS = 0.25

# Label values that are exported from the start: Prometheus cannot compute a rate from the first sample of a series.
_RESPONSE_STATUSES = ("completed", "incomplete", "failed", "cancelled")
_TURN_OUTCOMES = ("ended", "cancelled", "refused", "rate_limited", "unreachable", "timeout", "failed")
_CONTAINER_ENDS = ("idle", "old", "deleted", "evicted", "lost")
_CALL_STATUSES = (*get_args(ExecutionEndStatus.__value__), "abandoned")
_START_KINDS = ("warm", "cold")
_CLAIM_FAILURES = ("timeout", "at_capacity", "sandbox_start_failed", "unreachable", "delete")
_DROPPED_READER_REASONS = ("behind", "stalled")
_LIMIT_NAMES = ("rate", "key_concurrency", "server_concurrency", "key_memory", "server_memory")
_AUTH_REJECTION_REASONS = ("missing_key", "unknown_key", "scope", "host")
_COMPACTION_TRIGGERS = ("requested", "automatic")
_DIRECTIONS = ("in", "out")


class _ItemTag(msgspec.Struct):
    type: str = ""
    status: str = "completed"


_tag_decoder = msgspec.json.Decoder(_ItemTag)
# A plain item of these types was made by the client or by the model server.
_TYPED_CALLS = frozenset({"code_interpreter_call", "shell_call"})


class GatewayMetrics(Collector):
    """Metrics of one gateway, on a registry of its own.

    stats: counters that models, containers and the store maintain.
    disk_paths: directories whose free space is reported, by name.
    fetch_sandbox_metrics: returns the metrics page of the gateway's own sandbox server; raises SandboxError.
    hosted_item_types: the types of items that hosted tools make.
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
        self.hosted_item_types: frozenset[str] = frozenset()
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
        """`route` is the path pattern. Status 0: the client disconnected before the response started."""
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
            elif isinstance(item, ShellCall) and isinstance(item.environment, ContainerReference):
                self._tool_calls["shell", item.status] += 1
            elif isinstance(item, CompactionItem):
                self._compactions["automatic"] += 1
            elif isinstance(item, msgspec.Raw):
                self._record_plain_item(item)

    def _record_plain_item(self, item: msgspec.Raw) -> None:
        """Count the call of a hosted tool whose items are plain JSON; others are the model server's or the client's."""
        try:
            tag = _tag_decoder.decode(item)
        except msgspec.MsgspecError:
            return  # not one of ours
        if tag.type in self.hosted_item_types - _TYPED_CALLS and not tag.type.endswith("_output"):
            self._tool_calls[tag.type.removesuffix("_call"), tag.status] += 1

    def record_compaction(self, usage: Usage) -> None:
        self._compactions["requested"] += 1
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

    # ---- rendering ----------------------------------------------------------------------------------------

    async def render(self) -> bytes:
        """The metrics page, with that of the gateway's own sandbox server if it answers in time."""
        sandbox_page = b""
        if self._fetch_sandbox_metrics is not None:
            try:
                async with asyncio.timeout(_SANDBOX_METRICS_TIMEOUT):
                    sandbox_page = await self._fetch_sandbox_metrics()
            except (SandboxError, TimeoutError):
                sandbox_page = b""
            self._is_sandbox_server_up = bool(sandbox_page)
        return generate_latest(self._registry) + sandbox_page

    @override
    def collect(self) -> Iterator[Metric]:
        yield from self._collect_requests()
        yield from self._collect_responses()
        yield from _collect_models(self.stats.models)
        yield from _collect_containers(self.stats.containers)
        yield from _collect_claims(self.stats.claims)
        yield from self._collect_process()

    def _collect_requests(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "fumehood_requests", "Requests by route and status.", labels=["route", "status"]
        )
        for (route, status), number in self._requests.items():
            requests.add_metric([route, str(status)], number)
        yield requests
        yield _labelled_histogram(
            "fumehood_request_duration_seconds",
            "Time from the request headers to the end of the response.",
            "route",
            self._durations,
        )
        yield _labelled_counter(
            "fumehood_auth_rejections",
            "Requests rejected by authentication, by reason.",
            "reason",
            self._auth_rejections,
            _AUTH_REJECTION_REASONS,
        )
        yield _labelled_counter(
            "fumehood_limit_rejections",
            "Requests rejected by a limit.",
            "limit",
            self.limit_rejections,
            _LIMIT_NAMES,
        )
        yield GaugeMetricFamily("fumehood_open_streams", "Open response streams.", self.open_streams)
        yield GaugeMetricFamily(
            "fumehood_open_websockets", "Open WebSocket connections.", self.open_websockets
        )
        yield CounterMetricFamily("fumehood_stream_events", "Stream events sent.", self._events)
        yield _labelled_counter(
            "fumehood_dropped_readers",
            "Stream readers dropped because they read too slowly.",
            "reason",
            self.stats.dropped_readers,
            _DROPPED_READER_REASONS,
        )
        yield CounterMetricFamily("fumehood_uploads", "Uploaded files.", self._uploads)
        yield _labelled_counter(
            "fumehood_file_bytes",
            "Bytes of uploaded and downloaded files.",
            "direction",
            self._file_bytes,
            _DIRECTIONS,
        )

    def _collect_responses(self) -> Iterator[Metric]:
        yield _labelled_counter(
            "fumehood_responses",
            "Finished responses by status.",
            "status",
            self._responses,
            _RESPONSE_STATUSES,
        )
        yield _labelled_counter(
            "fumehood_tokens",
            "Input and output tokens of models.",
            "direction",
            self._tokens,
            ("input", "output"),
        )
        calls = CounterMetricFamily(
            "fumehood_tool_calls", "Calls of hosted tools by type and status.", labels=["type", "status"]
        )
        for labels, number in self._tool_calls.items():
            calls.add_metric([*labels], number)
        yield calls
        yield _labelled_counter(
            "fumehood_compactions",
            "Compactions of conversations.",
            "kind",
            self._compactions,
            _COMPACTION_TRIGGERS,
        )

    def _collect_process(self) -> Iterator[Metric]:
        store = self.stats.store
        yield _histogram(
            "fumehood_store_write_duration_seconds",
            "Duration of a store transaction.",
            store.write_seconds,
        )
        yield _histogram("fumehood_store_batch_size", "Writes per store transaction.", store.batch_sizes)
        yield _histogram("fumehood_event_loop_lag_seconds", "Lag of the event loop.", self.loop_lag)
        free = GaugeMetricFamily(
            "fumehood_disk_free_bytes", "Free bytes of the file system.", labels=["volume"]
        )
        size = GaugeMetricFamily("fumehood_disk_size_bytes", "Size of the file system.", labels=["volume"])
        for volume, path in self._disk_paths.items():
            try:
                stat = os.statvfs(path)
            except OSError:  # its user reports the error
                continue
            free.add_metric([volume], stat.f_bavail * stat.f_frsize)
            size.add_metric([volume], stat.f_blocks * stat.f_frsize)
        yield free
        yield size
        up = GaugeMetricFamily(
            "fumehood_local_sandbox_server_up",
            "Whether the gateway's own sandbox server returned its metrics.",
            labels=[],
        )
        if self._fetch_sandbox_metrics is not None:
            up.add_metric([], self._is_sandbox_server_up)
        yield up


def _collect_models(stats_by_model: Mapping[str, ModelStats]) -> Iterator[Metric]:
    running = GaugeMetricFamily("fumehood_model_turns_running", "Running model turns.", labels=["model"])
    ended = CounterMetricFamily(
        "fumehood_model_turns", "Finished model turns by outcome.", labels=["model", "outcome"]
    )
    retries = CounterMetricFamily("fumehood_model_turn_retries", "Retries of model turns.", labels=["model"])
    errors = CounterMetricFamily(
        "fumehood_model_errors", "Errors of model servers by kind.", labels=["model", "kind"]
    )
    for model, stats in stats_by_model.items():
        running.add_metric([model], stats.running_turns)
        retries.add_metric([model], stats.retries)
        for outcome in _TURN_OUTCOMES:
            ended.add_metric([model, outcome], stats.ended_turns[outcome])
        for kind in _TURN_OUTCOMES[2:]:
            errors.add_metric([model, kind], stats.errors[kind])
    yield from (running, ended, retries, errors)
    yield _labelled_histogram(
        "fumehood_model_turn_duration_seconds",
        "Duration of a model turn.",
        "model",
        {model: stats.turn_seconds for model, stats in stats_by_model.items()},
    )
    yield _labelled_histogram(
        "fumehood_model_turn_first_event_seconds",
        "Time to the first event of a model turn.",
        "model",
        {model: stats.first_event_seconds for model, stats in stats_by_model.items()},
    )


def _collect_containers(stats: ContainerStats) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "fumehood_live_containers", "Running containers of all tenants.", stats.live_containers
    )
    yield CounterMetricFamily("fumehood_containers_started", "Containers created.", stats.created)
    yield _labelled_counter(
        "fumehood_containers_ended", "Containers ended, by reason.", "end", stats.ended, _CONTAINER_ENDS
    )
    yield CounterMetricFamily(
        "fumehood_containers_rejected",
        "Containers rejected by the limit of their tenant.",
        stats.rejected,
    )
    yield CounterMetricFamily(
        "fumehood_containers_purged",
        "Expired containers whose files were deleted early to free space.",
        stats.purged,
    )
    yield GaugeMetricFamily(
        "fumehood_container_calls_running", "Running and waiting code calls.", stats.running_calls
    )
    yield _labelled_counter(
        "fumehood_container_calls", "Finished code calls by status.", "end", stats.ended_calls, _CALL_STATUSES
    )
    yield _labelled_counter(
        "fumehood_container_sandbox_starts",
        "Sandboxes acquired, by kind of start.",
        "start",
        stats.sandbox_starts,
        _START_KINDS,
    )
    yield CounterMetricFamily(
        "fumehood_container_orphans_destroyed",
        "Sandboxes destroyed because no container refers to them.",
        stats.orphans,
    )
    yield _labelled_histogram(
        "fumehood_container_phase_duration_seconds",
        "Duration of acquiring a sandbox, running code and transferring files.",
        "phase",
        {"acquire": stats.acquire_seconds, "run": stats.run_seconds, "files": stats.file_seconds},
    )


def _collect_claims(stats: ClaimStats) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "fumehood_claims_open", "Claims for sandboxes in pods, of all replicas.", stats.open_claims
    )
    yield GaugeMetricFamily("fumehood_claims_in_flight", "Claims that wait for a pod.", stats.in_flight)
    yield _labelled_histogram(
        "fumehood_claim_duration_seconds",
        "Time until the pod of a claim was ready.",
        "start",
        stats.ready_seconds,
    )
    yield _labelled_counter(
        "fumehood_claim_failures",
        "Claims that got no pod, or could not be deleted.",
        "reason",
        stats.failures,
        _CLAIM_FAILURES,
    )
    yield CounterMetricFamily(
        "fumehood_claim_watch_failures",
        "Times that the watch of claims broke or could not be started.",
        stats.watch_failures,
    )


def _labelled_counter(
    name: str, documentation: str, label: str, counts: Counter[str], initial_values: Iterable[str]
) -> CounterMetricFamily:
    """`initial_values`: label values that are exported even at zero."""
    family = CounterMetricFamily(name, documentation, labels=[label])
    for value in dict.fromkeys((*initial_values, *counts)):
        family.add_metric([value], counts[value])
    return family


def _labelled_histogram(
    name: str, documentation: str, label: str, histograms: Mapping[str, BucketHistogram]
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, documentation, labels=[label])
    for value, histogram in histograms.items():
        family.add_metric([value], histogram.buckets(), histogram.sum)
    return family


def _histogram(name: str, documentation: str, histogram: BucketHistogram) -> HistogramMetricFamily:
    return HistogramMetricFamily(name, documentation, histogram.buckets(), histogram.sum)


class EventLoopLagMonitor:
    """Context manager that measures at intervals how late the event loop runs a timer."""

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
