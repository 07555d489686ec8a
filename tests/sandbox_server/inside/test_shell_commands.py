"""Shell commands in a sandbox, beside Python calls."""

from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio

from fumehood.protocol.sandbox.sandbox_messages import ExecuteRequest, ExecutionEnd, Stderr, Stdout
from fumehood.sandbox_server.supervisor.in_process_sandbox import iter_events
from fumehood.sandbox_server.supervisor.sandbox_instance import SandboxInstance
from fumehood.sandbox_server.supervisor.supervisor import Supervisor
from tests.support.sandbox_runs import ExecutionOutcome, run, settings, start

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox() -> AsyncIterator[SandboxInstance]:
    async with Supervisor(settings(preload=())) as running:
        yield await running.create()


async def command(sandbox: SandboxInstance, text: str, timeout: float = 60) -> ExecutionOutcome:
    return await run(sandbox, text, timeout=timeout, language="shell")


@pytest.mark.parametrize(
    ("text", "code"),
    [("true", 0), ("false", 1), ("exit 77", 77), ("kill -9 $$", 137), ("no-such-program", 127), ("if", 2)],
)
async def test_exit_codes(sandbox: SandboxInstance, text: str, code: int) -> None:
    end = (await command(sandbox, text)).end
    assert (end.status, end.exit_code, end.reason) == ("error" if code else "ok", code, "")


async def test_two_streams_in_order(sandbox: SandboxInstance) -> None:
    events = (
        await command(sandbox, "echo a; sleep 0.1; echo b >&2; sleep 0.1; printf 'c\\xc3\\xa4\\xff'")
    ).events
    assert events[:-1] == [Stdout("a\n"), Stderr("b\n"), Stdout("cä\N{REPLACEMENT CHARACTER}")]
    assert isinstance(events[-1], ExecutionEnd)


async def test_output_comes_while_the_command_runs(sandbox: SandboxInstance) -> None:
    execution = start(
        sandbox, "echo first; while [ ! -e go ]; do sleep 0.01; done", timeout=60, language="shell"
    )
    events = iter_events(execution)
    assert await anext(events) == Stdout("first\n")
    await sandbox.files.write("go", b"")
    assert isinstance(await anext(events), ExecutionEnd)


async def test_code_and_commands_share_files_and_nothing_else(sandbox: SandboxInstance) -> None:
    await run(
        sandbox, "import os; os.chdir('/tmp'); os.environ['MINE'] = '1'; open('/mnt/data/a', 'w').write('a')"
    )
    outcome = await command(sandbox, "pwd; cat a; echo $MINE; cd /; export MINE=2; echo b > /mnt/data/b")
    assert outcome.stdout == "/mnt/data\na\n"
    assert (await command(sandbox, "pwd; echo $MINE")).stdout == "/mnt/data\n\n"
    assert (await run(sandbox, "os.getcwd(), os.environ['MINE'], open('/mnt/data/b').read()")).result == (
        "('/tmp', '1', 'b\\n')"
    )


async def test_the_environment_is_the_sandboxs(sandbox: SandboxInstance) -> None:
    """And what is on the path is what code would find."""
    outcome = await command(
        sandbox, "echo $HOME $USER $LANG; python -c 'import sys; print(sys.version_info[:2])'"
    )
    home, version = outcome.stdout.splitlines()
    assert home == "/home/user user C.UTF-8"
    assert version == (await run(sandbox, "import sys; print(sys.version_info[:2])")).stdout.strip()


async def test_a_program_that_ignores_its_children_does_not_change_exit_codes(
    sandbox: SandboxInstance,
) -> None:
    await run(sandbox, "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)")
    assert (await command(sandbox, "exit 5")).end.exit_code == 5


@pytest.mark.parametrize("text", ["echo \0", "true " + "x" * 200_000])
async def test_what_no_shell_can_be_given(sandbox: SandboxInstance, text: str) -> None:
    outcome = await command(sandbox, text)
    assert (outcome.end.status, outcome.end.exit_code) == ("error", 126)
    assert outcome.stderr.startswith("The command could not be started: ")


async def test_a_command_reads_nothing(sandbox: SandboxInstance) -> None:
    assert (await command(sandbox, "cat; read line || echo none")).stdout == "none\n"


async def test_what_runs_in_the_background_lives_on_and_belongs_to_no_call(sandbox: SandboxInstance) -> None:
    started = await command(
        sandbox, "(while [ ! -e stop ]; do sleep 0.01; done; echo over > ended) & echo $!"
    )
    assert started.end.status == "ok"
    assert (await command(sandbox, f"kill -0 {started.stdout}")).end.exit_code == 0
    outcome = await command(sandbox, "touch stop; while [ ! -e ended ]; do sleep 0.01; done; cat ended")
    assert outcome.stdout == "over\n"


async def test_a_time_out_keeps_the_variables(sandbox: SandboxInstance) -> None:
    await run(sandbox, "kept = 11")
    end = (await command(sandbox, "sleep 600", timeout=0.2)).end
    assert end.reason == "The command ran longer than 0.2 s and was interrupted."
    assert (end.status, end.exit_code) == ("timeout", -1)
    assert (await run(sandbox, "kept")).result == "11"


async def test_a_time_out_takes_along_what_has_moved_away_and_nothing_from_before(
    sandbox: SandboxInstance,
) -> None:
    await command(sandbox, "sleep 701 &")
    moving = "(setsid sleep 702 &); setsid -f sleep 703; nohup sleep 704 & x() { x & }; x; sleep 705"
    assert (await command(sandbox, moving, timeout=1)).end.status == "timeout"
    running = (await command(sandbox, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).stdout
    assert [number for number in range(701, 706) if f"sleep {number}" in running] == [701]


class _OlderRequest(msgspec.Struct, forbid_unknown_fields=True):
    """What a server of protocol 1 knew before there were commands."""

    code: str
    timeout_seconds: float = 60.0
    requirements: list[str] = []
    execution_id: str | None = None


async def test_an_older_server_is_asked_only_for_what_it_knows() -> None:
    asked = msgspec.json.encode(ExecuteRequest(code="1", execution_id="e", timeout_seconds=5))
    assert msgspec.json.decode(asked, type=_OlderRequest) == _OlderRequest("1", 5.0, [], "e")
    with pytest.raises(msgspec.ValidationError, match="language"):
        msgspec.json.decode(
            msgspec.json.encode(ExecuteRequest(code="ls", language="shell")), type=_OlderRequest
        )
    assert msgspec.json.encode(ExecuteRequest(code="1")) == b'{"code":"1"}'
    assert b'"language":"shell"' in msgspec.json.encode(ExecuteRequest(code="ls", language="shell"))
    assert msgspec.json.decode(b'{"code":"1"}', type=ExecuteRequest).language == "python"
