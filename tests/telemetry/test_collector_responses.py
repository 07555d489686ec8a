"""Collectors with long or slow responses."""

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fumehood.telemetry.otlp_pipeline import BoundedReadSession

PATIENCE = 60.0


class VerboseCollector(BaseHTTPRequestHandler):
    """Says `answer` again and again, with a pause between, until it is cut off or has chunk everything."""

    protocol_version = "HTTP/1.1"
    answer = b""
    times = 1
    pause = 0.0
    chunked = False
    asked_by: set[int]
    cut: threading.Event

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.asked_by.add(self.client_address[1])
        self.send_response(200)
        if self.chunked:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Content-Length", str(len(self.answer) * self.times))
        self.end_headers()
        try:
            for _ in range(self.times):
                self._say()
                time.sleep(self.pause)
            if self.chunked:
                self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.close_connection = True
            self.cut.set()

    def _say(self) -> None:
        chunk = b"%x\r\n%s\r\n" % (len(self.answer), self.answer) if self.chunked else self.answer
        self.wfile.write(chunk)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        pass


@contextmanager
def running_collector(
    answer: bytes, times: int = 1, pause: float = 0.0, *, chunked: bool = False
) -> Generator[tuple[str, type[VerboseCollector]]]:
    attributes = {"answer": answer, "times": times, "pause": pause, "chunked": chunked}
    handler = type(
        "_Talker", (VerboseCollector,), {**attributes, "asked_by": set[int](), "cut": threading.Event()}
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=[0.02])
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", handler
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("chunked", [False, True])
def test_a_long_response_is_not_read_completely(chunked: bool) -> None:
    with (
        running_collector(b"x" * (1 << 20), 1 << 20, chunked=chunked) as (address, talker),
        BoundedReadSession() as session,
    ):
        answer = session.request("POST", address, data=b"spans", timeout=PATIENCE)
        assert answer.status_code == 200
        assert talker.cut.wait(PATIENCE)


def test_a_slow_response_is_not_awaited() -> None:
    with running_collector(b"x", 60_000, 0.01) as (address, talker), BoundedReadSession() as session:
        assert session.request("POST", address, data=b"spans", timeout=0.5).status_code == 200
        assert talker.cut.wait(PATIENCE)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_short_response_lets_the_connection_be_reused(chunked: bool) -> None:
    with (
        running_collector(b"x" * 1000, 3, chunked=chunked) as (address, talker),
        BoundedReadSession() as session,
    ):
        for _ in range(3):
            assert session.request("POST", address, data=b"spans", timeout=PATIENCE).status_code == 200
        assert len(talker.asked_by) == 1
