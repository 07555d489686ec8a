"""Certificates of API servers: what other clients of Kubernetes accept is accepted, also by a stricter Python."""

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fumehood.sandbox_client.kubernetes.credentials import CredentialsError, load_service_account


class _Authority:
    """Issues certificates without the key identifiers and usages that RFC 5280 asks for, as many clusters do."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name("kubernetes")
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        self._certificate = self._issue("kubernetes", self._key, constraints)

    @property
    def pem(self) -> bytes:
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def write_server_files(self, folder: Path) -> Path:
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([x509.DNSName("api.example")])
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        path = folder / "server.pem"
        path.write_bytes(private + self._issue("api", key, names).public_bytes(serialization.Encoding.PEM))
        return path

    def _issue(
        self, name: str, key: ec.EllipticCurvePrivateKey, extension: x509.ExtensionType
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        builder = x509.CertificateBuilder(
            issuer_name=self._name,
            subject_name=_name(name),
            public_key=key.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=now - timedelta(hours=1),
            not_valid_after=now + timedelta(hours=1),
        )
        return builder.add_extension(extension, critical=False).sign(self._key, hashes.SHA256())


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _shake_hands(client: ssl.SSLContext, server: ssl.SSLContext) -> None:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (
        client.wrap_bio(to_client, to_server, server_hostname="api.example"),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    done: set[int] = set()
    while len(done) < 2:
        for index, side in enumerate(sides):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            done.add(index)


def _make_server(authority: _Authority, folder: Path) -> ssl.SSLContext:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(authority.write_server_files(folder))
    return server


def _write_account(folder: Path, authority: bytes) -> None:
    for name, content in (("ca.crt", authority), ("namespace", b"fumehood"), ("token", b"secret")):
        (folder / name).write_bytes(content)


@pytest.fixture
def strict_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """The defaults of Python 3.13, whichever this is."""
    create = ssl.create_default_context

    def create_strict(*, cadata: str | None = None) -> ssl.SSLContext:
        context = create(cadata=cadata)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", create_strict)


@pytest.mark.usefixtures("strict_python")
def test_authority_without_key_usage_is_trusted(tmp_path: Path) -> None:
    authority = _Authority()
    _write_account(tmp_path, authority.pem)
    context = load_service_account({"KUBERNETES_SERVICE_HOST": "api.example"}, tmp_path).ssl_context
    assert context is not None
    _shake_hands(context, _make_server(authority, tmp_path))


def test_another_authority_is_not_trusted(tmp_path: Path) -> None:
    _write_account(tmp_path, _Authority().pem)
    context = load_service_account({"KUBERNETES_SERVICE_HOST": "api.example"}, tmp_path).ssl_context
    assert context is not None
    with pytest.raises(ssl.SSLCertVerificationError):
        _shake_hands(context, _make_server(_Authority(), tmp_path))


def test_damaged_authority_is_reported(tmp_path: Path) -> None:
    _write_account(tmp_path, b"no certificate")
    with pytest.raises(CredentialsError, match="service account"):
        load_service_account({"KUBERNETES_SERVICE_HOST": "api.example"}, tmp_path)
