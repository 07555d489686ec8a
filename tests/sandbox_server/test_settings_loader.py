"""Settings from a file and from variables: accepted values, refused values and their messages."""

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from fumehood.configuration import ConfigError
from fumehood.sandbox_server.settings import SandboxServerSettings
from fumehood.sandbox_server.settings_loader import (
    ENVIRONMENT_PREFIX,
    SETTING_NAMES,
    load_sandbox_config,
)

PAGE = Path(__file__).parents[2] / "docs" / "sandbox-server.md"


def load(file: Path | None, environ: dict[str, str] | None = None) -> SandboxServerSettings:
    return load_sandbox_config(file, environ or {}).settings


def rows() -> dict[str, str]:
    """The documented default of each setting."""
    text = PAGE.read_text(encoding="utf-8").partition("\n## Settings\n")[2].partition("\n## ")[0]
    found = re.findall(r"^\| `(\w+)` \| ([^|]*) \| [^|]+ \|$", text, re.MULTILINE)
    assert len(found) == len(dict(found))
    return dict(found)


def test_every_setting_is_documented_and_nothing_else() -> None:
    assert set(rows()) == set(SETTING_NAMES) == {field.name for field in fields(SandboxServerSettings)}


def test_the_documented_defaults_are_taken_and_are_the_defaults() -> None:
    """As they stand in the page, but for those that are told in words."""
    plain = SandboxServerSettings()
    seen = 0
    for name, text in rows().items():
        if match := re.fullmatch(r"`([^`]+)`", text):
            expected = 4 if name == "pool" else getattr(plain, name)
            found = load(None, {ENVIRONMENT_PREFIX + name.upper(): match[1]})
            assert found == replace(plain, **{name: expected})
            seen += 1
    assert seen > 40


