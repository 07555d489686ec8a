"""What is fetched from others' addresses, and what never is."""

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fumehood.files import InputSettings
from fumehood.files.url_fetcher import FetchedFile, PassthroughUrlChecker, UrlFetcher, UrlFetchError
from fumehood.http_server.dns_resolver import DnsResolutionFailed, DnsResolver
from tests.support.websites import ReceivedRequest, Reply, Website

HERE = "127.0.0.1"
LOOPBACK = ("127.0.0.0/8",)
TEXT = [("Content-Type", "text/csv; charset=utf-8")]


class TableResolver(DnsResolver):
    """Asks nobody."""

    async def resolve(self, name: str) -> list[str]:
        if name not in self._hosts:
            raise DnsResolutionFailed
        return await super().resolve(name)


def fetcher(hosts: dict[str, str] | None = None, **limits: Any) -> UrlFetcher:
    """One that may reach this machine."""
    settings = InputSettings(fetch_private_networks=LOOPBACK, **limits)
    return UrlFetcher(settings, TableResolver(hosts or {"files.test": HERE}, timeout=5))


async def refusal(fetching: Awaitable[FetchedFile]) -> str:
    with pytest.raises(UrlFetchError) as caught:
        await fetching
    said = str(caught.value)
    assert HERE not in said
    return said.removeprefix("The URL cannot be fetched: ")


def answers(status: int, headers: list[tuple[str, str]], body: bytes) -> Callable[[ReceivedRequest], Reply]:
    return lambda _: (status, headers, body)


async def test_a_file_is_fetched_with_nothing_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with Website(reply=answers(200, [*TEXT, ("Set-Cookie", "a=b")], b"a,b\n")) as site:
        subject = fetcher()
        for _ in range(2):
            found = await subject.fetch(f"http://files.test:{site.port}/x/t%20a.csv?key=1#there")
            assert found == FetchedFile(b"a,b\n", "text/csv", "t a.csv")
    for seen in site.seen:
        assert (seen.method, seen.target) == ("GET", "/x/t%20a.csv?key=1")
        assert {name.lower(): value for name, value in seen.headers.items()} == {
            "host": f"files.test:{site.port}",
            "accept": "*/*",
            "accept-encoding": "identity",
            "user-agent": "fumehood",
            "connection": "close",
        }


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
        *("224.0.0.1", "255.255.255.255", "168.63.129.16"),
        *("::1", "::", "fe80::1", "fc00::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:8.8.8.8"),
        *("64:ff9b::7f00:1", "64:ff9b::808:808", "64:ff9b:1::1", "2002:7f00:1::", "2001::1"),
    ],
)
async def test_addresses_that_are_not_public_are_refused(address: str) -> None:
    """As they are written, and as what a name turns out to mean."""
    subject = UrlFetcher(InputSettings(), resolver=DnsResolver({"innocent.test": address}, timeout=5))
    written = f"[{address}]" if ":" in address else address
    assert ipaddress.ip_address(address)
    for host in (written, "innocent.test", "innocent.test."):
        assert await refusal(subject.fetch(f"http://{host}/")) == "it leads to an address that is not public."


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("file:///etc/passwd", "it is no http or https URL."),
        ("ftp://files.test/x", "it is no http or https URL."),
        ("//files.test/x", "it is no http or https URL."),
        ("http://", "it is no http or https URL."),
        ("http://[::1", "it is no http or https URL."),
        ("http://files.test:99999/", "it is no http or https URL."),
        ("http://files.test/" + "x" * 9000, "it is no http or https URL."),
        ("http://user:secret@files.test/x", "it holds a user or a password."),
        ("http://[fe80::1%25eth0]/", "it leads to an address that is not public."),
        ("http://2130706433/", "its name has no address."),
        ("http://0x7f.1/", "its name has no address."),
        ("http://nobody.invalid/", "its name has no address."),
        ("http://①②⑦.⓪.⓪.①:1/", "its server does not respond properly."),
    ],
)
async def test_addresses_that_are_none(url: str, why: str) -> None:
    assert await refusal(fetcher().fetch(url)) == why


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com/a%20b.png?x=1#y",
        "http://images.example.co.uk:8080/p.jpg",
        "https://xn--bcher-kva.example/",
        "https://www.example.de/",
        "https://bad.cafe/",
        "https://93.184.215.14/p.png",
        "https://[2606:2800:21f:cb07:6820:80da:af6b:8b2c]/p.png",
        "http://10.1.2.3/of-the-operator",
    ],
)
def test_addresses_that_may_pass(url: str) -> None:
    PassthroughUrlChecker(InputSettings(fetch_private_networks=("10.1.0.0/16",))).check(url)


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "gopher://example.com/",
        "u",
        "http://user:password@example.com/",
        "http://localhost/",
        "http://a.localhost:8000/",
        "http://metadata.google.internal/",
        "http://printer.local/",
        "http://vllm:8000/metrics",
        "http://127.0.0.1/",
        "http://127.1/",
        "http://0x7f.1/",
        "http://2130706433/",
        "http://0x7f000001/",
        "http://1.2.3.0x4/",
        "http://017700000001/",
        "http://169.254.169.254/latest/meta-data/",
        "http://169.254.169.254./",
        "http://[::1]/",
        "http://[::ffff:10.0.0.1]/",
        "http://10.0.0.1/",
        "http://\uff11\uff10.0.0.1/",
        "http://example.com\\@10.0.0.1/",
        "http://example.com/\n",
        "http://example.com /",
        "http://10.0.0.1;.example.com/",
        "http://10.0.0.1&.example.com/",
        "http://10.0.0.1,.example.com/",
        "http://a..example.com/",
        "http://[v1.x]/",
        "http://[64:ff9b::a00:1]/",
    ],
)
def test_addresses_that_may_not_pass(url: str) -> None:
    with pytest.raises(UrlFetchError):
        PassthroughUrlChecker(InputSettings()).check(url)


