"""What an allow-list lets through, from inside real sandboxes; imports `tests.support`."""

import pytest

from fumehood.sandboxd.sandbox import LocalSandbox
from tests.sandboxd.egress.conftest import PLAIN, SECURE, Net
from tests.support.sandboxes import run

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_urllib_over_http(net: Net, box: LocalSandbox) -> None:
    outcome = await run(
        box,
        "import urllib.request\n"
        f"print(urllib.request.urlopen('http://{PLAIN}:{net.plain.port}/a?b=1').read().decode())",
    )
    assert outcome.stdout == "GET /a?b=1\n", outcome
    assert net.plain.seen[0].headers["host"] == f"{PLAIN}:{net.plain.port}"


async def test_urllib_over_https(net: Net, box: LocalSandbox) -> None:
    outcome = await run(
        box,
        "import urllib.request\n"
        f"print(urllib.request.urlopen('https://{SECURE}:{net.secure.port}/s').read().decode())",
    )
    assert outcome.stdout == "GET /s\n", outcome
