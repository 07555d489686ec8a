"""The tests' side of `supervisor_driver.py`: plain blocking calls.

with Driver.start(as_user="ordinary") as host:
    box = host.create()
    assert box.run("1 + 1").result == "2"
"""

import base64
import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

SUPPORT = Path(__file__).resolve().parent
PROJECT = SUPPORT.parents[1]
TIMEOUT = 90.0  # seconds; the machine is shared, a wait that long is a hang

type Who = Literal["root", "ordinary"]


class DriverError(Exception):
    """The driver answered that the request failed; `kind` is the exception's name there."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.text = text


class DriverGone(Exception):
    pass


@dataclass(frozen=True)
class End:
    status: str
    exit_code: int
    duration_ms: int
    state_kept: bool
    reason: str
    packages_ms: int


@dataclass
class Outcome:
    """One call's events, gathered."""

    end: End
    stdout: str = ""
    stderr: str = ""
    result: str | None = None
    error: str | None = None  # the exception's name
    error_value: str = ""
    displays: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    notes: list[str] = field(default_factory=list[str])
    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


class Running:
    """A request that was sent and may not be answered yet."""

    def __init__(self) -> None:
        self.arrived: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.events: list[dict[str, Any]] = []

    def next_event(self, timeout: float = TIMEOUT) -> dict[str, Any] | None:
        """The next event, or None when the answer is complete."""
        message = self.arrived.get(timeout=timeout)
        if message is None:
            raise DriverGone("the driver ended")
        if "error" in message:
            raise DriverError(message["error"], message["text"])
        if "event" not in message:
            self.answer = message["done"]
            return None
        self.events.append(message["event"])
        return message["event"]

    def wait(self, timeout: float = TIMEOUT) -> Any:
        while self.next_event(timeout) is not None:
            pass
        return self.answer

    def outcome(self, timeout: float = TIMEOUT) -> Outcome:
        self.wait(timeout)
        return gather(self.events)

    def until_stdout(self, text: str, timeout: float = TIMEOUT) -> None:
        """Wait until the code has printed `text`."""
        seen = ""
        while text not in seen:
            event = self.next_event(timeout)
            if event is None:
                raise AssertionError(f"the call ended before it printed {text!r}: {self.events[-3:]}")
            seen += event["text"] if event["type"] == "stdout" else ""


def gather(events: list[dict[str, Any]]) -> Outcome:
    last = events[-1]
    assert last["type"] == "end", f"the last event is {last['type']}"
    assert [event["type"] for event in events].count("end") == 1
    outcome = Outcome(End(**{key: value for key, value in last.items() if key != "type"}), events=events)
    for event in events[:-1]:
        match event["type"]:
            case "stdout":
                outcome.stdout += event["text"]
            case "stderr":
                outcome.stderr += event["text"]
            case "display":
                outcome.displays.append(event["data"])
            case "result":
                outcome.result = event["data"]["text/plain"]
            case "error":
                outcome.error, outcome.error_value = event["name"], event["value"]
            case "note":
                outcome.notes.append(event["text"])
            case unknown:
                raise AssertionError(f"unknown event {unknown}")
    return outcome


