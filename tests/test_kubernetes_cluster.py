"""The program that makes a Kubernetes cluster for tests, as far as it can be tested without one."""

import hashlib
import http.client
import http.server
import json
import os
import re
import shutil
import ssl
import tarfile
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any, override

import pytest
from cryptography import x509

from tools.kubernetes_cluster import binaries, certificates, cluster, images, node
from tools.kubernetes_cluster.components import write_configuration
from tools.kubernetes_cluster.health import answers, listens
from tools.kubernetes_cluster.layout import ClusterError, Layout

_MODULES = Path(binaries.__file__).parent / "modules"


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    layout = Layout(tmp_path / "state")
    for directory in (layout.logs, layout.certificates, layout.config, layout.data):
        directory.mkdir(parents=True)
    return layout


# --- what is built --------------------------------------------------------------------------------------


def test_every_staging_module_of_kubernetes_has_the_version_that_belongs_to_it() -> None:
    text = (_MODULES / "kubernetes" / "go.mod").read_text()
    replaced = re.findall(r"^\tk8s\.io/(\S+) => k8s\.io/(\S+) (\S+)$", text, re.MULTILINE)
    assert len(replaced) == 31
    assert {new for old, new, _ in replaced if old != new} == set()
    expected = re.sub(r"^v1\.", "v0.", binaries.KUBERNETES_VERSION)
    assert {version for _, _, version in replaced} == {expected}


def test_every_module_is_pinned_by_checksums() -> None:
    for module in binaries.MODULES:
        text = (_MODULES / module.name / "go.mod").read_text()
        if "require" in text:
            assert (_MODULES / module.name / "go.sum").stat().st_size, module.name


def test_an_unknown_requirement_is_an_error() -> None:
    with pytest.raises(ClusterError, match="does not require"):
        binaries.read_version("etcd", "k8s.io/kubernetes")


def test_without_go_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterError, match=r"install Go"):
        binaries.build_binaries()


# --- certificates ---------------------------------------------------------------------------------------


class _Server(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/readyz" else 500)
        self.end_headers()
        assert isinstance(self.connection, ssl.SSLSocket)
        self.wfile.write(json.dumps(self.connection.getpeercert() or {}).encode())

    @override
    def log_message(self, format: str, *args: Any) -> None:
        del format, args


@pytest.fixture
def tls_server(layout: Layout) -> Generator[int]:
    """The port of a server with the API server's certificate; it tells a client whose certificate it has accepted."""
    certificates.write_credentials(layout)
    directory = layout.certificates
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(directory / "ca.crt"))
    context.load_cert_chain(directory / "kube-apiserver.crt", directory / "kube-apiserver.key")
    context.verify_mode = ssl.CERT_OPTIONAL
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_kubeconfig_has_credentials_that_the_api_server_accepts(layout: Layout, tls_server: int) -> None:
    tree = json.loads(layout.kubeconfig.read_text())
    user, server = tree["users"][0]["user"], tree["clusters"][0]["cluster"]
    context = ssl.create_default_context(cafile=server["certificate-authority"])
    context.verify_flags |= ssl.VERIFY_X509_STRICT  # as in Python 3.13
    context.load_cert_chain(user["client-certificate"], user["client-key"])
    connection = http.client.HTTPSConnection("127.0.0.1", tls_server, context=context, timeout=10)
    connection.request("GET", "/readyz")
    seen = json.loads(connection.getresponse().read())
    connection.close()
    assert seen["subject"] == [[["organizationName", "system:masters"]], [["commonName", "admin"]]]
    assert layout.kubeconfig.stat().st_mode & 0o077 == 0
    assert Path(user["client-key"]).stat().st_mode & 0o077 == 0


def test_kubelet_is_known_as_its_node(layout: Layout) -> None:
    certificates.write_credentials(layout)
    read = x509.load_pem_x509_certificate((layout.certificates / "kubelet.crt").read_bytes())
    assert read.subject.rfc4514_string() == "CN=system:node:node,O=system:nodes"


