"""deploy/compose and deploy/systemd: settings that are valid, and rights that are those of docs/deployment.md."""

import configparser
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import fumehood
from fumehood.gateway_config import load_config
from fumehood.sandbox_server.host import linux_capabilities
from fumehood.sandbox_server.settings_loader import load_sandbox_config

DEPLOY = Path(__file__).resolve().parent.parent.parent / "deploy"
COMPOSE = DEPLOY / "compose"
SYSTEMD = DEPLOY / "systemd"
UNITS = ("fumehood-gateway.service", "fumehood-sandbox.service")


def _services() -> dict[str, Any]:
    return yaml.safe_load((COMPOSE / "compose.yaml").read_text(encoding="utf-8"))["services"]


class _UnitParser(configparser.RawConfigParser):
    """A unit file: names keep their case, and a repeated one has several values, one a line."""

    def __init__(self) -> None:
        super().__init__(dict_type=dict, strict=False, interpolation=None, delimiters=("=",))

    def optionxform(self, optionstr: str) -> str:
        return optionstr


def _read_unit(name: str) -> dict[str, str]:
    parser = _UnitParser()
    parser.read_string((SYSTEMD / name).read_text(encoding="utf-8"))
    return dict(parser["Service"])


# --- Compose ----------------------------------------------------------------------------------------------------------


def test_services_have_the_images_of_this_version() -> None:
    for name, service in _services().items():
        assert service["image"] == f"localhost/fumehood-{name}:{fumehood.__version__}"
        assert service["build"]["args"] == {"VERSION": fumehood.__version__}
        assert (COMPOSE / service["build"]["context"] / service["build"]["dockerfile"]).is_file()


def test_sandbox_service_has_the_capabilities_that_a_supervisor_keeps() -> None:
    numbers = {getattr(linux_capabilities, capability) for capability in _services()["sandbox"]["cap_add"]}
    assert numbers == set(linux_capabilities.SUPERVISOR_CAPABILITIES)


def test_gateway_service_has_no_rights() -> None:
    gateway = _services()["gateway"]
    assert gateway["cap_drop"] == ["ALL"]
    assert "cap_add" not in gateway
    assert gateway["security_opt"] == ["no-new-privileges:true"]
    assert gateway["ports"] == ["127.0.0.1:8080:8080"]


def test_all_services_are_read_only_and_bounded() -> None:
    for service in _services().values():
        assert service["read_only"] is True
        assert service["mem_limit"]
        assert service["pids_limit"]
        assert service["healthcheck"]["test"][0] == "CMD"
        assert not service.get("privileged")
        assert "sandbox-token" in service["secrets"]


def test_token_is_nowhere_in_the_environment() -> None:
    for service in _services().values():
        assert not [name for name in service["environment"] if "TOKEN" in name]


# --- Settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["compose", "systemd"])
def test_settings_of_the_gateway_are_valid(folder: str) -> None:
    config = load_config(DEPLOY / folder / "fumehood.yaml", {})
    settings = config.providers.code_interpreter.settings
    assert settings.sandbox_url is not None
    assert settings.sandbox_token_file is not None


def test_settings_of_the_sandbox_servers_are_valid() -> None:
    assert load_sandbox_config(SYSTEMD / "sandbox.yaml", {}).settings.limits == "enforced"
    environment = _services()["sandbox"]["environment"]
    assert load_sandbox_config(None, environment).settings.memory_total == 6 << 30


# --- systemd ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", UNITS)
def test_systemd_accepts_the_unit(name: str, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze")
    unit = tmp_path / name
    text = (SYSTEMD / name).read_text(encoding="utf-8")
    unit.write_text(text.replace("/opt/fumehood/bin/fumehood", "/bin/true"), encoding="utf-8")
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", UNITS)
def test_unit_gives_no_rights_and_hands_the_token_over_as_a_file(name: str) -> None:
    unit = _read_unit(name)
    assert unit["NoNewPrivileges"] == "yes"
    assert unit["CapabilityBoundingSet"] == ""
    assert unit["ProtectSystem"] == "strict"
    assert unit["ProtectHome"] == "yes"
    assert unit["LoadCredential"] == "sandbox-token:/etc/fumehood/sandbox-token"
    assert "TOKEN" not in unit.get("Environment", "")


def test_sandbox_unit_lacks_what_would_break_sandboxes() -> None:
    """Each of these covers parts of /proc, takes the cgroup, or filters system calls that make a sandbox."""
    unit = _read_unit("fumehood-sandbox.service")
    assert unit["Delegate"] == "memory pids cpu"
    breaking = {
        "MemoryDenyWriteExecute",
        "PrivateUsers",
        "ProcSubset",
        "ProtectControlGroups",
        "ProtectHostname",
        "ProtectKernelLogs",
        "ProtectKernelTunables",
        "ProtectProc",
        "RestrictNamespaces",
    }
    assert not breaking & unit.keys()
