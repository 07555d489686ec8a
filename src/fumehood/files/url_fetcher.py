"""Fetches what an address of somebody's leads to, or lets it pass.

A name is looked up once, what came is checked, and the connection is made to just that. Every redirection is looked at
as if it had been the address. Nothing of ours goes along: no credentials, no cookies, no proxy of the environment.
"""

import asyncio
import ipaddress
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from fumehood.http_server.address_policy import AddressPolicy, IpNetwork
from fumehood.http_server.dns_resolver import DnsResolutionFailed, DnsResolver
from fumehood.protocol.safe_names import sanitize_name

_MAX_REDIRECTS = 5
_REDIRECT_STATUSES = frozenset({301, 302, 303, 307, 308})
_MAX_URL_LENGTH = 8192
_CHUNK_BYTES = 64 << 10
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_DOMAIN_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)+")
_PRIVATE_TOP_LEVEL_DOMAINS = frozenset({"localhost", "local", "internal", "localdomain", "lan", "home"})
_HEADERS = {"Accept": "*/*", "Accept-Encoding": "identity", "User-Agent": "fumehood"}


class UrlRejected(Exception):
    """The address must not or cannot be fetched; a sentence for whoever gave it, which names no address of ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchLimits:
    """What is fetched from an address.

    bytes: the largest answer. seconds: for all of it, from looking up the name on.
    media_types: how the type of an answer may begin.
    """

    bytes: int = 20 << 20
    seconds: float = 20.0
    media_types: tuple[str, ...] = ("text/", "application/", "image/", "binary/octet-stream")


@dataclass(frozen=True, slots=True)
class FetchedFile:
    """`name` is the last part of the address, as it stands there; `media_type` what the server called it."""

    content: bytes
    media_type: str
    name: str


class UrlFetcher:
    """Fetches files from addresses that callers name, and that are not to be trusted.

    private: networks that may be reached although nobody else can reach them.
    """

    def __init__(
        self,
        limits: FetchLimits | None = None,
        private_networks: tuple[IpNetwork, ...] = (),
        resolver: DnsResolver | None = None,
    ) -> None:
        self._limits = limits or FetchLimits()
        self._private_networks = private_networks
        self._addresses = AddressPolicy(private_networks)
        self._resolver = resolver or DnsResolver({}, timeout=self._limits.seconds)

    async def fetch(self, url: str, reserve_memory: Callable[[int], None] = lambda _: None) -> FetchedFile:
        """Raises FetchRefused, and what `take` raises, which is told of the bytes as they come."""
        try:
            async with asyncio.timeout(self._limits.seconds):
                return await self._follow_redirects(url, reserve_memory)
        except TimeoutError:
            raise _make_rejection(f"it took longer than {self._limits.seconds:g} seconds") from None
        except (aiohttp.ClientError, OSError, ValueError):  # their words may tell of our network
            raise _make_rejection("its server does not answer as it should") from None

    def close(self) -> None:
        self._resolver.close()

    async def _follow_redirects(self, url: str, reserve_memory: Callable[[int], None]) -> FetchedFile:
        address = _parse_url(url)
        for _ in range(_MAX_REDIRECTS + 1):
            found = await self._request(address, reserve_memory)
            if isinstance(found, FetchedFile):
                return found
            if address.scheme == "https" and found.scheme != "https":
                raise _make_rejection("it leads from https to http")
            address = found
        raise _make_rejection("it leads on and on")

    async def _request(self, url: URL, reserve_memory: Callable[[int], None]) -> FetchedFile | URL:
        """The answer, or where it leads to."""
        pinned = _PinnedResolver(await self._resolve_allowed(url))
        connector = aiohttp.TCPConnector(resolver=pinned, use_dns_cache=False, force_close=True)
        async with (
            aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
                auto_decompress=False,
                timeout=aiohttp.ClientTimeout(total=None, sock_read=self._limits.seconds),
            ) as session,
            session.get(url, headers=_HEADERS, allow_redirects=False) as answer,
        ):
            if answer.status in _REDIRECT_STATUSES:
                return _parse_url(str(url.join(URL(answer.headers.get("Location", "")))))
            if answer.status != HTTPStatus.OK:
                raise _make_rejection(f"its server answers with status {answer.status}")
            return FetchedFile(await self._read_body(answer, reserve_memory), answer.content_type, url.name)

    async def _read_body(
        self, answer: aiohttp.ClientResponse, reserve_memory: Callable[[int], None]
    ) -> bytes:
        if answer.headers.get("Content-Encoding", "identity") != "identity":
            raise _make_rejection("its server compresses it, unasked")
        if not answer.content_type.startswith(self._limits.media_types):
            raise _make_rejection(
                f"it is of the type {sanitize_name(answer.content_type, 100)}, which is not fetched"
            )
        content = bytearray()
        if (answer.content_length or 0) <= self._limits.bytes:
            async for piece in answer.content.iter_chunked(_CHUNK_BYTES):
                reserve_memory(len(piece))
                content += piece
                if len(content) > self._limits.bytes:
                    break
            else:
                return bytes(content)
        raise _make_rejection(f"it is larger than {self._limits.bytes:,} bytes")

    async def _resolve_allowed(self, url: URL) -> list[str]:
        """The addresses that it may be fetched from."""
        host = url.raw_host or ""
        try:
            found = [str(ipaddress.ip_address(host))]
        except ValueError:
            try:
                found = await self._resolver.resolve(host.rstrip("."))
            except DnsResolutionFailed:
                raise _make_rejection("its name has no address") from None
        usable = [address for address in found if self._is_allowed(address)]
        if not usable:
            raise _make_rejection("it leads to an address that is not public")
        return usable

    def _is_allowed(self, text: str) -> bool:
        if not self._addresses.is_allowed(text):
            return False
        address = ipaddress.ip_address(text)
        # What translates to IPv4 here may lead to a network of ours.
        return address not in _NAT64 or any(address in network for network in self._private_networks)


class UrlPassthrough:
    """Lets addresses pass to the model's server, which fetches what they lead to from where it stands. Those that lead
    to no public address by their own words are refused; where a name leads, only that server will find out.

    private: networks that may be reached although nobody else can reach them.
    """

    def __init__(self, private_networks: tuple[IpNetwork, ...] = ()) -> None:
        self._addresses = AddressPolicy(private_networks)

    def check(self, url: str) -> None:
        """Raises FetchRefused."""
        host = (_parse_url(url).raw_host or "").rstrip(".")
        if not url.isascii() or not url.isprintable() or any(mark in url for mark in " \\"):
            raise _make_rejection("it is no http or https address")  # or not the same one to everybody
        try:
            ipaddress.ip_address(host)
        except ValueError:
            public = _is_public_name(host) and "://[" not in url
        else:
            public = self._addresses.is_allowed(host)
        if not public:
            raise _make_rejection("it leads to an address that is not public")


class _PinnedResolver(AbstractResolver):
    """Knows the addresses that were checked, and no others."""

    def __init__(self, addresses: list[str]) -> None:
        self._addresses = addresses

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in self._addresses
            if family == socket.AF_UNSPEC or (family == socket.AF_INET6) == (":" in address)
        ]

    async def close(self) -> None:
        pass


def _parse_url(text: str) -> URL:
    """Raises FetchRefused."""
    try:
        url = URL(text) if len(text) <= _MAX_URL_LENGTH else URL()
        whole = url.scheme in ("http", "https") and bool(url.raw_host) and url.explicit_port != 0
    except ValueError:
        whole, url = False, URL()
    if not whole:
        raise _make_rejection("it is no http or https address")
    if url.user is not None or url.password is not None:
        raise _make_rejection("it holds a user or a password")
    if "%" in (url.raw_host or ""):
        raise _make_rejection("it leads to an address that is not public")
    return url.with_fragment(None)


def _is_public_name(host: str) -> bool:
    """Whether it may be a name that all know and read alike, and is no number in disguise: 127.1, 0x7f000001."""
    host = host.lower()
    last = host.rpartition(".")[2]
    is_number = last.isdigit() or last.startswith("0x")
    return (
        _DOMAIN_NAME.fullmatch(host) is not None and not is_number and last not in _PRIVATE_TOP_LEVEL_DOMAINS
    )


def _make_rejection(why: str) -> UrlRejected:
    return UrlRejected(f"The address cannot be fetched: {why}.")