def test_health_is_what_the_component_says(tls_server: int, tmp_path: Path) -> None:
    assert answers(f"https://127.0.0.1:{tls_server}/readyz")
    assert not answers(f"https://127.0.0.1:{tls_server}/other")
    assert not answers("http://127.0.0.1:9/readyz")
    assert not listens(tmp_path / "nobody.sock")


# --- images and files -----------------------------------------------------------------------------------


def test_an_image_has_the_program_and_correct_digests(tmp_path: Path) -> None:
    program = tmp_path / "pause"
    program.write_bytes(b"\x7fELF" * 1000)
    images.write_image(program, "fumehood.test/pause:1", tmp_path / "image.tar")
    with tarfile.open(tmp_path / "image.tar") as archive:
        content = {entry.name: _extract(archive, entry) for entry in archive.getmembers()}
    blobs = {name.removeprefix("blobs/sha256/"): data for name, data in content.items() if "/" in name}
    assert {hashlib.sha256(data).hexdigest() for data in blobs.values()} == set(blobs)

    def blob(entry: dict[str, Any]) -> bytes:
        data = blobs[entry["digest"].removeprefix("sha256:")]
        assert len(data) == entry["size"]
        return data

    entry = json.loads(content["index.json"])["manifests"][0]
    assert entry["annotations"]["io.containerd.image.name"] == "fumehood.test/pause:1"
    manifest = json.loads(blob(entry))
    assert json.loads(blob(manifest["config"]))["config"]["Entrypoint"] == ["/pause"]
    (tmp_path / "layer.tar").write_bytes(blob(manifest["layers"][0]))
    with tarfile.open(tmp_path / "layer.tar") as layer:
        member = layer.getmember("pause")
        assert member.mode == 0o755
        assert _extract(layer, member) == program.read_bytes()


def _extract(archive: tarfile.TarFile, entry: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(entry)
    assert file is not None
    return file.read()


def test_kubelet_and_containerd_agree(layout: Layout) -> None:
    write_configuration(layout)
    kubelet = json.loads((layout.config / "kubelet.json").read_text())
    containerd = (layout.config / "containerd.toml").read_text()
    assert kubelet["containerRuntimeEndpoint"] == f"unix://{layout.containerd_socket}"
    assert f'address = "{layout.containerd_socket}"' in containerd
    assert kubelet["cgroupDriver"] == "cgroupfs"
    assert "SystemdCgroup = false" in containerd


def test_a_path_that_no_socket_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="--state"):
        Layout(tmp_path / ("x" * 100))


# --- the node -------------------------------------------------------------------------------------------


def test_a_process_that_took_over_the_number_is_not_the_node(layout: Layout) -> None:
    assert node.find_node(layout) is None
    layout.node_record.write_text(json.dumps({"pid": os.getpid(), "started": "1"}))
    assert node.find_node(layout) is None
    node.stop_node(layout)  # would end this process if it were taken for the node


def test_without_a_node_there_is_no_network_to_join(layout: Layout) -> None:
    with pytest.raises(ClusterError, match="kubernetes_cluster up"):
        node.join_network(layout)


def test_stopping_leaves_the_logs_and_nothing_else(layout: Layout) -> None:
    (layout.logs / "kubelet.log").write_text("a line")
    (layout.data / "target").mkdir()
    (layout.state / "link").symlink_to(layout.data)
    cluster.stop_cluster(layout)
    assert [path.name for path in layout.state.iterdir()] == ["logs"]
    assert (layout.logs / "kubelet.log").read_text() == "a line"


@pytest.mark.root
def test_missing_programs_are_named_with_their_packages(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = shutil.which

    def which(name: str, path: str | None = None) -> str | None:
        return None if name in {"runc", "ctr"} else found(name, path=path) or f"/usr/sbin/{name}"

    monkeypatch.setattr(shutil, "which", which)
    with pytest.raises(ClusterError, match=r"apt-get install .*containerd.* runc"):
        cluster.start_cluster(layout, 1.0, keep=False)


def test_a_component_that_ended_is_named_with_the_end_of_its_log(layout: Layout) -> None:
    assert node.ended_components(layout) == []
    (layout.state / "etcd.ended").write_text("1\n")
    assert node.ended_components(layout) == ["etcd"]
