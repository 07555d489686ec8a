"""Credentials for a Kubernetes API server: those of a pod, or of a kubeconfig."""

import asyncio
import base64
import binascii
import contextlib
import logging
import os
import ssl
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from fumehood.sandbox_client.kubernetes.claim_objects import parse_time

logger = logging.getLogger(__name__)

SERVICE_ACCOUNT_DIRECTORY = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TOKEN_FILE_SECONDS = 60.0  # kubelet replaces the file well before the token expires
_PLUGIN_TIMEOUT = 30.0
_PLUGIN_EXPIRY_MARGIN = 30.0
_PLUGIN_VERSIONS = ("client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1")


class CredentialsError(Exception):
    """There are no usable credentials. The message says why and what to do."""


class TokenSource(Protocol):
    """Where the bearer token comes from."""

    async def read(self, *, fresh: bool) -> str | None:
        """Return the token. fresh: do not use a cached one. Raises CredentialsError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterCredentials:
    """How to reach an API server, and as whom.

    server: its URL. namespace: the default one. server_hostname: the name in its certificate, if not that of the URL.
    """

    server: str
    namespace: str
    ssl_context: ssl.SSLContext | None = None
    server_hostname: str | None = None
    token_source: TokenSource | None = None

    async def read_token(self, *, fresh: bool = False) -> str | None:
        """Return the bearer token; None if there is none. Raises CredentialsError."""
        return None if self.token_source is None else await self.token_source.read(fresh=fresh)


class StaticToken:
    """A token that never changes."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def read(self, *, fresh: bool) -> str | None:  # noqa: ARG002 - there is no other
        return self._token


class TokenFile:
    """A token in a file that is replaced from time to time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._token = ""
        self._read_at = 0.0

    async def read(self, *, fresh: bool) -> str | None:
        if fresh or not self._token or time.monotonic() - self._read_at > _TOKEN_FILE_SECONDS:
            self._token = self._read_file()
            self._read_at = time.monotonic()
        return self._token

    def _read_file(self) -> str:
        try:
            token = self._path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise CredentialsError(f"The token file {self._path} cannot be read: {error}.") from error
        if not token:
            raise CredentialsError(f"The token file {self._path} is empty.")
        return token


# ---- in a pod -------------------------------------------------------------------------------------------------


def load_credentials(kubeconfig: str | None, environ: Mapping[str, str]) -> ClusterCredentials:
    """Return the credentials of a kubeconfig, of the pod, of KUBECONFIG, or of ~/.kube/config. Raises CredentialsError.

    kubeconfig: the file to use; None for the first of the others that there is.
    """
    if kubeconfig is not None:
        return load_kubeconfig([Path(kubeconfig).expanduser()], environ)
    if environ.get("KUBERNETES_SERVICE_HOST") and (SERVICE_ACCOUNT_DIRECTORY / "token").exists():
        return load_service_account(environ)
    if listed := environ.get("KUBECONFIG"):
        return load_kubeconfig([Path(path) for path in listed.split(os.pathsep) if path], environ)
    default = Path(environ.get("HOME") or "~").expanduser() / ".kube" / "config"
    if default.exists():
        return load_kubeconfig([default], environ)
    raise CredentialsError(
        "there are no credentials for a Kubernetes cluster: run in a pod with a service account, set KUBECONFIG, or "
        "name a kubeconfig in sandbox_kubeconfig"
    )


def load_service_account(
    environ: Mapping[str, str], directory: Path = SERVICE_ACCOUNT_DIRECTORY
) -> ClusterCredentials:
    """Return the credentials of the pod in which this process runs. Raises CredentialsError."""
    host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443")
    try:
        context = _trust((directory / "ca.crt").read_text(encoding="ascii"))
        namespace = (directory / "namespace").read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise CredentialsError(f"the service account in {directory} cannot be used: {error}") from error
    return ClusterCredentials(
        server=f"https://{bracket_host(host)}:{port}",
        namespace=namespace,
        ssl_context=context,
        token_source=TokenFile(directory / "token"),
    )


def bracket_host(host: str) -> str:
    """Return the host as a URL has it: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


# ---- kubeconfig -----------------------------------------------------------------------------------------------


