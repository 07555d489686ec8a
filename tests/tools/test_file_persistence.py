"""What of files outlives their sandbox: the executable bit, hidden names."""

import io
import tarfile
import zipfile

import pytest

from fumehood.containers.container_settings import IsolationScope
from fumehood.protocol.openai.container_objects import ContainerSpec
from fumehood.protocol.sandbox.sandbox_messages import ArchiveFormat
from fumehood.sandbox_client.local_server_provider import LocalServerProvider
from tests.support.interpreter_harness import SOMEBODY, InterpreterHarness

pytestmark = pytest.mark.asyncio(loop_scope="module")
SCRIPT = b"#!/bin/sh\necho ran\n"
LARGE = SCRIPT + b"# " + b"x" * (1 << 20)
FILES = {"run.sh": (SCRIPT, 0o755), "plain.txt": (b"text", 0o644), "bin/large.sh": (LARGE, 0o755)}
RUNS = (
    "import os, subprocess\n"
    "for name in ['run.sh', 'bin/large.sh', 'plain.txt']:\n"
    "    print(name, os.access(name, os.X_OK))\n"
    "print(subprocess.run(['./run.sh'], capture_output=True, text=True).stdout)"
)
RAN = "run.sh True\nbin/large.sh True\nplain.txt False\nran\n\n"


def archive(kind: ArchiveFormat) -> bytes:
    target = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(target, "w") as packed:
            for name, (content, mode) in FILES.items():
                info = zipfile.ZipInfo(name)
                info.external_attr = (0o100000 | mode) << 16
                packed.writestr(info, content)
    else:
        with tarfile.open(fileobj=target, mode="w:gz" if kind == "tar.gz" else "w") as packed:
            for name, (content, mode) in FILES.items():
                member = tarfile.TarInfo(name)
                member.size, member.mode = len(content), mode
                packed.addfile(member, io.BytesIO(content))
    return target.getvalue()


@pytest.mark.parametrize("isolation", ["container", "execution"])
@pytest.mark.parametrize("kind", ["tar", "tar.gz", "zip"])
async def test_unpacked_files_stay_executable(
    provider: LocalServerProvider, kind: ArchiveFormat, isolation: IsolationScope
) -> None:
    here = InterpreterHarness.with_isolation(provider, isolation)
    container = (await here.containers.create_container(SOMEBODY, ContainerSpec())).id
    await here.containers.unpack_archive(SOMEBODY, container, archive(kind), kind, "")
    assert (await here.run(RUNS, container=container)).execution.stdout == RAN
    lost = await here.run("import os; os._exit(1)", container=container)
    assert lost.item.status == "failed"
    assert (await here.run(RUNS, container=container)).execution.stdout == RAN


@pytest.mark.parametrize("isolation", ["container", "execution"])
async def test_files_that_code_makes_executable_stay_so(
    provider: LocalServerProvider, isolation: IsolationScope
) -> None:
    here = InterpreterHarness.with_isolation(provider, isolation)
    files = "for name in ['run.sh', 'bin/large.sh', 'plain.txt']: open(name, 'w').write('#!/bin/sh\\necho ran\\n')"
    await here.run(f"import os\nos.mkdir('bin')\n{files}")
    await here.run("import os\nos.chmod('run.sh', 0o755); os.chmod('bin/large.sh', 0o700)")
    await here.run("import os; os._exit(1)")
    assert (await here.run(RUNS)).execution.stdout == RAN
    await here.run("import os\nos.chmod('run.sh', 0o644)")
    await here.run("import os; os._exit(1)")
    assert (await here.run("import os; print(os.access('run.sh', os.X_OK))")).execution.stdout == "False\n"


@pytest.mark.parametrize("isolation", ["container", "execution"])
async def test_hidden_files_are_container_files(
    provider: LocalServerProvider, isolation: IsolationScope
) -> None:
    here = InterpreterHarness.with_isolation(provider, isolation)
    called = await here.run(
        "import os\nos.makedirs('.config/app'); open('.env', 'w').write('A=1'); "
        "open('.config/app/x.json', 'w').write('{}'); os.mkdir('__pycache__'); open('__pycache__/x.pyc', 'w').close()"
    )
    names = ["/mnt/data/.config/app/x.json", "/mnt/data/.env"]
    assert [file.path for file in called.execution.files] == names
    assert called.model_text == f"Files: {', '.join(names)}"
    records = await here.containers.list_files(SOMEBODY, called.item.container_id)
    assert sorted(record.path for record in records) == [".config/app/x.json", ".env", "__pycache__/x.pyc"]
    await here.run("import os; os._exit(1)")
    after = await here.run("print(open('.env').read(), open('.config/app/x.json').read())")
    assert after.execution.stdout == "A=1 {}\n"
