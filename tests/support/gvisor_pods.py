"""Pods whose containers run in one gVisor sandbox, started by `runsc` as the containerd shim starts them.

FUMEHOOD_RUNSC names the program, FUMEHOOD_RUNSC_PLATFORM its platform (`systrap`, or `ptrace` of old versions).
"""

import asyncio
import json
import os
import secrets
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, Self

from tests.support.pods import TOKEN, PodOptions
from tests.support.sandbox_server import SandboxApiClient

ROOT = Path(__file__).parents[2]
RUNSC = os.environ.get("FUMEHOOD_RUNSC", "runsc")
_PROGRAMS = Path(sys.executable).parent
_GROUP = 10000
_PORT = 8080
_READY_SECONDS = 120
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc/ssl", "/etc/resolv.conf")
_SHARED = {
    "code-socket": "/run/fumehood/code",
    "egress-socket": "/run/fumehood/egress",
    "packages": "/opt/packages",
}


@cache
def find_obstacle() -> str | None:
    """Why pods cannot run in gVisor here; None if they can."""
    if os.geteuid() != 0:
        return "runsc needs root"
    if shutil.which(RUNSC) is None:
        return f"{RUNSC} is not installed (apt-get install runsc), or set FUMEHOOD_RUNSC"
    if shutil.which("ip") is None:
        return "ip (iproute2) is not installed"
    return None


@cache
def choose_platform() -> str:
    """Return the platform of runsc that needs no KVM."""
    if chosen := os.environ.get("FUMEHOOD_RUNSC_PLATFORM"):
        return chosen
    version = subprocess.run([RUNSC, "--version"], capture_output=True, text=True, check=True).stdout
    return "ptrace" if "2022" in version.splitlines()[0] else "systrap"


