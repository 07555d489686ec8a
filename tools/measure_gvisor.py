"""Measures what gVisor costs: pods of the same containers with and without it, alternating, in one run.

    sudo make bench-gvisor [ARGS="--rounds 5"]

Without it the containers are processes with their own mounts, users and PIDs, as runc would make them.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.support.gvisor_pods import GvisorPod, find_obstacle
from tests.support.pods import TOKEN, PodOptions, make_pod
from tests.support.sandbox_server import SandboxApiClient

_PRELOAD = "numpy,pandas,pyarrow,matplotlib"
_SECOND_CALLS = 20
_GROUP_BY = """
import pandas as pd, matplotlib.pyplot as plt
frame = pd.DataFrame({"key": list("abcd") * 25_000, "value": range(100_000)})
sums = frame.groupby("key").value.sum()
sums.plot.bar()
plt.savefig("sums.png")
print(sums.sum())
"""


async def _time_call(client: SandboxApiClient, code: str) -> float:
    began = time.perf_counter()
    events = await client.run_code("box", code)
    assert events[-1]["status"] == "ok", events
    return (time.perf_counter() - began) * 1000


async def _measure(pod: Any) -> dict[str, float]:
    """Return milliseconds: a pod's start, from the claim to its first output, a later call, a group-by and a figure."""
    began = time.perf_counter()
    await pod.start()
    ready = (time.perf_counter() - began) * 1000
    client = SandboxApiClient(pod.url, TOKEN)
    try:
        began = time.perf_counter()
        await client.create_sandbox("box")
        await _time_call(client, "print(1 + 1)")
        first = (time.perf_counter() - began) * 1000
        later = statistics.median([await _time_call(client, "print(1 + 1)") for _ in range(_SECOND_CALLS)])
        grouped = await _time_call(client, _GROUP_BY)
        again = await _time_call(client, _GROUP_BY)
    finally:
        await client.session.close()
        await pod.stop()
    return {
        "pod ready": ready,
        "first output": first,
        "second call": later,
        "group-by and figure": grouped,
        "the same again": again,
    }


async def main(directory: Path, rounds: int) -> None:
    found: dict[str, list[dict[str, float]]] = {"without": [], "gVisor": []}
    for _ in range(rounds):
        found["without"].append(await _measure(make_pod(directory, preload=_PRELOAD, allow_unshare=True)))
        found["gVisor"].append(await _measure(GvisorPod(directory, PodOptions(preload=_PRELOAD))))
    print(f"{'median (maximum), ms':24} {'without':>18} {'gVisor':>18}")
    for what in found["without"][0]:
        columns = [[one[what] for one in results] for results in found.values()]
        cells = [f"{statistics.median(values):.1f} ({max(values):.1f})" for values in columns]
        print(f"{what:24} {cells[0]:>18} {cells[1]:>18}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if obstacle := find_obstacle():
        raise SystemExit(f"Nothing is measured: {obstacle}.")
    with tempfile.TemporaryDirectory(prefix="fh-measure", dir="/tmp") as temporary:
        Path(temporary).chmod(0o755)
        asyncio.run(main(Path(temporary), options.rounds))
