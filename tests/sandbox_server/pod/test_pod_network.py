"""Allow-lists in pods: a proxy in another container, for code that has a network namespace of its own."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.pods import run_pod
from tests.support.websites import Website

pytestmark = pytest.mark.asyncio

_ALLOWED: dict[str, Any] = {"type": "allowlist", "allowed_domains": ["site.test"]}
_GET = """
import urllib.error, urllib.request
for url in ({urls}):
    try:
        print(urllib.request.urlopen(url, timeout=10).status)
    except urllib.error.HTTPError as error:
        print(error.code)
    except OSError as error:
        print(type(error).__name__)
"""


def _egress_settings(port: int) -> dict[str, str]:
    return {
        "FUMEHOOD_SANDBOX_EGRESS": "allowlist",
        "FUMEHOOD_SANDBOX_EGRESS_HOSTS": json.dumps({"site.test": "127.0.0.1", "other.test": "127.0.0.1"}),
        "FUMEHOOD_SANDBOX_EGRESS_PRIVATE_NETWORKS": "127.0.0.1/32",
        "FUMEHOOD_SANDBOX_EGRESS_PORTS": str(port),
    }


async def test_code_reaches_its_allow_list_through_the_proxy_and_nothing_else(pod_directory: Path) -> None:
    async with (
        Website() as site,
        run_pod(
            pod_directory, has_egress=True, allow_unshare=True, environment=_egress_settings(site.port)
        ) as (pod, client),
    ):
        await client.create_sandbox("box", network=_ALLOWED)
        urls = [f"http://site.test:{site.port}/", f"http://other.test:{site.port}/"]
        events = await client.run_code("box", _GET.format(urls=", ".join(map(repr, urls))))
        assert "".join(event.get("text", "") for event in events).split() == ["200", "403"]
        direct = f"import socket\nsocket.create_connection(('127.0.0.1', {site.port}), timeout=2)"
        assert (await client.run_code("box", direct))[-1]["status"] == "error"
        requests = [
            json.loads(line) for line in pod.read_log("server").splitlines() if "egress_request" in line
        ]
        assert sorted((one["domain"], one["verdict"]) for one in requests) == [
            ("other.test", "refused"),
            ("site.test", "allowed"),
        ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"has_egress": True}, "use a runtime class that lets it"),
        ({"allow_unshare": True}, "add the container `egress`"),
        ({"allow_unshare": True, "has_egress": True, "environment": {}}, "setting egress to allowlist"),
    ],
    ids=["no own network", "no proxy", "off"],
)
async def test_where_it_cannot_be_confined_it_is_refused_before_the_run(
    pod_directory: Path, options: dict[str, Any], message: str
) -> None:
    environment = options.pop("environment", _egress_settings(80))
    async with run_pod(pod_directory, environment=environment, **options) as (_, client):
        answer = await client.request("PUT", "/sandboxes/box", {"network": _ALLOWED})
        assert answer.error == (400, "invalid_request", "network")
        assert message in answer.json["error"]["message"]
        await client.create_sandbox("box")  # the pod is not used up
