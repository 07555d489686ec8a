"""Servers on loopback under fake names, with and without TLS, that record requests."""

import asyncio
import contextlib
import datetime as dt
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import h11
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

type Reply = tuple[int, list[tuple[str, str]], bytes]


@dataclass(frozen=True)
class ReceivedRequest:
    """One request as it arrived."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


def echo(request: ReceivedRequest) -> Reply:
    """The path, and for /redirect?URL a redirection there."""
    if request.target.startswith("/redirect?"):
        return 302, [("Location", request.target.partition("?")[2])], b""
    return 200, [("Content-Type", "text/plain")], f"{request.method} {request.target}".encode() + request.body


@dataclass
class Website:
    """Listens on a loopback port; `seen` are the requests so far, `connections` those that were opened."""

    tls: ssl.SSLContext | None = None
    reply: Callable[[ReceivedRequest], Reply] = echo
    seen: list[ReceivedRequest] = field(default_factory=list[ReceivedRequest])
    connections: int = 0
    open_now: int = 0
    port: int = 0
    handler: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]] | None = None
    host: str = "127.0.0.1"

    async def __aenter__(self) -> Self:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._server = await asyncio.start_server(self._serve, self.host, 0, ssl=self.tls)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in [*self._tasks]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        self.open_now += 1
        try:
            with contextlib.suppress(OSError, h11.ProtocolError, EOFError, asyncio.CancelledError):
                await (self.handler or self._handle_connection)(reader, writer)
                writer.transport.set_write_buffer_limits(0)
                await writer.drain()  # `abort` drops what is still in the buffer
        finally:
            self._tasks.discard(task)
            self.open_now -= 1
            writer.transport.abort()

    async def _handle_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = h11.Connection(h11.SERVER)
        while True:
            head: h11.Request | None = None
            body = bytearray()
            while True:
                event = connection.next_event()
                if event is h11.NEED_DATA:
                    connection.receive_data(await reader.read(65536))
                elif isinstance(event, h11.Request):
                    head = event
                elif isinstance(event, h11.Data):
                    body += event.data
                elif isinstance(event, h11.EndOfMessage):
                    break
                else:
                    return
            assert head is not None
            headers = {name.decode(): value.decode("latin-1") for name, value in head.headers}
            seen = ReceivedRequest(head.method.decode(), head.target.decode(), headers, bytes(body))
            self.seen.append(seen)
            status, fields, answer = self.reply(seen)
            response = h11.Response(
                status_code=status, headers=[*fields, ("Content-Length", str(len(answer)))]
            )
            writer.write(connection.send(response) or b"")
            if head.method != b"HEAD":
                writer.write(connection.send(h11.Data(data=answer)) or b"")
            writer.write(connection.send(h11.EndOfMessage()) or b"")
            await writer.drain()
            if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
                return
            connection.start_next_cycle()


class WebsiteAuthority:
    """A certificate authority of the tests; `file` is what to trust."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._certificate = self._sign("tests", self._key, authority=True)
        self.file = directory / "ca.pem"
        self.file.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def _sign(self, name: str, key: ec.EllipticCurvePrivateKey, *, authority: bool) -> x509.Certificate:
        now = dt.datetime.now(dt.UTC)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        identifier = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        usage = x509.KeyUsage(
            digital_signature=not authority,
            key_cert_sign=authority,
            crl_sign=authority,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject if authority else self._certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(hours=1))
            .not_valid_after(now + dt.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False
            )
            .sign(self._key, hashes.SHA256())
        )

    def context(self, name: str) -> ssl.SSLContext:
        """A server's, with a certificate for that name."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(name, key, authority=False)
        file = self._directory / f"{name}.pem"
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        file.write_bytes(private + certificate.public_bytes(serialization.Encoding.PEM))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(file)
        return context
