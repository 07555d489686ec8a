"""The images that deploy/images/build.sh exports, under containerd, as deploy/compose and deploy/kubernetes run them.

Run by `make images`, as root.
"""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import fumehood
from tests.support.containerd import (
    Containerd,
    ContainerSettings,
    LinkedNetworks,
    find_missing_programs,
)

pytestmark = [pytest.mark.images, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parent.parent.parent
ARCHIVES = {name: ROOT / ".images" / f"{name}.tar" for name in ("gateway", "sandbox")}
COMPOSE = ROOT / "deploy" / "compose" / "compose.yaml"
RENDERED = ROOT / "deploy" / "kubernetes" / "rendered" / "base.yaml"
_SIZES = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}

type Json = dict[str, Any]


@pytest.fixture(scope="module")
def containerd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containerd]:
    assert os.geteuid() == 0, "containers need root: sudo make images"
    assert not find_missing_programs(), "apt-get install containerd runc iproute2"
    assert all(path.exists() for path in ARCHIVES.values()), "run deploy/images/build.sh first"
    with Containerd(tmp_path_factory.mktemp("containerd")) as daemon:
        for archive in ARCHIVES.values():
            daemon.import_image(archive)
        yield daemon


@pytest.fixture
def networks() -> Iterator[LinkedNetworks]:
    with LinkedNetworks() as linked:
        yield linked


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """The token of the sandbox server, as docs/deployment.md creates it."""
    path = tmp_path / "sandbox-token"
    path.write_text("0123456789abcdef0123456789abcdef")
    os.chown(path, 0, 10000)
    path.chmod(0o440)
    return path


def _image_config(containerd: Containerd, name: str) -> Json:
    return containerd.read_image_config(ARCHIVES[name])["config"]


def _image_environment(containerd: Containerd, name: str) -> dict[str, str]:
    return dict(entry.split("=", 1) for entry in _image_config(containerd, name)["Env"])


@pytest.mark.parametrize("name", ARCHIVES)
def test_image_says_what_it_is(containerd: Containerd, name: str) -> None:
    config = _image_config(containerd, name)
    assert config["User"] == "10001:10000"
    assert config["ExposedPorts"] == {"8080/tcp": {}}
    assert config["Healthcheck"]["Test"][0] == "CMD"
    labels = config["Labels"]
    assert labels["org.opencontainers.image.version"] == fumehood.__version__
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert labels["org.opencontainers.image.title"] == f"Fumehood {name}"


# --- deploy/compose ---------------------------------------------------------------------------------------------------


def _to_settings(
    containerd: Containerd, name: str, secret: Path, folder: Path, hosts: Path
) -> ContainerSettings:
    """A service of the compose file. Volumes are directories that begin as those of the image, as Docker makes them."""
    service = yaml.safe_load(COMPOSE.read_text())["services"][name]
    config = _image_config(containerd, name)
    options = service["security_opt"]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in options
    args = [*service.get("entrypoint", config["Entrypoint"]), *service["command"]]
    environment = {key: value for key, value in service["environment"].items() if "$" not in value}
    uid, gid = service.get("user", config["User"]).split(":")
    settings = ContainerSettings(
        image=f"localhost/fumehood-{name}:{fumehood.__version__}",
        args=[arg.replace("$$", "$") for arg in args],
        environment=_image_environment(containerd, name) | environment,
        user=(int(uid), int(gid)),
        capabilities=service.get("cap_add", ()),
        seccomp="seccomp=unconfined" not in options,
        masks_paths="systempaths=unconfined" not in options,
        tmpfs={entry.partition(":")[0]: ["mode=1777", entry.partition(":")[2]] for entry in service["tmpfs"]},
        memory_bytes=int(service["mem_limit"][:-1]) * _SIZES[service["mem_limit"][-1]],
        pids=service["pids_limit"],
    )
    settings.binds["/etc/hosts"] = (hosts, "ro")
    for entry in service["volumes"]:
        source, target, *mode = entry.split(":")
        path = COMPOSE.parent / source
        if not source.startswith("."):
            path = folder / source
            path.mkdir(mode=0o700)
            os.chown(path, 10001, 10000)
        settings.binds[target] = (path, mode[0] if mode else "rw")
    settings.binds["/run/secrets/sandbox-token"] = (secret, "ro")
    return settings


def _ask(networks: LinkedNetworks, key: str, code: str) -> Json:
    """A turn of the model `direct`, which runs the code of the message; returns its call."""
    body = {
        "model": "direct",
        "input": f"```python\n{code}\n```",
        "tools": [{"type": "code_interpreter", "container": {"type": "auto"}}],
        "include": ["code_interpreter_call.outputs"],
    }
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    status, text = networks.request(
        networks.names[0], "POST", "http://127.0.0.1:8080/v1/responses", headers, body
    )
    assert status == 200, text
    (call,) = (item for item in json.loads(text)["output"] if item["type"] == "code_interpreter_call")
    return call


