"""Makes container images of one static program, and imports images into the cluster's containerd."""

import hashlib
import io
import json
import platform
import subprocess
import tarfile
from pathlib import Path

from tools.kubernetes_cluster.layout import ClusterError, Layout

# Kubelet sees the images of this namespace of containerd.
_NAMESPACE = "k8s.io"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def write_image(program: Path, name: str, target: Path, user: str = "65532:65532") -> None:
    """An OCI image as an archive; it has nothing but the program, and runs that."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as archive:
        entry = tarfile.TarInfo(program.name)
        entry.size, entry.mode = program.stat().st_size, 0o755
        with program.open("rb") as content:
            archive.addfile(entry, content)
    blobs: dict[str, bytes] = {}

    def add(content: bytes, kind: str) -> dict[str, object]:
        digest = hashlib.sha256(content).hexdigest()
        blobs[digest] = content
        media = f"application/vnd.oci.image.{kind}"
        return {"mediaType": media, "digest": f"sha256:{digest}", "size": len(content)}

    layers = [add(layer.getvalue(), "layer.v1.tar")]
    config = {
        "architecture": _ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": {"Entrypoint": [f"/{program.name}"], "User": user, "WorkingDir": "/"},
        "rootfs": {"type": "layers", "diff_ids": [each["digest"] for each in layers]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": add(_encode(config), "config.v1+json"),
        "layers": layers,
    }
    # containerd names the image by the first annotation, other programs by the second.
    annotations = {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name}
    index = {
        "schemaVersion": 2,
        "manifests": [{**add(_encode(manifest), "manifest.v1+json"), "annotations": annotations}],
    }
    files = {f"blobs/sha256/{digest}": content for digest, content in blobs.items()}
    files |= {"oci-layout": _encode({"imageLayoutVersion": "1.0.0"}), "index.json": _encode(index)}
    with tarfile.open(target, "w") as archive:
        for path, content in files.items():
            entry = tarfile.TarInfo(path)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


def _encode(tree: object) -> bytes:
    return json.dumps(tree).encode()


def import_image(layout: Layout, archive: Path) -> list[str]:
    """The names of the images in the archive, OCI's or Docker's."""
    command = ["ctr", "--address", str(layout.containerd_socket), "--namespace", _NAMESPACE]
    command += ["images", "import", "--all-platforms", str(archive)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ClusterError(f"containerd did not take {archive}:\n{done.stderr}")
    return [line.split()[1] for line in done.stdout.splitlines() if line.startswith("unpacking ")]
