"""The reference relay, the checks of its responses, and the gateway benchmark."""

import asyncio
import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import gateway
from benchmarks.gateway_rows import code_turns, conversations
from benchmarks.gateway_rows.bench import FULL, Bench, Scale, measure_cpu
from benchmarks.harness import gateway_client, gateway_processes, process_resources
from benchmarks.harness.gateway_client import TEXT, Item, Response, TimedAnswer, UnexpectedAnswer, read_events
from benchmarks.harness.gateway_processes import BenchmarkProcess, StartError
from benchmarks.harness.model_server import make_text
from benchmarks.harness.raw_http_client import RawHttpClient
from fumehood import gateway_config

LEAST = Scale(
    rounds=1,
    requests=4,
    at_once=2,
    streams=3,
    paced_rounds=1,
    paced_chunks=3,
    latencies=2,
    tool_rounds=1,
    tool_turns=1,
    fresh_containers=1,
    conversations=1,
    pairs=1,
    balances=1,
)


@asynccontextmanager
async def _rehearsing(directory: Path) -> AsyncGenerator[Bench]:
    async with (
        gateway_processes.run_model_server(directory) as (url, model),
        gateway_processes.run_relay(directory, url) as relay,
    ):
        yield Bench(relay, relay, model, LEAST, None)


async def test_the_relay_gives_a_delta_for_each_chunk_and_the_whole_at_the_end(tmp_path: Path) -> None:
    async with _rehearsing(tmp_path) as bench:
        streamed = await bench.relay.ask_for_text("burst-200", stream=True)
        joined = await bench.joined.ask_for_text("burst-200", stream=True)
        whole = await bench.relay.ask_for_text("burst-200", stream=False)
        first, ended = await gateway_client.time_completion(bench.model, "burst-200")
    assert streamed.deltas[TEXT] == joined.deltas[TEXT] == make_text(200)
    assert streamed.response.output == joined.response.output
    assert streamed.response.text() == whole.response.text() == "".join(make_text(200))
    assert 0 < streamed.first_delta <= streamed.whole
    assert 0 < first <= ended


async def test_every_row_that_can_be_rehearsed_gets_its_samples(tmp_path: Path) -> None:
    async with _rehearsing(tmp_path) as bench:
        found = [row for name in gateway.REHEARSAL_GROUPS for row in await gateway.GROUPS[name](bench)]
    assert [row.key for row in found] == [
        "memory_idle",
        "memory_loaded",
        "first_delta",
        "whole_answer",
        "burst",
        "burst_joined",
        "paced",
        "blocking",
        "blocking_short",
    ]
    assert all(row.ours.values and row.reference is not None and row.reference.values for row in found)
    assert all(value > 0 for row in found if row.unit == "µs" for value in row.ours.values)


STREAM = (
    b'event: response.created\ndata: {"type":"response.created","sequence_number":0}\n\n'
    b": still there\n\n"
    b"event: response.output_text.delta\n"
    b'data: {"type":"response.output_text.delta","sequence_number":1,"delta":"a"}\n\n'
    b'event: response.completed\ndata: {"type":"response.completed","sequence_number":2,'
    b'"response":{"id":"resp_1","status":"completed","output":[]}}\n\n'
    b"data: [DONE]\n\n"
)


def test_a_stream_is_read_past_comments() -> None:
    response, deltas = read_events(STREAM)
    assert response.id == "resp_1"
    assert deltas[TEXT] == ["a"]


@pytest.mark.parametrize(
    ("stream", "complaint"),
    [
        (STREAM.replace(b"data: [DONE]\n\n", b""), "did not end with"),
        (STREAM.replace(b'number":1', b'number":2'), "event 1 has the number 2"),
        (STREAM.replace(b"response.completed", b"response.incomplete"), "ended with response.incomplete"),
        (STREAM.replace(b'"status":"completed"', b'"status":"failed"'), "the response is failed"),
        (b"", "did not end with"),
    ],
)
def test_a_wrong_stream_is_an_error(stream: bytes, complaint: str) -> None:
    with pytest.raises(UnexpectedAnswer, match=complaint):
        read_events(stream)


@pytest.mark.parametrize(
    ("came", "folded", "complaint"),
    [
        (["ab"], "ab", "2 chunks became 1 events"),
        (["a", "c"], "ab", "not what the model said"),
        (["a", "b"], "a", "not what the response says"),
    ],
)
def test_deltas_that_were_joined_changed_or_lost_are_an_error(
    came: list[str], folded: str, complaint: str
) -> None:
    answer = TimedAnswer(Response("resp_1", "completed", [Item("message")]), 1.0, 2.0, {TEXT: came})
    with pytest.raises(UnexpectedAnswer, match=complaint):
        answer.expect(TEXT, ["a", "b"], folded)


