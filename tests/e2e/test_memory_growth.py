"""Memory of a gateway and of its sandbox server over very many containers."""

import asyncio
from collections.abc import Iterable
from pathlib import Path

import httpx
import pytest

from tests.support import gateway_process
from tests.support.sandbox_runs import has_cgroups

AT_ONCE = 4
SETTLED, LAST = 4_000, 10_000
# The gateway's database caches 14 MiB of its file. Rows of deleted containers fill that: they stay for an hour. When it
# cached 64 MiB, the gateway grew by 13 MiB here, and went on growing.
GATEWAY_GROWTH, SERVER_GROWTH = 8 << 10, 4 << 10  # KiB


def read_anonymous_kib(pid: int) -> int:
    """What is the process's own; what it maps of files can be dropped."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1])
    raise AssertionError("it has ended")


def list_children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


async def use_one(client: httpx.AsyncClient, number: int) -> None:
    """Make a container, run code in it, and delete all that is stored of it."""
    made = await client.post(
        "/responses",
        json={
            "model": "direct",
            "tools": [{"type": "code_interpreter", "container": {"type": "auto"}}],
            "input": f"```python\nprint({number})\n```",
        },
    )
    response = made.raise_for_status().json()
    (call,) = [item for item in response["output"] if item["type"] == "code_interpreter_call"]
    (await client.delete(f"/containers/{call['container_id']}")).raise_for_status()
    (await client.delete(f"/responses/{response['id']}")).raise_for_status()


async def use_many(client: httpx.AsyncClient, numbers: Iterable[int]) -> None:
    waiting = iter(numbers)

    async def work() -> None:
        for number in waiting:
            await use_one(client, number)

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(work())


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_memory_is_flat_over_ten_thousand_containers(tmp_path: Path) -> None:
    limits = "enforced" if has_cgroups() else "best-effort"
    settings = {"providers": {"code_interpreter": {"settings": {"sandbox_limits": limits}}}}
    with gateway_process.run_gateway(tmp_path, settings) as running:
        gateway = running.process.pid
        (server,) = list_children(gateway)
        async with httpx.AsyncClient(base_url=running.url, timeout=120) as client:
            await use_many(client, range(SETTLED))
            before = read_anonymous_kib(gateway), read_anonymous_kib(server)
            await use_many(client, range(SETTLED, LAST))
            after = read_anonymous_kib(gateway), read_anonymous_kib(server)
        print(f"gateway {before[0]} to {after[0]} KiB, sandbox server {before[1]} to {after[1]} KiB")
        assert after[0] - before[0] < GATEWAY_GROWTH
        assert after[1] - before[1] < SERVER_GROWTH
