"""How much a key may ask for, and all of them together.

Everything is counted in this process, in plain numbers: nothing is awaited, and nobody's counter is another's.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from time import monotonic
from types import TracebackType
from typing import Self

from fumehood.interfaces import Caller
from fumehood.protocol.api_keys import ApiKeyLimits
from fumehood.protocol.openai.api_errors import BodyTooLarge, RateLimited, ServiceUnavailable
from fumehood.worker_threads import WORKER_THRESHOLD_BYTES

MAX_BODY_BYTES = 32 << 20
MAX_CONCURRENT = 512
MAX_MEMORY_BYTES = 512 << 20


@dataclass(slots=True)
class _KeyUsage:
    """What one key may do, and what it is doing.

    rate: requests in a minute, and how many may come at once.
    tokens: how many more may come, at the time `filled_at`.
    held: bytes of bodies and of files.
    """

    max_body_bytes: int
    max_running: int | None
    requests_per_minute: int | None
    tokens: float
    filled_at: float
    max_memory_bytes: int | None
    running: int = 0
    memory_bytes: int = 0


class RequestLimits:
    """Counts what every key asks for, and refuses what is too much.

    usual: what a key may do for which nothing else was said. Where no keys are needed everybody is one caller, for
        whom `concurrent` has no meaning.
    total: how many responses may be in the making at once, whoever asked for them.
    body_bytes_total: how large the bodies of all requests that are worked on may be together, with the files and the
        large conversations that they refer to and large answers that are sent from the store, half of it for one key. A
        body that comes in one piece does not count: every connection may hold that much anyway. Messages of WebSocket
        count as bodies do.
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
        self.rejections = Counter[str]()  # by the limit

    def max_body_bytes(self, caller: Caller) -> int:
        """The largest body of a request."""
        return self._usage_of(caller).max_body_bytes

    def count_request(self, caller: Caller, headers: list[tuple[bytes, bytes]]) -> None:
        """One more request; adds to the headers of its answer how many are left. Raises RateLimited."""
        account = self._usage_of(caller)
        rate = account.requests_per_minute
        if rate is None:
            return
        now = self._monotonic()
        account.tokens = min(rate, account.tokens + (now - account.filled_at) * rate / 60)
        account.filled_at = now
        wait = 0.0
        if account.tokens >= 1:
            account.tokens -= 1
        else:
            wait = (1 - account.tokens) * 60 / rate
        headers += (
            (b"x-ratelimit-limit-requests", b"%d" % rate),
            (b"x-ratelimit-remaining-requests", b"%d" % account.tokens),
            (b"x-ratelimit-reset-requests", _format_duration((rate - account.tokens) * 60 / rate)),
        )
        if wait:
            self.rejections["rate"] += 1
            raise RateLimited(
                f"Rate limit reached for requests: {rate} in a minute. Try again in {wait:.3g} seconds.",
                retry_after=wait,
            )

    def concurrency_slot(self, caller: Caller) -> "_ConcurrencySlot":
        """For `with`, while a response is in the making; raises RateLimited."""
        account = self._usage_of(caller)
        if account.max_running is not None and account.running >= account.max_running:
            self.rejections["key"] += 1
            raise RateLimited(
                f"This key may have {account.max_running} responses in the making at once; try again soon.",
                retry_after=1.0,
            )
        if self._running_count >= self._max_concurrent:
            self.rejections["total"] += 1
            raise RateLimited(
                f"This server makes {self._max_concurrent} responses at once; try again soon.",
                retry_after=1.0,
            )
        return _ConcurrencySlot(self, account)

    def memory_budget(self, caller: Caller) -> "MemoryBudget":
        """For `with`, while a request of the caller's is read and worked on."""
        return MemoryBudget(self, self._usage_of(caller))

    def max_memory(self, usage: _KeyUsage) -> int:
        return min(usage.max_memory_bytes or self._max_memory_bytes, self._max_memory_bytes)

    def reserve_memory(self, usage: _KeyUsage, size: int) -> None:
        """So many bytes more of bodies; raises RateLimited, Unavailable."""
        if usage.max_memory_bytes is not None and usage.memory_bytes + size > usage.max_memory_bytes:
            self.rejections["key_bytes"] += 1
            raise RateLimited(
                "This key has as many large requests and answers as it may have at once; try again soon.",
                retry_after=1.0,
            )
        if self._memory_bytes + size > self._max_memory_bytes:
            self.rejections["total_bytes"] += 1
            raise ServiceUnavailable(
                "This server has as many large requests and answers as it can hold; try again soon.",
                retry_after=1.0,
            )
        usage.memory_bytes += size
        self._memory_bytes += size

    def release_memory(self, usage: _KeyUsage, size: int) -> None:
        usage.memory_bytes -= size
        self._memory_bytes -= size

    def acquire_slot(self, usage: _KeyUsage) -> None:
        usage.running += 1
        self._running_count += 1

    def release_slot(self, usage: _KeyUsage) -> None:
        usage.running -= 1
        self._running_count -= 1

    def _usage_of(self, caller: Caller) -> _KeyUsage:
        account = self._usage_by_key.get(caller.key_id)
        if account is None:
            usual, own = self._defaults, caller.limits
            rate = own.requests_per_minute or usual.requests_per_minute
            body_bytes = own.body_bytes or usual.body_bytes or MAX_BODY_BYTES
            account = self._usage_by_key[caller.key_id] = _KeyUsage(
                max_body_bytes=body_bytes,
                max_running=(own.concurrent or usual.concurrent) if caller.key_id else None,
                requests_per_minute=rate,
                tokens=rate or 0,
                filled_at=self._monotonic(),
                max_memory_bytes=max(body_bytes, self._max_memory_bytes // 2) if caller.key_id else None,
            )
        return account


class MemoryBudget:
    """What one request takes with its body and with what that refers to; it is given back at the end."""

    __slots__ = ("_limits", "_reserved", "_usage")

    def __init__(self, limits: RequestLimits, usage: _KeyUsage) -> None:
        self._limits = limits
        self._usage = usage
        self._reserved = 0

    def reserve(self, size: int) -> None:
        """Raises RateLimited, Unavailable, and BodyTooLarge for more than there will ever be."""
        most = self._limits.max_memory(self._usage)
        if self._reserved + size > most:
            raise BodyTooLarge(
                f"With the files and the conversation that it refers to, this request takes more than {most:,} bytes, "
                "which is all that may be held at once. Refer to less, or begin a new conversation."
            )
        self._limits.reserve_memory(self._usage, size)
        self._reserved += size

    def resize(self, size: int) -> None:
        """Exactly so much from now on; raises as `take`, and then it is as much as before."""
        if size >= self._reserved:
            self.reserve(size - self._reserved)
        else:
            self._limits.release_memory(self._usage, self._reserved - size)
            self._reserved = size

    def reserve_for_response(self, size: int) -> None:
        """As `take`, for an answer: a small one does not count, and one that is larger than all may be together is sent
        when it is alone. Raises RateLimited, Unavailable.
        """
        if size >= WORKER_THRESHOLD_BYTES:
            self.reserve(min(size, self._limits.max_memory(self._usage) - self._reserved))

    def transfer(self) -> "MemoryBudget":
        """All that it holds is another one's from now on, which may stay longer."""
        other = MemoryBudget(self._limits, self._usage)
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


class _ConcurrencySlot:
    __slots__ = ("_limits", "_usage")

    def __init__(self, limits: RequestLimits, usage: _KeyUsage) -> None:
        self._limits = limits
        self._usage = usage

    def __enter__(self) -> None:
        self._limits.acquire_slot(self._usage)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._limits.release_slot(self._usage)


def _format_duration(seconds: float) -> bytes:
    """As OpenAI writes it: `17ms`, `8s`, `6m0s`."""
    if seconds < 1:
        return b"%dms" % ceil(seconds * 1000)
    minutes, rest = divmod(ceil(seconds), 60)
    return b"%dm%ds" % (minutes, rest) if minutes else b"%ds" % rest
