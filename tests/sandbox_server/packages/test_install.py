"""Packages from an index in real sandboxes: at creation, while running, offline, refused."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from fumehood.protocol.sandbox.sandbox_errors import InstallFailed
from fumehood.protocol.sandbox.sandbox_messages import SandboxSpec
from fumehood.sandbox_server.settings import SandboxServerSettings
from fumehood.sandbox_server.supervisor.in_process_sandbox import iter_events
from fumehood.sandbox_server.supervisor.sandbox_instance import SandboxInstance
from fumehood.sandbox_server.supervisor.supervisor import Supervisor
from tests.support.package_index import FakePackageIndex, WheelMember, sdist, wheel
from tests.support.sandbox_runs import ExecutionOutcome, run, settings, start, wait_for_outcome
from tests.support.waiting import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="module")
_MARKER = "/tmp/an-sdist-was-built"


@pytest.fixture(scope="module")
def index() -> Iterator[FakePackageIndex]:
    with FakePackageIndex() as made:
        made.add(
            wheel(
                "hello", "1.0", {"hello.py": "version = 1\ndef main():\n    print('hello from a script')\n"}
            ),
            wheel(
                "hello",
                "2.0",
                {"hello.py": "version = 2\ndef main():\n    print('hello from a script')\n"},
                scripts={"say-hello": "hello:main"},
            ),
            wheel("needs-hello", "1.0", {"needs_hello.py": "import hello"}, requires=["hello<2"]),
            wheel("needs-numpy", "1.0", {"needs_numpy.py": "import numpy"}, requires=["numpy>=2"]),
            wheel("old-numpy", "1.0", {"old_numpy.py": ""}, requires=["numpy<2"]),
            wheel("numpy", "1.99", {"numpy/__init__.py": "__version__ = '1.99'"}),
            wheel(
                "linked",
                "1.0",
                {"linked.py": ""},
                requires=[f"hello @ http://127.0.0.1:{made.port}/files/x.whl"],
            ),
            wheel("elsewhere", "1.0", {"elsewhere.py": ""}, tag="cp312-cp312-win_amd64"),
            sdist("source-only", "1.0", _MARKER),
        )
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def supervisor(
    index: FakePackageIndex, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Supervisor]:
    async with Supervisor(_settings(index, tmp_path_factory.mktemp("packages"))) as running:
        yield running


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def _end_sandboxes(supervisor: Supervisor) -> AsyncIterator[None]:
    yield
    for sandbox in supervisor.claimed_sandboxes():
        await sandbox.destroy()


def _settings(index: FakePackageIndex, directory: Path, **changes: object) -> SandboxServerSettings:
    return settings(index_url=index.url, packages_dir=directory, **{"preload": ("numpy",), **changes})


async def _run_with(sandbox: SandboxInstance, *requirements: str, code: str = "1") -> ExecutionOutcome:
    execution = start(sandbox, code, timeout=60, requirements=requirements)
    return await wait_for_outcome(execution)


# ---- what works ---------------------------------------------------------------------------------------------------


async def test_at_creation(supervisor: Supervisor) -> None:
    sandbox = await supervisor.create(SandboxSpec(requirements=["hello"]))
    outcome = await run(sandbox, "import hello, sys; hello.version, hello.__file__, sys.path[-2:]")
    assert outcome.result == (
        "(2, '/opt/packages/hello.py', ['/opt/packages', '/opt/sandbox/lib/python3.12/site-packages'])"
    ).replace("python3.12", f"python3.{sys.version_info.minor}")


async def test_in_a_running_sandbox_one_after_another(supervisor: Supervisor) -> None:
    sandbox = await supervisor.create()
    assert (await run(sandbox, "import hello")).raised is not None
    outcome = await _run_with(sandbox, "needs-hello", code="import needs_hello, hello; hello.version")
    assert outcome.result == "1"
    assert outcome.notes == ["installing needs-hello", "installed hello 1.0, needs-hello 1.0"]
    assert outcome.end.packages_ms > 0
    outcome = await _run_with(
        sandbox, "needs-numpy>=1", code="import needs_numpy, needs_hello; needs_numpy.numpy.__name__"
    )
    assert outcome.result == "'numpy'"
    assert outcome.notes[-1] == "installed needs-numpy 1.0"
    again = await _run_with(sandbox, "needs-numpy", "hello", "numpy")
    assert (again.end.status, again.notes) == ("ok", [])


async def test_scripts_and_subprocesses_see_it(supervisor: Supervisor) -> None:
    sandbox = await supervisor.create(SandboxSpec(requirements=["hello"]))
    code = (
        "import os, subprocess, sys\n"
        "print(subprocess.run(['say-hello'], capture_output=True, text=True))\n"
        "alone = {name: value for name, value in os.environ.items() if name == 'LD_LIBRARY_PATH'}\n"
        "print(subprocess.run([sys.executable, '-I', '-c', 'import hello; print(hello.__file__)'], env=alone,"
        " capture_output=True, text=True).stdout)"
    )
    outcome = await run(sandbox, code)
    assert "hello from a script" in outcome.stdout
    assert "/opt/packages/hello.py" in outcome.stdout


async def test_a_fresh_interpreter_has_it_too(supervisor: Supervisor) -> None:
    sandbox = await supervisor.create(SandboxSpec(requirements=["hello"], fresh_interpreter=True))
    assert (await run(sandbox, "import hello; hello.version")).result == "2"


async def test_at_creation_another_version_than_the_loaded_one(supervisor: Supervisor) -> None:
    sandbox = await supervisor.create(SandboxSpec(requirements=["old-numpy"]))
    outcome = await run(sandbox, "import old_numpy, numpy; numpy.__version__")
    assert outcome.result == "'1.99'"
    usual = await supervisor.create()
    assert (await run(usual, "import numpy; numpy.__version__ > '2'")).result == "True"
    # What this one has is what further packages must fit.
    refused = await _run_with(sandbox, "needs-numpy")
    assert refused.end.status == "install_failed"
    assert "numpy" in refused.end.reason


async def test_what_is_there_needs_no_index(supervisor: Supervisor, index: FakePackageIndex) -> None:
    before = len(index.asked)
    await supervisor.create(SandboxSpec(requirements=["numpy>=2", "pandas"]))
    assert len(index.asked) == before


async def test_equal_requests_at_once_build_once(supervisor: Supervisor, index: FakePackageIndex) -> None:
    index.add(wheel("alone", "1.0", {"alone.py": ""}), wheel("shared", "1.0", {"shared.py": ""}))
    await (await supervisor.create(SandboxSpec(requirements=["alone"]))).destroy()
    boxes = await asyncio.gather(
        *(supervisor.create(SandboxSpec(requirements=[line])) for line in ("shared", "Shared", " shared # x"))
    )
    assert index.downloads("shared") == index.downloads("alone")
    assert index.asked.count("/simple/shared/") == index.asked.count("/simple/alone/")
    for box in boxes:
        assert (await run(box, "import shared; 1")).result == "1"
        await box.destroy()


async def test_the_log_names_the_packages(
    index: FakePackageIndex, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """When an install begins, succeeds and fails; what is cached is not installed again."""
    caplog.set_level("INFO", "fumehood.sandbox_server")
    progress: list[str] = []
    async with Supervisor(_settings(index, tmp_path, pool=0, preload=())) as supervisor:
        await supervisor.create(SandboxSpec(requirements=["needs-hello"]), progress.append)
        await supervisor.create(SandboxSpec(requirements=["needs_hello"]))
        with pytest.raises(InstallFailed):
            await supervisor.create(SandboxSpec(requirements=["no-such-package"], tenant="acme"))
    assert progress == ["installing needs-hello", "installed hello 1.0, needs-hello 1.0"]
    events = [(record.msg, record.__dict__.get("fields", {})) for record in caplog.records]
    installs = [(name, fields) for name, fields in events if name.startswith("packages_")]
    assert [name for name, _ in installs] == [
        "packages_installing",
        "packages_installed",
        "packages_installing",
        "packages_failed",
    ]
    assert installs[0][1]["requirements"] == "needs-hello"
    assert installs[1][1]["packages"] == "hello 1.0, needs-hello 1.0"
    assert (installs[3][1]["tenant"], "no-such-package" in installs[3][1]["reason"]) == ("acme", True)


async def test_a_request_again_needs_no_index(index: FakePackageIndex, tmp_path: Path) -> None:
    async with Supervisor(_settings(index, tmp_path, preload=())) as first:
        await first.create(SandboxSpec(requirements=["hello<2"]))
    before = len(index.asked)
    async with Supervisor(_settings(index, tmp_path, preload=())) as second:
        sandbox = await second.create(SandboxSpec(requirements=["hello<2"]))
        assert (await run(sandbox, "import hello; hello.version")).result == "1"
    assert len(index.asked) == before


async def test_after_a_day_the_index_is_asked_again_if_it_answers(tmp_path: Path) -> None:
    with FakePackageIndex() as index:
        index.add(wheel("daily", "1.0", {"daily.py": "x = 1"}))
        async with Supervisor(_settings(index, tmp_path, preload=())) as running:

            async def version() -> str | None:
                sandbox = await running.create(SandboxSpec(requirements=["daily"]))
                return (await run(sandbox, "import daily; daily.x")).result

            assert await version() == "1"
            index.add(wheel("daily", "2.0", {"daily.py": "x = 2"}))
            assert await version() == "1"
            _expire_records(tmp_path)
            assert await version() == "2"
            _expire_records(tmp_path)
            index.close()
            assert await version() == "2"


def _expire_records(directory: Path) -> None:
    """Make every request that is remembered one of the day before yesterday."""
    for path in (directory / "requests").glob("*.json"):
        request = json.loads(path.read_text())
        request["made_at"] -= 2 * 24 * 3600
        path.write_text(json.dumps(request))


async def test_uv_s_cache_is_bounded_too(index: FakePackageIndex, tmp_path: Path) -> None:
    def cached() -> list[str]:
        return [path.name for path in (tmp_path / "cache").rglob("*.bin")]

    for name in ("bulky", "bulkier"):
        index.add(wheel(name, "1.0", {f"{name}.bin": os.urandom(400_000)}))
    async with Supervisor(_settings(index, tmp_path, preload=(), packages_bytes=600_000)) as running:
        await running.create(SandboxSpec(requirements=["bulky"]))
        assert cached() == ["bulky.bin"]
        await running.create(SandboxSpec(requirements=["bulkier"]))
        assert cached() == []


async def test_offline_from_what_was_fetched_before(tmp_path: Path) -> None:
    with FakePackageIndex() as index:
        index.add(
            wheel("one", "1.0", {"one.py": ""}),
            wheel("two", "1.0", {"two.py": ""}),
            wheel("three", "1.0", {}),
        )
        async with Supervisor(_settings(index, tmp_path, preload=())) as running:
            await running.create(SandboxSpec(requirements=["one"]))
            await running.create(SandboxSpec(requirements=["two"]))
            index.close()
            # A combination that was never asked for.
            sandbox = await running.create(SandboxSpec(requirements=["one", "two"]))
            assert (await run(sandbox, "import one, two; 1")).result == "1"
            with pytest.raises(InstallFailed, match="index cannot be reached"):
                await running.create(SandboxSpec(requirements=["three"]))


async def test_credentials_of_the_index_work_and_are_never_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    with FakePackageIndex(credentials="somebody:pa55word-x") as index:
        index.add(wheel("private", "1.0", {"private.py": ""}))
        async with Supervisor(_settings(index, tmp_path, preload=())) as running:
            sandbox = await running.create(SandboxSpec(requirements=["private"]))
            assert (await run(sandbox, "import private; 1")).result == "1"
            index.credentials = "somebody:changed-it"
            outcome = await _run_with(sandbox, "hello")
            assert outcome.end.status == "install_failed"
            assert "401" in outcome.end.reason
            index.close()
            with pytest.raises(InstallFailed) as caught:
                await running.create(SandboxSpec(requirements=["hello>7"]))
    messages = f"{outcome.events} {caught.value} {caplog.text}"
    assert "pa55word" not in messages
    for path in tmp_path.rglob("*.json"):
        assert "pa55word" not in path.read_text()


# ---- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requirement", "reason"),
    [
        ("no-such-thing", "there is no package no-such-thing on the index"),
        ("hello>7", "hello>7 cannot be installed"),
        ("source-only", "no wheel for this Python and platform"),
        ("elsewhere", "no wheel for this Python and platform|no wheels with a matching"),
        ("linked", "cannot be installed"),
        ("--index-url http://127.0.0.1:1/", "options are not accepted"),
        ("hello @ file:///etc/passwd", "URLs and repositories"),
        ("/etc/passwd", "files and paths"),
    ],
)
async def test_refused_with_the_reason(
    supervisor: Supervisor, index: FakePackageIndex, requirement: str, reason: str
) -> None:
    with pytest.raises(InstallFailed, match=reason):
        await supervisor.create(SandboxSpec(requirements=[requirement]))
    sandbox = await supervisor.create()
    outcome = await _run_with(sandbox, requirement, code="print('ran')")
    assert (outcome.end.status, outcome.end.exit_code, outcome.stdout) == ("install_failed", -1, "")
    assert outcome.end.state_kept
    assert (await run(sandbox, "1 + 1")).result == "2"
    assert not os.path.exists(_MARKER)
    assert not [path for path in index.asked if "x.whl" in path]


async def test_a_conflict_in_a_live_sandbox_says_that_a_new_one_is_needed(supervisor: Supervisor) -> None:
    sandbox = await supervisor.create(SandboxSpec(requirements=["hello<2"]))
    for requirement, versions in (("old-numpy", "numpy 1.99 is needed"), ("hello>=2", "hello 2.0 is needed")):
        outcome = await _run_with(sandbox, requirement)
        assert outcome.end.status == "install_failed"
        assert versions in outcome.end.reason
        assert "A new container is needed" in outcome.end.reason


async def test_an_interrupt_ends_the_waiting_for_packages(
    supervisor: Supervisor, index: FakePackageIndex
) -> None:
    index.add(wheel("slow", "1.0", {"slow.py": ""}))
    with index.held():
        sandbox = await supervisor.create()
        execution = start(sandbox, "print('ran')", timeout=60, requirements=["slow"])
        events = iter_events(execution)
        assert (await anext(events)).text == "installing slow"  # type: ignore[union-attr]
        execution.interrupt()
        end = ExecutionOutcome([event async for event in events]).end
        assert (end.status, end.exit_code, end.state_kept) == ("interrupted", -1, True)
    assert (await _run_with(sandbox, "slow", code="import slow; 1")).result == "1"


async def test_a_sandbox_that_ends_meanwhile(supervisor: Supervisor, index: FakePackageIndex) -> None:
    index.add(wheel("slower", "1.0", {"slower.py": ""}))
    with index.held():
        sandbox = await supervisor.create()
        execution = start(sandbox, "1", timeout=60, requirements=["slower"])
        events = iter_events(execution)
        await anext(events)
        await sandbox.destroy()
        assert ExecutionOutcome([event async for event in events]).end.status == "lost"


async def test_it_takes_no_longer_than_it_may(index: FakePackageIndex, tmp_path: Path) -> None:
    index.add(wheel("endless", "1.0", {"endless.py": ""}))
    with index.held():
        async with Supervisor(_settings(index, tmp_path, preload=(), install_timeout=2.0)) as running:
            with pytest.raises(InstallFailed, match="longer than 2 s"):
                await running.create(SandboxSpec(requirements=["endless"]))
            assert list((tmp_path / "staging").iterdir()) == []
            assert list((tmp_path / "layers").iterdir()) == []


async def test_closing_ends_builds(index: FakePackageIndex, tmp_path: Path) -> None:
    index.add(wheel("never", "1.0", {"never.py": ""}))
    with index.held():
        async with Supervisor(_settings(index, tmp_path, preload=())) as running:
            asking = asyncio.create_task(running.create(SandboxSpec(requirements=["never"])))
            await wait_until(lambda: index.downloads("never") or asking.done())
        with pytest.raises(InstallFailed, match="shutting down"):
            await asking
        assert list((tmp_path / "staging").iterdir()) == []


async def test_an_operator_may_offer_none(index: FakePackageIndex, tmp_path: Path) -> None:
    async with Supervisor(_settings(index, tmp_path, preload=(), packages=False)) as running:
        with pytest.raises(InstallFailed, match="This server installs no packages"):
            await running.create(SandboxSpec(requirements=["hello"]))
        sandbox = await running.create()
        assert "installs no packages" in (await _run_with(sandbox, "hello")).end.reason
        outcome = await run(sandbox, "!pip install hello")
        assert "installs no packages" in outcome.stderr
    assert not (tmp_path / "layers").exists()


# ---- the layer is nobody's to change ------------------------------------------------------------------------------


async def test_layers_cannot_be_changed_or_seen_around(supervisor: Supervisor) -> None:
    first, second = [await supervisor.create(SandboxSpec(requirements=["hello"])) for _ in range(2)]
    code = """
