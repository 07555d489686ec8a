"""Runs images under a containerd of its own, as a compose file or a pod describes the containers."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

PROGRAMS = ("containerd", "ctr", "runc", "ip")
_REQUEST = """
import json, sys, urllib.error, urllib.request
method, url, headers, body = json.load(sys.stdin)
request = urllib.request.Request(url, body.encode() if body else None, headers, method=method)
try:
    with urllib.request.urlopen(request, timeout=60) as response:
        print(json.dumps([response.status, response.read().decode()]))
except urllib.error.HTTPError as error:
    print(json.dumps([error.code, error.read().decode()]))
"""

type Json = dict[str, Any]


@dataclass
class ContainerSettings:
    """What a compose file or a pod says about a container; the rest is the image's, and Docker's defaults."""

    image: str
    args: list[str]
    environment: dict[str, str] = field(default_factory=dict[str, str])
    user: tuple[int, int] = (10001, 10000)
    capabilities: Sequence[str] = ()
    seccomp: bool = True
    masks_paths: bool = True
    binds: dict[str, tuple[Path, str]] = field(default_factory=dict[str, tuple[Path, str]])
    tmpfs: dict[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    memory_bytes: int | None = None
    pids: int | None = None


class RunningContainer:
    def __init__(self, containerd: "Containerd", name: str, log: Path) -> None:
        self._containerd = containerd
        self.name = name
        self._log = log
        self._execs = 0

    def read_log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for_exit(self, seconds: float = 60) -> str:
        """Returns what it printed."""
        deadline = time.monotonic() + seconds
        while self._containerd.read_status(self.name) != "STOPPED":
            assert time.monotonic() < deadline, self.read_log()
            time.sleep(0.1)
        return self.read_log()

    def exec(self, *args: str) -> "subprocess.CompletedProcess[str]":
        """Run a command in the container."""
        self._execs += 1
        return self._containerd.run_ctr(
            "tasks", "exec", "--exec-id", f"exec{self._execs}", self.name, *args, check=False
        )

    def wait_until_healthy(self, check: Sequence[str], seconds: float = 60) -> None:
        """Run the health check, as Docker does, until it succeeds."""
        deadline = time.monotonic() + seconds
        while (done := self.exec(*check)).returncode != 0:
            status = self._containerd.read_status(self.name)
            assert time.monotonic() < deadline, f"{self.name}: {done.stderr}\n{status}\n{self.read_log()}"
            time.sleep(0.5)


class Containerd:
    """A daemon with everything below one directory. Needs root and PROGRAMS."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._roots: dict[str, Path] = {}
        self._started: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        config = self.directory / "config.toml"
        config.write_text(
            f'version = 2\nroot = "{self.directory}/root"\nstate = "{self.directory}/state"\n'
            f'disabled_plugins = ["io.containerd.grpc.v1.cri"]\n[grpc]\naddress = "{self.directory}/sock"\n'
        )
        with (self.directory / "containerd.log").open("wb") as log:
            self._process = subprocess.Popen(["containerd", "--config", str(config)], stderr=log, stdout=log)
        deadline = time.monotonic() + 30
        while self.run_ctr("version", check=False).returncode != 0:
            assert time.monotonic() < deadline, (self.directory / "containerd.log").read_text()
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._started:
            self.stop(name)
        for root in self._roots.values():
            self.run_ctr("images", "unmount", "--rm", str(root), check=False)
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(30)

    def run_ctr(self, *args: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        command = ["ctr", "--address", f"{self.directory}/sock", *args]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)
        assert done.returncode == 0 or not check, f"{command}: {done.stderr}"
        return done

    def read_status(self, name: str) -> str | None:
        """RUNNING, STOPPED …, or None if there is no such container."""
        rows = [line.split() for line in self.run_ctr("tasks", "list").stdout.splitlines()]
        return next((row[2] for row in rows if row[0] == name), None)

    def import_image(self, archive: Path) -> None:
        self.run_ctr("images", "import", str(archive))

    def read_image_config(self, archive: Path) -> Json:
        """The configuration in a Docker archive."""
        (manifest,) = json.loads(_read_member(archive, "manifest.json"))
        return json.loads(_read_member(archive, manifest["Config"]))

    def start(self, name: str, settings: ContainerSettings, network: str) -> RunningContainer:
        """Start a container in a network namespace."""
        spec = self._make_spec(settings, network)
        folder = self.directory / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(spec))
        log = folder / "log"
        self.run_ctr(
            "run", "--detach", "--config", str(folder / "config.json"), "--log-uri", f"file://{log}", name
        )
        self._started.append(name)
        return RunningContainer(self, name, log)

    def stop(self, name: str) -> None:
        self.run_ctr("tasks", "kill", "--signal", "SIGKILL", "--all", name, check=False)
        deadline = time.monotonic() + 20
        while self.run_ctr("tasks", "delete", name, check=False).returncode and time.monotonic() < deadline:
            time.sleep(0.1)
        self.run_ctr("containers", "delete", name, check=False)

    def _find_root(self, image: str) -> Path:
        if image not in self._roots:
            root = Path(tempfile.mkdtemp(dir=self.directory))
            self.run_ctr("images", "mount", "--rw", image, str(root))  # the runtime makes mount points
            self._roots[image] = root
        return self._roots[image]

    def _make_spec(self, settings: ContainerSettings, network: str) -> Json:
        spec = _default_spec()
        uid, gid = settings.user
        capabilities = [f"CAP_{name}" for name in settings.capabilities]
        spec["root"] = {"path": str(self._find_root(settings.image)), "readonly": True}
        spec["process"] |= {
            "terminal": False,
            "user": {"uid": uid, "gid": gid, "umask": 0o022},
            "args": settings.args,
            "env": [f"{name}={value}" for name, value in settings.environment.items()],
            "cwd": "/",
            "noNewPrivileges": True,
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
        }
        spec["mounts"] += _make_mounts(settings)
        linux = spec["linux"]
        linux["namespaces"] = [
            *(entry for entry in linux["namespaces"] if entry["type"] not in ("network", "cgroup")),
            {"type": "network", "path": f"/run/netns/{network}"},
            {"type": "cgroup"},
        ]
        if settings.seccomp:
            linux["seccomp"] = self._read_default_seccomp(settings)
        if not settings.masks_paths:
            linux["maskedPaths"] = linux["readonlyPaths"] = []
        resources = linux.setdefault("resources", {})
        if settings.memory_bytes is not None:
            resources["memory"] = {"limit": settings.memory_bytes}
        if settings.pids is not None:
            resources["pids"] = {"limit": settings.pids}
        return spec

    def _read_default_seccomp(self, settings: ContainerSettings) -> Json:
        """The filter that containerd gives a container; Docker's is alike."""
        self.run_ctr("containers", "create", "--seccomp", settings.image, "filter")
        try:
            described = json.loads(self.run_ctr("containers", "info", "filter").stdout)
        finally:
            self.run_ctr("containers", "delete", "filter")
        return described["Spec"]["linux"]["seccomp"]


