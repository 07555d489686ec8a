"""Knows which model servers cannot serve, from probes in the background."""

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from fumehood.interfaces import Clock, DegradedUpstream
from fumehood.models.upstream.upstream_probe import probe_upstream
from fumehood.models.upstream.upstream_server import UpstreamServer

_CACHE_SECONDS = 10.0
_DEGRADED_CACHE_SECONDS = 2.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProbedUpstream:
    """A model server, and the patterns of the model names that it serves.

    endpoint: the path that turns are sent to. base_url: for the operator's log.
    """

    server: UpstreamServer
    models: Sequence[str]
    endpoint: str
    base_url: str


class UpstreamHealth:
    """Context manager that probes model servers once on entry, and again when somebody asks after ten seconds, or after
    two if a server is degraded.

    Probes run in a task of their own: nobody waits for them, and whoever asks gets the last result.
    """

    def __init__(self, upstreams: Sequence[ProbedUpstream], clock: Clock) -> None:
        self._upstreams = upstreams
        self._clock = clock
        self._degraded: list[DegradedUpstream] = []
        self._checked_at = -math.inf
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._refresh()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def find_degraded(self) -> Sequence[DegradedUpstream]:
        """The model servers that could not serve when they were last probed."""
        cache_seconds = _DEGRADED_CACHE_SECONDS if self._degraded else _CACHE_SECONDS
        if self._clock.monotonic() - self._checked_at >= cache_seconds:
            self._refresh()
        return self._degraded

    async def wait_until_checked(self, seconds: float) -> Sequence[DegradedUpstream]:
        """Wait for the probe that is running, but not longer than this; then as `find_degraded`."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=seconds)
        return self._degraded

    def _refresh(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._probe_all())

    async def _probe_all(self) -> None:
        reasons = await asyncio.gather(
            *(probe_upstream(each.server, each.models[0], each.endpoint) for each in self._upstreams)
        )
        before = {tuple(each.models): each.reason for each in self._degraded}
        for upstream, reason in zip(self._upstreams, reasons, strict=True):
            if reason != before.get(tuple(upstream.models)):
                _log_change(upstream, reason)
        self._degraded = [
            DegradedUpstream(upstream.models, reason)
            for upstream, reason in zip(self._upstreams, reasons, strict=True)
            if reason is not None
        ]
        self._checked_at = self._clock.monotonic()


def _log_change(upstream: ProbedUpstream, reason: str | None) -> None:
    fields = {"models": ", ".join(upstream.models), "base_url": upstream.base_url}
    if reason is None:
        logger.info("model_server_recovered", extra={"fields": fields})
    else:
        logger.warning("model_server_degraded", extra={"fields": {**fields, "reason": reason}})
