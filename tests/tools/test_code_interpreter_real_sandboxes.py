"""The code interpreter over real sandboxes: what models write, and every way to fail."""

import asyncio
import base64
import struct
from collections.abc import AsyncGenerator, Callable

import pytest
import pytest_asyncio

from fumehood.containers.container_settings import IsolationScope
from fumehood.interfaces import SandboxProvider, SandboxRef, ToolCallResult
from fumehood.protocol.openai.items import CodeInterpreterImage
from fumehood.sandbox_client.local_server_provider import LocalServerProvider
from tests.support.interpreter_harness import (
    InterpreterHarness,
    encode_arguments,
    local_server_settings,
    outline,
)
from tests.support.package_index import FakePackageIndex, wheel
from tests.support.sandbox_runs import has_cgroups

pytestmark = pytest.mark.asyncio(loop_scope="module")
DEAF = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
MEMFD = "import os\nfd = os.memfd_create('m')\nblock = bytes(1 << 20)\nwhile True: os.write(fd, block)"

type Make = Callable[..., InterpreterHarness]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def provider() -> AsyncGenerator[SandboxProvider]:
    with FakePackageIndex() as index:
        index.add(wheel("greeting", "1.0", {"greeting.py": "text = 'hello from a wheel'"}))
        settings = local_server_settings(pool=2, environment={"FUMEHOOD_INDEX_URL": index.url})
        async with LocalServerProvider(settings) as provider:
            yield provider


@pytest.fixture
def make(provider: SandboxProvider) -> Make:
    def interpreter(seconds: float = 60, isolation: IsolationScope = "container") -> InterpreterHarness:
        return InterpreterHarness.with_isolation(provider, isolation, execution_timeout=seconds)

    return interpreter


# --- what models write ------------------------------------------------------------------------------------


async def test_variables_and_files_are_there_in_the_next_turn(make: Make) -> None:
    interpreter = make()
    first = await interpreter.run("x = 20\nopen('notes.txt', 'w').write('kept')\nprint('done')")
    second = await interpreter.run("x + 1, open('/mnt/data/notes.txt').read()")
    assert first.model_text == "done\nFiles: /mnt/data/notes.txt"
    assert second.logs == "(21, 'kept')"
    assert second.item.container_id == first.item.container_id
    assert second.result.files == []


async def test_a_plot_with_matplotlib(make: Make) -> None:
    interpreter = make()
    code = """
import matplotlib.pyplot as plt
plt.plot([1, 2, 3])
plt.savefig('saved.png')
plt.title('changed')
plt.show()
print('plotted')
"""
    called = await interpreter.run(code, takes_images=True)
    shown, saved = [
        output for output in called.item.outputs or [] if isinstance(output, CodeInterpreterImage)
    ]
    for image in (shown, saved):
        kind, _, data = image.url.partition(",")
        assert kind == "data:image/png;base64"
        width, height = struct.unpack(">II", base64.b64decode(data)[16:24])
        assert width > 100
        assert height > 100
    assert called.model_text == "[figure 1]\nplotted\nFiles: /mnt/data/saved.png, /mnt/data/figure.png"
    assert called.result.exchange.images == (shown.url, saved.url)
    (figure,) = [file for file in called.result.files if file.filename == "figure.png"]
    assert base64.b64decode(shown.url.partition(",")[2]) == await interpreter.read_file(figure)
    # The figure is a file beside the others for the code as well, and nobody takes it for news.
    after = await interpreter.run("import os\nsorted(os.listdir('/mnt/data'))")
    assert after.logs == "['figure.png', 'saved.png']"
    assert after.result.files == []


@pytest.mark.parametrize(
    "code",
    [
        "plt.savefig('saved.png')\nplt.show()",
        "plt.savefig('saved.png')",
        "plt.savefig('saved.png', dpi=200)\nplt.gcf()",
        "plt.gcf().savefig('saved.jpg')\nplt.show()",
        "plt.imshow(np.random.rand(900, 900, 3))\nplt.savefig('saved.png', dpi=300)",
    ],
    ids=["shown", "left open", "last expression", "jpeg", "large"],
)
async def test_an_unchanged_figure_that_was_saved_is_delivered_once(make: Make, code: str) -> None:
    code = f"import numpy as np, matplotlib.pyplot as plt\nplt.plot([1, 2, 3])\n{code}"
    called = await make().run(code, takes_images=True)
    (image,) = [output for output in called.item.outputs or [] if isinstance(output, CodeInterpreterImage)]
    (file,) = called.execution.files
    assert file.filename.startswith("saved.")
    assert "figure." not in called.model_text
    if "imshow" in code:
        assert image.url.endswith(f"/files/{file.file_id}/content")
    else:
        assert called.result.exchange.images == (image.url,)


