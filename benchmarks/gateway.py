"""The gateway against a bare relay, interleaved, before the same model server.

    make bench-gateway                              everything, a few minutes
    make bench-gateway ARGS=--quick                 about two minutes, as `make bench-check` runs it
    make bench-gateway ARGS="--rows burst,paced"    only these
    make bench-gateway ARGS=--rehearse              the relay in both places, to try the benchmark itself

docs/benchmarks.md says what each row means.
"""

import argparse
import asyncio
import contextlib
import importlib.metadata
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.gateway_rows.bench import FULL, QUICK, Bench, Scale
from benchmarks.gateway_rows.code_turns import code_rows, tool_rows
from benchmarks.gateway_rows.conversations import growth_rows
from benchmarks.gateway_rows.telemetry import telemetry_rows
from benchmarks.gateway_rows.text_responses import (
    blocking_rows,
    burst_rows,
    latency_rows,
    memory_rows,
    paced_rows,
    websocket_rows,
)
from benchmarks.harness import gateway_processes, result_table
from benchmarks.harness.gateway_client import UnexpectedAnswer
from benchmarks.harness.result_table import ResultRow

RESULTS = Path(__file__).parent / "results" / "gateway.json"

# What is idle is measured first: everything after it has had load.
GROUPS: dict[str, Callable[[Bench], Awaitable[list[ResultRow]]]] = {
    "memory": memory_rows,
    "latency": latency_rows,
    "burst": burst_rows,
    "paced": paced_rows,
    "socket": websocket_rows,
    "blocking": blocking_rows,
    "code": code_rows,
    "tools": tool_rows,
    "telemetry": telemetry_rows,
    "growth": growth_rows,
}
REHEARSAL_GROUPS = (
    "memory",
    "latency",
    "burst",
    "paced",
    "blocking",
)  # a relay has no tools and remembers nothing


async def measure(scale: Scale, groups: Sequence[str], *, rehearse: bool) -> list[ResultRow]:
    found: list[ResultRow] = []
    async with contextlib.AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fumehood-bench-")))
        url, model = await stack.enter_async_context(gateway_processes.run_model_server(directory))
        relay = await stack.enter_async_context(gateway_processes.run_relay(directory, url))
        if rehearse:
            ours = await stack.enter_async_context(gateway_processes.run_relay(directory, url))
            bench = Bench(replace(ours, name="relay again"), relay, model, scale, None)
        else:
            ours = await stack.enter_async_context(gateway_processes.run_gateway(directory, url))
            observed = partial(gateway_processes.telemetry_pair, directory, url)
            bench = Bench(ours, relay, model, scale, gateway_processes.database_path(directory), observed)
        try:
            for name in groups:
                began = time.perf_counter()
                found += await GROUPS[name](bench)
                print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        except UnexpectedAnswer as error:
            said = (
                ""
                if rehearse
                else f" The gateway said:\n{gateway_processes.read_log_tail(gateway_processes.log_path(directory))}"
            )
            raise UnexpectedAnswer(f"A wrong answer: {error}.{said}") from error
    return found


def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("uvicorn", "aiohttp", "msgspec", "uvloop")}


def parse_groups(names: str, *, rehearse: bool) -> list[str]:
    able = list(REHEARSAL_GROUPS if rehearse else GROUPS)
    wanted = names.split(",") if names else able
    if unknown := [name for name in wanted if name not in able]:
        raise SystemExit(f"There are no rows {', '.join(unknown)}; there are {', '.join(able)}.")
    return [name for name in able if name in wanted]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the gateway against a bare relay.")
    parser.add_argument("--quick", action="store_true", help="about two minutes instead of some minutes")
    parser.add_argument("--json", type=Path, help=f"where the result goes; default {RESULTS.name}")
    parser.add_argument("--rows", default="", metavar="NAMES", help=f"some of {','.join(GROUPS)}")
    parser.add_argument("--rehearse", action="store_true", help="the relay in the gateway's place")
    chosen = parser.parse_args()
    groups = parse_groups(chosen.rows, rehearse=chosen.rehearse)
    scale = QUICK if chosen.quick else FULL
    try:
        found = asyncio.run(measure(scale, groups, rehearse=chosen.rehearse))
    except (gateway_processes.StartError, UnexpectedAnswer) as error:
        sys.exit(str(error))
    facts = result_table.describe_machine(versions())
    result_table.print_results("gateway", facts, found)
    if chosen.json is not None or not (chosen.quick or chosen.rehearse or chosen.rows):
        result_table.write_json(chosen.json or RESULTS, "gateway", facts, found)


if __name__ == "__main__":
    main()
