"""Rate, concurrency and memory limits, per API key and for the whole gateway.

All counters are in this process; nothing is awaited.
"""

from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from time import monotonic
from types import TracebackType
from typing import Self

from fumehood.cpu_worker import WORKER_THRESHOLD_BYTES
from fumehood.interfaces import Caller
from fumehood.protocol.api_keys import ApiKeyLimits
from fumehood.protocol.openai.api_errors import BodyTooLarge, RateLimited, ServiceUnavailable

MAX_BODY_BYTES = 32 << 20
MAX_CONCURRENT = 512
MAX_MEMORY_BYTES = 512 << 20


@dataclass(slots=True)
class _KeyUsage:
    """The limits and current usage of one key.

    requests_per_minute: the rate, and the size of the token bucket.
    tokens: requests left in the bucket at the time `filled_at`.
    memory_bytes: reserved bytes of bodies, files and conversations.
    """

    max_body_bytes: int
    max_running: int | None
    requests_per_minute: int | None
    tokens: float
    filled_at: float
    max_memory_bytes: int | None
    running: int = 0
    memory_bytes: int = 0


class RequestLimiter:
    """Counts requests and rejects those beyond a limit.

    defaults: the limits of a key that sets none. `concurrent` does not apply without keys, where all clients are one
        caller.
    max_concurrent: running responses of all keys together.
    max_memory_bytes: bytes of all requests in progress together; half of it for one key. Counts bodies, WebSocket
        messages, the files and large conversations that they refer to, and large responses read from the store. A body
        that arrives in one chunk is free: every connection may buffer that much anyway.
    """

    def __init__(
        self,
        defaults: ApiKeyLimits | None = None,
        *,
        max_concurrent: int = MAX_CONCURRENT,
        max_memory_bytes: int = MAX_MEMORY_BYTES,
        monotonic: Callable[[], float] = monotonic,
    ) -> None:
        self._defaults = defaults or ApiKeyLimits()
        self._max_concurrent = max_concurrent
        self._max_memory_bytes = max_memory_bytes
        self._memory_bytes = 0
        self._running_count = 0
        self._monotonic = monotonic
        self._usage_by_key: dict[str, _KeyUsage] = {}
        self.rejections = Counter[str]()  # by name of the limit

    def max_body_bytes(self, caller: Caller) -> int:
        """The size limit of a request body."""
        return self._usage_of(caller).max_body_bytes

    def count_request(self, caller: Caller, headers: list[tuple[bytes, bytes]]) -> None:
        """Count a request and append its rate-limit headers to `headers`. Raises RateLimited."""
        usage = self._usage_of(caller)
        rate = usage.requests_per_minute
        if rate is None:
            return
        now = self._monotonic()
        usage.tokens = min(rate, usage.tokens + (now - usage.filled_at) * rate / 60)
        usage.filled_at = now
        wait = 0.0
        if usage.tokens >= 1:
            usage.tokens -= 1
        else:
            wait = (1 - usage.tokens) * 60 / rate
        headers += (
            (b"x-ratelimit-limit-requests", b"%d" % rate),
            (b"x-ratelimit-remaining-requests", b"%d" % usage.tokens),
            (b"x-ratelimit-reset-requests", _format_duration((rate - usage.tokens) * 60 / rate)),
        )
        if wait:
            self.rejections["rate"] += 1
            raise RateLimited(
                f"Rate limit reached for requests: {rate} per minute. Try again in {wait:.3g} seconds.",
                retry_after=wait,
            )

    @contextmanager
    def concurrency_slot(self, caller: Caller) -> Generator[None]:
        """Hold a slot while a response runs. Raises RateLimited."""
        usage = self._usage_of(caller)
        if usage.max_running is not None and usage.running >= usage.max_running:
            self.rejections["key_concurrency"] += 1
            raise RateLimited(
                f"Concurrency limit of this key reached ({usage.max_running} running responses); try again soon.",
                retry_after=1.0,
            )
        if self._running_count >= self._max_concurrent:
            self.rejections["server_concurrency"] += 1
            raise RateLimited(
                f"Concurrency limit of this server reached ({self._max_concurrent} running responses); try again soon.",
                retry_after=1.0,
            )
        usage.running += 1
        self._running_count += 1
        try:
            yield
        finally:
            usage.running -= 1
            self._running_count -= 1

    def memory_budget(self, caller: Caller) -> "RequestMemoryReservation":
        """A context manager for the memory of one request."""
        return RequestMemoryReservation(self, self._usage_of(caller))

    def max_memory(self, usage: _KeyUsage) -> int:
        return min(usage.max_memory_bytes or self._max_memory_bytes, self._max_memory_bytes)

    def reserve_memory(self, usage: _KeyUsage, size: int) -> None:
        """Raises RateLimited for the limit of the key, ServiceUnavailable for the limit of the server."""
        if usage.max_memory_bytes is not None and usage.memory_bytes + size > usage.max_memory_bytes:
            self.rejections["key_memory"] += 1
            raise RateLimited(
                f"Memory limit of this key reached ({usage.max_memory_bytes:,} bytes of concurrent requests); try "
                "again soon.",
                retry_after=1.0,
            )
        if self._memory_bytes + size > self._max_memory_bytes:
            self.rejections["server_memory"] += 1
            raise ServiceUnavailable(
                f"Memory limit of this server reached ({self._max_memory_bytes:,} bytes of concurrent requests); try "
                "again soon.",
                retry_after=1.0,
            )
        usage.memory_bytes += size
        self._memory_bytes += size

    def release_memory(self, usage: _KeyUsage, size: int) -> None:
        usage.memory_bytes -= size
        self._memory_bytes -= size

    def _usage_of(self, caller: Caller) -> _KeyUsage:
        usage = self._usage_by_key.get(caller.key_id)
        if usage is None:
            defaults, own = self._defaults, caller.limits
            rate = own.requests_per_minute or defaults.requests_per_minute
            body_bytes = own.body_bytes or defaults.body_bytes or MAX_BODY_BYTES
            usage = self._usage_by_key[caller.key_id] = _KeyUsage(
                max_body_bytes=body_bytes,
                max_running=(own.concurrent or defaults.concurrent) if caller.key_id else None,
                requests_per_minute=rate,
                tokens=rate or 0,
                filled_at=self._monotonic(),
                max_memory_bytes=max(body_bytes, self._max_memory_bytes // 2) if caller.key_id else None,
            )
        return usage


class RequestMemoryReservation:
    """The memory that one request has reserved for its body and what that refers to; released on exit."""

    __slots__ = ("_limits", "_reserved", "_usage")

    def __init__(self, limits: RequestLimiter, usage: _KeyUsage) -> None:
        self._limits = limits
        self._usage = usage
        self._reserved = 0

    def reserve(self, size: int) -> None:
        """Raises RateLimited or ServiceUnavailable; BodyTooLarge for more than the limit itself."""
        maximum = self._limits.max_memory(self._usage)
        if self._reserved + size > maximum:
            raise BodyTooLarge(
                f"With its files and conversation, this request needs more than the memory limit of {maximum:,} bytes. "
                "Refer to less, or start a new conversation."
            )
        self._limits.reserve_memory(self._usage, size)
        self._reserved += size

    def resize(self, size: int) -> None:
        """Set the reserved size. Raises as `reserve`, and then nothing changes."""
        if size >= self._reserved:
            self.reserve(size - self._reserved)
        else:
            self._limits.release_memory(self._usage, self._reserved - size)
            self._reserved = size

    def reserve_for_response(self, size: int) -> None:
        """Reserve memory for a response. A small one is free; one beyond the limit needs all of the limit.

        Raises RateLimited, ServiceUnavailable.
        """
        if size >= WORKER_THRESHOLD_BYTES:
            self.reserve(min(size, self._limits.max_memory(self._usage) - self._reserved))

    def transfer(self) -> "RequestMemoryReservation":
        """Move the reservation to a new budget, which may live longer."""
        other = RequestMemoryReservation(self._limits, self._usage)
        other._reserved, self._reserved = self._reserved, 0
        return other

    def release(self) -> None:
        self._limits.release_memory(self._usage, self._reserved)
        self._reserved = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _format_duration(seconds: float) -> bytes:
    """In OpenAI's format: `17ms`, `8s`, `6m0s`."""
    if seconds < 1:
        return b"%dms" % ceil(seconds * 1000)
    minutes, rest = divmod(ceil(seconds), 60)
    return b"%dm%ds" % (minutes, rest) if minutes else b"%ds" % rest
