"""Fetches what an address of somebody's leads to, or lets it pass; imports aiohttp, `protocol` and `serving`.

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

from fumehood.protocol.names import clean_name
from fumehood.serving.addresses import Addresses, Network
from fumehood.serving.resolver import ResolveFailed, Resolver

_MOST_REDIRECTIONS = 5
_REDIRECTIONS = frozenset({301, 302, 303, 307, 308})
_LONGEST_URL = 8192
_PIECE = 64 << 10
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)+")
_OWN_DOMAINS = frozenset({"localhost", "local", "internal", "localdomain", "lan", "home"})
_HEADERS = {"Accept": "*/*", "Accept-Encoding": "identity", "User-Agent": "fumehood"}


class FetchRefused(Exception):
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
class Fetched:
    """`name` is the last part of the address, as it stands there; `media_type` what the server called it."""

    content: bytes
    media_type: str
    name: str


class Fetcher:
    """Fetches files from addresses that callers name, and that are not to be trusted.

    private: networks that may be reached although nobody else can reach them.
    """

    def __init__(
        self,
        limits: FetchLimits | None = None,
        private: tuple[Network, ...] = (),
        resolver: Resolver | None = None,
    ) -> None:
        self._limits = limits or FetchLimits()
        self._private = private
        self._addresses = Addresses(private)
        self._resolver = resolver or Resolver({}, timeout=self._limits.seconds)

    async def fetch(self, url: str, take: Callable[[int], None] = lambda _: None) -> Fetched:
        """Raises FetchRefused, and what `take` raises, which is told of the bytes as they come."""
        try:
            async with asyncio.timeout(self._limits.seconds):
                return await self._follow(url, take)
        except TimeoutError:
            raise _refused(f"it took longer than {self._limits.seconds:g} seconds") from None
        except (aiohttp.ClientError, OSError, ValueError):  # their words may tell of our network
            raise _refused("its server does not answer as it should") from None

    def close(self) -> None:
        self._resolver.close()

    async def _follow(self, url: str, take: Callable[[int], None]) -> Fetched:
        address = _checked(url)
        for _ in range(_MOST_REDIRECTIONS + 1):
            found = await self._ask(address, take)
            if isinstance(found, Fetched):
                return found
            if address.scheme == "https" and found.scheme != "https":
                raise _refused("it leads from https to http")
            address = found
        raise _refused("it leads on and on")

    async def _ask(self, url: URL, take: Callable[[int], None]) -> Fetched | URL:
        """The answer, or where it leads to."""
        pinned = _Pinned(await self._usable(url))
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
            if answer.status in _REDIRECTIONS:
                return _checked(str(url.join(URL(answer.headers.get("Location", "")))))
            if answer.status != HTTPStatus.OK:
                raise _refused(f"its server answers with status {answer.status}")
            return Fetched(await self._read(answer, take), answer.content_type, url.name)

    async def _read(self, answer: aiohttp.ClientResponse, take: Callable[[int], None]) -> bytes:
        if answer.headers.get("Content-Encoding", "identity") != "identity":
            raise _refused("its server compresses it, unasked")
        if not answer.content_type.startswith(self._limits.media_types):
            raise _refused(f"it is of the type {clean_name(answer.content_type, 100)}, which is not fetched")
        content = bytearray()
        if (answer.content_length or 0) <= self._limits.bytes:
            async for piece in answer.content.iter_chunked(_PIECE):
                take(len(piece))
                content += piece
                if len(content) > self._limits.bytes:
                    break
            else:
                return bytes(content)
        raise _refused(f"it is larger than {self._limits.bytes:,} bytes")

    async def _usable(self, url: URL) -> list[str]:
        """The addresses that it may be fetched from."""
        host = url.raw_host or ""
        try:
            found = [str(ipaddress.ip_address(host))]
        except ValueError:
            try:
                found = await self._resolver.addresses(host.rstrip("."))
            except ResolveFailed:
                raise _refused("its name has no address") from None
        usable = [address for address in found if self._may_reach(address)]
        if not usable:
            raise _refused("it leads to an address that is not public")
        return usable

    def _may_reach(self, text: str) -> bool:
        if not self._addresses.allowed(text):
            return False
        address = ipaddress.ip_address(text)
        # What translates to IPv4 here may lead to a network of ours.
        return address not in _NAT64 or any(address in network for network in self._private)


class Passing:
    """Lets addresses pass to the model's server, which fetches what they lead to from where it stands. Those that lead
    to no public address by their own words are refused; where a name leads, only that server will find out.

    private: networks that may be reached although nobody else can reach them.
    """

    def __init__(self, private: tuple[Network, ...] = ()) -> None:
        self._addresses = Addresses(private)

    def check(self, url: str) -> None:
        """Raises FetchRefused."""
        host = (_checked(url).raw_host or "").rstrip(".")
        if not url.isascii() or not url.isprintable() or any(mark in url for mark in " \\"):
            raise _refused("it is no http or https address")  # or not the same one to everybody
        try:
            ipaddress.ip_address(host)
        except ValueError:
            public = _is_name(host) and "://[" not in url
        else:
            public = self._addresses.allowed(host)
        if not public:
            raise _refused("it leads to an address that is not public")


class _Pinned(AbstractResolver):
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


def _checked(text: str) -> URL:
    """Raises FetchRefused."""
    try:
        url = URL(text) if len(text) <= _LONGEST_URL else URL()
        whole = url.scheme in ("http", "https") and bool(url.raw_host) and url.explicit_port != 0
    except ValueError:
        whole, url = False, URL()
    if not whole:
        raise _refused("it is no http or https address")
    if url.user is not None or url.password is not None:
        raise _refused("it holds a user or a password")
    if "%" in (url.raw_host or ""):
        raise _refused("it leads to an address that is not public")
    return url.with_fragment(None)


def _is_name(host: str) -> bool:
    """Whether it may be a name that all know and read alike, and is no number in disguise: 127.1, 0x7f000001."""
    host = host.lower()
    last = host.rpartition(".")[2]
    is_number = last.isdigit() or last.startswith("0x")
    return _NAME.fullmatch(host) is not None and not is_number and last not in _OWN_DOMAINS


def _refused(why: str) -> FetchRefused:
    return FetchRefused(f"The address cannot be fetched: {why}.")
