"""Secrets reach their domain only, and never the code."""

import base64
import logging
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from fumehood.protocol.sandbox.sandbox_errors import SandboxStartFailed
from fumehood.protocol.sandbox.sandbox_messages import DomainSecret
from fumehood.sandbox_server.supervisor.sandbox_instance import SandboxInstance
from fumehood.sandbox_server.supervisor.supervisor import Supervisor
from tests.sandbox_server.egress.conftest import (
    OTHER,
    PLAIN,
    SECURE,
    EgressNetwork,
    fetch_through_proxy,
    net_settings,
)
from tests.support.sandbox_runs import run
from tests.support.websites import ReceivedRequest, Reply, Website, WebsiteAuthority

pytestmark = pytest.mark.asyncio(loop_scope="module")

VALUE = "sk-first-half-0123456789-second-half-9876543210"
SECRETS = [
    DomainSecret(domain=SECURE, name="API_KEY", value=VALUE),
    DomainSecret(domain=PLAIN, name="PLAIN_KEY", value=VALUE + "-plain"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def secret_sandbox(net: EgressNetwork) -> AsyncIterator[SandboxInstance]:
    made = await net.create(SECURE, PLAIN, secrets=SECRETS)
    yield made
    await made.destroy()


async def test_urllib_sends_the_secret_without_knowing_it(
    net: EgressNetwork, secret_sandbox: SandboxInstance
) -> None:
    outcome = await run(
        secret_sandbox,
        f"""
import os, urllib.request
print(os.environ["API_KEY"])
headers = {{"Authorization": "Bearer " + os.environ["API_KEY"], "X-Two": "$API_KEY;$PLAIN_KEY;$OTHER"}}
request = urllib.request.Request("https://{SECURE}:{net.secure.port}/$API_KEY?k=$API_KEY", headers=headers,
                                 data=b"body $API_KEY")
print(urllib.request.urlopen(request).read().decode())
""",
    )
    assert outcome.stdout.splitlines() == ["$API_KEY", "POST /$API_KEY?k=$API_KEYbody $API_KEY"], outcome
    (seen,) = net.secure.seen
    assert seen.headers["authorization"] == f"Bearer {VALUE}"
    assert seen.headers["x-two"] == f"{VALUE};$PLAIN_KEY;$OTHER"  # other domains' stay placeholders
    assert seen.headers["host"] == f"{SECURE}:{net.secure.port}"
    assert seen.target == "/$API_KEY?k=$API_KEY"
    assert seen.body == b"body $API_KEY"


async def test_curl_with_a_password(net: EgressNetwork, secret_sandbox: SandboxInstance) -> None:
    outcome = await run(
        secret_sandbox,
        f"""
import subprocess
command = 'curl -sS -u "me:$API_KEY" https://{SECURE}:{net.secure.port}/a https://{SECURE}:{net.secure.port}/b'
done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
print(done.stdout, done.stderr)
""",
    )
    assert "GET /aGET /b" in outcome.stdout, outcome
    expected = "Basic " + base64.b64encode(f"me:{VALUE}".encode()).decode()
    assert [seen.headers["authorization"] for seen in net.secure.seen] == [expected, expected]


async def test_a_connection_is_kept_for_several_requests(
    net: EgressNetwork, secret_sandbox: SandboxInstance
) -> None:
    before = net.secure.connections
    outcome = await run(
        secret_sandbox,
        f"""
import http.client, os
connection = http.client.HTTPSConnection("127.0.0.1", 3128)
connection.set_tunnel("{SECURE}", {net.secure.port})
for number in range(5):
    connection.request("GET", f"/{{number}}", headers={{"X-Key": os.environ["API_KEY"]}})
    print(connection.getresponse().read().decode())
connection.close()
""",
    )
    assert outcome.stdout.split() == [part for number in range(5) for part in ("GET", f"/{number}")], outcome
    assert net.secure.connections == before + 1
    assert {seen.headers["x-key"] for seen in net.secure.seen} == {VALUE}


async def test_never_over_plain_http(net: EgressNetwork, secret_sandbox: SandboxInstance) -> None:
    assert (
        await fetch_through_proxy(
            secret_sandbox, f"http://{PLAIN}:{net.plain.port}/", Authorization="$PLAIN_KEY"
        )
        == "GET /"
    )
    assert net.plain.seen[0].headers["authorization"] == "$PLAIN_KEY"


async def test_only_for_its_own_sandbox(net: EgressNetwork, box: SandboxInstance) -> None:
    """Another sandbox with the same domain and no secret has a tunnel, and its placeholder stays one."""
    answer = await fetch_through_proxy(box, f"https://{SECURE}:{net.secure.port}/", Authorization="$API_KEY")
    assert answer == "GET /"
    assert net.secure.seen[0].headers["authorization"] == "$API_KEY"
    outcome = await run(box, "import os; print(os.environ.get('API_KEY'))")
    assert outcome.stdout == "None\n"


@pytest.mark.parametrize(
    "request_",
    [
        "GET / HTTP/1.1\\r\\nHost: other.test\\r\\nX: $API_KEY\\r\\n\\r\\n",
        "GET / HTTP/1.1\\r\\nHost: data.test\\r\\nX: $API_KEY\\r\\n\\r\\n",
        "GET https://secure.test/ HTTP/1.1\\r\\nHost: secure.test\\r\\nX: $API_KEY\\r\\n\\r\\n",
        "CONNECT data.test:443 HTTP/1.1\\r\\nHost: data.test\\r\\nX: $API_KEY\\r\\n\\r\\n",
        "GET / HTTP/1.1\\r\\nHost: secure.test:PORT\\r\\nUpgrade: websocket\\r\\nX: $API_KEY\\r\\n\\r\\n",
        "TRACE / HTTP/1.1\\r\\nHost: secure.test:PORT\\r\\nX: $API_KEY\\r\\n\\r\\n",
        "GET / HTTP/1.1\\r\\nHost: secure.test:PORT\\r\\nContent-Length: 1\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n",
    ],
)
async def test_requests_within_are_checked_as_well(
    net: EgressNetwork, secret_sandbox: SandboxInstance, request_: str
) -> None:
    outcome = await run(
        secret_sandbox,
        f"""
import socket, ssl
s = socket.create_connection(("127.0.0.1", 3128), 30)
s.sendall(b"CONNECT {SECURE}:{net.secure.port} HTTP/1.1\\r\\nHost: {SECURE}:{net.secure.port}\\r\\n\\r\\n")
assert b" 200 " in s.recv(1000)
context = ssl.create_default_context()
context.set_alpn_protocols(["h2", "http/1.1"])
with context.wrap_socket(s, server_hostname="{SECURE}") as tls:
    print(tls.selected_alpn_protocol())
    tls.sendall(b"{request_.replace("PORT", str(net.secure.port))}")
    print(tls.recv(1000)[:12].decode())
""",
    )
    assert outcome.stdout.splitlines() == ["http/1.1", "HTTP/1.1 400"], outcome
    assert net.secure.seen == []


async def test_the_code_never_sees_it(net: EgressNetwork, secret_sandbox: SandboxInstance) -> None:
    """Neither in variables and files nor in the memory of any process; looked for in two halves."""
    outcome = await run(
        secret_sandbox,
        f"""
import os, urllib.request
request = urllib.request.Request("https://{SECURE}:{net.secure.port}/", headers={{"X-Key": "$API_KEY"}})
urllib.request.urlopen(request).read()
first, second = {VALUE[: len(VALUE) // 2]!r}.encode(), {VALUE[len(VALUE) // 2 :]!r}.encode()
found, looked = [], 0

def search(data, where):
    global looked
    looked += len(data)
    at = data.find(first)
    while at >= 0:
        if data[at + len(first):at + len(first) + len(second)] == second:
            found.append(where)
        at = data.find(first, at + 1)

for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        search(open(f"/proc/{{pid}}/environ", "rb").read(), pid)
        maps, memory = open(f"/proc/{{pid}}/maps").readlines(), open(f"/proc/{{pid}}/mem", "rb", 0)
    except OSError:
        continue
    for line in maps:
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if line.split()[1].startswith("rw"):
            memory.seek(start)
            while start < end:
                try:
                    piece = memory.read(min(end - start, 1 << 20))
                except OSError:
                    break
                search(piece, line)
                start += len(piece)
for top in ("/home", "/tmp", "/mnt", "/dev/shm", "/etc"):
    for directory, _, names in os.walk(top):
        for name in names:
            try:
                search(open(os.path.join(directory, name), "rb").read(), name)
            except OSError:
                pass
print(looked > 10_000_000, found)
""",
    )
    assert outcome.stdout == "True []\n", outcome
    assert net.secure.seen[0].headers["x-key"] == VALUE


async def test_no_file_of_the_user_appears(net: EgressNetwork, secret_sandbox: SandboxInstance) -> None:
    assert (await secret_sandbox.files.list()).files == []
    outcome = await run(
        secret_sandbox,
        "import ssl; print(len(ssl.create_default_context(cafile='/home/user/.fumehood/ca.pem').get_ca_certs()))",
    )
    assert int(outcome.stdout) >= 2


async def test_no_log_tells_it(
    net: EgressNetwork, secret_sandbox: SandboxInstance, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    await fetch_through_proxy(
        secret_sandbox, f"https://{SECURE}:{net.secure.port}/", Authorization="$API_KEY"
    )
    assert net.secure.seen[0].headers["authorization"] == VALUE
    assert await net.wait_for_events(1)
    shown = caplog.text + str([record.__dict__ for record in caplog.records]) + repr(net.events)
    assert VALUE not in shown
    assert VALUE not in repr(vars(secret_sandbox))


async def test_a_server_that_echoes_reveals_it(
    net: EgressNetwork, secret_sandbox: SandboxInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documented in docs/network.md: whoever gets the secret can tell the code."""

    def echo(seen: ReceivedRequest) -> Reply:
        return 200, [], seen.headers["x-key"].encode()

    monkeypatch.setattr(net.secure, "reply", echo)
    answer = await fetch_through_proxy(
        secret_sandbox, f"https://{SECURE}:{net.secure.port}/", **{"X-Key": "$API_KEY"}
    )
    assert answer == VALUE


async def test_the_server_must_prove_who_it_is(authority: WebsiteAuthority) -> None:
    """With a certificate for another name, the proxy does not tell the secret and says so."""
    async with (
        Website(tls=authority.context(OTHER)) as wrong,
        Website() as no_tls,
        Supervisor(net_settings(authority, wrong, no_tls)) as supervisor,
    ):
        net = EgressNetwork(supervisor, wrong, wrong, authority)
        box = await net.create(SECURE, secrets=SECRETS[:1])
        answer = await fetch_through_proxy(box, f"https://{SECURE}:{wrong.port}/", Authorization="$API_KEY")
        assert "HTTPError 502" in answer
        assert "the certificate of secure.test is not valid" in answer
        answer = await fetch_through_proxy(box, f"https://{SECURE}:{no_tls.port}/", Authorization="$API_KEY")
        assert "HTTPError 502" in answer
        assert wrong.seen == no_tls.seen == []


async def test_without_its_authority_the_upstream_is_not_trusted(authority: WebsiteAuthority) -> None:
    async with (
        Website(tls=authority.context(SECURE)) as site,
        Supervisor(net_settings(authority, site, egress_ca_file=None)) as supervisor,
    ):
        net = EgressNetwork(supervisor, site, site, authority)
        box = await net.create(SECURE, secrets=SECRETS[:1])
        answer = await fetch_through_proxy(box, f"https://{SECURE}:{site.port}/", Authorization="$API_KEY")
        assert "the certificate of secure.test is not valid" in answer
        assert site.seen == []


async def test_each_sandbox_has_an_authority_of_its_own(net: EgressNetwork) -> None:
    from fumehood.sandbox_server.egress.certificate_authority import SandboxCertificateAuthority

    one, two = (
        await SandboxCertificateAuthority.create([SECURE]),
        await SandboxCertificateAuthority.create([SECURE]),
    )
    assert one.pem != two.pem
    context = await one.server_context(SECURE)
    assert await one.server_context(SECURE) is context
    assert "PRIVATE" not in one.pem
    assert handshake(context, one.pem, SECURE) is None
    assert handshake(context, two.pem, SECURE) is not None
    # Beyond its domains a certificate of its making is worthless.
    assert "permitted subtree" in (handshake(await one.server_context(OTHER), one.pem, OTHER) or "")


def handshake(server: ssl.SSLContext, trusted: str, name: str) -> str | None:
    """What a client that trusts this authority says to this server, or None if it is content."""
    client = ssl.create_default_context(cadata=trusted)
    ends = [(ssl.MemoryBIO(), ssl.MemoryBIO()) for _ in range(2)]
    one = client.wrap_bio(*ends[0], server_hostname=name)
    two = server.wrap_bio(*ends[1], server_side=True)
    for _ in range(4):
        for side, mine, other in ((one, ends[0], ends[1]), (two, ends[1], ends[0])):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                return str(error)
            other[0].write(mine[1].read())
    return None


async def test_certificates_that_cannot_be_read(authority: WebsiteAuthority, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("no certificate")
    for file in (wrong, tmp_path / "missing.pem"):
        async with (
            Website() as site,
            Supervisor(net_settings(authority, site, egress_ca_file=file)) as supervisor,
        ):
            net = EgressNetwork(supervisor, site, site, authority)
            with pytest.raises(SandboxStartFailed, match="egress_ca_file"):
                await net.create(SECURE, secrets=SECRETS[:1])
            assert supervisor.claimed_sandboxes() == []
