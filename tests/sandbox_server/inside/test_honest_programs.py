"""Honest programs keep their sandbox, however much they print and show."""

from collections.abc import AsyncIterator
from textwrap import dedent

import pytest
import pytest_asyncio

from fumehood.protocol.sandbox.sandbox_messages import Stderr, Stdout
from fumehood.sandbox_server.supervisor.sandbox_instance import SandboxInstance
from fumehood.sandbox_server.supervisor.supervisor import Supervisor
from tests.support.sandbox_runs import ExecutionOutcome, has_cgroups, run, settings

pytestmark = pytest.mark.asyncio(loop_scope="module")

_OUTPUT_BYTES = 1 << 20
_DISPLAY_BYTES = 32 << 20


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def supervisor() -> AsyncIterator[Supervisor]:
    chosen = settings(output_bytes=_OUTPUT_BYTES, display_bytes=_DISPLAY_BYTES, preload=())
    async with Supervisor(chosen) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(supervisor: Supervisor) -> AsyncIterator[SandboxInstance]:
    made = await supervisor.create()
    await run(made, "import sys; kept = 7")
    yield made
    await made.destroy()


async def run_ok(sandbox: SandboxInstance, program: str) -> ExecutionOutcome:
    """What it did; it ended well, and so did a call after it."""
    outcome = await run(sandbox, dedent(program))
    assert (outcome.end.status, outcome.end.reason, outcome.raised) == ("ok", "", None)
    assert (await run(sandbox, "kept")).result == "7"
    return outcome


def texts(outcome: ExecutionOutcome) -> list[tuple[type, str]]:
    """What was written, in order, text of one stream joined."""
    found: list[tuple[type, str]] = []
    for event in outcome.events:
        if isinstance(event, Stdout | Stderr):
            if found and found[-1][0] is type(event):
                found[-1] = (type(event), found[-1][1] + event.text)
            else:
                found.append((type(event), event.text))
    return found


async def test_a_program_that_writes_to_both_streams_by_turns(sandbox: SandboxInstance) -> None:
    outcome = await run_ok(
        sandbox, "for i in range(6000):\n    print('row', i)\n    print('x', file=sys.stderr)"
    )
    expected = [pair for i in range(6000) for pair in ((Stdout, f"row {i}\n"), (Stderr, "x\n"))]
    assert texts(outcome) == expected


async def test_a_hundred_thousand_turns_of_one_character(sandbox: SandboxInstance) -> None:
    """The most events that a program can cause: what is left out is marked."""
    outcome = await run_ok(
        sandbox, "for i in range(50_000):\n    sys.stdout.write('o')\n    sys.stderr.write('e')"
    )
    found = texts(outcome)
    assert found[-1][1].endswith(f"[output truncated: more than {_OUTPUT_BYTES} bytes]\n")
    assert 60_000 < len(found) <= _OUTPUT_BYTES // 17 + 2
    assert found[:4] == [(Stdout, "o"), (Stderr, "e")] * 2


@pytest.mark.parametrize(
    "step",
    [
        "print('x', flush=True)",
        "sys.stdout.write('x'); sys.stdout.flush()",
        "sys.stderr.write('\\rx'); sys.stderr.flush(); sys.stdout.flush()",
        "os.write(1, b'x')",
    ],
)
async def test_a_hundred_thousand_flushes(sandbox: SandboxInstance, step: str) -> None:
    outcome = await run_ok(sandbox, f"import os\nfor i in range(100_000): {step}")
    assert (outcome.stdout + outcome.stderr).count("x") == 100_000


async def test_turns_with_flushes_and_characters_of_several_bytes(sandbox: SandboxInstance) -> None:
    outcome = await run_ok(
        sandbox,
        """
        for i in range(20_000):
            print("é😀\\x1b\\0", flush=True)
            print("ß", file=sys.stderr, flush=True)
        """,
    )
    assert texts(outcome) == [(Stdout, "é😀\x1b\0\n"), (Stderr, "ß\n")] * 20_000


async def test_a_program_with_a_clock_of_its_own(sandbox: SandboxInstance) -> None:
    """As tests with a frozen or a leaping time have it."""
    outcome = await run_ok(
        sandbox,
        """
        import itertools, time
        true = time.monotonic
        time.monotonic = itertools.count(step=1000).__next__
        for i in range(30_000): print("x")
        time.monotonic = true
        """,
    )
    assert outcome.stdout == "x\n" * 30_000


@pytest.mark.skipif(not has_cgroups(), reason="processes cannot be bounded as this user")
async def test_a_program_that_forks_without_end_is_not_noisy(sandbox: SandboxInstance) -> None:
    """It may mean no harm; interrupts hit its code, never the interpreter's hooks."""
    outcome = await run(
        sandbox, "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass", timeout=1
    )
    assert outcome.end.status == "timeout"
    assert "Exception ignored" not in outcome.stderr


async def test_a_hundred_large_displays(sandbox: SandboxInstance) -> None:
    outcome = await run_ok(
        sandbox,
        """
        large = {"text/plain": "large", "text/html": "x" * (2 << 20)}
        for i in range(100): display(large, raw=True)
        display("small")
        "result"
        """,
    )
    assert [bundle["text/plain"] for bundle in outcome.displays] == ["large"] * 15
    assert outcome.stderr == (
        f"[display left out: more than {_DISPLAY_BYTES} bytes shown in this call]\n"
        "[displays dropped: more than 100 in one call]\n"
    )
    assert outcome.result == "'result'"


async def test_displays_that_grow_on_their_way(sandbox: SandboxInstance) -> None:
    """Pictures in base64, text that is written in escapes."""
    outcome = await run_ok(
        sandbox,
        """
        import os
        for i in range(30):
            display({"image/png": os.urandom(3 << 20), "text/plain": "\\0😀" * 50_000}, raw=True)
        for i in range(30): display("é" * 500_000)
        "ß" * 1_000_000
        """,
    )
    assert len(outcome.displays) > 5
    assert outcome.stderr.count("[display left out") == 1


async def test_displays_from_many_threads(sandbox: SandboxInstance) -> None:
    outcome = await run_ok(
        sandbox,
        """
        import threading
        large = {"text/html": "x" * (7 << 20)}
        def work():
            for i in range(5): display(large, raw=True)
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        """,
    )
    assert len(outcome.displays) == 4


async def test_everything_at_its_most_in_one_call(sandbox: SandboxInstance) -> None:
    outcome = await run(
        sandbox,
        dedent("""
        for i in range(100): display({"text/html": "x" * (1 << 20)}, raw=True)
        for i in range(50_000): print("o"); print("e", file=sys.stderr)
        print("x" * (2 << 20))
        raise ValueError("😀" * 1_000_000)
        """),
    )
    assert outcome.end.status == "error"
    assert outcome.raised is not None
    assert outcome.raised.name == "ValueError"
    assert (await run(sandbox, "kept")).result == "7"


@pytest.mark.parametrize("show", ["display({0}, raw=True)", "type('A', (), {{'_repr_mimebundle_': {1}}})()"])
async def test_an_object_of_very_many_forms(sandbox: SandboxInstance, show: str) -> None:
    forms = "{f'x/{n}': str(n) for n in range(5000)} | {'text/plain': 'plain'}"
    outcome = await run_ok(sandbox, show.format(forms, f"lambda self, **options: {forms}"))
    (bundle,) = outcome.displays or [{"text/plain": outcome.result, "rest": ""}]
    assert bundle["text/plain"] == "plain"
    assert len(bundle) <= 32
    assert outcome.stderr == "[4969 of 5001 forms of a display left out]\n"