async def test_every_redirection_is_looked_at() -> None:
    async with Website() as site:
        subject = fetcher({"files.test": HERE, "inside.test": "10.0.0.1"})
        base = f"http://files.test:{site.port}"
        found = await subject.fetch(f"{base}/redirect?{base}/redirect?/end")
        assert found.content == b"GET /end"
        for target in ("http://inside.test/", "http://169.254.169.254/latest/meta-data"):
            assert (
                await refusal(subject.fetch(f"{base}/redirect?{target}"))
                == "it leads to an address that is not public."
            )
        for target in ("file:///etc/passwd", "gopher://files.test/"):
            assert await refusal(subject.fetch(f"{base}/redirect?{target}")) == "it is no http or https URL."
    async with Website(reply=answers(302, [("Location", "http://[::1]/")], b"")) as site:
        said = await refusal(fetcher().fetch(f"http://files.test:{site.port}/"))
        assert said == "it leads to an address that is not public."
    async with Website(reply=answers(307, [("Location", "/again")], b"")) as site:
        assert await refusal(fetcher().fetch(f"http://files.test:{site.port}/")) == "it redirects too often."
        assert len(site.seen) == 6


async def test_the_address_that_was_checked_is_the_one_that_is_used() -> None:
    """A name that means something else the next time is not asked again."""

    class Turncoat(DnsResolver):
        asked = 0

        async def resolve(self, name: str) -> list[str]:
            self.asked += 1
            return [HERE] if self.asked == 1 else ["10.0.0.1"]

    async with Website() as site:
        resolver = Turncoat({}, timeout=5)
        found = await UrlFetcher(InputSettings(fetch_private_networks=LOOPBACK), resolver).fetch(
            f"http://rebound.test:{site.port}/x"
        )
        assert (found.content, resolver.asked) == (b"GET /x", 1)


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (answers(404, TEXT, b"no"), "its server answers with status 404."),
        (answers(206, TEXT, b"no"), "its server answers with status 206."),
        (answers(200, TEXT, b"x" * 101), "it is larger than 100 bytes."),
        (
            answers(200, [("Content-Type", "video/mp4")], b""),
            "it is of the type video/mp4, which is not fetched.",
        ),
        (
            answers(200, [*TEXT, ("Content-Encoding", "gzip")], b"x"),
            "its server compresses it although that was not requested.",
        ),
        (answers(302, [("Location", "http://[")], b""), "its server does not respond properly."),
    ],
)
async def test_answers_that_are_refused(reply: Callable[[ReceivedRequest], Reply], why: str) -> None:
    async with Website(reply=reply) as site:
        assert await refusal(fetcher(fetch_bytes=100).fetch(f"http://files.test:{site.port}/")) == why


async def test_a_body_without_an_end_is_cut_off_and_a_silent_server_is_left() -> None:
    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n")
        while True:
            writer.write(b"x" * 1000)
            await writer.drain()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    async with Website(handler=endless) as site:
        url = f"http://files.test:{site.port}/"
        assert await refusal(fetcher(fetch_bytes=5000).fetch(url)) == "it is larger than 5,000 bytes."
    async with Website(handler=silent) as site:
        url = f"http://files.test:{site.port}/"
        assert await refusal(fetcher(fetch_timeout=0.2).fetch(url)) == "it took longer than 0.2 seconds."
