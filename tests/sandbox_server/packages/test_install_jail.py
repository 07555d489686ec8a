"""What a program in the install jail can see and do."""

import asyncio
import hashlib
import itertools
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from fumehood.protocol.sandbox.sandbox_messages import SandboxSpec
from fumehood.sandbox_server.host.python_runtime import discover_runtime
from fumehood.sandbox_server.packages.install_jail import InstallJail, InstallTimeout
from fumehood.sandbox_server.packages.layer_store import LayerStore
from fumehood.sandbox_server.packages.package_index_config import PackageIndexConfig
from fumehood.sandbox_server.supervisor.supervisor import Supervisor
from tests.support.package_index import FakePackageIndex, wheel
from tests.support.sandbox_runs import run, settings
from tests.support.waiting import wait_until

_UID = 2_000_262_143
_SECRET = "index-pa55word"


@pytest_asyncio.fixture
async def jail(tmp_path: Path) -> AsyncIterator[InstallJail]:
    """With a shell in uv's place: `/uv -c …`."""
    store = LayerStore(tmp_path / "store", max_bytes=1 << 20)
    store.open()
    uid = _UID if os.geteuid() == 0 else None
    (tmp_path / "in").mkdir(mode=0o755)
    (tmp_path / "in/pyvenv.cfg").write_text("")
    output = tmp_path / "out"
    output.mkdir(mode=0o755)
    if uid is not None:
        os.chown(output, uid, uid)
    yield InstallJail(
        runtime=discover_runtime(),
        uv=Path("/bin/sh").resolve(),
        index=PackageIndexConfig.from_environment(f"https://somebody:{_SECRET}@127.0.0.1:1/simple", None, {}),
        cache=store.cache_directory(uid),
        uid=uid,
        tree=None,
        timeout=20,
        max_bytes=1 << 20,
        cgroup_numbers=itertools.count(1),
    )


async def _shell(jail: InstallJail, command: str) -> str:
    directory = jail.cache.parents[2]
    finished = await jail.run(["-c", command], directory / "in", directory / "out")
    return finished.stdout + finished.stderr


async def test_it_sees_nothing_of_the_host(jail: InstallJail, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_SUPERVISOR", "host-secret")
    output = await _shell(
        jail, "id -u; ls -a / /etc /opt; env; cat /etc/passwd; ls /root /home /var; cat /proc/1/environ"
    )
    assert output.startswith("1000\n")
    for hidden in ("host-secret", "root:x:0", "shadow", str(jail.cache), str(Path(__file__).parents[3])):
        assert hidden not in output
    assert "/etc/passwd: No such file" in output
    for gone in ("/root", "/home", "/var"):
        assert f"{gone}': No such file" in output


async def test_it_has_no_rights_and_no_neighbours(jail: InstallJail) -> None:
    output = await _shell(jail, "cat /proc/self/status; ls /proc; unshare -r true; mount -t tmpfs x /tmp")
    assert "CapEff:\t0000000000000000" in output
    assert "CapBnd:\t0000000000000000" in output or os.geteuid() != 0
    assert "NoNewPrivs:\t1" in output
    assert "unshare failed" in output
    assert "max_user_namespaces" not in output
    assert "mount: /tmp" in output
    assert str(os.getpid()) not in output.split("\n")


async def test_it_writes_to_its_cache_and_output_only(jail: InstallJail) -> None:
    output = await _shell(
        jail,
        "for d in / /in /usr /etc /opt /opt/python /opt/sandbox; do touch $d/x 2>/dev/null && echo wrote $d; done;"
        "touch /cache/x /opt/packages/x; head -c 3000000 /dev/zero > /cache/big; stat -c %s /cache/big",
    )
    directory = jail.cache.parents[2]
    wrote = [line for line in output.splitlines() if line.startswith("wrote")]
    assert wrote == []
    assert not [path for path in directory.rglob("x") if path.parent not in (jail.cache, directory / "out")]
    assert (jail.cache / "x").exists()
    assert (jail.cache / "big").stat().st_size <= 1 << 20
    if os.geteuid() == 0:
        assert (directory / "out/x").stat().st_uid == _UID


async def test_secrets_of_the_index_stand_on_no_command_line(jail: InstallJail) -> None:
    script = "echo $UV_DEFAULT_INDEX; touch /cache/here; until [ -e /cache/seen ]; do sleep 0.1; done"
    running = asyncio.create_task(_shell(jail, script))
    await wait_until((jail.cache / "here").exists)
    shown = b""
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                shown += Path(entry.path, "cmdline").read_bytes()
            except OSError:
                continue
    (jail.cache / "seen").touch()
    assert b"UV_DEFAULT_INDEX" in shown  # the command itself was among what was looked through
    assert _SECRET.encode() not in shown
    assert _SECRET in await running


async def test_it_ends_in_time_and_nothing_outlives_it(jail: InstallJail) -> None:
    jail.timeout = 1.0
    with pytest.raises(InstallTimeout):
        await _shell(jail, "sleep 4712 & sleep 4713")
    await wait_until(lambda: not any(_sleeps(name) for name in os.listdir("/proc") if name.isdigit()))


def _sleeps(pid: str) -> bool:
    try:
        return Path("/proc", pid, "cmdline").read_bytes() in (b"sleep\x004712\0", b"sleep\x004713\0")
    except OSError:
        return False


async def test_the_zygote_does_not_learn_what_a_sandbox_got(tmp_path: Path) -> None:
    with FakePackageIndex() as index:
        index.add(wheel("confidential", "1.0", {"confidential.py": ""}))
        options = settings(index_url=index.url, packages_dir=tmp_path, preload=())
        async with Supervisor(options) as running:
            first = await running.create(SandboxSpec(requirements=["confidential"]))
            assert (await run(first, "import confidential; 1")).result == "1"
            (layer,) = (path.name for path in (tmp_path / "layers").iterdir())
            second = await running.create()
            # The program may know the beginning only, or it would find itself.
            code = f"""
import hashlib
begins, rest = {layer[:20]!r}.encode(), {hashlib.sha256(layer[20:].encode()).hexdigest()!r}
seen = found = 0
with open('/proc/self/mem', 'rb', 0) as memory:
    for line in open('/proc/self/maps'):
        span, rights, *_ = line.split()
        start, end = (int(part, 16) for part in span.split('-'))
        if 'r' not in rights or end - start > 1 << 28:
            continue
        try:
            memory.seek(start)
            content = memory.read(end - start)
        except (OSError, ValueError, OverflowError):
            continue
        place = content.find(begins)
        while place >= 0:
            seen += 1
            found += hashlib.sha256(content[place + 20:place + 64]).hexdigest() == rest
            place = content.find(begins, place + 1)
        del content
seen > 0, found
"""
            assert (await run(second, code)).result == "(True, 0)"
            # The sandbox that has it does not know its name either: mountinfo shows a number.
            assert layer not in (await run(first, "print(open('/proc/self/mountinfo').read())")).stdout
