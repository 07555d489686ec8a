"""Measures how long a gateway blocks its event loop, in its own CPU time."""

import http.client
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit


def cpu_seconds(pid: int) -> float:
    """What all threads of a process have used."""
    return time.clock_gettime((~pid << 3) | 2)  # as clock_getcpuclockid(3) does it


@dataclass
class HealthProbe:
    """Asks for /healthz again and again; `seconds` are what the gateway did between each question and its answer, other
    people's processes not counted.
    """

    url: str
    pid: int
    seconds: list[float] = field(default_factory=list[float])

    def __post_init__(self) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=120)

    def probe(self) -> None:
        began = cpu_seconds(self.pid)
        self._connection.request("GET", "/healthz")
        answer = self._connection.getresponse()
        answer.read()
        assert answer.status == 200
        self.seconds.append(cpu_seconds(self.pid) - began)

    def close(self) -> None:
        self._connection.close()

    def percentile(self, share: float) -> float:
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