def _default_spec() -> Json:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["runc", "spec"], cwd=folder, check=True)
        return json.loads((Path(folder) / "config.json").read_text())


def _make_mounts(settings: ContainerSettings) -> Iterator[Json]:
    for target, options in settings.tmpfs.items():
        yield {
            "destination": target,
            "type": "tmpfs",
            "source": "tmpfs",
            "options": ["nosuid", "nodev", *options],
        }
    for target, (source, mode) in settings.binds.items():
        yield {
            "destination": target,
            "type": "bind",
            "source": str(source),
            "options": ["rbind", mode, "nosuid", "nodev"],
        }


def _read_member(archive: Path, name: str) -> bytes:
    return subprocess.run(
        ["tar", "--extract", "--to-stdout", "--file", archive, name], capture_output=True, check=True
    ).stdout


class LinkedNetworks:
    """Two network namespaces with a link between them, as two containers on one bridge."""

    ADDRESSES = ("10.199.17.1", "10.199.17.2")

    def __init__(self) -> None:
        self.names = tuple(f"fumehood-{os.getpid()}-{index}" for index in range(2))

    def __enter__(self) -> Self:
        first, second = self.names
        for name in self.names:
            _run_ip("netns", "add", name)
            _run_ip("-n", name, "link", "set", "lo", "up")
        _run_ip(
            "link", "add", "eth0", "netns", first, "type", "veth", "peer", "name", "eth0", "netns", second
        )
        for name, address in zip(self.names, self.ADDRESSES, strict=True):
            _run_ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            _run_ip("-n", name, "link", "set", "eth0", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            with contextlib.suppress(subprocess.CalledProcessError):
                _run_ip("netns", "delete", name)

    def request(
        self,
        network: str,
        method: str,
        url: str,
        headers: Mapping[str, str] | None = None,
        body: object = None,
    ) -> tuple[int, str]:
        """Send a request from one of the namespaces; returns status and body."""
        message = [method, url, dict(headers or {}), None if body is None else json.dumps(body)]
        done = subprocess.run(
            ["ip", "netns", "exec", network, sys.executable, "-c", _REQUEST],
            input=json.dumps(message),
            capture_output=True,
            text=True,
            check=False,
            timeout=90,
        )
        assert done.returncode == 0, done.stderr
        status, text = json.loads(done.stdout)
        return status, text


def _run_ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True)


def find_missing_programs() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name) is None]