async def test_an_error_of_a_server_is_told(tmp_path: Path) -> None:
    async with _rehearsing(tmp_path) as bench:
        elsewhere = replace(bench.relay, path="/v2/responses")
        with pytest.raises(UnexpectedAnswer, match=r"relay answered 404: .*there is only /v1/responses"):
            await elsewhere.ask_for_text("burst-1", stream=True)


def test_the_configuration_is_one_that_the_gateway_takes(tmp_path: Path) -> None:
    file = tmp_path / "fumehood.yaml"
    file.write_text(json.dumps(gateway_processes.write_configuration(tmp_path, "http://127.0.0.1:9", 8080)))
    taken = gateway_config.load_config(file, {})
    assert taken.storage.locate({}).database == gateway_processes.database_path(tmp_path)
    assert taken.limits.concurrent_total > FULL.streams


async def test_a_server_that_does_not_start_is_told_with_its_last_words(tmp_path: Path) -> None:
    argv = (sys.executable, "-c", "import sys; sys.exit('The port is taken.')")
    program = BenchmarkProcess("The gateway", argv, tmp_path / "log")
    async with program.running({}) as process:
        assert not await gateway_processes.wait_until_ready(process, RawHttpClient(port=1))
        failure = program.failure(process)
    assert isinstance(failure, StartError)
    assert str(failure).startswith("The gateway could not be started. `")
    assert str(failure).endswith("ended with status 1 and said:\nThe port is taken.")


def test_cpu_time_is_that_of_the_process_to_the_millisecond() -> None:
    burn = (
        "import time\nwhile time.process_time() < 0.2: pass\nprint(time.process_time(), flush=True)\ninput()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        told = float(process.stdout.readline())
        counted = process_resources.cpu_clock(process.pid)
        process.communicate(b"\n")
    assert counted == pytest.approx(told, abs=0.02)


async def test_work_costs_a_process_what_it_spends_meanwhile() -> None:
    async def work() -> str:
        until = time.process_time() + 0.05
        while time.process_time() < until:
            await asyncio.sleep(0)
        return "done"

    taken, result = await measure_cpu(time.process_time, work())
    assert (taken >= 0.05, result) == (True, "done")


def test_memory_at_its_peak_is_forgotten_on_request() -> None:
    hold = "held = bytearray(64 << 20)\ndel held\nprint(flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert (
            process_resources.peak_resident_bytes(process.pid) - process_resources.resident_bytes(process.pid)
            > 32 << 20
        )
        process_resources.reset_peak(process.pid)
        assert (
            process_resources.peak_resident_bytes(process.pid) - process_resources.resident_bytes(process.pid)
            < 32 << 20
        )
        process.communicate(b"\n")


def test_a_code_delta_is_told_from_its_turn() -> None:
    flat = [[5000.0 + 8 * length for length in code_turns.LENGTHS]]
    text = [[300.0 + 4 * length for length in code_turns.LENGTHS]]
    delta, level = code_turns.code_table(flat, text)
    assert (delta.ours.values, delta.ratio("p50"), level.ratio("p50")) == ([8.0], 0.5, 1.0)
    squared = [[0.01 * length * length for length in code_turns.LENGTHS]]
    _, steep = code_turns.code_table(squared, text)
    assert steep.meets_goals() == {"p50": False}


def test_bytes_per_turn_are_compared_late_with_early() -> None:
    flat = {turn: 4096 + 2 * 1000 * turn for turn in range(10, 101, 10)}
    (row,) = conversations.stored_row(flat, 2)
    assert (row.ours.values, row.ratio("mean")) == ([1000.0] * 3, 1.0)
    assert row.title == "bytes stored per turn, turns 61 to 90"
    (steep,) = conversations.stored_row({turn: 10 * turn * turn for turn in flat}, 2)
    assert steep.meets_goals() == {"mean": False}
    assert conversations.stored_row({}, 2) == []


def test_bytes_in_a_database_include_its_log(tmp_path: Path) -> None:
    path = tmp_path / "some.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("CREATE TABLE kept (content BLOB)")
        connection.commit()
        before = conversations.file_sizes(path)
        connection.execute("INSERT INTO kept VALUES (zeroblob(1000000))")
        connection.commit()
        assert 990_000 < conversations.file_sizes(path) - before < 1_100_000


def test_rows_are_chosen_by_name() -> None:
    assert gateway.parse_groups("paced,burst", rehearse=False) == ["burst", "paced"]
    assert gateway.parse_groups("", rehearse=True) == list(gateway.REHEARSAL_GROUPS)
    with pytest.raises(SystemExit, match="There are no rows code; there are memory, latency"):
        gateway.parse_groups("code", rehearse=True)
