"""Sandboxes with and without each optimisation of their start, interleaved.

    make bench-warm-start                                      each optimisation alone, and all of them together
    make bench-warm-start ARGS="--without immortal,file_heap" these two together
    make bench-warm-start ARGS="--source ../other/src"         another checkout beside this one

Each variant is a server of its own, without a pool, from a copy of the package in which a few lines are replaced by the
plain way. docs/benchmarks.md says what the columns mean.
"""

import argparse
import asyncio
import contextlib
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.harness import process_resources, result_table, sandbox_server_processes
from benchmarks.harness.sandbox_targets import SandboxTarget
from benchmarks.sandbox import (
    GROUP_BY,
    GROUP_BY_PRINTS,
    MIB,
    MY_NAMESPACE,
    TRIVIAL,
    TRIVIAL_PRINTS,
    check_output,
    time_fresh_sandbox,
)
from fumehood.sandbox_server.host import jail_launcher

BASELINE = "as it is"
SETTLE_SECONDS = 10.0


@dataclass(frozen=True)
class Replacement:
    """Source text of a module of `inside`, which must occur once, and what stands in its place in the variant."""

    module: str
    original: str
    plain: str = ""


OPTIMISATIONS: dict[str, list[Replacement]] = {
    "init_program": [
        Replacement("processes/jail_spawner.py", "os.path.exists(layout.INIT_PROGRAM)", "False"),
    ],
    "immortal": [Replacement("warm_start/immortal_objects.py", "if not _is_supported():", "if True:")],
    "file_heap": [
        Replacement(
            "warm_start/file_backed_heap.py",
            "        self._remap_object_pools()\n        self._remap_malloc_heap()\n",
        )
    ],
    "warm_up_packages": [
        Replacement(
            "processes/zygote.py", "        runner.warm_up(preload.warm_up_programs())\n", "        pass\n"
        ),
    ],
    "warm_up_simple": [
        Replacement(
            "processes/zygote.py",
            "        runner.warm_up(preload.simple_warm_up_programs())\n",
            "        pass\n",
        ),
    ],
    "type_cache": [
        Replacement("processes/zygote.py", "        preload.clear_type_cache()\n", "        pass\n")
    ],
    "numpy_state": [
        Replacement(
            "processes/zygote.py",
            'numpy.random.set_state(("MT19937", key, _MT19937_WORDS))',
            "numpy.random.seed()",
        )
    ],
    "plain_signals": [
        Replacement("runner/code_runner.py", "= _signal.signal", "= signal.signal"),
        Replacement("runner/code_runner.py", "= _signal.pthread_sigmask", "= signal.pthread_sigmask"),
        Replacement(
            "runner/output_capture.py",
            'importlib.import_module("_signal").pthread_sigmask',
            "signal.pthread_sigmask",
        ),
    ],
    "raw_files": [
        Replacement(
            "jail/jail_builder.py",
            "    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)\n    os.write(fd, text)\n    os.close(fd)\n",
            '    with open(path, "wb") as file:\n        file.write(text)\n',
        ),
        Replacement(
            "syscalls.py",
            'return None if text is None else text.encode("utf-8", "surrogateescape")',
            "return None if text is None else os.fsencode(text)",
        ),
    ],
}