import os
failures = []
for act in (
    lambda: open('/opt/packages/hello.py', 'a'),
    lambda: open('/opt/packages/new.py', 'w'),
    lambda: os.chmod('/opt/packages/hello.py', 0o777),
    lambda: os.utime('/opt/packages/hello.py'),
    lambda: os.unlink('/opt/packages/hello.py'),
    lambda: os.rename('/opt/packages/hello.py', '/opt/packages/bye.py'),
    lambda: os.link('/opt/packages/hello.py', '/tmp/linked'),
    lambda: os.setxattr('/opt/packages/hello.py', 'user.x', b'1'),
    lambda: os.truncate('/opt/packages/hello.py', 0),
):
    try:
        act()
    except OSError as error:
        failures.append(error.errno)
print(len(failures))
mounts = [line for line in open('/proc/self/mountinfo') if '/opt' in line]
print([line for line in mounts if ' /opt/packages ' in line][0].split(' - ')[1], end='')
print(os.listdir('/opt/fumehood/layers'), any('layers' in line for line in mounts))
"""
    outcome = await run(first, code)
    lines = outcome.stdout.splitlines()
    assert lines[0] == "9"
    assert lines[1].startswith("overlay packages ro,lowerdir=0:empty")
    assert lines[2] == "[] False"
    assert (await run(second, "import hello; hello.version")).result == "2"


async def test_a_poisoned_package_reaches_those_only_who_ask_for_it(
    supervisor: Supervisor, index: FakePackageIndex
) -> None:
    index.add(wheel("poison", "1.0", {"hello.py": "version = 'poisoned'", "numpy/__init__.py": "evil = 1"}))
    clean_before = await supervisor.create(SandboxSpec(requirements=["hello"]))
    poisoned = await supervisor.create(SandboxSpec(requirements=["poison"]))
    clean_after = await supervisor.create(SandboxSpec(requirements=["hello"]))
    assert (await run(poisoned, "import hello; hello.version")).result == "'poisoned'"
    for box in (clean_before, clean_after):
        assert (
            await run(box, "import hello, numpy; hello.version, hasattr(numpy, 'evil')")
        ).result == "(2, False)"


async def test_hostile_wheels_leave_nothing_outside(
    supervisor: Supervisor, index: FakePackageIndex, tmp_path: Path
) -> None:
    index.add(
        wheel("absolute", "1.0", {"/tmp/absolute-escaped.py": "", "absolute.py": ""}),
        wheel("dotted", "1.0", {"../../dotted_escaped.py": "", "dotted.py": ""}),
        wheel("linking", "1.0", {"linking": WheelMember(b"/etc/passwd", 0o120777), "linking_really.py": ""}),
        wheel("setuid", "1.0", {"setuid_tool": WheelMember(b"#!/bin/sh\n", 0o104755)}),
        wheel("startup", "1.0", {"startup.pth": "import os; os._exit(3)\n", "startup.py": "x = 1"}),
        wheel("placing", "1.0", {"placing-1.0.data/data/etc/evil.conf": "x", "placing.py": ""}),
        wheel("misplacing", "1.0", {"misplacing-1.0.data/data/../../evil.conf": "x", "misplacing.py": ""}),
    )
    refused: list[str] = []
    for name in ("absolute", "dotted", "linking", "setuid", "startup", "placing", "misplacing"):
        try:
            sandbox = await supervisor.create(SandboxSpec(requirements=[name]))
        except InstallFailed:
            refused.append(name)  # as good
            continue
        code = """
import os, stat, subprocess, sys
found = []
for directory, _, names in os.walk('/opt/packages'):
    for each in names:
        about = os.lstat(f'{directory}/{each}')
        if not stat.S_ISREG(about.st_mode) or about.st_mode & 0o7022:
            found.append(each)
ran = subprocess.run([sys.executable, '-c', 'print(1)'], capture_output=True, text=True).stdout
found, ran, os.path.exists('/etc/evil.conf')
"""
        assert (await run(sandbox, code)).result == "([], '1\\n', False)", name
        await sandbox.destroy()
    assert {"setuid", "startup", "placing"}.isdisjoint(refused)
    assert not list(Path("/tmp").glob("*escaped*"))
    assert not list(Path("/").glob("evil.conf"))