class SandboxClient:
    def __init__(self, driver: "Driver", name: str) -> None:
        self.driver = driver
        self.name = name

    def start(
        self, code: str, timeout: float = 30, requirements: tuple[str, ...] = (), language: str = "python"
    ) -> Running:
        return self.driver.send(
            "execute",
            sandbox=self.name,
            code=code,
            timeout=timeout,
            requirements=requirements,
            language=language,
        )

    def run(self, code: str, timeout: float = 30, requirements: tuple[str, ...] = ()) -> Outcome:
        return self.start(code, timeout, requirements).outcome(TIMEOUT + timeout)

    def shell(self, command: str, timeout: float = 30) -> Outcome:
        """Run a command."""
        return self.start(command, timeout, language="shell").outcome(TIMEOUT + timeout)

    def ask(self, code: str, timeout: float = 30) -> Any:
        """Run code that ends well and prints one JSON value last; that value."""
        outcome = self.run(code, timeout)
        assert outcome.end.status == "ok", (outcome.end, outcome.error, outcome.error_value, outcome.stderr)
        return json.loads(outcome.stdout.splitlines()[-1])

    def interrupt(self) -> None:
        self.driver.ask("interrupt", sandbox=self.name)

    def list_files(self) -> tuple[dict[str, int], bool]:
        """Sizes by path, and whether the listing was cut short."""
        answer = self.driver.ask("list_files", sandbox=self.name)
        return {entry["path"]: entry["size"] for entry in answer["files"]}, answer["cut"]

    def read_file(self, path: str, limit: int = 1 << 20) -> bytes:
        return base64.b64decode(self.driver.ask("read_file", sandbox=self.name, path=path, limit=limit))

    def write_file(self, path: str, content: bytes) -> None:
        encoded = base64.b64encode(content).decode()
        self.driver.ask("write_file", sandbox=self.name, path=path, content=encoded)

    def unpack(self, content: bytes, kind: str, into: str = "") -> dict[str, int]:
        encoded = base64.b64encode(content).decode()
        return self.driver.ask("unpack", sandbox=self.name, content=encoded, kind=kind, into=into)

    def delete_file(self, path: str) -> None:
        self.driver.ask("delete_file", sandbox=self.name, path=path)

    def members(self) -> list[int]:
        return self.driver.ask("members", sandbox=self.name)

    @property
    def gone(self) -> str | None:
        return self.driver.ask("gone", sandbox=self.name)

    def destroy(self) -> None:
        self.driver.ask("destroy", sandbox=self.name)


class Driver:
    """A running driver process; leaving the `with` ends it in good order."""

    def __init__(self, process: subprocess.Popen[bytes], who: Who, secret: str) -> None:
        self._process = process
        self.who: Who = who
        self.secret = secret
        self._lock = threading.Lock()
        self._number = 0
        self._waiting: dict[int, Running] = {0: Running()}
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.started: dict[str, Any] = self._waiting[0].wait()

    @classmethod
    def start(
        cls, who: Who, *, secret: str = "none", temporary: Path = Path("/tmp"), **settings: Any
    ) -> Self:
        command = [sys.executable, str(SUPPORT / "supervisor_driver.py"), "--settings", json.dumps(settings)]
        variables = {"FUMEHOOD_TEST_SECRET": secret, "PYTHONPATH": PROJECT / "src", "TMPDIR": temporary}
        command = ["env", *(f"{name}={value}" for name, value in variables.items()), *command]
        if who == "ordinary" and os.geteuid() == 0:
            delegate = [sys.executable, str(SUPPORT / "unprivileged_user.py"), "--delegate", "--"]
            command = delegate + command
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            return cls(process, who, secret)
        except BaseException:
            process.terminate()
            with process:  # closes its pipes and waits for it
                raise

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            with self._lock:
                running = self._waiting.get(message["id"])
                if "event" not in message:
                    self._waiting.pop(message["id"], None)
            if running is not None:
                running.arrived.put(message)
        with self._lock:
            self._ended = True
            for running in self._waiting.values():
                running.arrived.put(None)

    def send(self, op: str, **request: Any) -> Running:
        running = Running()
        assert self._process.stdin is not None
        with self._lock:
            if self._ended:
                raise DriverGone("the driver ended")
            self._number += 1
            self._waiting[self._number] = running
            body = json.dumps({"id": self._number, "op": op, **request}) + "\n"
            try:
                self._process.stdin.write(body.encode())
                self._process.stdin.flush()
            except BrokenPipeError:  # whoever listens to it has not noticed yet
                self._waiting.pop(self._number, None)
                raise DriverGone("the driver ended") from None
        return running

    def ask(self, op: str, *, wait_seconds: float = TIMEOUT, **request: Any) -> Any:
        return self.send(op, **request).wait(wait_seconds)

    def create(self, **spec: Any) -> SandboxClient:
        return SandboxClient(self, self.ask("create", **spec)["sandbox"])

    def info(self) -> dict[str, Any]:
        return self.ask("info")

    @property
    def pid(self) -> int:
        """Of the driver, or of what started it as another user."""
        return self._process.pid

    def kill(self) -> None:
        """As a crash would; nothing is put in order."""
        self._process.kill()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):  # BrokenPipeError: it is dead already
            self._process.stdin.close()
        self._process.wait(TIMEOUT)
        self._reader.join(TIMEOUT)
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
