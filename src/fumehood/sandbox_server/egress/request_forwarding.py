"""Forwards one request and its response, both directions at once."""

import asyncio
from collections.abc import Callable
from http import HTTPStatus

import h11

from fumehood.sandbox_server.egress.byte_streams import ByteStream, SocketStream
from fumehood.sandbox_server.egress.request_parsing import ForwardedRequest, ProxyRefusal, response_headers

_MAX_RESPONSE_HEAD = 256 * 1024  # servers send longer heads than clients
_CONNECTION_ERRORS = (OSError, EOFError, h11.ProtocolError)


class ForwardingAborted(Exception):
    """One side disconnected or violated the protocol after the response had started."""


class RequestForwarder:
    """Forwards one request of a sandbox to its server and the response back.

    on_bytes: called with the bytes sent and received.
    """

    def __init__(
        self,
        client: ByteStream,
        incoming: h11.Connection,
        upstream: SocketStream,
        on_bytes: Callable[[int, int], None],
    ) -> None:
        self._client = client
        self._incoming = incoming
        self._upstream = upstream
        self._outgoing = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_RESPONSE_HEAD)
        self._on_bytes = on_bytes
        self.has_response_started = False

    async def run(self, request: ForwardedRequest) -> None:
        """Forward the request. Raises ProxyRefusal before the response has started, ForwardingAborted after."""
        sending = asyncio.ensure_future(self._forward_request(request))
        try:
            await self._forward_response(sending)
        except _CONNECTION_ERRORS as error:
            if self.has_response_started:
                raise ForwardingAborted from error
            raise ProxyRefusal(
                HTTPStatus.BAD_GATEWAY, f"{request.authority.name} sent no valid response"
            ) from error
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    @property
    def can_reuse_client(self) -> bool:
        return self._incoming.our_state is h11.DONE and self._incoming.their_state is h11.DONE

    @property
    def can_reuse_upstream(self) -> bool:
        """Whether another request may follow: unexpected bytes would be read as its response."""
        done = self._outgoing.our_state is h11.DONE and self._outgoing.their_state is h11.DONE
        return done and not self._outgoing.trailing_data[0] and not self._upstream.is_at_eof

    async def _forward_request(self, request: ForwardedRequest) -> None:
        head = h11.Request(method=request.method, target=request.target, headers=request.headers)
        await self._send_upstream(self._outgoing.send(head))
        while True:
            event = self._incoming.next_event()
            if event is h11.NEED_DATA:
                if self._incoming.they_are_waiting_for_100_continue:
                    proceed = h11.InformationalResponse(status_code=100, headers=[])
                    await self._client.send(self._incoming.send(proceed) or b"")
                self._incoming.receive_data(await self._client.read())
            elif isinstance(event, h11.Data):
                await self._send_upstream(self._outgoing.send(h11.Data(data=event.data)))
            elif isinstance(event, h11.EndOfMessage):
                await self._send_upstream(self._outgoing.send(h11.EndOfMessage()))
                return
            else:
                return

    async def _send_upstream(self, data: bytes | None) -> None:
        if data:
            self._on_bytes(len(data), 0)
            await self._upstream.send(data)

    async def _forward_response(self, sending: asyncio.Future[None]) -> None:
        while True:
            event = self._outgoing.next_event()
            if event is h11.NEED_DATA:
                self._outgoing.receive_data(await self._next_bytes(sending))
            elif isinstance(event, h11.InformationalResponse):
                if event.status_code == HTTPStatus.SWITCHING_PROTOCOLS:
                    raise h11.RemoteProtocolError("unexpected switch of protocols")
            elif isinstance(event, h11.Response):
                await self._send_to_client(
                    h11.Response(
                        status_code=event.status_code, headers=response_headers(event), reason=event.reason
                    )
                )
            elif isinstance(event, h11.Data):
                await self._send_to_client(h11.Data(data=event.data))
            elif isinstance(event, h11.EndOfMessage):
                await self._send_to_client(h11.EndOfMessage())
                return
            else:
                raise h11.RemoteProtocolError("the response is truncated")

    async def _next_bytes(self, sending: asyncio.Future[None]) -> bytes:
        """Read more of the response; raises if the client breaks off its request meanwhile."""
        if not sending.done():
            reading = asyncio.ensure_future(self._upstream.read())
            try:
                await asyncio.wait((reading, sending), return_when=asyncio.FIRST_COMPLETED)
                _raise_if_client_broke(sending)
                data = await reading  # a server may respond and close before it has read everything
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
        else:
            _raise_if_client_broke(sending)
            data = await self._upstream.read()
        self._on_bytes(0, len(data))
        return data

    async def _send_to_client(self, event: h11.Event) -> None:
        data = self._incoming.send(event)
        self.has_response_started = True
        if data:
            await self._client.send(data)


def _raise_if_client_broke(sending: asyncio.Future[None]) -> None:
    """Raise the error of sending, unless it is an OSError: a server may respond without reading everything."""
    if sending.done() and (error := sending.exception()) is not None and not isinstance(error, OSError):
        raise error
