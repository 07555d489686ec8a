"""The proxy process: its privileges, its restarts, and a compromised one."""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fumehood.protocol.sandbox.sandbox_errors import SandboxStartFailed
from fumehood.protocol.sandbox.sandbox_messages import DomainSecret, NetworkAllowlist
from fumehood.sandbox_server.egress import control_messages, proxy_control
from fumehood.sandbox_server.egress.proxy_control import EgressController, ProxyProcess
from fumehood.sandbox_server.supervisor.supervisor import Supervisor
from tests.sandbox_server.egress.conftest import (
    PLAIN,
    SECURE,
    EgressNetwork,
    fetch_through_proxy,
    net_settings,
    send_raw_bytes,
)
from tests.support.sandbox_runs import run
from tests.support.waiting import wait_until
from tests.support.websites import Website, WebsiteAuthority

pytestmark = pytest.mark.asyncio(loop_scope="module")

VALUE = "a-very-secret-value"


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def proxy_pid(net: EgressNetwork) -> int:
    pid = net.supervisor.egress.pid
    assert pid is not None
    return pid


async def wait_for_new_pid(net: EgressNetwork, pid: int) -> int:
    await wait_until(lambda: net.supervisor.egress.pid not in (None, pid))
    return proxy_pid(net)


async def test_what_parses_hostile_bytes_is_not_root_and_has_no_rights(net: EgressNetwork) -> None:
    box = await net.create(PLAIN)
    assert await fetch_through_proxy(box, f"http://{PLAIN}:{net.plain.port}/") == "GET /"
    pid = proxy_pid(net)
    assert pid != os.getpid()
    found = status(pid)
    users = {int(user) for user in found["Uid"].split() + found["Gid"].split()}
    if os.geteuid() == 0:
        assert 0 not in users
        assert found["Groups"] == ""
        assert {int(capability, 16) for name, capability in found.items() if name.startswith("Cap")} == {0}
    else:
        assert users == {os.getuid(), os.getgid()}
        for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
            assert int(found[name], 16) == 0
    assert found["NoNewPrivs"] == "1"
    environment = Path(f"/proc/{pid}/environ")
    if os.geteuid() == 0:
        variables = {entry.partition(b"=")[0] for entry in environment.read_bytes().split(b"\0") if entry}
        assert variables <= {b"SSL_CERT_FILE", b"SSL_CERT_DIR", b"LC_CTYPE"}
    await box.destroy()


async def test_the_proxy_holds_no_descriptor_of_the_supervisor(net: EgressNetwork) -> None:
    """Its control socket, the listeners of its sandboxes, and what its event loop needs."""
    box = await net.create(PLAIN)
    await fetch_through_proxy(box, f"http://{PLAIN}:{net.plain.port}/")
    opened = [
        os.readlink(entry) for entry in Path(f"/proc/{proxy_pid(net)}/fd").iterdir() if entry.is_symlink()
    ]
    kinds = {
        target.partition(":")[0].partition(" ")[0] for target in opened if not target.startswith("/dev/")
    }
    assert kinds <= {"socket", "anon_inode", "pipe", "/memfd"}, opened
    assert not [target for target in opened if "disk" in target or target.endswith((".db", ".sock"))]
    await box.destroy()


async def test_the_supervisor_does_not_even_load_what_parses() -> None:
    modules = (
        "h11",
        "fumehood.sandbox_server.egress.proxy_connection",
        "fumehood.sandbox_server.egress.tls_client_hello",
        "fumehood.sandbox_server.egress.proxy",
    )
    code = (
        f"import sys, fumehood.sandbox_server.api.server; print([n for n in {modules!r} if n in sys.modules])"
    )
    loaded = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert loaded.stdout.strip() == "[]"


async def test_a_proxy_that_dies_is_started_again_with_what_its_sandboxes_may_reach(
    net: EgressNetwork, caplog: pytest.LogCaptureFixture
) -> None:
    secret = DomainSecret(domain=SECURE, name="API_KEY", value=VALUE)
    one, two = await net.create(PLAIN), await net.create(SECURE, secrets=[secret])
    plain, secure = f"http://{PLAIN}:{net.plain.port}/", f"https://{SECURE}:{net.secure.port}/"
    assert await fetch_through_proxy(two, secure, Authorization="$API_KEY") == "GET /"
    pid = proxy_pid(net)
    os.kill(pid, signal.SIGKILL)
    # Who connects meanwhile waits for the next one; nobody gets through without it.
    assert await fetch_through_proxy(one, plain) == "GET /"
    assert await wait_for_new_pid(net, pid) != pid
    assert "HTTPError 403" in await fetch_through_proxy(two, plain)
    assert await fetch_through_proxy(two, secure, Authorization="$API_KEY") == "GET /"
    assert net.secure.seen[-1].headers["authorization"] == VALUE
    assert "The egress proxy ended" in caplog.text
    assert VALUE not in caplog.text
    await asyncio.gather(one.destroy(), two.destroy())


