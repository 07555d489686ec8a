"""The certificate authority of one sandbox, for its domains with secrets.

The supervisor creates its key, the proxy uses it. A stolen key deceives only the one sandbox that trusts it, and name
constraints limit it to the domains with secrets.
"""

import asyncio
import codecs
import datetime as dt
import os
import ssl
from collections.abc import Iterable
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_AUTHORITY_DAYS = 90
_LEAF_DAYS = 7
_CLOCK_SKEW = dt.timedelta(hours=1)
_MAX_COMMON_NAME = 64  # limit of X.509; clients compare the alternative name


class SandboxCertificateAuthority:
    """Issues server certificates, in threads; `pem` is the certificate that the sandbox trusts."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self._key = key
        self._certificate = certificate
        self.pem = certificate.public_bytes(serialization.Encoding.PEM).decode("ascii")
        self._contexts: dict[str, tuple[dt.datetime, ssl.SSLContext]] = {}
        self._lock = asyncio.Lock()

    @classmethod
    async def create(cls, domains: Iterable[str]) -> Self:
        """Create an authority that is valid for these domains only."""
        return cls(*await asyncio.to_thread(_create_authority, sorted(domains)))

    @classmethod
    def load(cls, private: str, pem: str) -> Self:
        """Load an authority from its `private_pem` and `pem`. Raises ValueError."""
        key = serialization.load_pem_private_key(private.encode("ascii"), password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError("the key of the authority is not an elliptic-curve key")
        return cls(key, x509.load_pem_x509_certificate(pem.encode("ascii")))

    @property
    def private_pem(self) -> str:
        return _private_pem(self._key).decode("ascii")

    async def server_context(self, domain: str) -> ssl.SSLContext:
        """Return the TLS server context for a domain; its certificate is renewed before it expires."""
        async with self._lock:
            renewal, context = self._contexts.get(domain, (None, None))
            if renewal is None or context is None or renewal < _now():
                context = await asyncio.to_thread(self.create_context, domain)
                renewal = _now() + dt.timedelta(days=_LEAF_DAYS - 1)
                self._contexts[domain] = (renewal, context)
            return context

    def create_context(self, domain: str) -> ssl.SSLContext:
        """Issue a certificate for this domain; returns a TLS server context with it."""
        key = ec.generate_private_key(ec.SECP256R1())
        authority_id = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        certificate = (
            _certificate_builder(domain, _LEAF_DAYS)
            .issuer_name(self._certificate.subject)
            .public_key(key.public_key())
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(domain)]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(authority_id), critical=False
            )
            .sign(self._key, hashes.SHA256())
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        _load_key_pair(context, certificate, key)
        return context


def warm_up() -> None:
    """Load what OpenSSL and Python load on first use: the process may soon be a user who cannot read it."""
    made = SandboxCertificateAuthority(*_create_authority(["warm-up.invalid"]))
    SandboxCertificateAuthority.load(made.private_pem, made.pem).create_context("warm-up.invalid")
    for encoding in ("ascii", "latin-1", "idna", "punycode"):
        codecs.lookup(encoding)


def _create_authority(domains: list[str]) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _certificate_builder("Fumehood sandbox egress", _AUTHORITY_DAYS)
    certificate = (
        builder.issuer_name(_name("Fumehood sandbox egress"))
        .public_key(key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(
            x509.NameConstraints([x509.DNSName(domain) for domain in domains], excluded_subtrees=None),
            critical=True,
        )
        .add_extension(
            x509.KeyUsage(
                key_cert_sign=True,
                crl_sign=True,
                digital_signature=False,
                content_commitment=False,
                key_encipherment=False,
                data_encipherment=False,
                key_agreement=False,
                encipher_only=False,
                decipher_only=False,
            ),
            critical=True,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return key, certificate


def _certificate_builder(common_name: str, days: int) -> x509.CertificateBuilder:
    now = _now()
    return (
        x509.CertificateBuilder()
        .subject_name(_name(common_name[:_MAX_COMMON_NAME]))
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + dt.timedelta(days=days))
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


def _load_key_pair(
    context: ssl.SSLContext, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
) -> None:
    """Load a key pair through a memory file: Python's ssl reads files only, and no key may be on a disk."""
    with os.fdopen(os.memfd_create("certificate"), "wb") as file:
        file.write(_private_pem(key) + certificate.public_bytes(serialization.Encoding.PEM))
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
