"""Uploads to `fumehood serve` under bad conditions: huge files, kills, full disks."""

import http.client
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from tests.e2e.conftest import make_client
from tests.support import gateway_process
from tests.support.gateway_process import GatewayProcess
from tests.support.multipart_bodies import BOUNDARY, form, part
from tests.support.small_disk import fill_disk, free_disk, mount_small_disk
from tests.support.upload_gateway import list_files

MIB = 1 << 20
# No code is run here, so that a gateway needs no sandboxes.
QUIET: dict[str, Any] = {"providers": {"code_interpreter": {"enabled": False}}}


class Sending:
    """An upload in the making, which never ends."""

    def __init__(self, running: GatewayProcess) -> None:
        self.connection = http.client.HTTPConnection(urlsplit(running.url).netloc, timeout=60)
        self.connection.putrequest("POST", "/v1/files")
        self.connection.putheader("content-type", f"multipart/form-data; boundary={BOUNDARY.decode()}")
        self.connection.putheader("transfer-encoding", "chunked")
        self.connection.endheaders()
        self.send(form([part("purpose", b"user_data"), part("file", b"", "a.txt")])[: -len(BOUNDARY) - 8])

    def send(self, content: bytes) -> None:
        self.connection.send(b"%x\r\n%b\r\n" % (len(content), content))


def read_resident_bytes(process: int, what: str = "VmHWM") -> int:
    """What it holds in memory, or held at most."""
    status = Path(f"/proc/{process}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith(what)]
    return int(line.split()[1]) * 1024


def wait_for(path: Path, size: int) -> None:
    """Until so much of an upload is on the disk; a gateway that does not write it would never answer either."""
    while sum(file.stat().st_size for file in list_files(path)) < size:
        os.sched_yield()


def test_a_killed_gateway_leaves_nothing_of_an_upload(tmp_path: Path) -> None:
    running = gateway_process.start_gateway(tmp_path, QUIET)
    with make_client(running) as client:
        kept = client.files.create(file=("kept.txt", b"kept"), purpose="user_data")
    sending = Sending(running)
    sending.send(b"x" * (3 * MIB))
    wait_for(tmp_path / "blobs" / "incoming", MIB)
    running.kill()
    sending.connection.close()
    assert len(list_files(tmp_path / "blobs")) == 2
    with gateway_process.run_gateway(tmp_path, QUIET) as again, make_client(again) as client:
        assert [file.id for file in client.files.list()] == [kept.id]
        assert client.files.content(kept.id).read() == b"kept"
        assert len(list_files(tmp_path / "blobs")) == 1


@pytest.mark.slow
def test_a_gateway_that_is_stopped_leaves_nothing_of_an_upload(tmp_path: Path) -> None:
    running = gateway_process.start_gateway(tmp_path, {**QUIET, "server": {"shutdown_grace": 0}})
    sending = Sending(running)
    sending.send(b"x" * (3 * MIB))
    wait_for(tmp_path / "blobs" / "incoming", MIB)
    assert running.stop() == 0
    sending.connection.close()
    assert list_files(tmp_path / "blobs") == []


@pytest.mark.slow
def test_blobs_of_another_database_are_refused(tmp_path: Path) -> None:
    with gateway_process.run_gateway(tmp_path, QUIET) as running, make_client(running) as client:
        kept = client.files.create(file=("kept.txt", b"kept"), purpose="user_data")
    (tmp_path / "gateway.db").rename(tmp_path / "other.db")
    with pytest.raises(AssertionError, match="holds the files of another database"):
        gateway_process.start_gateway(tmp_path, QUIET)
    (tmp_path / "gateway.db").unlink()
    (tmp_path / "other.db").rename(tmp_path / "gateway.db")
    with gateway_process.run_gateway(tmp_path, QUIET) as running, make_client(running) as client:
        assert client.files.content(kept.id).read() == b"kept"


@pytest.mark.root
def test_a_full_disk(tmp_path: Path) -> None:
    """Database and blobs are on it: what is there stays whole, what fits later is taken."""
    with (
        mount_small_disk(tmp_path / "disk", "12m") as disk,
        gateway_process.run_gateway(disk, QUIET, {"FUMEHOOD_STORAGE__MIN_FREE_BYTES": "0"}) as running,
        make_client(running) as client,
    ):
        kept = client.files.create(file=("kept.txt", b"kept" * MIB), purpose="user_data")
        for _ in range(3):
            with pytest.raises(openai.InternalServerError) as refused:
                client.files.create(file=("large.txt", b"x" * (12 * MIB)), purpose="user_data")
            assert refused.value.status_code == 503
            assert "No space left on device" in refused.value.message
        assert [file.id for file in client.files.list()] == [kept.id]
        assert client.files.content(kept.id).read() == b"kept" * MIB
        assert len(list_files(disk / "blobs")) == 1
        # Not a byte is free: the database cannot write its row either, and the content goes with it.
        fill_disk(disk)
        with pytest.raises(openai.InternalServerError):
            client.files.create(file=("small.txt", b"small"), purpose="user_data")
        assert client.files.content(kept.id).read() == b"kept" * MIB
        free_disk(disk)
        after = client.files.create(file=("after.txt", b"after"), purpose="user_data")
        assert {file.id for file in client.files.list()} == {kept.id, after.id}
        client.files.delete(kept.id)
        assert len(list_files(disk / "blobs")) == 1


@pytest.mark.slow
def test_a_gigabyte_takes_no_memory(tmp_path: Path) -> None:
    size, piece = 1024 * MIB, bytes(range(32, 96)) * (MIB // 64)
    settings = {**QUIET, "files": {"file_bytes": 2 * size}}
    with gateway_process.run_gateway(tmp_path, settings) as running:
        with make_client(running) as client:
            client.files.create(file=("warm.txt", piece), purpose="user_data")
        before = read_resident_bytes(running.process.pid, "VmRSS")
        head = form([part("purpose", b"user_data"), part("file", b"", "large.txt")])
        end = b"\r\n--%b--\r\n" % BOUNDARY

        def body() -> Iterator[bytes]:
            yield head[: -len(end)]
            for _ in range(size // MIB):
                yield piece
            yield end

        kind = {"content-type": f"multipart/form-data; boundary={BOUNDARY.decode()}"}
        made = httpx.post(f"{running.url}/files", content=body(), headers=kind, timeout=600)
        assert made.status_code == 200, made.text
        assert made.json()["bytes"] == size
        received = 0
        with httpx.stream("GET", f"{running.url}/files/{made.json()['id']}/content", timeout=600) as answer:
            for number, part_of_it in enumerate(answer.iter_bytes(MIB)):
                assert part_of_it == piece, number
                received += len(part_of_it)
        assert received == size
        grown = read_resident_bytes(running.process.pid) - before
        print(f"the gateway grew by {grown / MIB:.1f} MiB at most")
        assert grown < 32 * MIB