@dataclass
class Variant:
    """A server without some optimisations, and what was measured of it, by round."""

    name: str
    target: SandboxTarget
    meter: process_resources.CpuMeter
    idle_processes: int = 0
    cpu_ms: list[float] = field(default_factory=list[float])
    start_cpu_ms: list[float] = field(default_factory=list[float])
    first_output_ms: list[float] = field(default_factory=list[float])
    group_by_cpu_ms: list[float] = field(default_factory=list[float])
    pss_mib: list[float] = field(default_factory=list[float])

    def count_processes(self) -> int:
        return sum(1 for _ in process_resources.process_tree(self.target.pid))

    async def settle(self) -> None:
        """Wait until every sandbox has ended."""
        async with asyncio.timeout(SETTLE_SECONDS):
            while self.count_processes() > self.idle_processes:  # noqa: ASYNC110 - nothing reports it
                await asyncio.sleep(0.01)

    async def measure_round(self, containers: int) -> None:
        before = self.meter.cpu_seconds()
        start_seconds = 0.0
        first_outputs: list[float] = []
        for _ in range(containers):
            cpu, began = self.meter.cpu_seconds(), time.perf_counter()
            sandbox = await self.target.create()
            call = check_output(await self.target.run(sandbox, TRIVIAL), TRIVIAL_PRINTS)
            start_seconds += self.meter.cpu_seconds() - cpu
            first_outputs.append((call.first_output_at - began) * 1000)
            await self.target.delete(sandbox)
            await self.settle()
        between = self.meter.cpu_seconds()
        grouped = max(1, containers // 4)
        for _ in range(grouped):
            await time_fresh_sandbox(self.target, GROUP_BY, GROUP_BY_PRINTS)
        await self.settle()
        self.cpu_ms.append((between - before) / containers * 1000)
        self.start_cpu_ms.append(start_seconds / containers * 1000)
        self.first_output_ms.append(statistics.median(first_outputs))
        self.group_by_cpu_ms.append((self.meter.cpu_seconds() - between) / grouped * 1000)

    async def measure_idle_memory(self, live: int) -> None:
        sandboxes = [await self.target.create() for _ in range(live)]
        namespaces = [
            check_output(await self.target.run(one, MY_NAMESPACE), "pid:").text.strip() for one in sandboxes
        ]
        processes = process_resources.group_by_namespace(self.target.pid)
        self.pss_mib += [sum(map(process_resources.pss_bytes, processes[name])) / MIB for name in namespaces]
        for one in sandboxes:
            await self.target.delete(one)
        await self.settle()


def copy_package(source: Path, directory: Path, without: Sequence[str]) -> None:
    """Copy the package `fumehood` into this directory and switch these optimisations off."""
    shutil.copytree(source / "fumehood", directory / "fumehood", ignore=shutil.ignore_patterns("__pycache__"))
    inside = directory / "fumehood" / "sandbox_server" / "inside"
    for name in without:
        for replacement in OPTIMISATIONS[name]:
            module = inside / replacement.module
            text = module.read_text()
            if text.count(replacement.original) != 1:
                raise LookupError(f"{name}: {replacement.module} has changed; mend OPTIMISATIONS")
            module.write_text(text.replace(replacement.original, replacement.plain))
    for path in [directory, *directory.rglob("*")]:  # the jail's user must be able to read it
        path.chmod(0o755)


async def start_variant(stack: contextlib.AsyncExitStack, name: str, place: Path) -> Variant:
    target = await stack.enter_async_context(
        sandbox_server_processes.run_on_unix_socket(place, 0, package=place / "package")
    )
    meter = process_resources.CpuMeter(target.pid)
    stack.callback(meter.close)
    meter.adopt(process_resources.process_tree(target.pid))
    variant = Variant(name, target, meter)
    await time_fresh_sandbox(target, TRIVIAL, TRIVIAL_PRINTS)
    await asyncio.sleep(0.5)
    variant.idle_processes = variant.count_processes()
    return variant


async def measure(places: dict[str, Path], rounds: int, containers: int, live: int) -> list[Variant]:
    async with contextlib.AsyncExitStack() as stack:
        found = [await start_variant(stack, name, place) for name, place in places.items()]
        for number in range(rounds):
            # Another one begins each round, so that nothing depends on the order.
            shift = number % len(found)
            for variant in found[shift:] + found[:shift]:
                await variant.measure_round(containers)
            print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
        for variant in found:
            await variant.measure_idle_memory(live)
    return found


def merge_samples(repeats: Sequence[Sequence[Variant]]) -> list[Variant]:
    """Add the samples of later servers to those of the first: two servers of one program differ by some percent."""
    first, *others = repeats
    for found in others:
        for variant, other in zip(first, found, strict=True):
            variant.cpu_ms += other.cpu_ms
            variant.start_cpu_ms += other.start_cpu_ms
            variant.first_output_ms += other.first_output_ms
            variant.group_by_cpu_ms += other.group_by_cpu_ms
            variant.pss_mib += other.pss_mib
    return [*first]


def median_ratio(values: Sequence[float], baseline: Sequence[float]) -> str:
    """The median of the ratios by round, with its quartiles."""
    ratios = [ours / theirs for ours, theirs in zip(values, baseline, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return f"{middle:.3f} ({low:.2f} to {high:.2f})"


def build_table(found: Sequence[Variant]) -> Table:
    table = Table(title="without: times what the first variant takes, median (quartiles) of rounds")
    for name in ("without", "CPU", "start CPU", "first output", "group-by CPU", "idle PSS"):
        table.add_column(name, justify="left" if name == "without" else "right")
    first = found[0]
    table.add_row(
        first.name,
        f"{statistics.median(first.cpu_ms):.2f} ms",
        f"{statistics.median(first.start_cpu_ms):.2f} ms",
        f"{statistics.median(first.first_output_ms):.2f} ms",
        f"{statistics.median(first.group_by_cpu_ms):.2f} ms",
        f"{statistics.fmean(first.pss_mib):.2f} MiB",
    )
    for variant in found[1:]:
        memory = statistics.fmean(variant.pss_mib) / statistics.fmean(first.pss_mib)
        table.add_row(
            variant.name,
            median_ratio(variant.cpu_ms, first.cpu_ms),
            median_ratio(variant.start_cpu_ms, first.start_cpu_ms),
            median_ratio(variant.first_output_ms, first.first_output_ms),
            median_ratio(variant.group_by_cpu_ms, first.group_by_cpu_ms),
            f"{memory:.2f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what each optimisation of a sandbox's start earns.")
    parser.add_argument("--servers", type=int, default=4, metavar="N", help="one after another, per variant")
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="per server")
    parser.add_argument("--containers", type=int, default=4, metavar="N", help="per round")
    parser.add_argument("--live", type=int, default=20, metavar="N", help="idle sandboxes for the memory")
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="NAME[,NAME]",
        help=f"one variant without all of these, instead of one for each; repeatable: {', '.join(OPTIMISATIONS)}",
    )
    parser.add_argument(
        "--source", action="append", default=[], type=Path, metavar="SRC", help="compare with this checkout"
    )
    parser.add_argument("--quick", action="store_true", help="one server, three rounds of eight")
    chosen = parser.parse_args()
    here = Path(jail_launcher.__file__).parents[3]
    variants: dict[str, tuple[Path, Sequence[str]]] = {BASELINE: (here, ())}
    for names in chosen.without:
        variants[names] = (here, names.split(","))
    for source in chosen.source:
        variants[str(source)] = (source, ())
    if len(variants) == 1:
        variants |= {name: (here, (name,)) for name in OPTIMISATIONS}
        variants["all of them"] = (here, tuple(OPTIMISATIONS))
    servers, rounds, containers = (
        (1, 3, 8) if chosen.quick else (chosen.servers, chosen.rounds, chosen.containers)
    )
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        places = {name: Path(directory) / str(number) for number, name in enumerate(variants)}
        for name, (source, without) in variants.items():
            copy_package(source, places[name] / "package", without)
        found = merge_samples(
            [asyncio.run(measure(places, rounds, containers, chosen.live)) for _ in range(servers)]
        )
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    console.print(build_table(found))
    facts = result_table.describe_machine({})
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()), style="dim")


if __name__ == "__main__":
    main()
