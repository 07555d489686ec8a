"""Lines of the request log: both formats, batching, quoting."""

import asyncio
import json
import logging
import re

import pytest

from fumehood.gateway.request_log import BufferedRequestLog, logger
from tests.support.scripted_gateway import run_gateway

FIELDS = {"request_id": "req_1", "status": 200, "ms": 1.25, "model": "m", "param": None}
TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00"


@pytest.fixture(autouse=True)
def _level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger.name)


async def test_text() -> None:
    written: list[str] = []
    lines = BufferedRequestLog(written.append, "text")
    lines(logging.INFO, FIELDS)
    lines(logging.WARNING, {"model": 'a b\n"c" \u202e'})
    lines.flush()
    first, second = "".join(written).splitlines()
    assert re.fullmatch(f"{TIME} info    request request_id=req_1 status=200 ms=1.25 model=m", first)
    assert re.fullmatch(rf"{TIME} warning request model='a b\\n\"c\" \\u202e'", second)


async def test_json() -> None:
    written: list[str] = []
    lines = BufferedRequestLog(written.append, "json")
    lines(logging.INFO, {**FIELDS, "model": "a\nb"})
    lines.flush()
    (line,) = "".join(written).splitlines()
    found = json.loads(line)
    assert re.fullmatch(TIME, found.pop("time"))
    assert found == {**FIELDS, "model": "a\nb", "level": "info", "event": "request"}


async def test_lines_wait_a_moment_for_others() -> None:
    written: asyncio.Queue[str] = asyncio.Queue()
    lines = BufferedRequestLog(written.put_nowait, "text")
    for _ in range(3):
        lines(logging.INFO, FIELDS)
    assert written.empty()
    assert (await asyncio.wait_for(written.get(), 30)).count("\n") == 3
    lines.flush()
    assert written.empty()


async def test_what_is_below_the_level_is_not_written(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger.name)
    written: list[str] = []
    lines = BufferedRequestLog(written.append, "text")
    lines(logging.INFO, FIELDS)
    lines(logging.WARNING, FIELDS)
    lines.flush()
    assert len(written) == 1


async def test_a_gateway_with_lines_of_its_own() -> None:
    written: list[str] = []
    lines = BufferedRequestLog(written.append, "json")
    async with run_gateway(request_log=lines) as gateway:
        await gateway.create_response(input="the secret plan", model="x" * 250)
        await gateway.request("GET", "/nowhere/secret")
    lines.flush()
    found = [json.loads(line) for line in "".join(written).splitlines()]
    assert [(line["route"], line["status"]) for line in found] == [("/v1/responses", 200), ("(unknown)", 404)]
    assert "secret" not in "".join(written)
