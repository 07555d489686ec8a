"""The walk of one request in docs/architecture.md: a recorded request takes exactly these steps."""

import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from tests.support.gateway_process import ScriptedModelServer, code_call, run_gateway, text_answer

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
RECORDER = Path(__file__).parents[1] / "support" / "call_recorder.py"
MAX_HOPS = 20
_HOP = re.compile(r"^\d+\. (?:\*(?P<boundary>[^*]+):\* )?`(?P<name>[\w.]+)`", re.MULTILINE)


class Hop(NamedTuple):
    """boundary: what lies between it and the hop before, where that does not call it."""

    boundary: str | None
    name: str


def read_hops(title: str) -> list[Hop]:
    _, _, rest = PAGE.read_text().partition(f"\n**{title}.**")
    section = re.split(r"\n(?:\*\*|#)", rest)[0]
    return [Hop(match["boundary"], match["name"]) for match in _HOP.finditer(section)]


IN, BACK = read_hops("In"), read_hops("Back")


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> set[tuple[str, str]]:
    """Caller and callee of every call that the gateway and the sandbox server made for one streamed request."""
    directory = tmp_path_factory.mktemp("walk")
    socket, server_calls, gateway_calls = (directory / name for name in ("socket", "server", "gateway"))
    sandbox_server = subprocess.Popen(
        [sys.executable, RECORDER, server_calls, "sandbox", "--socket", socket],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "FUMEHOOD_SANDBOX_PRELOAD": ""},
    )
    assert sandbox_server.stdout is not None
    try:
        assert sandbox_server.stdout.readline().startswith("Serving sandboxes on ")
        with ScriptedModelServer() as model:
            # Output before the end of the code, so that it streams.
            model.script(
                code_call("import time\nprint(1, flush=True)\ntime.sleep(0.2)\nprint(2)"), text_answer("1, 2")
            )
            settings = {
                "models": [{"match": "*", "backend": "chat_completions", "base_url": model.url}],
                "providers": {"code_interpreter": {"settings": {"sandbox_url": f"unix:{socket}"}}},
            }
            with run_gateway(directory, settings, program=(str(RECORDER), str(gateway_calls))) as gateway:
                request = {
                    "model": "m",
                    "input": "Count.",
                    "stream": True,
                    "tools": [{"type": "code_interpreter", "container": {"type": "auto"}}],
                }
                response = httpx.post(f"{gateway.url}/responses", json=request, timeout=60)
                assert "event: response.completed" in response.text
    finally:
        sandbox_server.terminate()
        sandbox_server.wait(30)
        sandbox_server.stdout.close()
    lines = [*server_calls.read_text().splitlines(), *gateway_calls.read_text().splitlines()]
    return {(caller, callee) for caller, callee in (line.split("\t") for line in lines)}


@pytest.mark.parametrize("hops", [IN, BACK], ids=["in", "back"])
def test_the_walk_is_short(hops: list[Hop]) -> None:
    assert 10 < len(hops) <= MAX_HOPS
    assert len({hop.boundary for hop in hops} - {None}) == len([hop for hop in hops if hop.boundary]) <= 5


def test_each_function_is_called_by_the_one_before_it(calls: set[tuple[str, str]]) -> None:
    missing = [(one.name, other.name) for one, other in pairwise(IN) if not other.boundary]
    assert [pair for pair in missing if pair not in calls] == []


def test_on_the_way_back_each_function_calls_the_next_or_reads_from_the_one_before(
    calls: set[tuple[str, str]],
) -> None:
    steps = [(one.name, other.name) for one, other in pairwise(BACK) if not other.boundary]
    assert [(one, other) for one, other in steps if not {(one, other), (other, one)} & calls] == []


def test_each_function_behind_a_boundary_is_called(calls: set[tuple[str, str]]) -> None:
    """Except in the sandbox, where nobody looks."""
    called = {callee for _, callee in calls}
    names = [hop.name for hop in (*IN, *BACK) if not hop.name.startswith("sandbox_server.inside.")]
    assert [name for name in names if name not in called] == []
