"""Builds the programs of the cluster from pinned Go modules, and keeps them for the next time."""

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tools.kubernetes_cluster.layout import ClusterError

_MODULES = Path(__file__).resolve().parent / "modules"


def read_version(module: str, required: str) -> str:
    """Which version the module of ours in this directory requires."""
    text = (_MODULES / module / "go.mod").read_text()
    found = re.search(rf"^(?:require)?\s*{re.escape(required)} (v\S+)", text, re.MULTILINE)
    if not found:
        raise ClusterError(f"{_MODULES / module / 'go.mod'} does not require {required}.")
    return found[1]


KUBERNETES_VERSION = read_version("kubernetes", "k8s.io/kubernetes")
AGENT_SANDBOX_VERSION = read_version("agent_sandbox", "sigs.k8s.io/agent-sandbox")


@dataclass(frozen=True)
class GoModule:
    """A directory below `modules` with a go.mod.

    programs: the name of each program, and its package.
    variables: what the linker sets.
    folder_of, folders: a module that it requires, and folders of that to keep beside the programs.
    """

    name: str
    programs: Mapping[str, str]
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    folder_of: str = ""
    folders: tuple[str, ...] = ()


def _version_variables() -> dict[str, str]:
    """`go build` knows no version of what it takes from the module cache, and the API server reports one."""
    major, minor, _ = KUBERNETES_VERSION.removeprefix("v").split(".")
    values = {"gitVersion": KUBERNETES_VERSION, "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    packages = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    return {f"{package}.{name}": value for package in packages for name, value in values.items()}


_KUBERNETES = (
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
    "kube-proxy",
    "kubectl",
)
MODULES = (
    GoModule("images", {name: f"./{name}" for name in ("pause", "answer")}),
    GoModule("etcd", {"etcd": "go.etcd.io/etcd/server/v3"}),
    GoModule(
        "agent_sandbox",
        {"agent-sandbox-controller": "sigs.k8s.io/agent-sandbox/cmd/agent-sandbox-controller"},
        folder_of="sigs.k8s.io/agent-sandbox",
        folders=("k8s",),
    ),
    GoModule(
        "kubernetes",
        {name: f"k8s.io/kubernetes/cmd/{name}" for name in _KUBERNETES},
        variables=_version_variables(),
    ),
)


@dataclass(frozen=True)
class Binaries:
    """programs: where each program is. manifests: the `k8s` folder of agent-sandbox."""

    programs: Mapping[str, Path]
    manifests: Path

    def __getitem__(self, name: str) -> str:
        return str(self.programs[name])


def build_binaries() -> Binaries:
    """Takes minutes of two processors the first time, and nothing after that."""
    if shutil.which("go") is None:
        raise ClusterError("There is no `go`; install Go 1.26 or later: https://go.dev/doc/install")
    directories = {module.name: _build(module) for module in MODULES}
    programs = {name: directories[module.name] / name for module in MODULES for name in module.programs}
    return Binaries(programs, directories["agent_sandbox"] / "k8s")


def _cache() -> Path:
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fumehood" / "kubernetes-cluster"
    )


def _build(module: GoModule) -> Path:
    """The directory with its programs."""
    source = _MODULES / module.name
    target = _cache() / f"{module.name}-{_key(module, source)}"
    if target.is_dir():
        return target
    print(f"Building {', '.join(module.programs)} …", flush=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=target.parent, prefix=f"{module.name}-"))
    try:
        flags = " ".join(["-s -w", *(f"-X {name}={value}" for name, value in module.variables.items())])
        command = [
            "go",
            "build",
            "-p",
            "2",
            "-trimpath",
            "-buildvcs=false",
            "-ldflags",
            flags,
            "-o",
            f"{partial}/",
        ]
        _run_go(["nice", "-n", "19", *command, *module.programs.values()], source)
        for name, package in module.programs.items():
            built = partial / _program_name(package)
            built.rename(partial / name)
        if module.folder_of:
            origin = _run_go(["go", "list", "-m", "-f", "{{.Dir}}", module.folder_of], source).strip()
            for folder in module.folders:
                shutil.copytree(Path(origin) / folder, partial / folder, copy_function=shutil.copyfile)
        partial.chmod(0o755)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return target


def _key(module: GoModule, source: Path) -> str:
    digest = hashlib.sha256(repr(module).encode())
    digest.update(_run_go(["go", "version"], source).encode())
    for file in sorted(path for path in source.rglob("*") if path.is_file()):
        digest.update(f"{file.relative_to(source)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _program_name(package: str) -> str:
    """What Go calls the program of a package: its last part that is no version."""
    parts = [part for part in package.split("/") if not (part[:1] == "v" and part[1:].isdigit())]
    return parts[-1]


def _run_go(command: list[str], directory: Path) -> str:
    environment = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly", "GOWORK": "off"}
    done = subprocess.run(
        command, cwd=directory, env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise ClusterError(f"`{' '.join(command[:6])} …` failed in {directory}; it says why above.")
    return done.stdout
