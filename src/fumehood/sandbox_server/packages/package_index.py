"""Where packages come from, and keeping its secrets out of what is said."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

# The first one that is set counts.
_URL_VARIABLES = ("FUMEHOOD_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
_MAX_MESSAGE = 2000


@dataclass(frozen=True, slots=True)
class PackageIndexConfig:
    """Where packages come from.

    url: None is uv's own default; credentials in it travel only through the environment of the install jail.
    """

    url: str | None
    find_links: Path | None
    proxies: tuple[tuple[str, str], ...] = ()

    @classmethod
    def from_environment(
        cls, url: str | None, find_links: Path | None, environ: Mapping[str, str] = os.environ
    ) -> "PackageIndexConfig":
        url = url or next((environ[name] for name in _URL_VARIABLES if environ.get(name)), None)
        names = [name for proxy in _PROXIES for name in (proxy, proxy.lower())]
        links = find_links and find_links.absolute()  # jails are made in another directory
        return cls(url, links, tuple((name, environ[name]) for name in names if environ.get(name)))

    @property
    def identity(self) -> str:
        """What tells it from another one, without credentials."""
        return f"{_strip_credentials(self.url or '')} {self.find_links or ''}"

    def environment(self) -> dict[str, str]:
        chosen = dict(self.proxies)
        if self.url is not None:
            chosen["UV_DEFAULT_INDEX"] = self.url
        return chosen

    def redact(self, text: str) -> str:
        """Fit to be shown: no credentials, no control characters, bounded."""
        text = text[: 16 * _MAX_MESSAGE]
        for address in (self.url, *(value for _, value in self.proxies)):
            for secret in _extract_credentials(address or ""):
                text = text.replace(secret, "****")
        text = re.sub(r"://[^\s/@]+@", "://****@", text)
        text = "".join(char if char.isprintable() or char == "\n" else "?" for char in text)
        return text if len(text) <= _MAX_MESSAGE else text[:_MAX_MESSAGE] + "…"


def _strip_credentials(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _extract_credentials(url: str) -> list[str]:
    """The user and password of a URL as they may be quoted, the longest first; a mere user name may be a token."""
    user = urlsplit(url).netloc.rpartition("@")[0]
    name, _, password = user.partition(":")
    return [secret for secret in (user, password, name) if len(secret) > 3]