def _read_output(call: Json) -> str:
    assert call["status"] == "completed", call
    return "".join(output["logs"] for output in call["outputs"] if output["type"] == "logs")


def test_compose_services_run_code(
    containerd: Containerd, networks: LinkedNetworks, secret: Path, tmp_path: Path
) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{networks.ADDRESSES[1]} sandbox\n")
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    settings = {name: _to_settings(containerd, name, secret, tmp_path, hosts) for name in ARCHIVES}
    inside, outside = networks.names[0], "http://10.199.17.2:8080"
    try:
        sandbox = containerd.start("sandbox", settings["sandbox"], networks.names[1])
        sandbox.wait_until_healthy(services["sandbox"]["healthcheck"]["test"][1:])
        status, _ = networks.request(inside, "POST", f"{outside}/execute", {}, {"code": "1"})
        assert status == 401

        creator = replace(settings["gateway"], args=["fumehood", "keys", "create"])
        key = containerd.start("keys", creator, inside).wait_for_exit()
        gateway = containerd.start("gateway", settings["gateway"], inside)
        gateway.wait_until_healthy(services["gateway"]["healthcheck"]["test"][1:])
        status, text = networks.request(inside, "GET", "http://127.0.0.1:8080/readyz")
        assert status == 200, text

        found = re.search(r"fh-\w+", key)
        assert found is not None, key
        code = "import os, pandas\nprint(pandas.Series([40, 2]).sum(), os.getuid())"
        answer, uid = _read_output(_ask(networks, found[0], code)).split()
        assert answer == "42"
        assert uid not in ("0", "10001")
        assert "not bounded" not in sandbox.read_log()
    finally:
        for name in ("gateway", "keys", "sandbox"):
            containerd.stop(name)


# --- deploy/kubernetes ------------------------------------------------------------------------------------------------


def _to_pod(containerd: Containerd, secret: Path, folder: Path) -> dict[str, ContainerSettings]:
    """The containers of a sandbox pod. Volumes in memory are directories with the rights that Kubernetes gives them."""
    (template,) = (
        resource
        for resource in yaml.safe_load_all(RENDERED.read_text())
        if resource["kind"] == "SandboxTemplate"
    )
    pod = template["spec"]["podTemplate"]["spec"]
    volumes: dict[str, Path] = {}
    for volume in pod["volumes"]:
        path = volumes[volume["name"]] = folder / volume["name"]
        path.mkdir()
        os.chown(path, 0, pod["securityContext"]["fsGroup"])
        path.chmod(0o2777)
    token = volumes["token"] / "token"
    token.write_bytes(secret.read_bytes())
    os.chown(token, 0, 10000)
    token.chmod(0o440)
    containers: dict[str, ContainerSettings] = {}
    for container in pod["containers"]:
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"] == {"drop": ["ALL"]}
        settings = containers[container["name"]] = ContainerSettings(
            image=container["image"],
            args=[*container["command"], *container["args"]],
            environment=_image_environment(containerd, "sandbox")
            | {entry["name"]: entry["value"] for entry in container.get("env", ())},
            user=(context["runAsUser"], context["runAsGroup"]),
        )
        for mount in container["volumeMounts"]:
            mode = "ro" if mount.get("readOnly") else "rw"
            settings.binds[mount["mountPath"]] = (volumes[mount["name"]], mode)
    return containers


def test_pod_runs_code_with_the_rights_that_its_manifest_gives(
    containerd: Containerd, networks: LinkedNetworks, secret: Path, tmp_path: Path
) -> None:
    pod = _to_pod(containerd, secret, tmp_path)
    network = networks.names[1]
    headers = {"Authorization": f"Bearer {secret.read_text()}", "Content-Type": "application/json"}
    check = yaml.safe_load(COMPOSE.read_text())["services"]["sandbox"]["healthcheck"]["test"][1:]
    try:
        containerd.start("code", pod["code"], network)
        containerd.start("server", pod["server"], network).wait_until_healthy(check)
        code = {"code": "import os\nprint(6 * 7, os.getuid(), os.path.exists('/run/secrets/fumehood/token'))"}
        url = "http://10.199.17.2:8080/execute"
        assert networks.request(networks.names[0], "POST", url, {}, code)[0] == 401
        status, text = networks.request(networks.names[0], "POST", url, headers, code)
        assert status == 200, text
        assert "42 10003 False" in text
    finally:
        for name in ("server", "code"):
            containerd.stop(name)
