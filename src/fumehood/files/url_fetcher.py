"""Fetches the URLs of requests, protected against server-side request forgery, or passes them on.

The host name is resolved once; the resolved addresses are checked, and the connection goes to one of them. Every
redirect is checked like the first URL. Requests carry no credentials and no cookies, and ignore proxy variables.
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

from fumehood.files.file_settings import InputSettings
from fumehood.http_server.address_policy import AddressPolicy, parse_networks
from fumehood.http_server.dns_resolver import DnsResolutionFailed, DnsResolver
from fumehood.protocol.name_sanitizing import sanitize_name

_MAX_REDIRECTS = 5
_REDIRECT_STATUSES = frozenset({301, 302, 303, 307, 308})
_MAX_URL_LENGTH = 8192
_CHUNK_BYTES = 64 << 10
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_DOMAIN_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)+")
_PRIVATE_TOP_LEVEL_DOMAINS = frozenset({"localhost", "local", "internal", "localdomain", "lan", "home"})
_MEDIA_TYPES = ("text/", "application/", "image/", "binary/octet-stream")  # accepted prefixes
_HEADERS = {"Accept": "*/*", "Accept-Encoding": "identity", "User-Agent": "fumehood"}


class UrlFetchError(Exception):
    """The URL must not or cannot be fetched. The message is for the caller and names no internal address."""


@dataclass(frozen=True, slots=True)
class FetchedFile:
    """`name` is the last part of the URL path; `media_type` comes from the server."""

    content: bytes
    media_type: str
    name: str


class UrlFetcher:
    """Fetches files from untrusted URLs."""

    def __init__(self, settings: InputSettings, resolver: DnsResolver | None = None) -> None:
        self._settings = settings
        self._private_networks = parse_networks(settings.fetch_private_networks)
        self._addresses = AddressPolicy(self._private_networks)
        self._resolver = resolver or DnsResolver({}, timeout=settings.fetch_timeout)

    async def fetch(self, url: str, reserve_memory: Callable[[int], None] = lambda _: None) -> FetchedFile:
        """Raises UrlFetchError, and what `reserve_memory` raises; it is called with the size of each chunk."""
        try:
            async with asyncio.timeout(self._settings.fetch_timeout):
                return await self._follow_redirects(url, reserve_memory)
        except TimeoutError:
            raise _make_rejection(f"it took longer than {self._settings.fetch_timeout:g} seconds") from None
        except (aiohttp.ClientError, OSError, ValueError):  # their messages may describe our network
            raise _make_rejection("its server does not respond properly") from None

    def close(self) -> None:
        self._resolver.close()

    async def _follow_redirects(self, url: str, reserve_memory: Callable[[int], None]) -> FetchedFile:
        current = _parse_url(url)
        for _ in range(_MAX_REDIRECTS + 1):
            result = await self._request(current, reserve_memory)
            if isinstance(result, FetchedFile):
                return result
            if current.scheme == "https" and result.scheme != "https":
                raise _make_rejection("it redirects from https to http")
            current = result
        raise _make_rejection("it redirects too often")

    async def _request(self, url: URL, reserve_memory: Callable[[int], None]) -> FetchedFile | URL:
        """Return the file, or the target of a redirect."""
        pinned = _PinnedResolver(await self._resolve_allowed(url))
        connector = aiohttp.TCPConnector(resolver=pinned, use_dns_cache=False, force_close=True)
        async with (
            aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
                auto_decompress=False,
                timeout=aiohttp.ClientTimeout(total=None, sock_read=self._settings.fetch_timeout),
            ) as session,
            session.get(url, headers=_HEADERS, allow_redirects=False) as response,
        ):
            if response.status in _REDIRECT_STATUSES:
                return _parse_url(str(url.join(URL(response.headers.get("Location", "")))))
            if response.status != HTTPStatus.OK:
                raise _make_rejection(f"its server answers with status {response.status}")
            content = await self._read_body(response, reserve_memory)
            return FetchedFile(content, response.content_type, url.name)

    async def _read_body(
        self, response: aiohttp.ClientResponse, reserve_memory: Callable[[int], None]
    ) -> bytes:
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise _make_rejection("its server compresses it although that was not requested")
        if not response.content_type.startswith(_MEDIA_TYPES):
            raise _make_rejection(
                f"it is of the type {sanitize_name(response.content_type, 100)}, which is not fetched"
            )
        content = bytearray()
        if (response.content_length or 0) <= self._settings.fetch_bytes:
            async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
                reserve_memory(len(chunk))
                content += chunk
                if len(content) > self._settings.fetch_bytes:
                    break
            else:
                return bytes(content)
        raise _make_rejection(f"it is larger than {self._settings.fetch_bytes:,} bytes")

    async def _resolve_allowed(self, url: URL) -> list[str]:
        """Resolve the host to the IP addresses that are allowed. Raises UrlFetchError if there is none."""
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
        # A NAT64 address may be translated to a private IPv4 address.
        return address not in _NAT64 or any(address in network for network in self._private_networks)


class PassthroughUrlChecker:
    """Passes URLs on to the model server, which fetches them itself.

    URLs that name a non-public address are rejected; what a host name resolves to, only the model server knows.
    """

    def __init__(self, settings: InputSettings) -> None:
        self._addresses = AddressPolicy(parse_networks(settings.fetch_private_networks))

    def check(self, url: str) -> None:
        """Raises UrlFetchError."""
        host = (_parse_url(url).raw_host or "").rstrip(".")
        if not url.isascii() or not url.isprintable() or any(mark in url for mark in " \\"):
            raise _make_rejection("it is no http or https URL")  # parsers could disagree about it
        try:
            ipaddress.ip_address(host)
        except ValueError:
            is_public = _is_public_name(host) and "://[" not in url
        else:
            is_public = self._addresses.is_allowed(host)
        if not is_public:
            raise _make_rejection("it leads to an address that is not public")


class _PinnedResolver(AbstractResolver):
    """Resolves every host to the checked addresses."""

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
    """Raises UrlFetchError."""
    try:
        url = URL(text) if len(text) <= _MAX_URL_LENGTH else URL()
        is_valid = url.scheme in ("http", "https") and bool(url.raw_host) and url.explicit_port != 0
    except ValueError:
        is_valid, url = False, URL()
    if not is_valid:
        raise _make_rejection("it is no http or https URL")
    if url.user is not None or url.password is not None:
        raise _make_rejection("it holds a user or a password")
    if "%" in (url.raw_host or ""):
        raise _make_rejection("it leads to an address that is not public")
    return url.with_fragment(None)


def _is_public_name(host: str) -> bool:
    """Whether it can be a public domain name, and not a number in disguise: 127.1, 0x7f000001."""
    host = host.lower()
    last = host.rpartition(".")[2]
    is_number = last.isdigit() or last.startswith("0x")
    return (
        _DOMAIN_NAME.fullmatch(host) is not None and not is_number and last not in _PRIVATE_TOP_LEVEL_DOMAINS
    )


def _make_rejection(reason: str) -> UrlFetchError:
    return UrlFetchError(f"The URL cannot be fetched: {reason}.")
