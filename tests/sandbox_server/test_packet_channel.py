"""PacketChannel: order, descriptors, floods, end of file."""

import asyncio
import itertools
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from fumehood.sandbox_server.packet_channel import PacketChannel
from tests.support.waiting import wait_until


@dataclass
class Received:
    packets: list[bytes] = field(default_factory=list[bytes])
    fds: list[int] = field(default_factory=list[int])
    closed: bool = False

    def packet(self, body: bytes, fds: list[int]) -> None:
        self.packets.append(body)
        self.fds += fds

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    yield mine, theirs
    theirs.close()


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_everything_arrives_in_order_through_a_full_buffer(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    mine, theirs = pair
    received = Received()
    sender = PacketChannel(mine, on_packet=received.packet, on_close=received.close)
    reader, writer = os.pipe()
    for number in range(2000):  # far more than the socket holds: the rest waits
        sender.send(b"%d" % number, [reader] if number % 500 == 0 else None)
    os.close(reader)
    got: list[bytes] = []
    passed = 0
    theirs.setblocking(False)
    while len(got) < 2000:
        try:
            body, fds, _, _ = socket.recv_fds(theirs, 100, 4)
        except BlockingIOError:
            await asyncio.sleep(0)
            continue
        got.append(body)
        passed += len(fds)
        for fd in fds:
            os.close(fd)
    os.close(writer)
    sender.close()
    assert got == [b"%d" % number for number in range(2000)]
    assert passed == 4


async def test_descriptors_are_dropped_unless_asked_for(pair: tuple[socket.socket, socket.socket]) -> None:
    mine, theirs = pair
    received = Received()
    packets = PacketChannel(mine, on_packet=received.packet, on_close=received.close)
    before = open_fds()
    null = os.open("/dev/null", os.O_RDONLY)
    for _ in range(100):
        socket.send_fds(theirs, [b"x"], [null] * 10)
    os.close(null)
    await wait_until(lambda: len(received.packets) == 100)
    packets.close()
    assert received.fds == []
    assert open_fds() == before - 1


async def test_descriptors_come_through_when_accepted(pair: tuple[socket.socket, socket.socket]) -> None:
    mine, theirs = pair
    received = Received()
    packets = PacketChannel(mine, on_packet=received.packet, on_close=received.close, accept_fds=True)
    null = os.open("/dev/null", os.O_RDONLY)
    socket.send_fds(theirs, [b"x"], [null])
    os.close(null)
    await wait_until(lambda: received.fds)
    packets.close()
    assert os.fstat(received.fds[0]).st_rdev == os.makedev(1, 3)
    os.close(received.fds[0])


async def test_a_flood_leaves_the_loop_to_others(pair: tuple[socket.socket, socket.socket]) -> None:
    mine, theirs = pair
    received = Received()
    ticks: list[int] = []
    for _ in range(200):
        theirs.send(b"x")
    packets = PacketChannel(mine, on_packet=received.packet, on_close=received.close)
    while len(received.packets) < 200:
        ticks.append(len(received.packets))
        await asyncio.sleep(0)
    packets.close()
    assert max(later - earlier for earlier, later in itertools.pairwise(ticks)) <= 32


async def test_the_end_is_told_once(pair: tuple[socket.socket, socket.socket]) -> None:
    mine, theirs = pair
    received = Received()
    packets = PacketChannel(mine, on_packet=received.packet, on_close=received.close)
    theirs.close()
    await wait_until(lambda: received.closed)
    packets.send(b"into the void")
    packets.close()
    packets.close()
    assert received.packets == []


async def test_the_last_words_of_a_peer_that_did_not_listen(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """The kernel tells of the reset before it hands out what was said."""
    mine, theirs = pair
    received = Received()
    packets = PacketChannel(mine, on_packet=received.packet, on_close=received.close)
    packets.send(b"never read")
    assert not packets.has_peer_closed
    theirs.send(b"last")
    theirs.send(b"words")
    theirs.close()
    await wait_until(lambda: received.closed)
    assert received.packets == [b"last", b"words"]
    assert packets.has_peer_closed
