"""Makes the certificate authority of a cluster, the certificates of its parts, and their kubeconfigs."""

import datetime as dt
import ipaddress
import json
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tools.kubernetes_cluster.layout import (
    API_PORT,
    API_SERVICE_ADDRESS,
    NODE_ADDRESS,
    NODE_NAME,
    Layout,
)

# Longer than a cluster lives.
_LIFETIME = dt.timedelta(days=7)
# Clocks of containers may be behind.
_SLACK = dt.timedelta(minutes=10)
_SIGNS = x509.KeyUsage(
    digital_signature=True,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)


@dataclass(frozen=True)
class Certificate:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def write(self, directory: Path, name: str) -> None:
        certificate = self.certificate.public_bytes(serialization.Encoding.PEM)
        (directory / f"{name}.crt").write_bytes(certificate)
        write_key(self.key, directory / f"{name}.key")


def write_key(key: ec.EllipticCurvePrivateKey, path: Path) -> None:
    path.touch(mode=0o600)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
    )


def make_authority() -> Certificate:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fumehood test cluster")])
    builder = _builder(name, name, key).add_extension(x509.BasicConstraints(True, 0), critical=True)
    builder = builder.add_extension(
        x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
    )
    # Python verifies strictly since 3.13: an authority must say that it signs.
    builder = builder.add_extension(_SIGNS, critical=True)
    return Certificate(builder.sign(key, hashes.SHA256()), key)


def issue(
    authority: Certificate, user: str, groups: tuple[str, ...] = (), hosts: tuple[str, ...] = ()
) -> Certificate:
    """A client's certificate for this user and these groups; with `hosts`, also a server's for these names."""
    key = ec.generate_private_key(ec.SECP256R1())
    attributes = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
    subject = x509.Name([*attributes, x509.NameAttribute(NameOID.COMMON_NAME, user)])
    usages = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if hosts else [])]
    builder = _builder(subject, authority.certificate.subject, key)
    builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    if hosts:
        builder = builder.add_extension(
            x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False
        )
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    builder = builder.add_extension(identifier, critical=False)
    return Certificate(builder.sign(authority.key, hashes.SHA256()), key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer)
    builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - _SLACK).not_valid_after(now + _LIFETIME)


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


# Who talks to the API server, as what.
_USERS = {
    "admin": ("admin", ("system:masters",)),
    "kube-controller-manager": ("system:kube-controller-manager", ()),
    "kube-scheduler": ("system:kube-scheduler", ()),
    "kube-proxy": ("system:kube-proxy", ()),
    "kubelet": (f"system:node:{NODE_NAME}", ("system:nodes",)),
}
_API_HOSTS = (
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    "kubernetes.default.svc.cluster.local",
    "localhost",
    "127.0.0.1",
    NODE_ADDRESS,
    API_SERVICE_ADDRESS,
)


def write_credentials(layout: Layout) -> None:
    """Everything below `layout.certificates`, and the kubeconfigs."""
    directory = layout.certificates
    authority = make_authority()
    authority.write(directory, "ca")
    issue(authority, "kube-apiserver", hosts=_API_HOSTS).write(directory, "kube-apiserver")
    # Kubelet authorises what the API server asks of it: logs, exec.
    issue(authority, "kube-apiserver-kubelet-client", ("system:masters",)).write(directory, "kubelet-client")
    issue(authority, NODE_NAME, hosts=(NODE_NAME, NODE_ADDRESS)).write(directory, "kubelet-server")
    write_key(ec.generate_private_key(ec.SECP256R1()), directory / "service-accounts.key")
    for name, (user, groups) in _USERS.items():
        issue(authority, user, groups).write(directory, name)
        _write_kubeconfig(layout, name)


def _write_kubeconfig(layout: Layout, name: str) -> None:
    directory = layout.certificates
    server = {
        "server": f"https://{NODE_ADDRESS}:{API_PORT}",
        "certificate-authority": str(directory / "ca.crt"),
    }
    client = {
        "client-certificate": str(directory / f"{name}.crt"),
        "client-key": str(directory / f"{name}.key"),
    }
    tree = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "fumehood", "cluster": server}],
        "users": [{"name": name, "user": client}],
        "contexts": [{"name": "fumehood", "context": {"cluster": "fumehood", "user": name}}],
        "current-context": "fumehood",
    }
    file = layout.kubeconfig_of(name)
    file.touch(mode=0o600)
    file.write_text(json.dumps(tree, indent=2))  # JSON is YAML
