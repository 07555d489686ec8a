"""`pip` in a sandbox, used by honest and by hostile code."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from fumehood.sandbox_server.packages import pip_server
from fumehood.sandbox_server.supervisor.sandbox_instance import SandboxInstance
from fumehood.sandbox_server.supervisor.supervisor import Supervisor
from tests.support.package_index import FakePackageIndex, wheel
from tests.support.sandbox_runs import run, settings
from tests.support.waiting import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="module")
_TALK = """
import json, socket
def talk(*pieces, answer=True):
    with socket.create_connection(('127.0.0.1', 3129), timeout=30) as connection:
        for piece in pieces:
            connection.sendall(piece)
        connection.shutdown(socket.SHUT_WR)
        return connection.makefile().read() if answer else ''
"""


@pytest.fixture(scope="module")
def index() -> Iterator[FakePackageIndex]:
    with FakePackageIndex() as made:
        for number in range(8):
            made.add(wheel(f"thing{number}", "1.0", {f"thing{number}/__init__.py": f"number = {number}"}))
        made.add(wheel("in-namespace-a", "1.0", {"shared_space/a.py": "x = 'a'"}))
        made.add(wheel("in-namespace-b", "1.0", {"shared_space/b.py": "x = 'b'"}))
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def supervisor(
    index: FakePackageIndex, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Supervisor]:
    directory = tmp_path_factory.mktemp("packages")
    async with Supervisor(settings(index_url=index.url, packages_dir=directory, preload=())) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(supervisor: Supervisor) -> AsyncIterator[SandboxInstance]:
    made = await supervisor.create()
    yield made
    await made.destroy()


@pytest.mark.parametrize(
    "command",
    [
        "!pip install thing0",
        "!pip3 -q install thing0",
        "%pip install -U thing0",
        "!python -m pip install --quiet --no-cache-dir 'thing0>=1'",
        "import subprocess, sys; subprocess.run([sys.executable, '-m', 'pip', 'install', 'thing0'], check=True)",
        "import subprocess, sys; subprocess.check_call(['pip', 'install', '--progress-bar', 'off', 'thing0'])",
        "import os; os.system('pip install thing0')",
        "import pip; pip.main(['install', 'thing0'])",
        (
            "open('requirements.txt', 'w').write('# all\\n\\nthing0==1.0  # that\\n'); import pip\n"
            "pip.main(['install', '-r', 'requirements.txt'])"
        ),
    ],
)
async def test_every_way_to_write_it(sandbox: SandboxInstance, command: str) -> None:
    assert (await run(sandbox, "import thing0")).raised is not None
    outcome = await run(sandbox, f"{command}\nimport thing0\nthing0.number")
    assert outcome.end.status == "ok", (outcome.stderr, outcome.raised)
    assert outcome.result == "0"


async def test_one_after_another_in_one_cell(sandbox: SandboxInstance) -> None:
    code = "".join(f"!pip install thing{number}\nimport thing{number}\n" for number in range(4))
    assert (await run(sandbox, f"{code}thing3.number")).result == "3"
    outcome = await run(sandbox, "!pip install thing1")
    assert outcome.stdout == "Requirement already satisfied\n"


async def test_namespace_packages_grow(sandbox: SandboxInstance) -> None:
    await run(sandbox, "!pip install in-namespace-a\nimport shared_space.a")
    outcome = await run(
        sandbox, "%pip install in-namespace-b\nimport shared_space.b\nshared_space.a.x + shared_space.b.x"
    )
    assert outcome.result == "'ab'", outcome.raised


async def test_what_it_tells(sandbox: SandboxInstance) -> None:
    await run(sandbox, "!pip install thing0")
    outcome = await run(
        sandbox, "!pip list; pip freeze; pip show thing0; pip --version; pip list --format=json"
    )
    assert "thing0==1.0" in outcome.stdout
    assert "Name: thing0\nVersion: 1.0\nSummary: made for a test\n" in outcome.stdout
    assert "Location: /opt/packages" in outcome.stdout
    assert '{"name": "thing0", "version": "1.0"}' in outcome.stdout
    assert "pip 2" in outcome.stdout
    for of_the_server in ("fumehood", "starlette", "uvicorn"):
        assert of_the_server not in outcome.stdout


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("pip install no-such-thing", "there is no package no-such-thing on the index"),
        ("pip install ./here", "files and paths are not accepted"),
        ("pip install thing0 @ http://127.0.0.1/x", "URLs"),
        ("pip install --index-url http://127.0.0.1/ thing0", "the option --index-url is not available"),
        ("pip install -e .", "the option -e is not available"),
        ("pip install --target /tmp thing0", "the option --target is not available"),
        ("pip install -r missing.txt", "could not open requirements file"),
        ("pip install", "at least one requirement"),
        ("pip uninstall -y thing0", "cannot be uninstalled"),
        ("pip download thing0", "cannot be downloaded here"),
        ("pip frobnicate", "not available in a sandbox"),
        ("pip show nothing", "not found"),
    ],
)
async def test_what_cannot_be_is_said(sandbox: SandboxInstance, command: str, says: str) -> None:
    outcome = await run(sandbox, f"import os; os.waitstatus_to_exitcode(os.system({command!r}))")
    assert says in outcome.stderr
    assert outcome.result == "1"


@pytest.mark.parametrize(
    "question",
    [
        b"\n",
        b"nonsense\n",
        b"{}\n",
        b'{"requirements": []}\n',
        b'{"requirements": "thing0"}\n',
        b'{"requirements": ["thing0"], "index_url": "http://127.0.0.1/"}\n',
        b'{"requirements": ["' + b"x" * 2000 + b'"]}\n',
        b"[" * 5000 + b"\n",
        b"\xff\xfe\n",
        b"x" * 200_000,
    ],
)
async def test_malformed_questions(sandbox: SandboxInstance, question: bytes) -> None:
    # Padding instead of the bytes themselves where they are many.
    code = f"{_TALK}\ntry:\n    print(talk({question!r}))\nexcept OSError as error:\n    print('malformed', error)"
    outcome = await run(sandbox, code)
    assert "malformed" in outcome.stdout
    assert (await run(sandbox, "1 + 1")).result == "2"


async def test_options_cannot_be_smuggled_in(sandbox: SandboxInstance, index: FakePackageIndex) -> None:
    before = len(index.asked)
    lines = [
        "--index-url http://127.0.0.1:1/",
        "thing0\n--pre",
        "-r /etc/passwd",
        "thing0 @ file:///etc/passwd",
    ]
    outcome = await run(
        sandbox,
        f"{_TALK}\nfor line in {lines!r}:\n    print(talk(json.dumps({{'requirements': [line]}}).encode() + b'\\n'))",
    )
    assert outcome.stdout.count("is refused") == 4
    assert len(index.asked) == before


async def test_trickles_and_floods_of_connections_end(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pip_server, "_READ_SECONDS", 0.5)
    sandbox = await supervisor.create()
    code = """