async def test_connections_end_with_the_proxy(net: EgressNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(65536):
            pass

    monkeypatch.setattr(net.plain, "handler", never)
    box = await net.create(PLAIN)
    outcome = await run(
        box,
        f"""
import socket
s = socket.create_connection(("127.0.0.1", 3128), 30)
s.sendall(b"GET http://{PLAIN}:{net.plain.port}/ HTTP/1.1\\r\\nHost: {PLAIN}:{net.plain.port}\\r\\n\\r\\n")
""",
    )
    assert outcome.end.status == "ok", outcome
    await wait_until(lambda: net.plain.open_now)
    pid = proxy_pid(net)
    os.kill(pid, signal.SIGKILL)
    await wait_for_new_pid(net, pid)
    assert net.supervisor.egress.connections == 0
    outcome = await run(box, "try:\n    print(s.recv(100))\nexcept ConnectionError:\n    print(b'')")
    assert outcome.stdout == "b''\n", outcome
    await wait_until(lambda: not net.plain.open_now)
    await box.destroy()


async def test_a_new_proxy_knows_how_much_a_sandbox_has_moved(authority: WebsiteAuthority) -> None:
    async with (
        Website() as site,
        Supervisor(net_settings(authority, site, egress_bytes=2000)) as supervisor,
    ):
        net = EgressNetwork(supervisor, site, site, authority)
        box = await net.create(PLAIN)
        moved = 0

        def note(event: control_messages.EgressEvent) -> None:
            nonlocal moved
            moved += event.sent + event.received

        supervisor.egress.on_event = note
        url = f"http://{PLAIN}:{site.port}/{'x' * 700}"
        await fetch_through_proxy(box, url)
        (access,) = supervisor.egress._accesses.values()  # pyright: ignore[reportPrivateUsage]
        await wait_until(lambda: moved and access.bytes_used >= moved)
        pid = proxy_pid(net)
        os.kill(pid, signal.SIGKILL)
        await wait_for_new_pid(net, pid)
        answers = [await send_raw_bytes(box, f"GET {url} HTTP/1.0\r\n\r\n".encode()) for _ in range(3)]
        assert b"used up its network bytes" in answers[-1]


async def test_it_ends_with_the_supervisor(authority: WebsiteAuthority) -> None:
    async with Website() as site:
        async with Supervisor(net_settings(authority, site)) as supervisor:
            net = EgressNetwork(supervisor, site, site, authority)
            await net.create(PLAIN)
            pid = proxy_pid(net)
        assert not Path(f"/proc/{pid}").exists()


async def test_without_egress_there_is_no_proxy(authority: WebsiteAuthority) -> None:
    async with Supervisor(net_settings(authority, egress="off")) as supervisor:
        await supervisor.create()
        assert supervisor.egress.pid is None


class _LyingProxy:
    """A proxy that an attacker has taken over: it says what it likes."""

    def __init__(self) -> None:
        self.ours: socket.socket | None = None
        self.process: subprocess.Popen[bytes] | None = None

    async def start(self, configuration: control_messages.ProxyConfiguration) -> ProxyProcess:
        del configuration
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ours = theirs
        self.process = subprocess.Popen(["sleep", "60"])
        theirs.send(control_messages.encode(control_messages.ProxyReady()))
        return ProxyProcess(mine, self.process)


@pytest.mark.parametrize(
    "lie",
    [
        b"not json",
        b'{"type":"event"}',
        b'{"type":"open","number":1}',
        b'{"type":"status","connections":-1}',
        b'{"type":"event","domain":"x","port":70000,"verdict":"allowed"}',
        b'{"type":"event","domain":"x","port":1,"verdict":"maybe"}',
        b'{"type":"problem","level":40,"text":"' + b"x" * 3000 + b'"}',
    ],
)
async def test_a_proxy_that_says_nonsense_is_ended(
    authority: WebsiteAuthority, caplog: pytest.LogCaptureFixture, lie: bytes
) -> None:
    liar = _LyingProxy()
    egress = EgressController(net_settings(authority), start_proxy=liar.start)
    egress.start(12345)
    await wait_until(lambda: egress.pid is not None)
    assert liar.ours is not None
    process = liar.process
    assert process is not None
    liar.ours.send(lie)
    await wait_until(lambda: process.poll() is not None)
    assert process.returncode == -signal.SIGKILL
    assert "sent an invalid message" in caplog.text
    await egress.close()
    liar.ours.close()


async def test_what_a_lying_proxy_says_is_one_line_of_the_log(
    authority: WebsiteAuthority, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fumehood")
    liar = _LyingProxy()
    egress = EgressController(net_settings(authority), start_proxy=liar.start)
    events: list[control_messages.EgressEvent] = []
    egress.on_event = events.append
    egress.start(12345)
    await wait_until(lambda: liar.ours is not None)
    assert liar.ours is not None
    liar.ours.send(
        control_messages.encode(
            control_messages.EgressEvent(
                domain="a\nforged line", port=1, verdict="allowed", sandbox="another", number=7
            )
        )
    )
    await wait_until(lambda: events)
    assert events[0].sandbox == ""
    assert "\nforged" not in caplog.text
    await egress.close()
    liar.ours.close()


async def test_a_proxy_that_is_ready_again_and_again_is_sent_its_doors_once(
    authority: WebsiteAuthority,
) -> None:
    liar = _LyingProxy()
    egress = EgressController(net_settings(authority), start_proxy=liar.start)
    egress.start(12345)
    grant = await egress.grant(NetworkAllowlist(allowed_domains=["plain.test"]))
    assert grant is not None
    assert liar.ours is not None
    access = egress.create_access(grant)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        access.open(os.dup(listener.fileno()), "somebody")
    assert b'"open"' in liar.ours.recv(1 << 16)
    for _ in range(20):
        liar.ours.send(control_messages.encode(control_messages.ProxyReady()))
    liar.ours.send(control_messages.encode(control_messages.ProxyStatus(connections=7)))
    await wait_until(lambda: egress.connections == 7)
    access.close()
    assert b'"close"' in liar.ours.recv(1 << 16)  # and nothing in between
    await egress.close()
    liar.ours.close()


async def test_a_proxy_that_does_not_read_is_ended(
    authority: WebsiteAuthority, caplog: pytest.LogCaptureFixture
) -> None:
    liar = _LyingProxy()
    egress = EgressController(net_settings(authority), start_proxy=liar.start)
    egress.start(12345)
    grant = await egress.grant(NetworkAllowlist(allowed_domains=["plain.test"]))
    assert grant is not None
    first, before = liar.process, len(os.listdir("/proc/self/fd"))
    assert first is not None
    assert liar.ours is not None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for number in range(3000):
            access = egress.create_access(grant)
            access.open(os.dup(listener.fileno()), f"sandbox {number}")
            access.close()
            if "does not read its orders" in caplog.text:
                break
    assert len(os.listdir("/proc/self/fd")) < before + 3000
    await wait_until(lambda: first.poll() is not None)
    assert first.returncode == -signal.SIGKILL
    await egress.close()
    liar.ours.close()


async def test_a_start_that_took_too_long_is_followed_by_another(
    authority: WebsiteAuthority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_control, "_START_SECONDS", 0.2)
    starts: list[socket.socket] = []

    async def start_silent(configuration: control_messages.ProxyConfiguration) -> ProxyProcess:
        del configuration
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        starts.append(theirs)
        return ProxyProcess(mine)

    egress = EgressController(net_settings(authority), start_proxy=start_silent)
    egress.start(12345)
    try:
        async with asyncio.timeout(20):
            while len(starts) < 2:  # whoever comes while a start still waits shares it
                with pytest.raises(SandboxStartFailed, match="does not run"):
                    await egress.grant(NetworkAllowlist(allowed_domains=["plain.test"]))
    finally:
        await egress.close()
        for theirs in starts:
            theirs.close()
    assert len(starts) == 2


async def test_the_proxy_may_not_read_a_working_directory_that_is_on_the_path() -> None:
    source = (
        "import sys; sys.path.insert(0, '/'); from fumehood.sandbox_server.egress import proxy_worker; "
        "print('/' in proxy_worker._module_directories(), bool(proxy_worker._module_directories()))"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout == "False True\n"
