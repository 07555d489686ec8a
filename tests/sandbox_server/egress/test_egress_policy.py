"""Network policies that callers may ask for, and the messages of refusals."""

import logging
from typing import Any

import msgspec
import pytest

from fumehood.protocol.sandbox.sandbox_errors import InvalidSandboxRequest
from fumehood.protocol.sandbox.sandbox_messages import (
    DomainSecret,
    NetworkAllowlist,
    NetworkDisabled,
    SandboxSpec,
)
from fumehood.sandbox_server.egress.domain_parsing import RequestTarget
from fumehood.sandbox_server.egress.egress_policy import EgressPolicy, build_policy
from fumehood.sandbox_server.egress.proxy_control import EgressController
from fumehood.sandbox_server.settings import SandboxServerSettings


def build_for(
    *domains: str, secrets: list[DomainSecret] | None = None, **settings: Any
) -> EgressPolicy | None:
    network = NetworkAllowlist(allowed_domains=list(domains), domain_secrets=secrets or [])
    chosen: dict[str, Any] = {"egress": "allowlist", **settings}
    return build_policy(network, SandboxServerSettings(**chosen))


def expect_refusal(*domains: str, **more: Any) -> str:
    with pytest.raises(InvalidSandboxRequest) as caught:
        build_for(*domains, **more)
    assert caught.value.param == "network"
    return caught.value.message


def test_no_network_needs_no_permission() -> None:
    for mode in ("namespaces", "pod", "unsafe-degraded"):
        assert build_policy(NetworkDisabled(), SandboxServerSettings(mode=mode)) is None


def test_off_by_default() -> None:
    network = NetworkAllowlist(allowed_domains=["example.org"])
    with pytest.raises(InvalidSandboxRequest, match="setting egress to allowlist"):
        build_policy(network, SandboxServerSettings())


def test_some_have_no_proxy() -> None:
    refusal = expect_refusal("example.org", mode="unsafe-degraded")
    assert "Mode unsafe-degraded has no egress proxy" in refusal
    assert "no container for an egress proxy" in expect_refusal("example.org", mode="pod")


def test_exact_names_and_ports() -> None:
    policy = build_for("Example.ORG.", "bücher.example")
    assert policy is not None
    assert policy.refusal_reason(RequestTarget("example.org", 443)) is None
    assert policy.refusal_reason(RequestTarget("xn--bcher-kva.example", 80)) is None
    assert "www.example.org is not on" in (policy.refusal_reason(RequestTarget("www.example.org", 443)) or "")
    assert "org is not on" in (policy.refusal_reason(RequestTarget("org", 443)) or "")
    assert "port 22 of example.org" in (policy.refusal_reason(RequestTarget("example.org", 22)) or "")


@pytest.mark.parametrize(
    "written", ["*.example.org", "10.0.0.1", "http://example.org", "a b", "[::1]", "x\ny"]
)
def test_what_is_no_domain(written: str) -> None:
    message = expect_refusal("example.org", written)
    assert "cannot be on an allow-list" in message
    assert "\n" not in message
    assert ("no wildcards" in message) == ("*" in written)


def test_the_operators_ceiling() -> None:
    assert build_for("Example.org", egress_domains=("example.org", "example.com")) is not None
    assert "example.net is not among" in expect_refusal(
        "example.org", "example.net", egress_domains=("example.org",)
    )
    assert "is not among" in expect_refusal("example.org", egress_domains=())


SECRET = DomainSecret(domain="api.example.org", name="API_KEY", value="hunter2-hunter2")


def test_secrets_by_domain() -> None:
    policy = build_for("API.example.org", secrets=[SECRET])
    assert policy is not None
    assert policy.secrets == {"api.example.org": {"API_KEY": "hunter2-hunter2"}}
    assert policy.environment()["API_KEY"] == "$API_KEY"
    assert "hunter2" not in str(policy.environment())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"domain": "other.example.org"}, "not among the allowed domains"),
        ({"domain": "10.0.0.1"}, "not among the allowed domains"),
        ({"name": "PATH"}, "uses that variable"),
        ({"name": "https_proxy"}, "uses that variable"),
        ({"name": "LD_PRELOAD"}, "uses that variable"),
        ({"name": "PYTHONPATH"}, "uses that variable"),
        ({"value": "hunter2\r\nX: y"}, "cannot be part of a header"),
        ({"value": "hunter2\0"}, "cannot be part of a header"),
        ({"value": " hunter2"}, "cannot be part of a header"),
        ({"value": "hunter2ü"}, "cannot be part of a header"),
    ],
)
def test_secrets_that_cannot_be(change: dict[str, str], message: str) -> None:
    refusal = expect_refusal("api.example.org", secrets=[msgspec.structs.replace(SECRET, **change)])
    assert message in refusal
    assert "hunter2" not in refusal


def test_a_secret_given_twice() -> None:
    assert "twice" in expect_refusal("api.example.org", secrets=[SECRET, SECRET])


def test_no_repr_shows_a_secret(caplog: pytest.LogCaptureFixture) -> None:
    network = NetworkAllowlist(allowed_domains=["api.example.org"], domain_secrets=[SECRET])
    spec = SandboxSpec(network=network)
    logging.getLogger("test").warning("%r %s", spec, network)
    assert "API_KEY" in caplog.text
    for shown in (caplog.text, f"{SECRET!r} {SECRET}", f"{build_for('api.example.org', secrets=[SECRET])!r}"):
        assert "hunter2" not in shown
    assert "hunter2" not in str(SECRET.__rich_repr__())


def test_settings_that_make_no_sense_are_refused_at_once() -> None:
    mistakes: tuple[dict[str, Any], ...] = (
        {"egress_private_networks": ("10.0.0.1/8",)},
        {"egress_hosts": {"*": "1.1.1.1"}},
        {"egress_hosts": {"example.org": "example.com"}},
        {"egress_domains": ("*.example.org",)},
    )
    for wrong in mistakes:
        with pytest.raises(ValueError):
            EgressController(SandboxServerSettings(**wrong))
