"""Shares a few places among tenants, so that none keeps the others waiting; imports only the standard library."""

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncGenerator


class Turns:
    """At most `places` at once, `each` of one tenant; those who wait come in turn, a tenant after another.

    With `each` below `places`, somebody else's long work never takes the last place from a tenant that has none.
    """

    def __init__(self, places: int, each: int) -> None:
        self._free = places
        self._each = each
        self._held: Counter[str] = Counter()
        # The tenant whose turn is next comes first; whoever had a place goes to the end.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @contextlib.asynccontextmanager
    async def place(self, tenant: str) -> AsyncGenerator[None]:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        self._serve()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._free += 1
                self._held[tenant] -= 1
                self._held += Counter()  # forgets who holds nothing
                if waiting := self._waiting.pop(tenant, None):
                    self._waiting[tenant] = waiting
            self._serve()

    def _serve(self) -> None:
        for tenant in [*self._waiting]:
            if not self._free:
                return
            if self._held[tenant] < self._each:
                self._give(tenant)

    def _give(self, tenant: str) -> None:
        waiting = self._waiting.pop(tenant)
        while waiting:
            turn = waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self._free -= 1
                self._held[tenant] += 1
                break
        if waiting:
            self._waiting[tenant] = waiting
