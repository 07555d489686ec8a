"""Responses with text: CPU per event, latency and memory."""

import contextlib
import statistics
from dataclasses import replace

from benchmarks.gateway_rows.bench import (
    CHUNK_COUNT,
    MS,
    TEXT_MODEL,
    US,
    Bench,
    measure_interleaved,
    request_paced_streams,
    request_texts,
)
from benchmarks.harness import gateway_client, process_resources
from benchmarks.harness.gateway_client import BenchmarkTarget
from benchmarks.harness.raw_websocket_client import RawWebSocketClient
from benchmarks.harness.result_table import ResultRow, SampleSet

MB = 1_000_000


async def burst_rows(bench: Bench) -> list[ResultRow]:
    """CPU per event when the model server sends as fast as it can."""
    scale, sides = bench.scale, (bench.ours, bench.relay, bench.joined)

    async def work(target: BenchmarkTarget) -> None:
        await request_texts(target, scale, stream=True)

    ours, relay, joined = await measure_interleaved(
        sides, scale.rounds, work, US / scale.requests / CHUNK_COUNT
    )
    title = f"CPU per streamed event, {CHUNK_COUNT} in a burst"
    return [
        ResultRow(
            "burst", title, "µs", ours, relay, {"p50": 1 / 2}, measures=("p50",), note="next goal: 0.83x"
        ),
        ResultRow("burst_joined", title, "µs", ours, joined, measures=("p50",)),
    ]


async def paced_rows(bench: Bench) -> list[ResultRow]:
    """CPU per event when each arrives by itself."""
    scale = bench.scale

    async def work(target: BenchmarkTarget) -> None:
        await request_paced_streams(target, scale.streams, scale.paced_chunks)

    share = US / scale.streams / scale.paced_chunks
    ours, relay = await measure_interleaved((bench.ours, bench.relay), scale.paced_rounds, work, share)
    title = f"CPU per streamed event, 50/s × {scale.streams} streams"
    goals = {"p50": 1 / 1.3}
    return [ResultRow("paced", title, "µs", ours, relay, goals, measures=("p50",), note="next goal: 1x")]


async def websocket_rows(bench: Bench) -> list[ResultRow]:
    """CPU per event over WebSocket, compared with SSE."""
    scale = bench.scale
    streamed = replace(bench.ours, name="gateway, streamed")
    with contextlib.closing(RawWebSocketClient(bench.ours.client.port)) as client:
        sides = (replace(bench.ours, name="gateway, WebSocket", client=client), streamed)

        async def burst(target: BenchmarkTarget) -> None:
            await request_texts(target, scale, stream=True)

        async def one_by_one(target: BenchmarkTarget) -> None:
            await request_paced_streams(target, scale.streams, scale.paced_chunks)

        share = US / scale.requests / CHUNK_COUNT
        bursts = await measure_interleaved(sides, scale.rounds, burst, share)
        share = US / scale.streams / scale.paced_chunks
        pacing = await measure_interleaved(sides, scale.paced_rounds, one_by_one, share)
    titles = (
        f"CPU per event over WebSocket, {CHUNK_COUNT} in a burst",
        f"CPU per event over WebSocket, 50/s × {scale.streams} connections",
    )
    return [
        ResultRow(key, title, "µs", ours, reference, {"p50": 1 / 1.5}, measures=("p50",))
        for key, title, (ours, reference) in zip(
            ("socket_burst", "socket_paced"), titles, (bursts, pacing), strict=True
        )
    ]


async def blocking_rows(bench: Bench) -> list[ResultRow]:
    """CPU of a blocking request; the gateway's response is on disk when it is sent."""
    scale, sides = bench.scale, (bench.ours, bench.relay)
    rounds = 4 * scale.rounds  # they are short
    found: list[ResultRow] = []
    for key, model, goals in (("blocking", TEXT_MODEL, {"p50": 1 / 3.5}), ("blocking_short", "burst-10", {})):

        async def work(target: BenchmarkTarget, model: str = model) -> None:
            await request_texts(target, scale, stream=False, model=model)

        ours, relay = await measure_interleaved(sides, rounds, work, MS / scale.requests)
        title = f"CPU per blocking request, stored, answer of {model.partition('-')[2]} tokens"
        note = "next goal: 0.57x" if goals else ""
        found.append(ResultRow(key, title, "ms", ours, relay, goals, measures=("p50",), note=note))
    return found


async def latency_rows(bench: Bench) -> list[ResultRow]:
    """Latency added to the model server's, with sequential requests."""
    kinds = (
        ("first_delta", "first delta", "paced-2"),
        ("whole_answer", f"{CHUNK_COUNT} chunks, whole", TEXT_MODEL),
    )
    found: list[ResultRow] = []
    for key, what, model in kinds:
        bare: list[float] = []
        sides = (bench.ours, bench.relay)
        taken = {one: list[float]() for one in sides}
        for number in range(bench.scale.latencies):
            bare.append((await gateway_client.time_completion(bench.model, model))[model == TEXT_MODEL])
            for one in sides if number % 2 else reversed(sides):
                answer = await one.ask_for_text(model, stream=True)
                taken[one].append(answer.whole if model == TEXT_MODEL else answer.first_delta)
        base = statistics.median(bare)
        ours, relay = (SampleSet(one.name, [value - base for value in taken[one]]) for one in sides)
        note = f"over {base:.2f} ms of the model server alone"
        goals = {"p50": 1 / 2, "p99": 1 / 2}
        found.append(
            ResultRow(key, f"added latency, one at a time: {what}", "ms", ours, relay, goals, note=note)
        )
    return found


async def memory_rows(bench: Bench) -> list[ResultRow]:
    """Resident memory after one request, and its peak under load."""
    idle, loaded = list[SampleSet](), list[SampleSet]()
    for one in (bench.ours, bench.relay):
        await one.ask_for_text(TEXT_MODEL, stream=False)
        idle.append(SampleSet(one.name, [process_resources.resident_bytes(one.pid) / MB]))
        process_resources.reset_peak(one.pid)
        await request_paced_streams(one, bench.scale.streams, bench.scale.paced_chunks)
        await request_texts(one, bench.scale, stream=True)
        loaded.append(SampleSet(one.name, [process_resources.peak_resident_bytes(one.pid) / MB]))
    below = (
        sum(
            process_resources.pss_bytes(pid)
            for pid in process_resources.process_tree(bench.ours.pid)
            if pid != bench.ours.pid
        )
        / MB
    )
    note = f"below it, PSS of the sandbox server and its sandboxes: {below:.0f} MB" if below else ""
    title, kept = "resident memory of the gateway", ("mean",)
    load = f"{title}, at most, {bench.scale.streams} streams"
    return [
        ResultRow(
            "memory_idle",
            f"{title}, idle",
            "MB",
            idle[0],
            idle[1],
            limits={"mean": 80},
            measures=kept,
            note=note,
        ),
        ResultRow("memory_loaded", load, "MB", loaded[0], loaded[1], limits={"mean": 120}, measures=kept),
    ]
