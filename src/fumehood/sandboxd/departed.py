"""Remembers sandboxes that have ended, why, and what their last calls said, for a while; imports siblings."""

import time

from fumehood.sandboxd.served import ServedSandbox
from fumehood.sandboxd.settings import Settings

_LOOK_AFTER = 32


class Departed:
    """The newest last; bounded in number, in time, and in the output that is kept of them."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._by_name: dict[str, tuple[float, ServedSandbox]] = {}
        self._kept = self._unlooked = 0

    def add(self, served: ServedSandbox) -> None:
        self.forget(served.id)
        self._by_name[served.id] = (time.monotonic(), served)
        self._kept += served.calls.kept_bytes
        self._unlooked += 1
        self._sweep()
        # Looking at all of them takes a while. The sum is not exact: a call may end after its sandbox.
        if self._kept > self._settings.kept_bytes or self._unlooked >= _LOOK_AFTER:
            self._trim()

    def get(self, name: str) -> ServedSandbox | None:
        self._sweep()
        found = self._by_name.get(name)
        return None if found is None else found[1]

    def forget(self, name: str) -> None:
        self._by_name.pop(name, None)

    def _sweep(self) -> None:
        oldest = time.monotonic() - self._settings.departed_seconds
        while self._by_name:
            name, (since, _) = next(iter(self._by_name.items()))
            if since >= oldest and len(self._by_name) <= self._settings.departed:
                return
            del self._by_name[name]

    def _trim(self) -> None:
        """What all of them keep of their calls is no more than what one that lives may keep."""
        room = self._settings.kept_bytes
        for _, served in reversed(self._by_name.values()):
            room -= served.calls.kept_bytes
            if room < 0 and served.calls.kept_bytes:
                room += served.calls.kept_bytes
                served.calls.forget_all()
        self._kept = self._settings.kept_bytes - room
        self._unlooked = 0
