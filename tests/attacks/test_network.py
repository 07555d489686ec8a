"""Attacks over sockets: services of the host are out of reach."""

import contextlib
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import dedent

import pytest

from tests.attacks.conftest import Host
from tests.support.driver_client import SandboxClient


@dataclass
class Services:
    """What listens on the host: TCP and UDP on loopback, unix sockets by path and by abstract name."""

    tcp: socket.socket
    udp: socket.socket
    path: socket.socket
    abstract: socket.socket

    def touched(self) -> list[str]:
        found: list[str] = []
        for name in ("tcp", "udp", "path", "abstract"):
            listener: socket.socket = getattr(self, name)
            listener.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                found.append(f"{name}: {listener.recv(10) if name == 'udp' else listener.accept()}")
        return found


@pytest.fixture
def services() -> Iterator[Services]:
    with contextlib.ExitStack() as stack, tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.bind(("127.0.0.1", 0))
        by_path = stack.enter_context(socket.socket(socket.AF_UNIX))
        by_path.bind(f"{directory}/listener")
        os.chmod(f"{directory}/listener", 0o777)
        by_path.listen()
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
        abstract.bind(f"\0fumehood-attack-{os.getpid()}-{time.monotonic_ns()}")
        abstract.listen()
        yield Services(tcp, udp, by_path, abstract)


def test_loopback_services_of_the_host(box: SandboxClient, services: Services) -> None:
    tcp, udp = services.tcp.getsockname()[1], services.udp.getsockname()[1]
    program = f"""
        def tcp(address):
            with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as s:
                s.settimeout(5); s.connect((address, {tcp}))
        def udp():
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s: s.sendto(b"hello", ("127.0.0.1", {udp}))
        addresses = ("127.0.0.1", "127.1.2.3", "::1", "::ffff:127.0.0.1", "0.0.0.0")
        report([attempt(udp)] + [attempt(tcp, address) for address in addresses])
    """
    datagram, *streams = box.ask(dedent(program))
    assert datagram == "EACCES"
    assert set(streams) <= {"ECONNREFUSED", "ENETUNREACH", "EADDRNOTAVAIL"}
    assert services.touched() == []


def test_unix_sockets_of_the_host(box: SandboxClient, services: Services) -> None:
    path, abstract = services.path.getsockname(), services.abstract.getsockname()
    program = f"""
        def unix(address):
            with socket.socket(socket.AF_UNIX) as s: s.connect(address)
        usual = ["/run/docker.sock", "/var/run/docker.sock", "/run/dbus/system_bus_socket", "/run/systemd/notify"]
        report([attempt(unix, {abstract!r})] + [attempt(unix, path) for path in [{path!r}, *usual]])
    """
    abstract_answer, *by_path = box.ask(dedent(program))
    assert abstract_answer in ("ECONNREFUSED", "EPERM")
    assert set(by_path) == {"ENOENT"}
    assert services.touched() == []


def test_abstract_sockets_of_another_sandbox(host: Host, box: SandboxClient) -> None:
    other = host.create()
    listen = "s = socket.socket(socket.AF_UNIX); s.bind('\\0meeting'); s.listen(); report('up')"
    assert other.ask(listen) == "up"
    connect = "report(attempt(socket.socket(socket.AF_UNIX).connect, '\\0meeting'))"
    assert other.ask(connect) == "returned None"
    assert box.ask(connect) == "ECONNREFUSED"


@pytest.mark.parametrize("address", ["169.254.169.254", "10.0.0.1", "192.168.0.1", "172.17.0.1", "1.1.1.1"])
def test_nothing_leaves(box: SandboxClient, address: str) -> None:
    """There is no route, and the kernel says so at once; datagrams are not to be had at all."""
    program = f"""
        import time
        began = time.monotonic()
        def tcp():
            with socket.socket() as s: s.settimeout(20); s.connect(({address!r}, 80))
        def udp():
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s: s.sendto(b"x", ({address!r}, 53))
        answers = [attempt(tcp), attempt(udp)]
        report([answers, time.monotonic() - began])
    """
    answers, seconds = box.ask(dedent(program), timeout=60)
    assert answers == ["ENETUNREACH", "EACCES"]
    assert seconds < 10  # not a connection that timed out


