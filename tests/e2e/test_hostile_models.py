"""Model servers that send without end: each is an error of its own response, and nobody else waits for it."""

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Collection, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support import gateway_process
from tests.support.gateway_process import GatewayProcess
from tests.support.health_probe import HealthProbe
from tests.support.hostile_models import HOSTILE, HOSTILE_RESPONSES, HostileModels
from tests.support.sse_parsing import parse_events

SECONDS = 60
# What a gateway puts up with for as long as a client listens: text, up to millions of characters.
TALKATIVE = {"deltas", "bare-deltas", "thoughts", "responses-deltas"}
WITHOUT_EVENTS = {
    *("comments", "comments-after-text", "empty-events", "fields", "blank-lines", "spaces", "odd-data"),
    *("responses-comments", "responses-unknown-events"),
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with HostileModels() as models:
        settings = {"models": models.settings(), "providers": {"code_interpreter": {"enabled": False}}}
        with gateway_process.run_gateway(tmp_path_factory.mktemp("gateway"), settings) as gateway:
            yield gateway


class Asker(threading.Thread):
    """Asks one model, and reads all of the answer unless it is stopped; `body` is that, or what there was of it.

    path: `/v1/chat/completions` passes the question through.
    """

    def __init__(self, url: str, model: str, *, stream: bool, path: str = "/v1/responses") -> None:
        super().__init__(daemon=True)
        self.model = model
        self._path = path
        self.status = 0
        self.body = bytearray()
        self._stream = stream
        self._stopped = threading.Event()
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=5 * SECONDS)
        self.start()

    def run(self) -> None:
        question: dict[str, Any] = {"input": "hi"} if self._path == "/v1/responses" else {"messages": []}
        body = json.dumps({"model": self.model, "stream": self._stream, **question})
        with contextlib.suppress(OSError, http.client.HTTPException, AttributeError):
            self._connection.request("POST", self._path, body, {"content-type": "application/json"})
            answer = self._connection.getresponse()
            self.status = answer.status
            while not self._stopped.is_set() and (piece := answer.read1(1 << 16)):
                self.body += piece
        self._connection.close()

    def stop(self) -> None:
        self._stopped.set()
        if (sock := self._connection.sock) is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(2)
        self.join()

    @property
    def error(self) -> dict[str, Any]:
        """How the response ended, which has to be badly."""
        is_passed_through = self._path != "/v1/responses"
        if self.status != 200 and (is_passed_through or not self._stream):
            assert self.status == 502
            return json.loads(self.body)["error"]
        if is_passed_through:
            return json.loads(self.body[self.body.rindex(b"data: ") + 6 :])["error"]
        response = (
            parse_events(bytes(self.body))[-1][1]["response"] if self._stream else json.loads(self.body)
        )
        assert response["status"] == "failed"
        return response["error"]


def ask_all(
    running: GatewayProcess,
    models: list[str],
    *,
    stream: bool,
    path: str = "/v1/responses",
    talkative: Collection[str] = TALKATIVE,
) -> tuple[dict[str, Asker], HealthProbe]:
    """Ask them all at once, and for the gateway's health meanwhile, until those end that do."""
    probe = HealthProbe(running.url, running.process.pid)
    probe.probe()
    probe.seconds.clear()
    askers = {model: Asker(running.url, model, stream=stream, path=path) for model in models}
    ending = [asker for model, asker in askers.items() if model not in talkative]
    deadline = time.monotonic() + 4 * SECONDS
    try:
        while len(probe.seconds) < 200 or any(asker.is_alive() for asker in ending):
            assert time.monotonic() < deadline, [asker.model for asker in ending if asker.is_alive()]
            probe.probe()
            time.sleep(0.002)  # the machine is others', too
    finally:
        for asker in askers.values():
            asker.stop()
        probe.close()
    return askers, probe


@pytest.mark.timeout(5 * SECONDS)
@pytest.mark.parametrize(
    "stream",
    [pytest.param(True, id="streamed"), pytest.param(False, id="blocking", marks=pytest.mark.slow)],
)
def test_nobody_waits_for_servers_that_send_without_end(running: GatewayProcess, stream: bool) -> None:
    askers, probe = ask_all(running, [*HOSTILE, *HOSTILE_RESPONSES], stream=stream)
    assert len(askers) >= 10
    assert probe.percentile(0.99) < 0.1
    assert probe.percentile(0.9) < 0.05
    for model, asker in askers.items():
        if model not in TALKATIVE:
            assert asker.error["code"] == "server_error", model


# What does not end is passed on, up to the limit of every response; one such stream is enough.
ENDLESS_STREAMS = {"bare-deltas", "thoughts", "arguments"}
ENDLESS_DOCUMENTS = {"whitespace", "document", "items", "whole-document"}
QUICK = ["comments", "comments-after-text", "fields", "blank-lines", "headers", "gzip", "document"]


@pytest.mark.timeout(5 * SECONDS)
@pytest.mark.parametrize(
    ("models", "stream"),
    [
        pytest.param(QUICK, True, id="some"),
        pytest.param(sorted(HOSTILE.keys() - ENDLESS_STREAMS), True, id="streamed", marks=pytest.mark.slow),
        pytest.param(
            sorted(HOSTILE.keys() - ENDLESS_DOCUMENTS), False, id="blocking", marks=pytest.mark.slow
        ),
    ],
)
def test_nobody_waits_for_them_when_requests_are_passed_through(
    running: GatewayProcess, models: list[str], stream: bool
) -> None:
    talkative = {"deltas"} if stream else set[str]()
    askers, probe = ask_all(running, models, stream=stream, path="/v1/chat/completions", talkative=talkative)
    assert probe.percentile(0.99) < 0.1
    assert probe.percentile(0.9) < 0.05
    for model, asker in askers.items():
        if model not in talkative:
            assert asker.error["code"] == "server_error", model
    assert all("Traceback" not in line for line in running.output)


@pytest.mark.parametrize("model", sorted(WITHOUT_EVENTS))
def test_bytes_without_events_have_a_budget(running: GatewayProcess, model: str) -> None:
    asker = Asker(running.url, model, stream=True)
    asker.join(SECONDS)
    assert not asker.is_alive()
    assert f"The server of the model '{model}' was disconnected: it sent " in asker.error["message"]
    said = [line for line in running.output if f"'{model}' was disconnected" in line]
    assert said
    assert all("Traceback" not in line for line in running.output)


@pytest.mark.parametrize("model", ["comments", "bare-deltas"])
def test_several_of_one_kind_are_no_worse(running: GatewayProcess, model: str) -> None:
    probe = HealthProbe(running.url, running.process.pid)
    askers = [Asker(running.url, model, stream=True) for _ in range(4)]
    for _ in range(100):
        probe.probe()
        time.sleep(0.002)
    for asker in askers:
        asker.stop()
    probe.close()
    assert probe.percentile(0.99) < 0.1