class GvisorPod:
    """A pod with a network namespace of its own, which the host reaches over a pair of interfaces."""

    def __init__(self, directory: Path, options: PodOptions) -> None:
        self._id = f"fh{secrets.token_hex(4)}"
        self.directory = directory / self._id
        self.directory.mkdir()
        self.directory.chmod(0o755)
        self._options = options
        number = int.from_bytes(os.urandom(2))
        self._addresses = (
            f"10.213.{number >> 8}.{number & 252 | 1}",
            f"10.213.{number >> 8}.{number & 252 | 2}",
        )
        self.url = f"http://{self._addresses[1]}:{_PORT}"
        self._containers: list[str] = []
        token = self.directory / "token"
        token.mkdir()
        (token / "token").write_text(TOKEN)
        os.chown(token / "token", 0, _GROUP)
        (token / "token").chmod(0o440)

    # ---- start and end ----------------------------------------------------------------------------------------

    async def start(self) -> Self:
        await asyncio.to_thread(self._start)
        async with SandboxApiClient(self.url, TOKEN).session as session, asyncio.timeout(_READY_SECONDS):
            while True:
                try:
                    async with session.get(f"{self.url}/health") as response:
                        if response.status == 200:
                            return self
                except OSError:
                    pass
                await asyncio.sleep(0.05)

    def _start(self) -> None:
        mine, theirs = self._addresses
        for command in (
            f"ip netns add {self._id}",
            f"ip link add {self._id} type veth peer name eth0 netns {self._id}",
            f"ip addr add {mine}/30 dev {self._id}",
            f"ip link set {self._id} up",
            f"ip -n {self._id} addr add {theirs}/30 dev eth0",
            f"ip -n {self._id} link set lo up",
            f"ip -n {self._id} link set eth0 up",
            f"ip -n {self._id} route add default via {mine}",
        ):
            subprocess.run(command.split(), check=True)
        self._run_container("pause", ["/usr/bin/sleep", "infinity"], 65535, [], {})
        self._run_container("code", *self._describe("code"))
        if self._options.has_egress:
            self._run_container("egress", *self._describe("egress"))
        self._run_container("server", *self._describe("server"))

    def _run_container(
        self, name: str, command: list[str], user: int, mounts: list[dict[str, Any]], environ: dict[str, str]
    ) -> None:
        bundle = self.directory / name
        (bundle / "rootfs").mkdir(parents=True)
        identity = f"{self._id}-{name}"
        annotations = {"io.kubernetes.cri.container-type": "sandbox" if name == "pause" else "container"}
        annotations |= {
            "io.kubernetes.cri.sandbox-id": f"{self._id}-pause",
            "io.kubernetes.cri.container-name": name,
        }
        for volume in _SHARED:
            hint = f"dev.gvisor.spec.mount.{volume}"
            source = str(self.directory / volume)
            Path(source).mkdir(exist_ok=True)
            annotations |= {f"{hint}.source": source, f"{hint}.type": "tmpfs", f"{hint}.share": "pod"}
            annotations |= {f"{hint}.options": "rw"}
        read_only = ["ro", "rbind"]
        bases = [*_SYSTEM, sys.base_prefix, str(ROOT)]
        spec = {
            "ociVersion": "1.0.0",
            "process": {
                "user": {"uid": user, "gid": _GROUP},
                "args": command,
                "env": [
                    f"{key}={value}"
                    for key, value in {"PATH": f"{_PROGRAMS}:/usr/bin:/bin", **environ}.items()
                ],
                "cwd": "/",
                "noNewPrivileges": True,
                "capabilities": {},
            },
            "root": {"path": str(bundle / "rootfs"), "readonly": True},
            "hostname": "pod",
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
                *[
                    {
                        "destination": path,
                        "type": "bind",
                        "source": os.path.realpath(path),
                        "options": read_only,
                    }
                    for path in bases
                    if os.path.exists(path)
                ],
                *mounts,
            ],
            "linux": {
                "namespaces": [
                    *[{"type": kind} for kind in ("pid", "mount", "ipc", "uts")],
                    {"type": "network", "path": f"/run/netns/{self._id}"},
                ]
            },
            "annotations": annotations,
        }
        (bundle / "config.json").write_text(json.dumps(spec))
        self._containers.append(identity)
        with open(self.directory / f"{name}.log", "wb") as log:
            for verb in (("create", "--bundle", str(bundle)), ("start",)):
                done = self._runsc(*verb, identity, output=log)
                assert done.returncode == 0, (self.directory / f"{name}.log").read_text()

    def _runsc(self, *arguments: str, output: Any = subprocess.DEVNULL) -> subprocess.CompletedProcess[bytes]:
        # Versions up to 2024 take a namespace in which rmem_default is visible for the host's; newer kernels show it in
        # all. The mount is seen in this namespace only.
        hide = 'mount -t tmpfs none /proc/sys/net/core && exec "$@"'
        command = ["ip", "netns", "exec", self._id, "sh", "-c", hide, "sh"]
        command += [RUNSC, "--root", str(self.directory / "runsc"), "--platform", choose_platform()]
        command += ["--ignore-cgroups", "--network", "sandbox", *arguments]
        return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False)

    def _describe(self, name: str) -> tuple[list[str], int, list[dict[str, Any]], dict[str, str]]:
        """Command, user, mounts and environment, as in deploy/kubernetes."""
        python = sys.executable
        match name:
            case "server":
                command = [
                    *(python, str(_PROGRAMS / "fumehood"), "sandbox", "--mode", "pod"),
                    *("--listen", f"0.0.0.0:{_PORT}", "--token-file", "/run/secrets/fumehood/token"),
                    *("--guest-socket", "/run/fumehood/code/guest.sock", "--log-format", "json"),
                    *("--preload", self._options.preload, *self._options.options),
                ]
                environ = {
                    "FUMEHOOD_SANDBOX_POD_MEMORY": "1g",
                    "FUMEHOOD_SANDBOX_STATE_DIR": "/run/fumehood/state",
                }
                if self._options.has_egress:
                    environ["FUMEHOOD_SANDBOX_EGRESS_SOCKET"] = "/run/fumehood/egress/egress.sock"
                token = {"destination": "/run/secrets/fumehood", "type": "bind", "options": ["ro"]}
                mounts = [
                    {**token, "source": str(self.directory / "token")},
                    _own_tmpfs("/run/fumehood/state"),
                ]
                mounts += [self._share("code-socket"), self._share("egress-socket")]
                return command, 10001, mounts, {**environ, **self._options.environment}
            case "egress":
                command = [python, "-m", "fumehood.sandbox_server.pod.egress_entrypoint"]
                mounts = [self._share("egress-socket"), self._share("packages")]
                environ = dict(self._options.egress_environment)
                return [*command, "/run/fumehood/egress/egress.sock"], 10002, mounts, environ
            case _:
                command = [python, "-m", "fumehood.sandbox_server.inside.pod_entrypoint"]
                mounts = [self._share("code-socket"), self._share("packages", "ro")]
                mounts += [_own_tmpfs(path) for path in ("/mnt/data", "/tmp", "/home/user", "/dev/shm")]
                return [*command, "/run/fumehood/code/guest.sock"], 10003, mounts, {}

    def _share(self, volume: str, *options: str) -> dict[str, Any]:
        source = str(self.directory / volume)
        return {"destination": _SHARED[volume], "type": "tmpfs", "source": source, "options": [*options]}

    def read_log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()

    async def stop(self) -> None:
        await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        for identity in reversed(self._containers):
            self._runsc("kill", "--all", identity, "KILL")
            self._runsc("delete", "--force", identity)
        for command in (f"ip link del {self._id}", f"ip netns del {self._id}"):
            subprocess.run(command.split(), check=False, stderr=subprocess.DEVNULL)
        shutil.rmtree(self.directory, ignore_errors=True)


def _own_tmpfs(path: str) -> dict[str, Any]:
    return {"destination": path, "type": "tmpfs", "source": "tmpfs", "options": ["rw", "mode=0777"]}