class _ConfigPart(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """A part of a kubeconfig. Unknown fields are ignored; those that would change who asks are refused."""


class _Cluster(_ConfigPart, frozen=True, kw_only=True):
    server: str = ""
    certificate_authority: str | None = None
    certificate_authority_data: str | None = None
    insecure_skip_tls_verify: bool = False
    tls_server_name: str | None = None
    proxy_url: str | None = None


class _PluginVariable(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    value: str = ""


class _Plugin(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    command: str
    args: list[str] | None = None
    env: list[_PluginVariable] | None = None
    api_version: str = _PLUGIN_VERSIONS[0]
    provide_cluster_info: bool = False


class _User(_ConfigPart, frozen=True, kw_only=True):
    token: str | None = None
    token_file: str | None = msgspec.field(default=None, name="tokenFile")
    client_certificate: str | None = None
    client_certificate_data: str | None = None
    client_key: str | None = None
    client_key_data: str | None = None
    exec_plugin: _Plugin | None = msgspec.field(default=None, name="exec")
    username: str | None = None
    auth_provider: object = None
    impersonate: str | None = msgspec.field(default=None, name="as")


class _Context(_ConfigPart, frozen=True, kw_only=True):
    cluster: str = ""
    user: str = ""
    namespace: str | None = None


class _NamedCluster(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    cluster: _Cluster = _Cluster()


class _NamedUser(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    user: _User = _User()


class _NamedContext(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    context: _Context = _Context()


class _Kubeconfig(_ConfigPart, frozen=True, kw_only=True):
    current_context: str = ""
    clusters: list[_NamedCluster] = []
    users: list[_NamedUser] = []
    contexts: list[_NamedContext] = []


def load_kubeconfig(paths: Sequence[Path], environ: Mapping[str, str]) -> ClusterCredentials:
    """Return the credentials of the current context; of several files the first that names a thing wins.

    Raises CredentialsError.
    """
    configs = [(path.absolute().parent, _read_kubeconfig(path)) for path in paths]
    where = ", ".join(map(str, paths))
    current = next((config.current_context for _, config in configs if config.current_context), "")
    context = next(
        (named.context for _, config in configs for named in config.contexts if named.name == current), None
    )
    if context is None:
        raise CredentialsError(f"{where}: there is no context {current!r}; set current-context")
    cluster = next(
        (
            (base, named.cluster)
            for base, config in configs
            for named in config.clusters
            if named.name == context.cluster
        ),
        None,
    )
    user = next(
        (
            (base, named.user)
            for base, config in configs
            for named in config.users
            if named.name == context.user
        ),
        None,
    )
    if cluster is None or not cluster[1].server:
        raise CredentialsError(f"{where}: the cluster {context.cluster!r} is missing or has no server")
    if user is None:
        if context.user:
            raise CredentialsError(f"{where}: there is no user {context.user!r}")
        user = (Path(), _User())
    try:
        return _build_credentials(cluster, user, context.namespace or "default", environ)
    except (OSError, ssl.SSLError, ValueError, binascii.Error) as error:
        raise CredentialsError(f"{where}: {error}") from error


def _read_kubeconfig(path: Path) -> _Kubeconfig:
    try:
        return msgspec.yaml.decode(path.read_bytes(), type=_Kubeconfig)
    except OSError as error:
        raise CredentialsError(f"{path} cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise CredentialsError(f"{path} is not a kubeconfig: {error}") from error


def _build_credentials(
    located_cluster: tuple[Path, _Cluster],
    located_user: tuple[Path, _User],
    namespace: str,
    environ: Mapping[str, str],
) -> ClusterCredentials:
    (cluster_base, cluster), (user_base, user) = located_cluster, located_user
    for value, field in (
        (cluster.proxy_url, "proxy-url"),
        (user.username, "username"),
        (user.auth_provider, "auth-provider"),
        (user.impersonate, "as"),
    ):
        if value:
            raise ValueError(f"{field} is not supported: use a token, a client certificate or an exec plugin")
    context = None
    if cluster.server.startswith("https:"):
        context = _build_ssl_context(cluster, cluster_base)
        certificate = _read_pem(user.client_certificate, user.client_certificate_data, user_base)
        key = _read_pem(user.client_key, user.client_key_data, user_base)
        if certificate and key:
            _load_client_certificate(context, certificate, key)
        elif certificate or key:
            raise ValueError("a client certificate and its key are needed together")
    source: TokenSource | None = None
    if user.token_file is not None:
        source = TokenFile(user_base / user.token_file)
    elif user.token is not None:
        source = StaticToken(user.token)
    elif user.exec_plugin is not None:
        source = CredentialPlugin(user.exec_plugin, user_base, environ, cluster, context)
    return ClusterCredentials(
        server=cluster.server.rstrip("/"),
        namespace=namespace,
        ssl_context=context,
        server_hostname=cluster.tls_server_name,
        token_source=source,
    )


def _trust(authority: str | None) -> ssl.SSLContext:
    """Return a context that trusts a cluster's authority (PEM), or the system's.

    From 3.13 on, Python also asks for extensions that clusters' authorities often lack; other clients do not.
    """
    context = ssl.create_default_context(cadata=authority)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def _build_ssl_context(cluster: _Cluster, base: Path) -> ssl.SSLContext:
    authority = _read_pem(cluster.certificate_authority, cluster.certificate_authority_data, base)
    context = _trust(None if authority is None else authority.decode("ascii"))
    if cluster.insecure_skip_tls_verify:
        logger.warning("The certificate of %s is not verified: its kubeconfig says so.", cluster.server)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _read_pem(path: str | None, data: str | None, base: Path) -> bytes | None:
    """Return what is in the file, relative to its kubeconfig, or in the field; the field goes first."""
    if data:
        return base64.b64decode(data, validate=True)
    return (base / path).read_bytes() if path else None


def _load_client_certificate(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """Load both from a file that only this user can read, since `ssl` reads nothing else, and delete it."""
    descriptor, path = tempfile.mkstemp(prefix="fumehood-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(certificate + b"\n" + key)
        context.load_cert_chain(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


# ---- exec plugins ---------------------------------------------------------------------------------------------


class _PluginStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    token: str | None = None
    client_certificate_data: str | None = None
    client_key_data: str | None = None
    expiration_timestamp: str | None = None


class _PluginAnswer(msgspec.Struct, frozen=True, kw_only=True):
    status: _PluginStatus = _PluginStatus()


class CredentialPlugin:
    """A program that prints credentials (`exec` in a kubeconfig); it runs again when they expire or are refused."""

    def __init__(
        self,
        plugin: _Plugin,
        base: Path,
        environ: Mapping[str, str],
        cluster: _Cluster,
        context: ssl.SSLContext | None,
    ) -> None:
        if plugin.api_version not in _PLUGIN_VERSIONS:
            raise ValueError(f"exec: apiVersion {plugin.api_version} is not supported")
        # A command with a slash is relative to its kubeconfig; one without is looked up on PATH.
        command = str(base / plugin.command) if "/" in plugin.command else plugin.command
        self._command = [command, *(plugin.args or ())]
        info: dict[str, object] = {"interactive": False}
        if plugin.provide_cluster_info:
            info["cluster"] = {
                "server": cluster.server,
                "certificate-authority-data": cluster.certificate_authority_data,
            }
        call = {"apiVersion": plugin.api_version, "kind": "ExecCredential", "spec": info}
        self._environ = {
            **environ,
            **{variable.name: variable.value for variable in plugin.env or ()},
            "KUBERNETES_EXEC_INFO": msgspec.json.encode(call).decode(),
        }
        self._context = context
        self._status: _PluginStatus | None = None
        self._lock = asyncio.Lock()

    async def read(self, *, fresh: bool) -> str | None:
        async with self._lock:
            if fresh or self._status is None or self._has_expired(self._status):
                self._status = await self._run()
                self._adopt_certificate(self._status)
            return self._status.token

    @staticmethod
    def _has_expired(status: _PluginStatus) -> bool:
        if status.expiration_timestamp is None:
            return False
        return time.time() > parse_time(status.expiration_timestamp) - _PLUGIN_EXPIRY_MARGIN

    async def _run(self) -> _PluginStatus:
        name = self._command[0]
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=self._environ,
            )
        except OSError as error:
            raise CredentialsError(
                f"the credential plugin {name} cannot be started: {error.strerror}"
            ) from error
        try:
            async with asyncio.timeout(_PLUGIN_TIMEOUT):
                output, complaint = await process.communicate()
        except TimeoutError:
            raise CredentialsError(
                f"the credential plugin {name} took longer than {_PLUGIN_TIMEOUT:g} s"
            ) from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode != 0:
            reason = " ".join(complaint.decode(errors="replace").split())[:300]
            raise CredentialsError(f"the credential plugin {name} failed with {process.returncode}: {reason}")
        try:
            return msgspec.json.decode(output, type=_PluginAnswer).status
        except msgspec.MsgspecError as error:
            raise CredentialsError(f"the credential plugin {name} printed no ExecCredential") from error

    def _adopt_certificate(self, status: _PluginStatus) -> None:
        if self._context is None or not status.client_certificate_data or not status.client_key_data:
            return
        try:
            _load_client_certificate(
                self._context, status.client_certificate_data.encode(), status.client_key_data.encode()
            )
        except (OSError, ssl.SSLError) as error:
            raise CredentialsError(
                f"the credential plugin {self._command[0]} printed an invalid certificate: {error}"
            ) from error