async def test_figures_that_are_saved_under_one_name_are_all_shown(make: Make) -> None:
    called = await make().run(
        "import matplotlib.pyplot as plt\nfor n in (1, 2, 3):\n"
        "    plt.figure(); plt.plot([n, 2 * n, 0]); plt.title(str(n)); plt.savefig('same.png'); plt.show()"
    )
    images = [output.url for output in called.item.outputs or [] if isinstance(output, CodeInterpreterImage)]
    assert len(set(images)) == len(images) == 3


async def test_tables_and_expressions_as_in_a_notebook(make: Make) -> None:
    called = await make().run(
        "import pandas as pd, sys\nframe = pd.DataFrame({'a': [1, 2]})\n"
        "print('out', flush=True)\nprint('err', file=sys.stderr, flush=True)\ndisplay(frame)\nframe.a.sum()"
    )
    assert called.logs == "out\nerr\n   a\n0  1\n1  2\nnp.int64(3)"
    assert called.item.status == "completed"


async def test_python_that_raises_is_a_completed_call(make: Make) -> None:
    called = await make().run("def f():\n    return 1 / 0\nf()")
    assert called.item.status == "completed"
    assert called.execution.exit_code == 1
    assert called.model_text.endswith("ZeroDivisionError: division by zero\nExit code: 1")
    assert "return 1 / 0" in called.logs
    assert called.execution.stderr == called.logs


async def test_sys_exit(make: Make) -> None:
    interpreter = make()
    code = (
        "import sys\nx = 5\nprint('out', flush=True)\nprint('err', file=sys.stderr, flush=True)\nsys.exit(3)"
    )
    called = await interpreter.run(code)
    assert called.item.status == "completed"
    assert called.model_text == "out\nerr\nExit code: 3"
    execution = called.execution
    assert (execution.stdout, execution.stderr, execution.exit_code) == ("out\n", "err\n", 3)
    assert (await interpreter.run("x")).logs == "5"


async def test_packages_are_installed_first(make: Make) -> None:
    called = await make().run("import greeting\nprint(greeting.text)", "greeting")
    assert called.logs == "installing greeting\ninstalled greeting 1.0\nhello from a wheel\n"


async def test_calls_at_once_share_a_container(make: Make) -> None:
    interpreter = make()
    codes = [f"open('{number}.txt', 'w').write('x')\nprint({number})" for number in range(3)]
    done = await interpreter.call_in_parallel(await interpreter.configure(), *codes)
    outputs = [called.model_text for called in done]
    assert outputs == [f"{number}\nFiles: /mnt/data/{number}.txt" for number in range(3)]
    assert len(await interpreter.store.find_containers()) == 1


# --- ways to fail -----------------------------------------------------------------------------------------


async def test_a_time_out_that_stops_keeps_everything(make: Make) -> None:
    interpreter = make(seconds=0.5)
    await interpreter.run("x = 20")
    called = await interpreter.run("open('part.txt', 'w').write('some')\nimport time\ntime.sleep(60)")
    assert (called.item.status, called.execution.exit_code) == ("failed", -1)
    assert outline(called.events)[-2:] == ["ci.failed", "output_item.done failed"]
    assert "ran longer than 0.5 s" in called.model_text
    assert "Variables and files are kept." in called.model_text
    assert [file.filename for file in called.result.files] == ["part.txt"]
    after = await interpreter.run("x + 1")
    assert after.model_text == "21"


async def test_a_deaf_loop_is_killed_and_the_next_call_has_the_files(make: Make) -> None:
    interpreter = make(seconds=0.5)
    await interpreter.run(
        "x = 20\nopen('kept.txt', 'w').write('kept')\nopen('gone.txt', 'w').write('')\nNone"
    )
    await interpreter.run("import os\nos.remove('gone.txt')")
    called = await interpreter.run(f"open('lost.txt', 'w').write('lost')\n{DEAF}")
    assert (called.item.status, called.execution.exit_code) == ("failed", -1)
    assert "was killed" in called.model_text
    assert "Variables are gone" in called.model_text
    assert "with the files of earlier calls" in called.model_text
    after = await interpreter.run("import os\nprint(sorted(os.listdir()), 'x' in globals())")
    assert after.item.status == "completed"
    assert after.item.container_id == called.item.container_id
    assert after.model_text == (
        "A new sandbox: variables, imports and packages of earlier calls are gone, files in /mnt/data are there.\n"
        "['kept.txt'] False"
    )
    assert (await interpreter.run("open('kept.txt').read()")).model_text == "'kept'"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        pytest.param(
            MEMFD,
            "ran out of memory (1g)",
            marks=pytest.mark.skipif(not has_cgroups(), reason="memory cannot be bounded here"),
        ),
        ("import os\nos._exit(1)", "lost"),
    ],
    ids=["out of memory", "interpreter dies"],
)
async def test_a_sandbox_that_ends_is_replaced(make: Make, code: str, reason: str) -> None:
    interpreter = make()
    called = await interpreter.run(code)
    assert (called.item.status, called.execution.exit_code) == ("failed", -1)
    assert reason in called.model_text
    assert (await interpreter.run("print('again')")).logs.endswith("again\n")


