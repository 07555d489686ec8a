"""Renders the kustomizations of deploy/kubernetes into deploy/kubernetes/rendered.

Run `python -m tools.render_kubernetes` after a change there; it needs kubectl or kustomize. The rendered files are for
reading, for clusters without kustomize, and for tests: these compare the digest of the sources, wherever they run.
"""

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "deploy" / "kubernetes"
RENDERED = ROOT / "rendered"
DIGEST_PREFIX = "# Digest of the sources: "


def find_kustomizations() -> dict[str, Path]:
    """Name and directory of each kustomization that can be applied."""
    overlays = sorted(path.parent for path in (ROOT / "overlays").glob("*/kustomization.yaml"))
    return {path.name: path for path in (ROOT / "base", *overlays)}


def find_kustomize() -> Sequence[str] | None:
    """The command that renders a directory, if there is one."""
    if shutil.which("kustomize"):
        return ("kustomize", "build")
    if shutil.which("kubectl"):
        return ("kubectl", "kustomize")
    return None


def render(command: Sequence[str], directory: Path) -> str:
    return subprocess.run([*command, str(directory)], capture_output=True, check=True, text=True).stdout


def compute_digest() -> str:
    """Of the paths and contents of all sources."""
    digest = hashlib.sha256()
    for path in sorted(ROOT.rglob("*.yaml")):
        if not path.is_relative_to(RENDERED):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(ROOT).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def main() -> None:
    command = find_kustomize()
    if command is None:
        sys.exit("There is no kubectl and no kustomize on PATH: install one of them.")
    RENDERED.mkdir(exist_ok=True)
    for path in RENDERED.glob("*.yaml"):
        path.unlink()
    head = "# Rendered by `python -m tools.render_kubernetes`: change the sources.\n"
    head += f"{DIGEST_PREFIX}{compute_digest()}\n"
    for name, directory in find_kustomizations().items():
        (RENDERED / f"{name}.yaml").write_text(head + render(command, directory), encoding="utf-8")


if __name__ == "__main__":
    main()
