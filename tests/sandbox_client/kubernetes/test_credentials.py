"""Credentials of a pod and of kubeconfigs, against servers that ask for them."""

import base64
import os
import ssl
import stat
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fumehood.sandbox_client.kubernetes import CredentialsError, KubernetesApi, KubernetesApiError
from fumehood.sandbox_client.kubernetes.credentials import (
    ClusterCredentials,
    load_credentials,
    load_kubeconfig,
    load_service_account,
)
from tests.support.kubernetes.api_server import TOKEN, KubernetesApiServer, run_api_server

# ---- certificates -------------------------------------------------------------------------------------------------


class Authority:
    """A certificate authority that was made for the tests."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tests")])
        builder = self._begin(self._name, self._key).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        builder = builder.add_extension(
            x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False
        )
        builder = builder.add_extension(_key_usage(ca=True), critical=True)
        self._certificate = builder.sign(self._key, hashes.SHA256())
        self.pem = self._certificate.public_bytes(serialization.Encoding.PEM)

    def _begin(self, name: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(minutes=5))
            .not_valid_after(now + timedelta(hours=1))
        )

    def issue(self, name: str) -> tuple[bytes, bytes]:
        """Return a certificate for a host, or for a client of that name, and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = self._begin(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), key)
        builder = (
            builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
            .add_extension(_key_usage(ca=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
        )
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        signed = builder.sign(self._key, hashes.SHA256())
        return signed.public_bytes(serialization.Encoding.PEM), private


def _key_usage(*, ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=ca,
        crl_sign=ca,
        encipher_only=False,
        decipher_only=False,
    )


@asynccontextmanager
async def serve_tls(authority: Authority, directory: Path, *, asks_certificate: bool) -> AsyncGenerator[str]:
    """Serve `/version` over TLS as `api.test`; the response says who asked."""
    pem = directory / "server.pem"
    pem.write_bytes(b"".join(authority.issue("api.test")))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    if asks_certificate:
        context.load_verify_locations(cadata=authority.pem.decode())
        context.verify_mode = ssl.CERT_REQUIRED

    async def answer(request: web.Request) -> web.Response:
        assert request.transport is not None
        certificate: dict[str, Any] = request.transport.get_extra_info("peercert") or {}
        names = [value for part in certificate.get("subject", ()) for _, value in part]
        return web.json_response({"gitVersion": "".join(names) or "anonymous"})

    app = web.Application()
    app.add_routes([web.get("/version", answer)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    try:
        yield f"https://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class _Version(msgspec.Struct, rename="camel"):
    git_version: str


async def ask_version(credentials: ClusterCredentials) -> str:
    api = KubernetesApi(credentials)
    try:
        return (await api.request("GET", "/version", _Version)).git_version
    finally:
        await api.close()


def write_config(directory: Path, cluster: dict[str, Any], user: dict[str, Any], **context: Any) -> Path:
    path = directory / "config"
    config = {
        "apiVersion": "v1",
        "current-context": "here",
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", **context}}],
    }
    path.write_bytes(msgspec.yaml.encode(config))
    return path


def encode(content: bytes) -> str:
    return base64.b64encode(content).decode()


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
async def server() -> AsyncGenerator[KubernetesApiServer]:
    async with run_api_server() as running:
        yield running


# ---- a pod ----------------------------------------------------------------------------------------------------------


def make_service_account(directory: Path, authority: Authority, token: str = TOKEN) -> Path:
    (directory / "ca.crt").write_bytes(authority.pem)
    (directory / "namespace").write_text("fumehood\n")
    (directory / "token").write_text(token + "\n")
    return directory


async def test_a_service_account(tmp_path: Path, authority: Authority) -> None:
    account = make_service_account(tmp_path, authority)
    environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    credentials = load_service_account(environ, account)
    assert (credentials.server, credentials.namespace) == ("https://[fd00::1]:6443", "fumehood")
    assert await credentials.read_token() == TOKEN


async def test_the_authority_of_a_service_account_is_checked(tmp_path: Path, authority: Authority) -> None:
    account = make_service_account(tmp_path, Authority())
    async with serve_tls(authority, tmp_path, asks_certificate=False) as url:
        environ = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": url.rpartition(":")[2]}
        with pytest.raises(KubernetesApiError, match=r"certificate .* is not valid"):
            await ask_version(load_service_account(environ, account))


async def test_a_token_that_is_replaced(
    tmp_path: Path, authority: Authority, server: KubernetesApiServer
) -> None:
    """The one that is cached is refused: the file is read again, and the request repeated."""
    account = make_service_account(tmp_path, authority, "the-first-token")
    loaded = load_service_account({"KUBERNETES_SERVICE_HOST": "h"}, account)
    credentials = ClusterCredentials(
        server=server.url, namespace="fumehood", token_source=loaded.token_source
    )
    server.tokens = {"the-first-token"}
    assert await ask_version(credentials) == "v1.35.8"
    (account / "token").write_text("the-second-token")
    assert await credentials.read_token() == "the-first-token"
    server.tokens = {"the-second-token"}
    assert await ask_version(credentials) == "v1.35.8"
    assert await credentials.read_token() == "the-second-token"
    server.tokens = set()
    with pytest.raises(KubernetesApiError) as raised:
        await ask_version(credentials)
    assert raised.value.status == 401
    (account / "token").unlink()
    with pytest.raises(KubernetesApiError, match="cannot be read"):
        await ask_version(credentials)


# ---- a kubeconfig ---------------------------------------------------------------------------------------------------


async def test_a_token(tmp_path: Path, server: KubernetesApiServer) -> None:
    path = write_config(tmp_path, {"server": server.url + "/"}, {"token": TOKEN}, namespace="team")
    credentials = load_kubeconfig([path], {})
    assert credentials.namespace == "team"
    assert await ask_version(credentials) == "v1.35.8"


async def test_a_token_file_is_relative_to_its_kubeconfig(
    tmp_path: Path, server: KubernetesApiServer
) -> None:
    (tmp_path / "my-token").write_text(TOKEN)
    path = write_config(tmp_path, {"server": server.url}, {"tokenFile": "my-token"})
    credentials = load_kubeconfig([path], {})
    assert credentials.namespace == "default"
    assert await ask_version(credentials) == "v1.35.8"


@pytest.mark.parametrize("inline", [True, False])
async def test_a_client_certificate(tmp_path: Path, authority: Authority, inline: bool) -> None:
    certificate, key = authority.issue("gateway")
    (tmp_path / "ca.pem").write_bytes(authority.pem)
    (tmp_path / "client.pem").write_bytes(certificate)
    (tmp_path / "client.key").write_bytes(key)
    async with serve_tls(authority, tmp_path, asks_certificate=True) as url:
        cluster: dict[str, Any] = {"server": url, "tls-server-name": "api.test"}
        if inline:
            cluster["certificate-authority-data"] = encode(authority.pem)
            user = {"client-certificate-data": encode(certificate), "client-key-data": encode(key)}
        else:
            cluster["certificate-authority"] = "ca.pem"
            user = {"client-certificate": "client.pem", "client-key": "client.key"}
        credentials = load_kubeconfig([write_config(tmp_path, cluster, user)], {})
        assert await ask_version(credentials) == "gateway"


async def test_the_name_in_the_certificate_is_checked(tmp_path: Path, authority: Authority) -> None:
    async with serve_tls(authority, tmp_path, asks_certificate=False) as url:
        trusted = {"server": url, "certificate-authority-data": encode(authority.pem)}
        for cluster, is_accepted in (
            (trusted, False),
            (trusted | {"tls-server-name": "api.test"}, True),
            ({"server": url, "insecure-skip-tls-verify": True}, True),
        ):
            credentials = load_kubeconfig([write_config(tmp_path, cluster, {"token": TOKEN})], {})
            if is_accepted:
                assert await ask_version(credentials) == "anonymous"
            else:
                with pytest.raises(KubernetesApiError, match="certificate"):
                    await ask_version(credentials)


PLUGIN = f"""#!{sys.executable}
import json, os, sys
asked = json.loads(os.environ["KUBERNETES_EXEC_INFO"])
assert asked["kind"] == "ExecCredential" and asked["spec"]["interactive"] is False
with open(sys.argv[1] + "/calls", "a") as calls:
    calls.write(os.environ["WHO"] + "\\n")
print(json.dumps({{"apiVersion": asked["apiVersion"], "kind": "ExecCredential",
    "status": json.load(open(sys.argv[1] + "/status"))}}))
"""


def write_plugin(directory: Path, source: str = PLUGIN) -> dict[str, Any]:
    plugin = directory / "plugin"
    plugin.write_text(source)
    plugin.chmod(plugin.stat().st_mode | stat.S_IXUSR)
    return {
        "exec": {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": "./plugin",
            "args": [str(directory)],
            "env": [{"name": "WHO", "value": "me"}],
            "interactiveMode": "Never",
        }
    }


async def test_an_exec_plugin(tmp_path: Path, server: KubernetesApiServer) -> None:
    user = write_plugin(tmp_path)
    credentials = load_kubeconfig(
        [write_config(tmp_path, {"server": server.url}, user)], {"PATH": os.environ["PATH"]}
    )

    def provide(token: str, expires_in: float | None = None) -> None:
        status = {"token": token}
        if expires_in is not None:
            status["expirationTimestamp"] = (datetime.now(UTC) + timedelta(seconds=expires_in)).isoformat()
        (tmp_path / "status").write_bytes(msgspec.json.encode(status))

    def count_calls() -> int:
        return (tmp_path / "calls").read_text().count("me\n")

    provide(TOKEN)
    assert [await ask_version(credentials) for _ in range(2)] == ["v1.35.8"] * 2
    assert count_calls() == 1  # without an expiry until it is refused
    server.tokens = {"another"}
    provide("another", expires_in=10)
    assert await ask_version(credentials) == "v1.35.8"
    assert count_calls() == 2
    await ask_version(credentials)
    assert count_calls() == 3  # about to expire


async def test_a_certificate_of_an_exec_plugin(tmp_path: Path, authority: Authority) -> None:
    certificate, key = authority.issue("plugin-user")
    status = {"clientCertificateData": certificate.decode(), "clientKeyData": key.decode()}
    (tmp_path / "status").write_bytes(msgspec.json.encode(status))
    user = write_plugin(tmp_path)
    async with serve_tls(authority, tmp_path, asks_certificate=True) as url:
        cluster = {
            "server": url,
            "tls-server-name": "api.test",
            "certificate-authority-data": encode(authority.pem),
        }
        credentials = load_kubeconfig([write_config(tmp_path, cluster, user)], {"PATH": os.environ["PATH"]})
        assert await ask_version(credentials) == "plugin-user"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("#!/bin/sh\necho sorry >&2; exit 3\n", "failed with 3: sorry"),
        ("#!/bin/sh\necho nonsense\n", "printed no ExecCredential"),
        ("#!/no/such/program\n", "cannot be started"),
    ],
)
async def test_a_plugin_that_fails(
    tmp_path: Path, server: KubernetesApiServer, source: str, said: str
) -> None:
    path = write_config(tmp_path, {"server": server.url}, write_plugin(tmp_path, source))
    with pytest.raises(KubernetesApiError, match=said):
        await ask_version(load_kubeconfig([path], {}))


@pytest.mark.parametrize(
    ("cluster", "user", "said"),
    [
        ({}, {}, "has no server"),
        ({"server": "http://h", "proxy-url": "http://p"}, {}, "proxy-url is not supported"),
        ({"server": "http://h"}, {"username": "me", "password": "s3cret"}, "username is not supported"),
        ({"server": "http://h"}, {"as": "root"}, "as is not supported"),
        ({"server": "http://h"}, {"auth-provider": {"name": "oidc"}}, "auth-provider is not supported"),
        ({"server": "https://h"}, {"client-certificate-data": "AAAA"}, "needed together"),
        ({"server": "https://h", "certificate-authority-data": "?"}, {}, "base64"),
        ({"server": "https://h", "certificate-authority": "none.pem"}, {}, "No such file"),
        (
            {"server": "http://h"},
            {"exec": {"command": "x", "apiVersion": "client.authentication.k8s.io/v1alpha1"}},
            "v1alpha1 is not supported",
        ),
    ],
)
def test_what_a_kubeconfig_may_not_have(
    tmp_path: Path, cluster: dict[str, Any], user: dict[str, Any], said: str
) -> None:
    with pytest.raises(CredentialsError, match=said) as raised:
        load_kubeconfig([write_config(tmp_path, cluster, user)], {})
    assert "s3cret" not in str(raised.value)


def test_which_credentials_are_used(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for directory, name in ((first, "one"), (second, "two")):
        (directory / ".kube").mkdir(parents=True)
        path = write_config(directory / ".kube", {"server": f"http://{name}"}, {"token": TOKEN})
        assert path.name == "config"
    named = str(first / ".kube" / "config")
    environ = {"HOME": str(second)}
    assert load_credentials(None, environ).server == "http://two"
    assert load_credentials(None, environ | {"KUBECONFIG": named}).server == "http://one"
    assert load_credentials(named, environ).server == "http://one"
    with pytest.raises(CredentialsError, match="there are no credentials for a Kubernetes cluster"):
        load_credentials(None, {"HOME": str(tmp_path)})
    with pytest.raises(CredentialsError, match="cannot be read"):
        load_credentials(str(tmp_path / "missing"), {})
    (tmp_path / "broken").write_text("- a list")
    with pytest.raises(CredentialsError, match="is not a kubeconfig"):
        load_credentials(str(tmp_path / "broken"), {})


def test_several_kubeconfigs_are_merged(tmp_path: Path) -> None:
    """Of several files the first that names a thing wins."""
    paths = [tmp_path / "a", tmp_path / "b"]
    paths[0].write_text("current-context: x\ncontexts: [{name: x, context: {cluster: c, user: u}}]\n")
    paths[1].write_text(
        "current-context: y\nclusters: [{name: c, cluster: {server: 'http://c'}}]\n"
        "users: [{name: u, user: {token: t}}]\ncontexts: [{name: x, context: {cluster: other}}]\n"
    )
    listed = os.pathsep.join(map(str, paths))
    assert load_credentials(None, {"KUBECONFIG": listed}).server == "http://c"
    paths[0].write_text("current-context: z\n")
    with pytest.raises(CredentialsError, match="there is no context 'z'"):
        load_credentials(None, {"KUBECONFIG": listed})