def test_the_example_of_the_page_is_taken(tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    file = tmp_path / "sandbox.yaml"
    file.write_text(example, encoding="utf-8")
    found = load(file)
    assert (found.egress, found.tenant_memory) == ("allowlist", 16 << 30)
    assert found.egress_hosts == {"api.example.org": "10.1.0.7"}


def test_variables_stand_above_the_file(tmp_path: Path) -> None:
    file = tmp_path / "sandbox.yaml"
    file.write_text(
        "pool: 2\negress_ports: [443]\npackages: false\ncpus: null\nfile_bytes: 2 GiB\nidle_seconds: 5\n"
        "disk_dir: /srv/disks\negress_hosts: {api.example.org: 10.0.0.1}\negress: off\n"
    )
    environ = {
        f"{ENVIRONMENT_PREFIX}POOL": "3",
        f"{ENVIRONMENT_PREFIX}EGRESS_HOSTS": "a.example=10.0.0.2, b.example = ::1",
        f"{ENVIRONMENT_PREFIX}PRELOAD": "",
        f"{ENVIRONMENT_PREFIX}IDLE_SECONDS": "0",
        f"{ENVIRONMENT_PREFIX}TOKEN": "not a setting, and nobody's business here",
        f"{ENVIRONMENT_PREFIX}PORT": "tcp://10.0.0.1:8080",
        f"{ENVIRONMENT_PREFIX}PORT_8080_TCP_ADDR": "10.0.0.1",
        f"{ENVIRONMENT_PREFIX}SERVICE_HOST": "10.0.0.1",
        "FUMEHOOD_MODE": "pod",
    }
    assert load(file, environ) == SandboxServerSettings(
        pool=3,
        egress_ports=(443,),
        packages=False,
        cpus=None,
        file_bytes=2 << 30,
        idle_seconds=None,
        disk_dir=Path("/srv/disks"),
        egress_hosts={"a.example": "10.0.0.2", "b.example": "::1"},
        preload=(),
        egress="off",
    )


def test_no_domain_is_not_any_domain() -> None:
    variable = f"{ENVIRONMENT_PREFIX}EGRESS_DOMAINS"
    assert load(None, {variable: ""}).egress_domains == ()
    assert load(None, {variable: "null"}).egress_domains is None
    assert load(None, {variable: '["a.example"]'}).egress_domains == ("a.example",)


def test_a_file_with_a_password_is_not_for_others_to_read(tmp_path: Path) -> None:
    file = tmp_path / "sandbox.yaml"
    file.write_text("index_url: https://user:very-secret@index.example/simple\n")
    file.chmod(0o644)
    with pytest.raises(ConfigError, match=f"holds a password.*chmod 600 {file}") as refused:
        load(file)
    assert "very-secret" not in str(refused.value)
    file.chmod(0o600)
    assert "very-secret" in (load(file).index_url or "")
    file.write_text("index_url: https://index.example/a@b\n")
    file.chmod(0o644)
    assert load(file).index_url == "https://index.example/a@b"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("EGRES", "off", "there is no setting egres; did you mean egress?"),
        ("XYZZY", "1", "there is no setting xyzzy; there are mode, limits, pool, "),
        ("LISTEN", "x", "an option of the command: --listen"),
        ("POOL", "many", "expected int, got str"),
        ("POOL", "-1", "expected int >= 0"),
        ("SHARDS", "0", "expected int >= 1"),
        ("EGRESS_BYTES", "0", "expected int >= 1"),
        ("CPUS", "nan", "expected "),
        ("CPUS", "inf", "expected a finite number"),
        ("DISKS", "maybe", "'maybe' is not one of auto, required, off"),
        ("PACKAGES", "perhaps", "expected bool"),
        ("PACKAGES_DIR", "relative", "expected an absolute path"),
        ("INDEX_URL", "user:very-secret@example.org", "expected a URL"),
        ("FILE_BYTES", "lots", "such as 512m or 4g"),
        ("UID_BASE", "1000", "expected int >= 65536"),
        ("EGRESS_PORTS", "https", "expected int, got str"),
        ("EGRESS_PORTS", "0", "expected int >= 1"),
        ("EGRESS_DOMAINS", "*.example.org", "'*.example.org' cannot be allowed"),
        ("EGRESS_PRIVATE_NETWORKS", "10.0.0.1/8", "has host bits set"),
        ("EGRESS_HOSTS", "api.example.org", "expected name=value"),
        ("EGRESS_HOSTS", "api.example.org=x", "does not appear to be an IPv4 or IPv6 address"),
        ("EGRESS_CA_FILE", "/etc/passwd", "no certificates in PEM form"),
        ("EGRESS_CA_FILE", "/nonexistent", "No such file"),
        ("FIND_LINKS", "/nonexistent", "not a directory"),
    ],
)
def test_mistakes_in_variables(name: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(None, {ENVIRONMENT_PREFIX + name: value})
    assert str(refused.value).startswith(f"{ENVIRONMENT_PREFIX}{name}: ")
    assert message in str(refused.value)
    assert "very-secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pool: [", "is not YAML"),
        ("pool = 4", "should hold settings such as `pool: 4`"),
        ("pool: true", "pool: expected int, got bool"),
        ("pool: '4'", "pool: expected int, got str"),
        ("pool: 4\npool: 5", "has pool twice, again at line 2"),
        ("capcity: 4", "did you mean capacity?"),
        ("token: very-secret", "--token-file"),
        ("egress: {domains: []}", "egress: expected one of off, allowlist"),
        ("egress: on", "egress: expected one of off, allowlist"),
        ("index_url: ['very-secret']", "index_url: expected str"),
        ("egress_domains: example.org", "egress_domains: expected array"),
    ],
)
def test_mistakes_in_the_file(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "sandbox.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load(file)
    assert message in str(refused.value)
    assert str(file) in str(refused.value)
    assert "very-secret" not in str(refused.value)


def test_a_file_of_the_earlier_format_is_named(tmp_path: Path) -> None:
    file = tmp_path / "sandbox.toml"
    file.write_text('pool = 4\negress = "allowlist"\n[egress_hosts]\n"a.example" = "10.0.0.1"\n')
    with pytest.raises(ConfigError, match=r"Settings are YAML, not TOML\."):
        load(file)


@pytest.mark.parametrize(("content", "message"), [(None, "No such file"), (b"\xff", "not UTF-8")])
def test_files_that_cannot_be_read(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "sandbox.yaml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load(file)


def test_every_setting_can_be_given_as_text() -> None:
    """Whatever type a new setting has, a variable has to be able to hold it."""
    special: dict[str, Any] = {
        "find_links": "/tmp",
        "egress_ca_file": "none",
        "index_url": "https://x",
    }
    for field in fields(SandboxServerSettings):
        default = getattr(SandboxServerSettings(), field.name)
        text = special.get(field.name, "none" if default is None else str(default))
        if isinstance(default, tuple):
            text = ",".join(map(str, default))  # pyright: ignore[reportUnknownArgumentType]
        if isinstance(default, dict):
            text = ""
        loaded = load_sandbox_config(None, {ENVIRONMENT_PREFIX + field.name.upper(): text})
        assert loaded.variables == (ENVIRONMENT_PREFIX + field.name.upper(),)
        if field.name != "index_url" and field.name != "find_links":
            assert getattr(loaded.settings, field.name) == default
