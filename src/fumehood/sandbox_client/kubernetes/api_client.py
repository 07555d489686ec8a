"""Requests to a Kubernetes API server: JSON over HTTP, with the credentials of the cluster."""

import asyncio
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager

import aiohttp
import msgspec
from yarl import URL

import fumehood
from fumehood.sandbox_client.kubernetes.claim_objects import ApiStatus
from fumehood.sandbox_client.kubernetes.credentials import ClusterCredentials, CredentialsError

_CONNECT_TIMEOUT = 5.0
_RESPONSE_TIMEOUT = 15.0
_MAX_MESSAGE = 300


class KubernetesApiError(Exception):
    """The API server refused a request.

    status: of HTTP, or 410 in a watch. reason: the API's own code. retry_after: seconds that it asks to wait.
    """

    def __init__(self, status: int, reason: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after = retry_after

    @property
    def is_transient(self) -> bool:
        """Whether the same request may succeed later."""
        return self.status == 429 or self.status >= 500


class KubernetesUnreachable(KubernetesApiError):
    """The API server does not answer, or the connection broke: whether the request took effect is unknown."""

    def __init__(self, message: str) -> None:
        super().__init__(503, "Unreachable", message)


class KubernetesApi:
    """The API server of one cluster. Writes have a session of their own, so that none waits behind a watch."""

    def __init__(self, credentials: ClusterCredentials) -> None:
        self._credentials = credentials
        self._sessions: dict[bool, aiohttp.ClientSession] = {}
        self._closed = False

    @property
    def server(self) -> str:
        return self._credentials.server

    @property
    def namespace(self) -> str:
        """The namespace of the credentials."""
        return self._credentials.namespace

    async def close(self) -> None:
        self._closed = True
        for session in self._sessions.values():
            await session.close()

    async def request[T](
        self,
        method: str,
        path: str,
        response_type: type[T],
        *,
        query: Mapping[str, str] | None = None,
        body: object = None,
        content_type: str = "application/json",
    ) -> T:
        """Send a request and decode its response. Raises KubernetesApiError."""
        content = None if body is None else msgspec.json.encode(body)
        async with self._open(method, path, query, content, content_type, _RESPONSE_TIMEOUT) as response:
            with _translate_errors(self.server):
                received = await response.read()
        try:
            return msgspec.json.decode(received, type=response_type)
        except msgspec.MsgspecError as error:
            raise KubernetesApiError(500, "Undecodable", f"{path}: {error}") from error

    @asynccontextmanager
    async def open_stream(
        self, path: str, query: Mapping[str, str], read_timeout: float
    ) -> AsyncGenerator[AsyncGenerator[bytes]]:
        """Open a watch and yield its chunks. Raises KubernetesApiError, also while it is read.

        read_timeout: seconds of silence after which the connection counts as broken.
        """
        async with self._open("GET", path, query, None, "", read_timeout) as response:

            async def read_chunks() -> AsyncGenerator[bytes]:
                while True:
                    with _translate_errors(self.server):
                        chunk = await response.content.readany()
                    if not chunk:
                        return
                    yield chunk

            yield read_chunks()

    @asynccontextmanager
    async def _open(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        content: bytes | None,
        content_type: str,
        read_timeout: float,
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        response = await self._send(method, path, query, content, content_type, read_timeout)
        if response.status == 401:  # the token may have been replaced meanwhile
            response.close()
            response = await self._send(
                method, path, query, content, content_type, read_timeout, fresh_token=True
            )
        try:
            if not 200 <= response.status < 300:
                raise await self._read_error(response)
            yield response
        finally:
            if response.content.at_eof():
                response.release()
            else:
                response.close()

    async def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        content: bytes | None,
        content_type: str,
        read_timeout: float,
        *,
        fresh_token: bool = False,
    ) -> aiohttp.ClientResponse:
        if self._closed:
            raise KubernetesUnreachable(f"The connection to {self.server} has been closed.")
        credentials = self._credentials
        try:
            token = await credentials.read_token(fresh=fresh_token)
        except CredentialsError as error:
            raise KubernetesUnreachable(str(error)) from error
        headers = {} if content is None else {"Content-Type": content_type}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        with _translate_errors(self.server):
            return await self._open_session(method != "GET").request(
                method,
                URL(f"{self.server}{path}"),
                params=query,
                data=content,
                headers=headers,
                ssl=credentials.ssl_context or True,
                server_hostname=credentials.server_hostname,
                allow_redirects=False,  # the token is for this server only
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=_CONNECT_TIMEOUT, sock_read=read_timeout
                ),
            )

    def _open_session(self, is_write: bool) -> aiohttp.ClientSession:
        session = self._sessions.get(is_write)
        if session is None:
            session = self._sessions[is_write] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=64),
                headers={"Accept": "application/json", "User-Agent": f"fumehood/{fumehood.__version__}"},
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return session

    async def _read_error(self, response: aiohttp.ClientResponse) -> KubernetesApiError:
        with _translate_errors(self.server):
            content = await response.read()
        try:
            status = msgspec.json.decode(content, type=ApiStatus)
        except msgspec.MsgspecError:
            status = ApiStatus(message=content.decode(errors="replace"))
        try:
            retry_after = float(response.headers.get("Retry-After", ""))
        except ValueError:
            retry_after = None
        message = " ".join(status.message.split())[:_MAX_MESSAGE] or response.reason or "no reason given"
        return KubernetesApiError(response.status, status.reason, message, retry_after)


class _translate_errors:  # noqa: N801 - a context manager, without the cost of a generator
    """Turn errors of the connection into KubernetesUnreachable, without the request: its headers have the token."""

    def __init__(self, server: str) -> None:
        self._server = server

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        match error:
            case TimeoutError():
                raise KubernetesUnreachable(f"{self._server} has stopped answering.") from None
            case aiohttp.ClientConnectorCertificateError() | ssl.SSLError():
                raise KubernetesUnreachable(
                    f"The certificate of {self._server} is not valid: {error}."
                ) from None
            case aiohttp.ClientError() | OSError() | asyncio.IncompleteReadError():
                raise KubernetesUnreachable(f"{self._server} cannot be reached: {error}.") from None
            case _:
                pass