def test_names_and_ipv6_lead_nowhere(box: SandboxClient) -> None:
    program = """
        def six(address):
            with socket.socket(socket.AF_INET6) as s: s.settimeout(20); s.connect((address, 80))
        def multicast():
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s: s.sendto(b"x", ("224.0.0.1", 5353))
        def broadcast():
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1); s.sendto(b"x", ("255.255.255.255", 9))
        try: name = socket.getaddrinfo("metadata.google.internal", 80)
        except socket.gaierror as error: name = "gaierror"
        report([name, attempt(six, "fd00:ec2::254"), attempt(six, "2606:4700::1111"),
                attempt(multicast), attempt(broadcast)])
    """
    assert box.ask(dedent(program), timeout=60) == [
        "gaierror",
        "ENETUNREACH",
        "ENETUNREACH",
        "EACCES",
        "EACCES",
    ]


def test_only_loopback_exists(box: SandboxClient) -> None:
    program = """
        report([open("/proc/self/net/dev").read().split()[-17:][0], len(open("/proc/self/net/dev").readlines()),
                open("/proc/self/net/route").readlines()[1:], open("/proc/self/net/unix").read().count("/run/")])
    """
    assert box.ask(dedent(program)) == ["lo:", 3, [], 0]


def test_loopback_of_its_own_works(box: SandboxClient) -> None:
    program = """
        server = socket.create_server(("127.0.0.1", 0))
        client = socket.create_connection(server.getsockname())
        client.sendall(b"hello"); report(server.accept()[0].recv(10).decode())
    """
    assert box.ask(dedent(program)) == "hello"


def test_families_that_reach_the_kernel(box: SandboxClient) -> None:
    """Every family but three is refused, and every raw or exotic protocol of those three."""
    program = """
        answers = {}
        for family in range(0, 60):
            for kind in (1, 2, 3, 4, 5, 6, 10):
                for protocol in (0, 1, 6, 17, 33, 58, 132, 136, 255, 262):
                    answer = call(41, family, kind, protocol)
                    if answer.isdigit():
                        os.close(int(answer)); answer = "made"
                    answers.setdefault(answer, []).append([family, kind, protocol])
        report(answers)
    """
    answers: dict[str, list[list[int]]] = box.ask(dedent(program))
    inet = {(family, 1, protocol) for family in (2, 10) for protocol in (0, 6)}
    unix = {(1, kind, 0) for kind in (1, 2, 5)}
    # AF_UNIX knows one protocol, under two names.
    made = {(family, kind, protocol) for family, kind, protocol in answers.pop("made")}
    assert made - {(1, kind, 1) for kind in (1, 2, 5)} == inet | unix
    assert set(answers) <= {"EAFNOSUPPORT", "EPROTONOSUPPORT", "EPERM", "EACCES", "ENOSYS", "ESOCKTNOSUPPORT"}


def test_named_families(box: SandboxClient) -> None:
    program = """
        pairs = (("NETLINK", "RAW"), ("VSOCK", "STREAM"), ("ALG", "SEQPACKET"), ("PACKET", "RAW"), ("TIPC", "RDM"),
                 ("CAN", "RAW"), ("QIPCRTR", "DGRAM"), ("RDS", "SEQPACKET"))
        report({family: attempt(socket.socket, getattr(socket, "AF_" + family), getattr(socket, "SOCK_" + kind))
                for family, kind in pairs})
    """
    assert set(box.ask(dedent(program)).values()) == {"EAFNOSUPPORT"}


def test_interfaces_cannot_be_changed(box: SandboxClient) -> None:
    program = """
        import fcntl, struct, subprocess
        s = socket.socket()
        up = struct.pack("16sH14x", b"lo", 0)
        report([attempt(fcntl.ioctl, s, 0x8914, up), attempt(os.open, "/dev/net/tun", os.O_RDWR),
                attempt(s.setsockopt, 1, 25, b"lo\\0"), attempt(s.setsockopt, 0, 64, bytes(84))])
    """
    flags, tun, bind, tables = box.ask(dedent(program))
    assert flags == "ENOTTY"
    assert tun == "ENOENT"
    assert {bind, tables} <= {"EPERM", "ENOSYS"}


def test_packets_of_the_host_cannot_be_counted(host: Host, box: SandboxClient) -> None:
    """Some files of a network namespace tell of all: when a neighbour is answered could be seen to the microsecond."""
    program = """
        answers = {}
        for place in ("self", "thread-self", "1", str(os.getpid())):
            for name in ("softnet_stat", "protocols", "sockstat"):
                path = f"/proc/{place}/net/{name}"
                answers.setdefault(name, set()).update([attempt(os.chmod, path, 0o444), attempt(open, path)])
        report({name: sorted(found) for name, found in answers.items()})
    """
    answers: dict[str, list[str]] = box.ask(dedent(program))
    if not host.driver.started["user_each"]:  # then it belongs to the user whom all sandboxes share
        del answers["sockstat"]
    for name, found in answers.items():
        assert set(found) <= {"EACCES", "EROFS", "ENOENT", "EPERM"}, (name, found)