import socket
held = [socket.create_connection(('127.0.0.1', 3129)) for _ in range(8)]
for each in held:
    each.settimeout(30)
    try:
        each.send(b'{')
    except OSError:
        pass
closed = 0
for each in held:
    try:
        closed += each.recv(1) == b''
    except ConnectionError:
        closed += 1
closed
"""
    assert (await run(sandbox, code)).result == "8"
    assert (await run(sandbox, "!pip install thing5\nimport thing5; thing5.number")).result == "5"
    await sandbox.destroy()


async def test_connections_are_taken_at_a_pace(sandbox: SandboxInstance) -> None:
    code = """
import socket, time
began = time.monotonic()
for _ in range(40):
    with socket.create_connection(('127.0.0.1', 3129), timeout=30) as connection:
        connection.sendall(b'x\\n')
        connection.recv(1000)
time.monotonic() - began >= 0.39
"""
    assert (await run(sandbox, code)).result == "True"


async def test_not_too_often(sandbox: SandboxInstance) -> None:
    code = f"""{_TALK}
answers = [talk(b'{{"requirements": ["./x"]}}\\n') for _ in range(30)]
sum('too many requests' in answer for answer in answers)
"""
    assert int((await run(sandbox, code)).result or 0) >= 5


async def test_the_service_ends_with_the_sandbox(supervisor: Supervisor) -> None:
    before = asyncio.all_tasks()
    sandbox = await supervisor.create()
    await run(sandbox, f"{_TALK}\nheld = socket.create_connection(('127.0.0.1', 3129)); held.send(b'[')")
    await sandbox.destroy()
    await wait_until(lambda: not asyncio.all_tasks() - before)
    assert sandbox.end_reason is not None


async def test_code_does_not_hold_the_listener(sandbox: SandboxInstance) -> None:
    code = """
import os, socket
found = []
for name in os.listdir('/proc/self/fd'):
    try:
        copy = socket.socket(fileno=os.dup(int(name)))
        if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            found.append(name)
        copy.close()
    except OSError:
        pass
try:
    socket.socket().bind(('127.0.0.1', 3129))
    found.append('bound')
except OSError:
    pass
found
"""
    assert (await run(sandbox, code)).result == "[]"
