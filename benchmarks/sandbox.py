"""Sandboxes against a Jupyter kernel and `python -c` in bubblewrap, interleaved.

    make bench-sandbox                   everything, a few minutes
    make bench-sandbox ARGS=--quick      half a minute, as `make bench-check` runs it
    make bench-sandbox ARGS=--phases     where the time of a cold start goes

docs/benchmarks.md says what each row means.
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.harness import (
    cold_start_timeline,
    process_resources,
    reference_runtimes,
    result_table,
    sandbox_server_processes,
)
from benchmarks.harness.reference_runtimes import JupyterKernel, Spawner
from benchmarks.harness.result_table import ResultRow, SampleSet
from benchmarks.harness.sandbox_targets import (
    HttpTarget,
    InProcessTarget,
    RemoteClientTarget,
    SandboxTarget,
    TimedCall,
)
from fumehood.sandbox_server.settings import SandboxServerSettings

RESULTS = Path(__file__).parent / "results" / "sandbox.json"
POOL = 8
TRIVIAL = "print(1 + 1)"
TRIVIAL_PRINTS = "2\n"
GROUP_BY = """
import pandas as pd
frame = pd.DataFrame({"group": ["a", "b", "c"] * 1000, "value": range(3000)})
print(frame.groupby("group").value.sum())
"""
GROUP_BY_PRINTS = "c    1500500"
MY_NAMESPACE = "import os; print(os.readlink('/proc/self/ns/pid'))"
ENDLESS = "while True:\n    pass"
STUBBORN = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True:\n    pass"
JUPYTER = "Jupyter kernel"
BWRAP = "bwrap python -c"
MIB = 1 << 20


@dataclass(frozen=True)
class Scale:
    """Number of repetitions of each measurement."""

    kernels: int  # each started twice: for a trivial cell and for a group-by
    fresh_per_kernel: int
    calls_per_kernel: int
    spawns: int
    arrivals: int
    arrivals_per_second: int
    sustained: int
    live: int
    kernels_idle: int
    interrupts: int


FULL = Scale(20, 10, 10, 100, 600, 20, 200, 50, 3, 5)
QUICK = Scale(4, 8, 10, 30, 100, 20, 60, 50, 3, 1)


def check_output(call: TimedCall, expected: str) -> TimedCall:
    if call.status != "ok" or expected not in call.text:
        raise RuntimeError(f"ours ended with {call.status} and printed {call.text!r} instead of {expected!r}")
    return call


@dataclass(frozen=True)
class FreshTiming:
    """Milliseconds from the request until the sandbox exists, and until its first output."""

    created_ms: float
    first_output_ms: float


async def time_fresh_sandbox(subject: SandboxTarget, code: str, expected: str) -> FreshTiming:
    began = time.perf_counter()
    sandbox = await subject.create()
    made = time.perf_counter()
    call = check_output(await subject.run(sandbox, code), expected)
    await subject.delete(sandbox)
    return FreshTiming((made - began) * 1000, (call.first_output_at - began) * 1000)


def build_fresh_row(
    key: str,
    title: str,
    name: str,
    ours: Sequence[FreshTiming],
    reference: SampleSet,
    goals: dict[str, float],
) -> ResultRow:
    making = statistics.median(one.created_ms for one in ours)
    calling = statistics.median(one.first_output_ms - one.created_ms for one in ours)
    note = f"{name}; making it {making:.2f} ms, its first call {calling:.2f} ms"
    return ResultRow(
        key, title, "ms", SampleSet(name, [one.first_output_ms for one in ours]), reference, goals, note=note
    )


async def wait_for_full_pool(subject: SandboxTarget) -> None:
    """Wait until the pool is full and idle."""
    async with asyncio.timeout(30):
        while await subject.pool_available() < POOL:  # noqa: ASYNC110 - the server tells only when asked
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.02)


async def time_kernel_start(code: str, expected: str, calls: int = 0) -> tuple[float, list[float]]:
    """Milliseconds from the start of a kernel to its first output, and of `calls` executions after it."""
    began = time.perf_counter()
    kernel = JupyterKernel()
    try:
        await kernel.start()
        first, _ = await kernel.run(code, expected)
        further: list[float] = []
        for _ in range(calls):
            asked = time.perf_counter()
            _, ended = await kernel.run(TRIVIAL, TRIVIAL_PRINTS)
            further.append((ended - asked) * 1000)
        return (first - began) * 1000, further
    finally:
        await kernel.close()


async def compare_with_jupyter(
    subject: SandboxTarget, others: Sequence[SandboxTarget], scale: Scale
) -> list[ResultRow]:
    """Fresh sandboxes from a warm pool, second executions and a group-by, interleaved with Jupyter."""
    starts = {one.name: list[FreshTiming]() for one in (subject, *others)}
    seconds = {one.name: list[float]() for one in (subject, *others)}
    groups, one_shots = list[FreshTiming](), list[float]()
    kernel_starts, kernel_seconds, kernel_groups = list[float](), list[float](), list[float]()
    for _ in range(scale.kernels):
        for one in (subject, *others):
            starts[one.name] += await time_fresh_sandboxes(
                one, scale.fresh_per_kernel, TRIVIAL, TRIVIAL_PRINTS
            )
        start, further = await time_kernel_start(TRIVIAL, TRIVIAL_PRINTS, scale.calls_per_kernel)
        kernel_starts.append(start)
        kernel_seconds += further
        for one in (subject, *others):
            seconds[one.name] += await time_second_calls(one, scale.calls_per_kernel)
        groups += await time_fresh_sandboxes(subject, scale.fresh_per_kernel, GROUP_BY, GROUP_BY_PRINTS)
        kernel_groups.append((await time_kernel_start(GROUP_BY, GROUP_BY_PRINTS))[0])
        one_shots += await time_one_shots(subject, scale.fresh_per_kernel)
    arrivals = await run_open_loop(subject, scale)
    start, second = SampleSet(JUPYTER, kernel_starts), SampleSet(JUPYTER, kernel_seconds)
    rate = f"{scale.arrivals_per_second}/s for {scale.arrivals // scale.arrivals_per_second} s"
    mine, fast = subject.name, {"p50": 150.0, "p99": 30.0}
    sequential = "fresh → first output, warm pool, one after another"
    second_title, enough = "second call", {"p50": 5.0}
    found = [build_fresh_row("first_output", sequential, mine, starts[mine], start, fast)]
    found += [
        build_fresh_row(
            f"first_output_{row_prefix(one)}",
            sequential,
            one.name,
            starts[one.name],
            start,
            fast if one.counts_towards_goals else {},
        )
        for one in others
    ]
    found += [
        # Queues grow without bound if other load leaves less than 20/s: no ratchet.
        replace(
            build_fresh_row(
                "first_output_20", f"fresh → first output, warm pool, {rate}", mine, arrivals, start, fast
            ),
            gated=False,
        ),
        build_fresh_row(
            "group_by",
            "fresh → pandas group-by",
            mine,
            groups,
            SampleSet(JUPYTER, kernel_groups),
            {"p50": 60},
        ),
        ResultRow(
            "second_call", second_title, "ms", SampleSet(mine, seconds[mine]), second, enough, note=mine
        ),
    ]
    for one in others:
        ours, wanted = SampleSet(one.name, seconds[one.name]), enough if one.counts_towards_goals else {}
        found.append(
            ResultRow(
                f"second_call_{row_prefix(one)}", second_title, "ms", ours, second, wanted, note=one.name
            )
        )
    if one_shots:
        found.append(
            ResultRow(
                "one_shot", "made, used and deleted in one request", "ms", SampleSet(mine, one_shots), start
            )
        )
    return found


def row_prefix(subject: SandboxTarget) -> str:
    return subject.name.partition(",")[0].partition(" ")[0].lower()


async def time_fresh_sandboxes(
    subject: SandboxTarget, times: int, code: str, expected: str
) -> list[FreshTiming]:
    taken: list[FreshTiming] = []
    for _ in range(times):
        await wait_for_full_pool(subject)
        taken.append(await time_fresh_sandbox(subject, code, expected))
    return taken


async def time_one_shots(subject: SandboxTarget, times: int) -> list[float]:
    """`POST /execute`, if the target has it."""
    taken: list[float] = []
    if not isinstance(subject, HttpTarget):
        return taken
    for _ in range(times):
        await wait_for_full_pool(subject)
        began = time.perf_counter()
        check_output(await subject.run_once(TRIVIAL), TRIVIAL_PRINTS)
        taken.append((time.perf_counter() - began) * 1000)
    return taken


async def time_second_calls(subject: SandboxTarget, calls: int) -> list[float]:
    """Milliseconds of an execution in a sandbox that has run one before."""
    sandbox = await subject.create()
    check_output(await subject.run(sandbox, TRIVIAL), TRIVIAL_PRINTS)
    await wait_for_full_pool(subject)
    taken: list[float] = []
    for _ in range(calls):
        asked = time.perf_counter()
        call = check_output(await subject.run(sandbox, TRIVIAL), TRIVIAL_PRINTS)
        taken.append((call.ended_at - asked) * 1000)
    await subject.delete(sandbox)
    return taken


async def run_open_loop(subject: SandboxTarget, scale: Scale) -> list[FreshTiming]:
    """Arrivals at a fixed rate, whether or not the earlier ones are done."""
    await wait_for_full_pool(subject)
    began = time.perf_counter()
    tasks: list[asyncio.Task[FreshTiming]] = []
    for number in range(scale.arrivals):
        due = began + number / scale.arrivals_per_second
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(time_fresh_sandbox(subject, TRIVIAL, TRIVIAL_PRINTS)))
    return list(await asyncio.gather(*tasks))


async def compare_with_spawns(subject: SandboxTarget, spawner: Spawner, scale: Scale) -> list[ResultRow]:
    """Fresh sandboxes without a pool, compared with starting Python."""
    ours: list[FreshTiming] = []
    jailed: list[float] = []
    plain: list[float] = []
    for _ in range(scale.spawns):
        ours.append(await time_fresh_sandbox(subject, TRIVIAL, TRIVIAL_PRINTS))
        jailed.append(
            (await spawner.run(reference_runtimes.bubblewrap_python_command(TRIVIAL), TRIVIAL_PRINTS)).first
            * 1000
        )
        plain.append(
            (await spawner.run(reference_runtimes.plain_python_command(TRIVIAL), TRIVIAL_PRINTS)).first * 1000
        )
    title = "fresh → first output, pool empty"
    return [
        build_fresh_row("pool_empty", title, subject.name, ours, SampleSet(BWRAP, jailed), {"p50": 1.5}),
        build_fresh_row("pool_empty_bare", title, subject.name, ours, SampleSet("python -c", plain), {}),
    ]


async def measure_cpu_per_container(
    subject: SandboxTarget, spawner: Spawner, scale: Scale
) -> list[ResultRow]:
    """CPU time of one container created, used and deleted, over the whole process tree."""
    try:
        meter = process_resources.CpuMeter(subject.pid)
    except process_resources.MeasurementUnavailable as error:
        print(f"CPU per container is left out: {error}", file=sys.stderr)
        return []
    ours: list[float] = []
    theirs: list[float] = []
    try:
        meter.adopt(pid for pid in process_resources.process_tree(subject.pid) if pid != os.getpid())
        share = max(1, scale.sustained // 4)
        for _ in range(4):
            before = meter.cpu_seconds() + read_own_cpu(subject)
            await run_sustained_load(subject, share)
            await wait_for_full_pool(subject)
            ours.append((meter.cpu_seconds() + read_own_cpu(subject) - before) / share * 1000)
            jailed = reference_runtimes.bubblewrap_python_command(TRIVIAL)
            theirs += [(await spawner.run(jailed, TRIVIAL_PRINTS)).cpu * 1000 for _ in range(share // 4)]
    finally:
        meter.close()
    row = ResultRow(
        "per_core",
        "CPU per fresh container (made, used, deleted)",
        "ms",
        SampleSet(subject.name, ours),
        SampleSet(BWRAP, theirs),
        {"p50": 1.3},
        measures=("p50",),
        note=f"{1000 / SampleSet('', ours).statistic('p50'):.0f} against "
        f"{1000 / SampleSet('', theirs).statistic('p50'):.0f} per second and core",
    )
    return [row]


def read_own_cpu(subject: SandboxTarget) -> float:
    """CPU time of this process, which the meter omits: it counts if the server runs here."""
    return time.process_time() if subject.pid == os.getpid() else 0.0


async def run_sustained_load(subject: SandboxTarget, containers: int, concurrency: int = 4) -> None:
    waiting = iter(range(containers))

    async def worker() -> None:
        for _ in waiting:
            await time_fresh_sandbox(subject, TRIVIAL, TRIVIAL_PRINTS)

    await asyncio.gather(*(worker() for _ in range(concurrency)))


async def measure_idle_memory(subject: SandboxTarget, scale: Scale) -> list[ResultRow]:
    """Proportional set size of idle containers and kernels after one execution."""
    sandboxes = [await subject.create() for _ in range(scale.live)]
    names = [check_output(await subject.run(one, MY_NAMESPACE), "pid:").text.strip() for one in sandboxes]
    await wait_for_full_pool(subject)
    processes = process_resources.group_by_namespace(subject.pid)
    ours = [sum(map(process_resources.pss_bytes, processes[name])) / MIB for name in names]
    everything = (
        sum(
            process_resources.pss_bytes(pid)
            for pid in process_resources.process_tree(subject.pid)
            if pid != subject.pid
        )
        / MIB
    )
    kernels = [JupyterKernel() for _ in range(scale.kernels_idle)]
    try:
        for kernel in kernels:
            await kernel.start()
            await kernel.run(TRIVIAL, TRIVIAL_PRINTS)
        theirs = [
            sum(map(process_resources.pss_bytes, process_resources.process_tree(kernel.pid))) / MIB
            for kernel in kernels
        ]
    finally:
        for kernel in kernels:
            await kernel.close()
        for one in sandboxes:
            await subject.delete(one)
    row = ResultRow(
        "idle_pss",
        f"idle container, PSS, {scale.live} alive",
        "MiB",
        SampleSet(subject.name, ours),
        SampleSet(f"{JUPYTER}, {scale.kernels_idle} alive", theirs),
        {"mean": 10},
        measures=("mean",),
        note=f"with the pool and the zygote {everything:.0f} MiB in all",
    )
    return [row]


async def measure_interrupts(subject: SandboxTarget, scale: Scale) -> list[ResultRow]:
    """From the deadline to the end of an endless execution."""
    soft: list[float] = []
    hard: list[float] = []
    for _ in range(scale.interrupts):
        sandbox = await subject.create()
        check_output(await subject.run(sandbox, "kept = 2; print(kept)"), TRIVIAL_PRINTS)
        asked = time.perf_counter()
        call = await subject.run(sandbox, ENDLESS, timeout=0.3)
        soft.append(call.ended_at - asked - 0.3)
        if call.status != "timeout" or not call.state_kept:
            raise RuntimeError(f"an endless loop ended with {call}")
        check_output(await subject.run(sandbox, "print(kept)"), TRIVIAL_PRINTS)
        asked = time.perf_counter()
        call = await subject.run(sandbox, STUBBORN, timeout=0.3)
        hard.append(call.ended_at - asked - 0.3)
        if call.status != "timeout" or call.state_kept:
            raise RuntimeError(f"an endless loop that ignores interrupts ended with {call}")
        await subject.delete(sandbox)
    measures = ("p50", "max")
    mine = subject.name
    return [
        ResultRow(
            "interrupt",
            "endless loop: deadline → end, state kept",
            "s",
            SampleSet(mine, soft),
            limits={"max": 1},
            measures=measures,
        ),
        ResultRow(
            "kill",
            "the same, ignoring interrupts: deadline → killed",
            "s",
            SampleSet(mine, hard),
            limits={"max": 3},
            measures=measures,
        ),
    ]


async def measure_churn(subject: SandboxTarget, containers: int) -> list[ResultRow]:
    """Create, use and delete containers; report what is left."""
    await run_sustained_load(subject, 2 * POOL)  # connections, caches and the like exist by now
    before = await wait_until_settled(subject)
    began = time.perf_counter()
    await run_sustained_load(subject, containers)
    taken = time.perf_counter() - began
    leaked = (await wait_until_settled(subject)).growth_since(before)
    told = (
        ", ".join(f"{count} {name}" for name, count in leaked.items())
        or "no process, descriptor, mount, cgroup, file"
    )
    row = ResultRow(
        "churn",
        f"{containers} containers made, used, deleted: left behind",
        "things",
        SampleSet(subject.name, [sum(leaked.values())]),
        limits={"max": 0},
        measures=("max",),
        note=f"{told}; {containers / taken:.0f}/s",
    )
    return [row]


async def wait_until_settled(subject: SandboxTarget) -> process_resources.ResourceCount:
    """A census once it is stable, after background cleanup."""
    await wait_for_full_pool(subject)
    last = process_resources.ResourceCount.count(subject.pid)
    for _ in range(100):
        await asyncio.sleep(0.1)
        now = process_resources.ResourceCount.count(subject.pid)
        if now == last:
            break
        last = now
    return last


async def measure(scale: Scale, *, in_process: bool, containers: int) -> list[ResultRow]:
    found: list[ResultRow] = []
    async with contextlib.AsyncExitStack() as stack:
        spawner = await stack.enter_async_context(Spawner())
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        async def step(title: str, work: Awaitable[Sequence[ResultRow]]) -> None:
            began = time.perf_counter()
            found.extend(await work)
            print(f"{title}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)

        async with contextlib.AsyncExitStack() as warm:
            others: list[SandboxTarget] = []
            if in_process:
                subject: SandboxTarget = await warm.enter_async_context(
                    run_in_process(SandboxServerSettings(pool=POOL))
                )
            else:
                server = await warm.enter_async_context(
                    sandbox_server_processes.run_on_unix_socket(directory, POOL)
                )
                subject = server
                others.append(
                    await warm.enter_async_context(sandbox_server_processes.run_on_loopback(directory, POOL))
                )
                others.append(RemoteClientTarget(server))
                warm.push_async_callback(others[-1].close)
            await step("against Jupyter", compare_with_jupyter(subject, others, scale))
            await step("CPU per container", measure_cpu_per_container(subject, spawner, scale))
            await step("idle memory", measure_idle_memory(subject, scale))
            await step("interrupts", measure_interrupts(subject, scale))
            if containers:
                await step("left behind", measure_churn(subject, containers))
        if in_process:
            cold: SandboxTarget = await stack.enter_async_context(
                run_in_process(SandboxServerSettings(pool=0))
            )
        else:
            cold = await stack.enter_async_context(sandbox_server_processes.run_on_unix_socket(directory, 0))
        await step("pool empty", compare_with_spawns(cold, spawner, scale))
    return found


@contextlib.asynccontextmanager
async def run_in_process(settings: SandboxServerSettings) -> AsyncGenerator[InProcessTarget]:
    subject = await InProcessTarget.start(settings)
    try:
        yield subject
    finally:
        await subject.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure sandboxes against their references.")
    parser.add_argument("--quick", action="store_true", help="half a minute instead of some minutes")
    parser.add_argument(
        "--json", type=Path, default=None, help=f"where the result goes; default {RESULTS.name}"
    )
    parser.add_argument("--in-process", action="store_true", help="the supervisor alone, without a server")
    parser.add_argument(
        "--churn", type=int, default=0, metavar="N", help="also make, use and delete N containers"
    )
    parser.add_argument(
        "--phases", action="store_true", help="only show where a cold creation spends its time"
    )
    chosen = parser.parse_args()
    if chosen.phases:
        cold_start_timeline.print_timelines(asyncio.run(cold_start_timeline.record_timelines(QUICK.spawns)))
        return
    scale = QUICK if chosen.quick else FULL
    found = asyncio.run(measure(scale, in_process=chosen.in_process, containers=chosen.churn))
    facts = result_table.describe_machine(reference_runtimes.read_versions())
    result_table.print_results("sandbox", facts, found)
    if chosen.json is not None or not (chosen.quick or chosen.in_process):
        result_table.write_json(chosen.json or RESULTS, "sandbox", facts, found)


if __name__ == "__main__":
    main()
