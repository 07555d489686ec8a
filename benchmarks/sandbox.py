"""Sandboxes against a Jupyter kernel and `python -c` in bubblewrap, interleaved; imports fumehood, benchmarks.harness.

    make bench-sandbox                   everything, a few minutes
    make bench-sandbox ARGS=--quick      half a minute, as `make bench-check` runs it
    make bench-sandbox ARGS=--phases     where the time of a cold creation goes

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

from benchmarks.harness import census, phases, references, rows, servers
from benchmarks.harness.references import Kernel, Spawner
from benchmarks.harness.rows import Row, Samples
from benchmarks.harness.subjects import Call, Http, InProcess, Shipped, Subject
from fumehood.sandboxd.settings import Settings

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
    """How often everything is done."""

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


def check(call: Call, expected: str) -> Call:
    if call.status != "ok" or expected not in call.text:
        raise RuntimeError(f"ours ended with {call.status} and printed {call.text!r} instead of {expected!r}")
    return call


@dataclass(frozen=True)
class Fresh:
    """Milliseconds from asking for a sandbox until there is one, and until its first output."""

    made: float
    first: float


async def fresh(subject: Subject, code: str, expected: str) -> Fresh:
    began = time.perf_counter()
    sandbox = await subject.create()
    made = time.perf_counter()
    call = check(await subject.run(sandbox, code), expected)
    await subject.delete(sandbox)
    return Fresh((made - began) * 1000, (call.first - began) * 1000)


def fresh_row(
    key: str, title: str, name: str, ours: Sequence[Fresh], reference: Samples, goals: dict[str, float]
) -> Row:
    making = statistics.median(one.made for one in ours)
    calling = statistics.median(one.first - one.made for one in ours)
    note = f"{name}; making it {making:.2f} ms, its first call {calling:.2f} ms"
    return Row(key, title, "ms", Samples(name, [one.first for one in ours]), reference, goals, note=note)


async def full_pool(subject: Subject) -> None:
    """Wait until the pool is as warm as it gets, and nothing else goes on."""
    async with asyncio.timeout(30):
        while await subject.parked() < POOL:  # noqa: ASYNC110 - the server tells only when asked
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.02)


async def kernel_start(code: str, expected: str, calls: int = 0) -> tuple[float, list[float]]:
    """Milliseconds from asking for a kernel to its first output, and of `calls` calls after it."""
    began = time.perf_counter()
    kernel = Kernel()
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


async def against_jupyter(subject: Subject, others: Sequence[Subject], scale: Scale) -> list[Row]:
    """Fresh with a warm pool, second calls, and a group-by: ours, Jupyter, ours, Jupyter …"""
    starts = {one.name: list[Fresh]() for one in (subject, *others)}
    seconds = {one.name: list[float]() for one in (subject, *others)}
    groups, one_shots = list[Fresh](), list[float]()
    kernel_starts, kernel_seconds, kernel_groups = list[float](), list[float](), list[float]()
    for _ in range(scale.kernels):
        for one in (subject, *others):
            starts[one.name] += await fresh_ones(one, scale.fresh_per_kernel, TRIVIAL, TRIVIAL_PRINTS)
        start, further = await kernel_start(TRIVIAL, TRIVIAL_PRINTS, scale.calls_per_kernel)
        kernel_starts.append(start)
        kernel_seconds += further
        for one in (subject, *others):
            seconds[one.name] += await second_calls(one, scale.calls_per_kernel)
        groups += await fresh_ones(subject, scale.fresh_per_kernel, GROUP_BY, GROUP_BY_PRINTS)
        kernel_groups.append((await kernel_start(GROUP_BY, GROUP_BY_PRINTS))[0])
        one_shots += await whole_ones(subject, scale.fresh_per_kernel)
    arrivals = await open_loop(subject, scale)
    start, second = Samples(JUPYTER, kernel_starts), Samples(JUPYTER, kernel_seconds)
    rate = f"{scale.arrivals_per_second}/s for {scale.arrivals // scale.arrivals_per_second} s"
    mine, fast = subject.name, {"p50": 150.0, "p99": 30.0}
    sequential = "fresh → first output, warm pool, one after another"
    second_title, enough = "second call", {"p50": 5.0}
    found = [fresh_row("first_output", sequential, mine, starts[mine], start, fast)]
    found += [
        fresh_row(
            f"first_output_{key(one)}",
            sequential,
            one.name,
            starts[one.name],
            start,
            fast if one.counts else {},
        )
        for one in others
    ]
    found += [
        # Queues grow out of all proportion where others leave less than 20/s: no ratchet.
        replace(
            fresh_row(
                "first_output_20", f"fresh → first output, warm pool, {rate}", mine, arrivals, start, fast
            ),
            gated=False,
        ),
        fresh_row(
            "group_by", "fresh → pandas group-by", mine, groups, Samples(JUPYTER, kernel_groups), {"p50": 60}
        ),
        Row("second_call", second_title, "ms", Samples(mine, seconds[mine]), second, enough, note=mine),
    ]
    for one in others:
        ours, wanted = Samples(one.name, seconds[one.name]), enough if one.counts else {}
        found.append(Row(f"second_call_{key(one)}", second_title, "ms", ours, second, wanted, note=one.name))
    if one_shots:
        found.append(
            Row("one_shot", "made, used and deleted in one request", "ms", Samples(mine, one_shots), start)
        )
    return found


def key(subject: Subject) -> str:
    return subject.name.partition(",")[0].partition(" ")[0].lower()


async def fresh_ones(subject: Subject, times: int, code: str, expected: str) -> list[Fresh]:
    taken: list[Fresh] = []
    for _ in range(times):
        await full_pool(subject)
        taken.append(await fresh(subject, code, expected))
    return taken


async def whole_ones(subject: Subject, times: int) -> list[float]:
    """`POST /execute`, where there is such a thing."""
    taken: list[float] = []
    if not isinstance(subject, Http):
        return taken
    for _ in range(times):
        await full_pool(subject)
        began = time.perf_counter()
        check(await subject.one_shot(TRIVIAL), TRIVIAL_PRINTS)
        taken.append((time.perf_counter() - began) * 1000)
    return taken


async def second_calls(subject: Subject, calls: int) -> list[float]:
    """Milliseconds from asking to the end of a call in a sandbox that has run one before."""
    sandbox = await subject.create()
    check(await subject.run(sandbox, TRIVIAL), TRIVIAL_PRINTS)
    await full_pool(subject)
    taken: list[float] = []
    for _ in range(calls):
        asked = time.perf_counter()
        call = check(await subject.run(sandbox, TRIVIAL), TRIVIAL_PRINTS)
        taken.append((call.ended - asked) * 1000)
    await subject.delete(sandbox)
    return taken


async def open_loop(subject: Subject, scale: Scale) -> list[Fresh]:
    """Arrivals at a fixed rate, whether or not the earlier ones are done."""
    await full_pool(subject)
    began = time.perf_counter()
    tasks: list[asyncio.Task[Fresh]] = []
    for number in range(scale.arrivals):
        due = began + number / scale.arrivals_per_second
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(fresh(subject, TRIVIAL, TRIVIAL_PRINTS)))
    return list(await asyncio.gather(*tasks))


async def against_spawns(subject: Subject, spawner: Spawner, scale: Scale) -> list[Row]:
    """Fresh without a pool, against a Python started for the purpose."""
    ours: list[Fresh] = []
    jailed: list[float] = []
    plain: list[float] = []
    for _ in range(scale.spawns):
        ours.append(await fresh(subject, TRIVIAL, TRIVIAL_PRINTS))
        jailed.append((await spawner.run(references.jailed_python(TRIVIAL), TRIVIAL_PRINTS)).first * 1000)
        plain.append((await spawner.run(references.plain_python(TRIVIAL), TRIVIAL_PRINTS)).first * 1000)
    title = "fresh → first output, pool empty"
    return [
        fresh_row("pool_empty", title, subject.name, ours, Samples(BWRAP, jailed), {"p50": 1.5}),
        fresh_row("pool_empty_bare", title, subject.name, ours, Samples("python -c", plain), {}),
    ]


async def cpu_per_container(subject: Subject, spawner: Spawner, scale: Scale) -> list[Row]:
    """CPU time of one fresh container, used and deleted: the whole tree, from the server to the last child."""
    try:
        meter = census.CpuMeter(subject.pid)
    except census.CannotMeasure as error:
        print(f"CPU per container is left out: {error}", file=sys.stderr)
        return []
    ours: list[float] = []
    theirs: list[float] = []
    try:
        meter.adopt(pid for pid in census.tree(subject.pid) if pid != os.getpid())
        share = max(1, scale.sustained // 4)
        for _ in range(4):
            before = meter.read() + own_cpu(subject)
            await sustained(subject, share)
            await full_pool(subject)
            ours.append((meter.read() + own_cpu(subject) - before) / share * 1000)
            jailed = references.jailed_python(TRIVIAL)
            theirs += [(await spawner.run(jailed, TRIVIAL_PRINTS)).cpu * 1000 for _ in range(share // 4)]
    finally:
        meter.close()
    row = Row(
        "per_core",
        "CPU per fresh container (made, used, deleted)",
        "ms",
        Samples(subject.name, ours),
        Samples(BWRAP, theirs),
        {"p50": 1.3},
        measures=("p50",),
        note=f"{1000 / Samples('', ours).of('p50'):.0f} against {1000 / Samples('', theirs).of('p50'):.0f} "
        "per second and core",
    )
    return [row]


def own_cpu(subject: Subject) -> float:
    """What is spent in this process counts where the server runs in it; the meter leaves it out."""
    return time.process_time() if subject.pid == os.getpid() else 0.0


async def sustained(subject: Subject, containers: int, at_once: int = 4) -> None:
    waiting = iter(range(containers))

    async def worker() -> None:
        for _ in waiting:
            await fresh(subject, TRIVIAL, TRIVIAL_PRINTS)

    await asyncio.gather(*(worker() for _ in range(at_once)))


async def idle_memory(subject: Subject, scale: Scale) -> list[Row]:
    """Proportional set size of idle containers after a call, and of idle kernels after a cell."""
    sandboxes = [await subject.create() for _ in range(scale.live)]
    names = [check(await subject.run(one, MY_NAMESPACE), "pid:").text.strip() for one in sandboxes]
    await full_pool(subject)
    processes = census.by_namespace(subject.pid)
    ours = [sum(map(census.pss, processes[name])) / MIB for name in names]
    everything = sum(census.pss(pid) for pid in census.tree(subject.pid) if pid != subject.pid) / MIB
    kernels = [Kernel() for _ in range(scale.kernels_idle)]
    try:
        for kernel in kernels:
            await kernel.start()
            await kernel.run(TRIVIAL, TRIVIAL_PRINTS)
        theirs = [sum(map(census.pss, census.tree(kernel.pid))) / MIB for kernel in kernels]
    finally:
        for kernel in kernels:
            await kernel.close()
        for one in sandboxes:
            await subject.delete(one)
    row = Row(
        "idle_pss",
        f"idle container, PSS, {scale.live} alive",
        "MiB",
        Samples(subject.name, ours),
        Samples(f"{JUPYTER}, {scale.kernels_idle} alive", theirs),
        {"mean": 10},
        measures=("mean",),
        note=f"with the pool and the zygote {everything:.0f} MiB in all",
    )
    return [row]


async def interrupts(subject: Subject, scale: Scale) -> list[Row]:
    """From the deadline to the end of a call that would never end."""
    soft: list[float] = []
    hard: list[float] = []
    for _ in range(scale.interrupts):
        sandbox = await subject.create()
        check(await subject.run(sandbox, "kept = 2; print(kept)"), TRIVIAL_PRINTS)
        asked = time.perf_counter()
        call = await subject.run(sandbox, ENDLESS, timeout=0.3)
        soft.append(call.ended - asked - 0.3)
        if call.status != "timeout" or not call.state_kept:
            raise RuntimeError(f"an endless loop ended with {call}")
        check(await subject.run(sandbox, "print(kept)"), TRIVIAL_PRINTS)
        asked = time.perf_counter()
        call = await subject.run(sandbox, STUBBORN, timeout=0.3)
        hard.append(call.ended - asked - 0.3)
        if call.status != "timeout" or call.state_kept:
            raise RuntimeError(f"an endless loop that ignores interrupts ended with {call}")
        await subject.delete(sandbox)
    measures = ("p50", "max")
    mine = subject.name
    return [
        Row(
            "interrupt",
            "endless loop: deadline → end, state kept",
            "s",
            Samples(mine, soft),
            limits={"max": 1},
            measures=measures,
        ),
        Row(
            "kill",
            "the same, ignoring interrupts: deadline → killed",
            "s",
            Samples(mine, hard),
            limits={"max": 3},
            measures=measures,
        ),
    ]


async def churn(subject: Subject, containers: int) -> list[Row]:
    """Containers made, used and deleted; what is there afterwards that was not there before."""
    await sustained(subject, 2 * POOL)  # connections, caches and the like exist by now
    before = await settled(subject)
    began = time.perf_counter()
    await sustained(subject, containers)
    taken = time.perf_counter() - began
    leaked = (await settled(subject)).growth_over(before)
    told = (
        ", ".join(f"{count} {name}" for name, count in leaked.items())
        or "no process, descriptor, mount, cgroup, file"
    )
    row = Row(
        "churn",
        f"{containers} containers made, used, deleted: left behind",
        "things",
        Samples(subject.name, [sum(leaked.values())]),
        limits={"max": 0},
        measures=("max",),
        note=f"{told}; {containers / taken:.0f}/s",
    )
    return [row]


async def settled(subject: Subject) -> census.Census:
    """A census when nothing changes any more: what is given back in the background has been given back."""
    await full_pool(subject)
    last = census.Census.take(subject.pid)
    for _ in range(100):
        await asyncio.sleep(0.1)
        now = census.Census.take(subject.pid)
        if now == last:
            break
        last = now
    return last


async def measure(scale: Scale, *, in_process: bool, containers: int) -> list[Row]:
    found: list[Row] = []
    async with contextlib.AsyncExitStack() as stack:
        spawner = await stack.enter_async_context(Spawner())
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        async def step(title: str, work: Awaitable[Sequence[Row]]) -> None:
            began = time.perf_counter()
            found.extend(await work)
            print(f"{title}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)

        async with contextlib.AsyncExitStack() as warm:
            others: list[Subject] = []
            if in_process:
                subject: Subject = await warm.enter_async_context(running(Settings(pool=POOL)))
            else:
                server = await warm.enter_async_context(servers.on_unix_socket(directory, POOL))
                subject = server
                others.append(await warm.enter_async_context(servers.on_loopback(directory, POOL)))
                if Shipped.exists():
                    others.append(Shipped(server))
                    warm.push_async_callback(others[-1].close)
            await step("against Jupyter", against_jupyter(subject, others, scale))
            await step("CPU per container", cpu_per_container(subject, spawner, scale))
            await step("idle memory", idle_memory(subject, scale))
            await step("interrupts", interrupts(subject, scale))
            if containers:
                await step("left behind", churn(subject, containers))
        if in_process:
            cold: Subject = await stack.enter_async_context(running(Settings(pool=0)))
        else:
            cold = await stack.enter_async_context(servers.on_unix_socket(directory, 0))
        await step("pool empty", against_spawns(cold, spawner, scale))
    return found


@contextlib.asynccontextmanager
async def running(settings: Settings) -> AsyncGenerator[InProcess]:
    subject = await InProcess.start(settings)
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
        phases.show(asyncio.run(phases.record(QUICK.spawns)))
        return
    scale = QUICK if chosen.quick else FULL
    found = asyncio.run(measure(scale, in_process=chosen.in_process, containers=chosen.churn))
    facts = rows.machine(references.versions())
    rows.show("sandbox", facts, found)
    if chosen.json is not None or not (chosen.quick or chosen.in_process):
        rows.write_json(chosen.json or RESULTS, "sandbox", facts, found)


if __name__ == "__main__":
    main()
