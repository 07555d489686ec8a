"""`fumehood files` and `fumehood containers` against servers that mean no good."""

import json
import socket
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fumehood.cli import api_client
from tests.support.cli_runner import clear_server_environment, run_command


@pytest.fixture(autouse=True)
def isolated_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    clear_server_environment(monkeypatch)


type Reply = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def server(reply: Reply) -> Generator[tuple[str, list[dict[str, str]]]]:
    """One that answers everything in the same way; its address, and the headers of the requests."""
    requests: list[dict[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(dict(self.headers))
            reply(self)

        do_POST = do_DELETE = do_GET  # noqa: N815 (http.server's names)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (its signature)
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_port}/v1", requests
        finally:
            running.shutdown()
            thread.join()


def answering(body: object, status: int = 200, length: int | None = None, location: str = "") -> Reply:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()

    def reply(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        request.send_header("Content-Length", str(len(content) if length is None else length))
        if location:
            request.send_header("Location", location)
        request.end_headers()
        request.wfile.write(content)

    return reply


def test_the_key_comes_from_the_environment_and_is_never_shown() -> None:
    with server(answering({"error": {"message": "no"}}, 401)) as (url, requests):
        first = run_command("files", "list", url=url, OPENAI_API_KEY="fh-one", FUMEHOOD_API_KEY="fh-two")
        run_command("files", "list", "--base-url", url, OPENAI_API_KEY="fh-one")
        run_command("files", "list", OPENAI_BASE_URL=url)
    assert [headers.get("Authorization") for headers in requests] == ["Bearer fh-two", "Bearer fh-one", None]
    assert (first.code, first.err) == (1, "no.")
    refused = run_command("files", "list", OPENAI_API_KEY="fh-\nX: y")
    assert refused.code == 2
    assert "X: y" not in refused.err


HOSTILE = "\x1b]0;owned\x07\x9b31m\u202egnp.exe\r\nsecond line"


def test_server_text_is_sanitized() -> None:
    row = {"id": HOSTILE, "filename": f"[red]{HOSTILE}", "bytes": "x", "created_at": 1e300, "purpose": None}
    with server(answering({"data": [row], "has_more": False})) as (url, _):
        table = run_command("files", "list", url=url)
        as_json = run_command("files", "list", "--json", url=url)
    for text in (table.out, as_json.out):
        assert not {char for char in text if char != "\n" and (ord(char) < 32 or 126 < ord(char) < 160)}
        assert "\u202e" not in text
    assert "[red]" in table.out
    assert len(table.out.splitlines()) == 2
    assert json.loads(as_json.out)["id"] == HOSTILE
    with server(answering({"error": {"message": HOSTILE * 1000}}, 400)) as (url, _):
        error_text = run_command("files", "list", url=url).err
    assert len(error_text) < 600
    assert "\x1b" not in error_text


@pytest.mark.parametrize(
    "name", ["../../etc/passwd\x00", ".bashrc", "", "..", "a/", "a\u202eb", ".git"], ids=ascii
)
def test_unsafe_file_names_are_not_used(name: str, tmp_path: Path) -> None:
    with server(answering({"id": "file-1", "filename": name})) as (url, _):
        refused = run_command("files", "get", "file-1", url=url)
        assert refused.code == 1
        assert "choose another with -o" in refused.err
        assert list(tmp_path.iterdir()) == []
        assert run_command("files", "get", "file-1", "-o", "chosen", url=url).code == 0


def test_only_the_last_part_of_a_name_counts(tmp_path: Path) -> None:
    with server(answering({"id": "file-1", "filename": "/etc/cron.d/job"})) as (url, _):
        assert run_command("files", "get", "file-1", url=url).code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["job"]


def test_an_incomplete_download_leaves_no_file(tmp_path: Path) -> None:
    whole, half = answering({"filename": "a"}), answering(b"half", length=1000)

    def reply(request: BaseHTTPRequestHandler) -> None:
        (half if request.path.endswith("/content") else whole)(request)

    with server(reply) as (url, requests):
        for arguments in ((), ("--force",)):
            assert run_command("files", "get", "file-1", *arguments, url=url).code == 125
    assert len(requests) == 4
    assert list(tmp_path.iterdir()) == []


def test_malformed_answers() -> None:
    for body in (b"<html>", b"[]", b'{"data": 5}', b'{"data": [5, null]}', b"[" * 100_000):
        with server(answering(body)) as (url, _):
            assert run_command("files", "list", url=url).code in (0, 1)
    with server(answering(b"", 302, location="http://127.0.0.1:1/")) as (url, _):
        moved = run_command("files", "list", url=url, OPENAI_API_KEY="k")
        assert (moved.code, moved.err) == (1, "The server answered with 302 Found.")


def test_listing_stops_at_the_limit() -> None:
    page = {"data": [{"id": "file-1"}] * 100, "has_more": True}
    with server(answering(page)) as (url, requests):
        result = run_command("files", "list", "--limit", "250", url=url)
    assert len(result.out.splitlines()) == 251
    assert len(requests) == 3


def test_a_server_that_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    result = run_command("containers", "list", url=f"http://127.0.0.1:{port}/v1")
    assert result.code == 125
    assert result.err.startswith(f"http://127.0.0.1:{port}/v1 does not answer: ")


def test_an_upload_rejected_midway_shows_the_servers_message(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(bytes(32 << 20))

    def refuse(request: BaseHTTPRequestHandler) -> None:
        answering({"error": {"message": "That is too large"}}, 413)(request)
        request.close_connection = True
        request.connection.shutdown(socket.SHUT_WR)
        while request.rfile.read(1 << 20):  # so that the answer is not lost with the connection
            pass

    with server(refuse) as (url, _):
        result = run_command("files", "upload", "big", url=url)
    assert (result.code, result.err) == (1, "That is too large.")


def test_progress_is_shown_on_terminals_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with api_client.show_progress("Sending [red]x", 100) as advance:
        advance(100)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with api_client.show_progress("Sending [red]x", 100) as advance:
        advance(50)
        advance(50)
    assert "Sending [red]x" in capsys.readouterr().err