async def test_a_package_that_is_not_there(make: Make) -> None:
    interpreter = make()
    await interpreter.run("x = 20")
    called = await interpreter.run("print('never')", "no-such-package-anywhere")
    assert (called.item.status, called.execution.exit_code) == ("failed", -1)
    assert "no-such-package-anywhere" in called.model_text
    assert "never" not in called.logs
    assert (await interpreter.run("x")).model_text == "20"


async def test_a_call_that_is_stopped_frees_the_sandbox(make: Make) -> None:
    interpreter = make()
    await interpreter.run("x = 20")
    offered = await interpreter.configure()
    session = offered.start_call(interpreter.make_context())
    session.feed([encode_arguments("open('begun', 'w').close()\nimport time\ntime.sleep(600)")])
    steps = session.run()
    for _ in range(2):  # the code is written, the code runs
        assert not isinstance(await anext(steps), ToolCallResult)
    running = asyncio.ensure_future(anext(steps))
    (record,) = await interpreter.store.find_containers()
    sandbox = await interpreter.provider.attach(SandboxRef(record.sandbox, record.address))
    while "begun" not in [file.path for file in (await sandbox.list_files()).files]:
        await asyncio.sleep(0.01)  # nothing else tells that the code has come so far
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await steps.aclose()
    assert session.abort("it was cancelled").exchange.output.startswith("The call was not finished")
    assert (await interpreter.run("x")).logs == "20"


# --- a sandbox for every call -----------------------------------------------------------------------------


async def sandboxes_of(interpreter: InterpreterHarness) -> list[str]:
    own = [record.id for record in await interpreter.store.find_containers()]
    return [one.id for one in await interpreter.provider.list_sandboxes() if one.id.rpartition("-")[0] in own]


async def test_every_call_alone(make: Make) -> None:
    interpreter = make(isolation="execution")
    first = await interpreter.run("x = 20\nopen('notes.txt', 'w').write('kept')\nNone")
    assert await sandboxes_of(interpreter) == []
    second = await interpreter.run("open('notes.txt').read(), 'x' in globals()")
    assert second.item.container_id == first.item.container_id
    assert second.model_text == "('kept', False)"
    deaf = make(0.5, "execution")
    failed = await deaf.run(DEAF)
    assert failed.item.status == "failed"
    assert failed.model_text.endswith(
        "The next call begins in a new sandbox, without variables, with the files of earlier calls.\nExit code: -1"
    )
    assert await sandboxes_of(deaf) == []


@pytest.mark.parametrize(
    "code",
    [
        "open('part.txt', 'w').write('some')\nimport time\ntime.sleep(60)",
        f"open('part.txt', 'w').write('some')\n{DEAF}",
        "open('part.txt', 'w').write('some')\nimport os\nos.kill(os.getpid(), 9)",
    ],
    ids=["interrupted", "killed", "lost"],
)
async def test_no_message_promises_variables_where_every_call_is_alone(make: Make, code: str) -> None:
    interpreter = make(0.5, "execution")
    called = await interpreter.run(code)
    assert called.item.status == "failed"
    kept = "The code ran longer than 0.5 s and was interrupted." in called.model_text
    promise = (
        "Files are kept; the next call begins in a new sandbox, without variables."
        if kept
        else "The next call begins in a new sandbox, without variables, with the files of earlier calls."
    )
    assert promise in called.model_text
    assert called.model_text.lower().count("variables") == 1
    found = await interpreter.run("import os\nos.path.exists('part.txt')")
    assert found.logs == str(kept)
    assert await sandboxes_of(interpreter) == []


async def test_parallel_calls_alone_each_have_a_sandbox(make: Make) -> None:
    interpreter = make(isolation="execution")
    codes = [f"open('{number}.txt', 'w').write('{number}')\nNone" for number in range(3)]
    done = await interpreter.call_in_parallel(await interpreter.configure(), *codes)
    outputs = [called.model_text for called in done]
    assert outputs == [f"Files: /mnt/data/{number}.txt" for number in range(3)]
    interpreter.segments.clear()
    named = (await interpreter.store.find_containers())[0].id
    merged = await interpreter.run("import os\nsorted(os.listdir())", container=named)
    assert merged.model_text == "['0.txt', '1.txt', '2.txt']"
    assert await sandboxes_of(interpreter) == []


@pytest.mark.slow
async def test_a_hundred_calls_leave_no_sandbox(make: Make) -> None:
    interpreter = make(0.5, "execution")
    codes = ["print(1)", "1 / 0", "import os\nos._exit(1)", "open('x', 'a').write('x')\nNone"]
    ends = [(await interpreter.run(codes[number % len(codes)])).execution.exit_code for number in range(100)]
    assert ends == [0, 1, -1, 0] * 25
    assert len(await interpreter.store.find_containers()) == 1
    assert await sandboxes_of(interpreter) == []
