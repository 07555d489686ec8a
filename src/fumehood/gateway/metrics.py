"""Counts and times what the gateway does, for Prometheus; imports prometheus_client, `figures` and `protocol`.

Everything is counted in plain numbers, in one thread, and becomes metrics when somebody asks for them. No name begins
with `fumehood_sandbox_`: those are the sandbox server's, which are shown on the same page where it is our own.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import get_args, override

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from fumehood.figures import ContainerFigures, Distribution, Figures, TurnFigures
from fumehood.protocol.items import CodeInterpreterCall, Compaction, ShellCall
from fumehood.protocol.responses import Response, Usage
from fumehood.protocol.sandbox import EndStatus
from fumehood.protocol.sandbox_errors import SandboxError

CONTENT_TYPE = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")

_SANDBOXES_SECONDS = 2.0
# What is there from the beginning, though it never happened: a rate of what has just appeared would be nothing.
_RESPONSES = ("completed", "incomplete", "failed", "cancelled")
_TURNS = ("ended", "cancelled", "refused", "rate_limited", "unreachable", "timeout", "failed")
_ENDS = ("idle", "old", "deleted", "evicted", "lost")
_CALLS = (*get_args(EndStatus.__value__), "abandoned")
_STARTS = ("warm", "cold")
_CUT = ("behind", "stalled")
_LIMITS = ("rate", "key", "total", "key_bytes", "total_bytes")
_NOT_ALLOWED = ("no_key", "wrong_key", "scope", "host")
_COMPACTIONS = ("asked", "automatic")
_DIRECTIONS = ("in", "out")


class Metrics(Collector):
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
        figures: Figures | None = None,
        *,
        disks: Mapping[str, Path] | None = None,
        sandboxes: Callable[[], Awaitable[bytes]] | None = None,
    ) -> None:
        self.figures = figures or Figures()
        self.streams = 0
        self.sockets = 0
        self.limited = Counter[str]()
        self.loop_lag = Distribution()
        self._disks = disks or {}
        self._sandboxes = sandboxes
        self._sandboxes_answer = False
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._requests = Counter[tuple[str, int]]()
        self._durations: dict[str, Distribution] = {}
        self._events = 0
        self._responses = Counter[str]()
        self._tokens = Counter[str]()
        self._calls = Counter[tuple[str, str]]()
        self._uploads = 0
        self._file_bytes = Counter[str]()
        self._compactions = Counter[str]()
        self._not_allowed = Counter[str]()

    def answered(self, route: str, status: int, seconds: float) -> None:
        """`route` is the pattern, never what a caller wrote; 0 is a caller who left before any answer."""
        self._requests[route, status] += 1
        durations = self._durations.get(route)
        if durations is None:
            durations = self._durations[route] = Distribution()
        durations.add(seconds)

    def streamed(self, events: int) -> None:
        self._events += events

    def ended(self, response: Response) -> None:
        self._responses[response.status] += 1
        if response.usage is not None:
            self.used(response.usage)
        for item in response.output:
            if isinstance(item, CodeInterpreterCall):
                self._calls["code_interpreter", item.status] += 1
            elif isinstance(item, ShellCall):
                self._calls["shell", item.status] += 1
            elif isinstance(item, Compaction):
                self._compactions["automatic"] += 1

    def compacted(self, usage: Usage) -> None:
        self._compactions["asked"] += 1
        self.used(usage)

    def used(self, usage: Usage) -> None:
        self._tokens["input"] += usage.input_tokens
        self._tokens["output"] += usage.output_tokens

    def uploaded(self, size: int) -> None:
        self._uploads += 1
        self._file_bytes["in"] += size

    def downloaded(self, size: int) -> None:
        self._file_bytes["out"] += size

    def not_allowed(self, reason: str) -> None:
        self._not_allowed[reason] += 1

    def stalled(self) -> None:
        self.figures.readers_cut["stalled"] += 1

    # ---- what is shown ----------------------------------------------------------------------------------------

    async def page(self) -> bytes:
        """All of it, with the figures of our own sandbox server, unless it does not answer soon."""
        theirs = b""
        if self._sandboxes is not None:
            try:
                async with asyncio.timeout(_SANDBOXES_SECONDS):
                    theirs = await self._sandboxes()
            except (SandboxError, TimeoutError):
                theirs = b""
            self._sandboxes_answer = bool(theirs)
        return generate_latest(self._registry) + theirs

    @override
    def collect(self) -> Iterator[Metric]:
        yield from self._of_requests()
        yield from self._of_responses()
        yield from _of_models(self.figures.models)
        yield from _of_containers(self.figures.containers)
        yield from self._of_the_process()

    def _of_requests(self) -> Iterator[Metric]:
        requests = CounterMetricFamily("fumehood_requests", "Requests answered.", labels=["route", "status"])
        for (route, status), number in self._requests.items():
            requests.add_metric([route, str(status)], number)
        yield requests
        yield _distributed(
            "fumehood_request_seconds",
            "From the head of a request to the end of its answer.",
            "route",
            self._durations,
        )
        yield _counted(
            "fumehood_not_allowed",
            "Requests of nobody who may ask.",
            "reason",
            self._not_allowed,
            _NOT_ALLOWED,
        )
        yield _counted(
            "fumehood_limited", "Requests beyond a limit, by the limit.", "limit", self.limited, _LIMITS
        )
        yield GaugeMetricFamily("fumehood_streams", "Answers being streamed now.", self.streams)
        yield GaugeMetricFamily("fumehood_websockets", "WebSockets that are open.", self.sockets)
        yield CounterMetricFamily("fumehood_events", "Events streamed.", self._events)
        yield _counted(
            "fumehood_readers_cut", "Readers that were left.", "reason", self.figures.readers_cut, _CUT
        )
        yield CounterMetricFamily("fumehood_uploads", "Files uploaded.", self._uploads)
        yield _counted(
            "fumehood_file_bytes",
            "Bytes of files uploaded and downloaded.",
            "direction",
            self._file_bytes,
            _DIRECTIONS,
        )

    def _of_responses(self) -> Iterator[Metric]:
        yield _counted(
            "fumehood_responses", "Responses that ended, by status.", "status", self._responses, _RESPONSES
        )
        yield _counted(
            "fumehood_tokens",
            "Tokens that models read and wrote.",
            "direction",
            self._tokens,
            ("input", "output"),
        )
        calls = CounterMetricFamily(
            "fumehood_tool_calls", "Calls of hosted tools, by type and status.", labels=["type", "status"]
        )
        for labels, number in self._calls.items():
            calls.add_metric([*labels], number)
        yield calls
        yield _counted(
            "fumehood_compactions", "Conversations made short.", "kind", self._compactions, _COMPACTIONS
        )

    def _of_the_process(self) -> Iterator[Metric]:
        store = self.figures.store
        yield _alone(
            "fumehood_store_write_seconds", "Of a transaction, until it is on the disk.", store.seconds
        )
        yield _alone("fumehood_store_group_size", "Writes that shared a transaction.", store.group)
        yield _alone("fumehood_loop_lag_seconds", "How late the event loop is.", self.loop_lag)
        free = GaugeMetricFamily(
            "fumehood_disk_free_bytes", "What is left of a file system.", labels=["place"]
        )
        size = GaugeMetricFamily("fumehood_disk_size_bytes", "How large it is.", labels=["place"])
        for place, path in self._disks.items():
            try:
                about = os.statvfs(path)
            except OSError:  # whoever needs it says more of that
                continue
            free.add_metric([place], about.f_bavail * about.f_frsize)
            size.add_metric([place], about.f_blocks * about.f_frsize)
        yield free
        yield size
        up = GaugeMetricFamily(
            "fumehood_sandboxd_up", "Whether our own sandbox server has given its figures.", labels=[]
        )
        if self._sandboxes is not None:
            up.add_metric([], self._sandboxes_answer)
        yield up


def _of_models(models: Mapping[str, TurnFigures]) -> Iterator[Metric]:
    running = GaugeMetricFamily(
        "fumehood_turns_running", "Turns that models are asked for now.", labels=["model"]
    )
    ended = CounterMetricFamily(
        "fumehood_turns", "Turns that models were asked for, by outcome.", labels=["model", "outcome"]
    )
    retries = CounterMetricFamily("fumehood_turn_retries", "Tries after the first.", labels=["model"])
    errors = CounterMetricFamily(
        "fumehood_model_errors", "Errors of model servers, by kind.", labels=["model", "kind"]
    )
    for model, figures in models.items():
        running.add_metric([model], figures.running)
        retries.add_metric([model], figures.retries)
        for outcome in _TURNS:
            ended.add_metric([model, outcome], figures.ended[outcome])
        for kind in _TURNS[2:]:
            errors.add_metric([model, kind], figures.errors[kind])
    yield from (running, ended, retries, errors)
    yield _distributed(
        "fumehood_turn_seconds",
        "From asking for a turn to its end.",
        "model",
        {model: figures.seconds for model, figures in models.items()},
    )
    yield _distributed(
        "fumehood_turn_first_piece_seconds",
        "From asking for a turn to its first piece.",
        "model",
        {model: figures.first_piece for model, figures in models.items()},
    )


def _of_containers(figures: ContainerFigures) -> Iterator[Metric]:
    yield GaugeMetricFamily("fumehood_containers", "Containers that run, of all tenants.", figures.live)
    yield CounterMetricFamily("fumehood_containers_begun", "Containers that began here.", figures.begun)
    yield _counted("fumehood_containers_ended", "Containers that ended here.", "end", figures.ended, _ENDS)
    yield CounterMetricFamily(
        "fumehood_containers_refused",
        "Containers that did not begin, since their tenant had as many as it may have.",
        figures.refused,
    )
    yield CounterMetricFamily(
        "fumehood_containers_trimmed",
        "Expired containers whose files had to make room before their time.",
        figures.trimmed,
    )
    yield GaugeMetricFamily(
        "fumehood_container_calls_running", "Calls of code that run or wait.", figures.running
    )
    yield _counted("fumehood_container_calls", "Calls of code, by end.", "end", figures.calls, _CALLS)
    yield _counted("fumehood_container_starts", "Sandboxes that were had.", "start", figures.starts, _STARTS)
    yield _distributed(
        "fumehood_container_phase_seconds",
        "Until a sandbox is had, of the code, of its files.",
        "phase",
        {"acquire": figures.acquire, "run": figures.run, "files": figures.files},
    )


def _counted(
    name: str, documentation: str, label: str, numbers: Counter[str], always: Iterable[str]
) -> CounterMetricFamily:
    """`always`: what is shown also while there was none."""
    family = CounterMetricFamily(name, documentation, labels=[label])
    for value in dict.fromkeys((*always, *numbers)):
        family.add_metric([value], numbers[value])
    return family


def _distributed(
    name: str, documentation: str, label: str, distributions: Mapping[str, Distribution]
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, documentation, labels=[label])
    for value, distribution in distributions.items():
        family.add_metric([value], distribution.buckets(), distribution.total)
    return family


def _alone(name: str, documentation: str, distribution: Distribution) -> HistogramMetricFamily:
    return HistogramMetricFamily(name, documentation, distribution.buckets(), distribution.total)
