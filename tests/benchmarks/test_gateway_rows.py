"""Benchmark rows with tools and memory, against a fake gateway."""

import asyncio
import itertools
import json
import os
import sqlite3
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gateway_rows.bench import CHUNK_COUNT, Bench, Scale
from benchmarks.gateway_rows.code_turns import code_rows, tool_rows
from benchmarks.gateway_rows.conversations import growth_rows
from benchmarks.harness import process_resources
from benchmarks.harness.gateway_client import ARGUMENTS, CODE, TEXT, BenchmarkTarget, UnexpectedAnswer
from benchmarks.harness.model_server import TEXT_AFTER_TOOL, make_code, make_query, make_text
from benchmarks.harness.raw_http_client import RawHttpClient

LEAST = Scale(
    1, 1, 1, 1, 1, 1, 1, tool_rounds=1, tool_turns=1, fresh_containers=1, conversations=2, pairs=1, balances=1
)


class Actor:
    """Says what a gateway would say; keeps in a file what was said, by the id of the response."""

    def __init__(self, database: Path) -> None:
        self._numbers = itertools.count()
        self._database = database
        self.turns: dict[str, int] = {}
        self.containers: set[str] = set()
        with closing(sqlite3.connect(database)) as connection:
            connection.execute("CREATE TABLE said (id TEXT, content TEXT)")

    def answer(self, asked: dict[str, Any]) -> bytes:
        kind, _, number = asked["model"].partition("-")
        identity = f"resp_{next(self._numbers)}"
        before = asked.get("previous_response_id")
        self.turns[identity] = 1 if before is None else self.turns[before] + 1
        if kind == "function" and before is None:
            arguments = ['{"query":"', *make_query(int(number)), '"}']
            call = {"type": "function_call", "call_id": "call_1", "arguments": "".join(arguments)}
            return self._record_answer(identity, asked, [call], [(ARGUMENTS, arguments)])
        spoken = make_text(int(number) if kind == "burst" else TEXT_AFTER_TOOL)
        message = {"type": "message", "content": [{"type": "output_text", "text": "".join(spoken)}]}
        if kind != "code":
            return self._record_answer(identity, asked, [message], [(TEXT, spoken)])
        written = make_code(int(number))
        return self._record_answer(
            identity, asked, [self._call(asked, written), message], [(CODE, written), (TEXT, spoken)]
        )

    def _call(self, asked: dict[str, Any], written: list[str]) -> dict[str, Any]:
        container = asked["tools"][0]["container"]
        if not isinstance(container, str):
            container = f"cntr_{next(self._numbers)}"
            self.containers.add(container)
        call = {"type": "code_interpreter_call", "code": "".join(written), "container_id": container}
        return {**call, "status": "completed" if container in self.containers else "failed"}

    def _record_answer(
        self, identity: str, asked: dict[str, Any], output: list[Any], deltas: list[tuple[str, list[str]]]
    ) -> bytes:
        response = {"id": identity, "status": "completed", "output": output}
        with closing(sqlite3.connect(self._database)) as connection:
            connection.execute("INSERT INTO said VALUES (?, ?)", (identity, json.dumps(response)))
            connection.commit()
        if not asked["stream"]:
            return json.dumps(response).encode()
        events: list[dict[str, Any]] = [
            {"type": kind, "delta": delta} for kind, pieces in deltas for delta in pieces
        ]
        events.append({"type": "response.completed", "response": response})
        return b"".join(_events(events)) + b"data: [DONE]\n\n"


def _events(events: list[dict[str, Any]]) -> Iterator[bytes]:
    for number, event in enumerate(events):
        data = json.dumps({**event, "sequence_number": number})
        yield f"event: {event['type']}\ndata: {data}\n\n".encode()


@asynccontextmanager
async def _on_stage(directory: Path) -> AsyncGenerator[tuple[Bench, Actor]]:
    actor = Actor(directory / "said.db")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = int(head.lower().rpartition(b"content-length: ")[2].split()[0])
            body = actor.answer(json.loads(await reader.readexactly(length)))
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))

    def ended(task: asyncio.Task[None]) -> None:
        assert isinstance(task.exception(), asyncio.IncompleteReadError)

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(serve(reader, writer))
        task.add_done_callback(ended)
        task.add_done_callback(lambda _: writer.close())

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    client = RawHttpClient(port=server.sockets[0].getsockname()[1])
    served = BenchmarkTarget("actor", os.getpid(), client)
    try:
        yield Bench(served, served, client, LEAST, directory / "said.db"), actor
    finally:
        client.close()
        server.close()
        await server.wait_closed()


async def test_code_is_measured_in_one_container(tmp_path: Path) -> None:
    async with _on_stage(tmp_path) as (bench, actor):
        rows = await code_rows(bench)
    assert [row.key for row in rows] == ["code_delta", "code_flat"]
    assert len(actor.containers) == 1


async def test_turns_with_tools_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(_: int) -> None:
        raise process_resources.MeasurementUnavailable("nobody counts.")

    monkeypatch.setattr(process_resources, "CpuMeter", cannot)
    async with _on_stage(tmp_path) as (bench, actor):
        (row,) = await tool_rows(bench)
    assert row.key == "code_turn"
    assert sorted(actor.turns.values()) == [1] * 5 + [2] * 2


async def test_code_that_was_not_run_is_an_error(tmp_path: Path) -> None:
    async with _on_stage(tmp_path) as (bench, _):
        with pytest.raises(UnexpectedAnswer, match="the code was not run"):
            await bench.ours.ask_with_code(8, "cntr_unknown")


async def test_conversations_grow_to_their_hundredth_turn(tmp_path: Path) -> None:
    async with _on_stage(tmp_path) as (bench, actor):
        rows = await growth_rows(bench)
    assert [row.key for row in rows] == ["growth", "growth_blocking", "growth_bytes"]
    turns = list(actor.turns.values())
    assert [turns.count(turn) for turn in (3, 4, 5, 99, 100, 101, 102)] == [4, 4, 2, 2, 2, 2, 0]
    bytes_row = rows[2]
    assert bytes_row.ours.statistic("mean") > len("".join(make_text(CHUNK_COUNT)))
    assert bytes_row.meets_goals() == {"mean": True}
