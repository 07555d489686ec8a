"""Packages in pods: another container installs them into a volume that the code can only read."""

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.support.package_index import FakePackageIndex, sdist, wheel
from tests.support.pods import Pod, run_pod
from tests.support.sandbox_server import SandboxApiClient

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def index() -> AsyncGenerator[FakePackageIndex]:
    with FakePackageIndex() as index:
        index.add(wheel("hello", "1.0", {"hello/__init__.py": "x = 1\n"}, scripts={"hello": "hello:x"}))
        index.add(wheel("shared-a", "1.0", {"shared/a.py": "a = 1\n"}))
        index.add(wheel("shared-b", "1.0", {"shared/b.py": "b = 2\n"}, requires=["shared-a"]))
        index.add(sdist("sourced", "1.0", "/opt/packages/ran"))
        index.add(wheel("packaging", "21.0", {"packaging/__init__.py": "__version__ = '21.0'\n"}))
        index.add(wheel("huge", "1.0", {"huge.bin": bytes(64 << 20)}))
        yield index


type _Index = FakePackageIndex


def _pod_options(index: _Index, **egress: str) -> dict[str, Any]:
    return {"has_egress": True, "egress_environment": {"FUMEHOOD_INDEX_URL": index.url, **egress}}


def _printed(events: list[dict[str, str]]) -> str:
    return "".join(event["text"] for event in events if event["type"] in ("stdout", "stderr"))


async def _run(client: SandboxApiClient, code: str, **request: object) -> str:
    return _printed(await client.run_code("box", code, **request))


async def test_packages_for_a_sandbox_a_call_and_from_the_code(
    pod_directory: Path, index: FakePackageIndex
) -> None:
    async with run_pod(pod_directory, **_pod_options(index)) as (_, client):
        await client.create_sandbox("box", requirements=["hello"])
        assert await _run(client, "import hello; print(hello.x, hello.__file__)") == (
            "1 /opt/packages/hello/__init__.py\n"
        )
        code = "from shared import a, b; print(a.a + b.b)"
        assert (await _run(client, code, requirements=["shared-b"])).endswith("3\n")
        in_child = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import hello, shared.b; print(7)'])"
        assert await _run(client, in_child) == "7\n"
        assert "shared-b" in await _run(client, "!pip list")
        end = (await client.run_code("box", "1", requirements=["nowhere"]))[-1]
        assert (end["status"], end["exit_code"]) == ("install_failed", -1)
        assert "there is no package nowhere on the index" in end["reason"]


async def test_pip_in_the_code_and_what_it_refuses(pod_directory: Path, index: _Index) -> None:
    async with run_pod(pod_directory, **_pod_options(index)) as (_, client):
        await client.create_sandbox("box")
        assert "Successfully installed hello-1.0" in await _run(client, "!pip install hello")
        assert await _run(client, "import hello; print(hello.x)") == "1\n"
        assert "Successfully installed" in await _run(client, "%pip install shared-b")
        assert "has no wheel for this Python" in await _run(client, "!python -m pip install sourced")
        assert await _run(client, "import os; print(os.path.exists('/opt/packages/ran'))") == "False\n"
        assert "options are not accepted" in await _run(client, "!pip install -- --index-url=http://x hello")


async def test_other_versions_of_present_packages_at_the_start_only(
    pod_directory: Path, index: FakePackageIndex
) -> None:
    async with run_pod(pod_directory, **_pod_options(index)) as (_, client):
        await client.create_sandbox("box", requirements=["packaging==21.0"])
        assert await _run(client, "import packaging; print(packaging.__version__)") == "21.0\n"
        assert "21.0" in await _run(client, "!python -c 'import packaging; print(packaging.__version__)'")
        end = (await client.run_code("box", "1", requirements=["packaging>=22"]))[-1]
        assert end["status"] == "install_failed"


async def test_code_cannot_tamper_with_packages_or_their_installer(
    pod_directory: Path, index: FakePackageIndex
) -> None:
    async with run_pod(pod_directory, **_pod_options(index)) as (_, client):
        await client.create_sandbox("box", requirements=["hello"])
        code = """
import os, subprocess
def attempt(what, *arguments):
    try:
        what(*arguments)
        print("done")
    except OSError as error:
        print(error.strerror)
attempt(open, "/opt/packages/hello/__init__.py", "w")
attempt(open, "/opt/packages/new.py", "w")
attempt(os.unlink, "/opt/packages/hello/__init__.py")
attempt(os.chmod, "/opt/packages/hello/__init__.py", 0o777)
attempt(os.link, "/opt/packages/hello/__init__.py", "/mnt/data/same")
attempt(os.listdir, "/opt/packages/.fumehood")
attempt(os.listdir, "/run/fumehood/egress")
print("egress" in subprocess.run(["sh", "-c", "cat /proc/[0-9]*/cmdline"], capture_output=True, text=True).stdout)
"""
        *outcomes, sees_installer = (await _run(client, code)).splitlines()
        assert "done" not in outcomes
        assert sees_installer == "False"
        assert await _run(client, "import hello; print(hello.x)") == "1\n"


async def test_time_and_size_of_an_install_are_limited(pod_directory: Path, index: _Index) -> None:
    limits = {"FUMEHOOD_SANDBOX_PACKAGES_BYTES": "16m"}
    async with run_pod(pod_directory, **_pod_options(index, **limits)) as (pod, client):
        await client.create_sandbox("box")
        end = (await client.run_code("box", "1", requirements=["huge"]))[-1]
        assert end["status"] == "install_failed"
        assert (await client.run_code("box", "1 + 1"))[-1]["status"] == "ok"
        _kill_egress(pod)
        end = (await client.run_code("box", "1", requirements=["hello"]))[-1]
        assert "container egress of this pod has ended" in end["reason"]
        assert (await client.run_code("box", "1 + 1"))[-1]["status"] == "ok"


def _kill_egress(pod: Pod) -> None:
    pod.containers["egress"].kill()
    pod.containers["egress"].wait()


async def test_a_pod_without_that_container_says_what_to_do(pod_directory: Path) -> None:
    async with run_pod(pod_directory) as (_, client):
        answer = await client.request("PUT", "/sandboxes/box", {"requirements": ["hello"]})
        assert answer.error == (400, "install_failed", "requirements")
        assert "add the container `egress`" in answer.json["error"]["message"]
        await client.create_sandbox("box")
