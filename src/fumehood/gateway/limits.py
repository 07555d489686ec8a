"""How much a key may ask for, and all of them together; imports `aside`, `interfaces`, `protocol`.

Everything is counted in this process, in plain numbers: nothing is awaited, and nobody's counter is another's.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from time import monotonic
from types import TracebackType
from typing import Self

from fumehood.aside import LARGE
from fumehood.interfaces import Caller
from fumehood.protocol.errors import BodyTooLarge, RateLimited, Unavailable
from fumehood.protocol.keys import KeyLimits

BODY_BYTES = 32 << 20
TOTAL = 512
BODY_BYTES_TOTAL = 512 << 20


@dataclass(slots=True)
class _Account:
    """What one key may do, and what it is doing.

    rate: requests in a minute, and how many may come at once.
    tokens: how many more may come, at the time `filled_at`.
    held: bytes of bodies and of files.
    """

    body_bytes: int
    most_running: int | None
    rate: int | None
    tokens: float
    filled_at: float
    most_held: int | None
    running: int = 0
    held: int = 0


class Limits:
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
        usual: KeyLimits | None = None,
        *,
        total: int = TOTAL,
        body_bytes_total: int = BODY_BYTES_TOTAL,
        monotonic: Callable[[], float] = monotonic,
    ) -> None:
        self._usual = usual or KeyLimits()
        self._total = total
        self._body_bytes_total = body_bytes_total
        self._held = 0
        self._running = 0
        self._monotonic = monotonic
        self._accounts: dict[str, _Account] = {}
        self.refused = Counter[str]()  # by the limit

    def body_bytes(self, caller: Caller) -> int:
        """The largest body of a request."""
        return self._account(caller).body_bytes

    def count(self, caller: Caller, headers: list[tuple[bytes, bytes]]) -> None:
        """One more request; adds to the headers of its answer how many are left. Raises RateLimited."""
        account = self._account(caller)
        rate = account.rate
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
            (b"x-ratelimit-reset-requests", _duration((rate - account.tokens) * 60 / rate)),
        )
        if wait:
            self.refused["rate"] += 1
            raise RateLimited(
                f"Rate limit reached for requests: {rate} in a minute. Try again in {wait:.3g} seconds.",
                retry_after=wait,
            )

    def running(self, caller: Caller) -> "_Running":
        """For `with`, while a response is in the making; raises RateLimited."""
        account = self._account(caller)
        if account.most_running is not None and account.running >= account.most_running:
            self.refused["key"] += 1
            raise RateLimited(
                f"This key may have {account.most_running} responses in the making at once; try again soon.",
                retry_after=1.0,
            )
        if self._running >= self._total:
            self.refused["total"] += 1
            raise RateLimited(
                f"This server makes {self._total} responses at once; try again soon.", retry_after=1.0
            )
        return _Running(self, account)

    def room(self, caller: Caller) -> "Room":
        """For `with`, while a request of the caller's is read and worked on."""
        return Room(self, self._account(caller))

    def most_held(self, account: _Account) -> int:
        return min(account.most_held or self._body_bytes_total, self._body_bytes_total)

    def hold(self, account: _Account, size: int) -> None:
        """So many bytes more of bodies; raises RateLimited, Unavailable."""
        if account.most_held is not None and account.held + size > account.most_held:
            self.refused["key_bytes"] += 1
            raise RateLimited(
                "This key has as many large requests and answers as it may have at once; try again soon.",
                retry_after=1.0,
            )
        if self._held + size > self._body_bytes_total:
            self.refused["total_bytes"] += 1
            raise Unavailable(
                "This server has as many large requests and answers as it can hold; try again soon.",
                retry_after=1.0,
            )
        account.held += size
        self._held += size

    def let_go(self, account: _Account, size: int) -> None:
        account.held -= size
        self._held -= size

    def enter(self, account: _Account) -> None:
        account.running += 1
        self._running += 1

    def leave(self, account: _Account) -> None:
        account.running -= 1
        self._running -= 1

    def _account(self, caller: Caller) -> _Account:
        account = self._accounts.get(caller.key)
        if account is None:
            usual, own = self._usual, caller.limits
            rate = own.requests_per_minute or usual.requests_per_minute
            body_bytes = own.body_bytes or usual.body_bytes or BODY_BYTES
            account = self._accounts[caller.key] = _Account(
                body_bytes=body_bytes,
                most_running=(own.concurrent or usual.concurrent) if caller.key else None,
                rate=rate,
                tokens=rate or 0,
                filled_at=self._monotonic(),
                most_held=max(body_bytes, self._body_bytes_total // 2) if caller.key else None,
            )
        return account


class Room:
    """What one request takes with its body and with what that refers to; it is given back at the end."""

    __slots__ = ("_account", "_held", "_limits")

    def __init__(self, limits: Limits, account: _Account) -> None:
        self._limits = limits
        self._account = account
        self._held = 0

    def take(self, size: int) -> None:
        """Raises RateLimited, Unavailable, and BodyTooLarge for more than there will ever be."""
        most = self._limits.most_held(self._account)
        if self._held + size > most:
            raise BodyTooLarge(
                f"With the files and the conversation that it refers to, this request takes more than {most:,} bytes, "
                "which is all that may be held at once. Refer to less, or begin a new conversation."
            )
        self._limits.hold(self._account, size)
        self._held += size

    def hold(self, size: int) -> None:
        """Exactly so much from now on; raises as `take`, and then it is as much as before."""
        if size >= self._held:
            self.take(size - self._held)
        else:
            self._limits.let_go(self._account, self._held - size)
            self._held = size

    def take_large(self, size: int) -> None:
        """As `take`, for an answer: a small one does not count, and one that is larger than all may be together is sent
        when it is alone. Raises RateLimited, Unavailable.
        """
        if size >= LARGE:
            self.take(min(size, self._limits.most_held(self._account) - self._held))

    def hand_over(self) -> "Room":
        """All that it holds is another one's from now on, which may stay longer."""
        other = Room(self._limits, self._account)
        other._held, self._held = self._held, 0
        return other

    def give_back(self) -> None:
        self._limits.let_go(self._account, self._held)
        self._held = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.give_back()


class _Running:
    __slots__ = ("_account", "_limits")

    def __init__(self, limits: Limits, account: _Account) -> None:
        self._limits = limits
        self._account = account

    def __enter__(self) -> None:
        self._limits.enter(self._account)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._limits.leave(self._account)


def _duration(seconds: float) -> bytes:
    """As OpenAI writes it: `17ms`, `8s`, `6m0s`."""
    if seconds < 1:
        return b"%dms" % ceil(seconds * 1000)
    minutes, rest = divmod(ceil(seconds), 60)
    return b"%dm%ds" % (minutes, rest) if minutes else b"%ds" % rest
