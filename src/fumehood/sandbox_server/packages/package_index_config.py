"""The package index: its address, and the redaction of its credentials."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

# The first one that is set is used.
_URL_VARIABLES = ("FUMEHOOD_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
_MAX_MESSAGE = 2000


@dataclass(frozen=True, slots=True)
class PackageIndexConfig:
    """Where packages come from.

    url: None for uv's default. Credentials in it are passed only in the environment of the install jail.
    find_links: a directory of wheels to use besides.
    """

    url: str | None
    find_links: Path | None
    proxies: tuple[tuple[str, str], ...] = ()

    @classmethod
    def from_environment(
        cls, url: str | None, find_links: Path | None, environ: Mapping[str, str] = os.environ
    ) -> "PackageIndexConfig":
        """Use `url`, or the environment's; proxies come from the environment."""
        url = url or next((environ[name] for name in _URL_VARIABLES if environ.get(name)), None)
        names = [name for proxy in _PROXIES for name in (proxy, proxy.lower())]
        links = find_links and find_links.absolute()  # jails start in another directory
        return cls(url, links, tuple((name, environ[name]) for name in names if environ.get(name)))

    @property
    def identity(self) -> str:
        """A text that identifies the index, without credentials."""
        return f"{_strip_credentials(self.url or '')} {self.find_links or ''}"

    def environment(self) -> dict[str, str]:
        """Return the environment variables for uv."""
        variables = dict(self.proxies)
        if self.url is not None:
            variables["UV_DEFAULT_INDEX"] = self.url
        return variables

    def redact(self, text: str) -> str:
        """Return a text without credentials and control characters, of limited length."""
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
    """Return the credentials in a URL to redact, the longest first; a user name alone may be a token."""
    user = urlsplit(url).netloc.rpartition("@")[0]
    name, _, password = user.partition(":")
    return [secret for secret in (user, password, name) if len(secret) > 3]
