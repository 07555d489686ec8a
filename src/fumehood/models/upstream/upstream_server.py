"""One model server over HTTP: its address, the gateway's credentials, and requests to it."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import msgspec

from fumehood.models.model_settings import ModelSettings, Secret
from fumehood.models.upstream.http1_client import (
    Http1Connection,
    PooledHttpClient,
    UpstreamAddress,
    UpstreamTimeouts,
    UpstreamTransportError,
    encode_headers,
)
from fumehood.models.upstream.upstream_errors import UpstreamErrorFactory, parse_retry_after
from fumehood.protocol.model_turns import ModelCard

_MAX_MODEL_LIST_BYTES = 1 << 20
_MAX_ERROR_BYTES = 1 << 16
_MAX_MODELS = 1000
_MIN_SECRET_LENGTH = 8  # shorter header values are not redacted: any text may contain them
_HEADERS = {"Content-Type": "application/json", "Accept-Encoding": "identity", "User-Agent": "fumehood"}


class _ModelEntry(msgspec.Struct):
    id: str
    created: int | None = None
    owned_by: str | None = None


class _ModelList(msgspec.Struct):
    data: list[_ModelEntry]


class UpstreamServer:
    """The model server of one route. It does not close the client, which all servers share.

    address: of `base_url`. headers: of every request, with the gateway's key.
    """

    def __init__(
        self, settings: ModelSettings, client: PooledHttpClient, api_key: Secret | None = None
    ) -> None:
        self._settings = settings
        self._client = client
        self._timeouts = UpstreamTimeouts(settings.connect_timeout, settings.read_timeout)
        self.address = UpstreamAddress.parse(settings.base_url or "")
        headers = {**settings.headers, **_HEADERS}
        self._secrets = [value for value in settings.headers.values() if len(value) >= _MIN_SECRET_LENGTH]
        if api_key is not None:
            value = api_key.reveal()
            bearer = settings.api_key_header.lower() == "authorization"
            headers[settings.api_key_header] = f"Bearer {value}" if bearer else value
            self._secrets.append(value)
        self.headers = encode_headers(headers)

    def __repr__(self) -> str:
        return f"<UpstreamServer {self.address.host_header}{self.address.path}>"

    def create_error_factory(
        self, model: str, api_name: str, input_field: str = "input"
    ) -> UpstreamErrorFactory:
        """The errors of a request for this model; see `UpstreamErrorFactory`."""
        return UpstreamErrorFactory(
            model,
            self._secrets,
            api_name=api_name,
            input_field=input_field,
            base_url=self._settings.base_url or "",
        )

    @asynccontextmanager
    async def request(
        self,
        path: str,
        errors: UpstreamErrorFactory,
        body: Sequence[bytes] | None = None,
        *,
        address: UpstreamAddress | None = None,
        headers: bytes = b"",
    ) -> AsyncGenerator[Http1Connection]:
        """Send a POST with this body, or a GET. Raises ModelError, also for a status other than 200.

        address: another one than that of `base_url`. headers: additional ones.
        """
        try:
            async with self._client.request(
                address or self.address, path, self.headers + headers, self._timeouts, body
            ) as response:
                del body  # it may be large, and the response may take minutes
                await _check_response(response, errors)
                yield response
        except UpstreamTransportError as error:
            raise errors.from_transport(error, self._timeouts.read) from error

    async def fetch(
        self,
        path: str,
        errors: UpstreamErrorFactory,
        body: bytes | None = None,
        *,
        address: UpstreamAddress | None = None,
    ) -> tuple[int, bytes]:
        """Send a POST with this body, or a GET; the status and the first MiB of the response.

        Raises ModelError if there is no response.
        """
        try:
            async with self._client.request(
                address or self.address,
                path,
                self.headers,
                self._timeouts,
                None if body is None else [body],
            ) as response:
                return response.status, await response.read_all(_MAX_MODEL_LIST_BYTES)
        except UpstreamTransportError as error:
            raise errors.from_transport(error, self._timeouts.read) from error

    async def list_models(self) -> Sequence[ModelCard]:
        """Ask the server for its models. Raises ModelError."""
        errors = self.create_error_factory(self._settings.match, "list of models")
        async with self.request("/models", errors) as response:
            content = await response.read_all(_MAX_MODEL_LIST_BYTES)
        return decode_model_list(content, errors)


def decode_model_list(content: bytes, errors: UpstreamErrorFactory) -> Sequence[ModelCard]:
    """Raises ModelError if this is no list of models."""
    try:
        entries = msgspec.json.decode(content, type=_ModelList, strict=False).data
    except (ValueError, RecursionError) as error:
        raise errors.invalid_response(f"its list of models cannot be decoded: {error}") from None
    return [
        ModelCard(id=entry.id, created=entry.created or 0, owned_by=(entry.owned_by or "upstream")[:64])
        for entry in entries[:_MAX_MODELS]
    ]


async def _check_response(response: Http1Connection, errors: UpstreamErrorFactory) -> None:
    """Raises ModelError unless the response has the status 200 and is not compressed."""
    if response.status != 200:
        try:
            body = await response.read_all(_MAX_ERROR_BYTES)
        except UpstreamTransportError:
            body = b""
        wait = parse_retry_after(response.get_header(b"retry-after"), response.get_header(b"date"))
        raise errors.from_status(response.status, body, wait)
    if response.get_header(b"content-encoding") not in ("", "identity"):
        raise errors.invalid_response("its response is compressed although the request forbids it")
