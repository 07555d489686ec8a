"""`fumehood sandbox` as a process: where it listens, whom it lets in, what it logs, how it stops."""

import json
import os
import re
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fumehood.cli.options import TOKEN_VARIABLE
from fumehood.http_server.listening_sockets import ListenAddress, ListenError
from tests.support.cli_runner import FUMEHOOD, TIMEOUT_SECONDS, run_command, run_fumehood
from tests.support.descriptor_exhaustion import ask, exhaust_descriptors
from tests.support.sandbox_runs import build_environment

TOKEN = "correct-horse-battery-staple"


command = partial(run_fumehood, "sandbox")


def read_rest(sock: socket.socket) -> bytes:
    return b"".join(iter(partial(sock.recv, 65536), b""))


class SandboxServerProcess:
    """A server in a process of its own, after its ready line."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self.log = log
        assert process.stdout is not None
        self.ready = process.stdout.readline()
        match = re.fullmatch(r"Serving sandboxes on (\S+) \(mode namespaces\)\.\n", self.ready)
        assert match, (self.ready, log.read_text())
        self.address = match[1]

    def connect(self) -> socket.socket:
        if self.address.startswith("unix:"):
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(self.address.removeprefix("unix:"))
        else:
            host, port = self.address.removeprefix("http://").rsplit(":", 1)
            sock = socket.create_connection((host.strip("[]"), int(port)))
        sock.settimeout(TIMEOUT_SECONDS)
        return sock

    def ask(self, method: str, path: str, body: bytes = b"", token: str | None = None) -> tuple[int, bytes]:
        with self.connect() as sock:
            self.send(sock, method, path, body, token)
            return self.receive(sock)

    @staticmethod
    def send(
        sock: socket.socket, method: str, path: str, body: bytes = b"", token: str | None = None
    ) -> None:
        auth = "" if token is None else f"authorization: Bearer {token}\r\n"
        head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{auth}"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        sock.sendall(head.encode() + body)

    @staticmethod
    def receive(sock: socket.socket) -> tuple[int, bytes]:
        head, _, body = read_rest(sock).partition(b"\r\n\r\n")
        return int(head.split()[1]), body

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@contextmanager
def server(
    tmp_path: Path, *args: str | Path, listen: bool = True, environ: dict[str, str] | None = None
) -> Generator[SandboxServerProcess]:
    log = tmp_path / f"log-{time.monotonic_ns()}"
    place = ["--listen", "127.0.0.1:0"] if listen else []
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [FUMEHOOD, "sandbox", "--pool", "0", "--preload", "", "--log-format", "json", *place, *args],
            env={**build_environment(), **(environ or {})},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    try:
        yield SandboxServerProcess(process, log)
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(TIMEOUT_SECONDS)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()


def test_serves_and_stops_without_logging_secrets(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    file.chmod(0o600)
    with server(tmp_path, "--token-file", file) as running:
        assert running.address.startswith("http://127.0.0.1:")
        assert running.ask("PUT", "/sandboxes/a")[0] == 401
        assert running.ask("GET", "/health", token="wrong-" + TOKEN)[1] == b'{"status":"ok"}'
        spec = json.dumps(
            {
                "network": {
                    "type": "allowlist",
                    "allowed_domains": ["example.org"],
                    "domain_secrets": [
                        {"domain": "example.org", "name": "KEY", "value": "very-secret-value"}
                    ],
                }
            }
        ).encode()
        running.ask("PUT", "/sandboxes/secretive", spec, TOKEN)
        assert running.ask("PUT", "/sandboxes/a", token=TOKEN)[0] == 201
        code = json.dumps({"code": "print('said-by-code \\x1b[31m')", "execution_id": "e"}).encode()
        assert running.ask("POST", "/sandboxes/a/execute", code, TOKEN)[0] == 200
        assert running.ask("GET", "/sandboxes/a%0Ab", token=TOKEN)[0] == 400
        assert running.ask("DELETE", "/sandboxes/a", token=TOKEN)[0] == 204
        arguments = Path(f"/proc/{running.process.pid}/cmdline").read_bytes()
        running.signal()
        assert running.process.wait(TIMEOUT_SECONDS) == 0
    text = running.log.read_text()
    for secret in (TOKEN, "said-by-code", "very-secret-value", "\x1b"):
        assert secret not in text
    assert TOKEN.encode() not in arguments
    events = running.events()
    assert all({"time", "level", "event"} <= set(event) for event in events)
    names = [event["event"] for event in events]
    assert (names[-1], "started" in names, "stopping" in names) == ("stopped", True, True)
    (created,) = [
        event for event in events if event["event"] == "sandbox_created" and event["sandbox"] == "a"
    ]
    assert created["duration_ms"] > 0
    (ended,) = [event for event in events if event["event"] == "execution_ended"]
    assert (ended["sandbox"], ended["execution"], ended["status"]) == ("a", "e", "ok")


ALLOWLIST = {"network": {"type": "allowlist", "allowed_domains": ["example.org"]}}


def test_settings_from_a_file_and_from_variables(tmp_path: Path) -> None:
    """An option stands above a variable, which stands above the file."""
    file = tmp_path / "sandbox.yaml"
    file.write_text(
        "capacity: 5\ntenant_sandboxes: 1\negress: allowlist\negress_domains: [example.net]\npackages: false\n"
    )
    environ = {
        "FUMEHOOD_SANDBOX_CAPACITY": "6",
        "FUMEHOOD_SANDBOX_TENANT_SANDBOXES": "2",
        "FUMEHOOD_SANDBOX_EGRESS_DOMAINS": "example.org",
    }
    with server(tmp_path, "--config", file, "--capacity", "7", environ=environ) as running:
        assert json.loads(running.ask("GET", "/health")[1])["capacity"] == 7
        assert running.ask("PUT", "/sandboxes/a", json.dumps(ALLOWLIST).encode())[0] == 201
        refused = json.dumps({"network": {"type": "allowlist", "allowed_domains": ["example.net"]}}).encode()
        status, body = running.ask("PUT", "/sandboxes/b", refused)
        assert (status, json.loads(body)["error"]["param"]) == (400, "network")
        status, body = running.ask("PUT", "/sandboxes/b", b'{"requirements": ["humanize"]}')
        assert (status, json.loads(body)["error"]["code"]) == (400, "install_failed")
        assert running.ask("PUT", "/sandboxes/b")[0] == 201
        status, body = running.ask("PUT", "/sandboxes/c")
        assert (status, json.loads(body)["error"]["code"]) == (429, "quota_exceeded")
        code = "import urllib.request\nurllib.request.urlopen('http://example.net/')"
        assert running.ask("POST", "/sandboxes/a/execute", json.dumps({"code": code}).encode())[0] == 200
    events = running.events()
    (request,) = [event for event in events if event["event"] == "egress_request"]
    assert (request["domain"], request["verdict"]) == ("example.net", "refused")
    assert [event["sandbox"] for event in events if event["event"] == "sandbox_created"] == ["a", "b"]
    assert request["instance"] == next(event["instance"] for event in events if "instance" in event)


def test_the_mode_of_the_server_overrides_the_common_variable(tmp_path: Path) -> None:
    """What `exec` reads as well stands below what was said of the server."""
    file = tmp_path / "sandbox.yaml"
    file.write_text("mode: namespaces\n")
    with server(tmp_path, "--config", file, environ={"FUMEHOOD_MODE": "unsafe-degraded"}) as running:
        assert json.loads(running.ask("GET", "/health")[1])["mode"] == "namespaces"
    pod = command("--listen", "127.0.0.1:0", FUMEHOOD_SANDBOX_MODE="pod")
    assert (pod.returncode, "go together" in pod.stderr) == (2, True)
    token = tmp_path / "token"
    token.write_text("a-token-of-some-length")
    token.chmod(0o400)
    pod = command(
        *("--listen", "127.0.0.1:0", "--token-file", token),
        FUMEHOOD_SANDBOX_MODE="pod",
        FUMEHOOD_SANDBOX_GUEST_SOCKET="/nowhere",
        FUMEHOOD_SANDBOX_START_TIMEOUT="0.1",
    )
    assert (pod.returncode, "Start the code container" in pod.stderr) == (125, True)


def test_a_setting_that_is_misspelt() -> None:
    result = command("--listen", "127.0.0.1:0", FUMEHOOD_SANDBOX_EGRESS_DOMAIN="example.org")
    assert (result.returncode, result.stdout) == (2, "")
    assert (
        "FUMEHOOD_SANDBOX_EGRESS_DOMAIN: there is no setting egress_domain; did you mean egress_domains?"
        in result.stderr
    )


def test_every_metric_is_documented(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    with server(tmp_path) as running:
        assert running.ask("GET", "/nowhere")[0] == 404
        text = running.ask("GET", "/metrics")[1].decode()
    names = set(re.findall(r"^# TYPE (\w+) (?!gauge \w*_created)", text, re.MULTILINE))
    assert len(names) >= 8
    told = set(re.findall(r"^\| `(\w+)", page, re.MULTILINE))
    assert {name for name in names if not name.endswith("_created")} <= told


def test_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "sock"
    with server(tmp_path, "--socket", path, listen=False) as running:
        assert running.address == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert running.ask("GET", "/health")[0] == 200
        second = command("--socket", path)
        assert (second.returncode, second.stdout) == (125, "")
        assert second.stderr == f"Another server listens on {path}; stop it first, or choose another path.\n"
        running.signal(signal.SIGKILL)
        running.process.wait(TIMEOUT_SECONDS)
    assert path.exists()
    with server(tmp_path, "--socket", path, listen=False) as running:  # what a dead one left is no hindrance
        assert running.ask("GET", "/health")[0] == 200
        running.signal(signal.SIGINT)
        assert running.process.wait(TIMEOUT_SECONDS) == 0
    assert not path.exists()
    path.write_text("precious")
    third = command("--socket", path)
    assert (third.returncode, third.stderr) == (
        125,
        f"{path} exists and is not a socket; choose another path.\n",
    )
    assert path.read_text() == "precious"


@pytest.mark.parametrize(
    ("args", "code", "expected"),
    [
        (["--listen", "0.0.0.0:0"], 2, f"set {TOKEN_VARIABLE}"),
        (["--listen", "[::]:0"], 2, "--token-file"),
        (["--listen", "example.org:80"], 2, "can be reached from other machines"),
        (["--listen", "8080"], 2, "give HOST:PORT"),
        (["--listen", "::1:80"], 2, "brackets"),
        (["--listen", "127.0.0.1:70000"], 2, "give HOST:PORT"),
        (["--listen", "127.0.0.1:0", "--socket", "/tmp/x"], 2, "exclude each other"),
        (["--listen", "127.0.0.1:0", "--grace", "-1"], 2, "number of seconds"),
        (["--listen", "127.0.0.1:0", "--guest-socket", "/tmp/x"], 2, "go together"),
        (["--mode", "pod", "--guest-socket", "/nowhere"], 2, "mode pod requires a token"),
        (["--mode", "pod", "--guest-socket", "/nowhere", "--listen", "127.0.0.1:0"], 2, "mode pod requires a token"),
        (["--token-file", "/nonexistent"], 2, "No such file"),
        (["--config", "/nonexistent"], 2, "/nonexistent: No such file"),
        (["--socket", "/nonexistent/x"], 125, "Cannot create a socket in"),
        (["--socket", "/tmp/" + "x" * 120], 125, "too long"),
    ],
    ids=str,
)  # fmt: skip
def test_invalid_usage(args: list[str], code: int, expected: str) -> None:
    if code == 2:  # found before anything is started
        result = run_command("sandbox", *args)
        assert result.code == code
        assert expected in result.error_text
    else:
        ran = command(*args)
        assert (ran.returncode, ran.stdout) == (code, "")
        assert expected in ran.stderr


@pytest.mark.parametrize("token", ["", "short", "with space in the middle", "ünïcödé-ünïcödé-ü"])
def test_invalid_tokens(tmp_path: Path, token: str) -> None:
    file = tmp_path / "token"
    file.write_text(token)
    file.chmod(0o600)
    result = run_command("sandbox", "--listen", "127.0.0.1:0", "--token-file", str(file))
    assert result.code == 2
    assert "at least 16 printable characters" in result.error_text
    assert not token or token not in result.err


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o660, 0o606, 0o620])
def test_a_token_file_that_others_can_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(mode)
    result = run_command("sandbox", "--listen", "127.0.0.1:0", "--token-file", str(file))
    assert (result.code, result.out) == (2, "")
    assert "Restrict it: chmod 600" in result.error_text
    assert TOKEN not in result.error_text


def test_a_token_for_metrics(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("token", "metrics")}
    for name, file in files.items():
        file.write_text(f"{name}-{TOKEN}\n")
        file.chmod(0o600)
    with server(
        tmp_path, "--token-file", files["token"], "--metrics-token-file", files["metrics"]
    ) as running:
        assert running.ask("GET", "/metrics", token=f"metrics-{TOKEN}")[0] == 200
        assert running.ask("POST", "/execute", b'{"code": "1"}', token=f"metrics-{TOKEN}")[0] == 401
        assert running.ask("GET", "/metrics", token=f"token-{TOKEN}")[0] == 200
    for other, expected in (
        ([], "requires --token-file"),
        (["--token-file", str(files["metrics"])], "must differ from the token"),
    ):
        result = run_command("sandbox", "--metrics-token-file", str(files["metrics"]), *other)
        assert result.code == 2
        assert expected in result.error_text


def test_it_says_what_it_serves(tmp_path: Path) -> None:
    """On standard error, below the address on standard output; with `--quiet` there is only the address."""
    path = tmp_path / "sock"
    text = ("--socket", path, "--log-format", "text", "--limits", "best-effort")
    with server(tmp_path, *text, listen=False, environ={"FUMEHOOD_SANDBOX_EGRESS": "allowlist"}) as running:
        assert running.ask("GET", "/health")[0] == 200
    rows = dict(re.findall(r"^  (\w+) +(.+)$", running.log.read_text(), re.MULTILINE))
    assert rows == {
        "sandboxes": "limits best-effort: memory may not be limited, 0 kept warm, at most 256",
        "token": "none, open to this machine",
        "packages": "callers and code may install them",
        "network": "allow-lists of any domain",
        "try": f"curl --unix-socket {path} http://localhost/execute -H 'content-type: application/json' "
        """-d '{"code": "print(6 * 7)"}'""",
    }
    with server(tmp_path, *text, "--quiet", "--log-level", "error", listen=False) as running:
        assert running.ask("GET", "/health")[0] == 200
    assert "  " not in running.log.read_text()


def test_its_default_port_is_not_the_gateways(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: ListenAddress) -> None:
        raise ListenError(f"asked for {address.host}:{address.port}")

    monkeypatch.setattr("fumehood.http_server.listening_sockets.listen", refuse)
    assert run_command("sandbox").err == "asked for 127.0.0.1:8090"
    assert run_command("serve").err == "asked for 127.0.0.1:8080"


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        result = command("--listen", place)
    assert result.returncode == 125
    assert result.stderr == (
        f"Cannot listen on {place}: Address already in use. Choose another port, or 0 for any.\n"
    )


def _started(running: SandboxServerProcess, code: str) -> socket.socket:
    """A connection on which an execution streams that has begun to run."""
    assert running.ask("PUT", "/sandboxes/a")[0] == 201
    sock = running.connect()
    running.send(sock, "POST", "/sandboxes/a/execute", json.dumps({"code": code}).encode())
    received = b""
    while b"begun" not in received:
        received += sock.recv(65536)
    return sock


def test_graceful_shutdown(tmp_path: Path) -> None:
    with server(tmp_path, "--grace", "20") as running:
        code = (
            "import os, time\nprint('begun', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.01)\n5"
        )
        with _started(running, code) as stream:
            running.signal()
            while (answer := running.ask("GET", "/health"))[0] == 200:
                time.sleep(0.01)
            assert (answer[0], json.loads(answer[1])["status"]) == (503, "stopping")
            status, body = running.ask("PUT", "/sandboxes/b")
            assert (status, json.loads(body)["error"]["code"]) == (503, "unreachable")
            assert running.ask("POST", "/sandboxes/a/execute", b'{"code": "1"}')[0] == 503
            assert running.ask("POST", "/execute", b'{"code": "1"}')[0] == 503
            assert running.ask("PUT", "/sandboxes/a/files/go")[0] == 200
            rest = read_rest(stream)
        assert b'"status":"ok"' in rest
        assert running.process.wait(TIMEOUT_SECONDS) == 0


def test_shutdown_interrupts_running_code(tmp_path: Path) -> None:
    with server(tmp_path, "--grace", "0.2") as running:
        with _started(running, "print('begun', flush=True)\nwhile True: pass") as stream:
            running.signal()
            rest = read_rest(stream)
        assert b'"status":"interrupted"' in rest
        assert running.process.wait(TIMEOUT_SECONDS) == 0


def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    with server(tmp_path, "--grace", "1000") as running:
        with _started(running, "print('begun', flush=True)\nwhile True: pass") as stream:
            running.signal()
            while running.ask("GET", "/health")[0] == 200:
                time.sleep(0.01)
            running.signal()
            rest = read_rest(stream)
        assert b'"type":"end"' in rest
        assert running.process.wait(TIMEOUT_SECONDS) == 0


def test_text_logs(tmp_path: Path) -> None:
    with server(tmp_path, "--log-format", "text") as running:
        assert running.ask("PUT", "/sandboxes/a")[0] == 201
        running.signal()
        assert running.process.wait(TIMEOUT_SECONDS) == 0
    lines = running.log.read_text().splitlines()
    assert any(
        re.search(r" info    sandbox_created sandbox=a tenant=\"\" memory=1g ", line) for line in lines
    )


def test_a_token_from_the_environment_is_not_inherited(tmp_path: Path) -> None:
    with server(tmp_path, environ={TOKEN_VARIABLE: TOKEN}) as running:
        assert running.ask("GET", "/sandboxes")[0] == 401
        assert running.ask("GET", "/sandboxes", token=TOKEN)[0] == 200
        children = (
            Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children").read_text().split()
        )
        assert children
        for child in children:
            assert TOKEN.encode() not in Path(f"/proc/{child}/environ").read_bytes()
        assert os.environ.get(TOKEN_VARIABLE) is None


def test_without_descriptors_connections_are_refused_and_that_is_logged_once(tmp_path: Path) -> None:
    with server(tmp_path) as running, ExitStack() as stack:
        with exhaust_descriptors(running.process.pid, 20):
            connections = [stack.enter_context(running.connect()) for _ in range(60)]
            answers = [ask(connection, b"/health") for connection in connections]
            statuses = [answer[9:12] for answer in answers]
            assert statuses.count(b"200") >= 10
            assert statuses.count(b"503") > 0
            assert {*statuses} <= {b"200", b"503", b""}
        assert ask(stack.enter_context(running.connect()), b"/health")[9:12] == b"200"
        assert running.log.read_text().count("Rejecting connections") == 1
        assert "Traceback" not in running.log.read_text()
